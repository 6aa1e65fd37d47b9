"""The one page of all reports: a template, filled; every text is escaped, nothing is loaded, only our scripts run."""

from __future__ import annotations

import base64
import hashlib
import json
from dataclasses import dataclass
from importlib import resources
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from exogym_core.results.report.network import Drawing
    from exogym_core.results.report.pictures import Picture

__all__ = ["Figure", "Listing", "Page", "TextTable", "encoded", "render_page"]

_ASSETS = "exogym_core.results.report"
_SCRIPTS = (
    "data",
    "elements",
    "axes",
    "chart",
    "controls",
    "curves",
    "links",
    "trace",
    "page",
)  # in this order


@dataclass(frozen=True)
class Figure:
    """A picture and what it shows.

    Attributes:
        is_curve: whether the interactive curves show the same.
    """

    caption: str
    picture: Picture
    is_curve: bool = False

    @property
    def wide(self) -> str:
        """For a page, base64."""
        return encoded(self.picture.wide)

    @property
    def narrow(self) -> str:
        """For a telephone, base64."""
        return encoded(self.picture.narrow)


@dataclass(frozen=True)
class TextTable:
    """A table further down, its first column a heading of its row."""

    title: str
    headings: Sequence[str]
    rows: Sequence[tuple[str, Sequence[str]]]
    note: str = ""


@dataclass(frozen=True)
class Listing:
    """A file, folded."""

    name: str
    text: str


@dataclass(frozen=True)
class Page:
    """What a page says, from top to bottom.

    Attributes:
        title: of the page.
        facts: (name, value), what all rows of the table have in common.
        verdict: the sentence.
        headings, rows: the table; a row is whether it won, and its cells.
        note: how the table is to be read.
        status: that a run goes on, or was stopped before its end; empty where it has ended.
        figures: static pictures.
        curves: what the interactive ones show (`exogym_core.results.report.interactive`); None: there are none.
        tables: further ones.
        network: its matrix (`network_matrix`), and drawings of it.
        use: what links carried, a run each (`link_use`).
        trace: the name of a file beside the page, and the same base64, where it is small enough.
        experiments: files that run again, and environments.
        experiments_note: how they are run again.
    """

    title: str
    facts: Sequence[tuple[str, Any]]
    verdict: str
    headings: Sequence[str]
    rows: Sequence[tuple[bool, Sequence[str]]]
    note: str
    status: str = ""
    figures: Sequence[Figure] = ()
    curves: Mapping[str, Any] | None = None
    tables: Sequence[TextTable] = ()
    network: Mapping[str, Any] | None = None
    drawings: Sequence[Drawing] = ()
    use: Sequence[Mapping[str, Any]] = ()
    trace: tuple[str, str | None] | None = None
    experiments: Sequence[Listing] = ()
    experiments_note: str = ""


def render_page(page: Page) -> str:
    """The page's HTML: one file that loads nothing, and in which only its own two scripts may run, by their hash."""
    import jinja2

    is_interactive = page.curves is not None
    style = _asset("page.css") + (_asset("uplot/uPlot.min.css") if is_interactive else "")
    scripts = [_library(), _own_script()] if is_interactive else []
    template = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    ).from_string(_asset("page.html"))
    data = {"curves": page.curves, "use": page.use, "trace": page.trace and page.trace[0]}
    return template.render(
        page=page,
        style=style,
        style_hash=_hash(style),
        scripts=scripts,
        script_hashes=[_hash(script) for script in scripts],
        data=_json(data) if is_interactive else None,
    )


def _own_script() -> str:
    """The scripts of the page as one, in a function of its own: it leaves no names behind but `netgym`."""
    parts = "\n".join(_asset(f"scripts/{name}.js") for name in _SCRIPTS)
    return f'(() => {{\n"use strict";\n\n{parts}}})();\n'


def _library() -> str:
    """uPlot, its licence before it, as that asks for."""
    licence = _asset("uplot/LICENSE").strip()
    return f"/*!\n{licence}\n*/\n{_asset('uplot/uPlot.iife.min.js')}"


def _asset(name: str) -> str:
    return resources.files(_ASSETS).joinpath(name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _json(data: Any) -> str:
    """JSON that no HTML parser takes for anything else: without `<`, `>`, `&` and line separators."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def encoded(data: bytes) -> str:
    """Base64, as data URLs have it."""
    return base64.b64encode(data).decode()
