"""Exchanges of gradients: their mean in flat buckets, sent while the backward pass is still running; other forms."""

from __future__ import annotations

import math
from functools import partial
from itertools import compress
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_, clip_grads_with_norm_, get_total_norm

from exogym_core.communicator.base import CollectiveCall
from exogym_core.strategy.parts.average import Averaging, Flight, decoded, gathering
from exogym_core.strategy.parts.flat import flatten, in_buckets, plan_buckets, unflatten, widened
from exogym_core.strategy.parts.generators import shared_generator
from exogym_core.strategy.parts.state import State, Stateful
from netsim.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import nn
    from torch.optim import Optimizer
    from torch.utils.hooks import RemovableHandle

    from exogym_core.communicator.base import Communicator
    from exogym_core.strategy.base import Strategy
    from exogym_core.strategy.optimizers import OptimSpec
    from exogym_core.strategy.participation.site import Site
    from exogym_core.strategy.parts.average import Steps
    from exogym_core.strategy.parts.codecs import Codec

__all__ = [
    "DEFAULT_BUCKET_BYTES",
    "GradientAverager",
    "PowerIteration",
    "as_matrix",
    "average",
    "clip_norm",
    "clip_norm_across",
    "dense_gradient",
    "gathered",
    "interleaved",
    "low_rank_of",
    "norm_across",
    "orthonormal",
    "own_gradients",
    "received_gradient",
    "set_gradients",
    "split",
    "zeros_like_gradients",
]

_MIB = 2**20

#: DDP's default.
DEFAULT_BUCKET_BYTES = 25 * _MIB


def dense_gradient(parameter: Tensor) -> Tensor:
    """`parameter`'s gradient; zeros if it has none, as if this rank's samples did not depend on it.

    Raises:
        InputError: the gradient is sparse.
    """
    gradient = parameter.grad
    if gradient is None:
        return torch.zeros_like(parameter)
    if gradient.layout != torch.strided:
        raise _sparse(parameter, "averaged")
    return gradient


def clip_norm(parameters: Sequence[Tensor], max_norm: float) -> Tensor:
    """Clip the norm of all gradients together to `max_norm`; returns the norm before.

    Parameters on the meta device have no values to clip.

    Raises:
        InputError: a gradient is sparse.
    """
    for parameter in parameters:
        if parameter.grad is not None and parameter.grad.layout != torch.strided:
            raise _sparse(parameter, "clipped")
    if parameters and parameters[0].is_meta:  # of plans: torch takes long to find that nothing has a norm
        return torch.empty((), device="meta")
    return clip_grad_norm_(parameters, max_norm)


def norm_across(counted: Sequence[Tensor], comm: Communicator, share: float = 1.0) -> Tensor:
    """Norm of the gradients of `counted` on all ranks of `comm` together; their squares count by `share`."""
    norm = get_total_norm([each.grad for each in counted if each.grad is not None])
    squares = norm.to(torch.promote_types(norm.dtype, torch.float32)) ** 2 * share
    comm.all_reduce(squares)
    return squares.sqrt()


def clip_norm_across(
    counted: Sequence[Tensor], clipped: Sequence[Tensor], comm: Communicator, max_norm: float
) -> Tensor:
    """Clip gradients by their norm over all ranks of `comm`, each of which has a part; returns the norm before.

    Args:
        counted: parameters whose gradients this rank counts.
        clipped: those whose gradients it clips.
        comm: ranks that hold parts of one gradient.
        max_norm: largest norm.
    """
    if any(each.is_meta for each in counted[:1]):  # of plans, which have no values
        dtype = torch.promote_types(counted[0].dtype, torch.float32)
        return comm.all_reduce(torch.empty((), dtype=dtype, device="meta"))  # type: ignore[no-any-return]
    total = norm_across(counted, comm)
    clip_grads_with_norm_(clipped, max_norm, total)
    return total


def _sparse(parameter: Tensor, what: str) -> InputError:
    return InputError(
        f"gradient of a parameter of shape {tuple(parameter.shape)}: is sparse and cannot be {what}; "
        "make the embedding with sparse=False"
    )


