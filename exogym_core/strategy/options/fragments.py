"""How a model's parameters are cut into fragments."""

from __future__ import annotations

from typing import TYPE_CHECKING

from netsim.files.errors import InputError, unknown_names

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["PATTERNS", "fragments_of", "layers_of"]

PATTERNS = ("strided", "sequential")


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
    names: Sequence[str],
    num_fragments: int | None,
    fragments: Sequence[str | Sequence[str]] | None,
    pattern: str,
    where: str,
) -> list[list[int]]:
    """Indices of the parameters called `names`, by fragment, each in the model's order; see `StreamingOptions`.

    Raises:
        InputError: there are fewer layers than fragments, or a fragment has no parameter.
    """
    if fragments is not None:
        return _named(names, fragments, where)
    layers = layers_of(names)
    count = num_fragments or max(1, len(layers) // 3)
    if count > len(layers):
        raise InputError(
            f"{where}: num_fragments={count}, but the model has {len(layers)} layers; cut it into as many at most"
        )
    if pattern == "strided":
        cut = [layers[first::count] for first in range(count)]
    else:
        cut = [layers[p * len(layers) // count : (p + 1) * len(layers) // count] for p in range(count)]
    return [sorted(index for layer in fragment for index in layer) for fragment in cut]


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
