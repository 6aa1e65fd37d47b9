"""What compressing costs: how many bytes of values a second codecs encode and decode."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from netsim.files.errors import InputError, unknown_names
from netsim.files.units import parse_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch import Tensor

    #: Of `values`, for every codec its name, and how it encodes them and decodes them.
    Trials: TypeAlias = Callable[[Tensor], Iterable[tuple[str, tuple[Callable[[], Any], Callable[[], Any]]]]]

__all__ = ["Coding"]

_ALL = ""  # the name under which one speed for all codecs is kept
_VALUE_BYTES = 4  # values count as fp32
_TRIAL_VALUES = 2**18


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

        >>> Coding.parse({"int8": "2 GB/s"}).seconds("int8", "encode", 10**9)
        0.5
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

    def measure(self, trials: Trials) -> Coding:
        """The speeds here of all codecs that `trials` tells of, if they are to be measured."""
        if self.kind != "measured":
            return self
        values = torch.randn(_TRIAL_VALUES, generator=torch.Generator().manual_seed(0)) * 1e-3
        speeds = [
            (name, *(round(values.nbytes / _seconds(work)) for work in works))
            for name, works in trials(values)
        ]
        return Coding(tuple(speeds))  # type: ignore[arg-type]


def _both_ways(where: str, spec: Any) -> tuple[int, int]:
    """Bytes a second encoded and decoded, from one speed or two."""
    if not isinstance(spec, Mapping):
        return (_speed(where, spec),) * 2
    unknown = [str(name) for name in spec if name not in ("encode", "decode")]
    if unknown:
        raise unknown_names(f"key of {where}", unknown, ("encode", "decode"))
    if len(spec) < 2:
        raise InputError(f"{where}: give both encode and decode")
    return _speed(f"{where}.encode", spec["encode"]), _speed(f"{where}.decode", spec["decode"])


def _speed(where: str, text: Any) -> int:
    if isinstance(text, str) and text.rstrip().endswith("/s"):
        try:
            speed = parse_bytes(text.rstrip().removesuffix("/s"))
        except InputError as error:
            raise InputError(f"{where}: {error}") from None
        if speed:
            return speed
    raise InputError(f"{where}: {text!r} is no speed of coding; write for example '2 GB/s'")


def _seconds(work: Callable[[], Any], repeats: int = 5) -> float:
    """Host seconds of `work`: the median, after one that warms up."""
    times = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])
