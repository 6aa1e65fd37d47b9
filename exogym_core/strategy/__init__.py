"""What happens at the end of a local step: how weights change and what is communicated."""

from collections.abc import Mapping, Sequence
from typing import Any

from exogym_core.strategy.ad_psgd import ADPSGDStrategy
from exogym_core.strategy.async_diloco import AsyncDiLoCoStrategy
from exogym_core.strategy.async_sparta import AsyncSparseCommunicator, AsyncSPARTAStrategy
from exogym_core.strategy.base import Strategy
from exogym_core.strategy.chain import Chain, Module
from exogym_core.strategy.cocodc import CoCoDCCommunicator, CoCoDCStrategy
from exogym_core.strategy.coded_rounds import CodedRounds
from exogym_core.strategy.communicate import all_gather, all_reduce, broadcast, reduce_scatter
from exogym_core.strategy.communicate_optimize import CommunicateOptimizeStrategy, CommunicationModule
from exogym_core.strategy.context import StepContext
from exogym_core.strategy.decoupled_diloco import DecoupledDiLoCoStrategy
from exogym_core.strategy.delayed import DelayedDiLoCoCommunicator, DelayedDiLoCoStrategy
from exogym_core.strategy.demo import DeMoStrategy
from exogym_core.strategy.desloc import DESLOCStrategy, MomentCommunicator
from exogym_core.strategy.dgc import DGCStrategy, LargestGradients
from exogym_core.strategy.diloco import DiLoCoCommunicator, DiLoCoStrategy
from exogym_core.strategy.dion import DionDirections, DionStrategy
from exogym_core.strategy.dpsgd import DPSGDCommunicator, DPSGDStrategy
from exogym_core.strategy.eager import EagerDiLoCoCommunicator, EagerDiLoCoStrategy
from exogym_core.strategy.exchange import GradientExchange
from exogym_core.strategy.fedavg import AveragingCommunicator, FedAvgStrategy, LocalSGDStrategy
from exogym_core.strategy.gasloc import GASLoCCommunicator, GASLoCStrategy
from exogym_core.strategy.halos import HALoSStrategy
from exogym_core.strategy.heloco import HeLoCoStrategy
from exogym_core.strategy.muloco import MuLoCoCommunicator, MuLoCoStrategy
from exogym_core.strategy.noloco import NoLoCoCommunicator, NoLoCoStrategy
from exogym_core.strategy.onebit_adam import OneBitAdamStrategy, OneBitMomenta
from exogym_core.strategy.options.optim import OptimSpec, ensure_optim_spec
from exogym_core.strategy.parts.selectors import (
    IndexSelector,
    PartitionedIndexSelector,
    RandomIndexSelector,
    ShuffledSequentialIndexSelector,
)
from exogym_core.strategy.powersgd import LowRankGradients, PowerSGDStrategy
from exogym_core.strategy.qsgd import QSGDStrategy, StochasticGradients
from exogym_core.strategy.qsparse import QsparseCommunicator, QsparseLocalSGDStrategy
from exogym_core.strategy.sgp import SGPCommunicator, SGPStrategy
from exogym_core.strategy.signsgd import MajorityOfSigns, SignSGDStrategy
from exogym_core.strategy.simple_reduce import AllReduceStrategy, SimpleReduceStrategy
from exogym_core.strategy.sites.sites import Sites
from exogym_core.strategy.slowmo import SlowMoCommunicator, SlowMoStrategy
from exogym_core.strategy.sparseloco import SparseLoCoCommunicator, SparseLoCoStrategy
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
    "CoCoDCCommunicator",
    "CoCoDCStrategy",
    "CodedRounds",
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
    "EagerDiLoCoCommunicator",
    "EagerDiLoCoStrategy",
    "FedAvgStrategy",
    "GASLoCCommunicator",
    "GASLoCStrategy",
    "GradientExchange",
    "HALoSStrategy",
    "HeLoCoStrategy",
    "IndexSelector",
    "LargestGradients",
    "LocalSGDStrategy",
    "LowRankGradients",
    "MajorityOfSigns",
    "Module",
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

