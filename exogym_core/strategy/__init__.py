"""What happens at the end of a local step: how weights change and what is communicated."""

from collections.abc import Mapping, Sequence
from typing import Any

from exogym_core.strategy.ad_psgd import ADPSGDStrategy
from exogym_core.strategy.async_diloco import AsyncDiLoCoStrategy, HeLoCoStrategy
from exogym_core.strategy.async_sparta import AsyncSparseCommunicator, AsyncSPARTAStrategy
from exogym_core.strategy.base import Strategy
from exogym_core.strategy.chain import Chain, Module
from exogym_core.strategy.communicate import all_gather, all_reduce, broadcast, reduce_scatter
from exogym_core.strategy.communicate_optimize import CommunicateOptimizeStrategy, CommunicationModule
from exogym_core.strategy.context import StepContext
from exogym_core.strategy.decoupled_diloco import DecoupledDiLoCoStrategy
from exogym_core.strategy.delayed import (
    DelayedDiLoCoCommunicator,
    DelayedDiLoCoStrategy,
    EagerDiLoCoCommunicator,
    EagerDiLoCoStrategy,
)
from exogym_core.strategy.demo import DeMoStrategy
from exogym_core.strategy.desloc import DESLOCStrategy, MomentCommunicator
from exogym_core.strategy.diloco import DiLoCoCommunicator, DiLoCoStrategy
from exogym_core.strategy.dpsgd import DPSGDCommunicator, DPSGDStrategy
from exogym_core.strategy.fedavg import AveragingCommunicator, FedAvgStrategy, LocalSGDStrategy
from exogym_core.strategy.gasloc import GASLoCCommunicator, GASLoCStrategy
from exogym_core.strategy.halos import HALoSStrategy
from exogym_core.strategy.noloco import NoLoCoCommunicator, NoLoCoStrategy
from exogym_core.strategy.options.optim import OptimSpec, ensure_optim_spec
from exogym_core.strategy.parts.selectors import (
    IndexSelector,
    PartitionedIndexSelector,
    RandomIndexSelector,
    ShuffledSequentialIndexSelector,
)
from exogym_core.strategy.powersgd import LowRankGradients, PowerSGDStrategy
from exogym_core.strategy.sgp import SGPCommunicator, SGPStrategy
from exogym_core.strategy.simple_reduce import AllReduceStrategy, SimpleReduceStrategy
from exogym_core.strategy.sites.sites import Sites
from exogym_core.strategy.slowmo import SlowMoCommunicator, SlowMoStrategy
from exogym_core.strategy.sparta import SparseCommunicator, SPARTAStrategy
from exogym_core.strategy.sparta_diloco import SPARTADiLoCoStrategy
from exogym_core.strategy.streaming import StreamingDiLoCoCommunicator, StreamingDiLoCoStrategy
from netsim.files.errors import InputError, unknown_name

