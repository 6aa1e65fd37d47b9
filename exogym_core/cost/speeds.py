"""Speeds of codecs and optimizers, given or measured on this machine, as bytes of fp32 values a second."""

from __future__ import annotations

import itertools
import os
import select
import statistics
import time
from collections.abc import Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from exogym_core.workers.processes.children import Children
from netsim.errors import InputError, unknown_names
from netsim.units import parse_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from torch.optim import Optimizer

    from exogym_core.workers.processes.children import Pipe

    #: For every codec its name, how many values there are, and how it encodes them and decodes them.
    CodingTrials: TypeAlias = Iterable[tuple[str, int, tuple[Callable[[], Any], Callable[[], Any]]]]

__all__ = ["Coding", "Updates", "charge_updates", "seconds_of", "speed"]

_REPEATS = 5
_BUDGET_SECONDS = 1.0  # slow work is not repeated for longer


def seconds_of(work: Callable[[], Any], at_once: int = 1) -> float:
    """Seconds of `work` on this machine: the median of up to five runs, after one to warm up.

    `at_once` processes run it in parallel, each on its own core where there are enough, with shared caches and memory;
    more processes than cores take longer in proportion. Work must then be possible in a forked process.
    """
    affinity = getattr(os, "sched_getaffinity", None)
    cores = len(affinity(0)) if affinity is not None else os.cpu_count() or 1
    with _parallel_work(work, min(at_once, cores) - 1):
        return _median(work) * max(1.0, at_once / cores)


def _median(work: Callable[[], Any]) -> float:
    times: list[float] = []
    began = time.perf_counter()
    for _ in range(_REPEATS + 1):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
        if time.perf_counter() - began > _BUDGET_SECONDS and len(times) > 1:
            break
    return statistics.median(times[1:])


@contextmanager
def _parallel_work(work: Callable[[], Any], num: int) -> Iterator[None]:
    """Repeat `work` in `num` processes while the block runs, each once at least before it begins."""
    if num < 1:
        yield
        return

    def repeat(_: int, channel: Pipe) -> None:
        work()
        channel.send(None)
        while not select.select([channel.fileno()], [], [], 0)[0]:  # readable once the parent has left
            work()

    with Children(repeat, num, names=["netgym measuring"] * num) as children:
        for channel in children.channels:
            channel.recv()
        yield


_ALL = ""  # name of one speed for all codecs
_VALUE_BYTES = 4  # values count as fp32


@dataclass(frozen=True)
class Coding:
    """The speeds of codecs; without any, coding is free.

    Attributes:
        speeds: (codec, encoded, decoded): bytes of fp32 values a second; one entry without a name is for all.
        kind: "given", or "measured": on this machine, to be replaced by the result of `measured`.
    """

    speeds: tuple[tuple[str, int, int], ...] = ()
    kind: str = "given"

    @classmethod
    def parse(cls, spec: Any) -> Coding:
        """Parse `coding` of `compute`.

        "free" (as None); "measured"; a speed such as "2 GB/s"; speeds both ways, `{encode: 1 GB/s, decode: 2
        GB/s}`; or a mapping from codecs to either: those of CODECS, "demo" for DeMo's transform,
        "low-rank" for PowerSGD's, or the name of the user's class.

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
        """Plain form, which parses to an equal `Coding`."""
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
        """Measure the speeds of all codecs of `trials` on this machine, if asked to, and of the user's `own`.

        Speeds that are given by name stay; the user's codecs without one are measured there too. `at_once` processes
        share this machine's cores, see `seconds_of`.
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


_OTHER = "other"  # name of the speed of all other optimizers
_MOMENTUM = {"momentum": 0.9, "nesterov": True}
_TRIED: Mapping[str, Mapping[str, Any]] = {
    "SGD": {},
    "SGD with momentum": _MOMENTUM,
    "Adam": {},
    "AdamW": {},
    "Adagrad": {},
    "RMSprop": {},
    "NAdam": {},
    "RAdam": {},
}


@dataclass(frozen=True)
class Updates:
    """The speeds of optimizers, local and outer ones; without any, updates are free.

    Attributes:
        speeds: (optimizer's class, bytes of fp32 parameters a second); that of `other` is for all that are not named.
        kind: "given", or "measured": on this machine, to be replaced by the result of `measured`.
    """

    speeds: tuple[tuple[str, int], ...] = ()
    kind: str = "given"

    @classmethod
    def parse(cls, spec: Any) -> Updates:
        """Parse `updates` of `compute`.

        "free" (as None); "measured"; a speed such as "2 GB/s"; or a mapping from optimizers' classes to speeds: `SGD`,
        `SGD with momentum`, `AdamW`, ..., and `other` for those that are not named (free without it).

        Raises:
            InputError: something else.

        >>> Updates.parse({"AdamW": "1 GB/s"}).speeds
        (('AdamW', 1000000000),)
        """
        if spec is None or spec == "free":
            return cls()
        if spec == "measured":
            return cls(kind="measured")
        if not isinstance(spec, Mapping):
            return cls(((_OTHER, speed("compute.updates", spec, "updates")),))
        return cls(
            tuple(
                (str(name), speed(f"compute.updates.{name}", spec[name], "updates"))
                for name in sorted(spec, key=str)
            )
        )

    def to_plain(self) -> Any:
        """Plain form, which parses to an equal `Updates`."""
        if self.kind == "measured" or not self.speeds:
            return "measured" if self.kind == "measured" else "free"
        return {name: f"{each} B/s" for name, each in self.speeds}

    def seconds(self, optimizer: Optimizer) -> float:
        """Seconds of one step of `optimizer` over all its parameters."""
        speeds = dict(self.speeds)
        found = speeds.get(_name_of(optimizer), speeds.get(_OTHER))
        if found is None:
            return 0.0
        num_values: int = sum(each.numel() for group in optimizer.param_groups for each in group["params"])
        return num_values * _VALUE_BYTES / found

    def measured(self, shapes: Sequence[torch.Size], at_once: int = 1) -> Updates:
        """Measure the speeds of torch's usual optimizers over tensors of these shapes, if asked to.

        `other` gets that of AdamW. `at_once` processes share this machine's cores, see `seconds_of`.
        """
        if self.kind != "measured":
            return self
        generator = torch.Generator().manual_seed(0)
        parameters = [torch.randn(shape, generator=generator) for shape in shapes]
        for parameter in parameters:
            parameter.grad = torch.randn(parameter.shape, generator=generator) * 1e-3
        num_bytes = sum(parameter.numel() for parameter in parameters) * _VALUE_BYTES
        speeds = {}
        for name, options in _TRIED.items():
            make = getattr(torch.optim, name.partition(" ")[0])
            speeds[name] = round(num_bytes / seconds_of(make(parameters, lr=1e-6, **options).step, at_once))
        return Updates(tuple(sorted({**speeds, _OTHER: speeds["AdamW"]}.items())))


def _name_of(optimizer: Optimizer) -> str:
    name = type(optimizer).__name__
    has_momentum = any(group.get("momentum") for group in optimizer.param_groups)
    return f"{name} with momentum" if name == "SGD" and has_momentum else name


def charge_updates(
    optimizers: Iterable[Optimizer], updates: Updates, advance: Callable[[float], None]
) -> None:
    """Charge each step of the optimizers by `advance`, as `Communicator.advance` does."""

    def after_each(optimizer: Optimizer) -> None:
        seconds = updates.seconds(optimizer)
        if seconds:
            optimizer.register_step_post_hook(lambda *_: advance(seconds))

    for optimizer in optimizers:
        after_each(optimizer)
