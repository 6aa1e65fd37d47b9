"""Checkpoints of a `fit`: the one it resumes from, the folder of new ones, the settings that must be equal."""

from __future__ import annotations

import hashlib
import json
import os
import socket
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from exogym_core.checkpoints.checkpoint import (
    MANIFEST,
    StoredCheckpoint,
    code_digests,
    find_checkpoint,
    run_identity,
)
from exogym_core.checkpoints.writing import CheckpointWriter, OwnParts, RankCheckpoints, mark_of
from exogym_core.config import OPTIONS
from exogym_core.cost.compute import Compute
from exogym_core.meeting_place import processes_of_site, under_torchrun
from exogym_core.names import visible
from exogym_core.results.disk import RefusedError, make_folder, refuse_full_disk
from exogym_core.strategy.optimizers import ensure_optim_spec, state_bytes
from exogym_core.workers.journal import Journal, MessagesInFlight
from exogym_core.workers.torchrun.rank import recalled, remember
from netsim.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from exogym_core.run.program import Program

__all__ = [
    "begin_checkpoints",
    "describe_last_checkpoint",
    "find_resumed",
    "follow",
    "go_on_after_restart",
    "mark_of_folder",
    "plan",
    "refuse_edited_code",
    "remember_checkpoints",
    "run_mark",
    "run_settings",
]

_MOST_FACTS, _MOST_CHARACTERS_OF_A_FACT = 2000, 100  # of a run, for other sites


def find_resumed(program: Program, folder: Path) -> StoredCheckpoint | None:
    """The checkpoint in the `folder` that the request resumes from; None for a run from the start.

    Measured seconds of a step and the micro-batch are taken from it.

    Raises:
        InputError: there is no such folder.
        RecordError: the checkpoint is damaged.
    """
    request, resumed = program.request, find_checkpoint(folder)
    settled = {} if resumed is None else resumed.identity["settings"]
    if settled and request.finds_minibatch:
        request.take_minibatch(settled["minibatch_size"])
    if settled and request.compute is not None and settled["compute"] is not None:
        found = Compute.parse(settled["compute"])
        if request.compute.may_become(found):
            request.compute = found
    return resumed


def begin_checkpoints(
    program: Program, resumed: StoredCheckpoint | None
) -> tuple[Journal, CheckpointWriter | None]:
    """Give the prepared `program` its checkpoints; return the journal of its ranks, and the writer of new checkpoints.

    Of a site that meets others at a rendezvous they are its own, of all its processes.

    Raises:
        InputError: `resumed` is of another run; the line names what differs, with both values.
        RecordError: no folder can be made, or `resumed` is damaged.
    """
    request, identity = program.request, _identity(program, program.data.fingerprint())
    if resumed is not None:
        resumed.check(identity)
        edited = resumed.edited_code(identity)
        refuse_edited_code(resumed.path, edited, "this checkpoint", accepted=request.edited_code)
        program.refuse_fewer_steps(program.known_max_steps(), resumed)
    folder = None
    if request.checkpoint_interval is not None:
        if resumed is None:
            _refuse_full_disk(program, Path(request.resume_from or request.save_dir))
        if request.resume_from is None:
            name = request.run_name or type(request.strategy).__name__
            folder = make_folder(Path(request.save_dir), name, numbered=False)
        else:
            folder = resumed.path.parent if resumed is not None else Path(request.resume_from)
    program.checkpoints = RankCheckpoints(folder, request.checkpoint_interval, resumed)
    journal, writer = Journal(), None
    if folder is not None:
        num_parts = processes_of_site() if request.launch == "site" else None
        writer = CheckpointWriter(folder, identity, request.num_ranks, resumed, num_parts)
        journal.in_flight = writer.in_flight
    if resumed is not None:
        journal.past, journal.found = resumed.past()
        journal.in_flight = MessagesInFlight(resumed.step, resumed.messages())
        if writer is not None:
            writer.in_flight = journal.in_flight
    return journal, writer


