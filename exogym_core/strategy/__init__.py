"""Strategies: updates of the weights at the end of a local step, and their communication."""

from collections.abc import Mapping, Sequence
from typing import Any

from exogym_core.strategy.acco import ACCOStrategy
from exogym_core.strategy.ad_psgd import ADPSGDStrategy
from exogym_core.strategy.all_reduce import AllReduceStrategy, SimpleReduceStrategy
from exogym_core.strategy.async_diloco import AsyncDiLoCoStrategy
from exogym_core.strategy.async_sparta import AsyncSparseCommunicator, AsyncSPARTAStrategy
from exogym_core.strategy.base import StepContext, Strategy
from exogym_core.strategy.chain import (
    Chain,
    CommunicateOptimizeStrategy,
    CommunicationModule,
    Sites,
)
from exogym_core.strategy.cocodc import CoCoDCCommunicator, CoCoDCStrategy
from exogym_core.strategy.decoupled_diloco import DecoupledDiLoCoStrategy
from exogym_core.strategy.delayed import (
    DelayedDiLoCoCommunicator,
    DelayedDiLoCoStrategy,
    EagerDiLoCoCommunicator,
    EagerDiLoCoStrategy,
)
from exogym_core.strategy.demo import DeMoStrategy
from exogym_core.strategy.desloc import DESLOCStrategy, MomentCommunicator
from exogym_core.strategy.dgc import DGCStrategy, LargestGradients
from exogym_core.strategy.diloco import DiLoCoCommunicator, DiLoCoStrategy
from exogym_core.strategy.dion import DionDirections, DionStrategy
from exogym_core.strategy.dpsgd import DPSGDCommunicator, DPSGDStrategy
from exogym_core.strategy.edit import EDiTStrategy
from exogym_core.strategy.fedavg import AveragingCommunicator, FedAvgStrategy, LocalSGDStrategy
from exogym_core.strategy.gasloc import GASLoCCommunicator, GASLoCStrategy
from exogym_core.strategy.gpa import GPAStrategy
from exogym_core.strategy.halos import HALoSStrategy
from exogym_core.strategy.heloco import HeLoCoStrategy
from exogym_core.strategy.muloco import MuLoCoCommunicator, MuLoCoStrategy
from exogym_core.strategy.noloco import NoLoCoCommunicator, NoLoCoStrategy
from exogym_core.strategy.onebit_adam import OneBitAdamStrategy, OneBitMomenta
from exogym_core.strategy.optimizers import OptimSpec, ensure_optim_spec
from exogym_core.strategy.options import PARTS
from exogym_core.strategy.parts.selectors import (
    IndexSelector,
    PartitionedIndexSelector,
    RandomIndexSelector,
    ShuffledSequentialIndexSelector,
)
from exogym_core.strategy.parts.state import State
from exogym_core.strategy.powersgd import LowRankGradients, PowerSGDStrategy
from exogym_core.strategy.qsgd import QSGDStrategy, StochasticGradients
from exogym_core.strategy.qsparse import QsparseCommunicator, QsparseLocalSGDStrategy
from exogym_core.strategy.sgp import SGPCommunicator, SGPStrategy
from exogym_core.strategy.signsgd import MajorityOfSigns, SignSGDStrategy
from exogym_core.strategy.slowmo import SlowMoCommunicator, SlowMoStrategy
from exogym_core.strategy.snoo import SNOOStrategy
from exogym_core.strategy.sparseloco import SparseLoCoCommunicator, SparseLoCoStrategy
from exogym_core.strategy.sparta import SparseCommunicator, SPARTADiLoCoStrategy, SPARTAStrategy
from exogym_core.strategy.streaming import StreamingDiLoCoCommunicator, StreamingDiLoCoStrategy
from exogym_core.successors import dropped_function
from netsim.errors import InputError, about_option, unknown_name

