"""The options of a run, each told in one place, from which its whole route follows.

    experiment file -> Experiment.fit_arguments -> Trainer.fit -> FitRequest -> what runs

A field here is a keyword of `fit` and an attribute of the request; what `option` says of it is its check, the key of
an experiment file that sets it, and whether a checkpoint's continuation needs the same value. `fit` spells out those
that it had first, for editors' sake; a new one is a field here, and is read as `request.NAME` where it is used.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import TYPE_CHECKING, Any, TypeAlias, TypedDict

from netsim import parse_collectives
from netsim.files.errors import InputError
from netsim.files.units import parse_seconds

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    import torch
    from torch import nn

    from exogym_core.cost.compute import Compute
    from exogym_core.ranks.spec import WorkerSpec
    from exogym_core.strategy.base import Strategy
    from netsim.topology.topology import Topology

__all__ = [
    "OPTIONS",
    "TIMED",
    "Option",
    "OtherOptions",
    "RunOptions",
    "file_values",
    "open_device",
    "option",
    "whole_number",
]


Check: TypeAlias = Callable[[str, Any], Any]


@dataclass(frozen=True)
class Option:
    """What follows from one field of `RunOptions`, besides its name, type and default.

    Attributes:
        check: `f(name, value)` returns the value to go on with, or raises InputError; None: checked elsewhere.
        key: of an experiment file, such as "evaluate.every"; None: no file sets it.
        file_type: the key's type for pydantic, where the file's schema gets the key from here.
        same: whether a run that goes on from a checkpoint needs the same value.
        about: what `fit`'s documentation says of one that its signature does not spell out.
    """

    check: Check | None = None
    key: str | None = None
    file_type: Any = None
    same: bool = False
    about: str = ""


def option(default: Any = MISSING, **told: Any) -> Any:
    """A field of `RunOptions`; `told` are the attributes of its `Option`."""
    return field(default=default, metadata={"option": Option(**told)})


def whole_number(least: int, *, optional: bool = False) -> Check:
    """A check for whole numbers; EXO Gym's users pass floats such as 150.0 for steps."""

    def check(name: str, value: Any) -> int | None:
        if value is None and optional:
            return None
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not math.isfinite(value) or value != int(value) or value < least:
            raise InputError(f"fit: {name} is {value!r}; give a whole number from {least} up")
        return int(value)

    return check


def _finite(name: str, value: Any) -> Any:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if value is not None and not (is_number and math.isfinite(value)):
        raise InputError(f"fit: {name} is {value!r}; give a finite number")
    return value


def _collectives(name: str, value: Any) -> Any:
    parse_collectives(value)
    return value


def _truth(name: str, value: Any) -> Any:
    if not isinstance(value, bool):  # "no" would count as true
        raise InputError(f"fit: {name} is {value!r}; give True or False")
    return value


def _transport(name: str, value: Any) -> str:
    from exogym_core.ranks.run import transport_named  # here, since it brings torch

    transport_named(value)
    return str(value)


def _patience(name: str, value: Any) -> float | None:
    if value is None:
        return None
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
        raise InputError(f"fit: {name} is {value!r}; give a number of seconds above 0")
    return float(value)


def _duration(name: str, value: Any) -> float | None:
    if value is None:
        return None
    try:
        seconds = parse_seconds(value) if isinstance(value, str) else float(value)
    except (TypeError, ValueError) as error:
        raise InputError(f"fit: {name} is {value!r}: {error}") from None
    if isinstance(value, bool) or not 0 < seconds < math.inf:
        raise InputError(f"fit: {name} is {value!r}; give a positive duration such as '2 h'")
    return seconds


def _failures(name: str, value: Any) -> Mapping[str, float] | None:
    if value is None:
        return None
    if not isinstance(value, Mapping) or "mtbf" not in value or set(value) - {"mtbf", "repair"}:
        raise InputError(f"fit: {name} is {value!r}; give {{mtbf: 8 h, repair: 10 min}}")
    checked = {key: _duration(f"{name}.{key}", given) for key, given in {"repair": "10 min", **value}.items()}
    return {key: seconds for key, seconds in checked.items() if seconds is not None}


def open_device(name: str, value: Any) -> Any:
    """None for "" (EXO Gym's way to leave a device open) and "auto" (the experiment files'), else `value`."""
    return None if isinstance(value, str) and value in ("", "auto") else value


