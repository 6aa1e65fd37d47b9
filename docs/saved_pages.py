"""Make the saved pages again: `python docs/saved_pages.py`.

Pages of commands keep their results and get the style and scripts of today.
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
    page = render_page(Page("", [], "", ResultTable([], []), "", curves={}))
    of_the_code, pages = _OF_THE_CODE.findall(page), {}
    for path in sorted(PAGES.glob("*.html")):
        parts = iter(of_the_code)
        pages[path] = _OF_THE_CODE.sub(lambda _, parts=parts: next(parts), path.read_text(encoding="utf-8"))
    return pages


if __name__ == "__main__":
    for path, text in made().items():
        path.write_text(text, encoding="utf-8")
