"""Sites: ranks that average their gradients at each step, and act as one in a chain."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from exogym_core.strategy.chain import Module
from exogym_core.strategy.options import option, positive_int
from exogym_core.strategy.participation.site import ShardingOptions, Site
from exogym_core.strategy.parts.average import Averaging, AveragingOptions
from exogym_core.strategy.parts.gradients import DEFAULT_BUCKET_BYTES, GradientAverager
from netsim.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from exogym_core.strategy.chain import Chain, Scope

__all__ = [
    "GradientOptions",
    "SiteOptions",
    "Sites",
    "SitesOptions",
]


class SiteOptions(ShardingOptions):
    """Ranks that form one site.

    Args:
        ranks_per_worker: how many consecutive ranks; it must divide their number. Also `ranks_per_site`.
    """

    ranks_per_worker: int = option(1, positive_int)


class GradientOptions(ShardingOptions, AveragingOptions):
    """Options of the average of gradients.

    Args:
        bucket_bytes: size at which a bucket is closed; the first one at 1 MiB (DDP's defaults).
    """

    bucket_bytes: int = option(DEFAULT_BUCKET_BYTES, positive_int)

    def check(self, where: str) -> None:
        """Refuse shards that are to be rounded."""
        super().check(where)
        if self.sharding != "NO_SHARD" and self.averaging() != Averaging():
            name = "aggregate=" if self.codec is None else "codec="
            raise InputError(
                f"{where}: gradients in shards travel as they are; leave out {name} or sharding="
            )


class SitesOptions(GradientOptions):
    """Options of `Sites`: the number of ranks that share a replica.

    Args:
        ranks_per_worker: consecutive ranks of a site; all, if it is not given. Also `ranks_per_site`.
    """

    ranks_per_worker: int | None = option(None, positive_int)


class Sites(Module, name="Sites"):
    """Data parallelism inside sites: ranks of a site average gradients at each step and stay equal.

    Modules behind it bring sites together, not ranks: what they exchange goes between sites once, each rank of a
    site carrying its part. Gradients travel in flat buckets, the last layers' first; a bucket leaves as soon as the
    last backward pass of a step has filled it. Where the batches of a site's ranks are uneven, gradients are
    weighed by samples within the site.

    Args:
        ranks_per_worker: ranks of a site; all, if it is not given.
        options: of `SitesOptions`.

    Raises:
        InputError: (at `enter`) they do not divide the ranks, or a chain has sites already.

    References:
        Li et al., PyTorch Distributed, arXiv 2006.15704. Zhao et al., PyTorch FSDP, arXiv 2304.11277.
    """

    Options = SitesOptions
    positional = ("ranks_per_worker",)
    goes_first = True
    round_steps = 1
    gradients: GradientAverager

    def __init__(self, *positional: Any, **options: Any) -> None:
        super().__init__(*positional, **options)
        self.overlaps_backward = (
            self.options.averaging() == Averaging() and self.options.ranks_per_worker != 1
        )
        self.judged = None if self.options.ranks_per_worker is None else "own"

    def enter(self, strategy: Chain, scope: Scope) -> Scope:
        """Cut the ranks into sites."""
        super().enter(strategy, scope)
        where, options, comm = type(strategy).__name__, self.options, strategy.comm
        if scope.gradients is not None:
            raise InputError(f"{where}: has sites already; name Sites once")
        size = options.ranks_per_worker or comm.world_size
        site = Site(comm, comm.group([comm.rank])) if size == comm.world_size else Site.of(comm, size, where)
        self._ranks = range(comm.rank // size * size, comm.rank // size * size + size)
        inside = comm.group([comm.rank]) if site.inside is None else site.inside
        averaging = options.averaging().charged(strategy)
        self.gradients = options.averager(scope.parameters, inside, options.bucket_bytes, averaging)
        return replace(
            scope, parameters=self.gradients.held, site=self.gradients.between(site), gradients=self.gradients
        )

    def before_backward(self, last_micro_batch: bool) -> None:
        """Let buckets leave during the last pass."""
        self.gradients.listen(last_micro_batch, self._weight)

    def before_update(self) -> None:
        """Wait for the averages."""
        scaled = self.strategy.context.scaler is not None
        self.gradients.average(self._weight, scaled=scaled)
        if scaled:
            self.gradients.share_overflow()

    def end_step(self) -> None:
        """Gather parameters in shards."""
        self.gradients.gather()

    @property
    def steps_to_exchange(self) -> int:
        """No exchange after updates."""
        return sys.maxsize

    @property
    def averager(self) -> GradientAverager | None:
        """Averager of gradients, where it averages all ranks' by one call."""
        is_whole = type(self.gradients) is GradientAverager and len(self._ranks) == self.comm.world_size
        return self.gradients if is_whole and self.gradients.is_one_call else None

    @property
    def _weight(self) -> float:
        context = self.strategy.context
        is_everyone = len(self._ranks) == self.comm.world_size
        return context.weight if is_everyone else context.weight_among(self._ranks)

    def close(self) -> None:
        """Remove hooks from the model."""
        self.gradients.close()

    def state_dict(self) -> dict[str, Any]:
        """Rounding errors of the codec."""
        return self.gradients.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from the `state_dict` of the averager of gradients inside a site."""
        self.gradients.load_state_dict(state)
