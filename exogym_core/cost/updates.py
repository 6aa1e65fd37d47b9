"""What applying gradients costs: how many bytes of parameters a second optimizers update."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from exogym_core.cost.coding import speed
from exogym_core.cost.timing import seconds_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from torch.optim import Optimizer

__all__ = ["Updates", "charge_updates"]

_OTHER = "other"  # the name under which the speed of optimizers that are not named is kept
_VALUE_BYTES = 4  # parameters count as fp32
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
        kind: "given", or "measured": on this machine, to be replaced by what `measured` returns.
    """

    speeds: tuple[tuple[str, int], ...] = ()
    kind: str = "given"

    @classmethod
    def parse(cls, spec: Any) -> Updates:
        """From what users write under `updates` in `compute`.

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
        """What parses back to an equal `Updates`."""
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
        """The speeds here of torch's usual optimizers over tensors of these shapes, if they are to be measured.

        `other` gets that of AdamW. `at_once` as many processes as share this machine's cores, see `seconds_of`.
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
    """Have every step of these let its seconds pass by `advance`, as `Communicator.advance` does."""

    def after_each(optimizer: Optimizer) -> None:
        seconds = updates.seconds(optimizer)
        if seconds:
            optimizer.register_step_post_hook(lambda *_: advance(seconds))

    for optimizer in optimizers:
        after_each(optimizer)
