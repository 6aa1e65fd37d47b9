"""A model's parameters and buffers as a few flat tensors, and back.

    layout, flats = pack(dict(model.named_parameters()))    # one flat tensor a dtype, copies on the CPU
    named = unpack(layout, flats)                           # name -> view of it

A whole state is a model's `state_dict` and the buffers that this leaves out.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from exogym_core.strategy.parts.flat import flatten, write_back

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from exogym_core.communicator.base import Communicator

__all__ = [
    "Layout",
    "broadcast_state",
    "cpu_state",
    "load_named",
    "load_whole_state",
    "named_tensors",
    "pack",
    "passing_buffers",
    "unpack",
    "whole_state",
]

Layout = list[list[tuple[str, list[int]]]]
"""For each flat tensor the names and shapes of what it holds, in order."""


def pack(named: Mapping[str, Tensor]) -> tuple[Layout, list[Tensor]]:
    """All tensors in one new flat tensor a dtype, on the CPU, in the order given.

    >>> pack({"a": torch.ones(2), "n": torch.tensor(3), "b": torch.zeros(1, 1)})
    ([[('a', [2]), ('b', [1, 1])], [('n', [])]], [tensor([1., 1., 0.]), tensor([3])])
    """
    members: dict[torch.dtype, list[str]] = {}
    for name, value in named.items():
        members.setdefault(value.dtype, []).append(name)
    layout = [[(name, list(named[name].shape)) for name in names] for names in members.values()]
    flats = [flatten([named[name].cpu() for name in names]) for names in members.values()]
    return layout, flats


def unpack(layout: Layout, flats: Sequence[Tensor]) -> dict[str, Tensor]:
    """What `pack` was given, as views of the flat tensors."""
    named: dict[str, Tensor] = {}
    for members, flat in zip(layout, flats, strict=True):
        start = 0
        for name, shape in members:
            size = torch.Size(shape).numel()
            named[name] = flat[start : start + size].view(tuple(shape))
            start += size
    return named


def named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """A model's parameters and buffers as they are now: a buffer may be another tensor after a forward pass."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


@torch.no_grad()
def load_named(model: nn.Module, named: Mapping[str, Tensor]) -> None:
    """Give a model these values; buffers also where their shapes have changed."""
    own = named_tensors(model)
    for name, value in named.items():
        if own[name].shape == value.shape:
            own[name].copy_(value)
        else:
            home, _, attribute = name.rpartition(".")
            device = own[name].device
            setattr(model.get_submodule(home), attribute, value.to(device, own[name].dtype, copy=True))


def broadcast_state(model: nn.Module, comm: Communicator) -> None:
    """Make every rank's parameters and buffers rank 0's, one message a dtype and device."""
    members: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for value in named_tensors(model).values():
        members.setdefault((value.dtype, value.device), []).append(value)
    for tensors in members.values():
        write_back(comm.broadcast(flatten(tensors)), tensors)


def passing_buffers(model: nn.Module) -> dict[str, Tensor]:
    """The buffers that the model's own state_dict leaves out."""
    kept = model.state_dict().keys()
    return {name: buffer for name, buffer in model.named_buffers() if name not in kept}


def cpu_state(model: nn.Module) -> dict[str, Any]:
    """A copy of a model's state_dict on the CPU; what is no tensor in it (extra states) is copied too."""
    return {
        name: value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else copy.deepcopy(value)
        for name, value in model.state_dict().items()
    }


def whole_state(model: nn.Module) -> dict[str, Any]:
    """`cpu_state` and the passing buffers, by their names."""
    passing = {name: value.detach().to("cpu", copy=True) for name, value in passing_buffers(model).items()}
    return {**cpu_state(model), **passing}


def load_whole_state(model: nn.Module, state: Mapping[str, Any]) -> None:
    """Give a model what `whole_state` told of another of its kind."""
    passing = passing_buffers(model).keys()
    model.load_state_dict({name: value for name, value in state.items() if name not in passing})
    load_named(model, {name: state[name] for name in passing if name in state})
