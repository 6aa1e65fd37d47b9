"""Advice as lines for terminals."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from exogym_core.results.report.table import short_count
from netgym.planning.advise import BY_BOUND, SEARCHED, is_as_soon, variant_of
from netgym.planning.page import MODEL_SIZE, OWN_BACKENDS, algorithm_text, placement_text
from netsim.units import format_count, format_seconds

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from netgym.planning.advise import Advice

__all__ = ["advice_lines", "best_so_far"]

_MOST_SITES = 12  # whose ring is listed where no order is faster
_FEW = 10  # below, dollars and hours have two decimal places


def advice_lines(advice: Mapping[str, Any]) -> Iterator[str]:
    """Ranking, ring over the sites, and unknowns.

    Of rows that differ only in searched options, show the first, or an equally fast one with smaller options.
    """
    variants: dict[str, dict[str, Any]] = {}
    for row in advice["ranked"]:
        first = variants.setdefault(repr(variant_of(row)), row)
        is_like_it = row["streams"] == first["streams"] and is_as_soon(row, first)
        if is_like_it and _searched(row) < _searched(first):
            variants[repr(variant_of(row))] = row
    names = [_name(row) for row in variants.values()]
    others = len(advice["ranked"]) - len(variants)
    of_money = advice["budget"].get("dollars")
    if of_money is not None:
        yield f"for {of_money:,.0f} dollars:"
    if not advice["ranked"]:
        yield from advice["explained"]
    for name, row in zip(names, variants.values(), strict=True):
        mark = "*" if row["pareto"] else " "
        place = 1 + sum(other["place"] < row["place"] for other in variants.values())
        yield f"{place:>3} {mark} {name:<{max(map(len, names))}} {_figures(row)}"
    if others:
        searched = dict.fromkeys(name for options in SEARCHED.values() for name in options)
        yield (
            f"{others} more rows differ from these in {', '.join([*searched, 'streams'])} or algorithm alone, and are "
            "no sooner; --json has them"
        )
    if advice["dominated"]:
        yield f"{len(advice['dominated'])} more rows are slower and more expensive than one of these; --json has them"
    left = advice["not_simulated"]
    if apart := [row for row in left if not row["reason"].startswith(BY_BOUND)]:
        by_reason: dict[str, list[str]] = {}
        for row in apart:
            by_reason.setdefault(row["reason"], []).append(_options(row))
        yield "not simulated: " + "; ".join(
            f"{reason}: {', '.join(names)}" for reason, names in by_reason.items()
        )
    if later := [row for row in left if row not in apart]:
        yield (
            "not simulated, as computing and bytes alone take longer than one of these, the days at the least: "
            + "; ".join(f"{_options(row)} {row['days_at_least']:.3g}" for row in later)
        )
    yield f"protocol {advice['protocol']}, but for rows that name their streams"
    yield f"workers: {placement_text(advice['placement'])}"
    used: dict[str, set[str]] = {}
    for row in advice["ranked"]:
        for op, algorithms in row["collectives"].items():
            used.setdefault(op, set()).update(algorithms)
    if used:
        ops = (f"{op} {', '.join(sorted(algorithms))}" for op, algorithms in sorted(used.items()))
        yield f"collectives: {'; '.join(ops)}"
    ring = advice["ring"]
    if ring is not None and len(ring["sites"]) > 1:
        sites, best, natural = ring["sites"], ring["seconds"], ring["natural_seconds"]
        is_listed = len(sites) <= _MOST_SITES or best < natural
        order = " - ".join(sites) if is_listed else "the natural order"
        use = (
            "; a ring follows the ranks: give their hosts in this order as placement"
            if best < natural
            else ""
        )
        yield f"a ring over one host a site: {order}, {'exact' if ring['exact'] else 'heuristic'}{use}"
        yield (
            f"  {format_seconds(best)} an all-reduce in fp32, {format_seconds(natural)} in natural order; no "
            f"algorithm is below {format_seconds(ring['bound_seconds'])}"
        )
    if advice["ranked"]:
        yield from advice["explained"]
    if advice["protocol"].startswith("linux-tcp"):
        yield OWN_BACKENDS
    if of_money is not None:
        yield MODEL_SIZE
    yield "*: nothing else is surely both sooner and cheaper; rows of one place are equal. Not known:"
    for line in advice["unknown"]:
        yield f"  {line}"


def _searched(row: Mapping[str, Any]) -> tuple[int, ...]:
    return tuple(row["options"].get(name, 0) for name in SEARCHED.get(row["strategy"], {}))


def best_so_far(advice: Advice) -> str:
    """Best row of a running search, with its days; empty before the first."""
    best = advice.best()
    if best is None:
        return ""
    worth = f", {_worth(best)}" if "worth" in best else ""
    return f"; best so far: {_name(best)}, {_days(best)}{worth}"


def _name(row: Mapping[str, Any]) -> str:
    return _options(row) + (" (does not fit)" if row["fits"] is False else "")


def _options(row: Mapping[str, Any]) -> str:
    options = ", ".join(f"{key}={value}" for key, value in row["options"].items())
    streams = f", {format_count(row['streams'], 'stream')}" if row["streams"] else ""
    algorithm = "" if row["algorithm"] == "auto" else f", {algorithm_text(row['algorithm'])}"
    left_out = f", without {row['left_out']}" if row["left_out"] else ""
    stages = ""
    if row["stages"]:
        stages = ", {count} stages of {microbatches} micro-batches under {schedule}".format(**row["stages"])
        stages += f" in {row['stages']['codec']}" if row["stages"]["codec"] else ""
    return f"{row['strategy']}({options}){stages}{streams}{algorithm}{left_out}"


def _figures(row: Mapping[str, Any]) -> str:
    money = f"{_share(row, row['worker_hours'])} worker hours"
    egress = row["cost_by"].get("egress")
    if row["cost"] is not None:
        money = f"{_share(row, row['cost'])} dollars"
        if row["cost_by"].get("workers") is None:
            money += " (traffic alone)"
        elif egress:
            money += f" ({_share(row, egress)} of it for traffic)"
    if "worth" in row:
        tokens, a_parameter = short_count(row["tokens"]), row["tokens_per_parameter"]
        money = f"{tokens} tokens ({a_parameter:.3g} a parameter), worth {_worth(row)}"
    return f"{_days(row):>22}  {row['compute_utilisation']:>6.1%} computing  {money:>18}"


def _band(low: float | None, high: float | None, text: Callable[[float], str]) -> str:
    first, last = ("?" if end is None else text(end) for end in (low, high))
    return first if first == last else f"{first} to {last}"


def _worth(row: Mapping[str, Any]) -> str:
    """Band of the tokens with which data-parallel reaches the same loss."""
    return f"{_band(row['worth_low'], row['worth_high'], short_count)} of data-parallel's"


def _days(row: Mapping[str, Any]) -> str:
    """A band of days, or of hours and less where it is short."""
    low, high = row["days_low"], row["days_high"]
    if row["days"] >= 1:
        return f"{_band(low, high, '{:,.1f}'.format)} days"
    return _band(low, high, lambda days: format_seconds(days * 86_400))


def _share(row: Mapping[str, Any], amount: float) -> str:
    """Band of an amount that grows with the days."""
    high = None if row["days_high"] is None else amount * (row["days_high"] / row["days"])
    low = amount * (row["days_low"] / row["days"])
    return _band(low, high, "{:,.0f}".format if amount >= _FEW else "{:,.2f}".format)