@dataclass(kw_only=True)
class RunOptions:
    """The options as users give them; `Trainer.fit` tells what they mean."""

    num_epochs: int | None = option(None, check=whole_number(1, optional=True))
    strategy: Strategy | None = option(None)
    num_nodes: int | None = option(None, check=whole_number(1, optional=True), key="workers.count")
    max_steps: int | None = option(None, check=whole_number(1, optional=True), key="steps")
    device: str | torch.device | None = option(None, check=open_device, key="device")
    devices: Sequence[int | str | torch.device] | None = option(None, check=open_device)
    batch_size: int = option(16, check=whole_number(1), key="batch_size", same=True)
    minibatch_size: int | str | None = option(None, key="minibatch_size", same=True)
    shuffle: bool = option(True, check=_truth, key="shuffle", same=True)
    val_size: int = option(64, check=whole_number(0), key="evaluate.samples")
    val_interval: int = option(100, check=whole_number(1), key="evaluate.every")
    val_seconds: float | str | None = option(
        None,
        check=_duration,
        key="evaluate.every_seconds",
        about="virtual seconds between evaluations, in place of `val_interval` steps.",
    )
    autocast: bool | str | None = option(False, key="autocast", same=True)
    checkpoint_interval: int | None = option(
        None, check=whole_number(1, optional=True), key="checkpoint.every"
    )
    correlation_interval: int | None = option(
        None, check=whole_number(1, optional=True), key="evaluate.correlation_every"
    )
    save_dir: str | Path = option("./checkpoints")
    dataloader_kwargs: Mapping[str, Any] | None = option(None)
    seed: int = option(42, check=whole_number(0), key="seed", same=True)
    run_name: str | None = option(None)
    wandb_project: str | None = option(None)
    log_x_axis: str = option("step")
    disable_logging: bool = option(False, check=_truth)
    until: float | str | None = option(
        None,
        check=_duration,
        key="until",
        file_type=float | str | None,
        same=True,
        about="virtual seconds (or text such as '2 h') after which no step begins; `max_steps` may end the run before.",
    )
    servers: int | None = option(
        None,
        check=whole_number(1, optional=True),
        key="servers",
        file_type=int | None,
        same=True,
        about="server ranks of strategies that have some, besides the workers; by default what the strategy needs.",
    )
    failures: Mapping[str, Any] | None = option(
        None,
        check=_failures,
        key="failures",
        file_type=dict[str, float | str] | None,
        same=True,
        about="workers' hosts crash at random: {'mtbf': '8 h', 'repair': '10 min'}, exponential times drawn by seed.",
    )
    topology: Topology | str | Path | Mapping[str, Any] | None = option(None, key="topology")
    placement: Sequence[str] | None = option(None, key="placement", same=True)
    protocol: str | Mapping[str, Any] | None = option(None, key="protocol", same=True)
    collectives: str | Mapping[str, str] = option("auto", check=_collectives, key="collectives", same=True)
    compute: float | str | Mapping[str, Any] | Compute | None = option(None, key="compute")
    transport: str = option("netsim", check=_transport, key="transport", file_type=str, same=True)
    workers: str | Mapping[str, Any] | WorkerSpec = option("auto", key="workers")
    target_loss: float | None = option(None, check=_finite, key="target_loss")
    resume_from: str | Path | None = option(None)
    edited_code: bool = option(
        False,
        check=_truth,
        about="go on from a checkpoint although code of one's own, of strategy or model, was edited since.",
    )
    trace: str | Path | None = option(None)
    timeout_seconds: float | None = option(
        None,
        check=_patience,
        about="over `gloo`, how long ranks wait for each other; None: four times as long as a rank has itself worked "
        "since its last call, half an hour at least. A rank that dies is noticed at once, as are ranks in a circle.",
    )
    compare_calls: bool = option(
        True,
        check=_truth,
        key="compare_calls",
        file_type=bool,
        about="over `gloo`, whether ranks tell each other each call before it runs, so that those that disagree are "
        "told and not hung: a round trip a call, which strategies that communicate every step may want to save.",
    )
    accuracy: Callable[[nn.Module, Any], float] | None = option(None)
    on_event: Callable[[Mapping[str, Any]], None] | None = option(None)
    progress: bool = option(
        True,
        check=_truth,
        about="a bar on a terminal, a line now and then elsewhere, and how it ended, on stderr; False for silence.",
    )


class OtherOptions(TypedDict, total=False):
    """Options that `fit` does not spell out, for type checkers; a test has their names be all of them."""

    val_seconds: float | str | None
    until: float | str | None
    servers: int | None
    failures: Mapping[str, Any] | None
    edited_code: bool
    timeout_seconds: float | None
    compare_calls: bool
    progress: bool


OPTIONS: Mapping[str, Option] = {each.name: each.metadata["option"] for each in fields(RunOptions)}
"""What is told of each option, by its name."""

TIMED = ("until", "failures", "val_seconds")
"""Options that mean nothing without virtual time."""


def file_values(settings: object) -> dict[str, Any]:
    """By option's name what an experiment's settings say, as they say it; those that no key sets are left out."""
    values: dict[str, Any] = {}
    for name, told in OPTIONS.items():
        if told.key is None:
            continue
        value: Any = settings
        for part in told.key.split("."):
            value = getattr(value, part) if value is not None else None
        values[name] = value
    return values
