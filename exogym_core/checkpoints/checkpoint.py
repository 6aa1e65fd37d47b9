"""Checkpoints of a whole run: every rank's state, and the log that brings a fresh clock to the same instant.

    DIR/step-00000040/
        manifest.json                             identity of the run; size and SHA-256 of the other files
        log-0001.jsonl.gz                         requests of every rank to the clock so far; after a
                                                  restart it continues in log-0002.jsonl.gz, and so on
        rank-0000.json, rank-0000.safetensors     rank 0's state, and so on
        letters.json, letters.safetensors         messages that lay in mailboxes, if there were any

Ranks write their files into a hidden folder as they get there in host time, and mark a row. When the clock
has served every rank's mark, the process that serves it adds log and manifest and gives the folder its name:
a step folder is complete or not there. The one before it is removed after that.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from importlib import metadata
from typing import TYPE_CHECKING, Annotated, Any

import torch
from pydantic import BaseModel, Field, model_validator

from exogym_core.checkpoints.files import Count, FileFacts, FileName, LogPart, damaged, read_logs, read_state
from exogym_core.names import visible
from netsim import input_file
from netsim.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from torch import Tensor, nn

    from exogym_core.workers.journal import MessageName
    from netsim.ranks import Request

__all__ = [
    "LETTERS",
    "MANIFEST",
    "StoredCheckpoint",
    "find_checkpoint",
    "manifest_text",
    "rank_name",
    "run_identity",
    "step_folders",
    "step_name",
]

_FORMAT = 3
_CODE = "code"
_MOST_CHARACTERS = 100_000_000  # of a manifest
MANIFEST = "manifest.json"
LETTERS = "letters"
_STEP_FOLDER = re.compile(r"step-(\d{8,})")


def run_identity(
    model: nn.Module,
    strategy: str,
    options: Mapping[str, Any],
    world_size: int,
    settings: Mapping[str, Any],
    training_set: str | None = None,
    code: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Identity of a run, in plain values: equal in the run of a checkpoint and the one that resumes from it.

    Args:
        model: its names, dtypes and shapes count, what its modules show of themselves, and what is frozen.
        strategy, options: name and arguments of the strategy.
        world_size: number of ranks.
        settings: everything else that changes results.
        training_set: its digest; None where each rank has one of its own, with its own digest.
        code: of one's own, see `code_digests`.
    """
    shapes = {
        name: f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
        for name, value in model.state_dict().items()
        if isinstance(value, torch.Tensor)
    }
    identity = {
        "format": _FORMAT,
        "versions": {"netgym": metadata.version("netgym"), "torch": str(torch.__version__)},
        "world size": world_size,
        "strategy": strategy,
        "strategy's options": dict(options),
        "model": shapes,
        "training set": training_set,
        "settings": dict(settings),
        "modules": {name: _module_text(module) for name, module in model.named_modules()},
        _CODE: dict(code or {}),
    }
    # As JSON gives it back; the address of an object in its repr says nothing.
    plain = json.dumps(identity, default=lambda value: re.sub(r" at 0x[0-9a-f]+", "", repr(value)))
    return _without_places(plain)


def _module_text(module: nn.Module) -> str:
    """A module without those inside: its class, what it shows, such as `p=0.1`, and its frozen parameters."""
    own = module.named_parameters(recurse=False)
    frozen = [f"{name} frozen" for name, value in own if not value.requires_grad]
    return f"{type(module).__name__}({', '.join([module.extra_repr(), *frozen])})"


def _without_places(plain: str) -> dict[str, Any]:
    """Identity from its JSON, objects named by their classes alone: modules of classes move between versions."""
    identity: dict[str, Any] = json.loads(re.sub(r"<exogym_core\.(?:\w+\.)*(\w+ object>)", r"<\1", plain))
    return identity


# --- reading -----------------------------------------------------------------------------------------------


class _File(BaseModel):
    num_bytes: Count
    sha256: str
    host: str = ""  # on whose disk it lies, where rank 0 does not see that


class _Identity(BaseModel):
    """Part of a run's identity that reading needs; the rest is compared with the run's."""

    world_size: Annotated[int, Field(ge=1, le=1_000_000, strict=True, alias="world size")]


class _Manifest(BaseModel):
    """Format of a manifest."""

    step: Count
    identity: _Identity
    files: dict[FileName, _File]
    logs: tuple[LogPart, ...]

    @model_validator(mode="after")
    def _check(self) -> _Manifest:
        for log in self.logs:
            if len(log.lengths) != self.identity.world_size:
                raise ValueError(f"{log.name} is of {len(log.lengths)} ranks")
        return self


