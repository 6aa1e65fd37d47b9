"""DiLoCo: rounds of H local steps, whose mean displacement is the gradient of an outer optimizer."""

from __future__ import annotations

from exogym_core.strategy.chain import Composition
from exogym_core.strategy.participation.absence import ParticipatingRounds, PatienceOptions
from exogym_core.strategy.participation.sites import SiteOptions
from exogym_core.strategy.parts.outer import OuterOptions

__all__ = ["DiLoCoCommunicator", "DiLoCoOptions", "DiLoCoStrategy"]


class DiLoCoOptions(OuterOptions, SiteOptions, PatienceOptions):
    """Options of DiLoCo as strategy, module and optimizer: rounds, sites, and time-outs for absent ranks."""


class DiLoCoCommunicator(ParticipatingRounds, name="DiLoCo"):
    """An outer step every `H` steps (algorithm 1), with theta equal on all workers::

        theta_i = theta after H local steps of worker i        lines 3 to 8
        Delta = mean over workers of theta - theta_i           line 12, sent by `begin`
        theta = OuterOpt(theta, Delta)                         line 14, `apply`

    Args:
        H: local steps a round.
        outer_optim_spec: the outer optimizer.
        options: of `DiLoCoOptions`.
    """

    Options = DiLoCoOptions
    positional = ("H", "outer_optim_spec")


class DiLoCoStrategy(Composition, name="DiLoCo"):
    """`H` local steps, then one step of an outer optimizer on the workers' mean displacement.

    Bytes: a ring sends `2 (n - 1) / n` times the parameters' encoded bytes per worker every `H` steps.

    With `ranks_per_worker=k` it is `Chain([Sites(k), DiLoCoCommunicator(H)])`. With a time-out a round continues
    without ranks that are late or cut off, see `exogym_core.strategy.participation.absence:Absence`.

    Args:
        optim_spec: the inner optimizer (AdamW by default).
        outer_optim_spec: the outer one (SGD, 0.7, Nesterov momentum 0.9 by default).
        H: local steps a round.
        options: of `DiLoCoOptions`, and of every Strategy: `lr`, `max_norm`, `lr_scheduler`, ...

    References:
        Douillard et al., DiLoCo: Distributed Low-Communication Training of Language Models, arXiv 2311.08105.
        Jaghouar et al., OpenDiLoCo, arXiv 2407.07852.
    """

    module = DiLoCoCommunicator
    positional = ("optim_spec", "outer_optim_spec", "H")
