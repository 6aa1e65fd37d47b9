"""Texts made from templates, which are files of this package: pages, LaTeX, and what commands print."""

from __future__ import annotations

import base64
import math
import re
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING, Any

from exogym_core.names import visible
from exogym_core.results.progress import format_loss
from netsim.units import format_bytes, format_count, format_seconds

if TYPE_CHECKING:
    from collections.abc import Iterable

    import jinja2

__all__ = ["asset", "base64_text", "latex_text", "rendered"]


def asset(name: str) -> str:
    """Text of a file of this package, such as `results/report/page.css`."""
    return resources.files("exogym_core").joinpath(name).read_text(encoding="utf-8")


def rendered(template: str, package: str = "exogym_core", **values: Any) -> str:
    """The text of a template with these values; in HTML they are escaped.

    Args:
        template: a file of the package, such as `results/report/page.html`.
        package: name of a package.
        values: by name.
    """
    return _environment(package).get_template(template).render(values)


@cache
def _environment(package: str) -> jinja2.Environment:
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader(package, "."),
        autoescape=jinja2.select_autoescape(["html"]),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "base64": base64_text,
        "bytes": format_bytes,
        "count": format_count,
        "latex": latex_text,
        "listed": _listed,
        "loss": format_loss,
        "names": lambda strategies: _listed(visible(each.name) for each in strategies),
        "percent": _percent,
        "seconds": format_seconds,
        "visible": visible,
        "whole_seconds": lambda seconds: format_seconds(round(seconds)),
    }
    return environment


def _percent(share: float, beside: float | None = None) -> str:
    """Share in percent, with the decimals that it and its difference from another one need; at least one.

    >>> _percent(0.179, 0.719), _percent(4.72e-6, 0.0), _percent(0.9997, 0.9999)
    ('17.9%', '0.0005%', '99.97%')
    """
    other = share if beside is None else beside
    apart = abs(share - other)
    sizes = [share, other, apart if apart > 1e-4 * max(share, other) else 0.0]
    decimals = max([1, *(math.ceil(-2 - math.log10(each)) for each in sizes if each > 0)])
    return f"{share:.{decimals}%}"


def _listed(words: Iterable[object]) -> str:
    """Words with commas and an `and`."""
    *first, last = list(map(str, words)) or [""]
    return f"{', '.join(first)} and {last}" if first else last


def base64_text(data: bytes) -> str:
    """The bytes in base64."""
    return base64.b64encode(data).decode()


_LATEX = str.maketrans(
    {each: f"\\{each}" for each in "&%$#_{}"}
    # Brackets and stars at the beginning of a row would be taken for arguments of the row before.
    | {each: f"{{{each}}}" for each in "[]*`"}
    | {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "|": r"\textbar{}"}
    | {"\N{PLUS-MINUS SIGN}": r"$\pm$", "<": r"$<$", ">": r"$>$", '"': r"\char34{}"}
)


def latex_text(text: str) -> str:
    """The text with LaTeX's special characters escaped."""
    return re.sub("-(?=-)", "-{}", text.translate(_LATEX))
