"""Sites, ranks that act as one participant and share a replica, whole or sharded, here or by `fully_shard`.

Rounds in which all take part are here too; those that continue without absent ranks are in `absence`.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from torch.utils._pytree import tree_map

from exogym_core.strategy.options import Options, option, positive_int
from exogym_core.strategy.parts.average import Averaging, Flight
from exogym_core.strategy.parts.flat import flatten, in_buckets, unflatten
from exogym_core.strategy.parts.gradients import (
    DEFAULT_BUCKET_BYTES,
    GradientAverager,
    clip_norm,
    clip_norm_across,
    received_gradient,
)
from exogym_core.strategy.parts.muon import OfMatrices
from exogym_core.strategy.parts.state import Stateful
from netsim.errors import InputError, about_option, unknown_name

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch.optim import Optimizer

    from exogym_core.communicator.base import Communicator
    from exogym_core.events import RoundPlace
    from exogym_core.strategy.base import StepContext, Strategy
    from exogym_core.strategy.optimizers import OptimSpec
    from exogym_core.strategy.parts.average import Steps
    from exogym_core.strategy.parts.gossip import Mixing
    from exogym_core.strategy.parts.outer import OuterStep, SharedModel

__all__ = [
    "SHARDINGS",
    "Everyone",
    "GradientOptions",
    "ShardedReplica",
    "Site",
    "SiteOptions",
    "SitesOptions",
    "cut_by_torch",
    "load_outer",
    "outer_to_keep",
    "part_of",
    "part_to_keep",
]


@dataclass(frozen=True)
class Site:
    """A rank's site: the average of gradients inside it, and averages with other sites.

    Attributes:
        inside: the ranks of this rank's site; None if it is the only one.
        between: the ranks at this rank's position in every site.
        parameters: of the model, those that take gradients.
        held: the parameters, or parts of them, that this rank averages with other sites.
        gradients: averages gradients inside; None: they are not averaged.
        ranks: of the site, for weights of samples; empty: all ranks.
    """

    inside: Communicator | None
    between: Communicator
    parameters: Sequence[Tensor] = ()
    held: Sequence[Tensor] = ()
    gradients: GradientAverager | None = None
    ranks: Sequence[int] = ()

    @classmethod
    def of(cls, comm: Communicator, ranks_per_site: int, where: str, name: str = "ranks_per_worker") -> Site:
        """Sites of `ranks_per_site` consecutive ranks each; called by all ranks of `comm`.

        Raises:
            InputError: the ranks cannot be cut into such sites.
        """
        if ranks_per_site == 1:
            return cls(None, comm)
        if comm.world_size % ranks_per_site:
            raise InputError(
                f"{where}: {name}={ranks_per_site} does not divide the {comm.world_size} ranks; "
                f"every {name.removeprefix('ranks_per_')} has as many",
                about=(name,),
            )
        place = comm.rank % ranks_per_site
        first = comm.rank - place
        inside = comm.group(range(first, first + ranks_per_site))
        return cls(inside, comm.group(range(place, comm.world_size, ranks_per_site)))

    # --- inside ---------------------------------------------------------------------------------------------

    @property
    def is_single(self) -> bool:
        """True if ranks act alone."""
        return self.inside is None and self.gradients is None

    def weight(self, context: StepContext) -> float:
        """Weight of this rank's gradients in the site's mean."""
        return context.weight_among(self.ranks or None)

    @property
    def averager(self) -> GradientAverager | None:
        """Averager of all ranks' gradients by one call, as for steps that are run ahead; else None."""
        gradients = self.gradients
        return gradients if gradients is not None and not self.ranks and gradients.is_one_call else None

    def clip(self, max_norm: float) -> Tensor:
        """Clip the norm of the gradients to `max_norm`; returns the norm before."""
        if self.gradients is None:
            return clip_norm(self.parameters, max_norm)
        return self.gradients.clip(max_norm)

    def build(self, spec: OptimSpec, model: nn.Module) -> Optimizer:
        """The local optimizer of this rank."""
        return spec.build(model) if self.gradients is None else self.gradients.build(spec, model)

    def gather(self) -> None:
        """Complete the parameters after an update of which each rank has made a part."""
        if self.gradients is not None:
            self.gradients.gather()

    def named(self, names: Sequence[str], values: Sequence[Tensor]) -> dict[str, Tensor]:
        """`values` of `held` by the names of `parameters`; the key `weight[8:16]` names these of the flat `weight`."""
        state: dict[str, Tensor] = {}
        for name, parameter, piece, value in zip(names, self.parameters, self.held, values, strict=True):
            if piece.shape == parameter.shape:
                state[name] = value
            elif value.numel():
                first = piece.storage_offset() - parameter.storage_offset()
                state[f"{name}[{first}:{first + value.numel()}]"] = value
        return state

    def close(self) -> None:
        """Release the model: remove hooks from it."""
        if self.gradients is not None:
            self.gradients.close()

    def state_dict(self) -> dict[str, Any]:
        """Rounding errors of encoded gradients."""
        return {} if self.gradients is None else self.gradients.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        if self.gradients is not None:
            self.gradients.load_state_dict(state)

    # --- between --------------------------------------------------------------------------------------------

    def steps(
        self, averaging: Averaging | Mixing, flat: Tensor, residual: Tensor | None = None
    ) -> Steps[Tensor]:
        """Average `flat` over sites, in place; the ranks of a site have the same values.

        Each of a site's k ranks averages its k-th part with the ranks at its position in other sites, then sends the
        result to its site's ranks. So values leave a site once, over the connections of all its ranks at a time.
        """
        if self.inside is None:
            return (yield from averaging.steps(self.between, flat, residual))
        if self.between.world_size == 1:
            return flat
        lost = None if residual is None else self.own(residual)
        yield from averaging.steps(self.between, self.own(flat), lost)
        return (yield from self.spread_steps(flat))

    def own(self, flat: Tensor) -> Tensor:
        """The part of `flat`, a view, that this rank averages with the ranks at its position in other sites."""
        if self.inside is None:
            return flat
        return flat.tensor_split(self.inside.world_size)[self.inside.rank]

    def spread_steps(self, flat: Tensor) -> Steps[Tensor]:
        """Complete `flat`, of which each rank of the site has its own part, in place."""
        if self.inside is None:
            return flat
        place, size = self.inside.rank, self.inside.world_size
        parts = flat.tensor_split(size)
        with self.inside.counted_as(parts[place].nbytes):
            posted = self.inside.all_to_all(
                [parts[place]] * size, async_op=True, shapes=[tuple(part.shape) for part in parts]
            )
        received = yield posted
        for part, got in zip(parts, received, strict=True):
            part.copy_(got)
        return flat

    @property
    def is_first(self) -> bool:
        """True on the rank that represents its site's replicas."""
        return self.inside is None or self.inside.rank == 0

    def shared(self, values: list[Tensor]) -> list[Tensor]:
        """Values of the site's first rank, on all of its ranks."""
        return values if self.inside is None else self.inside.broadcast_object(values)

    def average(self, averaging: Averaging | Mixing, flat: Tensor, residual: Tensor | None = None) -> Tensor:
        """Average over sites, and wait for the result."""
        return Flight(self.steps(averaging, flat, residual)).wait()

    def apart(self) -> Site:
        """Copy with separate groups, whose collectives wait for no other group's; called by all ranks."""
        inside = None if self.inside is None else self.inside.group(range(self.inside.world_size))
        return Site(inside, self.between.group(range(self.between.world_size)))

    def among(self, sites: Sequence[int], number: int) -> Site:
        """Connections to some of the sites, including this rank's, in round `number`."""
        if len(sites) == self.between.world_size:
            return self
        # A group that is used again keeps its connections.
        return Site(self.inside, self.between.group(sites, reuse=True, number=number))

    def broadcast(self, tensors: Sequence[Tensor]) -> None:
        """Overwrite `tensors` with the first rank's: to each site's first rank, then inside the site."""

        def spread(flat: Tensor) -> Tensor:
            if self.is_first:
                self.between.broadcast(flat)
            return flat if self.inside is None else self.inside.broadcast(flat)

        in_buckets(tensors, spread)