class GradientAverager(Stateful):
    """Averages the gradients of `parameters` over the ranks of `comm`.

    Gradients travel in flat buckets, the last parameters' first. While it listens, a bucket leaves as soon as
    the backward pass has filled it, always in the same order on all ranks; the rest leave in `average`.

    A parameter that one rank's samples did not use counts as a zero gradient there. One that no rank used keeps
    none, so that no optimizer decays it, as in DDP with `find_unused_parameters`. No message says so: a rank without a
    gradient sends negative zeros, the others none, and only negative zeros add up to negative zero. (A codec that
    has one zero loses that; there it counts as zero.)

    Args:
        parameters: in the model's order.
        comm: the ranks that average.
        bucket_bytes: size at which a bucket is closed; the first one at 1 MiB.
        averaging: how; with a codec, or robust, all of them leave in `average`.

    Attributes:
        held: parameters that this rank's optimizers update: all of them here, parts of them where they are sharded.
    """

    state = State(residuals="_residuals")
    held: Sequence[Tensor]

    def __init__(
        self,
        parameters: Sequence[Tensor],
        comm: Communicator,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        averaging: Averaging | None = None,
    ) -> None:
        self.comm, self.held = comm, parameters
        self.averaging = averaging if averaging is not None else Averaging()
        self._leaves_early = comm.world_size > 1 and self.averaging == Averaging()
        self._weight, self._limit = 1.0, math.inf
        reverse = parameters[::-1]
        plan = plan_buckets(reverse, bucket_bytes, min(_MIB, bucket_bytes))
        self._buckets = [[reverse[index] for index in bucket] for bucket in plan]
        self._residuals: list[Tensor | None] = list(map(self.averaging.residual, self._buckets))
        self._posted: list[Flight[Tensor]] = []
        self._missing = [set(map(id, bucket)) for bucket in self._buckets]
        self._listening = False
        self._before_first: Callable[[], bool] | None = None
        self._hooks: list[RemovableHandle] = []
        self._call: CollectiveCall | None = None  # of all gradients, without values

    def listen(self, on: bool, weight: float = 1.0, before_first: Callable[[], bool] | None = None) -> None:
        """Prepare for a backward pass; if it completes the gradients, buckets leave during it.

        Args:
            on: it does.
            weight: multiplies this rank's gradients.
            before_first: called when the first bucket is to leave; False: none leaves in this pass.
        """
        self._before_first = before_first
        if on and not self._hooks and self._leaves_early:
            # The last bucket is full when the backward pass is over: `average` sends it.
            for number, bucket in enumerate(self._buckets[:-1]):
                hook = partial(self._on_gradient, number)
                self._hooks += [each.register_post_accumulate_grad_hook(hook) for each in bucket]  # type: ignore[no-untyped-call]
        self._listening, self._weight = on, weight

    def join(self, comm: Communicator, weight: float = 1.0) -> None:
        """Average over the ranks of `comm` from now on, with this `weight`."""
        self.comm, self._weight = comm, weight

    def forget(self) -> None:
        """Drop what has left and was not averaged, as where a rank was lost."""
        self._listening, self._posted = False, []
        if self._hooks:
            self._missing = [set(map(id, bucket)) for bucket in self._buckets]

    def average(self, weight: float = 1.0, *, scaled: bool = False) -> None:
        """Send the remaining buckets, wait, and set the gradients to the means of `weight` times gradient.

        If gradients are `scaled`, values beyond a codec's limit are overflows: they become infinite, on all ranks.
        """
        self._listening, self._weight = False, weight
        codec = self.averaging.codec
        self._limit = codec.limit if codec is not None and scaled else math.inf
        if self.comm.world_size == 1:
            return
        for number in range(len(self._posted), len(self._buckets)):
            self._post(number)
        for bucket, average in zip(self._buckets, self._averages(), strict=True):
            self._deliver(bucket, average)
        self.forget()

    @property
    def is_one_call(self) -> bool:
        """True if `average` is one all-reduce of the plain gradients, and nothing leaves before it."""
        return self._leaves_early and len(self._buckets) == 1

    def charge(self) -> None:
        """Charge an average that `is_one_call` and whose values were computed for all ranks at once."""
        if self._call is None:
            flat = flatten([parameter.detach().to("meta") for parameter in self._buckets[0]])
            self._call = CollectiveCall("all_reduce", [flat], "avg")
        self.comm.charge(self._call)

    def clip(self, max_norm: float) -> Tensor:
        """Clip the norm of the averaged gradients to `max_norm`; returns the norm before."""
        return clip_norm(self.held, max_norm)

    def share_overflow(self) -> None:
        """Share overflows of the averaged gradients among ranks; here they are equal already."""

    def gather(self) -> None:
        """Send `held` to the other ranks after an update; here every rank has updated all parameters."""

    def build(self, spec: OptimSpec, model: nn.Module) -> Optimizer:
        """The optimizer of a model's parameters on this rank."""
        return spec.build(model)

    def between(self, site: Site) -> Site:
        """Site by which `held` is averaged over sites."""
        return site

    def close(self) -> None:
        """Remove the gradient hooks from the model, which outlives the averager."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def _on_gradient(self, number: int, parameter: Tensor) -> None:
        if not self._listening:
            return
        if id(parameter) not in self._missing[number]:
            raise InputError(
                f"gradient of a parameter of shape {tuple(parameter.shape)}: was computed twice in one backward pass, "
                "and may have been sent before, as where two checkpoint(use_reentrant=True) segments share it; use "
                "use_reentrant=False"
            )
        self._missing[number].remove(id(parameter))
        if self._before_first is not None and not self._posted and not self._missing[0]:
            self._listening = self._before_first()
            if not self._listening:
                return
        while (ready := len(self._posted)) < len(self._buckets) - 1 and not self._missing[ready]:
            self._post(ready)

    def _post(self, number: int) -> None:
        flat = _sent(self._buckets[number])
        if self._weight != 1.0:
            flat *= self._weight
        if self._limit < math.inf:
            flat[flat.abs() > self._limit] = math.inf
        self._posted.append(Flight(self._exchange(flat, self._residuals[number])))

    # --- exchange of a bucket -------------------------------------------------------------------------------

    def _exchange(self, flat: Tensor, residual: Tensor | None) -> Steps[Tensor]:
        """Send a bucket's gradients, and receive their average."""
        return self.averaging.steps(self.comm, flat, residual, waits=len(self._buckets) == 1)

    def _averages(self) -> list[Tensor]:
        """The averages of all buckets, which have been sent."""
        return [flight.wait() for flight in self._posted]

    def _deliver(self, bucket: Sequence[Tensor], average: Tensor) -> None:
        """Set the gradients of a bucket's parameters."""
        for parameter, gradient in zip(bucket, unflatten(average, bucket), strict=True):
            is_used = parameter.grad is not None
            parameter.grad = gradient if is_used else received_gradient(None, gradient)