__all__ = [
    "MODULES",
    "STRATEGIES",
    "ADPSGDStrategy",
    "AllReduceStrategy",
    "AsyncDiLoCoStrategy",
    "AsyncSPARTAStrategy",
    "AsyncSparseCommunicator",
    "AveragingCommunicator",
    "Chain",
    "CommunicateOptimizeStrategy",
    "CommunicationModule",
    "DESLOCStrategy",
    "DPSGDCommunicator",
    "DPSGDStrategy",
    "DeMoStrategy",
    "DecoupledDiLoCoStrategy",
    "DelayedDiLoCoCommunicator",
    "DelayedDiLoCoStrategy",
    "DiLoCoCommunicator",
    "DiLoCoStrategy",
    "EagerDiLoCoCommunicator",
    "EagerDiLoCoStrategy",
    "FedAvgStrategy",
    "GASLoCCommunicator",
    "GASLoCStrategy",
    "HALoSStrategy",
    "HeLoCoStrategy",
    "IndexSelector",
    "LocalSGDStrategy",
    "LowRankGradients",
    "Module",
    "MomentCommunicator",
    "NoLoCoCommunicator",
    "NoLoCoStrategy",
    "OptimSpec",
    "PartitionedIndexSelector",
    "PowerSGDStrategy",
    "RandomIndexSelector",
    "SGPCommunicator",
    "SGPStrategy",
    "SPARTADiLoCoStrategy",
    "SPARTAStrategy",
    "ShuffledSequentialIndexSelector",
    "SimpleReduceStrategy",
    "Sites",
    "SlowMoCommunicator",
    "SlowMoStrategy",
    "SparseCommunicator",
    "StepContext",
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

#: Name in experiment files and tables -> class.
STRATEGIES: dict[str, type[Strategy]] = {
    "ADPSGD": ADPSGDStrategy,
    "AllReduce": SimpleReduceStrategy,
    "AsyncDiLoCo": AsyncDiLoCoStrategy,
    "AsyncSPARTA": AsyncSPARTAStrategy,
    "DESLOC": DESLOCStrategy,
    "DPSGD": DPSGDStrategy,
    "DeMo": DeMoStrategy,
    "DelayedDiLoCo": DelayedDiLoCoStrategy,
    "DecoupledDiLoCo": DecoupledDiLoCoStrategy,
    "DiLoCo": DiLoCoStrategy,
    "EagerDiLoCo": EagerDiLoCoStrategy,
    "FedAvg": FedAvgStrategy,
    "HALoS": HALoSStrategy,
    "HeLoCo": HeLoCoStrategy,
    "LocalSGD": LocalSGDStrategy,
    "PowerSGD": PowerSGDStrategy,
    "GASLoC": GASLoCStrategy,
    "NoLoCo": NoLoCoStrategy,
    "SGP": SGPStrategy,
    "SPARTA": SPARTAStrategy,
    "SPARTA+DiLoCo": SPARTADiLoCoStrategy,
    "SlowMo": SlowMoStrategy,
    "StreamingDiLoCo": StreamingDiLoCoStrategy,
}


#: Name of a module in the `modules` of a Chain -> class.
MODULES: dict[str, type[Module]] = {
    "DPSGD": DPSGDCommunicator,
    "DelayedDiLoCo": DelayedDiLoCoCommunicator,
    "AsyncSPARTA": AsyncSparseCommunicator,
    "DiLoCo": DiLoCoCommunicator,
    "EagerDiLoCo": EagerDiLoCoCommunicator,
    "FedAvg": AveragingCommunicator,
    "PowerSGD": LowRankGradients,
    "GASLoC": GASLoCCommunicator,
    "Moments": MomentCommunicator,
    "NoLoCo": NoLoCoCommunicator,
    "SGP": SGPCommunicator,
    "SPARTA": SparseCommunicator,
    "Sites": Sites,
    "SlowMo": SlowMoCommunicator,
    "StreamingDiLoCo": StreamingDiLoCoCommunicator,
}


def build_module(name: str, **options: Any) -> Module:
    """The module called `name` in the `modules` of a Chain, with its constructor's `options`.

    Raises:
        UnknownNameError: no module, or no option of it, has that name.
        InputError: an option's value is wrong.

    >>> build_module("Sites", ranks_per_worker=8).options.ranks_per_worker
    8
    """
    if name not in MODULES:
        raise unknown_name("module", name, MODULES)
    return MODULES[name](**options)


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
        return Chain(_modules(options.pop("modules", ())), **options)
    if name not in STRATEGIES:
        raise unknown_name("strategy", name, [*STRATEGIES, "Chain"])
    return STRATEGIES[name](**options)


def _modules(told: Any) -> list[Any]:
    if not isinstance(told, Sequence) or isinstance(told, str):
        raise InputError(f"Chain: modules={told!r} must be a list such as [{{name: DiLoCo, H: 500}}]")
    modules = []
    for each in told:
        if isinstance(each, Mapping) and "name" not in each:
            raise InputError(f"Chain: module {dict(each)!r}: say which one, as in {{name: DiLoCo, H: 500}}")
        modules.append(build_module(**each) if isinstance(each, Mapping) else each)
    return modules
