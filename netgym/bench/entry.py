"""An entry of the benchmark: one strategy's scores, and a digest that shows later changes.

The digest does not prove that the code plays fair: the entry holds the code, so that others can run it again, and
equal code gives equal scores.
"""

from __future__ import annotations

import ast
import hashlib
import json
import math
import platform
from importlib import metadata
from typing import TYPE_CHECKING, Any

from exogym_core.names import visible
from exogym_core.results.reading import find_runs
from exogym_core.results.seeds import t_interval
from netgym.bench import UNCHARGED
from netgym.studies.report import members_of
from netsim import read_bytes
from netsim.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from exogym_core.results.reading import SeedResult
    from netgym.studies.report import Member

__all__ = ["board_rows", "digest_of", "entries_of", "own_entry", "read_entries"]

Entry = dict[str, Any]

_MOST_BYTES = 100_000_000  # of a strategy's file, and of an entry


def own_entry(path: Path) -> tuple[str, dict[str, dict[str, Any]]]:
    """`module:Class` of the strategy in a file, and its options by task; nothing of the file is run.

    It is the class called `Entry`, or the only public one at the file's top that derives from something. Its options
    are those of a plain `OPTIONS = {"digits": {"lr": 4e-3}, "text": {...}}` at the file's top, if there is one:
    learning rates are each task's own, for shipped strategies and for others.

    Raises:
        InputError: the file cannot be read, or it does not say which class it is, or its options are not plain.
    """
    try:
        tree = ast.parse(read_bytes(path, _MOST_BYTES))
    except OSError as error:
        raise InputError(f"{visible(path)}: cannot be read: {error.strerror}") from None
    except InputError:
        raise
    except (ValueError, SyntaxError) as error:
        raise InputError(f"{visible(path)}: cannot be read as Python: {error}") from None
    if not path.stem.isidentifier():
        raise InputError(f"{visible(path)}: is no module's name: rename it, such as my_strategy.py")
    names = [
        node.name
        for node in tree.body
        if isinstance(node, ast.ClassDef) and node.bases and not node.name.startswith("_")
    ]
    if "Entry" in names:
        names = ["Entry"]
    if len(names) != 1:
        found = f"has {', '.join(names)}" if names else "has no class that derives from a strategy"
        raise InputError(f"{visible(path)}: {found}: call the one to be run Entry")
    return f"{path.stem}:{names[0]}", _options(tree, path)


def _options(tree: ast.Module, path: Path) -> dict[str, dict[str, Any]]:
    for node in tree.body:
        if not isinstance(node, ast.Assign) or [ast.unparse(each) for each in node.targets] != ["OPTIONS"]:
            continue
        try:
            options = ast.literal_eval(node.value)
        except ValueError:
            options = None
        plain = isinstance(options, dict) and all(isinstance(each, dict) for each in options.values())
        if not plain:
            raise InputError(
                f"{visible(path)}:{node.lineno}: OPTIONS is no plain mapping: write it as "
                'OPTIONS = {"digits": {"lr": 4e-3}, "text": {"lr": 1e-3}}'
            )
        return dict(options)
    return {}


def entries_of(folder: Path, facts: Mapping[str, Any]) -> list[Entry]:
    """Make an entry for each strategy from the folder of a benchmark's sweep.

    Args:
        folder: of the sweep.
        facts: further fields of entries: `tier`, `tier_digest`, `source`, `incomplete`.
    """
    members = members_of(find_runs([folder]))
    labels = list(dict.fromkeys(member.result.name for member in members))
    return [_entry(label, [each for each in members if each.result.name == label], facts) for label in labels]


def _entry(label: str, members: Sequence[Member], facts: Mapping[str, Any]) -> Entry:
    entry: Entry = {
        "strategy": label,
        **facts,
        "netgym": metadata.version("netgym"),
        "torch": metadata.version("torch"),
        "python": platform.python_version(),
        "scores": [_score(member) for member in members],
    }
    return {**entry, "digest": digest_of(entry)}


