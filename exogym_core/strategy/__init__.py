"""What happens at the end of a local step: how weights change and what is communicated."""

from typing import Any

from exogym_core.strategy.all_reduce import AllReduceStrategy, SimpleReduceStrategy
from exogym_core.strategy.base import Strategy
from exogym_core.strategy.communicate_optimize import CommunicateOptimizeStrategy, CommunicationModule
from exogym_core.strategy.context import StepContext
from exogym_core.strategy.demo import DeMoStrategy
from exogym_core.strategy.diloco import DiLoCoCommunicator, DiLoCoStrategy
from exogym_core.strategy.fedavg import AveragingCommunicator, FedAvgStrategy, LocalSGDStrategy
from exogym_core.strategy.options.optim import OptimSpec, ensure_optim_spec
from exogym_core.strategy.parts.selectors import (
    IndexSelector,
    PartitionedIndexSelector,
    RandomIndexSelector,
    ShuffledSequentialIndexSelector,
)
from exogym_core.strategy.sparta import SparseCommunicator, SPARTAStrategy
from exogym_core.strategy.sparta_diloco import SPARTADiLoCoStrategy
from netsim.files.errors import unknown_name

__all__ = [
    "STRATEGIES",
    "AllReduceStrategy",
    "AveragingCommunicator",
    "CommunicateOptimizeStrategy",
    "CommunicationModule",
    "DeMoStrategy",
    "DiLoCoCommunicator",
    "DiLoCoStrategy",
    "FedAvgStrategy",
    "IndexSelector",
    "LocalSGDStrategy",
    "OptimSpec",
    "PartitionedIndexSelector",
    "RandomIndexSelector",
    "SPARTADiLoCoStrategy",
    "SPARTAStrategy",
    "ShuffledSequentialIndexSelector",
    "SimpleReduceStrategy",
    "SparseCommunicator",
    "StepContext",
    "Strategy",
    "build_strategy",
    "ensure_optim_spec",
]

#: Name in experiment files and tables -> class.
STRATEGIES: dict[str, type[Strategy]] = {
    "AllReduce": SimpleReduceStrategy,
    "DeMo": DeMoStrategy,
    "DiLoCo": DiLoCoStrategy,
    "FedAvg": FedAvgStrategy,
    "LocalSGD": LocalSGDStrategy,
    "SPARTA": SPARTAStrategy,
    "SPARTA+DiLoCo": SPARTADiLoCoStrategy,
}


def build_strategy(name: str, **options: Any) -> Strategy:
    """The strategy called `name` in experiment files, with its constructor's `options`.

    Raises:
        UnknownNameError: no strategy, or no option of it, has that name.
        InputError: an option's value is wrong.

    >>> build_strategy("DiLoCo", H=30).H
    30
    """
    if name not in STRATEGIES:
        raise unknown_name("strategy", name, STRATEGIES)
    return STRATEGIES[name](**options)