def _sent(bucket: Sequence[Tensor]) -> Tensor:
    """Flat gradients to send: negative zeros for parameters without one, and none in the others."""
    gradients = [parameter.grad for parameter in bucket]
    is_plain = all([each is not None and each.layout is torch.strided for each in gradients])  # noqa: C419 - a list: no frame a gradient
    dense = gradients if is_plain else list(map(dense_gradient, bucket))
    flat = flatten(dense)  # type: ignore[arg-type]
    flat += 0.0
    if not is_plain:
        for own, sent in zip(gradients, unflatten(flat, bucket), strict=True):
            if own is None:
                sent.fill_(-0.0)
    return flat


def received_gradient(own: Tensor | None, average: Tensor) -> Tensor | None:
    """The averaged gradient; None where no rank had one."""
    unused = own is None and bool(((average == 0) & average.signbit()).all())
    return None if unused else average


def as_matrix(tensor: Tensor) -> Tensor:
    """`tensor` as a matrix of its first dimension against the rest; a view."""
    return tensor.reshape(tensor.shape[0], -1)


def orthonormal(columns: Tensor) -> Tensor:
    """Orthonormal columns that span those of `columns` [n, r], r at most n (Householder; never fewer than r)."""
    spanning: Tensor = torch.linalg.qr(columns)[0]
    return spanning


def low_rank_of(values: Tensor, rank: int = 4) -> tuple[Tensor, Tensor]:
    """Compute both factors of flat `values` (a square of them) on one rank: the work of a step, to be timed."""
    matrix = values.view(int(len(values) ** 0.5), -1)
    left = orthonormal(matrix @ matrix[:rank].T)
    return left, matrix.T @ left


