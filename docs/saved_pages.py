"""Make the saved pages again: `python docs/saved_pages.py`.

The study's page keeps its results and gets the style and scripts of today.
"""

from __future__ import annotations

import re
from pathlib import Path

from exogym_core.results.report.page import Page, render_page
from exogym_core.results.report.table import ResultTable

PAGES = Path(__file__).parent / "pages"
_OF_THE_CODE = re.compile(
    r"<meta http-equiv=\"Content-Security-Policy\".*?>|<style>.*?</style>|<script>.*?</script>", re.S
)


def made() -> dict[Path, str]:
    """Each saved page as the code makes it now."""
    study = PAGES / "shown-study-page.html"
    page = render_page(Page("", [], "", ResultTable([], []), "", curves={}))
    parts = iter(_OF_THE_CODE.findall(page))
    text = _OF_THE_CODE.sub(lambda _: next(parts), study.read_text(encoding="utf-8"))
    return {study: text}


if __name__ == "__main__":
    for path, text in made().items():
        path.write_text(text, encoding="utf-8")
