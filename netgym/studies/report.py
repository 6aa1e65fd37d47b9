"""Several runs, or a sweep, on one page: groups by any key, intervals over their seeds, curves with bands."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from exogym_core.names import visible
from exogym_core.results.progress import format_loss
from exogym_core.results.reading import (
    POINTS,
    Results,
    StrategyResult,
    find_runs,
    setting,
    value_text,
    value_texts,
)
from exogym_core.results.report.curves import interactive_curves
from exogym_core.results.report.facts import methods, origins, placements
from exogym_core.results.report.figures import OF_SEVERAL, Shown, draw_pictures
from exogym_core.results.report.network import NetworkSection, weather_of
from exogym_core.results.report.page import (
    Figure,
    Listing,
    Page,
    Report,
    TextTable,
    environment_of,
    render_page,
)
from exogym_core.results.report.table import ResultTable, block_size, ratio, short_count, tokens_to_target
from exogym_core.results.report.verdict import gap_of, lead_interval, unconfirmed_seconds, why_equal
from exogym_core.results.run_folder import RunFolder
from exogym_core.results.seeds import paired_interval, t_interval
from netgym.planning.sweep import short_names
from netgym.studies.points import point_text
from netsim.errors import InputError
from netsim.files.plain_files import read_bytes
from netsim.units import format_bytes, format_count, format_seconds

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

    from exogym_core.results.reading import FoundRun, SeedResult


__all__ = [
    "Decision",
    "Group",
    "Member",
    "StudyReport",
    "default_keys",
    "group_runs",
    "members_of",
    "study_verdict",
]

_MISSING = "-"
_SEEDS = ("seed", "seeds")  # keys in which replicates differ
# Keys that compared strategies must share: with others, times and losses answer another question.
_CONDITIONS = (
    *("task", "model", "topology", "placement", "protocol", "collectives", "workers.count", "compute"),
    *("steps", "batch_size", "until", "failures", "network_seed", "target_loss", "evaluate"),
)
# Keys in which groups may be compared, and runs of one group must agree besides.
_SETTINGS = ("shuffle", "autocast", "servers", "transport", "workers.intra_op_threads")


@dataclass(frozen=True)
class Member:
    """A strategy of a run.

    Attributes:
        run: of the strategy.
        results: of the run.
        result: of the strategy.
    """

    run: FoundRun
    results: Results
    result: StrategyResult

    @property
    def settings(self) -> Mapping[str, Any]:
        """The run's resolved experiment."""
        return self.results.settings

    def value(self, key: str) -> str:
        """Value of `key`: `run`, `point`, `strategy`, a key of the sweep, or a path into the experiment."""
        if key == "strategy":
            return self.result.name
        if key in ("run", "point"):
            return str(getattr(self.run, key)) or _MISSING
        if key in self.run.values:
            return self.run.texts[key]
        found = setting(self.settings, key, self.result.name)
        return _MISSING if found is None else value_text(found)

    def setting(self, key: str) -> Any:
        """Value of the run's resolved experiment under the path `key`; None where it has nothing."""
        return self.results.network if key == "topology" else setting(self.settings, key, self.result.name)


