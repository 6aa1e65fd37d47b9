"""`check_schedule`: a collective algorithm held to the laws on drawn networks, and compared with the shipped ones."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from netsim.collectives.collective import lower_bound_seconds, resolve_request
from netsim.collectives.estimate import Estimator
from netsim.collectives.operations import OPERATIONS
from netsim.collectives.schedules.algorithms import ALGORITHMS, algorithm_names, make_schedule
from netsim.collectives.schedules.schedule import Problem
from netsim.errors import InputError, NetsimError
from netsim.testing.laws import as_algorithm, label_of
from netsim.transfers import network_and_protocol
from netsim.units import format_bytes, format_count, format_seconds

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import Any

    from netsim.testing.laws import Build, Case
    from netsim.topology.topology import Topology

__all__ = ["ScheduleReport", "ScheduleTimes", "check_schedule", "compare_schedules"]

NETWORKS = ("lan", "two-datacenters", "wan-4-regions", "home-broadband")
SIZES = ("10 kB", "1 MB", "100 MB")


@dataclass(frozen=True)
class ScheduleTimes:
    """Seconds of algorithms of one operation; printed as a table.

    Attributes:
        operation: such as "all_reduce".
        rows: network, bytes, lower bound of any algorithm, and seconds by algorithm, the compared one first.
    """

    operation: str
    rows: list[tuple[str, int, float, dict[str, float]]]

    def __str__(self) -> str:
        table = [["network", "size", *self.rows[0][3], "bound"]]
        for network, size, bound, seconds in self.rows:
            times = [format_seconds(each) for each in (*seconds.values(), bound)]
            table.append([network, format_bytes(size), *times])
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        return "\n".join(
            "  ".join(
                text.ljust(width) if place == 0 else text.rjust(width)
                for place, (text, width) in enumerate(zip(row, widths, strict=True))
            ).rstrip()
            for row in table
        )


@dataclass(frozen=True)
class ScheduleReport:
    """An algorithm that keeps all laws; printed as a line and its comparison.

    Attributes:
        build: the algorithm.
        operation: such as "all_reduce".
        num_cases: number of calls that were played.
    """

    build: Build
    operation: str
    num_cases: int

    def compare(self, **options: Any) -> ScheduleTimes:
        """Time it beside the shipped algorithms; `options` are those of `compare_schedules`."""
        return compare_schedules(self.build, self.operation, **options)

    def __str__(self) -> str:
        cases = format_count(self.num_cases, "case")
        return f"{self.operation} by {label_of(self.build)}: {cases} passed\n{self.compare()}"


def check_schedule(
    build: Build,
    operation: str,
    *,
    cases: int | None = None,
    seed: int | None = None,
    max_ranks: int = 9,
    on_case: Callable[[], object] = lambda: None,
) -> ScheduleReport:
    """Play an algorithm on drawn networks, sizes, roots, groups and protocols, and hold each call to the laws.

    The laws are those of `Case.check`. A failing case is made as small as possible.

    Args:
        build: the algorithm: a function of a `Problem` that returns phases or a `Schedule`, or an `Algorithm`.
        operation: such as "all_reduce".
        cases: number of calls; None: `max_examples` of hypothesis's profile.
        seed: of the draws; None: as hypothesis's profile says.
        max_ranks: largest number of ranks.
        on_case: called before each case; more often where a failing one is made smaller.

    Raises:
        LawError: the algorithm breaks a law; its text ends with a program that shows it.
        InputError: the operation does not exist, or hypothesis is not installed.
    """
    __tracebackhide__ = True
    algorithm_names(operation)  # raises for an unknown operation
    try:
        inspect.signature(as_algorithm(build).build).bind(None)
    except (TypeError, ValueError) as error:
        raise InputError(
            f"check_schedule: {label_of(build)}: cannot be called with one argument, a Problem ({error})"
        ) from None
    from netsim.testing.worlds import cases as draw_cases
    from netsim.testing.worlds import hold_for_all

    num_cases = 0

    def play(case: Case) -> None:
        nonlocal num_cases
        num_cases += 1
        on_case()
        case.check(build)

    hold_for_all(draw_cases(operation, max_ranks=max_ranks), play, cases, seed)
    return ScheduleReport(build, operation, num_cases)


def compare_schedules(
    build: Build,
    operation: str,
    *,
    networks: Sequence[Topology | str | Mapping[str, Any]] = NETWORKS,
    sizes: Sequence[int | str] = SIZES,
    protocol: str | Mapping[str, Any] | None = None,
) -> ScheduleTimes:
    """Time an algorithm beside each shipped one, among all hosts of some networks.

    Args:
        build: the algorithm.
        operation: such as "all_reduce".
        networks: topologies, names of shipped ones, files, or mappings.
        sizes: as `num_bytes` of `netsim.collective`.
        protocol: how transfers use links; None: each topology's, else `linux-tcp`.
    """
    own = as_algorithm(build)
    name = label_of(build)
    names = {row: key for key, row in reversed(ALGORITHMS[operation].items()) if row != own}
    name += " (yours)" * (name in names.values())
    algorithms = {name: own} | {key: row for row, key in reversed(names.items())}
    rows = []
    for network in networks:
        net, parsed = network_and_protocol(network, protocol)
        estimator = Estimator(net, parsed)
        for size in sizes if OPERATIONS[operation].has_size else (0,):
            hosts, num_bytes, root = resolve_request(net, operation, size, None, 0)
            regions = tuple(map(net.region_of, hosts))
            total = num_bytes * (len(hosts) if OPERATIONS[operation].is_per_pair else 1)
            problem = Problem(operation, "own", len(hosts), total, root, 1, None, ())
            seconds = {}
            for key, row in algorithms.items():
                of = replace(problem, algorithm=key, regions=regions if row.needs_regions else ())
                try:
                    made = make_schedule(of, row)
                except (Exception, SystemExit) as error:  # among more members than any case has
                    if isinstance(error, NetsimError):
                        raise
                    what = f"{type(error).__name__}: {error}"
                    raise InputError(f"{operation} by {key} among {len(hosts)} members: {what}") from error
                seconds[key] = estimator.timing(made, hosts, repeat=1, pause_seconds=0.0, recorder=None)[
                    0
                ].seconds[-1]
            rows.append((net.name, num_bytes, lower_bound_seconds(made, hosts, net), seconds))
    return ScheduleTimes(operation, rows)
