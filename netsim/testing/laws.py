"""A call of a collective on a network, checked by the laws of collectives, and printed as a program."""

from __future__ import annotations

import inspect
import sys
import traceback
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import yaml

from netsim.collectives.collective import lower_bound_seconds
from netsim.collectives.operations import OPERATIONS
from netsim.collectives.schedules.algorithms import ALGORITHMS, Algorithm, make_schedule
from netsim.collectives.schedules.check import check_bytes, check_result, messages
from netsim.collectives.schedules.schedule import Phase, Problem, Schedule
from netsim.collectives.start import link_bytes, time_collective
from netsim.errors import InputError, NetsimError
from netsim.topology.protocol import Protocol
from netsim.topology.topology import Topology
from netsim.units import format_seconds

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

__all__ = [
    "Build",
    "CallShape",
    "Case",
    "LawError",
    "TopologyMapping",
    "as_algorithm",
    "compact_yaml",
    "label_of",
    "place_of",
]

Build: TypeAlias = "Algorithm | Callable[[Problem], Schedule | tuple[Phase, ...]]"
"""Algorithm of a collective: a function of a `Problem`, or an `Algorithm`, which says whether it needs regions."""

_MOST_LINES = 15  # of a program
_MOST_COLUMNS = 100  # of a line of YAML
_ROUNDING = 1e-9


class LawError(NetsimError, AssertionError):
    """A law is broken; the first line says which.

    Args:
        problem: the law that is broken, in a line.
        program: Python that raises this error again, or a function that writes it.
        case: for which.
    """

    def __init__(self, problem: str, program: str | Callable[[], str], case: object = None) -> None:
        super().__init__(problem, program, case)
        self.problem, self._program, self.case = problem, program, case

    @property
    def program(self) -> str:
        """Python that raises this error again."""
        return self._program if isinstance(self._program, str) else self._program()

    def __str__(self) -> str:
        return f"{self.problem}\n\n{self.program}"


class TopologyMapping(dict[str, Any]):
    """Topology as `Topology.from_mapping` takes it; printed as the YAML of its file."""

    def __repr__(self) -> str:
        return f"\n{compact_yaml(self)}"

    def _repr_pretty_(self, printer: Any, is_cycle: bool) -> None:
        """Print it in hypothesis's reports."""
        printer.text(repr(self))


def compact_yaml(mapping: Mapping[str, Any], most_lines: int = sys.maxsize) -> str:
    """Write a mapping as YAML with a line for each key, or for each entry of a key whose line would be long.

    Args:
        mapping: plain data.
        most_lines: of the text; keys are not split where it would have more.

    >>> print(compact_yaml({"regions": {"a": {"hosts": 2, "nic": "1 Gbit/s"}}, "protocol": "gloo"}), end="")
    regions: {a: {hosts: 2, nic: 1 Gbit/s}}
    protocol: gloo
    """
    flat, split = list[str](), list[str]()
    for key, value in mapping.items():
        line = f"{key}: {_flow(value)}"
        flat.append(line)
        if len(line) <= _MOST_COLUMNS or not isinstance(value, list | dict):
            split.append(line)
        elif isinstance(value, dict):
            split += [f"{key}:", *(f"  {name}: {_flow(entry)}" for name, entry in value.items())]
        else:
            split += [f"{key}:", *(f"  - {_flow(entry)}" for entry in value)]
    lines = split if len(split) <= most_lines else flat
    return "\n".join(lines if len(lines) <= most_lines else [_flow(dict(mapping))]) + "\n"


def _flow(value: Any) -> str:
    text = yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=sys.maxsize)
    return text.removesuffix("...\n").rstrip("\n")