@dataclass(frozen=True)
class Group:
    """Members that agree in every key.

    Attributes:
        keys: in which members agree.
        values: of the keys.
        members: of the group.
    """

    keys: tuple[str, ...]
    values: tuple[str, ...]
    members: Sequence[Member]

    @property
    def name(self) -> str:
        """The values on one line."""
        return ", ".join(self.values)

    @property
    def runs(self) -> list[SeedResult]:
        """Complete runs of all members."""
        return [run for member in self.members for run in member.result.runs if run.complete]

    @property
    def failed(self) -> int:
        """Number of members that did not end."""
        return sum(not member.result.ended for member in self.members)

    @property
    def is_charged(self) -> bool:
        """True if coding is charged to all members that encode, where it costs time."""
        return all(member.result.coding is None for member in self.members)

    def losses(self) -> dict[int, float]:
        """Final losses by seed."""
        return {run.seed: run.final_loss for run in self.runs if run.final_loss is not None}

    @property
    def num_diverged(self) -> int:
        """Number of runs that ended with a loss that is not finite, where others did not."""
        losses = self.losses()
        return len(self.runs) - len(losses) if losses else 0

    def times(self) -> dict[int, float]:
        """Virtual seconds to the target by seed, of the runs that held it."""
        return {run.seed: run.held_seconds for run in self.runs if run.held_seconds is not None}

    def as_result(self) -> StrategyResult:
        """Result with the runs of all members, as of one strategy, for a picture."""
        first = self.members[0].result
        return replace(first, name=self.name, runs=self.runs, incomplete=bool(self.failed))

    def cells(self) -> list[str]:
        """Cells of the group's row in the table, after its values."""
        times, count = self.times(), len(self.runs)
        ends = [run.virtual_seconds for run in self.runs if run.virtual_seconds is not None]
        has_target = any(run.target is not None for run in self.runs)
        diverged = f" ({self.num_diverged} of {count} not finite)" if self.num_diverged else ""
        results = self.members[0].results
        size = block_size(results)
        tokens = tokens_to_target(self.runs, results.target_loss, size) if size else []
        known = [each for each in tokens if each is not None]
        return [
            _interval_text(times.values(), format_seconds, gap_of(self.runs, results.target_loss))
            if count and len(times) == count
            else _MISSING,
            f"{len(times)} of {count}" if has_target else _MISSING,
            _interval_text(self.losses().values(), format_loss) + diverged,
            f"{count}" + (f" ({self.failed} failed)" if self.failed else ""),
            format_seconds(_mean(ends)) if len(ends) == count and ends else _MISSING,
            *(self._mean_bytes(name) for name in ("bytes_sent_per_worker", "wan_bytes")),
            _interval_text(known, short_count) if len(known) == count else _MISSING,
        ]

    def _mean_bytes(self, name: str) -> str:
        counts = [count for run in self.runs if (count := getattr(run, name)) is not None]
        is_known = counts and len(counts) == len(self.runs)
        return format_bytes(sum(counts) / len(counts)) if is_known else _MISSING


HEADINGS = (
    "to target",
    "held",
    "final loss",
    "runs",
    "virtual time",
    "sent by a worker",
    "between regions",
    "tokens to target",
)
"""Headings of `Group.cells`."""


def _interval_text(values: Collection[float], write: Callable[[float], str], gap: float = 0.0) -> str:
    """Mean and Student's interval, which begins at least `gap` before the mean."""
    if not values:
        return _MISSING
    interval, mean = t_interval(values), _mean(values)
    if interval is None:
        return write(mean)
    interval = min(interval[0], mean - gap), interval[1]
    if write is format_seconds and 0 < mean < 120:  # with the mean's decimals
        decimals = max(0, 3 - math.floor(math.log10(mean)))
        low, high = (f"{each:.{decimals}f}" for each in interval)
        return f"{mean:.{decimals}f} s [{low}, {high}]"
    return f"{write(mean)} [{write(interval[0])}, {write(interval[1])}]"


def members_of(runs: Iterable[FoundRun]) -> list[Member]:
    """Every strategy of every run.

    Raises:
        InputError: a run's file is damaged.
    """
    members = []
    for run in runs:
        results = Results.load(run.folder)
        members += [Member(run, results, result) for result in results.strategies]
    return members


def _experiments(members: Iterable[Member]) -> list[Results]:
    """The members' runs; their settings name the members' strategies alone."""
    of_run: dict[int, list[Member]] = {}
    for member in members:
        of_run.setdefault(id(member.results), []).append(member)
    found = []
    for same in of_run.values():
        results = same[0].results
        names = [member.result.name for member in same]
        kept = [
            each for each in results.settings["strategies"] if (each.get("label") or each["name"]) in names
        ]
        found.append(replace(results, settings={**results.settings, "strategies": kept}))
    return found


def default_keys(members: Sequence[Member]) -> list[str]:
    """Keys that differ, seeds left aside: the run, where there are several; keys of a sweep; the strategy.

    With the point, where two of a sweep are the same experiment.
    """
    swept = dict.fromkeys(key for member in members for key in member.run.values if key not in _SEEDS)
    keys = ["run"] if len({member.run.run for member in members}) > 1 else []
    keys += [key for key in swept if len({member.value(key) for member in members}) > 1]
    keys.append("strategy")
    taken = [(*map(member.value, keys), run.seed) for member in members for run in member.result.runs]
    return keys if len(set(taken)) == len(taken) else ["point", *keys]


