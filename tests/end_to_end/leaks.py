"""Looks for a secret in what a run has left: files, also packed ones, and texts."""

from __future__ import annotations

import base64
import gzip
from pathlib import Path

__all__ = ["leaks"]


def leaks(folder: Path, secret: str, **texts: str) -> list[str]:
    """The files below `folder`, and the texts, by name, in which the secret lies in some form."""
    written = _contents_of(folder) | {name: text.encode() for name, text in texts.items()}
    assert len(written) > 10, "it is looked for in too little"
    return [name for name, content in written.items() if any(form in content for form in _forms_of(secret))]


def _forms_of(secret: str) -> list[bytes]:
    """How a secret may lie in a file."""
    plain = secret.encode()
    return [
        plain,
        plain.hex().encode(),
        base64.b64encode(plain).rstrip(b"="),
        secret.encode("utf-16-le"),
        plain[::-1],
    ]


def _contents_of(folder: Path) -> dict[str, bytes]:
    """Of all files below a folder, and what is packed in them."""
    found = {}
    for path in folder.rglob("*"):
        if path.is_file():
            content = found[str(path)] = path.read_bytes()
            if content[:2] == b"\x1f\x8b":
                found[f"{path}, unpacked"] = gzip.decompress(content)
    return found
