"""Make the saved pages again: `python docs/saved_pages.py`.

The leaderboard is made from its entries. The study's page keeps its results and gets the style and scripts of today.
"""

from __future__ import annotations

import re
import shutil
import tempfile
from pathlib import Path

from exogym_core.results.report.page import Page, render_page
from netgym.cli.main import main as netgym

PAGES = Path(__file__).parent / "pages"
_OF_THE_CODE = re.compile(
    r"<meta http-equiv=\"Content-Security-Policy\".*?>|<style>.*?</style>|<script>.*?</script>", re.S
)


def made() -> dict[Path, str]:
    """Each saved page as the code makes it now."""
    with tempfile.TemporaryDirectory() as folder:
        board = Path(shutil.copytree(PAGES / "leaderboard", folder, dirs_exist_ok=True))
        if netgym(["bench", "--table", str(board)]):
            raise SystemExit("the leaderboard's entries are refused")
        leaderboard = (board / "index.html").read_text(encoding="utf-8")
    study = PAGES / "shown-study-page.html"
    page = render_page(Page("", [], "", [], [], "", curves={}))
    parts = iter(_OF_THE_CODE.findall(page))
    text = _OF_THE_CODE.sub(lambda _: next(parts), study.read_text(encoding="utf-8"))
    return {PAGES / "leaderboard" / "index.html": leaderboard, study: text}


if __name__ == "__main__":
    for path, text in made().items():
        path.write_text(text, encoding="utf-8")