def selected(members: Sequence[Member], where: Sequence[str]) -> Sequence[Member]:
    """Members that fit `where`, `key=value` texts.

    Raises:
        InputError: none fits.
    """
    for text in where:
        key, separator, value = text.partition("=")
        if not separator:
            raise InputError(f"--where {text}: expected KEY=VALUE, such as topology=lan")
        known = list(dict.fromkeys(member.value(key) for member in members))
        members = [member for member in members if member.value(key) == value]
        if not members:
            raise InputError(f"--where {text}: no run has it: {key} is {', '.join(known[:12])}")
    return members


def group_runs(members: Sequence[Member], keys: Sequence[str]) -> list[Group]:
    """Members in groups, in the order of their first ones.

    Args:
        members: to be grouped.
        keys: in which members of a group agree.

    Raises:
        InputError: no member has one of the keys, or a group holds runs that differ in more than seeds.
    """
    for key in keys:
        if all(member.value(key) == _MISSING for member in members):
            raise InputError(
                f"--group-by {key}: no run has such a key: give one of an experiment, such as topology"
            )
    groups: dict[tuple[str, ...], list[Member]] = {}
    for member in members:
        groups.setdefault(tuple(member.value(key) for key in keys), []).append(member)
    found = [Group(tuple(keys), values, inside) for values, inside in groups.items()]
    for group in found:
        _refuse_pooling(group)
    return found


def _refuse_pooling(group: Group) -> None:
    """Raise InputError where runs of a group are no replicates."""
    swept = [key for member in group.members for key in member.run.values if key not in _SEEDS]
    options = [
        f"strategies.*.{name}" for member in group.members for name in member.setting("strategies.*") or {}
    ]
    # However their keys are written.
    if len({_json(member.results.network) for member in group.members}) == 1:
        swept = [key for key in swept if not key.startswith("topology.")]
    for key in dict.fromkeys([*swept, *_CONDITIONS, *_SETTINGS, *options]):
        found = [member.setting(key) for member in group.members]
        if key in swept and all(each is None for each in found):  # resolved files have another form of it
            found = [member.value(key) for member in group.members]
        if len(set(map(_json, found))) > 1:
            values = list(dict.fromkeys(member.value(key) for member in group.members))
            remedy = f"add --group-by {key}, or --where {key}={values[0]}"
            if len(values) == 1:  # such as two networks of one name
                apart = "run" if len({member.run.run for member in group.members}) > 1 else "point"
                values, remedy = list(value_texts(found).values()), f"add --group-by {apart}"
            raise InputError(
                f"--group-by {','.join(group.keys)}: {group.name} holds runs that differ in {key} "
                f"({', '.join(values[:4])}), and only seeds are replicates: {remedy}"
            )
    judged = sorted({run.judged for run in group.runs if run.judged})
    if len(judged) > 1:
        raise InputError(
            f"--group-by {','.join(group.keys)}: {group.name} holds runs that differ in the judged model "
            f"({', '.join(judged)}), as those of different versions may, and only seeds are replicates: leave some out"
        )
    seeds = [run.seed for run in group.runs]
    if twice := [seed for seed in seeds if seeds.count(seed) > 1]:
        of_runs = [(member.run.run, run.seed) for member in group.members for run in member.result.runs]
        apart = "run" if len(set(of_runs)) == len(of_runs) else "point"
        names = ", ".join(
            dict.fromkeys(f"{member.run.run} {member.run.point}".strip() for member in group.members)
        )
        raise InputError(
            f"--group-by {','.join(group.keys)}: {group.name} holds seed {twice[0]} more than once (in {names}), which "
            f"adds no evidence: add --group-by {apart}, or leave one out"
        )


def _json(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=str)


