"""Many tensors as a few flat ones, so that a model travels in buckets and never parameter by parameter."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from exogym_core.plain import decode, encode

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from exogym_core.communicator.base import Communicator

__all__ = [
    "Layout",
    "buckets",
    "flatten",
    "in_buckets",
    "pack_named",
    "pack_plain",
    "plan_buckets",
    "unflatten",
    "unpack_named",
    "unpack_plain",
    "widened",
    "write_back",
]


def plan_buckets(
    tensors: Sequence[Tensor], bucket_bytes: int | None = None, first_bucket_bytes: int | None = None
) -> list[list[int]]:
    """Indices of `tensors` in buckets of one dtype and device each, in the order given.

    Without `bucket_bytes` there is one bucket per dtype and device. With it, a bucket is closed as soon as
    it holds that many bytes, as in torch's DDP; `first_bucket_bytes` is the limit of the first one.

    >>> plan_buckets([torch.zeros(3), torch.zeros(2, dtype=torch.float64), torch.zeros(4)])
    [[0, 2], [1]]
    """
    buckets: list[list[int]] = []
    filling: dict[tuple[torch.dtype, torch.device], tuple[list[int], int]] = {}
    for index, tensor in enumerate(tensors):
        key = (tensor.dtype, tensor.device)
        if key not in filling:
            filling[key] = ([], 0)
            buckets.append(filling[key][0])
        bucket, num_bytes = filling[key]
        bucket.append(index)
        num_bytes += tensor.numel() * tensor.element_size()
        filling[key] = (bucket, num_bytes)
        limit = first_bucket_bytes if bucket is buckets[0] and first_bucket_bytes else bucket_bytes
        if limit is not None and num_bytes >= limit:
            del filling[key]
    return buckets


def buckets(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """`tensors` in buckets of one dtype and device each."""
    return [[tensors[index] for index in bucket] for bucket in plan_buckets(tensors)]


def flatten(tensors: Sequence[Tensor], comm: Communicator | None = None) -> Tensor:
    """Copy the values of `tensors`, which share dtype and device, into a new flat tensor.

    What `comm` will send is in its memory, see `Communicator.room`.
    """
    if tensors[0].is_meta:  # a model's tensors are thousands, and without values only their size counts
        return tensors[0].new_empty(sum(tensor.numel() for tensor in tensors))
    room = None if comm is None else comm.room(tensors)
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors], out=room)


def unflatten(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Views of `flat` in the shapes of `like`, in order."""
    pieces = flat.split_with_sizes([tensor.numel() for tensor in like])
    return [piece.view(tensor.shape) for piece, tensor in zip(pieces, like, strict=True)]


@torch.no_grad()
def write_back(flat: Tensor, tensors: Sequence[Tensor]) -> None:
    """Copy `flat`'s values into `tensors`; on the meta device there are none."""
    if flat.is_meta:
        return
    for tensor, piece in zip(tensors, unflatten(flat, tensors), strict=True):
        tensor.copy_(piece)


def in_buckets(tensors: Sequence[Tensor], change: Callable[[Tensor], Tensor]) -> None:
    """Set `tensors` to what `change` makes of them, a flat bucket at a time."""
    for bucket in buckets(tensors):
        write_back(change(flatten(bucket)), bucket)


Layout = list[list[tuple[str, list[int]]]]
"""For each flat tensor the names and shapes of its parts, in order."""


def pack_named(named: Mapping[str, Tensor], comm: Communicator | None = None) -> tuple[Layout, list[Tensor]]:
    """Copy named tensors into one new flat tensor a dtype, on the CPU, in the order given, for `comm` to deposit.

    >>> pack_named({"a": torch.ones(2), "n": torch.tensor(3), "b": torch.zeros(1, 1)})
    ([[('a', [2]), ('b', [1, 1])], [('n', [])]], [tensor([1., 1., 0.]), tensor([3])])
    """
    members: dict[torch.dtype, list[str]] = {}
    for name, value in named.items():
        members.setdefault(value.dtype, []).append(name)
    layout = [[(name, list(named[name].shape)) for name in names] for names in members.values()]
    flats = [flatten([named[name].cpu() for name in names], comm) for names in members.values()]
    return layout, flats


def unpack_named(layout: Layout, flats: Sequence[Tensor]) -> dict[str, Tensor]:
    """Undo `pack_named`: named views of the flat tensors."""
    named: dict[str, Tensor] = {}
    for members, flat in zip(layout, flats, strict=True):
        start = 0
        for name, shape in members:
            size = torch.Size(shape).numel()
            named[name] = flat[start : start + size].view(tuple(shape))
            start += size
    return named


def pack_plain(value: Any) -> list[Tensor]:
    """Plain value such as an optimizer's state as flat tensors: its form as text, then the tensors in it."""
    tensors: dict[str, Tensor] = {}
    form = json.dumps(encode(value, tensors), separators=(",", ":")).encode()
    return [torch.frombuffer(bytearray(form), dtype=torch.uint8), *tensors.values()]


def unpack_plain(packed: Sequence[Tensor]) -> Any:
    """Plain value whose form and tensors `pack_plain` made."""
    form, *tensors = packed
    return decode(json.loads(bytes(form.tolist())), {str(n): tensor for n, tensor in enumerate(tensors)})


def widened(tensor: Tensor) -> Tensor:
    """`tensor` in fp32 at least."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))
