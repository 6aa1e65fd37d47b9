"""Virtual time of a training step: fixed, by FLOPs on a device, or measured; and that of codecs and optimizers."""

from __future__ import annotations

import hashlib
import math
import statistics
import struct
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    PlainSerializer,
    RootModel,
    SerializerFunctionWrapHandler,
    ValidatorFunctionWrapHandler,
    WithJsonSchema,
    model_serializer,
    model_validator,
)

from exogym_core.cost.devices import Dtype, find_device
from netsim.errors import InputError
from netsim.files.documents import Document
from netsim.files.schemas import Schema, validate_document
from netsim.units import format_seconds, parse_bytes, parse_fraction, parse_seconds

if TYPE_CHECKING:
    from pydantic.json_schema import JsonSchemaValue
    from pydantic_core import CoreSchema
    from torch.optim import Optimizer

__all__ = [
    "NO_DEVICE",
    "VALUE_BYTES",
    "BothWays",
    "Coding",
    "Compute",
    "Flops",
    "MissingSpeedError",
    "StepDurations",
    "Updates",
]

#: Error of a host without a device, where a step's seconds depend on it.
NO_DEVICE = (
    "names no device, so what a step takes there is not known: give compute='measured' (on this machine), "
    "compute='50 ms' or compute={'flops': {'device': 'a100'}}; in commands --set compute=measured, of a plan "
    "--device a100"
)

VALUE_BYTES = 4
"""Size of a value, for speeds: values count as fp32."""

_STANDARD_NORMAL = statistics.NormalDist()


def _seconds(value: Any) -> Any:
    return parse_seconds(value) if isinstance(value, str) else value


def _share(value: Any) -> Any:
    return parse_fraction(value) if isinstance(value, str) and value.rstrip().endswith("%") else value


def _sigma(value: Any) -> Any:
    return _share(value["sigma"] if isinstance(value, Mapping) and set(value) == {"sigma"} else value)


def _speed(value: Any) -> int:
    if isinstance(value, str) and value.rstrip().endswith("/s"):
        found = parse_bytes(value.rstrip().removesuffix("/s"))
        if found:
            return found
    raise InputError(f"{value!r} is no speed; write for example '2 GB/s'")


_TEXT = {"type": "string"}
_NUMBER = {"anyOf": [{"type": "number"}, _TEXT]}
_Seconds = Annotated[
    float,
    Field(allow_inf_nan=False),
    BeforeValidator(_seconds),
    Field(ge=0, le=1e9),
    PlainSerializer(lambda seconds: f"{seconds!r} s"),
    WithJsonSchema(_TEXT),
]
_Share = Annotated[float, Field(allow_inf_nan=False), BeforeValidator(_share), WithJsonSchema(_NUMBER)]
_Factor = Annotated[_Share, Field(gt=0, le=1e6)]
_Speed = Annotated[
    int, BeforeValidator(_speed), PlainSerializer(lambda speed: f"{speed} B/s"), WithJsonSchema(_TEXT)
]


