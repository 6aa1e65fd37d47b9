"""Virtual time of a training step: fixed, by FLOPs on a device, or measured."""

from __future__ import annotations

import copy
import hashlib
import math
import statistics
import struct
from collections.abc import Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import torch

from exogym_core.cost.devices import DTYPES, find_device
from exogym_core.cost.flops import kept_rng_of
from exogym_core.cost.speeds import Coding, Updates, seconds_of
from netsim.errors import InputError, unknown_name, unknown_names
from netsim.units import format_seconds, parse_fraction, parse_seconds

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import nn

    from exogym_core.cost.speeds import CodingTrials

__all__ = ["NO_DEVICE", "Compute", "StepDurations", "intra_op_threads", "measure_seconds"]

#: Error of a host without a device, where a step's seconds depend on it.
NO_DEVICE = (
    "names no device, so what a step takes there is not known: give compute='measured' (on this machine), "
    "compute='50 ms' or compute={'flops': {'device': 'a100'}}; in commands --set compute=measured, of a plan "
    "--device a100"
)

_DEFAULT_UTILISATION = 0.4  # of the peak; what well-tuned language model training reaches on data-centre GPUs
_FREE, _FREE_UPDATES = Coding(), Updates()
_KEYS = ("fixed", "flops", "measured", "jitter", "stragglers", "coding", "updates", "at_once")
_MOST_AT_ONCE = 1024
_STANDARD_NORMAL = statistics.NormalDist()


def _number(where: str, value: object, high: float, *, zero: bool = False) -> float:
    """`value` as a number above 0 (or from 0, with `zero`) to `high`; a share may be written '40 %'."""
    if isinstance(value, str) and value.rstrip().endswith("%"):
        value = parse_fraction(value)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if is_number and (0 < value <= high or (zero and value == 0)):  # type: ignore[operator]
        return float(value)  # type: ignore[arg-type]
    raise InputError(f"{where}: {value!r} is not a number {'from' if zero else 'above'} 0 to {high:g}")


def _whole(where: str, value: object) -> int:
    if isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= _MOST_AT_ONCE:
        return value
    raise InputError(f"{where}: {value!r} is not a whole number from 1 to {_MOST_AT_ONCE}")


def _options(where: str, given: object, known: Sequence[str]) -> Mapping[str, Any]:
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise InputError(f"{where}: {given!r} is not a mapping of {', '.join(known)}")
    unknown = [str(name) for name in given if name not in known]
    if unknown:
        raise unknown_names(f"key of {where}", unknown, known)
    return given


