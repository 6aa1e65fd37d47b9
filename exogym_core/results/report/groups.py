"""Runs of a study put into groups by any key, and what each group came to over its seeds."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from exogym_core.results.bootstrap import bootstrap_interval, paired_interval
from exogym_core.results.report.results import Results, StrategyResult
from exogym_core.results.tidy import value_text
from netsim.files.errors import InputError
from netsim.files.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from exogym_core.results.report.results import SeedResult
    from exogym_core.results.tidy import FoundRun

__all__ = ["Group", "Member", "default_keys", "group_runs", "members_of", "study_verdict"]

_MISSING = "-"
_SEEDS = ("seed", "seeds")  # what replicates differ in
# What strategies are compared on. Under another of these, times and losses are of another question.
_CONDITIONS = (
    *(
        "task",
        "model",
        "topology",
        "placement",
        "protocol",
        "collectives",
        "workers.count",
        "compute",
        "steps",
    ),
    *("batch_size", "until", "failures", "network_seed", "target_loss", "evaluate"),
)


@dataclass(frozen=True)
class Member:
    """One strategy of one run.

    Attributes:
        run: whose.
        settings: the run's resolved experiment.
        result: the strategy's.
    """

    run: FoundRun
    settings: Mapping[str, Any]
    result: StrategyResult

    def value(self, key: str) -> str:
        """What `key` is for it: `run`, `point`, `strategy`, a key of the sweep, or a path into the experiment."""
        if key == "strategy":
            return self.result.name
        if key in ("run", "point"):
            return str(getattr(self.run, key)) or _MISSING
        if key in self.run.values:
            return value_text(self.run.values[key])
        found = self.setting(key)
        return _MISSING if found is None else value_text(found)

    def setting(self, key: str) -> Any:
        """Value of the run's resolved experiment under the path `key`; None where it has nothing."""
        found: Any = self.settings
        for step in key.split("."):
            if isinstance(found, list):
                wanted = self.result.name if step == "*" else step
                names = [
                    entry.get("label") or entry.get("name") for entry in found if isinstance(entry, dict)
                ]
                found = found[names.index(wanted)] if wanted in names else None
            else:
                found = found.get(step) if isinstance(found, dict) else None
        return found


