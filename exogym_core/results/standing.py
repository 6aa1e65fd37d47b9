"""Progress of the run of a folder: written into the folder while it trains, read by `netgym status` and `report`."""

from __future__ import annotations

import contextlib
import json
import os
import time
from typing import TYPE_CHECKING, Any

from exogym_core.results.disk import write_whole
from exogym_core.results.lock import owner_of
from exogym_core.results.progress import eta_seconds
from exogym_core.results.record import RunFolder
from netsim.files.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from exogym_core.results.fit_result import FitResult
    from exogym_core.results.progress import LiveProgress, PlainProgress

__all__ = ["Standing", "folder_status", "progress_elsewhere"]

_NAME = ".status.json"
_SECONDS_BETWEEN = 1.0
_KEPT = ("train_loss", "virtual_seconds", "wall_seconds", "num_peers")


class Standing:
    """Writes the progress of a run, at most once a second; context manager, which leaves nothing behind.

    Args:
        folder: the run's.
        progress: every call is passed on to it.
    """

    def __init__(self, folder: Path, progress: LiveProgress | PlainProgress) -> None:
        self._path, self._progress = folder / _NAME, progress
        self._now: dict[str, Any] = {}
        self._first: tuple[float, int] | None = None
        self._written = 0.0

    def __enter__(self) -> Standing:
        return self

    def __exit__(self, *exception: object) -> None:
        with contextlib.suppress(OSError):
            self._path.unlink()

    def begin(self, label: str, position: int, num_strategies: int, num_steps: int) -> None:
        """Start a strategy."""
        self._progress.begin(label, position, num_strategies, num_steps)
        self._now = {"strategy": label, "position": position, "num_strategies": num_strategies}
        self._now |= {"step": 0, "steps": num_steps, "at": time.time()}
        self._first = None
        self._write()
        self._written = 0.0  # the first step is written at once

    def event(self, row: Mapping[str, Any]) -> None:
        """Take a row of metrics."""
        self._progress.event(row)
        if row["kind"] == "step":
            now = time.time()
            begun, first = self._first = self._first or (now, row["step"])
            self._now |= {"step": row["step"], "at": now} | {name: row[name] for name in _KEPT if name in row}
            self._now["eta_seconds"] = eta_seconds(row["step"], self._now["steps"], first, now - begun)
            if now >= self._written + _SECONDS_BETWEEN:
                self._write()

    def end(self, result: FitResult) -> None:
        """End the strategy."""
        self._progress.end(result)

    def _write(self) -> None:
        self._written = time.time()
        with contextlib.suppress(OSError, ValueError):  # a full disk is for the results to tell
            write_whole(self._path, json.dumps(self._now))


def progress_elsewhere(path: Path) -> str | None:
    """Progress of another process on the run of a folder, in words; None where none works on it."""
    owner = owner_of(path)
    if owner in (None, os.getpid()):
        return None
    now = _now(path)
    return f"process {owner}" if now is None else f"{now['strategy']}: step {now['step']} of {now['steps']}"


def folder_status(path: Path) -> dict[str, Any]:
    """Progress of the run of a folder.

    Returns:
        `state` ("running", "stopped" or "finished"), `process`, `workers`, `strategies` (those that have ended, each
        with `name`, `state`, `steps` and `final_loss`), `now` (what is trained at present) and `checkpoint` (the
        newest one's step).

    Raises:
        InputError: it is no run's folder.
    """
    folder = RunFolder.open(path)
    summary, owner = folder.read_summary(), owner_of(path)
    incomplete = any(entry.get("incomplete") for entry in summary)
    ended = [
        {
            "name": entry["name"],
            "state": _state(entry),
            "steps": entry.get("steps"),
            "final_loss": entry.get("final_loss"),
        }
        for entry in summary
    ]
    now = _now(path)
    is_over = owner is None and bool(summary) and not incomplete and now is None
    checkpoints = [int(each.name.rpartition("-")[2]) for each in path.glob("checkpoints/*/*step-*")]
    return {
        "kind": "run",
        "folder": str(path),
        "state": "finished" if is_over else "running" if owner is not None else "stopped",
        "process": owner,
        "strategies": ended,
        "now": now,
        "checkpoint": max(checkpoints, default=None),
    }


def _state(entry: Mapping[str, Any]) -> str:
    return "failed" if entry.get("failed") else "stopped" if entry.get("incomplete") else "finished"


def _now(path: Path) -> dict[str, Any] | None:
    """Progress that the run has written; None where it trains nothing."""
    try:
        found = json.loads((path / _NAME).read_text(encoding="utf-8"))
        found["silent_seconds"] = round(max(time.time() - found.pop("at"), 0.0), 1)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{path / _NAME}: cannot be read: {error}") from None
    return dict(found)