def _refuse_full_disk(program: Program, folder: Path) -> None:
    """Raise RecordError where the disk has no room for the models and optimizer states of a first checkpoint.

    What else a strategy keeps comes on top, and a disk that it fills ends the run then.
    """
    request = program.request
    num_here = request.num_ranks if request.launch == "local" else 1
    tensors = [each for each in program.model.state_dict().values() if isinstance(each, torch.Tensor)]
    is_whole = request.strategy.arguments.get("sharding", "NO_SHARD") == "NO_SHARD"
    states = state_bytes(ensure_optim_spec(request.strategy.optim_spec), program.model) if is_whole else 0
    refuse_full_disk(
        folder,
        num_here * (sum(each.nbytes for each in tensors) + states),
        "a checkpoint of this run",
        "free some, choose another disk (fit: save_dir=, command: --out), or leave checkpoints out",
    )


def refuse_edited_code(path: Path, edited: Sequence[str], since: str, *, accepted: bool) -> None:
    """Raise RefusedError if any of the user's code was `edited`; warn where that is `accepted`.

    Args:
        path: of what is resumed.
        edited: names from `edited_names`.
        since: the state in `path` that is of the earlier code.
        accepted: continue with the current code.

    Raises:
        RefusedError: code was edited, which is not accepted.
    """
    if not edited:
        return
    more = f" and {len(edited) - 1} more" if len(edited) > 1 else ""
    edit = f"{visible(path)}: {visible(edited[0], 100)}{more} was edited since {since}"
    if not accepted:
        raise RefusedError(
            f"{edit}; undo the edit, or add --edited-code (fit: edited_code=True) to continue with the current code"
        )
    warnings.warn(f"{edit}; the run continues with the current code", UserWarning, stacklevel=2)


def describe_last_checkpoint(program: Program) -> str:
    """Sentence that names the last checkpoint, for errors."""
    folder = program.checkpoints.folder
    last = find_checkpoint(folder) if folder is not None and folder.is_dir() else None
    if last is None:
        return "there is no checkpoint to resume from (checkpoint_interval= makes some)"
    return f"the last checkpoint is of step {last.step}, in {folder}"


def plan(program: Program, resumed: StoredCheckpoint | None) -> dict[str, Any]:
    """Plan of the preparing process for the others of the run, in plain values."""
    folder, home = program.checkpoints.folder, program.checkpoints.home
    return {
        "home": None if home is None else os.fspath(home.absolute()),
        "mark": mark_of(home),
        "manifest": "" if resumed is None else (resumed.path / MANIFEST).read_text(encoding="utf-8"),
        "folder": None if folder is None else os.fspath(folder.absolute()),
        "resumed": None if resumed is None else os.fspath(resumed.path.absolute()),
        "resumed step": 0 if resumed is None else resumed.step,
        "minibatch size": program.request.minibatch_size,
    }


def follow(
    program: Program, planned: Mapping[str, Any], place: tuple[int, int], newest_complete: Callable[[], int]
) -> OwnParts | None:
    """Follow a plan; returns the folder of the rank's parts, where it does not see those of rank 0.

    Args:
        program: follows the plan.
        planned: as `plan` returned it.
        place: of this process among so many that torchrun has started.
        newest_complete: returns the step of the newest checkpoint that rank 0 has completed.

    Raises:
        InputError: this rank's part of the checkpoint to resume from is not here, or not whole.
        RecordError: the checkpoint is damaged, or there can be no folder.
    """
    program.request.take_minibatch(planned["minibatch size"])
    folder, resumed, own = planned["folder"], None, None
    if planned["home"] is not None:
        own = OwnParts.where_needed(Path(planned["home"]), planned["mark"], place, newest_complete)
    if planned["resumed"] is not None:
        path = Path(planned["resumed"])
        if own is None:
            resumed = StoredCheckpoint.open(path)
        else:
            resumed = own.opened(StoredCheckpoint.of_manifest(path, planned["manifest"]))
    about = (None if folder is None else Path(folder), program.request.checkpoint_interval, resumed, own)
    program.checkpoints = RankCheckpoints(*about)
    return own


