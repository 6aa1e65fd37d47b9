"""Averages over ranks, plain, in a codec, or robust. What is sent is what is charged."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from exogym_core.strategy.options.arguments import Options, flag, option
from exogym_core.strategy.parts.charged import charged_codec
from exogym_core.strategy.parts.codecs import Codec, codec_named
from exogym_core.strategy.parts.coded import CARRIERS
from exogym_core.strategy.parts.flat import flatten, plan_buckets, write_back
from exogym_core.strategy.parts.flight import counted, run
from netsim.files.errors import InputError, unknown_name

if TYPE_CHECKING:
    from collections.abc import Sequence

    from exogym_core.communicator.base import Communicator
    from exogym_core.cost.coding import Coding
    from exogym_core.strategy.parts.flight import Steps

__all__ = [
    "AGGREGATES",
    "Averaging",
    "AveragingOptions",
    "encoded_average_bytes",
]

#: What replaces the ranks' values.
AGGREGATES = ("mean", "median", "trimmed-mean")


@dataclass(frozen=True)
class Averaging:
    """How flat tensors are averaged.

    Args:
        codec: what travels; None is the tensors' own dtype.
        aggregate: "mean", or one that a few wrong ranks cannot pull away: "median" or "trimmed-mean".
        error_feedback: what encoding rounds off is added to what is sent next.

    Raises:
        UnknownNameError: no such aggregate.
        InputError: error feedback without a codec, or beside a robust aggregate.
    """

    codec: Codec | None = None
    aggregate: str = "mean"
    error_feedback: bool = False

    def __post_init__(self) -> None:
        if self.aggregate not in AGGREGATES:
            raise unknown_name("aggregate", str(self.aggregate), AGGREGATES)
        if self.error_feedback and (self.codec is None or self.aggregate != "mean"):
            raise InputError("error_feedback=True: needs a codec that rounds, and aggregate='mean'")

    def charged(self, coding: Coding | None, comm: Communicator) -> Averaging:
        """This, at what the codec's work costs on the clock of `comm`; None: nothing.

        Raises:
            InputError: there are speeds, but none for this codec.
        """
        if self.codec is None:
            return self
        return replace(self, codec=charged_codec(comm, coding, self.codec))

    def residual(self, flat: Tensor) -> Tensor | None:
        """Room for what will be rounded off `flat`, if that is kept."""
        return torch.zeros_like(flat) if self.error_feedback else None

    def steps(self, comm: Communicator, flat: Tensor, residual: Tensor | None = None) -> Steps[Tensor]:
        """Average `flat` (1-D) over all ranks of `comm`, in place; all ranks end with the same bits."""
        if comm.world_size == 1:
            return flat
        codec = None if self.codec is None else self.codec.on(flat.device)
        if self.aggregate != "mean":
            return (yield from _robust_steps(comm, flat, self.aggregate, codec))
        if codec is not None:
            return (yield from _encoded_steps(comm, flat, codec, residual))
        mean: Tensor = yield comm.all_reduce(flat, "avg", async_op=True)
        return mean

    def flat(self, comm: Communicator, flat: Tensor, residual: Tensor | None = None) -> Tensor:
        """The same, waited for."""
        return run(self.steps(comm, flat, residual))

    @torch.no_grad()
    def tensors(self, comm: Communicator, tensors: Sequence[Tensor]) -> None:
        """Average `tensors` over all ranks of `comm`, in place, in one bucket per dtype and device."""
        for bucket in plan_buckets(tensors):
            members = [tensors[index] for index in bucket]
            write_back(self.flat(comm, flatten(members)), members)


def _codec(where: str, name: str, value: str | Codec) -> Codec | None:
    return codec_named(value)


@dataclass(frozen=True)
class AveragingOptions(Options):
    """How values are averaged, as users say it.

    Args:
        codec: how values travel, by its name in CODECS: "fp32" (as they are), "fp16", "int8", ...; also
            `hivemind_compression` and `grad_compression`.
        error_feedback: what the codec rounds off is added to what is sent next.
        aggregate: of the ranks' values: "mean", or "median" or "trimmed-mean" against ranks that send nonsense;
            these two send `n - 1` times the encoded bytes.
    """

    codec: Codec | None = option(None, _codec)
    error_feedback: bool = option(default=False, check=flag)
    aggregate: str = option("mean")

    def check(self, where: str) -> None:
        """Refuse what does not go together."""
        super().check(where)
        self.averaging()

    def averaging(self) -> Averaging:
        """What does it."""
        return Averaging(self.codec, self.aggregate, self.error_feedback)


def _encoded_steps(comm: Communicator, flat: Tensor, codec: Codec, residual: Tensor | None) -> Steps[Tensor]:
    """The mean of encoded values: parts go by what the communicator names, of `CARRIERS`.

    Usually each goes to one rank, which decodes, sums in rank order in fp32, divides, encodes again and sends the mean
    to all. Over all ranks that is 2(n - 1) times the encoded size, as in a ring.

    `residual`, like `flat`, is what former calls rounded off: it is added, and replaced by what this call
    rounds off, both of this rank's values and, in the part that it sums up, of the mean (times n, so that the
    next mean is larger by just that). Seide et al., 1-Bit Stochastic Gradient Descent, Interspeech 2014; Tang
    et al., DoubleSqueeze, arXiv 1905.05957.
    """
    num_ranks = comm.world_size
    if residual is not None:
        flat += residual
    parts = flat.tensor_split(num_ranks)
    lost = residual.zero_().tensor_split(num_ranks) if residual is not None else None
    steps = CARRIERS[comm.carrier_of_codes](comm, parts, codec, lost)
    means = yield from counted(comm, steps, encoded_average_bytes(len(flat), num_ranks, codec))
    if residual is not None:
        residual.nan_to_num_(0.0, 0.0, 0.0)  # what was not finite is not owed
    for part, message in zip(parts, means, strict=True):
        part.copy_(codec.decode(message, len(part)))
    return flat


def _robust_steps(comm: Communicator, flat: Tensor, aggregate: str, codec: Codec | None) -> Steps[Tensor]:
    """The median or trimmed mean over all ranks, value by value.

    Of the n values of each coordinate, sorted, the median keeps the middle one or two, the trimmed mean drops
    a quarter (rounded down, but one at least if n > 2) from each end; the rest are averaged. NaN counts as
    the largest value. Every rank sends its encoded values to all others, as no rank's word is taken for the
    result: `n - 1` times their size a rank. Yin et al., Byzantine-Robust Distributed Learning, arXiv
    1803.01498.
    """
    num_ranks = comm.world_size
    if codec is None:
        values = torch.stack((yield comm.all_gather(flat, async_op=True)))
    else:
        received = yield comm.all_gather(codec.encode(flat), async_op=True)
        values = torch.stack([codec.decode(message, len(flat)) for message in received])
    drop = (num_ranks - 1) // 2 if aggregate == "median" else max(num_ranks // 4, int(num_ranks > 2))
    kept = values.sort(dim=0).values[drop : num_ranks - drop]
    return flat.copy_(kept.mean(dim=0))


def encoded_average_bytes(num_values: int, num_ranks: int, codec: Codec) -> int:
    """Encoded size of `num_values` values cut into one part a rank, as `Averaging` sends them.

    >>> from exogym_core.strategy.parts.codecs import Int8Codec
    >>> encoded_average_bytes(10_000, 4, Int8Codec(chunk=1000))
    10048
    """
    small, num_larger = divmod(num_values, num_ranks)
    return num_larger * codec.encoded_bytes(small + 1) + (num_ranks - num_larger) * codec.encoded_bytes(small)