#: Round of a rank that can no longer reach any other: it has no steps left.
LOST = 1 << 62


class Everyone(Stateful):
    """Membership of rounds in which all ranks take part.

    The strategy, the loop, snapshots and plans ask it which ranks take part; steps only where `has_absences`.

    Attributes:
        has_absences: ranks may be absent from rounds.
        of_steps: each step is a round, which exchanges gradients.
        number: rounds behind this rank's parameters, including downloaded ones; None: not counted here.
        is_out: this rank was not drawn for the round, and has no replica.
        remarks: warnings for the user.
    """

    has_absences = False
    of_steps = False
    number: int | None = None
    is_out = False
    remarks: tuple[str, ...] = ()

    def __init__(self, strategy: Strategy) -> None:
        self.strategy, self._comm = strategy, strategy.comm
        self._goes_alone = not strategy.is_synchronous or strategy.num_nodes == 1

    @property
    def present(self) -> Sequence[int]:
        """Ranks that take part in rounds now, in ascending order."""
        return range(self._comm.world_size)

    @property
    def is_alone(self) -> bool:
        """True if this rank steps without waiting for others."""
        return self._goes_alone or self._comm.rank not in self.present

    @property
    def peers(self) -> Communicator:
        """Connects the ranks that step together."""
        present = self.present
        whole = len(present) == self._comm.world_size
        return self._comm if whole else self._comm.group(present, reuse=True)

    def begin(self) -> None:
        """Catch up where members change: the others may be ahead by many rounds."""

    def join(self) -> None:
        """Adopt the newest state of the others, if some have begun before."""

    def can_save(self, step: int) -> bool:
        """True if this rank's state after `step` steps is one to continue from together with the others' then."""
        return True

    def announced(self, step: int) -> RoundPlace | None:
        """Place of a step whose row is also marked before the exchange; None if it is not.

        Others may finish a round in which this rank dies before it marks the step.
        """
        return None

    def round_place(self, step: int) -> RoundPlace | None:
        """Place of a step among the rounds; None where all take part in all."""
        return None

    @property
    def num_steps(self) -> Mapping[int, int]:
        """Steps of each rank in this rank's round; empty: as many of each."""
        return {}

    def sits_out(self, step: int) -> int:
        """Steps from `step` on in which this rank takes no part: it was not drawn, or begins the round later."""
        return 0

    def take_place(self, step: int) -> bool:
        """Take this rank's place in the round of `step`; False: it takes no part in the step.

        It may join the others late, drop its replica, or download one.
        """
        return True

    def leave(self) -> None:
        """Free the memory of the replica, of a rank that was not drawn."""

    def mean_of(self, outer: SharedModel) -> list[Tensor] | None:
        """Mean of what all send that take part; None: this rank did not, and has caught up with them."""
        strategy = self.strategy
        return outer.mean_over(strategy.site, strategy.round_weight(range(self._comm.world_size)))

    def publish(self, outer: SharedModel) -> None:
        """Publish the state after a round, for ranks that come later."""