def split(tensors: Sequence[Tensor], mask: Sequence[bool]) -> tuple[list[Tensor], list[Tensor]]:
    """Tensors where `mask` holds, and the others."""
    return list(compress(tensors, mask)), list(compress(tensors, (not each for each in mask)))


def interleaved(chosen: Sequence[Tensor], others: Sequence[Tensor], mask: Sequence[bool]) -> list[Tensor]:
    """Tensors that `split` has separated, in their order."""
    ones, rest = iter(chosen), iter(others)
    return [next(ones) if each else next(rest) for each in mask]


@torch.no_grad()
def own_gradients(strategy: Strategy) -> list[Tensor]:
    """This rank's gradients, one a parameter, weighed by its samples, in fp32 at least; zeros where there is none.

    Under a GradScaler they are unscaled first, and overflows of this rank count as zero, so that no rank drops out.
    """
    strategy.unscale_gradients()
    weight = strategy.context.weight
    return [weight * widened(dense_gradient(parameter)) for parameter in strategy.held]


def set_gradients(strategy: Strategy, gradients: Sequence[Tensor]) -> None:
    """Set the exchanged gradients, for the optimizer."""
    for parameter, gradient in zip(strategy.held, gradients, strict=True):
        parameter.grad = gradient.to(parameter.dtype)


def zeros_like_gradients(strategy: Strategy) -> list[Tensor]:
    """Tensors of zeros, one a parameter, in the dtype in which gradients are exchanged."""
    return [torch.zeros_like(widened(parameter.detach())) for parameter in strategy.held]


def average(comm: Communicator, tensors: Sequence[Tensor]) -> None:
    """Replace `tensors` by their means over ranks, as they are."""
    in_buckets(tensors, lambda flat: Flight(Averaging().steps(comm, flat, waits=True)).wait())


def gathered(comm: Communicator, codec: Codec, flat: Tensor) -> Iterator[Tensor]:
    """Gather all ranks' `flat` in rank order, each encoded once and sent to all."""
    codec = codec.on(flat.device)
    return decoded(codec, Flight(gathering(comm, codec.encode(flat))).wait(), flat)


class PowerIteration(Stateful):
    """Mean of matrices over ranks as two thin factors each.

    Args:
        strategy: whose ranks these are.
        matrices: tensors like them.
        ranks: r of each matrix.
        name: of the draw of the first Q.

    Attributes:
        right: Q of every matrix, [columns, r], equal on all ranks.
    """

    state = State("right")

    def __init__(
        self, strategy: Strategy, matrices: Sequence[Tensor], ranks: Sequence[int], name: str
    ) -> None:
        self._strategy, self._charge = strategy, partial(strategy.charge, "low-rank")
        self._charge("encode", 0)  # a speed that is missing is missed now
        generator = shared_generator(strategy.seed, name)
        sizes = [(matrix.shape[1], r) for matrix, r in zip(matrices, ranks, strict=True)]
        drawn = [torch.randn(size, generator=generator, dtype=torch.float64) for size in sizes]
        self.right = [orthonormal(q).to(matrix) for q, matrix in zip(drawn, matrices, strict=True)]

    def iterate(
        self, matrices: Sequence[Tensor], dense: Sequence[Tensor]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """P and R of every matrix, such that `P R^T` is the mean over ranks, projected on the columns of `P`.

        `P = orthonormal(mean(M Q))`, then `R = mean(M^T P)`; all ranks end with the same bits. `dense` tensors travel
        with the first of the two all-reduces, and is averaged in place.

        Args:
            matrices: this rank's M, [rows, columns] each.
            dense: tensors that are averaged as they are.

        References:
            Vogels et al., PowerSGD, arXiv 1905.13727, algorithm 1, lines 3 to 7.
        """
        num_values = sum(matrix.numel() for matrix in matrices)
        self._charge("encode", num_values)
        left = [matrix @ columns for matrix, columns in zip(matrices, self.right, strict=True)]
        average(self._strategy.peers, [*dense, *left])
        left = [orthonormal(columns) for columns in left]
        back = [matrix.T @ columns for matrix, columns in zip(matrices, left, strict=True)]
        average(self._strategy.peers, back)
        self._charge("decode", num_values)
        return left, back
