"""Replicas of all ranks of a process as one batched model: `workers: stacked`.

Parameters of N replicas lie in tensors of N rows, and each replica's parameters are rows of them, so that strategies,
codecs and checkpoints find what they always do. Ranks bring their batches together; one of them computes all gradients
in one vectorised pass (`torch.vmap` over `torch.func.functional_call`), and likewise all updates of an optimizer that
works element by element. Where a strategy leaves the update to the optimizer, ranks bring all steps up to its next
exchange at once, averages of gradients included. A rank that finds no other to wait for continues with the present
ones, so ranks that do not step together are served as well. Requests to the kernel are the same, and so is virtual
time, bit for bit; losses differ from those of single replicas by rounding.
"""

from __future__ import annotations

import functools
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar, cast

import torch
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from exogym_core.communicator.exchange import reduce_tensors
from exogym_core.data.batches import autocast_to, batch_layout, device_of, joined_batch, move_batch
from exogym_core.data.samples import steps_together
from exogym_core.learner import LocalStep, TorchLearner, loss_and_count
from exogym_core.run.cuda_graphs import GraphedPass
from exogym_core.run.snapshots import refuse_other_parameters
from exogym_core.strategy.parts.flat import unflatten
from exogym_core.strategy.parts.muon import Lion
from exogym_core.workers.failures import own_frames
from netsim.errors import InputError, NetsimError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from torch import Tensor, nn
    from torch.optim import Optimizer

    from exogym_core.communicator.base import Communicator
    from exogym_core.communicator.simulated.communicator import Parking
    from exogym_core.cost.compute import StepDurations
    from exogym_core.data.samples import RankBatches, Source, StepSamples
    from exogym_core.strategy.base import Strategy

__all__ = ["Stack", "StackedLearner", "StackingError", "backward_order"]

_ELEMENTWISE = (
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    Lion,
    torch.optim.RMSprop,
    torch.optim.Adagrad,
)


class StackingError(InputError):
    """Replicas of a model cannot be one batched model; the message says why."""


Item = TypeVar("Item")
Result = TypeVar("Result")


class _SharedWork(Generic[Item, Result]):
    """Work of several ranks, computed for all that have arrived by the rank that continues first.

    Args:
        turns: of the ranks.
        work: from items to results, by rank in ascending order.
    """

    def __init__(self, turns: Parking, work: Callable[[dict[int, Item]], dict[int, Result]]) -> None:
        self._turns, self._work = turns, work
        self._items: dict[int, Item] = {}
        self._results: dict[int, Result] = {}

    def attend(self, rank: int, item: Item) -> Result:
        """Result of this rank's item."""
        self._items[rank] = item
        self._turns.park(rank)
        if rank in self._items:
            items, self._items = dict(sorted(self._items.items())), {}
            self._results |= self._work(items)
            self._turns.unpark(items)
        return self._results.pop(rank)


class _Ahead(NamedTuple):
    """Steps that a rank may take at once.

    Attributes:
        optimizer: that updates its replica.
        data: its samples.
        num_steps: how many.
        averages: gradients are averaged over all ranks.
        max_norm: of gradients that are clipped; None: they are not.
    """

    optimizer: Optimizer
    data: Source
    num_steps: int
    averages: bool
    max_norm: float | None