#: PyTorch's names of sharding strategies, which OpenDiLoCo's `--sharding-strategy` takes.
SHARDINGS = ("NO_SHARD", "SHARD_GRAD_OP", "FULL_SHARD", "HYBRID_SHARD", "_HYBRID_SHARD_ZERO2")


class Division(Options):
    """Options of ranks that form sites, in which gradients are averaged and a replica may be sharded.

    Args:
        sharding: one of SHARDINGS. `NO_SHARD`: every rank holds and updates everything. `SHARD_GRAD_OP` (ZeRO-2):
            each rank gets the mean of a part of the gradients, updates that part, and sends it to the others.
            `FULL_SHARD` (ZeRO-3): the same, and the parts are gathered again for each backward pass.
            `HYBRID_SHARD` and `_HYBRID_SHARD_ZERO2`: ZeRO-3 and ZeRO-2 within machines; ranks of different machines
            with the same part average its gradients.
        ranks_per_node: consecutive ranks of a machine, for hybrid sharding.

    Attributes:
        ranks_per_worker: consecutive ranks of a site; None: all are one.
        bucket_bytes: size of a bucket of gradients.
    """

    sharding: str = option("NO_SHARD")
    ranks_per_node: int | None = option(None)

    ranks_per_worker: ClassVar[Any] = None
    bucket_bytes: ClassVar[Any] = DEFAULT_BUCKET_BYTES

    def check(self, where: str) -> None:
        """Refuse an unknown sharding, and `ranks_per_node` where it is missing or unused."""
        if self.sharding not in SHARDINGS:
            with about_option("sharding"):
                raise unknown_name("sharding", str(self.sharding), SHARDINGS)
        size = self.ranks_per_node
        if self.is_hybrid and (not isinstance(size, int) or isinstance(size, bool) or size < 1):
            raise InputError(
                f"sharding={self.sharding!r} shards within machines: say how many ranks one has, as in "
                f"ranks_per_node=8 (not {size!r})",
                about=("sharding", "ranks_per_node"),
            )
        if not self.is_hybrid and size is not None:
            raise InputError(
                f"ranks_per_node={size!r} is for sharding='HYBRID_SHARD'; leave it out",
                about=("ranks_per_node", "sharding"),
            )

    @property
    def is_hybrid(self) -> bool:
        """True if machines have copies of each other's shards."""
        return "HYBRID" in self.sharding

    def averager(
        self,
        parameters: Sequence[Tensor],
        comm: Communicator,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        averaging: Averaging | None = None,
    ) -> GradientAverager:
        """Averager of the gradients of `parameters` over the ranks of `comm`, in shards or whole."""
        if self.sharding == "NO_SHARD" or 1 in (comm.world_size, self.ranks_per_node):
            return GradientAverager(parameters, comm, bucket_bytes, averaging)
        return ShardedReplica(parameters, comm, self, bucket_bytes)

    def groups(self, comm: Communicator) -> tuple[Communicator, Communicator | None]:
        """The ranks that divide the parameters among them, and those with the same part (None: no others).

        Raises:
            InputError: the ranks of `comm` cannot be cut into such machines.
        """
        if self.ranks_per_node is None:
            return comm, None
        machines = Site.of(comm, self.ranks_per_node, f"sharding={self.sharding!r}", "ranks_per_node")
        assert machines.inside is not None
        return machines.inside, machines.between if machines.between.world_size > 1 else None

    @property
    def overlaps_backward(self) -> bool:
        """True if gradients leave during the backward pass."""
        return self.ranks_per_worker != 1 and self.gradient_averaging() == Averaging()

    def gradient_averaging(self) -> Averaging:
        """Average of gradients inside a site."""
        return Averaging()

    def enter(self, strategy: Strategy) -> Site:
        """The site of this rank, connected.

        Raises:
            InputError: ranks cannot be cut into such sites, or torch has cut the parameters otherwise.
        """
        parameters = strategy.trainable
        if self.ranks_per_worker == 1 and not cut_by_torch(*parameters):
            return Site(None, strategy.comm, parameters, parameters)
        return self.filled(self.connected(strategy), strategy)

    def connected(self, strategy: Strategy) -> Site:
        """Only the connections of this rank's site; raises InputError as `enter`."""
        comm, where = strategy.comm, strategy.where
        size = self.ranks_per_worker or comm.world_size
        refuse_other_sites(where, strategy.trainable, size, self.sharding)
        if self.ranks_per_worker == 1:
            return Site(None, comm)
        is_whole = size == comm.world_size
        if not is_whole:
            return Site.of(comm, size, where)
        # Real sites that come and go make no groups; nothing is averaged with other sites.
        waits = strategy.patience.of_steps and strategy.patience.patience(where) is not None
        return Site(comm, comm if comm.members_change and waits else comm.group([comm.rank]))

    def filled(self, site: Site, strategy: Strategy) -> Site:
        """A site that is `connected`, with the parameters of a strategy and the average of their gradients."""
        parameters, comm = strategy.trainable, strategy.comm
        # torch averages gradients inside a site that it has cut.
        if self.ranks_per_worker == 1 or cut_by_torch(*parameters):
            return Site(None, site.between, parameters, list(map(part_of, parameters)))
        inside = comm.group([comm.rank]) if site.inside is None else site.inside
        averaging = self.gradient_averaging().charged(strategy)
        gradients = self.averager(parameters, inside, self.bucket_bytes, averaging)
        site, size = gradients.between(site), inside.world_size
        first = comm.rank // size * size
        ranks = range(first, first + size) if size < comm.world_size else ()
        return Site(site.inside, site.between, parameters, gradients.held, gradients, ranks)


