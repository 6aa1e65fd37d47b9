"""What only the processes of one's own runs and probes know.

Sockets, torch's stores and gloo's among them, take whoever connects. So what ranks tell each other is signed, and each
connection is tested for who is at its end, with a secret that launchers share: the variable NETGYM_SECRET, a file
that NETGYM_SECRET_FILE names, or the user's own file, which is made when it is first needed.
"""

from __future__ import annotations

import os
import secrets
import stat
from pathlib import Path

from netsim.files.errors import InputError
from netsim.files.problems import printable

__all__ = ["shared_secret", "user_secret"]

_NUM_BYTES = 32
_LEAST_LENGTH = 16


def shared_secret() -> bytes:
    """The secret of this process's run: from the environment, else the user's own.

    Raises:
        InputError: it is too short, or its file cannot be read or can be read by others.
    """
    given = os.environ.get("NETGYM_SECRET")
    if given is not None:
        if len(given) < _LEAST_LENGTH:
            raise InputError(
                f"environment: NETGYM_SECRET has {len(given)} characters; give {_LEAST_LENGTH} or more that nobody "
                "can guess, such as `openssl rand -hex 32` prints"
            )
        return given.encode()
    path = os.environ.get("NETGYM_SECRET_FILE")
    return _read(Path(path)) if path is not None else user_secret()


def user_secret() -> bytes:
    """What this user's processes on this machine (or home) know alone; made at the first call.

    Raises:
        InputError: its file can be neither made nor read, or can be read by others.
    """
    home = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    path = Path(home) / "netgym" / "secret"
    try:
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            # Whole or not there, whoever comes first: ranks that start together read the same one.
            temporary = path.with_name(f".secret-{secrets.token_hex(8)}")
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "w") as file:
                file.write(secrets.token_hex(_NUM_BYTES) + "\n")
            try:
                os.link(temporary, path)
            except FileExistsError:
                pass
            finally:
                temporary.unlink()
    except OSError as error:
        raise InputError(
            f"{printable(path)}: cannot be made ({error.strerror}): set NETGYM_SECRET_FILE to a file of yours with "
            "mode 0600, or NETGYM_SECRET"
        ) from error
    return _read(path)


def _read(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            content = file.read(4096).strip()
    except OSError as error:
        raise InputError(f"{printable(path)}: the secret cannot be read: {error.strerror}") from error
    if status.st_uid not in (os.getuid(), 0) or stat.S_IMODE(status.st_mode) & 0o077:
        raise InputError(
            f"{printable(path)}: the secret can be read by others: make it yours alone (chmod 600)"
        )
    if len(content) < _LEAST_LENGTH:
        raise InputError(
            f"{printable(path)}: the secret is shorter than {_LEAST_LENGTH} bytes: write a longer one"
        )
    return content