class Decision(NamedTuple):
    """Outcome among groups of the same conditions, such as one network.

    Attributes:
        text: a sentence.
        first, second: groups by time to the target, where one held it; else by final loss. None: there is none.
        means: of both, by their values; seconds to the target, or final losses.
        interval: of the difference, paired by seed; None: there is none.
        is_certain: whether the seeds support the first.
        name: of the conditions; empty where all groups share them.
        names: of the groups, by their values.
    """

    text: str
    first: Group | None = None
    second: Group | None = None
    means: Mapping[tuple[str, ...], float] = {}
    interval: tuple[float, float] | None = None
    is_certain: bool = False
    name: str = ""
    names: Mapping[tuple[str, ...], str] = {}

    def plain(self) -> dict[str, Any]:
        """Setting, first and second group with their means, and interval of their difference, as plain values."""
        first, second = (
            None if each is None else self.means[each.values] for each in (self.first, self.second)
        )
        return {
            "setting": self.name,
            "first": self.first and self.first.name,
            "by": "virtual_seconds_to_target" if self._is_by_time else "final_loss",
            "value": first,
            "second": self.second and self.second.name,
            "second_value": second,
            "difference_interval": self.interval and list(self.interval),
            "is_certain": self.is_certain,
        }

    def cells(self) -> list[str]:
        """Cells of the table of decisions, after the name."""
        if self.first is None:
            return [_MISSING] * 5
        write = format_seconds if self._is_by_time else format_loss
        cells = [self.names[self.first.values], write(self.means[self.first.values])]
        if self.second is None:
            cells += [_MISSING] * 2
        else:
            behind = self.means[self.second.values]
            lead = behind - self.means[self.first.values]
            ahead = f" ({ratio(behind, self.means[self.first.values])})" if self._is_by_time else ""
            cells += [self.names[self.second.values], f"{write(lead)}{ahead}"]
        return [visible(each, 120) for each in [*cells, "yes" if self.is_certain else "no"]]

    @property
    def _is_by_time(self) -> bool:
        return self.first is not None and len(self.first.times()) == len(self.first.runs) > 0


def study_verdict(groups: Sequence[Group]) -> tuple[str, list[Decision]]:
    """Verdict that the seeds support, on a line for each network and setting, and the decisions."""
    contests = _contests(groups)
    several = len(contests) > 1
    names = _differences([contest[0] for contest in contests]) if several else [""]
    decided = []
    for contest, name in zip(contests, names, strict=True):
        own = _names(contest, several)
        decided.append(_decided(contest, own)._replace(name=name, names=own))
    uncharged = [group.name for group in groups if not group.is_charged]
    tail = [f"Coding is not charged to {_listed(uncharged)}."] if uncharged else []
    if diverged := [group.name for group in groups if group.num_diverged]:
        tail.append(f"Not every run of {_listed(diverged)} ended with a finite loss, so it does not compete.")
    if not several:
        return " ".join([decided[0].text, *tail]), decided
    winners = [each.first for each in decided if each.is_certain and each.first]
    if len(winners) > 1 and len({winner.members[0].result.name for winner in winners}) > 1:
        tail.insert(0, "No strategy is first under all of these.")
    return "\n".join([*(f"{each.name}: {each.text}" for each in decided), *tail]), decided


def _contests(groups: Sequence[Group]) -> list[list[Group]]:
    """Groups that compete: those of the same conditions, such as one network."""
    contests: dict[str, list[Group]] = {}
    for group in groups:
        conditions = _json({key: group.members[0].setting(key) for key in _CONDITIONS})
        contests.setdefault(conditions, []).append(group)
    return list(contests.values())


def _differences(groups: Sequence[Group]) -> list[str]:
    """Conditions of each group that not all share and that it has, those that a sweep set by its values."""
    members = [group.members[0] for group in groups]
    swept = dict.fromkeys(key for member in members for key in member.run.values if key not in _SEEDS)
    set_by = {key: [each for each in swept if f"{each}.".startswith(f"{key}.")] for key in _CONDITIONS}
    keys = [each for key in _CONDITIONS for each in set_by[key] or [key]]

    def differs(key: str) -> bool:
        values = [each.run.values[key] if key in each.run.values else each.setting(key) for each in members]
        return len(set(map(_json, values))) > 1

    differing = list(filter(differs, keys))
    names = short_names(differing)
    found = []
    for member in members:
        values = [member.value(key) for key in differing]
        pairs = list(zip(names, values, strict=True))
        own = [(name, value) for name, value in pairs if value != _MISSING] or pairs
        found.append(", ".join(f"{name} {value}" for name, value in own))
    return found


def _names(groups: Sequence[Group], are_conditions_named: bool) -> dict[tuple[str, ...], str]:
    """Names of groups by values; without the values that all share, where the conditions are named before."""
    shared = [len(set(values)) == 1 for values in zip(*(group.values for group in groups), strict=True)]
    names = {}
    for group in groups:
        own = [value for value, is_shared in zip(group.values, shared, strict=True) if not is_shared]
        names[group.values] = ", ".join(own) if own and are_conditions_named else group.name
    return names


