"""DiLoCo: rounds of H local steps, whose mean displacement is the gradient of an outer optimizer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from exogym_core.strategy.absence.patience import Patience
from exogym_core.strategy.absence.peers import Peers
from exogym_core.strategy.communicate_optimize import CommunicateOptimizeStrategy, CommunicationModule
from exogym_core.strategy.options.arguments import number, one_argument, positive_int
from exogym_core.strategy.options.optim import OptimizerLike, OptimSpec, ensure_optim_spec
from exogym_core.strategy.parts.average import Averaging
from exogym_core.strategy.parts.codecs import Codec, codec_named
from exogym_core.strategy.parts.outer import OuterStep
from exogym_core.strategy.sites.sharding import Sharding
from exogym_core.strategy.sites.site import Workers

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor
    from torch.optim import Optimizer

    from exogym_core.strategy.absence.patience import Seconds

__all__ = ["DiLoCoCommunicator", "DiLoCoStrategy"]

#: Nesterov with the paper's learning rate and momentum.
OUTER_OPTIM = OptimSpec(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)


class DiLoCoCommunicator(CommunicationModule):
    """An outer step every `H` steps.

    Args:
        H: local steps a round, exactly.
        outer_optim_spec: the outer optimizer; SGD with Nesterov momentum 0.9 and learning rate 0.7 if None.
        outer_lr: its learning rate, if not said in `outer_optim_spec`.
        outer_momentum: its momentum, likewise.
        codec: how pseudo-gradients travel, by its name in CODECS: "fp32" (as they are), "fp16", "int8", ...
        error_feedback: what the codec rounds off in a round is added to the next round's.
        aggregate: of the workers' pseudo-gradients: "mean", "median" or "trimmed-mean".
        ranks_per_worker: consecutive ranks that form one worker and enter a round with equal parameters.
        patience: how long a round waits for whom; None: for all, as long as it takes.

    Attributes:
        peers: who takes part in rounds that do not wait for all; else None.
        workers: whom this rank averages with in a round; may be set before `_init_node`.
        held: the parameters that this rank does it for, likewise; by default all.
    """

    judged = "outer"
    outer: OuterStep

    def __init__(
        self,
        H: int = 100,  # noqa: N803
        outer_optim_spec: OptimizerLike | None = None,
        *,
        outer_lr: float | None = None,
        outer_momentum: float | None = None,
        codec: str | Codec | None = None,
        error_feedback: bool = False,
        aggregate: str = "mean",
        ranks_per_worker: int = 1,
        patience: Patience | None = None,
    ) -> None:
        where = type(self).__name__
        self.H = positive_int(where, "H", H)
        given = {"lr": outer_lr, "momentum": outer_momentum}
        options: dict[str, Any] = {
            name: number(where, f"outer_{name}", v) for name, v in given.items() if v is not None
        }
        if outer_optim_spec is None:
            self.outer_optim_spec = OUTER_OPTIM.with_options(**options)
        else:
            self.outer_optim_spec = ensure_optim_spec(outer_optim_spec, **options)
        self.averaging = Averaging(codec_named(codec), aggregate, error_feedback)
        self.ranks_per_worker = positive_int(where, "ranks_per_worker", ranks_per_worker)
        self.patience = patience
        self.peers: Peers | None = None
        self.workers: Workers | None = None
        self.held: Sequence[Tensor] | None = None
        self._num_rounds = 0

    def _init_node(self, model: nn.Module, rank: int, num_nodes: int) -> None:
        where = type(self.strategy).__name__
        if self.workers is None:
            self.workers = Workers.of(self.comm, self.ranks_per_worker, where)
        held = self.strategy.trainable if self.held is None else self.held
        self._held = held
        self._num_rounds = 0
        averaging = self.averaging.charged(self.strategy)
        self.outer = OuterStep(held, self.outer_optim_spec, averaging)
        self.peers = Peers.of(self.comm, self.patience, self.ranks_per_worker, where)

    def communicate(self, model: nn.Module, rank: int, num_nodes: int, local_step: int) -> None:
        """The outer step if a round ends with this step."""
        if (local_step + 1) % self.H:
            return
        if self.peers is None:
            self.outer.round(self.workers)
            self._num_rounds += 1
        else:
            self.peers.round(self.outer)

    def judged_state(self) -> dict[str, Tensor]:
        """The outer parameters; of a shard the parts that this rank holds."""
        state = {}
        for (name, parameter), held in zip(self.strategy.named_trainable(), self._held, strict=True):
            value = self.outer.theta(held)
            if value.shape == parameter.shape:
                state[name] = value
            elif value.numel():
                first = held.storage_offset() - parameter.storage_offset()
                state[f"{name}[{first}:{first + value.numel()}]"] = value
        return state

    @property
    def judged_version(self) -> int:
        """Rounds that have ended."""
        return self._num_rounds if self.peers is None else self.peers.number

    def state_dict(self) -> dict[str, Any]:
        """The outer step's state."""
        state = {**self.outer.state_dict(), "num_rounds": self._num_rounds}
        return state if self.peers is None else {**state, "peers": self.peers.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore it."""
        self.outer.load_state_dict(state)
        self._num_rounds = state["num_rounds"]
        if self.peers is not None:
            self.peers.load_state_dict(state["peers"])


class DiLoCoStrategy(CommunicateOptimizeStrategy):
    """`H` local steps, then one step of an outer optimizer on the ranks' mean displacement.

    With inner parameters `theta_i` after a round that began at `theta`, the outer gradient is the mean of
    `theta - theta_i` over the ranks (algorithm 1, line 12) and every rank applies it alike. It works with
    one rank too, where the outer optimizer looks ahead and nothing is sent.

    Bytes: a ring sends `2 (n - 1) / n` times the parameters' encoded bytes per worker every `H` steps.

    A worker may be a site: with `ranks_per_worker=k`, k consecutive ranks average their gradients at each
    step (in buckets, as AllReduce does) and stay equal. At the end of a round each of them exchanges a k-th
    of the pseudo-gradient with its like at the other sites and passes the result on inside its own, so that
    no more goes between sites than for sites of one rank. With `sharding` the ranks of a site hold a part of
    both optimizers' states each, as with FSDP, and a round is exchanged part by part.

    With a time-out a round goes on without ranks that are late or cut off: the outer gradient is the mean over
    those present. Who is left out loses its steps of that round, downloads the newest parameters and state of
    the outer optimizer, skips the steps that the others have done meanwhile and takes part again. Needs
    transport `netsim`, and workers of one rank.

    Args:
        optim_spec: the inner optimizer (AdamW by default); also `inner_optim_spec`, `inner_optim` and
            `inner_optimizer`.
        outer_optim_spec: the outer one (SGD, 0.7, Nesterov momentum 0.9 by default); also `outer_optim` and
            `outer_optimizer`.
        H: local steps a round; also `local_steps` and `num_inner_steps`.
        outer_lr: the outer learning rate.
        outer_momentum: the outer momentum.
        codec: how pseudo-gradients travel, by its name in CODECS: "fp32" (as they are), "fp16", "int8", ...;
            also `hivemind_compression`.
        error_feedback: what the codec rounds off in a round is added to the next round's.
        aggregate: of the workers' pseudo-gradients: "mean", or "median" or "trimmed-mean" against workers that
            send nonsense; these two send `n - 1` times the encoded bytes.
        ranks_per_worker: ranks that form one worker; it must divide their number.
        sharding: inside a worker "NO_SHARD", "SHARD_GRAD_OP", "FULL_SHARD" or "HYBRID_SHARD", see
            `exogym_core.strategy.sites.sharding:Sharding`.
        ranks_per_node: consecutive ranks that are a machine, for "HYBRID_SHARD".
        averaging_timeout: virtual seconds (or text such as "60 s") that averaging may take; then those who cannot
            be reached are left out, or where all can, those with the narrowest connection, and the others begin
            again. 60 where another time-out is given, else there is none.
        all_reduce_strategy: "wait_for_all" waits for ranks that still compute, "no_wait" goes on without them.
        timeout_waiting_for_peers: how long "wait_for_all" does so after the first is there; 600 s where another
            time-out is given, else for ever.
        matchmaking_time: how long "no_wait" gives others to come all the same; 15 s if None.
        join_at: ranks that come late, and when: {3: "10 min"}.
        options: of every Strategy: `lr`, `max_norm`, `lr_scheduler`, ...

    References:
        Douillard et al., DiLoCo: Distributed Low-Communication Training of Language Models, arXiv 2311.08105.
        Jaghouar et al., OpenDiLoCo, arXiv 2407.07852.
    """

    def __init__(
        self,
        optim_spec: OptimizerLike | None = None,
        outer_optim_spec: OptimizerLike | None = None,
        H: int | None = None,  # noqa: N803
        *,
        inner_optimizer: OptimizerLike | None = None,
        outer_optim: OptimizerLike | None = None,
        outer_optimizer: OptimizerLike | None = None,
        local_steps: int | None = None,
        num_inner_steps: int | None = None,
        outer_lr: float | None = None,
        outer_momentum: float | None = None,
        codec: str | Codec | None = None,
        hivemind_compression: str | None = None,
        error_feedback: bool = False,
        aggregate: str = "mean",
        ranks_per_worker: int = 1,
        sharding: str = "NO_SHARD",
        ranks_per_node: int | None = None,
        averaging_timeout: Seconds | None = None,
        all_reduce_strategy: str | None = None,
        timeout_waiting_for_peers: Seconds | None = None,
        matchmaking_time: Seconds | None = None,
        join_at: Mapping[int, Seconds] | None = None,
        **options: Any,
    ) -> None:
        where = type(self).__name__
        self.H = one_argument(where, 100, H=H, local_steps=local_steps, num_inner_steps=num_inner_steps)
        diloco = DiLoCoCommunicator(
            self.H,
            one_argument(
                where,
                None,
                outer_optim_spec=outer_optim_spec,
                outer_optim=outer_optim,
                outer_optimizer=outer_optimizer,
            ),
            outer_lr=outer_lr,
            outer_momentum=outer_momentum,
            codec=one_argument(where, None, codec=codec, hivemind_compression=hivemind_compression),
            error_feedback=error_feedback,
            aggregate=aggregate,
            ranks_per_worker=ranks_per_worker,
            patience=Patience.of(
                where,
                averaging_timeout,
                all_reduce_strategy,
                timeout_waiting_for_peers,
                matchmaking_time,
                join_at,
            ),
        )
        inner = one_argument(where, None, optim_spec=optim_spec, inner_optimizer=inner_optimizer)
        super().__init__([diloco], optim_spec=inner, **options)
        self.diloco = diloco
        self.sharding = Sharding(sharding, ranks_per_node)
        self.overlaps_backward = diloco.ranks_per_worker > 1
        self.leaves_behind = diloco.patience is not None

    def _init_node(self, model: nn.Module, rank: int, num_nodes: int) -> None:
        super()._init_node(model, rank, num_nodes)
        workers = Workers.of(self.comm, self.diloco.ranks_per_worker, type(self).__name__)
        if workers.inside is not None:
            self.gradients = self.sharding.averager(self.trainable, workers.inside)
            self.optim = self.gradients.optimizer(self.optim_spec, model)
            workers, self.diloco.held = self.gradients.between(workers), self.gradients.held
        self.diloco.workers = workers

    def step(self) -> None:
        """Average the gradients inside the worker, clip, update; at the end of a round, the outer step."""
        if self.gradients is not None:
            self.gradients.average(self.sample_weight)
        super().step()

    def _communicate(self) -> None:
        super()._communicate()
        if self.gradients is not None:
            self.gradients.gather()

    def is_ahead(self) -> bool:
        """Whether the others have done the next step while this rank was away."""
        peers = self.diloco.peers
        if peers is None:
            return False
        peers.begin(self.diloco.outer)
        return self.local_step < peers.number * self.H

    def row(self) -> dict[str, Any]:
        """The step's round, where rounds do not wait for all."""
        peers = self.diloco.peers
        return {} if peers is None else peers.row(self.local_step, self.H)

    @property
    def present_ranks(self) -> Sequence[int]:
        """Those of the last round."""
        return super().present_ranks if self.diloco.peers is None else self.diloco.peers.present

    @property
    def optimizers(self) -> list[Optimizer]:
        """The inner and the outer optimizer."""
        return [self.optim, self.diloco.outer.optim]