@dataclass(frozen=True)
class StoredCheckpoint:
    """A complete checkpoint on disk, of all ranks after the same step.

    Attributes:
        path: its step folder.
        step: steps that every rank had done.
        identity: of the run, as `run_identity` returned it.
        files: facts of its files but the manifest and the logs.
        logs: parts of logs that belong to it.
    """

    path: Path
    step: int
    identity: dict[str, Any]
    files: FileFacts
    logs: tuple[LogPart, ...] = ()

    @classmethod
    def open(cls, path: Path) -> StoredCheckpoint:
        """The checkpoint in a step folder; its manifest is verified here, other files when they are read.

        Raises:
            RecordError: the manifest is missing or damaged, or a file is missing.
        """
        manifest = path / MANIFEST
        try:
            with input_file(manifest) as file:
                text = file.read(_MOST_CHARACTERS).decode()
        except (OSError, ValueError) as error:
            raise damaged(manifest, error) from error
        found = cls.of_manifest(path, text)
        here = [name for name, about in found.files.items() if not about.get("host")]
        for name in [*here, *(part.name for part in found.logs)]:
            if not (path / name).is_file():
                raise damaged(path / name, "it is missing")
        return found

    @classmethod
    def of_manifest(cls, path: Path, text: str) -> StoredCheckpoint:
        """The checkpoint that a manifest in the folder `path` describes; its other files may be missing.

        Raises:
            RecordError: the manifest is damaged.
        """
        manifest = path / MANIFEST
        try:
            body = json.loads(text)["body"]
            intact = text == manifest_text(body)
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise damaged(manifest, error) from error
        if not intact:
            raise damaged(manifest, "its SHA-256 differs")
        identity = body.get("identity") if isinstance(body, dict) else None
        found = identity.get("format") if isinstance(identity, dict) else None
        if found != _FORMAT:
            raise _differ(path, "format", found, _FORMAT)
        try:
            checked = _Manifest.model_validate(body)
        except ValueError as error:
            raise damaged(manifest, " ".join(str(error).split())) from error
        return cls(
            path, body["step"], _without_places(json.dumps(body["identity"])), body["files"], checked.logs
        )

    @property
    def world_size(self) -> int:
        """Number of its ranks."""
        return int(self.identity["world size"])

    def check(self, identity: Mapping[str, Any]) -> None:
        """Refuse to resume a run whose identity differs from the stored one.

        Raises:
            InputError: naming what differs, with both values.
        """
        for name, mine in self.identity.items():
            other: Any = identity.get(name)
            if name == _CODE:
                continue
            if not isinstance(mine, dict):
                if mine != other:
                    raise _differ(self.path, name, mine, other)
                continue
            for key in [*mine, *other]:
                if mine.get(key, "absent") != other.get(key, "absent"):
                    raise _differ(
                        self.path, f"{name}: {key}", mine.get(key, "absent"), other.get(key, "absent")
                    )

    def edited_code(self, identity: Mapping[str, Any]) -> list[str]:
        """Names of classes, functions and constants of one's own that are others, or gone, in a run's `identity`."""
        mine, others = self.identity.get(_CODE), identity[_CODE]
        if mine is None:  # written before there was such a thing
            return []
        return sorted(name for name in {*mine, *others} if mine.get(name) != others.get(name))

    def past(self) -> tuple[list[list[Request]], list[dict[str, Any]]]:
        """Requests of each rank, and rows observed of the steps before.

        Raises:
            RecordError: a file is missing or damaged.
        """
        return read_logs(self.path, self.logs, self.world_size)

    def messages(self) -> dict[MessageName, tuple[Tensor, ...]]:
        """Messages that lay in mailboxes.

        Raises:
            RecordError: one of its files is damaged.
        """
        if f"{LETTERS}.json" not in self.files:
            return {}
        kept: list[dict[str, Any]] = read_state(self.path, LETTERS, self.files)
        return {((each["box"], each["source"]), each["number"]): tuple(each["tensors"]) for each in kept}

    def rank_state(self, rank: int, device: torch.device | None = None) -> dict[str, Any]:
        """State of a rank, loaded from its part; tensors that were on an accelerator come on `device`, if given.

        Raises:
            RecordError: one of its files is damaged.
        """
        state: dict[str, Any] = read_state(self.path, rank_name(rank), self.files, device)
        return state


def _differ(path: Path, what: str, checkpoint: Any, run: Any) -> InputError:
    return InputError(
        f"{visible(path)}: the checkpoint's {visible(what, 100)} is {visible(checkpoint, 200)}, this run's is "
        f"{visible(run, 200)}; make them equal to resume from it, or start a new run"
    )


def find_checkpoint(folder: Path) -> StoredCheckpoint | None:
    """The newest checkpoint in `folder`, or the one that `folder` is; None where there is none yet.

    Raises:
        InputError: there is no such folder.
        RecordError: the checkpoint is damaged.
    """
    if not folder.is_dir():
        raise InputError(f"{visible(folder)}: there is no such folder to resume from")
    if _STEP_FOLDER.fullmatch(folder.name):
        return StoredCheckpoint.open(folder)
    steps = step_folders(folder)
    return StoredCheckpoint.open(steps[-1]) if steps else None


def step_folders(folder: Path) -> list[Path]:
    """Complete checkpoints, oldest first."""
    found = [path for path in folder.iterdir() if _STEP_FOLDER.fullmatch(path.name) and path.is_dir()]
    return sorted(found, key=lambda path: int(path.name.removeprefix("step-")))


def rank_name(rank: int) -> str:
    """Prefix of the names of one rank's files."""
    return f"rank-{rank:04}"


def step_name(step: int) -> str:
    """The name of the folder of a complete checkpoint."""
    return f"step-{step:08}"


def manifest_text(body: Mapping[str, Any]) -> str:
    """The text of a manifest: `body` and its SHA-256."""
    digest = hashlib.sha256(json.dumps(body).encode()).hexdigest()
    return json.dumps({"body": body, "sha256": digest}, indent=1) + "\n"
