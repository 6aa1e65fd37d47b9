"""Between a `fit` and its checkpoints: what it goes on from, where new ones go, what must be equal."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from exogym_core.checkpoints.checkpoint import StoredCheckpoint, find_checkpoint, run_identity
from exogym_core.checkpoints.writing import CheckpointWriter, RankCheckpoints
from exogym_core.cost.compute import Compute
from exogym_core.results.record import make_private_folder
from exogym_core.training.options import OPTIONS

if TYPE_CHECKING:
    from exogym_core.training.program import Program

__all__ = ["begin_checkpoints", "find_resumed", "run_mark"]


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
    if resumed is not None and request.compute is not None and request.compute.is_measured:
        measured = resumed.identity["settings"]["compute"]
        if measured is not None:
            program.request = replace(request, compute=Compute.parse(measured))
    return resumed


def begin_checkpoints(program: Program, resumed: StoredCheckpoint | None) -> CheckpointWriter:
    """Give the prepared `program` its checkpoints, and return what completes them.

    Of a site that meets others at a rendezvous they are its own.

    Raises:
        InputError: `resumed` is of another run; the line names what differs, with both values.
        RecordError: no folder can be made, or `resumed` is damaged.
    """
    request = program.request
    keeps = resumed is not None or request.checkpoint_interval is not None
    identity = _identity(program, program.data.fingerprint() if keeps else None)
    if resumed is not None:
        resumed.check(identity)
        program.refuse_fewer_steps_than(resumed)
    folder = None
    if request.checkpoint_interval is not None:
        if request.resume_from is None:
            folder = make_private_folder(
                Path(request.save_dir), request.run_name or type(request.strategy).__name__, numbered=False
            )
        else:
            folder = resumed.path.parent if resumed is not None else Path(request.resume_from)
    program.checkpoints = RankCheckpoints(folder, request.checkpoint_interval, resumed)
    return CheckpointWriter(folder, identity, request.num_ranks, resumed, alone=request.is_apart)


def run_mark(program: Program) -> str:
    """A short text that is equal on sites that train the same, and on no others."""
    identity = _identity(program, None)
    settings = {name: value for name, value in identity["settings"].items() if not name.startswith("device")}
    text = json.dumps({**identity, "settings": settings}, sort_keys=True)
    return f"{identity['strategy']} {hashlib.sha256(text.encode()).hexdigest()[:12]}"


def _identity(program: Program, training_set: str | None) -> dict[str, Any]:
    request = program.request
    options = {key: value for key, value in vars(request.strategy).items() if not key.startswith("_")}
    options |= request.strategy.arguments  # some are kept by parts of it only
    name, settings = type(request.strategy).__name__, _settings(program)
    return run_identity(program.model, name, options, request.num_ranks, settings, training_set)


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
