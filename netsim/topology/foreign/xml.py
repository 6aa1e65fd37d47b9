"""XML of others, read without definitions: those are how small files become large ones, and read other files."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING
from xml.etree import ElementTree

from netsim.files.errors import InputError

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["parse_xml", "refuse_definitions"]

_SIMGRID = re.compile(
    r'<!DOCTYPE\s+platform\s+SYSTEM\s+"(?:https?://simgrid\.(?:org|gforge\.inria\.fr)/(?:simgrid/)?)?simgrid\.dtd"\s*>'
)


def refuse_definitions(path: str | Path, text: str) -> None:
    """Raise InputError where there is a document type or an entity."""
    upper = text.upper()
    if "<!DOCTYPE" in upper or "<!ENTITY" in upper:
        raise InputError(f"{path}: has a document type definition, which is not read: remove it")


def parse_xml(path: str | Path, text: str) -> ElementTree.Element:
    """The root element. Only the line that names SimGrid's own definition is left out; any other is refused."""
    text = _SIMGRID.sub("", text, count=1)
    refuse_definitions(path, text)
    try:
        return ElementTree.fromstring(text)
    except (ElementTree.ParseError, ValueError) as error:
        raise InputError(f"{path}: is no XML: {error}") from None
