"""DES-LOC: parameters and the optimizer's moments are averaged each at its own period."""

from __future__ import annotations

from functools import partial
from itertools import compress
from typing import TYPE_CHECKING

import torch
from torch import nn

from exogym_core.strategy.chain import Composition, Module, RoundModule
from exogym_core.strategy.fedavg import AveragingCommunicator
from exogym_core.strategy.optimizers import ensure_optim_spec
from exogym_core.strategy.options import Options, name_in, option, positive_int
from exogym_core.strategy.parts.average import Averaging, AveragingOptions
from exogym_core.strategy.parts.flat import in_buckets

if TYPE_CHECKING:
    from torch import Tensor


__all__ = ["MOMENTS", "DESLOCOptions", "DESLOCStrategy", "MomentCommunicator", "MomentOptions"]

#: Names of moments in torch's optimizers.
MOMENTS = {
    "first": ("exp_avg", "momentum_buffer"),
    "second": ("exp_avg_sq", "max_exp_avg_sq", "exp_inf", "square_avg"),
}


class MomentOptions(Options):
    """Options of `MomentCommunicator`: the moment that is averaged, and its period.

    Args:
        moment: "first" or "second".
        H: steps from average to average.
    """

    moment: str = option("first", name_in(*MOMENTS))
    H: int = option(1, positive_int)


class MomentCommunicator(RoundModule, name="Moments"):
    """Average the local optimizer's first or second moments every `H` steps, as they are.

    What the optimizer does not keep is not sent: SGD without momentum has no moments. Of a parameter that a rank has
    never updated its moment counts as zero there.

    Args:
        options: of `MomentOptions`.
    """

    Options = MomentOptions

    def _init_node(self, model: nn.Module, rank: int, num_nodes: int) -> None:
        """Find the moments that the local optimizer keeps."""
        spec = ensure_optim_spec(self.strategy.optim_spec)
        kept: dict[Tensor, list[str]] = {}
        for group in self.strategy.optim.param_groups:
            tried = nn.Parameter(torch.zeros([1] * group["params"][0].dim()))
            tried.grad = torch.zeros_like(tried)
            optim = spec.build([{**group, "params": [tried]}])
            optim.step()
            names = [name for name in MOMENTS[self.options.moment] if name in optim.state[tried]]
            kept |= dict.fromkeys(group["params"], names)
        self._kept = [kept.get(parameter, []) for parameter in self.scope.parameters]

    @torch.no_grad()
    def end_round(self, number: int) -> None:
        """Average the optimizer's moments over ranks."""
        if self.scope.site.between.world_size == 1:
            return
        for name in MOMENTS[self.options.moment]:
            has_it = [name in names for names in self._kept]
            moments = [self._moment(each, name) for each in compress(self.scope.parameters, has_it)]
            in_buckets(moments, partial(self.scope.site.average, Averaging()))

    def _moment(self, parameter: Tensor, name: str) -> Tensor:
        value = self.strategy.optim.state.get(parameter, {}).get(name)
        return torch.zeros_like(parameter) if value is None else value


class DESLOCOptions(AveragingOptions):
    """Options of DES-LOC: periods of parameters and of both moments.

    Args:
        H: local steps from average to average of the parameters, the paper's K_x; also `local_steps`,
            `num_inner_steps` and `sync_every`.
        Ku: of the first moments; 3 H if None.
        Kv: of the second moments; 6 H if None.
    """

    H: int = option(100, positive_int)
    Ku: int | None = option(None, positive_int)
    Kv: int | None = option(None, positive_int)


class DESLOCStrategy(Composition, name="DESLOC"):
    """Local steps of an adaptive optimizer; parameters, first and second moments are averaged at their own periods.

    After step t (from 1), with x the parameters, u and v the optimizer's moments (Adam's m and v):

        x_i <- mean(x) if t mod K_x = 0,  u_i <- mean(u) if t mod K_u = 0,  v_i <- mean(v) if t mod K_v = 0

    Moments change more slowly than parameters, so theirs may be longer. With equal periods this is Local Adam. It is
    `Chain([AveragingCommunicator(H), MomentCommunicator(first, Ku), MomentCommunicator(second, Kv)])`. A codec is for
    parameters only: rounded moments could become negative.

    Bytes: a ring sends `2 (n - 1) / n` times the parameters' bytes per worker every K_x, every K_u and every K_v steps.

    Args:
        optim_spec: the local optimizer (AdamW by default), as torch has it: the paper's algorithm has no bias
            correction, torch's Adam has. `max_norm` clips as in the paper.
        H: K_x. Ku: K_u. Kv: K_v.
        options: of `DESLOCOptions`, and of every Strategy: `lr`, `max_norm`, `lr_scheduler`, ...

    References:
        Iacob et al., DES-LOC: Desynced Low Communication Adaptive Optimizers for Training Foundation Models, arXiv
        2505.22549. Second-hand: the rule is from a summary of algorithm 1.
    """

    Options = DESLOCOptions

    def compose(self, options: DESLOCOptions) -> list[Module]:
        """Averages of parameters, first and second moments."""
        average = {name: vars(options)[name] for name in ("H", *AveragingOptions.names())}
        first = MomentCommunicator(moment="first", H=options.Ku or 3 * options.H)
        second = MomentCommunicator(moment="second", H=options.Kv or 6 * options.H)
        return [AveragingCommunicator(**average), first, second]