class _TextToo:
    """JSON Schema of a model that may be written as text."""

    @classmethod
    def __get_pydantic_json_schema__(
        cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        return {"anyOf": [_TEXT, handler(core_schema)]}


class BothWays(_TextToo, Schema):
    """Speeds of a codec, in bytes of fp32 values a second; text such as "2 GB/s" stands for both."""

    encode: _Speed
    decode: _Speed

    @model_validator(mode="wrap")
    @classmethod
    def _one_for_both(cls, value: Any, validate: ValidatorFunctionWrapHandler) -> BothWays:
        if isinstance(value, Mapping | BothWays):
            return validate(value)  # type: ignore[no-any-return]
        speed = _speed(value)
        return cls.model_construct(encode=speed, decode=speed)


class _Speeds(_TextToo, RootModel[Any]):
    """Speeds by name; None: to be measured on this machine before the run.

    "free" (none), "measured", one speed for all, or a mapping.
    """

    model_config: ClassVar[ConfigDict] = ConfigDict(strict=True, frozen=True)
    for_all: ClassVar[str]

    root: Any = {}

    @model_validator(mode="before")
    @classmethod
    def _by_name(cls, spec: Any) -> Any:
        if spec is None or spec == "free":
            return {}
        if spec == "measured":
            return None
        if not isinstance(spec, Mapping) or {"encode", "decode"} & set(spec):
            return {cls.for_all: spec}
        return {str(name): spec[name] for name in sorted(spec, key=str)}

    @model_serializer(mode="wrap")
    def _plain(self, dump: SerializerFunctionWrapHandler) -> Any:
        return "measured" if self.is_measured else dump(self).get("", dump(self))

    @property
    def is_measured(self) -> bool:
        """True if the speeds are still to be measured on this machine."""
        return self.root is None

    @property
    def speeds(self) -> Mapping[str, Any]:
        """Speeds by name; none where the work is free, or still to be measured."""
        return self.root or {}


class MissingSpeedError(InputError):
    """Codecs or optimizers have speeds, and one that is used has none."""


class Coding(_Speeds):
    """Speeds of codecs; without any, coding is free.

    "free", "measured"; a speed such as "2 GB/s"; speeds both ways, `{encode: 1 GB/s, decode: 2 GB/s}`; or a mapping
    from codecs to either: those of CODECS, "demo" for DeMo's transform, "low-rank" for PowerSGD's, or the name of the
    user's class.
    """

    for_all: ClassVar[str] = ""

    root: dict[str, BothWays] | None = {}

    def seconds(self, codec: str, way: str, num_values: int) -> float:
        """Seconds to "encode" or "decode" `num_values`.

        Raises:
            InputError: there are speeds, but none for this codec.
        """
        if not self.speeds:
            return 0.0
        found = self.speeds.get(self.for_all, self.speeds.get(codec))
        if found is None:
            known = ", ".join(self.speeds)
            raise MissingSpeedError(
                f"compute.coding: has no speed for codec {codec!r}, only for {known}; add one",
                about=("compute.coding",),
            )
        return num_values * VALUE_BYTES / (found.encode if way == "encode" else found.decode)  # type: ignore[no-any-return]


class Updates(_Speeds):
    """Speeds of optimizers, local and outer ones, in bytes of fp32 parameters a second; without any, updates are free.

    "free", "measured"; a speed such as "2 GB/s"; or a mapping from optimizers' classes to speeds: `SGD`, `SGD with
    momentum`, `AdamW`, ..., and `other` for those that are not named.
    """

    for_all: ClassVar[str] = "other"

    root: dict[str, _Speed] | None = {}

    def seconds(self, optimizer: Optimizer) -> float:
        """Seconds of one step of `optimizer` over all its parameters.

        Raises:
            InputError: there are speeds, but neither one for this optimizer nor one for `other`.
        """
        if not self.speeds:
            return 0.0
        name = type(optimizer).__name__
        if name == "SGD" and any(group.get("momentum") for group in optimizer.param_groups):
            name = "SGD with momentum"
        speed = self.speeds.get(name, self.speeds.get(self.for_all))
        if speed is None:
            known = ", ".join(self.speeds)
            raise MissingSpeedError(
                f"compute.updates: has no speed for {name}, only for {known}; add one, or one for other",
                about=("compute.updates",),
            )
        num_values: int = sum(each.numel() for group in optimizer.param_groups for each in group["params"])
        return num_values * VALUE_BYTES / speed  # type: ignore[no-any-return]


class Flops(Schema):
    """A batch's operations / (the device's peak x utilisation).

    Attributes:
        utilisation: share of the peak that is reached; by default what well-tuned language model training reaches on
            data-centre GPUs.
        device: overrides the hosts' devices.
        dtype: None: bf16 under autocast, else fp32.
    """

    utilisation: Annotated[_Share, Field(gt=0, le=1)] = 0.4
    device: Annotated[str, AfterValidator(lambda name: find_device(name) and name)] | None = None
    dtype: Dtype | None = None


class MeasuredStep(Schema):
    """Seconds measured on this machine, to be replaced by fixed ones before the run, times `factor`."""

    factor: _Factor = 1.0


class Stragglers(Schema):
    """The share of the steps of each host that are slow, and their duration as a multiple."""

    fraction: Annotated[_Share, Field(ge=0, le=1)]
    slowdown: Annotated[_Share, Field(ge=1, le=1e6)]


class Compute(_TextToo, Schema):
    """Cost of a local step: one of `fixed`, `flops` (the default) and `measured`, and its spread.

    Attributes:
        fixed: seconds of a step.
        flops: by operations.
        measured: on this machine.
        jitter: sigma of the lognormal factor (mean 1) on each step of each host.
        stragglers: slow steps.
        coding: cost of compression.
        updates: cost of optimizers' steps.
        shared_cores: cores of the one machine on which all ranks compute, also while it is measured; None: each rank
            has its own.
    """

    fixed: _Seconds | None = None
    flops: Flops | None = None
    measured: MeasuredStep | None = None
    jitter: Annotated[
        float, Field(ge=0, le=10, allow_inf_nan=False), BeforeValidator(_sigma), WithJsonSchema(_NUMBER)
    ] = 0.0
    stragglers: Stragglers | None = None
    coding: Coding = Coding({})
    updates: Updates = Updates({})
    shared_cores: Annotated[int, Field(ge=1, le=1024)] | None = None

    @classmethod
    def parse(cls, spec: Any) -> Compute:
        """Parse the `compute` of `fit`: seconds, '50 ms', 'flops', 'measured', or a mapping of the attributes.

        Raises:
            InputError: a value out of range, or an unknown key.

        >>> Compute.parse("50 ms").fixed, Compute.parse({"flops": {"device": "a100"}, "jitter": 0.1}).jitter
        (0.05, 0.1)
        >>> coding = Compute.parse({"coding": {"int8": "2 GB/s"}}).coding
        >>> coding.seconds("int8", "encode", 10**9)  # values of 4 bytes
        2.0
        """
        return validate_document(cls, Document("compute", spec))

    @model_validator(mode="before")
    @classmethod
    def _one_kind(cls, spec: Any) -> Any:
        if spec is None or spec in ("flops", "measured"):
            return {spec or "flops": {}}
        if isinstance(spec, int | float | str):
            return {"fixed": spec}
        if not isinstance(spec, Mapping):
            return spec
        given = {key: {} if key in ("flops", "measured") and spec[key] is None else spec[key] for key in spec}
        kinds = [kind for kind in ("fixed", "flops", "measured") if kind in given]
        if len(kinds) > 1:
            raise InputError(f"{' and '.join(kinds)} exclude each other; keep one")
        return given if kinds else {"flops": {}, **given}

    @model_serializer(mode="wrap")
    def _plain(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """The canonical plain form; parses back to an equal `Compute`."""
        plain = dump(self)
        if self.flops is not None:
            plain["flops"] = {name: value for name, value in plain["flops"].items() if value is not None}
        known = type(self).model_fields
        return {name: value for name, value in plain.items() if getattr(self, name) != known[name].default}

    @property
    def is_measured(self) -> bool:
        """True if a part is still to be measured."""
        return self.measured is not None or self.coding.is_measured or self.updates.is_measured

    @property
    def varies(self) -> bool:
        """True if durations of steps are random."""
        return bool(self.jitter or (self.stragglers is not None and self.stragglers.fraction))

    @property
    def utilisation(self) -> float:
        """Share of the peak that is reached, by default where steps do not go by operations."""
        return (self.flops or Flops()).utilisation

    @property
    def device(self) -> str | None:
        """Device in place of the hosts'; None: each host's."""
        return None if self.flops is None else self.flops.device

    def may_become(self, found: Compute) -> bool:
        """True if `found` is this with its open parts measured."""
        if self.is_measured or not self.coding.speeds:
            return self.is_measured
        speeds = set(self.coding.speeds) <= set(found.coding.speeds)
        return speeds and found.model_copy(update={"coding": self.coding}) == self

    def with_utilisation(self, share: float) -> Compute:
        """Copy with another share of the peak, where steps go by operations."""
        if self.flops is None:
            return self
        return self.model_copy(update={"flops": self.flops.model_copy(update={"utilisation": share})})

    def with_seconds(self, seconds: float) -> Compute:
        """Copy with the seconds of a step that were measured."""
        assert self.measured is not None
        settled = {"fixed": seconds * self.measured.factor, "measured": None}
        return self.model_copy(update=settled)

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
        if self.fixed is not None:
            return self.fixed
        if self.flops is None:
            raise InputError(
                "compute: 'measured' has no seconds before the measurement; use fixed", about=("compute",)
            )
        name = self.flops.device or device
        if name is None:
            raise InputError(f"{where}{NO_DEVICE}")
        dtype = self.flops.dtype or ("bf16" if half else "fp32")
        return flops / (find_device(name, where).flops_for(dtype, name) * self.flops.utilisation)

    def describe(self) -> str:
        """Short text, such as 'fixed 50 ms'."""
        if self.fixed is not None:
            return f"fixed {format_seconds(self.fixed)}"
        if self.measured is not None:
            return f"measured x {self.measured.factor:g}"
        return f"flops at {self.utilisation:.0%} of {self.device or 'each host'}'s peak"


class StepDurations:
    """Duration of each step of a host: the mean, with jitter and stragglers by (seed, host, step).

    The draws depend on nothing else, so every strategy meets the same ones.

    Args:
        compute: the spread.
        mean_seconds: of a step before the draws.
        seed: of the run.
        host: a number that all ranks of a host share.
        batch_size: samples of a whole step, if one with fewer takes proportionally less; None: it takes as long.
    """

    def __init__(
        self, compute: Compute, mean_seconds: float, seed: int, host: int, batch_size: int | None = None
    ) -> None:
        self.mean_seconds, self._batch_size = mean_seconds, batch_size
        self._prefix = f"{seed}/{host}/".encode()
        self._sigma, slow = compute.jitter, compute.stragglers
        self._fraction, self._slowdown = (0.0, 1.0) if slow is None else (slow.fraction, slow.slowdown)
        self._varies = compute.varies

    @property
    def drawn_from(self) -> tuple[float | bytes, ...]:
        """Key that is equal for hosts whose steps all take equally long."""
        spread = (self._sigma, self._fraction, self._slowdown, self._prefix) if self._varies else ()
        return (self.mean_seconds, *spread)

    def seconds(self, step: int, samples: int | None = None) -> float:
        """Virtual seconds of step `step` over `samples`; None: a whole step."""
        seconds = self.mean_seconds
        if self._varies:
            digest = hashlib.blake2b(self._prefix + str(step).encode(), digest_size=16).digest()
            first, second = struct.unpack("<QQ", digest)
            if self._sigma:
                # 52 bits and a half, so that rounding never reaches 0 or 1.
                normal = _STANDARD_NORMAL.inv_cdf(((first >> 12) + 0.5) / 2**52)
                seconds *= math.exp(self._sigma * normal - self._sigma**2 / 2)
            if second / 2**64 < self._fraction:
                seconds *= self._slowdown
        if samples is not None and self._batch_size is not None:
            seconds *= samples / self._batch_size
        return seconds
