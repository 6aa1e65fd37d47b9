"""FedAvg and LocalSGD: train alone, average the parameters every H steps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from exogym_core.strategy.communicate_optimize import CommunicateOptimizeStrategy, CommunicationModule
from exogym_core.strategy.options.arguments import one_argument, positive_int
from exogym_core.strategy.parts.average import Averaging
from exogym_core.strategy.parts.codecs import Codec, codec_named
from exogym_core.strategy.parts.generators import shared_generator

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["AveragingCommunicator", "FedAvgStrategy", "LocalSGDStrategy"]


class AveragingCommunicator(CommunicationModule):
    """Average all parameters every `H` steps, over all ranks or within random islands.

    Each round cuts a permutation of the ranks, drawn from the shared seed, into islands of `island_size`
    (the last may be smaller). Only an island's members exchange anything.

    Judged is what the last round made of the parameters (of this rank's island); before it the initial ones.
    """

    judged = "outer"

    def __init__(
        self,
        island_size: int | None = None,
        *,
        H: int = 1,  # noqa: N803
        codec: str | Codec | None = None,
        aggregate: str = "mean",
    ) -> None:
        where = type(self).__name__
        self.island_size = None if island_size is None else positive_int(where, "island_size", island_size)
        self.H = positive_int(where, "H", H)
        self.averaging = Averaging(codec_named(codec), aggregate)

    def _init_node(self, model: nn.Module, rank: int, num_nodes: int) -> None:
        self.averaging = self.averaging.charged(self.strategy)
        self._num_rounds = 0
        self._result = {name: value.detach().clone() for name, value in self.strategy.named_trainable()}

    def judged_state(self) -> dict[str, Tensor]:
        """The parameters that the last round made."""
        return self._result

    @property
    def judged_version(self) -> int:
        """Rounds that have ended."""
        return self._num_rounds

    def communicate(self, model: nn.Module, rank: int, num_nodes: int, local_step: int) -> None:
        """Average if a round ends with this step."""
        if (local_step + 1) % self.H:
            return
        members = self.island(rank, num_nodes, local_step // self.H)
        # An island that comes again goes over the connections that it has.
        comm = self.comm if len(members) == num_nodes else self.comm.group(members, reuse=True)
        if comm.world_size > 1:
            self.averaging.tensors(comm, self.strategy.trainable)
        self._num_rounds += 1
        for name, value in self.strategy.named_trainable():
            self._result[name].copy_(value.detach())

    def state_dict(self) -> dict[str, Any]:
        """What the last round made, and how many have ended."""
        return {"num_rounds": self._num_rounds, "result": list(self._result.values())}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore it."""
        self._num_rounds = state["num_rounds"]
        for value, saved in zip(self._result.values(), state["result"], strict=True):
            value.copy_(saved)

    def island(self, rank: int, num_nodes: int, round_number: int) -> list[int]:
        """The ranks that `rank` averages with in the 0-based round, itself included, sorted."""
        if self.island_size is None or self.island_size >= num_nodes:
            return list(range(num_nodes))
        generator = shared_generator(self.seed, "islands", round_number)
        islands = torch.split(torch.randperm(num_nodes, generator=generator), self.island_size)
        return next(sorted(island.tolist()) for island in islands if rank in island)


class FedAvgStrategy(CommunicateOptimizeStrategy):
    """`H` local steps, then replace the parameters by their mean (over all ranks or random islands).

    Bytes: a ring sends `2 (n - 1) / n` times the parameters' bytes per worker every `H` steps, with n the
    size of the island. Optimizer states stay local.

    Args:
        inner_optim: the local optimizer (AdamW by default), also `optim_spec` or `inner_optim_spec`.
        island_size: average within random groups of this many ranks, drawn anew each round; all if None or
            above the number of ranks.
        H: local steps a round; also called `local_steps` and `num_inner_steps`.
        max_norm: clip the norm of the local gradient to this.
        codec: of the parameters on the wire, by its name in CODECS: "fp32" (as they are), "fp16", "int8", ...
        aggregate: of the parameters: "mean", or "median" or "trimmed-mean" against workers that send nonsense;
            these two send `n - 1` times the encoded bytes.
        options: of every Strategy: `lr`, `lr_scheduler`, ...

    References:
        McMahan et al., Communication-Efficient Learning of Deep Networks from Decentralized Data, arXiv
        1602.05629, algorithm 1 with all clients in every round.
    """

    default_steps = 1

    def __init__(
        self,
        inner_optim: Any = None,
        island_size: int | None = None,
        H: int | None = None,  # noqa: N803
        max_norm: float | None = None,
        *,
        local_steps: int | None = None,
        num_inner_steps: int | None = None,
        codec: str | Codec | None = None,
        aggregate: str = "mean",
        **options: Any,
    ) -> None:
        where = type(self).__name__
        self.H = one_argument(
            where, self.default_steps, H=H, local_steps=local_steps, num_inner_steps=num_inner_steps
        )
        averaging = AveragingCommunicator(island_size, H=self.H, codec=codec, aggregate=aggregate)
        super().__init__([averaging], inner_optim=inner_optim, max_norm=max_norm, **options)


class LocalSGDStrategy(FedAvgStrategy):
    """FedAvg under the name it has among equal workers, with rounds of 8 steps by default.

    References:
        Stich, Local SGD Converges Fast and Communicates Little, arXiv 1805.09767.
    """

    default_steps = 8
