"""How many steps strategies needed to a loss in runs of the user's, for advice."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

from exogym_core.names import visible
from exogym_core.planning.step_ratio import Ratio
from exogym_core.results.record import RunFolder
from netsim.files.errors import InputError

__all__ = ["step_ratios"]


def step_ratios(path: str | Path) -> dict[str, Ratio]:
    """Steps to the loss that all strategies of a run came to, over the fewest.

    That loss is the highest of their lowest validation losses; a strategy's steps are those of its first evaluation at
    or below it. Several seeds give the range.

    Args:
        path: a run's folder.

    Raises:
        InputError: it is no run, or has no evaluations.
    """
    folder = RunFolder.open(Path(path))
    curves: dict[str, list[list[tuple[float, float]]]] = defaultdict(list)
    for entry in folder.finished():
        name = str(entry.get("strategy", entry["name"]))
        for seed in entry.get("seeds") or [None]:
            rows = folder.read_metrics(str(entry["name"]), "validation", seed)
            losses = [(row["step"], row.get("judged_loss", row.get("global_loss"))) for row in rows]
            curves[name].append([(step, loss) for step, loss in losses if loss is not None])
    curves = {name: runs for name, runs in curves.items() if all(runs)}
    if not curves:
        raise InputError(f"{visible(path)}: has no evaluations to take steps from; set evaluate.every")
    target = max(min(loss for _, loss in run) for runs in curves.values() for run in runs)
    steps = {
        name: [max(next(step for step, loss in run if loss <= target), 1.0) for run in runs]
        for name, runs in curves.items()
    }
    fewest = min(sum(needed) / len(needed) for needed in steps.values())
    source = f"{visible(path)} to loss {target:.4g}, {max(map(len, steps.values()))} seeds"
    return {
        name: Ratio(sum(needed) / len(needed) / fewest, min(needed) / fewest, max(needed) / fewest, source)
        for name, needed in steps.items()
    }
