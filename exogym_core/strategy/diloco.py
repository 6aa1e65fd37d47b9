"""DiLoCo: rounds of H local steps, whose mean displacement is the gradient of an outer optimizer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from exogym_core.strategy.arguments import number, one_argument, positive_int
from exogym_core.strategy.communicate_optimize import CommunicateOptimizeStrategy, CommunicationModule
from exogym_core.strategy.optim import OptimizerLike, OptimSpec, ensure_optim_spec
from exogym_core.strategy.parts.codecs import Codec, codec_named
from exogym_core.strategy.parts.outer import OuterStep

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch.optim import Optimizer

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
        codec: how pseudo-gradients travel: "fp32" (as they are), "fp16", "bf16" or "int8".
    """

    outer: OuterStep

    def __init__(
        self,
        H: int = 100,  # noqa: N803
        outer_optim_spec: OptimizerLike | None = None,
        *,
        outer_lr: float | None = None,
        outer_momentum: float | None = None,
        codec: str | Codec | None = None,
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
        self.codec = codec_named(codec)

    def _init_node(self, model: nn.Module, rank: int, num_nodes: int) -> None:
        self.outer = OuterStep(self.strategy.trainable, self.outer_optim_spec, self.codec)

    def communicate(self, model: nn.Module, rank: int, num_nodes: int, local_step: int) -> None:
        """The outer step if a round ends with this step."""
        if (local_step + 1) % self.H == 0:
            self.outer.round(self.comm)

    def state_dict(self) -> dict[str, Any]:
        """The outer step's state."""
        return self.outer.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore it."""
        self.outer.load_state_dict(state)


class DiLoCoStrategy(CommunicateOptimizeStrategy):
    """`H` local steps, then one step of an outer optimizer on the ranks' mean displacement.

    With inner parameters `theta_i` after a round that began at `theta`, the outer gradient is the mean of
    `theta - theta_i` over the ranks (algorithm 1, line 12) and every rank applies it alike. It works with
    one rank too, where the outer optimizer looks ahead and nothing is sent.

    Bytes: a ring sends `2 (n - 1) / n` times the parameters' encoded bytes per worker every `H` steps.

    Args:
        optim_spec: the inner optimizer (AdamW by default); also `inner_optim_spec`, `inner_optim` and
            `inner_optimizer`.
        outer_optim_spec: the outer one (SGD, 0.7, Nesterov momentum 0.9 by default); also `outer_optim` and
            `outer_optimizer`.
        H: local steps a round; also `local_steps` and `num_inner_steps`.
        outer_lr: the outer learning rate.
        outer_momentum: the outer momentum.
        codec: how pseudo-gradients travel: "fp32" (as they are), "fp16", "bf16" or "int8"; also
            `hivemind_compression`.
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
        )
        inner = one_argument(where, None, optim_spec=optim_spec, inner_optimizer=inner_optimizer)
        super().__init__([diloco], optim_spec=inner, **options)
        self.diloco = diloco

    @property
    def optimizers(self) -> list[Optimizer]:
        """The inner and the outer optimizer."""
        return [self.optim, self.diloco.outer.optim]
