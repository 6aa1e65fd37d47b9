"""Tables of plans: models by name, choices that save memory, published shares of devices' peak; without torch."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from netsim.errors import InputError
from netsim.files.documents import load_document
from netsim.topology.devices import device_name

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = [
    "LONGEST_SEQUENCE",
    "MEMORY_CHOICES",
    "PLANNED_MODELS",
    "PublishedShare",
    "listed_models",
    "published_share",
]


def _table(name: str) -> Any:
    return load_document(Path(__file__).with_name(name)).data


PLANNED_MODELS: dict[str, dict[str, int]] = _table("planned_models.yaml")


def listed_models() -> list[tuple[str, str]]:
    """Names and dimensions for `netgym list`."""
    return [
        (name, f"{sizes['num_layers']} layers of width {sizes['width']}, for netgym plan")
        for name, sizes in PLANNED_MODELS.items()
    ]


#: Most tokens of a sequence: more than any model takes.
LONGEST_SEQUENCE = 1 << 24

#: Choices by which a worker keeps less in memory: weights, gradients and optimizer states in two bytes a number;
#: optimizer states in one; optimizer and outer states in the machine's memory; activations but the layers' inputs
#: computed again.
MEMORY_CHOICES = ("bf16", "8bit", "offload", "checkpointing")

#: Model FLOP utilisation of published trainings, by device.
_SHARES: Mapping[str, Sequence[Mapping[str, Any]]] = _table("published_mfu.yaml")
_ALIKE = 1.6  # times the parameters: trainings of models up to so much smaller or larger stand for a model


class PublishedShare(NamedTuple):
    """Share of the peak of published trainings: their median, least and most, and a text with their sources."""

    median: float
    least: float
    most: float
    text: str


def published_share(device: str | None, num_parameters: int) -> PublishedShare:
    """Share of `device`'s peak that trainings of models of nearly this size reached.

    Raises:
        InputError: none is listed for this device, or for this size on it.

    >>> published_share("a100", 8_000_000_000).median
    0.574
    """
    use = "give the share instead, such as --utilisation 0.4"
    name = None if device is None else device_name(device)
    if name is None or name not in _SHARES:
        raise InputError(
            f"plan: --utilisation published: no published training on {device or 'hosts without a device'} is listed, "
            f"only on {', '.join(_SHARES)}: {use}"
        )
    rows = _SHARES[name]
    alike = [row for row in rows if 1 / _ALIKE <= row["parameters"] / num_parameters <= _ALIKE]
    if not alike:
        sizes = ", ".join(f"{row['parameters'] / 1e9:.3g}B" for row in rows)
        raise InputError(
            f"plan: --utilisation published: no published training of {num_parameters / 1e9:.3g}B parameters on {name} "
            f"is listed, only of {sizes}: {use}"
        )
    shares = [share for row in alike for share in row["shares"]]
    median, least, most = round(statistics.median(shares), 4), min(shares), max(shares)
    sizes = " and ".join(f"{row['parameters'] / 1e9:.3g}B ({row['source']})" for row in alike)
    text = f"{name} {median:.1%} ({least:.1%} to {most:.1%} in {len(shares)} trainings of {sizes})"
    return PublishedShare(median, least, most, text)
