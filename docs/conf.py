"""How Sphinx builds these pages: `make docs`. On a forge they are read as they are, without it."""

from __future__ import annotations

import re
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import cheat_sheet

project = "NetGym"
author = "NetGym's authors"
version = release = metadata.version("netgym")
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
# Attributes of one name in two classes, such as `name`, are ambiguous where a docstring lists them.
suppress_warnings = ["ref.python"]
root_doc = "index"
exclude_patterns = ["build"]
html_theme = "furo"
html_title = "NetGym"
html_extra_path = [
    "../schemas",
    "pages",
]  # the addresses that editors may ask for; pages that commands have written
html_theme_options = {
    "light_css_variables": {"color-brand-primary": "#0060a0", "color-brand-content": "#0060a0"},
}
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 4
nb_execution_mode = "force"
nb_execution_raise_on_error = True
nb_execution_timeout = 120
nb_execution_show_tb = True
nb_merge_streams = True
autodoc_typehints = "none"  # signatures have them
autodoc_member_order = "groupwise"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True

CONTENTS = {
    "Start": ["tutorials/index", "gallery/index"],
    "Guides": [
        *(
            "experiment",
            "topology",
            "weather",
            "strategies",
            "own-strategy",
            "asynchrony",
            "verdict",
            "studies",
        ),
        *(
            "trackers",
            "planning",
            "benchmark",
            "launch",
            "several-machines",
            "stages",
            "operating",
            "probing",
            "testing_collectives",
        ),
        *("transports", "migrating", "asks"),
    ],
    "Reference": ["cheat-sheet", "commands", "api/index"],
    "Background": [],
}
"""The pages' order at the side; what is named nowhere comes last, under Background."""


def contents() -> str:
    """The tree of pages, which only Sphinx needs: index.md stays as it is for a forge."""
    named = {name for names in CONTENTS.values() for name in names}
    others = sorted(
        path.stem for path in Path(__file__).parent.glob("*.md") if path.stem not in {*named, "index"}
    )
    trees = []
    for caption, names in CONTENTS.items():
        inside = "\n".join(names or others)
        trees.append(f"```{{toctree}}\n:hidden:\n:caption: {caption}\n\n{inside}\n```\n")
    return "\n".join(trees)


def children(folder: str) -> str:
    """The pages of a folder, for the foot of its index."""
    pages = [
        path
        for path in sorted((Path(__file__).parent / folder).iterdir())
        if path.suffix in (".md", ".ipynb")
    ]
    inside = "\n".join(path.stem for path in pages if path.stem != "index")
    return f"```{{toctree}}\n:hidden:\n\n{inside}\n```\n"


def add_trees(app: Any, name: str, source: list[str]) -> None:
    """Trees of pages; and links to files of the repository, which are not among the pages, as text."""
    if name == "index":
        source[0] += "\n" + contents()
    elif name.endswith("/index"):
        source[0] += "\n" + children(name.removesuffix("/index"))
    source[0] = re.sub(r"\[([^\]]*)\]\((?:\.\./)+(README|CHANGELOG)\.md[^)]*\)", r"\1 (`\2.md`)", source[0])
    # `not-run` marks a block for tests and is no language.
    source[0] = re.sub(r"^```(\w+) not-run$", r"```\1", source[0], flags=re.MULTILINE)


def as_markup(app: Any, what: str, name: str, subject: Any, options: Any, lines: list[str]) -> None:
    """Docstrings are prose with `names` in single backticks: literals, for Sphinx; stars and bars are themselves."""
    text = re.sub(r"(?<!`)`([^`\n]+)`(?!`)", r"``\1``", "\n".join(lines))
    pieces = re.split(r"(``[^`]+``)", text)
    pieces[::2] = [re.sub(r"([*|]|(?<=\w)_(?=\W|$))", r"\\\1", piece) for piece in pieces[::2]]
    lines[:] = "".join(pieces).split("\n")


def setup(app: Any) -> None:
    """Called by Sphinx."""
    Path(__file__).with_name("cheat-sheet.md").write_text(cheat_sheet.text(), encoding="utf-8")
    app.connect("source-read", add_trees)
    app.connect("autodoc-process-docstring", as_markup, priority=400)
