"""Parts that benchmarks share: arguments, tables, pictures, processor time, commands, another checkout."""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from torch import nn
    from torch.utils.data import Dataset

    from exogym_core import FitResult
    from exogym_core.strategy import Strategy

NETGYM, NETSIM = ([sys.executable, "-m", name] for name in ("exogym_core", "netsim"))
"""The commands by the code that is imported here."""
REALTIME = ("chrt", "-r", "10")
"""Words before a command that is measured whatever else this machine does."""


def parser(description: str | None) -> argparse.ArgumentParser:
    """Parser of a benchmark's arguments; `description` is its docstring, line by line."""
    return argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def heading(*cells: object) -> None:
    """Print the first two lines of a Markdown table."""
    row(*cells)
    print("|---" * len(cells) + "|", flush=True)


def row(*cells: object) -> None:
    """Print a row of a Markdown table."""
    print(f"| {' | '.join(map(str, cells))} |", flush=True)


def machine() -> str:
    """This machine, and the versions that decide its speed."""
    import torch

    python = f"Python {platform.python_version()}, torch {torch.__version__}"
    return f"{platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, {python}"


def cpu_seconds(whose: int = resource.RUSAGE_SELF) -> float:
    """Processor seconds of this process, or of its ended children (`resource.RUSAGE_CHILDREN`)."""
    usage = resource.getrusage(whose)
    return usage.ru_utime + usage.ru_stime


def peak_mb(whose: int = resource.RUSAGE_SELF) -> float:
    """Peak memory of this process, or the largest of its ended children."""
    return resource.getrusage(whose).ru_maxrss / 1e3


def in_process(file: str, *arguments: str, checkout: Path | None = None) -> Any:
    """JSON on the last line that a benchmark's file prints in a process of its own, by a `checkout`'s code.

    Raises:
        CalledProcessError: it fails; what it wrote on stderr is printed.
    """
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    environment |= {} if checkout is None else {"PYTHONPATH": str(checkout)}
    command = [sys.executable, str(Path(file).resolve()), *arguments]
    done = subprocess.run(
        command, env=environment, cwd=checkout, stdout=subprocess.PIPE, text=True, check=True
    )
    return json.loads(done.stdout.splitlines()[-1])


def fitted(
    model: nn.Module, data: Dataset[Any], strategy: Strategy, num_nodes: int, steps: int, **options: Any
) -> FitResult:
    """Result of training in threads, in any number of epochs."""
    from exogym_core import LocalTrainer

    options |= {"strategy": strategy, "num_nodes": num_nodes, "max_steps": steps, "num_epochs": steps}
    trainer = LocalTrainer(model, data, None)
    trainer.fit(**options, workers="threads", device="cpu", progress=False)
    assert trainer.result is not None
    return trainer.result


def draw_lines(
    path: Path, places: Sequence[float], lines: Mapping[str, Iterable[float]], **axes_settings: Any
) -> None:
    """Write a picture with a line for each entry of `lines`."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 4), layout="constrained")
    for name, values in lines.items():
        axes.plot(places, list(values), marker="o", label=name)
    axes.set(**axes_settings)
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=110)
