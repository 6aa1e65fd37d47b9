"""Gradients of a rank that holds stages: passes over micro-batches, activations and their gradients as messages."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils import clip_grads_with_norm_
from torch.utils._pytree import tree_map_only

from exogym_core.data.batches import move_batch
from exogym_core.learner import TorchLearner, loss_and_count
from exogym_core.stages.boundaries import boundary_codec, project_features
from exogym_core.stages.faults import StageAbsence
from exogym_core.stages.messages import ChainMessages
from exogym_core.stages.options import StagePass, actions
from exogym_core.stages.split import tensors_of
from exogym_core.strategy.participation.site import Site
from exogym_core.strategy.parts.gradients import clip_norm_across
from exogym_core.workers.rng import random_streams, restore_random_streams
from exogym_core.workers.streams import FORWARD_SHARE
from netsim.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Mapping, Sequence

    from torch.optim import Optimizer

    from exogym_core.communicator.base import Communicator
    from exogym_core.cost.compute import Coding, StepDurations
    from exogym_core.data.samples import StepSamples
    from exogym_core.stages.faults import StageRoute
    from exogym_core.stages.split import Cut, HeldPart
    from exogym_core.strategy.base import StepContext, Strategy

__all__ = ["StageLearner", "StageRank"]


class StageRank:
    """A rank of a run with stages: its worker, its place in the worker's chain, and its part of the model.

    Ranks of a worker are consecutive: rank `worker * count + position`.

    Args:
        cut: of the model.
        comm: connects all ranks of the run.
        held: its part of the model.
        read: samples of a worker in a step of a 0-based number; needed where ranks may be absent.

    Attributes:
        run: connects all ranks of the run.
        worker, position: of the rank.
        chain: connects the ranks of its worker.
        peers: connects the ranks at its position, which are workers for its strategy.
        shared: its parameters that other ranks of the chain hold, too, and the connection to these.
        counted: parameters whose gradients this rank counts in the norm of a whole model's.
        norm: of the gradients of this step, where it is known before they are clipped.
        kept: projection on the codec's subspace by parameter that is kept in it, as its gradient is.
    """

    def __init__(
        self,
        cut: Cut,
        comm: Communicator,
        held: HeldPart,
        read: Callable[[int, int], StepSamples] | None = None,
    ) -> None:
        self.cut, self.held, self.run, self.read = cut, held, comm, read
        count = cut.stages.count
        self.worker, self.position = divmod(comm.rank, count)
        first = self.worker * count
        self.chain = comm.group(range(first, first + count))
        self.peers = comm.group(range(self.position, comm.world_size, count))
        named = dict(held.model.named_parameters())
        self.shared: list[tuple[Tensor, Communicator, Sequence[int]]] = []
        groups: dict[tuple[int, ...], Communicator] = {}
        for name, parameter in named.items():
            ranks = cut.ranks_of(name)
            if len(ranks) > 1 and parameter.requires_grad:
                group = groups.setdefault(ranks, self.chain.group(ranks, reuse=True))
                self.shared.append((parameter, group, ranks))
        self.counted: Sequence[Tensor] = ()
        self.norm: Tensor | None = None
        self.kept: dict[Tensor, Callable[[Tensor], Tensor]] = {}
        for name in cut.kept.keys() & named.keys():
            codec: Any = boundary_codec(cut.stages.codec)
            project = self.kept[named[name]] = partial(project_features, codec, dim=cut.kept[name])
            if named[name].requires_grad:
                named[name].register_hook(project)  # type: ignore[no-untyped-call]
        self.project_kept()

    @torch.no_grad()
    def project_kept(self, *_: Any) -> None:
        """Project parameters on the codec's subspace that are kept in it."""
        for parameter, project in self.kept.items():
            parameter.copy_(project(parameter))

    def sum_shared(
        self, route: StageRoute | None = None, team: Communicator | None = None, share: float = 1.0
    ) -> None:
        """Sum the gradients of parameters that several stages hold.

        Args:
            route: of the step, where ranks may be absent. Without one, gradients are summed among all ranks that hold
                them: their mean then, of which this rank's gradient is a `share`.
            team: connects the ranks of the route.
            share: as above.
        """
        for parameter, group, positions in self.shared:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            if route is not None and team is not None:
                if not route.is_whole:
                    parameter.grad *= share
                group = team.group(route.places_of(self.worker, positions))
            group.all_reduce(parameter.grad)

    def clip_together(self, strategy: Strategy) -> None:
        """Have a strategy that is set up clip gradients by the norm over all stages."""
        site = strategy.site
        self.counted = [
            each
            for each in site.held
            if all(each is not other or group.rank == 0 for other, group, _ in self.shared)
        ]
        strategy.site = _ChainSite(**vars(site), rank=self)