def _decided(groups: Sequence[Group], names: Mapping[tuple[str, ...], str]) -> Decision:
    """Decision on groups of the same conditions.

    Groups that held the target with all their runs are ordered by its time; if there are none, by final loss. The
    first is certain only if its difference to the second, seed by seed, has an interval on one side of zero.
    """
    ended = [group for group in groups if group.runs and not group.failed and not group.num_diverged]
    holders = [group for group in ended if len(group.times()) == len(group.runs)]
    figures = {group.values: group.times() if holders else group.losses() for group in ended}
    means = {values: _mean(by_seed.values()) for values, by_seed in figures.items() if by_seed}
    ordered = sorted(
        holders or [group for group in ended if group.losses()], key=lambda group: means[group.values]
    )
    what = "to the target" if holders else "final loss"
    if not ordered:
        return Decision("No group has finished.")
    first, missed = ordered[0], _missed(ended, holders, names)
    write = format_seconds if holders else format_loss
    shown = write(means[first.values])
    target = first.members[0].results.target_loss
    for group in [each for each in ended if holders and each not in holders]:
        touch = unconfirmed_seconds(group.runs, target)
        if touch is not None and touch < means[first.values]:
            return Decision(
                f"{names[group.values]} touched the target after {format_seconds(touch)}, before "
                f"{names[first.values]} ({shown}), and ended before that could be confirmed, so none comes first: give "
                "all of them the same time (until, with more steps), or evaluate more often (evaluate.every).",
                *(first, None, means),
            )
    if len(ordered) == 1:
        if missed:
            text = f"{names[first.values]} comes first ({shown} {what}), alone.{missed}"
            return Decision(text, first, None, means, is_certain=True)
        text = f"{names[first.values]}: {shown} {what}; nothing to compare it with."
        return Decision(text, first, None, means, is_certain=bool(holders))
    second, behind = ordered[1], means[ordered[1].values]
    seeds = sorted(figures[first.values].keys() & figures[second.values].keys())
    later, sooner = ([figures[group.values][seed] for seed in seeds] for group in (second, first))
    interval = paired_interval(later, sooner)
    if holders:
        by_seed = [{run.seed: run for run in group.runs} for group in (second, first)]
        later_runs, sooner_runs = ([runs[seed] for seed in seeds] for runs in by_seed)
        interval = lead_interval(later_runs, sooner_runs, target)
    if behind == means[first.values]:
        tied = [names[group.values] for group in ordered if means[group.values] == behind]
        text = f"{', '.join(tied[:-1])} and {tied[-1]} come first together ({shown} {what}).{missed}"
        return Decision(text, first, second, means, interval)
    then = f"{ratio(behind, means[first.values])} sooner than" if holders else "then"
    lead = (
        f"{names[first.values]} comes first ({shown} {what}), {then} {names[second.values]} ({write(behind)})"
    )
    gap = max(gap_of(group.runs, target) for group in (first, second))
    if holders and (reason := why_equal(means[first.values], behind, gap)):
        return Decision(f"{lead}, but they are equal: {reason}.{missed}", first, second, means, interval)
    if interval is None:
        text = f"{lead}; one seed in common does not show how much seeds differ.{missed}"
        return Decision(text, first, second, means)
    difference = f"the difference is {write(interval[0])} to {write(interval[1])}"
    pairs = f"95 % t interval over {format_count(len(seeds), 'seed')} in common"
    if interval[0] > 0:
        return Decision(
            f"{lead}; {difference} ({pairs}).{missed}", first, second, means, interval, is_certain=True
        )
    text = f"{lead}, but the order is uncertain: {difference} ({pairs}).{missed}"
    return Decision(text, first, second, means, interval)


def _missed(ended: Sequence[Group], holders: Sequence[Group], names: Mapping[tuple[str, ...], str]) -> str:
    """Sentence on groups that did not hold the target."""
    if not any(run.target is not None for group in ended for run in group.runs):
        return ""
    if not holders:
        return " No group held the target."
    missed = []
    for group in [group for group in ended if group not in holders]:
        runs = format_count(len(group.runs), "run")
        held = f" (held by {len(group.times())} of {runs})" if group.times() else ""
        missed.append(names[group.values] + held)
    return f" {_listed(missed)} did not hold the target." if missed else ""