class Stack:
    """Parameters and optimizer states of N replicas, and their batched steps.

    Args:
        model: one replica, on its device; its buffers are all replicas'.
        num_replicas: N.
        precision: of forward passes, as `autocast`.
        turns: of the ranks that train the replicas.
        cuda_graphs: passes become CUDA graphs.
    """

    def __init__(
        self,
        model: nn.Module,
        num_replicas: int,
        precision: str | None,
        turns: Parking,
        cuda_graphs: bool = False,
    ) -> None:
        self._model, self._precision, self._device = model, precision, device_of(model)
        self._values = {
            name: value.detach().new_empty(num_replicas, *value.shape)
            for name, value in model.named_parameters()
        }
        self._trained = {name for name, value in model.named_parameters() if value.requires_grad}
        self._rows: dict[int, dict[str, Tensor]] = {}  # of each rank's replica, by parameter
        self._gradients: dict[str, Tensor] = {}
        self._shadow: Optimizer | None = None
        self._fuses = False  # an update is one kernel a parameter
        self._columns: list[tuple[str, Tensor, list[Tensor]]] = []  # trained ones: name, rows, replicas' own
        self._batches = _SharedWork(turns, self._gradients_of)
        self._updates = _SharedWork(turns, self._update)
        self._runs = _SharedWork(turns, self._run_ahead)
        self._of_all: Callable[[Any], tuple[Tensor, dict[str, Tensor]]] = self._computed
        if cuda_graphs:
            self._of_all = GraphedPass(self._computed, model.buffers(), self._device)
        self._num_replicas = num_replicas

    def adopt(self, rank: int, model: nn.Module) -> None:
        """Make the parameters of a rank's replica rows of the stack."""
        self._rows[rank] = dict(model.named_parameters())
        self._return_rows([rank])

    def gradients(self, rank: int, batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss of a rank's batch, and the gradients of its trained parameters by name."""
        return self._batches.attend(rank, self._moved(batch))

    def run_ahead(self, rank: int, ahead: _Ahead) -> list[LocalStep]:
        """Take steps of all replicas at once; returns this rank's, none where others do not come."""
        return self._runs.attend(rank, ahead)

    def take_over(self, rank: int, optimizer: Optimizer) -> bool:
        """Have `optimizer.step` update with the other ranks', if it works element by element on all of the replica.

        Returns whether it does.
        """
        parameters = [each for group in optimizer.param_groups for each in group["params"]]
        trained = [value for name, value in self._rows[rank].items() if name in self._trained]
        if type(optimizer) not in _ELEMENTWISE or list(map(id, parameters)) != list(map(id, trained)):
            return False
        own_step = optimizer.step

        @functools.wraps(own_step)  # schedulers look for their mark on it
        def step(closure: None = None) -> None:
            if not self._updates.attend(rank, optimizer):
                own_step()
                return
            if not _has_hooks(optimizer):
                optimizer._opt_called = True  # type: ignore[attr-defined] # a scheduler looks for it
                return
            gradients = [each.grad for each in parameters]
            for each in parameters:
                each.grad = None
            own_step()  # updates nothing: for its hooks
            for each, gradient in zip(parameters, gradients, strict=True):
                each.grad = gradient

        optimizer.step = step  # type: ignore[method-assign, assignment]
        return True

    @torch.no_grad()
    def _return_rows(self, ranks: Sequence[int]) -> None:
        """Copy parameters that were given another storage back into the stack."""
        for name, values in self._values.items():
            parameters = [self._rows[rank][name] for rank in ranks]
            if len(ranks) == len(values) and _are_rows(parameters, values):
                continue
            for rank, parameter in zip(ranks, parameters, strict=True):
                row = values[rank]
                if parameter.data_ptr() != row.data_ptr():
                    row.copy_(parameter.detach())
                    parameter.data = row

    # --- gradients -----------------------------------------------------------------------------------------

    def _gradients_of(self, batches: dict[int, Any]) -> dict[int, tuple[Tensor, dict[str, Tensor]]]:
        self._return_rows(list(batches))
        found: dict[int, tuple[Tensor, dict[str, Tensor]]] = {}
        for ranks, losses in self._vectorised(batches):
            values, names = losses.unbind(), list(self._gradients)
            rows = zip(*(gradient.unbind() for gradient in self._gradients.values()), strict=True)
            for rank, value, row in zip(ranks, values, rows, strict=True):
                found[rank] = value, dict(zip(names, row, strict=True))
        return found

    def _vectorised(self, batches: dict[int, Any]) -> Iterator[tuple[list[int], Tensor]]:
        """Compute gradients, in turn of ranks whose batches have one layout: yields these and their losses."""
        alike: dict[object, list[int]] = {}
        for rank, batch in batches.items():
            alike.setdefault(batch_layout(batch), []).append(rank)
        for ranks in alike.values():
            yield ranks, self._alike_losses(ranks, joined_batch([batches[rank] for rank in ranks], _stacked))

    def _moved(self, batch: Any) -> Any:
        return batch if self._device.type == "cpu" else move_batch(batch, self._device)

    def _alike_losses(self, ranks: list[int], batch: Any) -> Tensor:
        are_all = len(ranks) == self._num_replicas
        losses, self._gradients = self._of_all(batch) if are_all else self._computed(batch, ranks)
        return losses

    def _computed(self, batch: Any, ranks: list[int] | None = None) -> tuple[Tensor, dict[str, Tensor]]:
        """Losses and gradients of these ranks' replicas; None: of all."""
        leaves = {
            name: (values if ranks is None else values[ranks]).detach().requires_grad_(name in self._trained)
            for name, values in self._values.items()
        }
        buffers = list(self._model.buffers())
        versions = _versions(buffers)
        try:
            losses = batched_losses(self._model, leaves, batch, self._precision)
            losses.sum().backward()  # type: ignore[no-untyped-call]
        except NetsimError:
            raise
        except Exception as error:
            raise _later_pass(_reason(error), error) from None
        if _versions(self._model.buffers()) != versions:
            raise _later_pass("it changes buffers, which replicas share")
        return losses.detach(), {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}

    # --- updates -------------------------------------------------------------------------------------------

    def _update(self, optimizers: dict[int, Optimizer]) -> dict[int, bool]:
        """Update all replicas at once; False for each where they do not step alike."""
        done = self._step_alike(list(optimizers.values())) and self._update_alike(list(optimizers.values()))
        return dict.fromkeys(optimizers, done)

    def _step_alike(self, optimizers: Sequence[Optimizer]) -> bool:
        """True if these are all replicas' optimizers, with equal options."""
        options = _options(optimizers[0])
        return len(optimizers) == len(self._rows) and all(
            _options(each) == options for each in optimizers[1:]
        )

    def _update_alike(self, optimizers: Sequence[Optimizer]) -> bool:
        gradients = [[value.grad for value in column] for _, _, column in self._trained_columns()]
        if any(each is None or each.is_sparse for column in gradients for each in column):
            return False
        with self._brought_together(optimizers) as update:
            if update is None:
                return False
            for (name, values, _), own in zip(self._columns, gradients, strict=True):
                stacked = self._gradients.get(name)
                if stacked is None or not _are_rows(own, stacked):  # type: ignore[arg-type]
                    stacked = torch.stack(own)  # type: ignore[arg-type]
                values.grad = stacked
            update()
        return True

    def _trained_columns(self) -> list[tuple[str, Tensor, list[Tensor]]]:
        if not self._columns:
            replicas = [self._rows[rank] for rank in sorted(self._rows)]
            self._columns = [
                (name, values, [replica[name] for replica in replicas])
                for name, values in self._values.items()
                if name in self._trained
            ]
        return self._columns

    @contextmanager
    def _brought_together(self, optimizers: Sequence[Optimizer]) -> Iterator[Callable[[], object] | None]:
        """Yield a function that updates all replicas by the stacked gradients, None where their states differ.

        Their optimizers get the new states after the block.
        """
        columns = self._trained_columns()
        self._return_rows(sorted(self._rows))
        if self._shadow is None:
            leaves = iter([values.requires_grad_() for _, values, _ in columns])
            groups = [
                {**group, "params": [next(leaves) for _ in group["params"]]}
                for group in optimizers[0].param_groups
            ]
            self._shadow = type(optimizers[0])(groups)  # type: ignore[call-arg]
            self._fuses = _can_fuse(self._shadow)
        shadow = self._shadow
        for group, own in zip(shadow.param_groups, optimizers[0].param_groups, strict=True):
            group.update({key: value for key, value in own.items() if key != "params"})
            if self._fuses:
                group["fused"] = True
        states = [
            [optimizer.state[own] for optimizer, own in zip(optimizers, column, strict=True)]
            for _, _, column in columns
        ]
        gathered = [
            _gather_states(shadow.state[values], own)
            for (_, values, _), own in zip(columns, states, strict=True)
        ]
        if not all(gathered):
            yield None
            return
        yield shadow.step
        for (_, values, _), own_states in zip(columns, states, strict=True):
            _spread_states(shadow.state[values], own_states)
            values.grad = None

    # --- several steps at once -----------------------------------------------------------------------------

    def _run_ahead(self, asked: dict[int, _Ahead]) -> dict[int, list[LocalStep]]:
        taken: dict[int, list[LocalStep]] = {rank: [] for rank in asked}
        optimizers = [each.optimizer for each in asked.values()]
        kinds = {each[2:] for each in asked.values()}
        # The first step of a run shows which parameters get gradients.
        is_ready = self._gradients.keys() == self._trained and not any(map(_has_hooks, optimizers))
        if not is_ready or len(kinds) > 1 or not self._step_alike(optimizers):
            return taken
        num_steps, averages, max_norm = kinds.pop()
        with self._brought_together(optimizers) as update:
            if update is None:
                return taken
            for steps, batches in steps_together([each.data for each in asked.values()], num_steps):
                for rank, loss in self._differentiated(self._passes(steps, batches)):
                    taken[rank].append(LocalStep(steps[rank], loss, self._gradients.keys()))
                if averages:
                    self._average(steps)
                if max_norm is not None:
                    self._clip(max_norm)
                update()
            for _, values, column in self._columns:  # of the last step, which is ended by each rank
                rows = [None] * len(column) if values.grad is None else values.grad.unbind()
                for own, gradient in zip(column, rows, strict=True):
                    own.grad = gradient
        return taken

    def _passes(
        self, steps: Sequence[StepSamples], batches: Sequence[RankBatches]
    ) -> Iterator[tuple[list[int], Tensor]]:
        """Compute all gradients, of ranks with batches of one layout at a time: yields these and their losses."""
        if not batches:
            own = {rank: step.micro_batches[0][0] for rank, step in enumerate(steps)}
            yield from self._vectorised(self._moved(own))
        for each in batches:
            ranks = list(each.ranks)
            yield ranks, self._alike_losses(ranks, self._moved(each.batch))

    def _differentiated(self, passes: Iterable[tuple[list[int], Tensor]]) -> list[tuple[int, float]]:
        """Leave the gradients of all replicas in the stack's `.grad`, pass by pass; each rank and its loss."""
        losses: list[tuple[int, float]] = []
        for ranks, own in passes:
            for name, values, _ in self._columns:
                gradient = self._gradients.get(name)  # a pass may leave a parameter out
                if len(ranks) == len(values):
                    values.grad = gradient
                    continue
                if gradient is None:
                    raise _later_pass(f"it leaves {name!r} out, with batches of several sizes")
                if not losses:
                    values.grad = torch.empty_like(values)
                cast("Tensor", values.grad)[ranks] = gradient
            losses += zip(ranks, own.tolist(), strict=True)
        return losses

    def _average(self, steps: Sequence[StepSamples]) -> None:
        """Set the gradients of all replicas to their mean, added in rank order, weighed by the samples of `steps`."""
        columns = [values for _, values, _ in self._columns if values.grad is not None]
        rows = torch.cat([_flat_rows(values.grad) for values in columns], 1)
        if steps[0].samples_of:
            weights = [step.samples * len(steps) / step.total_samples for step in steps]
            rows *= torch.tensor(weights, dtype=rows.dtype, device=rows.device)[:, None]
        mean = reduce_tensors(rows.unbind(), "avg")
        for values, piece in zip(columns, unflatten(mean, [values[0] for values in columns]), strict=True):
            values.grad = piece.expand_as(values).contiguous()

    def _clip(self, max_norm: float) -> None:
        """Clip the norm of each replica's gradients, as torch's `clip_grad_norm_`."""
        columns = [values for _, values, _ in self._columns if values.grad is not None]
        rows = [_flat_rows(values.grad) for values in columns]
        norms = torch.stack([torch.linalg.vector_norm(each, dim=1) for each in rows], 1)
        scales = (max_norm / (torch.linalg.vector_norm(norms, dim=1) + 1e-6)).clamp(max=1.0)
        for values, each in zip(columns, rows, strict=True):
            values.grad = (each * scales[:, None]).view_as(values)


def _flat_rows(gradient: Tensor | None) -> Tensor:
    """The gradient of each replica as a row, of a parameter of any shape."""
    assert gradient is not None
    return gradient.reshape(len(gradient), -1)


_COUNT = "step"
"""Tensor of an optimizer's state that is no row: a parameter without dimensions has others like it."""


def _are_rows(tensors: Sequence[Tensor], stacked: Tensor) -> bool:
    """True if `tensors` are the rows of `stacked`, in order."""
    start, size = stacked.data_ptr(), stacked.stride(0) * stacked.element_size()
    return [each.data_ptr() for each in tensors] == [*range(start, start + len(stacked) * size, size)]


def _gather_states(together: dict[str, Any], states: Sequence[dict[str, Any]]) -> bool:
    """Bring the states that belong to one parameter of all replicas together; False where steps differ."""
    if any(state.keys() != states[0].keys() for state in states):
        return False
    for key in [key for key in together if key not in states[0]]:
        del together[key]
    for key, first in states[0].items():
        own = [state[key] for state in states]
        if not isinstance(first, torch.Tensor):
            if own != [first] * len(own):
                return False
            together[key] = first
        elif key == _COUNT:
            if len({each.item() for each in own}) > 1:
                return False
            together[key] = first.clone()
        elif key not in together or not _are_rows(own, together[key]):
            together[key] = torch.stack(own)
            for state, row in zip(states, together[key], strict=True):
                state[key] = row
    return True


def _spread_states(together: dict[str, Any], states: Sequence[dict[str, Any]]) -> None:
    """Give each replica's optimizer its row of a state that is new, and the count of steps."""
    for key, value in together.items():
        is_tensor = isinstance(value, torch.Tensor)
        is_count = is_tensor and key == _COUNT
        if key in states[0] and is_count:
            torch._foreach_copy_([state[key] for state in states], [value] * len(states))
        elif key not in states[0] or not is_tensor:
            for row, state in enumerate(states):
                state[key] = value.clone() if is_count else value[row] if is_tensor else value


_FUSED = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad)
# Others are rounded after each operation where updates are not fused.
_FUSED_DTYPES = (torch.float32, torch.float64)


