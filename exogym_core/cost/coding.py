"""What compressing costs: how many bytes of values a second codecs encode and decode."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from exogym_core.cost.timing import seconds_of
from netsim.files.errors import InputError, unknown_names
from netsim.files.units import parse_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    #: For every codec its name, how many values there are, and how it encodes them and decodes them.
    CodingTrials: TypeAlias = Iterable[tuple[str, int, tuple[Callable[[], Any], Callable[[], Any]]]]

__all__ = ["Coding", "speed"]

_ALL = ""  # the name under which one speed for all codecs is kept
_VALUE_BYTES = 4  # values count as fp32


@dataclass(frozen=True)
class Coding:
    """The speeds of codecs; without any, coding is free.

    Attributes:
        speeds: (codec, encoded, decoded): bytes of fp32 values a second; one entry without a name is for all.
        kind: "given", or "measured": on this machine, to be replaced by what `measure` returns.
    """

    speeds: tuple[tuple[str, int, int], ...] = ()
    kind: str = "given"

    @classmethod
    def parse(cls, spec: Any) -> Coding:
        """From what users write under `coding` in `compute`.

        "free" (as None); "measured"; a speed such as "2 GB/s"; speeds both ways, `{encode: 1 GB/s, decode: 2
        GB/s}`; or a mapping from codecs to either: those of CODECS, "demo" for DeMo's transform,
        "low-rank" for PowerSGD's, or the name of a class of one's own.

        Raises:
            InputError: something else.

        >>> Coding.parse({"int8": "2 GB/s"}).seconds("int8", "encode", 10**9)  # values of 4 bytes
        2.0
        """
        if spec is None or spec == "free":
            return cls()
        if spec == "measured":
            return cls(kind="measured")
        if not isinstance(spec, Mapping) or {"encode", "decode"} & set(spec):
            return cls(((_ALL, *_both_ways("compute.coding", spec)),))
        entries = ((str(name), *_both_ways(f"compute.coding.{name}", spec[name])) for name in sorted(spec))
        return cls(tuple(entries))

    def to_plain(self) -> Any:
        """What parses back to an equal `Coding`."""
        if self.kind == "measured" or not self.speeds:
            return "measured" if self.kind == "measured" else "free"
        plain = {
            name: {"encode": f"{encoded} B/s", "decode": f"{decoded} B/s"}
            for name, encoded, decoded in self.speeds
        }
        return plain.get(_ALL, plain)

    def seconds(self, codec: str, way: str, num_values: int) -> float:
        """Seconds to "encode" or "decode" so many values.

        Raises:
            InputError: there are speeds, but none for this codec.
        """
        if not self.speeds:
            return 0.0
        for name, encoded, decoded in self.speeds:
            if name in (_ALL, codec):
                return num_values * _VALUE_BYTES / (encoded if way == "encode" else decoded)
        known = ", ".join(name for name, *_ in self.speeds)
        raise InputError(f"compute.coding: has no speed for codec {codec!r}, only for {known}; add one")

    def measured(self, trials: CodingTrials, own: CodingTrials = (), at_once: int = 1) -> Coding:
        """Measure the speeds here of all codecs of `trials`, if that is asked for, and of one's `own`.

        Speeds that are given by name are as they are; there too one's own codec without a speed is measured. `at_once`
        as many processes as share this machine's cores, see `seconds_of`.
        """
        known = {name for name, *_ in self.speeds}
        if self.kind == "measured":
            trials = itertools.chain(trials, own)
        elif not known or _ALL in known:
            return self
        else:
            trials = own
        speeds = list(self.speeds)
        for name, num_values, (encode, decode) in trials:
            if name in known:
                continue
            known.add(name)
            num_bytes = num_values * _VALUE_BYTES
            encoded, decoded = seconds_of(encode, at_once), seconds_of(decode, at_once)
            speeds.append((name, round(num_bytes / encoded), round(num_bytes / decoded)))
        return Coding(tuple(speeds))


def _both_ways(where: str, spec: Any) -> tuple[int, int]:
    """Bytes a second encoded and decoded, from one speed or two."""
    if not isinstance(spec, Mapping):
        return (speed(where, spec),) * 2
    unknown = [str(name) for name in spec if name not in ("encode", "decode")]
    if unknown:
        raise unknown_names(f"key of {where}", unknown, ("encode", "decode"))
    if len(spec) < 2:
        raise InputError(f"{where}: give both encode and decode")
    return speed(f"{where}.encode", spec["encode"]), speed(f"{where}.decode", spec["decode"])


def speed(where: str, text: Any, what: str = "coding") -> int:
    """Bytes a second, from text such as "2 GB/s".

    Raises:
        InputError: it is something else.
    """
    if isinstance(text, str) and text.rstrip().endswith("/s"):
        try:
            found = parse_bytes(text.rstrip().removesuffix("/s"))
        except InputError as error:
            raise InputError(f"{where}: {error}") from None
        if found:
            return found
    raise InputError(f"{where}: {text!r} is no speed of {what}; write for example '2 GB/s'")