def go_on_after_restart(program: Program) -> None:
    """Resume from this run's checkpoints where torchrun has restarted the ranks after a failure."""
    request = program.request
    if request.checkpoint_interval is not None and request.resume_from is None:
        before = recalled(_memory(program))
        if before is None:
            return
        if not Path(before).is_dir():
            raise InputError(
                f"{before}: the checkpoints of this run are not on the disk of rank 0, {socket.gethostname()}; start "
                "each rank where it was (torchrun --node-rank), so that it finds its own"
            )
        request.resume_from = before


def remember_checkpoints(program: Program) -> None:
    """Record the checkpoints for `go_on_after_restart`."""
    folder = program.checkpoints.folder
    if folder is not None and under_torchrun():
        remember(_memory(program), os.fspath(folder.absolute()))


def _memory(program: Program) -> str:
    request = program.request
    return f"checkpoints {request.save_dir} {request.run_name or type(request.strategy).__name__}"


def run_mark(program: Program) -> tuple[str, dict[str, str]]:
    """Short text that is equal on sites of the same run, and on no others; and its parts, for people."""
    about, whole = _marked(_identity(program, None))
    facts = {
        f"{name}: {key}" if key else name: str(value)[:_MOST_CHARACTERS_OF_A_FACT]
        for name, part in whole.items()
        for key, value in (part.items() if isinstance(part, dict) else [("", part)])
    }
    facts |= {name: str(getattr(program.request, name)) for name in ("max_steps", "num_epochs", "until")}
    return about, dict(list(facts.items())[:_MOST_FACTS])


def mark_of_folder(folder: Path) -> str | None:
    """Mark of the run whose checkpoints are in `folder`; None without a checkpoint.

    Raises:
        RecordError: the newest one is damaged.
    """
    stored = find_checkpoint(folder) if folder.is_dir() else None
    return None if stored is None else _marked({**stored.identity, "training set": None})[0]


def _marked(identity: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    settings = {name: value for name, value in identity["settings"].items() if not name.startswith("device")}
    whole = {**identity, "settings": settings}
    digest = hashlib.sha256(json.dumps(whole, sort_keys=True).encode()).hexdigest()[:12]
    return f"{identity['strategy']} {digest}", whole


def _identity(program: Program, training_set: str | None) -> dict[str, Any]:
    request = program.request
    name, settings = type(request.strategy).__name__, run_settings(program)
    code = code_digests(program.model)
    about = (request.strategy.arguments, request.num_ranks, settings, training_set, code)
    return run_identity(program.model, name, *about)


def run_settings(program: Program) -> dict[str, Any]:
    """Settings that change losses or times, besides model and strategy; not the length of the run.

    Where ranks go at their own pace that counts too: the fast have ended when the slow come to their checkpoint.
    """
    request = program.request
    names = [name for name, each in OPTIONS.items() if each.same]
    length: dict[str, Any] = {}
    steps = program.known_max_steps() or request.max_steps
    if steps is not None and (of_length := list(request.strategy.of_length(steps))):
        length["steps of a schedule"] = of_length
    if not request.strategy.is_synchronous:
        length |= {name: getattr(request, name) for name in ("max_steps", "num_epochs", "until")}
    topology = None
    if request.topology is not None:
        text = json.dumps(request.topology.to_mapping(), sort_keys=True, default=str)
        topology = f"{request.topology.name} ({hashlib.sha256(text.encode()).hexdigest()[:12]})"
    return {
        **{name: getattr(request, name) for name in names},
        "dataloader_kwargs": dict(request.dataloader_kwargs or {}),
        "intra_op_threads": request.workers.intra_op_threads,
        "topology": topology,
        "compute": program.compute.model_dump() if program.compute is not None else None,
        **length,
    }