def _listed(names: Sequence[str]) -> str:
    """Join names, by semicolons where a name is itself a list of values."""
    return ("; " if any(", " in name for name in names) else ", ").join(names)


def _mean(values: Collection[float]) -> float:
    return math.fsum(values) / len(values)


MOST_CURVES = 8
_MOST_LISTED = 20
_NOTE = (
    "A row is a group of runs that agree in the first column. Figures are means over its runs, in brackets Student's "
    "95 % interval of the mean, which is symmetric and may pass 0; that of a time to the target begins no later than "
    "the evaluation before it, as the instant in between is unknown, and that of a lead is as wide at least. 'held': "
    "runs that reached the target loss and stayed there; a time is given only if all of a group did. Bytes are "
    "payload. Virtual time is the simulated clock's."
)
_FIRST = "first on each network and setting"
_DECISIONS = ("network and setting", "first", "to target, or final loss", "second", "lead", "certain")
_CAPTIONS = {
    "loss_against_time": "Loss of the judged model against virtual time; bands go from the lowest to the highest run.",
    "loss_against_steps": "The same against steps.",
    "loss_against_bytes": "The same against payload bytes that left a worker.",
}


class StudyReport(Report):
    """Report of several runs, in groups.

    Args:
        paths: of runs, sweeps, or folders of them.
        by: keys of the groups; without any, all that differ. The strategy is always one.
        where: `key=value` texts that runs must fit.

    Attributes:
        title: names of the runs.
        keys: of the groups.
        groups: those of one network and setting together, best first where they can be ordered.
        decisions: on each network and setting.
        winners: the groups that seeds support, one for each network and setting that has one.
        failures: (name, reason).

    Raises:
        InputError: there is no run, a file is damaged, or no run has a key.
    """

    pictures = OF_SEVERAL

    def __init__(
        self, paths: Sequence[str | Path], by: Sequence[str] = (), where: Sequence[str] = ()
    ) -> None:
        members: Sequence[Member] = members_of(find_runs(paths))
        if not members:
            names = ", ".join(map(visible, paths))
            raise InputError(f"{names}: no strategy has ended yet: netgym status shows the progress")
        members = selected(members, where)
        self.keys = list(dict.fromkeys([*by, "strategy"])) if by else default_keys(members)
        groups = group_runs(members, self.keys)
        self.members = [member for group in groups for member in group.members]
        self.title = ", ".join([*(Path(path).resolve().name for path in paths), *where])
        self.caption = (
            f"{visible(self.title, 200)}: means over runs, in brackets Student's 95 % interval of the mean, "
            "of times no narrower than the time between evaluations"
        )
        self.verdict, self.decisions = study_verdict(groups)
        self.winners = [each.first for each in self.decisions if each.is_certain and each.first]
        self.winner = self.winners[0].name if len(self.winners) == 1 else None
        self.groups = [group for contest in _contests(groups) for group in sorted(contest, key=_order)]
        rows = [
            (group in self.winners, [visible(cell) for cell in [*group.values, *group.cells()]])
            for group in self.groups
        ]
        self.table = ResultTable([*short_names(self.keys), *HEADINGS], rows, len(self.keys))
        are_retimed = any(member.run.folder.read_retimed() for member in self.members)
        self.methods = methods(_experiments(self.members), are_retimed=are_retimed)
        self.failures = [
            (f"{member.run.run} {member.run.point} {member.result.name}", member.result.error or "incomplete")
            for member in self.members
            if not member.result.ended
        ]
        self.failures += [failure for path in map(Path, paths) for failure in _never_begun(path)]

    def shown(self, most: int | None = None) -> Shown:
        """Groups as strategies, the first `most` of them, and the weather if it is the same for all."""
        settings = self.members[0].settings
        results = Results(settings, "", [group.as_result() for group in self.groups[:most]])
        keys = ("topology", "network_seed", "seed", "seeds")
        return Shown(results, weather_of(results)) if all(map(self._is_shared, keys)) else Shown(results)

    def few(self) -> Shown:
        """The first groups, and the weather if it is the same for all."""
        return self.shown(MOST_CURVES)

    def _is_shared(self, key: str) -> bool:
        """True if all runs have the same setting."""
        return len({_json(member.settings.get(key)) for member in self.members}) == 1

    def html(self, align: str = "time") -> str:
        """The page; curves are aligned by time, steps or bytes when it opens."""
        shown = self.shown()
        more = "" if len(self.groups) <= MOST_CURVES else f" Shown are the first {MOST_CURVES} groups."
        topology = shown.results.settings.get("topology") if self._is_shared("topology") else None
        keys = visible(", ".join(short_names(self.keys)), 200)
        # One cell names a group: its figures are next to it, on a telephone too.
        rows = [
            (group in self.winners, [visible(cell, 120) for cell in [group.name, *group.cells()]])
            for group in self.groups
        ]
        failures = [(visible(which, 80), [visible(why, 500)]) for which, why in self.failures]
        failed = [TextTable("What failed", ["which", "why"], failures)] if failures else []
        return render_page(
            Page(
                title=visible(self.title, 80),
                facts=[
                    ("runs", len({(member.run.run, member.run.point) for member in self.members})),
                    ("trainings", self.origins or sum(len(member.result.runs) for member in self.members)),
                    ("grouped by", keys),
                    *([("placement", "; ".join(lines))] if (lines := self.placements) else []),
                ],
                verdict=self.verdict,
                results=ResultTable([keys, *HEADINGS], rows).filled(),
                note=_NOTE,
                methods=self.methods,
                figures=[
                    Figure(_CAPTIONS[name] + more, picture, is_curve=True)
                    for name, picture in draw_pictures(self.few(), self.pictures).items()
                ],
                curves=interactive_curves(shown.results, shown.weather, align),
                tables=failed,
                network=NetworkSection.of(topology),
                experiments=self._listings(),
            )
        )

    @property
    def firsts(self) -> ResultTable:
        """Table of the decisions; without rows where there is one."""
        rows = [(each.is_certain, [visible(each.name, 120), *each.cells()]) for each in self.decisions]
        return ResultTable(_DECISIONS, rows if len(rows) > 1 else [])

    def _texts(self) -> dict[str, str]:
        files = super()._texts()
        if self.firsts.rows:
            files["first.tex"] = self.firsts.latex(f"{visible(self.title, 200)}: {_FIRST}", "tab:first")
        return files

    @property
    def origins(self) -> str | None:
        """Line on runs that were retimed or trained again, of those that have them."""
        runs = {each.run.folder.path: (each.run.folder, each.results) for each in self.members}
        return origins(runs.values())

    @property
    def placements(self) -> list[str]:
        """Hosts of workers, a line for each of the first networks."""
        lines = placements(member.results for member in self.members)
        more = (
            [f"and {format_count(len(lines) - _MOST_LISTED, 'more network')}"]
            if len(lines) > _MOST_LISTED
            else []
        )
        return lines[:_MOST_LISTED] + more

    def _listings(self) -> list[Listing]:
        """Experiment of each run, and the environment of the first: points of a sweep share theirs."""
        found = {member.run.run: member.run for member in self.members}
        listings = []
        for name, run in list(found.items())[:_MOST_LISTED]:
            text = read_bytes(run.place / "experiment.yaml").decode()
            listings.append(Listing(visible(f"{name}: experiment.yaml", 100), text))
        first = self.members[0].run
        environment = environment_of(first.folder)
        return listings + [
            Listing(visible(f"{first.run}: {each.name}", 100), each.text) for each in environment
        ]


def _order(group: Group) -> tuple[int, float]:
    """Sort key: groups that held the target by its time, then others by loss, then those without runs."""
    times, losses = group.times(), group.losses()
    if times and len(times) == len(group.runs):
        return 0, _mean(times.values())
    return (1, _mean(losses.values())) if losses and not group.num_diverged else (2, 0.0)


def _never_begun(path: Path) -> Iterator[tuple[str, str]]:
    """Name and error of each point of a sweep that could not even be begun."""
    entries = RunFolder(path).read_summary() if (path / POINTS).is_dir() else []
    points = [entry.get("point") or {} for entry in entries]
    keys = dict.fromkeys(key for point in points for key in point)
    texts = {key: value_texts(point[key] for point in points if key in point) for key in keys}
    for entry, point in zip(entries, points, strict=True):
        if entry.get("failed") and not entry.get("strategies"):
            yield f"{path.resolve().name} {entry['name']} {point_text(point, texts)}", str(entry.get("error"))
