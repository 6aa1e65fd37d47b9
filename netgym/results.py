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
from exogym_core.results.reading import comparison_of, is_study, load_runs
from exogym_core.results.report import RunReport, write_report
from exogym_core.results.report.figures import draw_loss
from exogym_core.results.run_folder import RunFolder
from netgym.studies.report import StudyReport

if TYPE_CHECKING:
    import pandas
    from matplotlib.figure import Figure

    from exogym_core.results.report.page import Report

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
        self._is_ours = temporary is not None
        if temporary is not None:
            weakref.finalize(self, shutil.rmtree, temporary, ignore_errors=True)

    @property
    def summary(self) -> list[dict[str, Any]]:
        """Objects of summary.json: one a strategy."""
        return self._run.read_summary()

    @property
    def winner(self) -> str | None:
        """Label of the strategy that wins, or name of the group that the seeds support; None: none does."""
        return self._report.winner

    @property
    def verdict(self) -> str:
        """Sentence that names the winner, and why; of a sweep on the first groups under each network and setting."""
        return self._report.verdict

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
        return draw_loss(self._report.few())

    def report(self, page: str | Path = "report.html") -> Path:
        """Write the page, one self-contained HTML file, to `page`; return its path."""
        written, path = self._write_page(), Path(page)
        if path.resolve() != written.resolve():
            write_whole(path, written.read_bytes())
        return path

    def retime(self, **changes: Any) -> Comparison:
        """Time the run on another network without training; `changes` are keywords of `netgym.retime`."""
        import netgym  # whose commands need this module

        # A temporary run was made by this process, even where its home has no place for a seal.
        return netgym.retime(self.folder, **{"trust": self._is_ours, **changes})

    @property
    def _report(self) -> Report:
        return RunReport(self._run)

    def _write_page(self) -> Path:
        return write_report(self._run)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} in {self.folder}: {self.verdict}>"

    def _repr_html_(self) -> str:
        """Table and verdict, for notebooks."""
        report, table = self._report, self._report.table.filled()
        head = "".join(f"<th>{escape(heading)}</th>" for heading in table.headings)
        cells = ("".join(f"<td>{escape(cell)}</td>" for cell in row) for _, row in table.rows)
        body = "".join(f"<tr>{row}</tr>" for row in cells)
        text = f"<p style='white-space: pre-line'>{escape(report.verdict)}</p>"
        return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{text}"


class SweepResult(Comparison):
    """A sweep's folder, read when asked. Its summary has an object a point: `name`, `point`, and `strategies`.

    Args:
        folder: of the sweep.
        temporary: a folder that is removed with this object; None: nothing is.

    Attributes:
        folder: with experiment.yaml, summary.json, results.csv, report.html and a run's folder for each point.
    """

    @cached_property
    def _report(self) -> StudyReport:
        return StudyReport([self.folder])

    def table(self) -> pandas.DataFrame:
        """Summaries as a table: a row a point and strategy, with the point's values by key path."""
        rows = [
            {**point["point"], **entry} for point in self.summary for entry in point.get("strategies") or ()
        ]
        return load_pandas("table").DataFrame(rows)

    def _write_page(self) -> Path:
        return self._run.write_text("report.html", self._report.html())


def load(folder: str | Path) -> Comparison:
    """Open the `folder` of a run, a sweep or a tune: of the latter, the comparison at the best settings.

    Raises:
        InputError: it holds none of them.
    """
    place = comparison_of(Path(folder)) or Path(folder)
    return SweepResult(place) if is_study(place) else Comparison(place)