@dataclass(frozen=True)
class Compute:
    """Cost of a local step.

    Attributes:
        kind: `fixed`; `flops`: a batch's operations / (the device's peak x utilisation); `measured`: on this
            machine, to be replaced by `fixed` before the run.
        seconds: of a step, for `fixed`.
        utilisation: share of the peak that is reached, for `flops`.
        device: overrides the hosts' devices, for `flops`.
        dtype: `fp32`, `tf32`, `bf16` or `fp16`; None: bf16 under autocast, else fp32.
        factor: measured seconds are multiplied by it.
        jitter: sigma of the lognormal factor (mean 1) on each step of each host.
        straggler_fraction: share of the steps of each host that are slow.
        straggler_slowdown: duration of a slow step, as a multiple.
        coding: cost of compression.
        updates: cost of optimizers' steps.
        at_once: measure while so many processes do the same on this machine.
    """

    kind: Literal["fixed", "flops", "measured"] = "flops"
    seconds: float = 0.0
    utilisation: float = _DEFAULT_UTILISATION
    device: str | None = None
    dtype: str | None = None
    factor: float = 1.0
    jitter: float = 0.0
    straggler_fraction: float = 0.0
    straggler_slowdown: float = 1.0
    coding: Coding = _FREE
    updates: Updates = _FREE_UPDATES
    at_once: int = 1

    @classmethod
    def parse(cls, spec: Any) -> Compute:
        """Parse the `compute` of an experiment or of `fit`.

        A number (seconds) or '50 ms'; 'flops'; 'measured'; or a mapping with one of `fixed: 50 ms`,
        `flops: {utilisation, device, dtype}`, `measured: {factor}`, and with `jitter: 0.1` and
        `stragglers: {fraction: 1 %, slowdown: 5}`, `coding: 2 GB/s` (see `Coding.parse`) and `updates: 2 GB/s`
        (`Updates.parse`) as one likes; where something is measured also `at_once: 4`. None is 'flops'.

        Raises:
            InputError: a value out of range, or an unknown key.

        >>> Compute.parse("50 ms").seconds, Compute.parse({"flops": {"device": "a100"}, "jitter": 0.1}).jitter
        (0.05, 0.1)
        """
        if isinstance(spec, Compute):
            return spec
        if spec is None or spec in ("flops", "measured"):
            return cls(kind="measured" if spec == "measured" else "flops")
        if isinstance(spec, int | float | str):
            return cls(kind="fixed", seconds=cls._seconds(spec))
        given = _options("compute", spec, _KEYS)
        kinds = [kind for kind in ("fixed", "flops", "measured") if kind in given]
        if len(kinds) > 1:
            raise InputError(f"compute: {' and '.join(kinds)} exclude each other; keep one")
        parsed = cls._parse_kind(kinds[0], given[kinds[0]]) if kinds else cls()
        jitter = given.get("jitter", 0.0)
        if isinstance(jitter, Mapping):
            jitter = _options("compute.jitter", jitter, ("sigma",)).get("sigma", 0.0)
        slow = _options("compute.stragglers", given.get("stragglers"), ("fraction", "slowdown"))
        fraction = _number("compute.stragglers.fraction", slow.get("fraction", 0.0), 1.0, zero=True)
        slowdown = _number("compute.stragglers.slowdown", slow.get("slowdown", 1.0), 1e6)
        if len(slow) == 1:
            raise InputError("compute.stragglers: give both fraction and slowdown; one alone slows nothing")
        complete = replace(
            parsed,
            jitter=_number("compute.jitter", jitter, 10.0, zero=True),
            straggler_fraction=fraction,
            straggler_slowdown=slowdown,
            coding=Coding.parse(given.get("coding")),
            updates=Updates.parse(given.get("updates")),
            at_once=_whole("compute.at_once", given.get("at_once", 1)),
        )
        if complete.at_once > 1 and not complete.is_measured:
            raise InputError("compute.at_once: nothing is measured; leave it out, or measure something")
        return complete

    @staticmethod
    def _seconds(value: Any) -> float:
        if isinstance(value, str):
            try:
                return parse_seconds(value)
            except InputError as error:
                raise InputError(f"compute: {error}") from None
        if isinstance(value, bool) or not (0 <= value < math.inf):
            raise InputError(f"compute: {value!r} seconds is no duration; write for example '50 ms'")
        return float(value)

    @classmethod
    def _parse_kind(cls, kind: str, value: Any) -> Compute:
        if kind == "fixed":
            if not isinstance(value, int | float | str):
                raise InputError(f"compute.fixed: {value!r} is no duration; write for example '50 ms'")
            return cls(kind="fixed", seconds=cls._seconds(value))
        if kind == "measured":
            options = _options("compute.measured", value, ("factor",))
            factor = _number("compute.measured.factor", options.get("factor", 1.0), 1e6)
            return cls(kind="measured", factor=factor)
        options = _options("compute.flops", value, ("utilisation", "device", "dtype"))
        device, dtype = options.get("device"), options.get("dtype")
        if device is not None:
            find_device(device, "compute.flops: ").flops_for(dtype or "fp32", device)
        elif dtype is not None and dtype not in DTYPES:
            raise unknown_name("dtype of compute.flops", str(dtype), DTYPES)
        share = _number("compute.flops.utilisation", options.get("utilisation", _DEFAULT_UTILISATION), 1.0)
        return cls(kind="flops", utilisation=share, device=device, dtype=dtype)

    def to_mapping(self) -> dict[str, Any]:
        """The canonical plain form; parses back to an equal `Compute`."""
        plain: dict[str, Any] = {}
        if self.kind == "fixed":
            plain["fixed"] = f"{self.seconds!r} s"
        elif self.kind == "measured":
            plain["measured"] = {"factor": self.factor}
        else:
            plain["flops"] = {"utilisation": self.utilisation}
            plain["flops"] |= {"device": self.device} if self.device is not None else {}
            plain["flops"] |= {"dtype": self.dtype} if self.dtype is not None else {}
        if self.jitter:
            plain["jitter"] = self.jitter
        if self.straggler_fraction:
            plain["stragglers"] = {"fraction": self.straggler_fraction, "slowdown": self.straggler_slowdown}
        if self.coding != _FREE:
            plain["coding"] = self.coding.to_plain()
        if self.updates != _FREE_UPDATES:
            plain["updates"] = self.updates.to_plain()
        if self.at_once > 1:
            plain["at_once"] = self.at_once
        return plain

    @property
    def is_measured(self) -> bool:
        """True if a part is still to be measured."""
        return "measured" in (self.kind, self.coding.kind, self.updates.kind)

    def may_become(self, found: Compute) -> bool:
        """True if `found` is this with its open parts measured."""
        if self.is_measured or not self.coding.speeds:
            return self.is_measured
        speeds = set(self.coding.speeds) <= set(found.coding.speeds)
        return speeds and replace(found, coding=self.coding) == self

    def with_measured_work(
        self, threads: int, trials: CodingTrials, shapes: Sequence[torch.Size], own: CodingTrials = ()
    ) -> Compute:
        """Copy with measured speeds of codecs and optimizers, on so many threads, where they are to be measured.

        Args:
            threads: torch's.
            trials: work of codecs.
            shapes: of the parameters that are updated.
            own: work of the user's codecs, which is measured also where speeds by name lack it.
        """
        with intra_op_threads(threads):
            coding = self.coding.measured(trials, own, self.at_once)
            updates = self.updates.measured(shapes, self.at_once)
        return replace(
            self, coding=coding, updates=updates, at_once=self.at_once if self.kind == "measured" else 1
        )

    def step_seconds(self, flops: float, device: str | None, where: str = "", half: bool = False) -> float:
        """Seconds of a whole step before jitter.

        Args:
            flops: operations of the step's forward and backward passes.
            device: the host's, as the topology names it; None: it names none.
            where: prefix of errors, such as "host us.0: ".
            half: the model computes in half precision (autocast).

        Raises:
            InputError: by FLOPs, and neither this nor the host names a device; or not measured yet.
        """
        if self.kind == "fixed":
            return self.seconds
        if self.kind == "measured":
            raise InputError("compute: 'measured' has no seconds before it has been measured; use fixed")
        name = self.device or device
        if name is None:
            raise InputError(f"{where}{NO_DEVICE}")
        dtype = self.dtype or ("bf16" if half else "fp32")
        return flops / (find_device(name, where).flops_for(dtype, name) * self.utilisation)

    def describe(self) -> str:
        """Short text, such as 'fixed 50 ms'."""
        if self.kind == "fixed":
            return f"fixed {format_seconds(self.seconds)}"
        if self.kind == "measured":
            return f"measured x {self.factor:g}"
        return f"flops at {self.utilisation:.0%} of {self.device or 'each host'}'s peak"


