"""docs/verdict.md against the code."""

from __future__ import annotations

from pathlib import Path

from exogym_core.strategy import STRATEGIES

PAGE = Path(__file__).parents[1] / "docs" / "verdict.md"


def test_the_page_tells_of_every_strategy_which_model_is_judged() -> None:
    """Its table names each once, with the word that the summary has."""
    told: dict[str, str] = {}
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("|") and len(cells) == 3 and cells[1].startswith("`"):
            names = cells[0].split(", ")
            assert told.keys().isdisjoint(names)
            told |= dict.fromkeys(names, cells[1].strip("`"))
    assert told == {name: make().judged for name, make in STRATEGIES.items()}