@dataclass(frozen=True)
class Group:
    """Members that agree in every key.

    Attributes:
        keys: what they agree in.
        values: one a key.
        members: those in it.
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
        """Those that came to their end, of all members."""
        return [run for member in self.members for run in member.result.runs if run.complete]

    @property
    def failed(self) -> int:
        """How many members did not end."""
        return sum(not member.result.ended for member in self.members)

    @property
    def is_charged(self) -> bool:
        """Whether all pay for what they encode, where that costs time."""
        return all(member.result.coding is None for member in self.members)

    def losses(self) -> dict[int, float]:
        """Final losses by seed."""
        return self._figures("final_loss")

    def times(self) -> dict[int, float]:
        """Virtual seconds to the target by seed, of the runs that held it."""
        return self._figures("virtual_seconds_to_target")

    def _figures(self, name: str) -> dict[int, float]:
        return {
            run.seed: value
            for run in self.runs
            if (value := getattr(run, name)) is not None
            if name == "final_loss" or run.target == "held"
        }

    def as_result(self) -> StrategyResult:
        """All runs as those of one strategy, for a picture."""
        first = self.members[0].result
        return replace(first, name=self.name, runs=self.runs, incomplete=bool(self.failed))

    def cells(self) -> list[str]:
        """Its row in the table, after its values."""
        losses, times = list(self.losses().values()), list(self.times().values())
        count = len(self.runs)
        wan = [run.wan_bytes for run in self.runs if run.wan_bytes is not None]
        sent = [run.bytes_sent_per_worker for run in self.runs if run.bytes_sent_per_worker is not None]
        has_target = any(run.target is not None for run in self.runs)
        return [
            _told(times, format_seconds) if len(times) == count else _MISSING,
            f"{len(times)} of {count}" if has_target else _MISSING,
            _told(losses, lambda value: f"{value:.4g}"),
            f"{count}" + (f" ({self.failed} failed)" if self.failed else ""),
            format_bytes(sum(sent) / len(sent)) if sent else _MISSING,
            format_bytes(sum(wan) / len(wan)) if wan else _MISSING,
        ]


HEADINGS = ("to target", "held", "final loss", "runs", "sent by a worker", "between regions")
"""Of `Group.cells`."""


def _told(values: Sequence[float], write: Any) -> str:
    """Mean and interval."""
    if not values:
        return _MISSING
    interval = bootstrap_interval(values)
    mean = write(math.fsum(values) / len(values))
    return mean if interval is None else f"{mean} [{write(interval[0])}, {write(interval[1])}]"


def members_of(runs: Iterable[FoundRun]) -> list[Member]:
    """Every strategy of every run.

    Raises:
        InputError: a run's file is damaged.
    """
    members = []
    for run in runs:
        results = Results.load(run.folder)
        members += [Member(run, results.settings, result) for result in results.strategies]
    return members


def default_keys(members: Sequence[Member]) -> list[str]:
    """Keys that differ, seeds left aside: the run, where there are several; keys of a sweep; the strategy."""
    swept = dict.fromkeys(key for member in members for key in member.run.values if key not in _SEEDS)
    keys = ["run"] if len({member.run.run for member in members}) > 1 else []
    return [*keys, *(key for key in swept if len({member.value(key) for member in members}) > 1), "strategy"]


def group_runs(members: Sequence[Member], keys: Sequence[str], where: Sequence[str] = ()) -> list[Group]:
    """Members in groups, in the order of their first ones.

    Args:
        members: those to be grouped.
        keys: what members of a group agree in.
        where: `key=value` texts; who has another value is left out.

    Raises:
        InputError: no member has one of the keys, none is left, or a group holds runs that differ in more than seeds.
    """
    for text in where:
        key, separator, value = text.partition("=")
        if not separator:
            raise InputError(f"--where {text}: expected KEY=VALUE, such as topology=lan")
        known = list(dict.fromkeys(member.value(key) for member in members))
        members = [member for member in members if member.value(key) == value]
        if not members:
            raise InputError(f"--where {text}: no run has it: {key} is {', '.join(known[:12])}")
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
    """Raise InputError where runs of a group are no replicates: losses, above all, do not depend on the network."""
    swept = [key for member in group.members for key in member.run.values if key not in _SEEDS]
    options = [
        f"strategies.*.{name}" for member in group.members for name in member.setting("strategies.*") or {}
    ]
    for key in dict.fromkeys([*swept, *_CONDITIONS, *options]):
        told = list(dict.fromkeys(_json(member.setting(key)) for member in group.members))
        if len(told) > 1 and key not in group.keys:
            values = list(dict.fromkeys(member.value(key) for member in group.members))
            raise InputError(
                f"--group-by {','.join(group.keys)}: {group.name} holds runs that differ in {key} "
                f"({', '.join(values[:4])}), and only seeds are replicates: add --group-by {key}, or --where "
                f"{key}={values[0]}"
            )
    seeds = [run.seed for run in group.runs]
    if twice := [seed for seed in seeds if seeds.count(seed) > 1]:
        names = ", ".join(
            dict.fromkeys(f"{member.run.run} {member.run.point}".strip() for member in group.members)
        )
        raise InputError(
            f"--group-by {','.join(group.keys)}: {group.name} holds seed {twice[0]} more than once (in {names}), which "
            "is no further evidence: add --group-by run, or leave one out"
        )


def _json(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=str)


def study_verdict(groups: Sequence[Group]) -> tuple[str, list[Group]]:
    """Verdict that the seeds support: a sentence for each network and setting, and the groups that come first."""
    contests: dict[str, list[Group]] = {}
    for group in groups:
        conditions = {key: group.members[0].setting(key) for key in _CONDITIONS}
        contests.setdefault(_json(conditions), []).append(group)
    decided = [_decided(contest) for contest in contests.values()]
    winners = [winner for _, winner in decided if winner is not None]
    uncharged = [group.name for group in groups if not group.is_charged]
    tail = f" Coding is not charged to {', '.join(uncharged)}." if uncharged else ""
    if len(decided) == 1:
        return decided[0][0] + tail, winners
    names = _told_apart([contest[0] for contest in contests.values()])
    text = " ".join(f"{name}: {text}" for name, (text, _) in zip(names, decided, strict=True))
    if len(winners) > 1 and len({winner.members[0].result.name for winner in winners}) > 1:
        text += " No strategy is first under all of these."
    return text + tail, winners


def _told_apart(groups: Sequence[Group]) -> list[str]:
    """The conditions of each group that are not those of all."""
    members = [group.members[0] for group in groups]
    keys = [key for key in _CONDITIONS if len({_json(member.setting(key)) for member in members}) > 1]
    return [", ".join(f"{key} {member.value(key)}" for key in keys) for member in members]


def _decided(groups: Sequence[Group]) -> tuple[str, Group | None]:
    """The first of groups that met the same conditions, if seeds support that.

    Groups that held the target with all their runs are ordered by its time; if there are none, by final loss. The
    first is named only if its difference to the second, seed by seed, has an interval on one side of zero.
    """
    ended = [group for group in groups if group.runs and not group.failed]
    holders = [group for group in ended if len(group.times()) == len(group.runs)]
    figures = {group.values: group.times() if holders else group.losses() for group in ended}
    ordered = sorted(
        holders or [group for group in ended if group.losses()], key=lambda g: _mean(figures[g.values])
    )
    what = "to the target" if holders else "final loss"
    if not ordered:
        return "No group has come to its end.", None
    first, missed = ordered[0], _missed(ended, holders)
    best = _mean(figures[first.values])
    shown = format_seconds(best) if holders else f"{best:.4g}"
    if len(ordered) == 1:
        if missed:
            return f"{first.name} comes first ({shown} {what}), alone.{missed}", first
        return f"{first.name}: {shown} {what}; nothing to compare it with.", first if holders else None
    second = ordered[1]
    seeds = sorted(figures[first.values].keys() & figures[second.values].keys())
    interval = paired_interval(
        [figures[second.values][seed] for seed in seeds], [figures[first.values][seed] for seed in seeds]
    )
    lead = f"{first.name} comes first ({shown} {what}), then {second.name}"
    if interval is None:
        return f"{lead}; with one seed in common nothing is known of how much seeds differ.{missed}", None
    write = format_seconds if holders else (lambda value: f"{value:.4g}")
    told = f"the difference is {_signed(interval[0], write)} to {_signed(interval[1], write)}"
    pairs = f"95 % interval over {len(seeds)} seeds in common"
    if interval[0] > 0:
        return f"{lead}; {told} ({pairs}).{missed}", first
    return f"{lead}, but seeds do not tell them apart: {told} ({pairs}).{missed}", None


def _missed(ended: Sequence[Group], holders: Sequence[Group]) -> str:
    """Groups that did not hold the target, where others did, or where nobody did."""
    if not any(run.target is not None for group in ended for run in group.runs):
        return ""
    told = []
    for group in ended:
        held = len(group.times())
        if group not in holders:
            told.append(group.name + (f" (held by {held} of {len(group.runs)} runs)" if held else ""))
    if not holders:
        return " No group held the target."
    return f" {', '.join(told)} did not hold the target." if told else ""


def _signed(value: float, write: Any) -> str:
    return f"-{write(-value)}" if value < 0 else str(write(value))


def _mean(values: Mapping[Any, float]) -> float:
    return math.fsum(values.values()) / len(values)
