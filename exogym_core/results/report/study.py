"""Several runs, or a sweep, on one self-contained page: a row a group, curves with bands, what failed."""

from __future__ import annotations

import base64
import hashlib
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from exogym_core.names import visible
from exogym_core.results.record import RunFolder
from exogym_core.results.report.groups import HEADINGS, default_keys, group_runs, members_of, study_verdict
from exogym_core.results.report.plots import draw_study
from exogym_core.results.report.results import Results
from exogym_core.results.tidy import find_runs, value_text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from exogym_core.results.report.groups import Group, Member

__all__ = ["StudyReport", "html_page", "study_report"]

MOST_CURVES = 8
_NOTE = (
    "A row is a group of runs that agree in the first columns. Figures are means over its runs, in brackets the 95 % "
    "bootstrap interval; with few seeds it is too narrow. 'held': runs that reached the target loss and stayed there; "
    "a time stands only where all of a group did. Bytes are payload. Virtual time is the simulated clock's."
)
_CAPTIONS = {
    "loss_against_time": "Loss of the judged model against virtual time; bands go from the lowest to the highest run.",
    "loss_against_steps": "The same against steps.",
    "loss_against_bytes": "The same against payload bytes that left a worker.",
}


class StudyReport:
    """What a page of several runs says.

    Attributes:
        title: names of the runs.
        keys: what groups agree in.
        groups: best first, as far as they can be ordered.
        verdict: the sentence.
        winner: the group that seeds support, if any.
        failures: (which, why).
    """

    def __init__(
        self, title: str, members: Sequence[Member], keys: Sequence[str], groups: list[Group]
    ) -> None:
        self.title, self.keys, self.members = title, keys, members
        self.verdict, self.winner = study_verdict(groups)
        self.groups = sorted(groups, key=_order)
        self.failures = [
            (f"{member.run.run} {member.run.point} {member.result.name}", member.result.error or "incomplete")
            for member in members
            if not member.result.ended
        ]
        self.experiments: list[tuple[str, str]] = []

    def headings(self) -> list[str]:
        """Of the table."""
        return [*self.keys, *HEADINGS]

    def rows(self) -> list[tuple[bool, list[str]]]:
        """Whether it is the winner's, and its cells; a group each."""
        return [
            (group is self.winner, [visible(cell, 80) for cell in [*group.values, *group.cells()]])
            for group in self.groups
        ]

    def html(self) -> str:
        """The page."""
        first = Results(
            self.members[0].settings, "", [group.as_result() for group in self.groups[:MOST_CURVES]]
        )
        shown = "" if len(self.groups) <= MOST_CURVES else f" Shown are the first {MOST_CURVES} groups."
        return html_page(
            title=visible(self.title, 80),
            facts=[
                ("runs", len({(member.run.run, member.run.point) for member in self.members})),
                ("trainings", sum(len(member.result.runs) for member in self.members)),
                ("grouped by", ", ".join(self.keys)),
            ],
            verdict=self.verdict,
            headings=self.headings(),
            rows=self.rows(),
            note=_NOTE,
            pictures=[
                (_CAPTIONS[name] + shown, *map(_encoded, (picture.wide, picture.narrow)))
                for name, picture in draw_study(first).items()
            ],
            failures=[(visible(which, 80), visible(why, 500)) for which, why in self.failures],
            experiments=self.experiments,
        )


def html_page(**content: Any) -> str:
    """The template of studies, filled; every text is escaped, no script runs, nothing is loaded."""
    import jinja2

    assets = resources.files("exogym_core.results.report")
    style = assets.joinpath("page.css").read_text(encoding="utf-8")
    template = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    ).from_string(assets.joinpath("study.html").read_text(encoding="utf-8"))
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    return template.render(style=style, style_hash=digest, **content)


def _encoded(picture: bytes) -> str:
    return base64.b64encode(picture).decode()


def _order(group: Group) -> tuple[int, float]:
    """Those that held the target by its time, then by loss, then what came to nothing."""
    times, losses = group.times(), group.losses()
    if times and len(times) == len(group.runs):
        return 0, sum(times.values()) / len(times)
    return (1, sum(losses.values()) / len(losses)) if losses else (2, 0.0)


def study_report(
    paths: Sequence[str | Path], by: Sequence[str] = (), where: Sequence[str] = ()
) -> StudyReport:
    """Read runs, and put them into groups.

    Args:
        paths: of runs, sweeps, or folders of them.
        by: keys of the groups; without any, all that differ. The strategy is always one.
        where: `key=value` texts that runs must fit.

    Raises:
        InputError: there is no run, a file is damaged, or a key is nobody's.
    """
    members = members_of(find_runs(paths))
    keys = list(dict.fromkeys([*by, "strategy"])) if by else default_keys(members)
    groups = group_runs(members, keys, where)
    kept = [member for group in groups for member in group.members]
    report = StudyReport(", ".join(Path(path).resolve().name for path in paths), kept, keys, groups)
    for path in map(Path, paths):
        if not (path / "points").is_dir():
            continue
        for entry in RunFolder(path).read_summary():  # points that could not even be begun
            if entry.get("failed") and not entry.get("strategies"):
                point = ", ".join(
                    f"{key}={value_text(value)}" for key, value in entry.get("point", {}).items()
                )
                report.failures.append(
                    (f"{path.resolve().name} {entry['name']} {point}", str(entry.get("error")))
                )
    texts = {
        member.run.run: path
        for member in kept
        for path in [member.run.folder.path.parents[1] if member.run.point else member.run.folder.path]
    }
    report.experiments = [
        (name, (path / "experiment.yaml").read_text(encoding="utf-8"))
        for name, path in list(texts.items())[:20]
    ]
    return report
