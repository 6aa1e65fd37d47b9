"""Parameters that torch's `fully_shard` has cut (FSDP2): what this rank holds of them, and how checkpoints keep it."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from torch import Tensor

from exogym_core.strategy.parts.flat import flatten, unflatten
from netsim.files.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from exogym_core.strategy.parts.outer import OuterStep

__all__ = [
    "cut_by_torch",
    "is_cut",
    "load_outer",
    "outer_to_keep",
    "part_of",
    "parts_to_keep",
    "refuse_other_sites",
]


def cut_by_torch(parameters: Sequence[Tensor]) -> bool:
    """Whether any of them is a DTensor."""
    return any(map(is_cut, parameters))


def is_cut(value: object) -> bool:
    """Whether this is a DTensor: who has none has not imported them, which takes a second."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def part_of(parameter: Tensor) -> Tensor:
    """What this rank holds of a parameter, in the same memory; the parameter itself where it is whole."""
    cut: Any = parameter
    return cut.detach().to_local() if is_cut(cut) else parameter


def refuse_other_sites(
    where: str, parameters: Sequence[Tensor], ranks_per_worker: int, sharding: str
) -> None:
    """See that they are cut among the ranks of this site, and by torch alone.

    Raises:
        InputError: they are not.
    """
    if not cut_by_torch(parameters):
        return
    if sharding != "NO_SHARD":
        raise InputError(
            f"{where}: fully_shard has cut the parameters already; leave out sharding={sharding!r}"
        )
    whole = [parameter for parameter in parameters if not is_cut(parameter)]
    if whole:
        raise InputError(
            f"{where}: {len(whole)} of {len(parameters)} parameters are not cut by fully_shard; call it on the whole "
            "model, last"
        )
    sizes = sorted({parameter.device_mesh.size() for parameter in parameters})  # type: ignore[attr-defined]
    if sizes != [ranks_per_worker]:
        raise InputError(
            f"{where}: fully_shard has cut the parameters among {sizes[-1]} ranks, and ranks_per_worker is "
            f"{ranks_per_worker}; make them equal"
        )


def parts_to_keep(parts: Sequence[Tensor], parameters: Sequence[Tensor]) -> list[Tensor]:
    """Copies of what this rank holds of values like these parameters, for a checkpoint: DTensors, as they are.

    So torch.distributed.checkpoint takes the ranks' parts for parts, and puts them together.
    """
    return [
        _like(part, parameter) if is_cut(parameter) else part.detach().clone()
        for part, parameter in zip(parts, parameters, strict=True)
    ]


def _like(part: Tensor, parameter: Any) -> Tensor:
    from torch.distributed.tensor import DTensor

    made: Tensor = DTensor.from_local(
        part.detach().clone(),
        parameter.device_mesh,
        parameter.placements,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
    return made


def outer_to_keep(outer: OuterStep, parameters: Sequence[Tensor]) -> dict[str, Any]:
    """`outer.state_dict()`; where the parameters are DTensors, all that is like them is one too."""
    state = outer.state_dict()
    if not cut_by_torch(parameters):
        return state
    in_order = [
        parameters[index] for bucket in outer.plan for index in bucket
    ]  # as its optimizer counts them
    residuals = [
        kept
        for flat, bucket, like in zip(
            state["residuals"], outer.buckets, _bucketed(outer, parameters), strict=False
        )
        for kept in parts_to_keep(unflatten(flat, bucket), like)
    ]
    optim = _changed(state["optim"], lambda number, value: parts_to_keep([value], [in_order[number]])[0])
    return {"theta": parts_to_keep(outer.theta, parameters), "optim": optim, "residuals": residuals}


def load_outer(outer: OuterStep, kept: Mapping[str, Any], parameters: Sequence[Tensor]) -> None:
    """Restore what `outer_to_keep` told."""
    if cut_by_torch(parameters):
        theta = [part_of(value) for value in kept["theta"]]
        owed = iter(part_of(value) for value in kept["residuals"])
        residuals = (
            [flatten([next(owed) for _ in bucket]) for bucket in outer.plan] if kept["residuals"] else []
        )
        optim = _changed(kept["optim"], lambda number, value: part_of(value))
        flats = [flatten([theta[index] for index in bucket]) for bucket in outer.plan]
        kept = {"theta": flats, "optim": optim, "residuals": residuals}
    outer.load_state_dict(kept)


def _bucketed(outer: OuterStep, parameters: Sequence[Tensor]) -> list[list[Tensor]]:
    return [[parameters[index] for index in bucket] for bucket in outer.plan]


def _changed(optim: Mapping[str, Any], change: Callable[[int, Tensor], Tensor]) -> dict[str, Any]:
    """An optimizer's `state_dict` with other tensors; numbers of steps, which have no dimensions, stay."""
    states = {
        number: {
            name: change(number, value) if isinstance(value, Tensor) and value.dim() else value
            for name, value in of_parameter.items()
        }
        for number, of_parameter in optim["state"].items()
    }
    return {**optim, "state": states}
