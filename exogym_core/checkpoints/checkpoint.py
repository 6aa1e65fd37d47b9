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

import contextlib
import functools
import hashlib
import inspect
import json
import os
import re
import sys
import sysconfig
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import torch
from pydantic import BaseModel, Field, model_validator

from exogym_core.checkpoints.files import Count, FileFacts, FileName, LogPart, damaged, read_logs, read_state
from exogym_core.names import visible
from netsim.errors import InputError
from netsim.files.plain_files import input_file

if TYPE_CHECKING:
    from torch import Tensor, nn

    from exogym_core.events import Finding
    from exogym_core.workers.journal import MessageName
    from netsim.ranks import Request

__all__ = [
    "LETTERS",
    "MANIFEST",
    "StoredCheckpoint",
    "code_digests",
    "edited_names",
    "find_checkpoint",
    "manifest_text",
    "rank_name",
    "run_identity",
    "source_digests",
    "step_folders",
    "step_name",
]

_FORMAT = 5
_CODE = "code"
_RENAMED = {"SimpleReduceStrategy": "AllReduceStrategy"}  # strategies, since earlier checkpoints
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
        code: digests of the user's code, see `code_digests`.
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
        "strategy": _RENAMED.get(strategy, strategy),
        "strategy's options": options,
        "model": shapes,
        "training set": training_set,
        "settings": settings,
        "modules": {name: _module_text(module) for name, module in model.named_modules()},
        _CODE: dict(code or {}),
    }
    plain: dict[str, Any] = _plain(identity)
    return plain


def _plain(value: Any, inside: tuple[int, ...] = ()) -> Any:
    """A value as JSON gives it back, whatever the order of sets.

    An object is its `repr` without its address, or, where its class has none, its attributes.
    """
    if isinstance(value, bool | int | float | str | None):
        return value
    if id(value) in inside:
        return "..."
    inside = (*inside, id(value))
    if is_dataclass(value) and not isinstance(value, type):
        value = {type(value).__name__: {each.name: getattr(value, each.name) for each in fields(value)}}
    elif repr(value) == object.__repr__(value) and hasattr(value, "__dict__"):
        value = {type(value).__name__: vars(value)}
    if isinstance(value, Mapping):
        if all(isinstance(key, str) for key in value):
            return {key: _plain(each, inside) for key, each in value.items()}
        return sorted(([_plain(pair, inside) for pair in value.items()]), key=repr)
    if isinstance(value, list | tuple):
        return [_plain(each, inside) for each in value]
    if isinstance(value, set | frozenset):
        return sorted((_plain(each, inside) for each in value), key=repr)
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))


def _module_text(module: nn.Module) -> str:
    """A module without those inside: its class, what it shows, such as `p=0.1`, and its frozen parameters."""
    own = module.named_parameters(recurse=False)
    frozen = [f"{name} frozen" for name, value in own if not value.requires_grad]
    return f"{type(module).__name__}({', '.join([module.extra_repr(), *frozen])})"


# --- the user's code ---------------------------------------------------------------------------------------

_OURS = ("exogym_core", "netgym", "netsim")


def source_digests() -> dict[str, str]:
    """Digests of the user's source files, by which a resume finds edits.

    Of each loaded module that is not installed, the SHA-256 of its source file. Of the script that is running
    (`__main__`), which also says how long to train, its classes alone.
    """
    digests: dict[str, str] = {}
    for name, module in list(sys.modules.items()):
        if name not in ("__main__", "__mp_main__") and _is_own(name):
            with contextlib.suppress(OSError, TypeError):  # no file, such as of a namespace
                digests[name] = _digest(Path(inspect.getsourcefile(module) or "").read_bytes())
    for each in list(vars(sys.modules["__main__"]).values()):
        if isinstance(each, type) and each.__module__ == "__main__":
            with contextlib.suppress(OSError, TypeError):  # typed into a console
                digests[f"__main__.{each.__qualname__}"] = _digest(inspect.getsource(each).encode())
    return digests


def code_digests(model: nn.Module) -> dict[str, str]:
    """`source_digests`, and of modules of `model` whose classes are the user's, plain values of their attributes."""
    values: dict[str, list[tuple[str, str]]] = defaultdict(list)
    for path, part in model.named_modules():
        kind = type(part)
        if _is_own(kind.__module__):
            for name in vars(part).keys() - vars(torch.nn.Module()).keys():
                with contextlib.suppress(TypeError, ValueError):  # neither numbers nor text, or circular
                    found = json.dumps(vars(part)[name])
                    values[f"{kind.__module__}.{kind.__qualname__}.{name}"].append((path, found))
    return source_digests() | {name: _digest(repr(each).encode()) for name, each in values.items()}


def edited_names(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Names of modules, classes and attributes whose digests differ; those without one in both are not compared."""
    return sorted(name for name in before.keys() & now.keys() if before[name] != now[name])


def _is_own(module: str) -> bool:
    """True if a module is neither Python's, nor ours, nor of an installed package."""
    top = module.partition(".")[0]
    if top in _OURS or (top in sys.stdlib_module_names and top != "__main__"):
        return False
    file = getattr(sys.modules.get(module), "__file__", None)
    return file is None or not _is_installed(file)


@functools.cache  # asked for every loaded module, each time a run begins
def _is_installed(file: str) -> bool:
    return os.path.realpath(file).startswith(_installed())


@functools.cache
def _installed() -> tuple[str, ...]:
    """Folders of Python's own modules and of installed packages."""
    return tuple(
        os.path.realpath(sysconfig.get_path(name)) + os.sep for name in ("stdlib", "purelib", "platlib")
    )


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


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
        about: dict[str, Any] = body["identity"]
        for earlier, name in _RENAMED.items():
            if about.get("strategy") == earlier:
                about["strategy"] = name
        return cls(path, body["step"], about, body["files"], checked.logs)

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
        """Names of modules, classes and attributes of the user's with another digest in a run's `identity`."""
        return edited_names(self.identity[_CODE], identity[_CODE])

    def past(self) -> tuple[list[list[Request]], list[Finding]]:
        """Requests of each rank, and findings of the steps before.

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
