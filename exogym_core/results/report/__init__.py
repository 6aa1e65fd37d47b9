"""Reports of runs: the table, plots, a sentence that names the winner, and one self-contained page."""

from __future__ import annotations

from exogym_core.results.reading import Results, StrategyResult
from exogym_core.results.report.facts import head_facts
from exogym_core.results.report.page import RunReport, write_report
from exogym_core.results.report.table import comparison_table
from exogym_core.results.report.verdict import verdict

__all__ = [
    "Results",
    "RunReport",
    "StrategyResult",
    "comparison_table",
    "head_facts",
    "verdict",
    "write_report",
]