__all__ = [
    "MODULES",
    "STRATEGIES",
    "ACCOStrategy",
    "ADPSGDStrategy",
    "AllReduceStrategy",
    "AsyncDiLoCoStrategy",
    "AsyncSPARTAStrategy",
    "AsyncSparseCommunicator",
    "AveragingCommunicator",
    "Chain",
    "CoCoDCCommunicator",
    "CoCoDCStrategy",
    "CommunicateOptimizeStrategy",
    "CommunicationModule",
    "DESLOCStrategy",
    "DGCStrategy",
    "DPSGDCommunicator",
    "DPSGDStrategy",
    "DeMoStrategy",
    "DecoupledDiLoCoStrategy",
    "DelayedDiLoCoCommunicator",
    "DelayedDiLoCoStrategy",
    "DiLoCoCommunicator",
    "DiLoCoStrategy",
    "DionDirections",
    "DionStrategy",
    "EDiTStrategy",
    "EagerDiLoCoCommunicator",
    "EagerDiLoCoStrategy",
    "FedAvgStrategy",
    "GASLoCCommunicator",
    "GASLoCStrategy",
    "GPAStrategy",
    "HALoSStrategy",
    "HeLoCoStrategy",
    "IndexSelector",
    "LargestGradients",
    "LocalSGDStrategy",
    "LowRankGradients",
    "MajorityOfSigns",
    "MomentCommunicator",
    "MuLoCoCommunicator",
    "MuLoCoStrategy",
    "NoLoCoCommunicator",
    "NoLoCoStrategy",
    "OneBitAdamStrategy",
    "OneBitMomenta",
    "OptimSpec",
    "PartitionedIndexSelector",
    "PowerSGDStrategy",
    "QSGDStrategy",
    "QsparseCommunicator",
    "QsparseLocalSGDStrategy",
    "RandomIndexSelector",
    "SGPCommunicator",
    "SGPStrategy",
    "SNOOStrategy",
    "SPARTADiLoCoStrategy",
    "SPARTAStrategy",
    "ShuffledSequentialIndexSelector",
    "SignSGDStrategy",
    "SimpleReduceStrategy",
    "Sites",
    "SlowMoCommunicator",
    "SlowMoStrategy",
    "SparseCommunicator",
    "SparseLoCoCommunicator",
    "SparseLoCoStrategy",
    "State",
    "StepContext",
    "StochasticGradients",
    "Strategy",
    "StreamingDiLoCoCommunicator",
    "StreamingDiLoCoStrategy",
    "all_gather",
    "all_reduce",
    "broadcast",
    "build_module",
    "build_strategy",
    "ensure_optim_spec",
    "reduce_scatter",
]

# Functions of EXO Gym on one process-wide group: here a strategy has a communicator of its own.
_OF_THE_STRATEGY = "a strategy's exchanges go through its communicator: write self.comm.{}"
all_gather = dropped_function(
    "all_gather", _OF_THE_STRATEGY.format("all_gather(tensor), which returns the list")
)
all_reduce = dropped_function("all_reduce", _OF_THE_STRATEGY.format("all_reduce(tensor)"))
broadcast = dropped_function("broadcast", _OF_THE_STRATEGY.format("broadcast(tensor, src=0)"))
reduce_scatter = dropped_function("reduce_scatter", _OF_THE_STRATEGY.format("reduce_scatter(tensors)"))

#: Class by its name in experiment files and tables, which its definition gives.
STRATEGIES: dict[str, type[Strategy]] = {
    name: Strategy.registry[name] for name in sorted(Strategy.registry, key=str.casefold)
}

#: Class by its name in the `modules` of a Chain.
MODULES: dict[str, type[Strategy]] = {name: PARTS[name] for name in sorted(PARTS, key=str.casefold)}


def build_module(name: str, **options: Any) -> Strategy:
    """The module called `name` in the `modules` of a Chain, with its constructor's `options`.

    Its name is that in MODULES, or its class's.

    Raises:
        UnknownNameError: no module, or no option of it, has that name.
        InputError: an option's value is wrong.

    >>> build_module("Sites", ranks_per_worker=8).sites.ranks_per_worker
    8
    """
    made_by = MODULES.get(name, {kind.__name__: kind for kind in MODULES.values()}.get(name))
    if made_by is None:
        with about_option("name"):
            raise unknown_name("module", name, MODULES)
    return made_by(**options)


def build_strategy(name: str, **options: Any) -> Strategy:
    """The strategy called `name` in experiment files, with its constructor's `options`.

    `Chain` takes `modules`: a list of mappings with a `name` of MODULES and options each.

    Raises:
        UnknownNameError: no strategy, or no option of it, has that name.
        InputError: an option's value is wrong.

    >>> build_strategy("DiLoCo", H=30).H
    30
    >>> modules = [{"name": "Sites", "ranks_per_worker": 8}, {"name": "DiLoCo", "H": 500}]
    >>> build_strategy("Chain", modules=modules).judged
    'outer'
    """
    if name == "Chain":
        if not options.get("modules"):
            raise InputError("Chain: give modules: a list such as [{name: DiLoCo, H: 500}]")
        return Chain(_modules(options.pop("modules")), **options)
    if name not in STRATEGIES:
        meant = {
            variant.lower(): f"{kind} with {options}"
            for kind, made_by in STRATEGIES.items()
            for variant, options in vars(made_by).get("variants", ())
        }
        raise unknown_name("strategy", name, [*STRATEGIES, "Chain"], meant.get(name.lower(), ""))
    return STRATEGIES[name](**options)


def _modules(given: Any) -> list[Any]:
    if not isinstance(given, Sequence) or isinstance(given, str):
        raise InputError(
            f"Chain: modules={given!r} must be a list such as [{{name: DiLoCo, H: 500}}]", about=("modules",)
        )
    modules = []
    for place, each in enumerate(given):
        with about_option("modules"), about_option(place):
            if isinstance(each, Mapping) and "name" not in each:
                raise InputError(
                    f"Chain: module {dict(each)!r}: say which one, as in {{name: DiLoCo, H: 500}}"
                )
            modules.append(build_module(**each) if isinstance(each, Mapping) else each)
    return modules