@dataclass(frozen=True)
class _ChainSite(Site):
    """Site whose norm of gradients is the whole model's."""

    rank: StageRank = field(kw_only=True)

    def clip(self, max_norm: float) -> Tensor:
        """Clip the norm of all stages' gradients together; returns the norm before."""
        norm, self.rank.norm = self.rank.norm, None
        if norm is None:
            return clip_norm_across(self.rank.counted, self.held, self.rank.chain, max_norm)
        clip_grads_with_norm_(self.held, max_norm, norm)
        return norm


class _PassBegun(NamedTuple):
    """Beginning of a micro-batch's forward pass, whose backward pass is to come.

    Attributes:
        copies: the weights, by the id of the parameter.
        received: batch, or tensors of the stage before; these and the others for checkpoints alone.
        buffers: by name.
        random: states of the generators.
    """

    copies: dict[int, Tensor]
    received: Any = None
    buffers: Mapping[str, Tensor] = {}
    random: Mapping[str, Any] = {}


class StageLearner(TorchLearner):
    """Takes a step's passes in the order of the schedule; what crosses stages is sent as soon as it is computed.

    Receives are posted one pass ahead, so that messages move while the rank computes. Under `pipedream` a micro-batch's
    backward pass may come in a later step: its forward pass is of a copy of the weights then, and its gradient goes to
    the update of that later step. The first such steps have gradients of fewer micro-batches, or of 0. A checkpoint has
    what the forward passes of micro-batches in flight began with, by which a restart takes them again.

    Args:
        rank: its stages.
        comm: the rank's.
        strategy: its own, not set up.
        cost: virtual seconds of a worker's whole step on this rank's host; None: computing is free.
        autocast: as for `TorchLearner`.
        coding: virtual time of codecs; None where it is free.
        keeps: the run makes checkpoints.

    Attributes:
        defers: `gradients` leaves the passes to a later `take_passes`.
        step: samples of the rank's worker in the step under way, where passes are deferred.
    """

    defers = False
    step: StepSamples | None = None

    def __init__(
        self,
        rank: StageRank,
        comm: Communicator,
        strategy: Strategy,
        cost: StepDurations | None,
        autocast: str | None,
        coding: Coding | None = None,
        *,
        keeps: bool = False,
    ) -> None:
        stages = rank.cut.stages
        waits_for_all = strategy.patience.patience(strategy.where) is None
        overlaps = strategy.overlaps_backward and stages.num_stages == stages.count and not rank.shared
        overlaps = overlaps and waits_for_all
        super().__init__(rank.held.model, comm, strategy.before_backward, cost, autocast, overlaps)
        self._rank, self._overlaps, self._strategy = rank, overlaps, strategy
        self.has_loss = rank.position == stages.count - 1
        self._messages = ChainMessages(rank.cut, rank.chain, self._device, coding)
        self._keeps = keeps and stages.lag(rank.position) > 0
        self._num_taken = 0  # micro-batches of all steps so far
        # By micro-batch and worker: samples, and share of its step's.
        self._sizes: dict[tuple[int, ...], tuple[int, float]] = {}
        self._copies: dict[int, Tensor] = {}  # of this step's parameters, by their id
        self._begun: dict[int, _PassBegun] = {}  # by micro-batch in flight
        # By stage, micro-batch and worker.
        self._entered: dict[tuple[int, ...], tuple[Tensor, ...]] = {}
        self._left: dict[tuple[int, ...], tuple[Tensor, ...]] = {}

    def gradients(self, step: StepSamples, context: StepContext) -> float:
        """Leave the gradients of all micro-batches in `.grad`; return their mean loss, 0 where it is not known."""
        if self.defers:
            self.step = step
            return 0.0
        loss = self.take_passes({0: step}, context)
        self._rank.sum_shared()
        return loss

    def take_over(self, optimizers: Sequence[Optimizer]) -> None:
        """Have a strategy that goes on without absent ranks do so for all stages; keep weights in the subspace."""
        strategy = self._strategy
        if self._rank.kept:
            optimizers[0].register_step_post_hook(self._rank.project_kept)
        if strategy.workers.has_absences:
            membership = StageAbsence(strategy, self._rank, self)
            for each in (strategy, *strategy.acting):
                each.workers = membership

    def go_along(self, route: StageRoute, team: Communicator) -> None:
        """Exchange with the ranks of a route, connected by `team`, from now on."""
        place = {rank: number for number, rank in enumerate(route.members)}
        self._messages.join(team, lambda worker, position: place[route.rank_of(worker, position)])

    def kept(self) -> tuple[list[Tensor], dict[Hashable, Tensor]]:
        """Copies of state that passes change: buffers, and values that codecs owe."""
        return [each.clone() for each in self._model.buffers()], dict(self._messages.residuals)

    @torch.no_grad()
    def restore(self, kept: tuple[list[Tensor], dict[Hashable, Tensor]]) -> None:
        """Restore what `kept` returned."""
        for buffer, value in zip(self._model.buffers(), kept[0], strict=True):
            buffer.copy_(value)
        self._messages.residuals = kept[1]

    def take_passes(
        self, steps: Mapping[int, StepSamples], context: StepContext, unit: float | None = None
    ) -> float:
        """Take the passes of a step over the samples of these workers, and return their mean loss.

        Gradients that go from rank to rank are sums over samples divided by a `unit`, equal on all ranks; by default
        by the samples of the only worker. Those left in `.grad` are means over the samples of this rank.

        Each pass of the schedule is taken for one worker after the other. So no ranks wait for each other in a circle:
        whatever a pass needs comes of earlier passes of the schedule for the same worker.
        """
        cut = self._rank.cut
        first = self._num_taken if cut.stages.is_asynchronous else 0
        number = max(len(step.micro_batches) for step in steps.values())
        self._num_taken = first + number
        self._note_sizes(steps, first)
        self._copy_weights()
        total, loss = sum(step.samples for step in steps.values()), 0.0
        seconds_of = {
            worker: 0.0 if self._cost is None else self._cost.seconds(context.number, step.samples)
            for worker, step in steps.items()
        }
        order = [
            each._replace(micro=first + each.micro, worker=worker)
            for each in actions(cut.stages, self._rank.position, number)
            for worker, step in steps.items()
            if first + each.micro >= 0 and each.micro < len(step.micro_batches)
        ]
        for index, action in enumerate(order):
            for coming in order[index : index + 2]:
                self._messages.expect(coming, self._sizes[coming[2:]][0])
            step, (samples, weight) = steps[action.worker], self._sizes[action[2:]]
            seconds, share = seconds_of[action.worker], cut.shares[action.stage] * weight
            weight *= step.samples / total  # in the mean of this rank
            if action.is_forward:
                self._expect_answer(action)
                batch = step.micro_batches[action.micro - first][0]
                loss += self._forward_pass(action, batch, samples, context) * weight
                self._charge(seconds, step.samples, share * FORWARD_SHARE)
            else:
                is_last = index == len(order) - 1
                context.last_micro_batch = is_last
                self._before_backward(is_last and self._overlaps)
                about = seconds, step.samples, share * (1 - FORWARD_SHARE)
                clock = self._clock if is_last else None
                if clock is not None:
                    clock.begin_backward(*about)
                self._backward_pass(action, samples, weight * total / (unit or total))
                if clock is not None:
                    clock.end()
                else:
                    self._charge(*about)
            self._pass_on(action, samples, action.micro % number)
        # What the next rank has answered by now is delivered; to wait for more would be to wait for that rank.
        late = (cut.stages.delay or 1) if cut.stages.is_asynchronous else 0
        self._messages.deliver(self._num_taken - late)
        for parameter in self._model.parameters():
            if cut.stages.is_asynchronous and parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            if unit is not None and parameter.grad is not None:
                parameter.grad *= unit / total
        return loss

    def _note_sizes(self, steps: Mapping[int, StepSamples], first: int) -> None:
        """Note the sizes of the micro-batches of a step, from number `first` on; forget those whose passes are over."""
        oldest = first - self._rank.cut.stages.lag(self._rank.position)
        self._sizes = {key: size for key, size in self._sizes.items() if key[0] >= oldest}
        for worker, step in steps.items():
            for micro, (_, samples) in enumerate(step.micro_batches, first):
                self._sizes[micro, worker] = samples, samples / step.samples

    def _copy_weights(self) -> None:
        """Copy the parameters for passes whose gradients belong to a later step, if there are any."""
        if self._rank.cut.stages.lag(self._rank.position):
            self._copies = {
                id(each): each.detach().clone().requires_grad_(each.requires_grad)
                for each in self._model.parameters()
            }

    def _expect_answer(self, action: StagePass) -> None:
        """Post the receives of the backward pass that the next rank takes now, under `pipedream`."""
        stages = self._rank.cut.stages
        behind = action.micro - stages.lag(min(self._rank.position + 1, stages.count - 1))
        if stages.is_asynchronous and behind >= 0:
            answer = action._replace(is_forward=False, micro=behind)
            self._messages.expect(answer, self._sizes[behind, 0][0])

    def _pass_on(self, action: StagePass, samples: int, place: int) -> None:
        """Send the result of a pass to the stage that goes on with it; `place` of its micro-batch in the step."""
        stages, since = self._rank.cut.stages, action.micro
        towards = action._replace(stage=action.stage + (1 if action.is_forward else -1))
        if not 0 <= towards.stage < stages.num_stages:
            return
        results: Sequence[Tensor | None]
        if action.is_forward:
            results = self._left[action[1:]]
        else:
            results = [each.grad for each in self._entered.pop(action[1:]) if each.requires_grad]
            since += stages.lag(self._rank.position)
        self._messages.send(towards, results, samples, place, since)

    def _charge(self, seconds: float, samples: int, share: float) -> None:
        if self._cost is not None:
            self._comm.advance(seconds * share, ("step", samples, share))

    # --- passes --------------------------------------------------------------------------------------------

    def _forward_pass(self, action: StagePass, batch: Any, samples: int, context: StepContext) -> float:
        """Pass of a micro-batch through a stage; returns its loss, 0 where it is not the last."""
        if self._device.type != "cpu":
            batch = move_batch(batch, self._device)
        key, boundaries = action[1:], self._rank.cut.boundaries
        received: Any = self._messages.receive(action, samples) if action.stage else batch
        if self._copies:
            self._begun[action.micro] = begun = _PassBegun(self._copies)
            if self._keeps:
                buffers = {name: each.clone() for name, each in self._model.named_buffers()}
                about = {"received": received, "buffers": buffers, "random": random_streams(self._device)}
                self._begun[action.micro] = begun._replace(**about)
        value = self._through(action, received, batch)
        if action.stage < len(boundaries) - 1:
            left = self._left[key] = tensors_of(value)
            found = [(each.dtype, tuple(each.shape)) for each in left]
            expected = [(each.dtype, each.sizes(samples)) for each in boundaries[action.stage + 1]]
            if found != expected:
                texts = [", ".join(f"{a} {list(b)}" for a, b in each) for each in (found, expected)]
                raise InputError(
                    f"fit: stages: stage {action.stage} returns {texts[0]} for {samples} samples, where "
                    f"{texts[1]} follows from the first batch: pad samples to one length",
                    about=("stages",),
                )
            return 0.0
        loss, count = loss_and_count(
            value, f"rank {self._comm.rank}, step {context.number + 1}", with_gradient=True
        )
        if count is not None:
            raise InputError(
                "fit: stages: the model returns a count with its loss: return the mean over samples",
                about=("stages",),
            )
        self._left[key] = (loss,)
        return loss.item()

    def _through(self, action: StagePass, received: Any, batch: Any) -> Any:
        """Value of a stage for what it has received: the batch, or tensors of the stage before."""
        cut, modules, value = self._rank.cut, self._rank.held.modules[action.stage], received
        if action.stage:
            for tensor, boundary in zip(received, cut.boundaries[action.stage], strict=True):
                tensor.requires_grad_(boundary.has_gradient)
            self._entered[action[1:]] = received
            # Parts may change what they get in place, which leaves of a graph do not allow, nor a later restart.
            entering = tuple(each.clone() for each in received)
            value = entering if len(entering) > 1 else entering[0]
        is_last = action.stage == cut.stages.num_stages - 1
        with self._autocast:
            for module in modules[: len(modules) - is_last]:
                value = self._called(module, value)
            return self._called(modules[-1], value, batch) if is_last else value

    def _called(self, module: nn.Module, *values: Any) -> Any:
        """Value of a part, by the copies of its parameters where there are any."""
        if not self._copies:
            return module(*values)
        every = module.named_parameters(remove_duplicate=False), module.named_buffers(remove_duplicate=False)
        own = {name: self._copies[id(each)] for name, each in chain(*every) if id(each) in self._copies}
        return functional_call(module, own, values)

    def _backward_pass(self, action: StagePass, samples: int, weight: float) -> None:
        """Backward pass of a micro-batch through a stage."""
        left = self._left.pop(action[1:])
        copies = self._begun.pop(action.micro, _PassBegun({})).copies
        if action.stage == self._rank.cut.stages.num_stages - 1:
            (left[0] * weight).backward()  # type: ignore[no-untyped-call]
            return
        roots = [each for each in left if each.requires_grad]
        if roots:
            torch.autograd.backward(roots, self._messages.receive(action, samples))
        for parameter in self._model.parameters() if copies else ():
            copy = copies[id(parameter)]
            if copy.grad is not None:
                gradient = self._rank.kept.get(parameter, Tensor.detach)(copy.grad)
                parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
                copy.grad = None

    # --- checkpoints ---------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Values that codecs owe, messages, and what began the passes of micro-batches in flight."""
        names = {id(each): name for name, each in self._model.named_parameters()}
        versions = {id(begun.copies): begun.copies for begun in self._begun.values()}
        places = {version: place for place, version in enumerate(versions)}
        return {
            **super().state_dict(),
            "messages": self._messages.state_dict(),
            "num_taken": self._num_taken,
            "sizes": self._sizes,
            "weights": [{names[key]: each for key, each in own.items()} for own in versions.values()],
            "begun": {
                micro: {**begun._asdict(), "copies": places[id(begun.copies)]}
                for micro, begun in self._begun.items()
            },
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned; forward passes of micro-batches in flight are taken again."""
        super().load_state_dict(state)
        self._num_taken, self._sizes = state["num_taken"], dict(state["sizes"])
        named = {**dict(self._model.named_parameters()), **dict(self._model.named_buffers())}
        versions = [
            {
                id(named[key]): each.clone().requires_grad_(named[key].requires_grad)
                for key, each in own.items()
            }
            for own in state["weights"]
        ]
        for micro, saved in state["begun"].items():
            aligned = tree_map_only(Tensor, Tensor.clone, saved)  # what a file's tensors need not be
            begun = _PassBegun(**{**aligned, "copies": versions[saved["copies"]]})
            action = StagePass(True, self._rank.position, micro)
            self._begun[micro] = begun
            self._copies = begun.copies | {id(named[name]): each for name, each in begun.buffers.items()}
            restore_random_streams(begun.random, self._device)
            with torch.enable_grad():
                self._left[action[1:]] = tensors_of(self._through(action, begun.received, None))
        self._messages.load_state_dict(
            state["messages"], {key: size for key, (size, _) in self._sizes.items()}
        )
