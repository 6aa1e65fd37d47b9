"""Between a `fit` and its checkpoints: what it goes on from, where new ones go, what must be equal."""

from __future__ import annotations

import hashlib
import json
import os
import socket
import warnings
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from exogym_core.checkpoints.checkpoint import MANIFEST, StoredCheckpoint, find_checkpoint, run_identity
from exogym_core.checkpoints.own_code import code_digests
from exogym_core.checkpoints.parts import OwnParts, mark_of
from exogym_core.checkpoints.writing import CheckpointWriter, RankCheckpoints
from exogym_core.cost.compute import Compute
from exogym_core.meeting_place import processes_of_site
from exogym_core.names import visible
from exogym_core.ranks.torchrun.rank import recalled, remember, torchrun_rank
from exogym_core.results.disk import make_folder
from exogym_core.training.options import OPTIONS
from netsim.files.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from exogym_core.training.program import Program

__all__ = [
    "begin_checkpoints",
    "find_resumed",
    "follow",
    "go_on_after_restart",
    "mark_of_folder",
    "plan",
    "remember_checkpoints",
    "run_mark",
    "there_is",
]

_MOST_FACTS, _MOST_CHARACTERS_OF_A_FACT = 2000, 100  # that other sites are told of a run


def find_resumed(program: Program) -> StoredCheckpoint | None:
    """The checkpoint that the request goes on from, None for a run from the start.

    Seconds of a step that were measured then, and a micro-batch that was found, hold now too.

    Raises:
        InputError: there is no such folder.
        RecordError: the checkpoint is damaged.
    """
    request = program.request
    if request.resume_from is None:
        return None
    resumed = find_checkpoint(Path(request.resume_from))
    if resumed is not None and request.finds_minibatch:
        found = resumed.identity["settings"]["minibatch_size"]
        program.request = request = replace(request, minibatch_size=found, finds_minibatch=False)
    settled = resumed.identity["settings"]["compute"] if resumed is not None else None
    if settled is not None and request.compute is not None:
        found = Compute.parse(settled)
        if request.compute.may_become(found):
            program.request = replace(request, compute=found)
    return resumed


def begin_checkpoints(program: Program, resumed: StoredCheckpoint | None) -> CheckpointWriter:
    """Give the prepared `program` its checkpoints, and return what completes them.

    Of a site that meets others at a rendezvous they are its own, of all its processes.

    Raises:
        InputError: `resumed` is of another run; the line names what differs, with both values.
        RecordError: no folder can be made, or `resumed` is damaged.
    """
    request = program.request
    keeps = resumed is not None or request.checkpoint_interval is not None
    identity = _identity(program, program.data.fingerprint() if keeps else None, with_code=keeps)
    if resumed is not None:
        resumed.check(identity)
        _refuse_edited_code(resumed, identity, request.edited_code)
        program.refuse_fewer_steps_than(resumed)
    folder = None
    if request.checkpoint_interval is not None:
        if request.resume_from is None:
            folder = make_folder(
                Path(request.save_dir), request.run_name or type(request.strategy).__name__, numbered=False
            )
        else:
            folder = resumed.path.parent if resumed is not None else Path(request.resume_from)
    program.checkpoints = RankCheckpoints(folder, request.checkpoint_interval, resumed)
    num_parts = processes_of_site() if request.is_apart else None
    return CheckpointWriter(folder, identity, request.num_ranks, resumed, num_parts)


def _refuse_edited_code(resumed: StoredCheckpoint, identity: Mapping[str, Any], accepted: bool) -> None:
    """Raise InputError if code of one's own is not that of the checkpoint; warn where that is `accepted`."""
    edited = resumed.edited_code(identity)
    if not edited:
        return
    more = f" and {len(edited) - 1} more" if len(edited) > 1 else ""
    told = f"{visible(resumed.path)}: {visible(edited[0], 100)}{more} was edited since this checkpoint"
    if not accepted:
        raise InputError(
            f"{told}; undo the edit, or add --edited-code (fit: edited_code=True) to go on with the code as it is now"
        )
    warnings.warn(f"{told}; the run goes on with the code as it is now", UserWarning, stacklevel=2)


