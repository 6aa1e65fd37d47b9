"""`netgym doctor`: versions, cores and limits of this machine, how the engine runs, and which extras are installed."""

from __future__ import annotations

import json
import os
import platform
import resource
from importlib import metadata, util

import click

from exogym_core.app.common_options import debug_flag, plain_json
from netsim.network.build import engine_state

__all__ = ["doctor"]

_EXTRAS = {
    "demo": (("sklearn",), "the digits data of README's comparison"),
    "pandas": (("pandas", "pyarrow"), "tables as data frames"),
    "ray": (("ray", "optuna"), "studies and ranks over machines, searches"),
    "text": (("datasets", "tokenizers"), "text data and tokenizers"),
    "tracking": (("wandb", "mlflow", "tensorboard"), "trackers"),
}
"""By extra: its modules, and what they bring."""


@click.command()
@plain_json
@debug_flag
def doctor(as_json: bool) -> None:
    """Show versions, cores, limits, how the network engine runs, and missing extras."""
    facts = _facts()
    if as_json:
        click.echo(json.dumps(facts, indent=2))
        return
    for name, value in facts.items():
        if isinstance(value, dict):
            for key, each in value.items():
                click.echo(f"{name + ' ' + key:<24} {each}")
        else:
            click.echo(f"{name:<24} {value}")


def _facts() -> dict[str, str | int | dict[str, str]]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return {
        "netgym": metadata.version("netgym"),
        "python": platform.python_version(),
        "torch": metadata.version("torch"),
        "system": f"{platform.system()} {platform.machine()}",
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        "open files": f"{soft}, at most {hard}",
        "network engine": engine_state(),
        "extra": {name: _extra(*modules) for name, modules in _EXTRAS.items()},
    }


def _extra(modules: tuple[str, ...], what: str) -> str:
    missing = [name for name in modules if util.find_spec(name) is None]
    return f"missing {', '.join(missing)}: {what}" if missing else "installed"