class StepDurations:
    """Duration of each step of a host: the mean, with jitter and stragglers by (seed, host, step).

    The draws depend on nothing else, so every strategy meets the same ones.

    Args:
        compute: the spread.
        mean_seconds: of a step before the draws.
        seed: of the run.
        host: a number that all ranks of a host share.
    """

    def __init__(self, compute: Compute, mean_seconds: float, seed: int, host: int) -> None:
        self.mean_seconds = mean_seconds
        self._prefix = f"{seed}/{host}/".encode()
        self._sigma = compute.jitter
        self._fraction = compute.straggler_fraction
        self._slowdown = compute.straggler_slowdown
        self._varies = bool(self._sigma or self._fraction)

    @property
    def drawn_from(self) -> tuple[float | bytes, ...]:
        """Equal for those that take equally long at every step."""
        spread = (self._sigma, self._fraction, self._slowdown, self._prefix) if self._varies else ()
        return (self.mean_seconds, *spread)

    def seconds(self, step: int) -> float:
        """Virtual seconds of step `step`."""
        if not self._varies:
            return self.mean_seconds
        digest = hashlib.blake2b(self._prefix + str(step).encode(), digest_size=16).digest()
        first, second = struct.unpack("<QQ", digest)
        seconds = self.mean_seconds
        if self._sigma:
            # 52 bits and a half, so that rounding never reaches 0 or 1.
            normal = _STANDARD_NORMAL.inv_cdf(((first >> 12) + 0.5) / 2**52)
            seconds *= math.exp(self._sigma * normal - self._sigma**2 / 2)
        if second / 2**64 < self._fraction:
            seconds *= self._slowdown
        return seconds


@contextmanager
def intra_op_threads(number: int) -> Iterator[None]:
    """Let torch compute on so many threads in the block."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def measure_seconds(model: nn.Module, batch: Any, at_once: int = 1) -> float:
    """Host seconds of a forward and backward pass over `batch` on a copy of the model, see `seconds_of`.

    The RNG is left as it was.
    """
    replica = copy.deepcopy(model)

    def work() -> None:
        loss = replica(batch)
        loss.backward()
        loss.item()  # on a GPU: waits for all that was queued

    with kept_rng_of(model):
        work()
        return seconds_of(work, at_once)
