"""Reports of runs: the table, plots, a sentence that names the winner, and one self-contained page."""

from __future__ import annotations

from exogym_core.results.reading import Results, StrategyResult
from exogym_core.results.report.page import head_facts, write_report
from exogym_core.results.report.table import rich_table, table_cells, table_headings
from exogym_core.results.report.verdict import verdict

__all__ = [
    "Results",
    "StrategyResult",
    "head_facts",
    "rich_table",
    "table_cells",
    "table_headings",
    "verdict",
    "write_report",
]