@dataclass(frozen=True)
class CallShape:
    """A call of a collective.

    Attributes:
        operation: such as "all_reduce".
        group: ranks that take part, in the order of its members.
        elements: of the whole layout, in equal parts; or of each part: one a member, or of all_to_all one from each
            member to each, row by row.
        element_bytes: size of an element.
        root: position of the root in the group, where the operation has one.
    """

    operation: str
    group: tuple[int, ...]
    elements: int | tuple[int, ...] = 0
    element_bytes: int = 4
    root: int = 0

    def __repr__(self) -> str:
        num = len(self.group)
        group = f"tuple(range({num}))" if self.group == tuple(range(num)) else repr(self.group)
        others = [
            f", {each.name}={getattr(self, each.name)!r}"
            for each in fields(self)[2:]
            if getattr(self, each.name) != each.default
        ]
        return f"CallShape({self.operation!r}, {group}{''.join(others)})"

    @property
    def num_bytes(self) -> int:
        """Bytes of the layout."""
        elements = self.elements if isinstance(self.elements, int) else sum(self.elements)
        return elements * self.element_bytes

    @property
    def parts(self) -> list[int]:
        """Elements of each part of the layout: one part for a whole tensor, one a member, or one a pair of members."""
        sizes: list[int] = (np.diff(self.problem().layout) // self.element_bytes).tolist()
        return sizes

    def problem(self, algorithm: str = "", regions: Sequence[str] = ()) -> Problem:
        """Input of an algorithm.

        Args:
            algorithm: its name.
            regions: region of each member, where the algorithm needs them.
        """
        size, parts = self.element_bytes, None
        if not isinstance(self.elements, int):
            parts = tuple(size * part for part in self.elements)
        num = len(self.group)
        return Problem(self.operation, algorithm, num, self.num_bytes, self.root, size, parts, tuple(regions))


@dataclass(frozen=True)
class Case:
    """A call of a collective on a network.

    Attributes:
        call: the call.
        topology: the network, its protocol and its weather, as `Topology.from_mapping` takes them.
        placement: host of each rank; None: ranks are spread evenly.
    """

    call: CallShape
    topology: Mapping[str, Any]
    placement: tuple[str, ...] | None = None

    def check(self, build: Build) -> Schedule:
        """Play the call on arrays and on the network; return its schedule.

        Args:
            build: the algorithm.

        Raises:
            LawError: the result is not the operation's, bytes are missing, unused or wrongly counted, a pair has two
                messages in a step, the schedule depends on names of regions or changes from call to call, it ends
                before any algorithm could or never; or the algorithm fails.
        """
        __tracebackhide__ = True
        try:
            return self._check(as_algorithm(build))
        except (Exception, SystemExit) as error:  # an algorithm that ends Python fails too
            what, cause = str(error).partition("\n")[0], None
            if not isinstance(error, NetsimError):
                cause = error
                frames = traceback.extract_tb(error.__traceback__)
                code = getattr(as_algorithm(build).build, "__code__", None)
                at = [each for each in frames if code and each.filename == code.co_filename] or frames
                what = f"{type(error).__name__} at {Path(at[-1].filename).name}:{at[-1].lineno}: {what}"
            problem = f"{self.call.operation} by {label_of(build)}: {what}"
            raise LawError(problem, partial(self.program, build, problem), self) from cause

    def _check(self, algorithm: Algorithm) -> Schedule:
        net = Topology.from_mapping(self.topology)
        num_ranks = max(self.call.group) + 1
        placed = net.place(num_ranks if self.placement is None else len(self.placement), self.placement)
        hosts = [placed[rank] for rank in self.call.group]
        regions = [net.region_of(host) for host in hosts] if algorithm.needs_regions else []
        made = make_schedule(self.call.problem("own", regions), algorithm)
        sent = [message for message, has_arrived in messages(made) if not has_arrived]
        check_bytes(made)
        check_result(made, is_strict=not algorithm.is_wasteful)
        names = sorted(set(regions))
        renamed = dict(zip(names, reversed(names), strict=True))
        other = make_schedule(self.call.problem("own", [renamed[name] for name in regions]), algorithm)
        if [message for message, has_arrived in messages(other) if not has_arrived] != sent:
            why = "regions have other names: order them by their members" if len(names) > 1 else "built again"
            raise InputError(f"it has other messages when {why}")
        counted = [0] * made.num_ranks
        for message in sent:
            counted[message.src] += (message.high - message.low) * made.element_bytes
        if OPERATIONS[made.op].has_size and made.sent_bytes.tolist() != counted:
            raise InputError(
                f"`sent_bytes` of its phases is {made.sent_bytes.tolist()}, its messages are {counted}"
            )
        protocol = Protocol.resolve(net.protocol)
        timing = time_collective(net, protocol, made, hosts)
        carried = link_bytes(made, hosts, net, protocol)
        if not (net.weather or np.allclose(timing.link_bytes, carried, rtol=_ROUNDING, atol=0.5)):
            named = net.bytes_by_name(timing.link_bytes), net.bytes_by_name(carried)
            raise InputError(f"links carry {named[0]}, and `pair_bytes` of its phases are {named[1]}")
        seconds = timing.seconds[-1]
        bound = lower_bound_seconds(made, hosts, net)
        if seconds < bound * (1 - _ROUNDING):
            raise InputError(
                f"it takes {format_seconds(seconds)}, and no algorithm less than {format_seconds(bound)}"
            )
        return made

    def program(self, build: Build, problem: str = "") -> str:
        """A program of at most 15 lines that checks this case alone.

        Args:
            build: the algorithm; imported from its module.
            problem: what the check finds.
        """
        module, name = _name_of(build)
        found = f"from {module} import {name.partition('[')[0]}"
        if "<" in name:
            found, name = f"build = ...  # {name} of {module}", "build"
        before = [
            "import yaml",
            found,
            "from netsim.testing import Case, CallShape",
            'topology = yaml.safe_load("""',
        ]
        placement = "" if self.placement is None else f", {self.placement!r}"
        after = ['""")', f"call = {self.call!r}", f"Case(call, topology{placement}).check({name})"]
        about = [f"# {problem}"] if problem else []
        room = _MOST_LINES - len(before) - len(after) - len(about)
        lines = [*about, *before, *compact_yaml(self.topology, room).splitlines(), *after]
        return "\n".join(lines) + "\n"


def as_algorithm(build: Build) -> Algorithm:
    """Row of `ALGORITHMS` for a function, which needs no regions; a row as it is."""
    if isinstance(build, Algorithm):
        return build
    return Algorithm(build, needs_regions=False, num_messages=lambda num_ranks: num_ranks)


def label_of(build: Build) -> str:
    """Name of an algorithm in messages: of the table's, the key."""
    return _name_of(build)[1].removesuffix('"]').rpartition('"')[2]


def place_of(value: object, function: object) -> tuple[str, str]:
    """Module of a function in which a value has a name, and that name; twice "" where it has none."""
    module = inspect.getmodule(function)
    for name, found in vars(module).items() if module is not None else ():
        if module is not None and found is value:
            is_script = module.__name__ == "__main__"
            return Path(module.__file__ or "").stem if is_script else module.__name__, name
    return "", ""


def _name_of(build: Build) -> tuple[str, str]:
    """Module of an algorithm, and its name there."""
    function: Any = build.build if isinstance(build, Algorithm) else build
    place = place_of(build, function)
    if place[0]:
        return place
    for op, rows in ALGORITHMS.items():
        for name, row in rows.items():
            if row is build:
                return "netsim.collectives.schedules.algorithms", f'ALGORITHMS["{op}"]["{name}"]'
    return str(function.__module__), getattr(function, "__qualname__", repr(function))