class SiteOptions(Division):
    """Ranks that form one site.

    Args:
        ranks_per_worker: number of consecutive ranks; must divide the number of ranks. Also `ranks_per_site`.
    """

    ranks_per_worker: int = option(1, positive_int)  # type: ignore[misc]


class GradientOptions(Division, Averaging):
    """Options of the average of gradients.

    Args:
        bucket_bytes: size at which a bucket is closed; the first one at 1 MiB (DDP's defaults).
    """

    bucket_bytes: int = option(DEFAULT_BUCKET_BYTES, positive_int)  # type: ignore[misc]

    def check(self, where: str) -> None:
        """Refuse codecs and robust averages of sharded gradients."""
        if self.sharding != "NO_SHARD" and self.averaging() != Averaging():
            name = "aggregate" if self.codec is None else "codec"
            raise InputError(
                f"{where}: gradients in shards travel as they are; leave out {name}= or sharding=",
                about=(name, "sharding"),
            )

    gradient_averaging = Averaging.averaging


class SitesOptions(GradientOptions):
    """Options of `Sites`: the number of ranks that share a replica.

    Args:
        ranks_per_worker: consecutive ranks of a site; all, if it is not given. Also `ranks_per_site`.
    """

    ranks_per_worker: int | None = option(None, positive_int)  # type: ignore[misc]


