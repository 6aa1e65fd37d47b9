"""Results of comparisons and sweeps: tables, figures, pages and verdicts, read from their folders."""

from __future__ import annotations

import shutil
import weakref
from functools import cached_property
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from exogym_core.results.disk import write_whole
from exogym_core.results.fit_result import load_pandas
from exogym_core.results.reading import Results, is_study, load_runs
from exogym_core.results.report import table_cells, table_headings, verdict, write_report
from exogym_core.results.report.figures import Shown, draw_loss
from exogym_core.results.report.page import shown_of
from exogym_core.results.report.study import StudyReport, study_report
from exogym_core.results.run_folder import RunFolder

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pandas
    from matplotlib.figure import Figure

    from exogym_core.results.report.verdict import Verdict

__all__ = ["Comparison", "SweepResult", "load"]


class Comparison:
    """A run's folder, read when asked.

    Args:
        folder: of the run.
        temporary: a folder that is removed with this object; None: nothing is.

    Attributes:
        folder: with experiment.yaml, summary.json and report.html.
    """

    def __init__(self, folder: str | Path, temporary: Path | None = None) -> None:
        self.folder = Path(folder)
        self._run = RunFolder.open(self.folder)
        if temporary is not None:
            weakref.finalize(self, shutil.rmtree, temporary, ignore_errors=True)

    @property
    def summary(self) -> list[dict[str, Any]]:
        """Objects of summary.json: one a strategy."""
        return self._run.read_summary()

    @property
    def winner(self) -> str | None:
        """Label of the strategy that wins; None: none does."""
        return self._decision().winner

    @property
    def verdict(self) -> str:
        """Sentence that names the winner, and why."""
        return self._decision().text

    def table(self) -> pandas.DataFrame:
        """Summary as a table: a row a strategy.

        Raises:
            ImportError: pandas is not installed.
        """
        return load_pandas("table").DataFrame(self.summary)

    def to_pandas(self) -> pandas.DataFrame:
        """Evaluations as a tidy table: a row an evaluation of each strategy and seed.

        Raises:
            ImportError: pandas is not installed.
        """
        return load_runs(self.folder)

    def plot(self) -> Figure:
        """Loss over virtual seconds as a matplotlib figure, a line a strategy; over steps without a network.

        Raises:
            InputError: no strategy was evaluated twice.
        """
        return draw_loss(self._shown())

    def report(self, page: str | Path = "report.html") -> Path:
        """Write the page, one self-contained HTML file, to `page`; return its path."""
        written, path = self._write_page(), Path(page)
        if path.resolve() != written.resolve():
            write_whole(path, written.read_bytes())
        return path

    def _results(self) -> Results:
        return Results.load(self._run)

    def _decision(self) -> Verdict:
        return verdict(self._results())

    def _shown(self) -> Shown:
        return shown_of(self._results())

    def _write_page(self) -> Path:
        return write_report(self._run)

    def _cells(self) -> tuple[Sequence[str], Sequence[Sequence[str]]]:
        results = self._results()
        return table_headings(results), table_cells(results)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} in {self.folder}: {self.verdict}>"

    def _repr_html_(self) -> str:
        """Table and verdict, for notebooks."""
        headings, rows = self._cells()
        head = "".join(f"<th>{escape(heading)}</th>" for heading in headings)
        cells = ("".join(f"<td>{escape(cell)}</td>" for cell in row) for row in rows)
        body = "".join(f"<tr>{row}</tr>" for row in cells)
        return (
            f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table><p>{escape(self.verdict)}</p>"
        )


class SweepResult(Comparison):
    """A sweep's folder, read when asked. Its summary has an object a point: `name`, `point`, and `strategies`.

    Args:
        folder: of the sweep.
        temporary: a folder that is removed with this object; None: nothing is.

    Attributes:
        folder: with experiment.yaml, summary.json, results.csv, report.html and a run's folder for each point.
    """

    @cached_property
    def _study(self) -> StudyReport:
        return study_report([self.folder])

    @property
    def winner(self) -> str | None:
        """Name of the group that the seeds support; None: none, or several on different networks."""
        winners = self._study.winners
        return winners[0].name if len(winners) == 1 else None

    @property
    def verdict(self) -> str:
        """Sentence on the groups that come first, for each network and setting."""
        return self._study.verdict

    def table(self) -> pandas.DataFrame:
        """Summaries as a table: a row a point and strategy, with the point's values by key path."""
        rows = [
            {**point["point"], **entry} for point in self.summary for entry in point.get("strategies") or ()
        ]
        return load_pandas("table").DataFrame(rows)

    def _shown(self) -> Shown:
        return self._study.few()

    def _write_page(self) -> Path:
        return self._run.write_text("report.html", self._study.html())

    def _cells(self) -> tuple[Sequence[str], Sequence[Sequence[str]]]:
        return self._study.headings(), [cells for _, cells in self._study.rows()]


def load(folder: str | Path) -> Comparison:
    """Open the `folder` of a run or a sweep of `netgym`, or of `compare`, `run` and `sweep` with `out=`.

    Raises:
        InputError: it holds neither.
    """
    return SweepResult(folder) if is_study(Path(folder)) else Comparison(folder)