def there_is(program: Program) -> str:
    """What there is to go on from, for people."""
    folder = program.checkpoints.folder
    last = find_checkpoint(folder) if folder is not None and folder.is_dir() else None
    if last is None:
        return "there is no checkpoint to go on from (checkpoint_interval= makes some)"
    return f"the last checkpoint is of step {last.step}, in {folder}"


def plan(program: Program, resumed: StoredCheckpoint | None) -> dict[str, Any]:
    """What other processes that train the same take over from the one that has found it out, in plain values."""
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
    """Take it over; returns what keeps the rank's checkpoints, where it does not see those of rank 0.

    Args:
        program: takes it over.
        planned: as `plan` told it.
        place: of this process among so many that torchrun has started.
        newest_complete: tells the step of the newest checkpoint that rank 0 has completed.

    Raises:
        InputError: this rank's part of the checkpoint to go on from is not here, or not whole.
        RecordError: the checkpoint is damaged, or there can be no folder.
    """
    size = planned["minibatch size"]
    program.request = replace(program.request, minibatch_size=size, finds_minibatch=False)
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
    """Where torchrun has started the ranks anew after a failure: resume from the checkpoints that there were."""
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
        program.request = replace(request, resume_from=before)


def remember_checkpoints(program: Program) -> None:
    """Have `go_on_after_restart` find them."""
    folder = program.checkpoints.folder
    if folder is not None and torchrun_rank() is not None:
        remember(_memory(program), os.fspath(folder.absolute()))


def _memory(program: Program) -> str:
    request = program.request
    return f"checkpoints {request.save_dir} {request.run_name or type(request.strategy).__name__}"


def run_mark(program: Program) -> tuple[str, dict[str, str]]:
    """A short text that is equal on sites that train the same, and on no others; and what it is made of, for people."""
    about, whole = _marked(_identity(program, None, with_code=True))
    facts = {
        f"{name}: {key}" if key else name: str(value)[:_MOST_CHARACTERS_OF_A_FACT]
        for name, part in whole.items()
        for key, value in (part.items() if isinstance(part, dict) else [("", part)])
    }
    facts |= {name: str(getattr(program.request, name)) for name in ("max_steps", "num_epochs", "until")}
    return about, dict(list(facts.items())[:_MOST_FACTS])


def mark_of_folder(folder: Path) -> str | None:
    """That of the run whose checkpoints are in `folder`; None where there are none.

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


def _identity(program: Program, training_set: str | None, *, with_code: bool) -> dict[str, Any]:
    request = program.request
    options = {key: value for key, value in vars(request.strategy).items() if not key.startswith("_")}
    options |= request.strategy.arguments  # some are kept by parts of it only
    name, settings = type(request.strategy).__name__, _settings(program)
    code = code_digests(program.code_roots()) if with_code else {}
    return run_identity(program.model, name, options, request.num_ranks, settings, training_set, code)


def _settings(program: Program) -> dict[str, Any]:
    """What changes losses or times, besides model and strategy; not how long the run is.

    Where ranks go at their own pace that counts too: the fast have ended when the slow come to their checkpoint.
    """
    request = program.request
    names = [name for name, told in OPTIONS.items() if told.same]
    length = {}
    if not request.strategy.is_synchronous:
        length = {name: getattr(request, name) for name in ("max_steps", "num_epochs", "until")}
    topology = None
    if request.topology is not None:
        text = json.dumps(request.topology.to_mapping(), sort_keys=True, default=str)
        topology = f"{request.topology.name} ({hashlib.sha256(text.encode()).hexdigest()[:12]})"
    return {
        **{name: getattr(request, name) for name in names},
        "dataloader_kwargs": dict(request.dataloader_kwargs or {}),
        "intra_op_threads": request.workers.intra_op_threads,
        "topology": topology,
        "compute": program.compute.to_mapping() if program.compute is not None else None,
        **length,
    }
