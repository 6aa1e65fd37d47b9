"""Several runs, or a sweep, on one self-contained page: a row a group, curves with bands, what failed."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from exogym_core.names import visible
from exogym_core.results.record import RunFolder
from exogym_core.results.report.document import Figure, Listing, Page, TextTable, render_page
from exogym_core.results.report.groups import HEADINGS, default_keys, group_runs, members_of, study_verdict
from exogym_core.results.report.interactive import interactive_curves
from exogym_core.results.report.network import draw_network, network_matrix
from exogym_core.results.report.page import environment_of
from exogym_core.results.report.pictures import OF_SEVERAL, draw_pictures
from exogym_core.results.report.plots import Shown
from exogym_core.results.report.results import Results
from exogym_core.results.report.weather import weather_of
from exogym_core.results.tidy import find_runs, value_text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from exogym_core.results.report.groups import Group, Member

__all__ = ["StudyReport", "study_report"]

MOST_CURVES = 8
_MOST_LISTED = 20
_NOTE = (
    "A row is a group of runs that agree in the first column. Figures are means over its runs, in brackets the 95 % "
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
        winners: the groups that seeds support, one for each network and setting that has one.
        failures: (which, why).
        listings: experiments, and what they were made with.
    """

    def __init__(
        self, title: str, members: Sequence[Member], keys: Sequence[str], groups: list[Group]
    ) -> None:
        self.title, self.keys, self.members = title, keys, members
        self.verdict, self.winners = study_verdict(groups)
        self.groups = sorted(groups, key=_order)
        self.failures = [
            (f"{member.run.run} {member.run.point} {member.result.name}", member.result.error or "incomplete")
            for member in members
            if not member.result.ended
        ]
        self.listings: list[Listing] = []

    def headings(self) -> list[str]:
        """Of the table."""
        return [*self.keys, *HEADINGS]

    def rows(self) -> list[tuple[bool, list[str]]]:
        """Whether it is the winner's, and its cells; a group each."""
        return [
            (self._wins(group), [visible(cell, 80) for cell in [*group.values, *group.cells()]])
            for group in self.groups
        ]

    def _wins(self, group: Group) -> bool:
        return any(group is winner for winner in self.winners)

    def shown(self) -> Shown:
        """Groups as strategies, and the weather if it is the same for all."""
        first = self.members[0]
        alike = ("topology", "network_seed", "seed", "seeds")
        results = Results(first.settings, "", [group.as_result() for group in self.groups])
        has_one_weather = all(
            member.settings.get(key) == first.settings.get(key) for member in self.members for key in alike
        )
        return Shown(results, weather_of(results)) if has_one_weather else Shown(results)

    def few(self) -> Shown:
        """The first groups: as many as a picture can show."""
        shown = self.shown()
        first = shown.results.strategies[:MOST_CURVES]
        return Shown(Results(shown.results.settings, "", first), shown.weather)

    def html(self, align: str = "time") -> str:
        """The page; curves are aligned by time, steps or bytes when it opens."""
        shown = self.shown()
        told = "" if len(self.groups) <= MOST_CURVES else f" Shown are the first {MOST_CURVES} groups."
        settings = shown.results.settings
        topology = settings.get("topology")
        has_one_network = all(member.settings.get("topology") == topology for member in self.members)
        failures = [(visible(which, 80), [visible(why, 500)]) for which, why in self.failures]
        return render_page(
            Page(
                title=visible(self.title, 80),
                facts=[
                    ("runs", len({(member.run.run, member.run.point) for member in self.members})),
                    ("trainings", sum(len(member.result.runs) for member in self.members)),
                    ("grouped by", visible(", ".join(self.keys), 200)),
                ],
                verdict=self.verdict,
                # One cell names a group: what it came to stands next to it, on a telephone too.
                headings=[visible(", ".join(self.keys), 200), *HEADINGS],
                rows=[
                    (self._wins(group), [visible(cell, 120) for cell in [group.name, *group.cells()]])
                    for group in self.groups
                ],
                note=_NOTE,
                figures=[
                    Figure(_CAPTIONS[name] + told, picture, is_curve=True)
                    for name, picture in draw_pictures(self.few(), OF_SEVERAL).items()
                ],
                curves=interactive_curves(shown.results, shown.weather, align),
                tables=[TextTable("What failed", ["which", "why"], failures)] if failures else [],
                network=network_matrix(topology) if has_one_network else None,
                drawings=draw_network(topology) if has_one_network else [],
                experiments=self.listings,
            )
        )


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
    for name, path in list(texts.items())[:_MOST_LISTED]:
        text = (path / "experiment.yaml").read_text(encoding="utf-8")
        report.listings.append(Listing(visible(f"{name}: experiment.yaml", 100), text))
    # Points of a sweep are made with the same, so the first one's is told.
    found = environment_of(kept[0].run.folder)
    report.listings += [Listing(visible(f"{kept[0].run.run}: {each.name}", 100), each.text) for each in found]
    return report