def _score(member: Member) -> dict[str, Any]:
    runs = [run for run in member.result.runs if run.complete]
    held = [run for run in runs if run.target == "held" and run.virtual_seconds_to_target is not None]
    all_held = bool(runs) and len(held) == len(member.result.runs) and member.result.ended
    error = member.result.error
    if error is None and member.result.coding is not None:
        error, held, all_held = UNCHARGED, [], False
    seconds = [run.virtual_seconds_to_target or 0.0 for run in held]
    sent = [_bytes_to_target(run, member.settings["target_loss"]) for run in held]
    known = [each for each in sent if each is not None]
    interval = t_interval(seconds) if all_held else None
    return {
        "task": member.value("task"),
        "model": member.value("model"),
        "topology": member.value("topology.name"),
        "target_loss": member.settings["target_loss"],
        "held": len(held),
        "runs": len(member.result.runs),
        "virtual_seconds_to_target": math.fsum(seconds) / len(seconds) if all_held else None,
        "interval": list(interval) if interval else None,
        "bytes_to_target": math.fsum(known) / len(known) if all_held and len(known) == len(sent) else None,
        "final_losses": [run.final_loss for run in runs],
        "error": error,
        "experiment": hashlib.sha256((member.run.folder.path / "experiment.yaml").read_bytes()).hexdigest(),
        "runs_digest": member.run.folder.digest(),
    }


def _bytes_to_target(run: SeedResult, target: float) -> float | None:
    """Payload that all workers had sent when the first model at the target came to exist; None: not recorded."""
    return run.at_steps("bytes_sent").get(next(step for step, loss in run.losses if loss <= target))


def digest_of(entry: Mapping[str, Any]) -> str:
    """SHA-256 over everything in an entry but its digest."""
    plain = {key: value for key, value in entry.items() if key != "digest"}
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()


def read_entries(folder: Path) -> tuple[list[Entry], list[tuple[str, str]]]:
    """The entries in a folder and below it, and (file, why) of those that are left out.

    Raises:
        InputError: there is none.
    """
    entries: list[Entry] = []
    refused: list[tuple[str, str]] = []
    for path in sorted(folder.rglob("*.json")):
        try:
            entry = json.loads(read_bytes(path, _MOST_BYTES))
        except (OSError, ValueError, RecursionError):
            continue
        if not isinstance(entry, dict) or not {"digest", "scores", "tier_digest"} <= entry.keys():
            continue
        if digest_of(entry) != entry["digest"]:
            refused.append((path.name, "changed since it was made: its digest does not fit"))
        elif entry.get("incomplete"):
            refused.append((path.name, "its benchmark was stopped before its end: resume it"))
        else:
            entries.append(entry)
    if not entries and not refused:
        raise InputError(f"{visible(folder)}: holds no entry: netgym bench writes some into its folder")
    newest = [entry["tier_digest"] for entry in entries]
    if newest:
        most = max(newest, key=newest.count)
        refused += [
            (str(entry["strategy"]), "another version of the tier")
            for entry in entries
            if entry["tier_digest"] != most
        ]
        entries = [entry for entry in entries if entry["tier_digest"] == most]
    return entries, refused


def board_rows(entries: Sequence[Entry]) -> list[tuple[Entry, int, float | None]]:
    """Entries, the best first: (entry, how many targets it held, geometric mean of its seconds to them).

    More held targets come first; among equals, the shorter mean time.
    """
    rows: list[tuple[Entry, int, float | None]] = []
    for entry in entries:
        seconds = [score["virtual_seconds_to_target"] for score in entry["scores"]]
        known = [max(each, 1e-9) for each in seconds if each is not None]
        mean = math.exp(math.fsum(map(math.log, known)) / len(known)) if known else None
        rows.append((entry, len(known), mean))
    return sorted(rows, key=lambda row: (-row[1], row[2] if row[2] is not None else math.inf))
