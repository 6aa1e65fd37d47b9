"""Fragments of a model: how parameters are cut into them, and how displacements of one are merged."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from netsim.errors import InputError, unknown_names

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from exogym_core.strategy.parts.rounds import FragmentOptions

__all__ = ["embeddings_of", "fragments_of", "layers_of", "merged", "packed", "second_order"]


def layers_of(names: Sequence[str]) -> list[list[int]]:
    """Indices of parameters by layer: the module up to the first number in its name, or the one that owns them.

    >>> layers_of(["embed.weight", "blocks.0.a.weight", "blocks.0.b.weight", "blocks.1.a.weight", "scale"])
    [[0], [1, 2], [3], [4]]
    """
    layers: dict[str, list[int]] = {}
    for index, name in enumerate(names):
        parts = name.split(".")
        number = next((at for at, part in enumerate(parts) if part.isdecimal()), None)
        key = ".".join(parts[:-1] if number is None else parts[: number + 1]) or name
        layers.setdefault(key, []).append(index)
    return list(layers.values())


def fragments_of(
    names: Sequence[str], options: FragmentOptions, num_steps: int, where: str
) -> list[list[int]]:
    """Indices of the parameters called `names`, by fragment, each in the model's order.

    Raises:
        InputError: there are fewer layers than fragments, a fragment has no parameter, or there are more than H.
    """
    named = options.fragments
    cut = _by_layer(names, options, where) if named is None else _named(names, named, where)
    if len(cut) > num_steps:
        raise InputError(f"{where}: {len(cut)} fragments need an H of as many steps at least")
    return cut


def _by_layer(names: Sequence[str], options: FragmentOptions, where: str) -> list[list[int]]:
    layers = layers_of(names)
    count = options.num_fragments or max(1, len(layers) // 3)
    if count > len(layers):
        raise InputError(
            f"{where}: num_fragments={count}, but the model has {len(layers)} layers; cut it into as many at most"
        )
    if options.pattern == "strided":
        cut = [layers[first::count] for first in range(count)]
    else:
        cut = [layers[p * len(layers) // count : (p + 1) * len(layers) // count] for p in range(count)]
    return [sorted(index for layer in fragment for index in layer) for fragment in cut]


def packed(sizes: Sequence[int], count: int, apart: Collection[int] = ()) -> list[list[int]]:
    """Indices of tensors of these sizes in `count` fragments of about equal size, fewer where there are fewer tensors.

    Greedily: the largest tensor left goes to the smallest fragment so far. Those `apart` share one of their own, if
    there are two fragments at least.

    >>> packed([4, 1, 3, 2], 2)
    [[0, 1], [2, 3]]
    >>> packed([4, 1, 3, 2], 3, apart=[0, 1])
    [[0, 1], [2], [3]]
    """
    among = [index for index in range(len(sizes)) if index not in apart or count == 1]
    cut = [[index for index in range(len(sizes)) if index in apart]] if len(among) < len(sizes) else []
    bins: list[list[int]] = [[] for _ in range(min(count - len(cut), len(among)))]
    for index in sorted(among, key=lambda index: -sizes[index]):
        smallest = min(bins, key=lambda members: sum(sizes[other] for other in members))
        smallest.append(index)
    return sorted(sorted(members) for members in [*cut, *bins])


def _named(names: Sequence[str], fragments: Sequence[str | Sequence[str]], where: str) -> list[list[int]]:
    left, cut = dict.fromkeys(range(len(names))), []
    for fragment in fragments:
        modules = [fragment] if isinstance(fragment, str) else list(fragment)
        members = [i for i in left if any(f"{names[i]}.".startswith(f"{module}.") for module in modules)]
        if not members:
            raise unknown_names(
                f"fragment of {where}", modules, {name.rpartition(".")[0] or name for name in names}
            )
        for index in members:
            del left[index]
        cut.append(members)
    return [*cut, list(left)] if left else cut


def embeddings_of(model: nn.Module, parameters: Sequence[Tensor]) -> set[int]:
    """Indices of `parameters` that are embedding tables of `model`."""
    tables = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    return {index for index, parameter in enumerate(parameters) if id(parameter) in tables}


def merged(parts: Sequence[Tensor], weights: Sequence[float], *, by_direction: bool) -> Tensor:
    """Weighted mean of several tensors of one shape.

    With `by_direction` it is as long as they are in the mean, along the mean of their directions; displacements that
    disagree then do not shrink each other. Zero where directions cancel.

    >>> parts = [torch.tensor([2.0, 0.0]), torch.tensor([0.0, 4.0])]
    >>> merged(parts, [1, 1], by_direction=False)
    tensor([1., 2.])
    >>> round(float(merged(parts, [1, 1], by_direction=True).norm()), 6)
    3.0
    """
    total = sum(weights)
    if not by_direction:
        return _sum(parts, [weight / total for weight in weights])
    lengths = [float(part.norm()) for part in parts]
    units = [part / length if length else part for part, length in zip(parts, lengths, strict=True)]
    direction = _sum(units, weights)
    length = sum(weight * each for weight, each in zip(weights, lengths, strict=True)) / total
    norm = float(direction.norm())
    return direction * (length / norm) if norm else direction


def second_order(trained: Tensor, apart: Tensor, strength: float, per_steps: int | None) -> Tensor:
    """Displacement `trained` of a tensor, corrected to second order for a start `apart` from the present one.

    `t + lambda t * t * D` with t the training of some steps, lambda the `strength` over `per_steps`; where these are
    None the correction is as long as `strength` times t.
    """
    wide = torch.promote_types(trained.dtype, torch.float32)
    moved = trained.to(wide)
    term = moved * moved * apart.to(wide)
    if per_steps is None:
        term = term / term.norm().clamp(min=torch.finfo(wide).tiny) * (strength * moved.norm())
    else:
        term = term * (strength / per_steps)
    return trained + term.to(trained.dtype)


def _sum(parts: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    result = torch.zeros_like(parts[0])
    for part, weight in zip(parts, weights, strict=True):
        result.add_(part, alpha=weight)
    return result
