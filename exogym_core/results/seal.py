"""Whether this user made a run's folder: a seal that only he can make, over what the folder may have run.

It is in environment.json and stands for experiment.yaml and for where the code is that it names. A folder that came
from somebody else, or whose experiment was changed since, has none that fits.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
from typing import TYPE_CHECKING, Any

from netsim.files.errors import InputError
from netsim.files.plain_files import read_bytes
from netsim.files.secret import user_secret

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["code_folder_of", "is_own", "relative_to", "seal_of"]


def seal_of(folder: Path, code_folder: str | None) -> str | None:
    """This user's seal of the run in `folder`; None where he can have no secret on this machine."""
    try:
        secret, experiment = user_secret(), read_bytes(folder / "experiment.yaml")
    except (InputError, OSError):
        return None
    text = json.dumps([hashlib.sha256(experiment).hexdigest(), code_folder])
    return hmac.new(secret, f"run folder {text}".encode(), "sha256").hexdigest()


def is_own(folder: Path) -> bool:
    """Whether this user made the run in `folder`, and its experiment is as it was."""
    facts = _facts(folder)
    expected = seal_of(folder, facts.get("code"))
    found = facts.get("seal")
    return (
        expected is not None
        and isinstance(found, str)
        and hmac.compare_digest(found.encode(), expected.encode())
    )


def code_folder_of(folder: Path) -> Path | None:
    """Where a run of one's own has found the modules that its experiment names; None: nowhere but beside it."""
    code = _facts(folder).get("code")
    return folder / code if isinstance(code, str) else None


def relative_to(folder: Path, code_folder: Path) -> str:
    """`code_folder` as `code_folder_of` finds it from `folder`, which says less about this machine."""
    return os.path.relpath(code_folder.resolve(), folder.resolve())


def _facts(folder: Path) -> dict[str, Any]:
    try:
        facts = json.loads(read_bytes(folder / "environment.json"))
    except (OSError, ValueError, RecursionError):
        return {}
    return facts if isinstance(facts, dict) else {}
