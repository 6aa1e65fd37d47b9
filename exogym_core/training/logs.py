"""The loggers that a request names, and what they tell of its run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from exogym_core.results.loggers import FolderLogger, Logger, WandbLogger

if TYPE_CHECKING:
    from pathlib import Path

    from torch import nn

    from exogym_core.training.request import FitRequest

__all__ = ["make_loggers", "run_config"]


def run_config(request: FitRequest, model: nn.Module) -> dict[str, Any]:
    """What identifies a run, in plain values."""
    plain = (bool, int, float, str, type(None))
    strategy = {
        name: value if isinstance(value, plain) else repr(value)
        for name, value in sorted(request.strategy.arguments.items())
    }
    own = {name: value for name, value in vars(request).items() if isinstance(value, plain)}
    return {
        "model": type(model).__name__,
        "model_parameters": sum(parameter.numel() for parameter in model.parameters()) / 1e6,
        "strategy": type(request.strategy).__name__,
        "strategy_config": strategy,
        "topology": request.topology.name if request.topology is not None else None,
        "hosts": request.hosts,
        "compute": request.compute.to_mapping() if request.compute is not None else None,
        **own,
    }


def make_loggers(request: FitRequest, model: nn.Module, checkpoints: Path | None = None) -> list[Logger]:
    """The loggers that the request names; none where logging is disabled.

    Args:
        request: of the run.
        model: what is trained.
        checkpoints: folder of the run's checkpoints, which knows its wandb run too.
    """
    loggers: list[Logger] = []
    if request.disable_logging:
        return loggers
    config = run_config(request, model)
    if request.wandb_project is not None:
        id_file = checkpoints / "wandb" if checkpoints is not None else None
        loggers.append(
            WandbLogger(request.wandb_project, request.run_name, config, request.log_x_axis, id_file)
        )
    if request.run_name is not None:
        loggers.append(FolderLogger(request.run_name, config))
    return loggers