class ShardedReplica(GradientAverager):
    """A replica in shards: this rank averages, updates and sends its part of every bucket.

    Part r of n of a flat bucket of N values is the r-th of n pieces of ceil(N/n) values, the last of which
    are padded with zeros on the wire. Optimizers get this part as views of the parameters that lie in it
    (`held`), so that parameter groups keep their meaning and an update changes the model itself; only elementwise
    optimizers compute the same as without sharding.

    The model is whole between steps, so that any code can read it: the parameters of a step's forward pass are
    gathered when the last step ends, not hidden behind computing. Gradients leave during the backward pass.

    Bytes a rank and step, P those of the padded parameters: `(n - 1) / n P` for the gradients and the same for
    each gather, one a step in SHARD_GRAD_OP and two a backward pass in FULL_SHARD; clipping and a scaler add
    one number each. Hybrid ones average P / n over the machines in addition.

    Args:
        parameters: in the model's order.
        comm: the ranks that train the replica.
        options: of sharding.
        bucket_bytes: size at which a bucket is closed.

    Raises:
        InputError: there are so few parameters that a rank would hold none.

    References:
        Rajbhandari et al., ZeRO, arXiv 1910.02054. Zhao et al., PyTorch FSDP, arXiv 2304.11277.
    """

    def __init__(
        self,
        parameters: Sequence[Tensor],
        comm: Communicator,
        options: Division,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    ) -> None:
        super().__init__(parameters, comm, bucket_bytes)
        self.sharding = options.sharding
        self._shards, self._replicas = options.groups(comm)
        self._pieces = [self._own_pieces(bucket) for bucket in self._buckets]
        pieces = chain.from_iterable(self._pieces)
        self._piece_of = dict(zip(chain.from_iterable(self._buckets), pieces, strict=True))
        self.held = [self._piece_of[parameter] for parameter in parameters]
        self._is_gathered = True
        self._check_size()

    is_one_call = False

    def listen(self, on: bool, weight: float = 1.0, before_first: Callable[[], bool] | None = None) -> None:
        """Prepare for a backward pass: gather for it, if parameters were freed after the forward pass."""
        super().listen(on, weight, before_first)
        if self.sharding in ("FULL_SHARD", "HYBRID_SHARD"):
            if not self._is_gathered:  # for the forward pass of this micro-batch
                self.gather()
            self.gather()
            self._is_gathered = False

    @torch.no_grad()
    def gather(self) -> None:
        """Set all parameters from the ranks that hold them."""
        handles = []
        for bucket, pieces in zip(self._buckets, self._pieces, strict=True):
            flat = flatten(pieces)
            padded = pad(flat, (0, self._part_size(bucket) - len(flat)))
            handles.append(self._shards.all_gather(padded, async_op=True))
        for bucket, handle in zip(self._buckets, handles, strict=True):
            flat = torch.cat(handle.wait())[: _num_values(bucket)]
            for parameter, values in zip(bucket, unflatten(flat, bucket), strict=True):
                parameter.data.copy_(values)  # without autograd: the values are unchanged
        self._is_gathered = True

    def clip(self, max_norm: float) -> Tensor:
        """Clip the norm of all shards' gradients together; returns the norm before."""
        return clip_norm_across(self.held, self.held, self._shards, max_norm)

    def share_overflow(self) -> None:
        """Share overflows: a gradient that is not finite on any rank becomes so on all, which skip the same steps."""
        gradients = [piece.grad for piece in self.held if piece.grad is not None]
        finite = torch.tensor(
            float(all(bool(g.isfinite().all()) for g in gradients)), device=self.held[0].device
        )
        self._shards.all_reduce(finite, "min")
        if not finite:
            for gradient in gradients:
                gradient.fill_(torch.inf)

    def build(self, spec: OptimSpec, model: nn.Module) -> Optimizer:
        """The optimizer over this rank's pieces of the parameters.

        Raises:
            InputError: it is one of those that need whole matrices.
        """
        factory = spec.cls.func if isinstance(spec.cls, partial) else spec.cls
        if isinstance(factory, type) and issubclass(factory, OfMatrices):
            raise InputError(
                f"sharding={self.sharding!r}: {factory.__name__} needs whole matrices and shards cut them; take an "
                "optimizer that treats each value by itself, such as adamw, or sharding='NO_SHARD'",
                about=("sharding",),
            )
        return spec.build(model, self._in_pieces)

    def between(self, site: Site) -> Site:
        """Site in which this rank's shard is averaged with the same shard of other sites, divided among its copies."""
        return Site(self._replicas, site.between)

    # --- exchange of a bucket -------------------------------------------------------------------------------

    def _exchange(self, flat: Tensor, residual: Tensor | None) -> Steps[Tensor]:
        size = self._shards.world_size
        padded = pad(flat, (0, -len(flat) % size))
        average: Tensor = yield self._shards.reduce_scatter(padded, "avg", async_op=True)
        return average

    def _averages(self) -> list[Tensor]:
        if self._replicas is None:
            return super()._averages()
        handles = [self._replicas.all_reduce(flight.wait(), "avg", async_op=True) for flight in self._posted]
        return [handle.wait() for handle in handles]

    def _deliver(self, bucket: Sequence[Tensor], average: Tensor) -> None:
        pieces = [self._piece_of[parameter] for parameter in bucket]
        average = average[: _num_values(pieces)]
        for parameter, piece, gradient in zip(bucket, pieces, unflatten(average, pieces), strict=True):
            parameter.grad, piece.grad = None, received_gradient(parameter.grad, gradient)

    # --- cutting --------------------------------------------------------------------------------------------

    def _part_size(self, bucket: Sequence[Tensor]) -> int:
        return -(-_num_values(bucket) // self._shards.world_size)

    def _own_pieces(self, bucket: Sequence[Tensor]) -> list[Tensor]:
        """Pieces of the parameters in this rank's part of the bucket: flat views, often empty ones."""
        size = self._part_size(bucket)
        low = self._shards.rank * size
        pieces: list[Tensor] = []
        for parameter in bucket:
            parameter.data = parameter.data.contiguous()
            first, last = (min(max(bound, 0), parameter.numel()) for bound in (low, low + size))
            pieces.append(nn.Parameter(parameter.data.view(-1)[first:last]))
            low -= parameter.numel()
        return pieces

    def _in_pieces(self, group: Any) -> Any:
        if isinstance(group, Mapping):
            members = [group["params"]] if isinstance(group["params"], Tensor) else group["params"]
            return {**group, "params": [self._in_pieces(member) for member in members]}
        if isinstance(group, tuple):  # (name, parameter)
            return (*group[:-1], self._in_pieces(group[-1]))
        return self._piece_of.get(group, group)

    def _check_size(self) -> None:
        num_ranks = self._shards.world_size
        if all((num_ranks - 1) * self._part_size(bucket) >= _num_values(bucket) for bucket in self._buckets):
            total = sum(map(_num_values, self._buckets))
            raise InputError(
                f"sharding={self.sharding!r}: {total} trainable values cannot be cut into {num_ranks} "
                "shards; use fewer ranks a site, or sharding='NO_SHARD'",
                about=("sharding",),
            )


def _num_values(tensors: Sequence[Tensor]) -> int:
    return sum(tensor.numel() for tensor in tensors)


def cut_by_torch(*values: Tensor) -> bool:
    """True if one of the values is a DTensor; does not import their module, which takes a second."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and any(isinstance(value, module.DTensor) for value in values)


def part_of(parameter: Tensor) -> Tensor:
    """Part of a parameter that this rank holds, in the same memory; the parameter itself where it is whole."""
    cut: Any = parameter
    return cut.detach().to_local() if cut_by_torch(cut) else parameter


def refuse_other_sites(
    where: str, parameters: Sequence[Tensor], ranks_per_worker: int, sharding: str
) -> None:
    """Refuse parameters that torch has cut among other ranks than this site's, or that are cut twice.

    Raises:
        InputError: they are.
    """
    if not cut_by_torch(*parameters):
        return
    if sharding != "NO_SHARD":
        raise InputError(
            f"{where}: fully_shard has cut the parameters already; leave out sharding={sharding!r}",
            about=("sharding",),
        )
    whole = [parameter for parameter in parameters if not cut_by_torch(parameter)]
    if whole:
        raise InputError(
            f"{where}: {len(whole)} of {len(parameters)} parameters are not cut by fully_shard; call it on the whole "
            "model, last"
        )
    sizes = sorted({parameter.device_mesh.size() for parameter in parameters})  # type: ignore[attr-defined]
    if sizes != [ranks_per_worker]:
        raise InputError(
            f"{where}: fully_shard has cut the parameters among {sizes[-1]} ranks, and ranks_per_worker is "
            f"{ranks_per_worker}; make them equal"
        )


def part_to_keep(part: Tensor, parameter: Any) -> Tensor:
    """Copy of this rank's part of values shaped like a parameter, for a checkpoint: a DTensor if that is one.

    So torch.distributed.checkpoint recognises the ranks' parts and joins them.
    """
    copied = part.detach().clone()
    if not cut_by_torch(parameter):
        return copied
    from torch.distributed.tensor import DTensor

    mesh, shape, stride = parameter.device_mesh, parameter.shape, parameter.stride()
    kept: Tensor = DTensor.from_local(copied, mesh, parameter.placements, shape=shape, stride=stride)
    return kept


def outer_to_keep(outer: OuterStep, parameters: Sequence[Tensor]) -> dict[str, Any]:
    """`outer.state_dict()`; if the parameters are DTensors, so are the values shaped like them."""
    state = outer.state_dict()
    if not cut_by_torch(*parameters):
        return state
    # In the outer optimizer's order.
    in_order = [parameters[index] for bucket in outer.plan for index in bucket]
    owed = chain.from_iterable(map(unflatten, state["residuals"], outer.buckets))
    states = {
        number: {
            name: part_to_keep(value, in_order[number])
            if isinstance(value, Tensor) and value.dim()
            else value
            for name, value in of_parameter.items()  # numbers of steps have no dimensions
        }
        for number, of_parameter in state["optim"]["state"].items()
    }
    return {
        "theta": list(map(part_to_keep, outer.theta, parameters)),
        "optim": {**state["optim"], "state": states},
        "residuals": list(map(part_to_keep, owed, in_order)),
    }


def load_outer(outer: OuterStep, kept: Mapping[str, Any], parameters: Sequence[Tensor]) -> None:
    """Restore the state that `outer_to_keep` returned."""
    if cut_by_torch(*parameters):
        parts = tree_map(part_of, dict(kept))
        theta, owed = parts["theta"], iter(parts["residuals"])
        flats = [flatten([theta[index] for index in bucket]) for bucket in outer.plan]
        residuals = (
            [flatten([next(owed) for _ in bucket]) for bucket in outer.plan] if kept["residuals"] else []
        )
        kept = {"theta": flats, "optim": parts["optim"], "residuals": residuals}
    outer.load_state_dict(kept)