def _can_fuse(optimizer: Optimizer) -> bool:
    """True if torch can update each parameter by one kernel, on the CPU, and the user leaves the choice to it."""
    return type(optimizer) in _FUSED and all(
        not any(group.get(name) for name in ("foreach", "differentiable", "capturable"))
        and group.get("fused") is None
        and all(each.is_cpu and each.dtype in _FUSED_DTYPES for each in group["params"])
        for group in optimizer.param_groups
    )


def _has_hooks(optimizer: Optimizer) -> bool:
    """True if something is called before or after the optimizer's steps."""
    hooks = (optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks)
    return any((*hooks, _global_optimizer_pre_hooks, _global_optimizer_post_hooks))


def _options(optimizer: Optimizer) -> list[dict[str, Any]]:
    return [
        {key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups
    ]


# --- batches ---------------------------------------------------------------------------------------------------


def batched_losses(
    model: nn.Module, parameters: Mapping[str, Tensor], batch: Any, precision: str | None
) -> Tensor:
    """Losses of N replicas of `model`, shape (N,).

    Args:
        model: the structure; its buffers are all replicas'.
        parameters: by name, with N rows.
        batch: of all replicas, its tensors with N rows.
        precision: as `autocast`.
    """
    device = next(iter(parameters.values())).device

    # The memory-efficient kernel of CUDA refuses batches of batches, and the CPU's takes one replica at a time.
    kernels = [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH] if device.type == "cuda" else [SDPBackend.MATH]

    def loss(own: dict[str, Tensor], samples: Any) -> Tensor:
        # The model has its own parameters again after the call.
        hook = model.register_forward_hook(lambda *_: refuse_other_parameters(model, own))
        with autocast_to(precision, device), sdpa_kernel(kernels), hook:
            return loss_and_count(functional_call(model, own, (samples,)), "workers: stacked")[0].reshape(())

    losses: Tensor = torch.vmap(loss)(dict(parameters), batch)
    return losses


def _stacked(parts: Sequence[Any]) -> Any:
    """Tensors in one place of batches as one, with a row for each."""
    return torch.stack(list(parts)) if isinstance(parts[0], torch.Tensor) else parts[0]


def backward_order(model: nn.Module, batch: Any, precision: str | None) -> list[str]:
    """Names of parameters as their gradients come in a backward pass, after a trial with two stacked replicas.

    Args:
        model: a copy that may be changed, on its device.
        batch: any of its batches.
        precision: as `autocast`. Gradients are compared without it, since its rounding hides other computations.

    Raises:
        StackingError: they give other gradients than single ones, or none.
    """
    own = {name: value for name, value in model.named_parameters() if value.requires_grad}
    order: list[str] = []
    for name, value in own.items():
        value.register_post_accumulate_grad_hook(lambda _, name=name: order.append(name))  # type: ignore[no-untyped-call]
    parts: list[Any] = []
    joined_batch([batch], parts.extend)
    if odd := [type(part).__name__ for part in parts if not isinstance(part, torch.Tensor)]:
        raise StackingError(f"its batches have a part of type {odd[0]}, which is no tensor")
    model.train()
    for each in dict.fromkeys((precision, None)):
        model.zero_grad()
        parameters = _stacked_gradients(model, batch, each)
    pairs = {name: (value.grad, parameters[name].grad) for name, value in own.items()}
    if odd := [name for name, (single, double) in pairs.items() if (single is None) != (double is None)]:
        raise StackingError(f"either single or stacked replicas have no gradient of {odd[0]}")
    _compare(
        {name: pair for name, pair in pairs.items() if pair[0] is not None and pair[0].numel()}  # type: ignore[misc]
    )
    return list(dict.fromkeys(order))


def _stacked_gradients(model: nn.Module, batch: Any, precision: str | None) -> dict[str, Tensor]:
    """Parameters of two equal replicas with their gradients, after the same pass of the model by itself."""
    buffers, drawn = _versions(model.buffers()), torch.get_rng_state()
    with autocast_to(precision, device_of(model)):
        output = model(batch)
    loss, count = loss_and_count(output, "workers: stacked", with_gradient=True)
    if count is not None:
        raise StackingError("it returns a count with its loss")
    loss.backward()  # type: ignore[no-untyped-call]
    if _versions(model.buffers()) != buffers:
        raise StackingError("its buffers change in training, as those of batch normalisation do")
    if not torch.equal(drawn, torch.get_rng_state()):
        raise StackingError("its forward pass draws random numbers, as dropout does")
    for name, value in model.named_parameters():
        if value.grad is not None and value.grad.is_sparse:
            raise StackingError(f"the gradient of {name} is sparse")
    parameters = {
        name: torch.stack([value.detach()] * 2).requires_grad_(value.requires_grad)
        for name, value in model.named_parameters()
    }
    try:
        batched_losses(model, parameters, joined_batch([batch] * 2, _stacked), precision).sum().backward()  # type: ignore[no-untyped-call]
    except Exception as error:
        raise StackingError(_reason(error)) from None
    return parameters


def _compare(pairs: Mapping[str, tuple[Tensor, Tensor]]) -> None:
    """Raise StackingError unless gradients are equal, single and stacked, but for rounding.

    A gradient may be rounding alone, such as that of the bias of keys in attention: the largest of all counts, too.
    """
    scales = {name: float(single.abs().max()) for name, (single, _) in pairs.items()}
    for name, (single, double) in pairs.items():
        rounding = max(8 * torch.finfo(single.dtype).eps, 1e-5) * max(scales.values())
        if not float((double - single).abs().max()) <= 1e-3 * scales[name] + rounding:
            raise StackingError(f"stacked replicas have another gradient of {name}")


def _reason(error: Exception) -> str:
    line = f"{type(error).__name__}: {error}".splitlines()[0]
    return f"torch.vmap cannot vectorise it: {line}"


def _later_pass(reason: str, error: Exception | None = None) -> InputError:
    """Error of a pass that cannot be stacked, although the first one could, with the model's frames below its line."""
    text = f"workers: stacked: a later pass of the model cannot be stacked: {reason}; write workers: threads"
    return InputError("\n".join([text, *(() if error is None else own_frames(error))]))


def _versions(buffers: Iterable[Tensor]) -> list[tuple[int, int]]:
    """Identity of each tensor, and how often it has been changed."""
    return [(id(buffer), buffer._version) for buffer in buffers]


def _hooks(parameter: Tensor) -> tuple[Mapping[int, object] | None, Mapping[int, object] | None]:
    """Functions called with a parameter's gradient, and with the parameter once it has one."""
    return parameter._backward_hooks, parameter._post_accumulate_grad_hooks


class StackedLearner(TorchLearner):
    """Gradients of one rank's replica, computed with those of the other ranks, then given to its parameters.

    Args:
        model: the replica.
        comm: the rank's communicator.
        before_backward: as for `TorchLearner`.
        cost: likewise.
        stack: shared by the ranks.
        order: of gradients in a backward pass where the strategy sends them meanwhile; else None.
    """

    def __init__(
        self,
        model: nn.Module,
        comm: Communicator,
        before_backward: Callable[[bool], None],
        cost: StepDurations | None,
        stack: Stack,
        order: Sequence[str] | None = None,
    ) -> None:
        super().__init__(model, comm, before_backward, cost, None, order is not None)
        self._trained = {name: value for name, value in model.named_parameters() if value.requires_grad}
        self._gradients: dict[str, Tensor] = {}  # between the forward and the backward pass
        self._stack, self._order = stack, order
        stack.adopt(comm.rank, model)

    def take_over(self, optimizers: Sequence[Optimizer]) -> None:
        """Have updates done together, too."""
        self._optimizer = optimizers[0]
        self.runs_ahead = self._stack.take_over(self._comm.rank, optimizers[0])

    def run_ahead(self, data: Source, strategy: Strategy, num_steps: int) -> list[LocalStep]:
        """Take the steps together with the other ranks."""
        if self._has_own_hooks():
            return []
        kind = num_steps, strategy.site.averager is not None, strategy.max_norm
        return self._stack.run_ahead(self._comm.rank, _Ahead(self._optimizer, data, *kind))

    def _forward(self, batch: Any, number: int) -> tuple[Tensor, float | None]:
        loss, self._gradients = self._stack.gradients(self._comm.rank, batch)
        if self._order is not None and (new := self._gradients.keys() - self._order):
            raise _later_pass(f"it trains {min(new)!r}, which the first one leaves out")
        return loss, None

    def _backward(self, loss: Tensor, weight: float) -> None:
        """Give parameters their gradients, one after the other where hooks of clock and strategy await that."""
        if weight != 1:
            torch._foreach_mul_(list(self._gradients.values()), weight)
        for name in self._gradients if self._order is None else self._order:
            parameter, gradient = self._trained[name], self._gradients.get(name)
            if gradient is None:  # a pass may leave a parameter out
                continue
            if self._order is not None or any(_hooks(parameter)):
                parameter.backward(gradient)  # type: ignore[no-untyped-call]
            else:
                parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient

    def _has_own_hooks(self) -> bool:
        """True if other hooks than the clock's get the gradients: of a strategy of one's own."""
        known = int(self._clock is not None)
        return any(
            bool(on_gradient) or len(after or ()) > known
            for on_gradient, after in map(_hooks, self._trained.values())
        )