#: Name in experiment files and tables -> class.
STRATEGIES: dict[str, type[Strategy]] = {
    "ADPSGD": ADPSGDStrategy,
    "AllReduce": SimpleReduceStrategy,
    "AsyncDiLoCo": AsyncDiLoCoStrategy,
    "AsyncSPARTA": AsyncSPARTAStrategy,
    "CoCoDC": CoCoDCStrategy,
    "DecoupledDiLoCo": DecoupledDiLoCoStrategy,
    "DelayedDiLoCo": DelayedDiLoCoStrategy,
    "DeMo": DeMoStrategy,
    "DESLOC": DESLOCStrategy,
    "DGC": DGCStrategy,
    "DiLoCo": DiLoCoStrategy,
    "Dion": DionStrategy,
    "DPSGD": DPSGDStrategy,
    "EagerDiLoCo": EagerDiLoCoStrategy,
    "FedAvg": FedAvgStrategy,
    "GASLoC": GASLoCStrategy,
    "HALoS": HALoSStrategy,
    "HeLoCo": HeLoCoStrategy,
    "LocalSGD": LocalSGDStrategy,
    "MuLoCo": MuLoCoStrategy,
    "NoLoCo": NoLoCoStrategy,
    "OneBitAdam": OneBitAdamStrategy,
    "PowerSGD": PowerSGDStrategy,
    "QSGD": QSGDStrategy,
    "QsparseLocalSGD": QsparseLocalSGDStrategy,
    "SGP": SGPStrategy,
    "SignSGD": SignSGDStrategy,
    "SlowMo": SlowMoStrategy,
    "SparseLoCo": SparseLoCoStrategy,
    "SPARTA": SPARTAStrategy,
    "SPARTA+DiLoCo": SPARTADiLoCoStrategy,
    "StreamingDiLoCo": StreamingDiLoCoStrategy,
}


#: Name of a module in the `modules` of a Chain -> class.
MODULES: dict[str, type[Module]] = {
    "AsyncSPARTA": AsyncSparseCommunicator,
    "CoCoDC": CoCoDCCommunicator,
    "DelayedDiLoCo": DelayedDiLoCoCommunicator,
    "DGC": LargestGradients,
    "DiLoCo": DiLoCoCommunicator,
    "Dion": DionDirections,
    "DPSGD": DPSGDCommunicator,
    "EagerDiLoCo": EagerDiLoCoCommunicator,
    "FedAvg": AveragingCommunicator,
    "GASLoC": GASLoCCommunicator,
    "Moments": MomentCommunicator,
    "MuLoCo": MuLoCoCommunicator,
    "NoLoCo": NoLoCoCommunicator,
    "OneBitAdam": OneBitMomenta,
    "PowerSGD": LowRankGradients,
    "QSGD": StochasticGradients,
    "QsparseLocalSGD": QsparseCommunicator,
    "SGP": SGPCommunicator,
    "SignSGD": MajorityOfSigns,
    "Sites": Sites,
    "SlowMo": SlowMoCommunicator,
    "SparseLoCo": SparseLoCoCommunicator,
    "SPARTA": SparseCommunicator,
    "StreamingDiLoCo": StreamingDiLoCoCommunicator,
}


def build_module(name: str, **options: Any) -> Module:
    """The module called `name` in the `modules` of a Chain, with its constructor's `options`.

    It is known by its name in MODULES, and by its class's.

    Raises:
        UnknownNameError: no module, or no option of it, has that name.
        InputError: an option's value is wrong.

    >>> build_module("Sites", ranks_per_worker=8).options.ranks_per_worker
    8
    """
    made_by = MODULES.get(name, {kind.__name__: kind for kind in MODULES.values()}.get(name))
    if made_by is None:
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
