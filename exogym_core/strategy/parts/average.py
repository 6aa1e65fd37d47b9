"""Averages over ranks: plain, encoded, or robust, in steps that are awaited at once or while training continues.

Bytes charged are the bytes sent.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Self, TypeVar

import torch
from torch import Tensor

from exogym_core.strategy.options import Options, flag, option
from exogym_core.strategy.parts.codecs import Codec, codec_named
from exogym_core.strategy.parts.flat import plan_buckets
from netsim.errors import InputError, about_option, unknown_name
from netsim.units import parse_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

    from exogym_core.communicator.base import Communicator, Handle
    from exogym_core.strategy.base import Strategy
    from exogym_core.strategy.participation.site import Site

__all__ = [
    "AGGREGATES",
    "Averaging",
    "Buckets",
    "Flight",
    "RoundAveraging",
    "Steps",
    "counted",
    "decoded",
    "gathering",
    "served_mean",
]

T = TypeVar("T")

Steps = Generator["Handle[Any]", Any, T]
"""An exchange as a generator: it yields each posted call, receives that call's value, and returns the result."""


class Flight(Generic[T]):
    """An exchange under way: its first call is posted at once, each later one when its inputs have arrived.

    Args:
        steps: the exchange.
        comm: a communicator of this rank, if the flight may be in a checkpoint; the owner of the values sent begins it
            again.
        calls: of a flight before a restart: they are repeated.

    Attributes:
        calls: numbers of the calls posted, step by step: what a checkpoint keeps besides the values sent.
    """

    def __init__(
        self, steps: Steps[T], comm: Communicator | None = None, calls: Sequence[Sequence[int]] = ()
    ) -> None:
        self._steps = steps
        self._results: list[T] = []
        self._waits_for: Handle[Any] | None = None
        self.calls: list[list[int]] = []
        self._comm, self._again = comm, list(calls)
        self._go_on(None)
        while self._again and self._waits_for is not None:
            self._go_on(self._waits_for.wait())

    def _go_on(self, value: Any) -> None:
        comm, again = self._comm, self._again
        noting: AbstractContextManager[list[int]] = nullcontext([])
        if comm is not None:
            noting = comm.calls_again(again.pop(0)) if again else comm.noting_calls()
        with noting as noted:
            try:
                self._waits_for = self._steps.send(value)
            except StopIteration as end:
                self._waits_for = None
                self._results.append(end.value)
        if comm is not None:
            self.calls.append(list(noted))

    def wait(self) -> T:
        """Wait for posted calls, post the remaining ones, and return the result."""
        while self._waits_for is not None:
            self._go_on(self._waits_for.wait())
        return self._results[0]

    def go_on(self) -> None:
        """Post the next call if its inputs have arrived; never waits."""
        while self._waits_for is not None and self._waits_for.is_completed():
            self._go_on(self._waits_for.wait())


def counted(comm: Communicator, steps: Steps[T], payload_bytes: int) -> Steps[T]:
    """`steps`, whose calls count together as `payload_bytes` in `traffic.payload_bytes`."""
    value = None
    while True:
        with comm.counted_as(payload_bytes):
            try:
                posted = steps.send(value)
            except StopIteration as end:
                return end.value  # type: ignore[no-any-return]
        payload_bytes = 0
        value = yield posted


def gathering(comm: Communicator, message: Tensor) -> Steps[list[Tensor]]:
    """Gather all ranks' messages in rank order, by one all-gather: `n - 1` times a message leaves a rank."""
    if comm.world_size == 1:
        return [message]
    messages: list[Tensor] = yield comm.all_gather(message, async_op=True)
    return messages


def decoded(codec: Codec, messages: list[Tensor], like: Tensor) -> Iterator[Tensor]:
    """Values of each message, one at a time, in the dtype of `like`, a flat tensor of the same size."""
    for message in messages:
        yield codec.decode(message, len(like)).to(like.dtype)


def served_mean(
    comm: Communicator,
    flat: Tensor,
    codec: Codec,
    error: Tensor | None = None,
    server_error: Tensor | None = None,
) -> Tensor:
    """The encoded mean of encoded values, by ranks that each serve one part; equal on all ranks.

    Every rank sends part j of `flat` to rank j, which averages the parts in rank order and sends the encoded
    mean to all: `2 (n - 1) / n` times the encoded bytes of `flat` a rank.

    Args:
        comm: the ranks.
        flat: this rank's values; they stay as they are.
        codec: both ways.
        error: rounding error of this rank's earlier values: added, and replaced.
        server_error: the same for means that this rank has encoded, as long as the part that it serves.

    References:
        Tang et al., 1-bit Adam, arXiv 2102.02888, algorithm 1, lines 8 to 12.
    """
    parts = (flat if error is None else flat + error).tensor_split(comm.world_size)
    lost = _parts_of(error, comm.world_size)
    steps = direct(comm, parts, codec, lost, server_error)
    means = Flight(_counted_parts(comm, steps, codec, parts)).wait()
    pairs = zip(means, parts, strict=True)
    return torch.cat([codec.decode(each, len(part)).to(flat.dtype) for each, part in pairs])


def _counted_parts(comm: Communicator, steps: Steps[T], codec: Codec, parts: Parts) -> Steps[T]:
    is_sent = comm.world_size > 1
    return counted(comm, steps, is_sent * sum(codec.encoded_bytes(len(part)) for part in parts))


Parts = tuple[Tensor, ...]
Lost = Sequence[Tensor | None]


def _summed(codec: Codec, messages: Sequence[Tensor], num_values: int) -> Tensor:
    """The sum of decoded messages, in their order, in fp32."""
    total = codec.decode(messages[0], num_values)
    for message in messages[1:]:
        total += codec.decode(message, num_values)
    return total


def _encoded(codec: Codec, values: Tensor, lost: Tensor | None, times: int = 1) -> Tensor:
    """Encode `values`; the rounding error, `times` over, is added to `lost`."""
    message = codec.encode(values)
    if lost is not None:
        lost += times * (values - codec.decode(message, len(values)))
    return message


def _all_encoded(codec: Codec, parts: Parts, lost: Lost) -> list[Tensor]:
    return [_encoded(codec, part, each) for part, each in zip(parts, lost, strict=True)]


def _parts_of(residual: Tensor | None, num_ranks: int) -> Lost:
    """Zeroed buffers for the rounding error of each part; None if it is not kept."""
    return [None] * num_ranks if residual is None else residual.zero_().tensor_split(num_ranks)


def direct(
    comm: Communicator, parts: Parts, codec: Codec, lost: Lost, owed: Tensor | None = None
) -> Steps[list[Tensor]]:
    """Part j goes to rank j, which decodes, sums in rank order, encodes the mean and sends it to all.

    `owed`, if given, has errors of means that this rank has encoded before: they are added, and replaced.
    """
    num_ranks, rank = comm.world_size, comm.rank
    messages = _all_encoded(codec, parts, lost)
    sizes = [(codec.encoded_bytes(len(part)),) for part in parts]
    received = yield comm.all_to_all(messages, async_op=True, shapes=[sizes[rank]] * num_ranks)
    total = _summed(codec, received, len(parts[rank]))
    if owed is None:
        mean = _encoded(codec, total / num_ranks, lost[rank], num_ranks)
    else:
        values = total / num_ranks + owed
        mean = _encoded(codec, values, owed.zero_())
    means = yield comm.all_to_all([mean] * num_ranks, async_op=True, shapes=sizes)
    return list(means)


def ring(comm: Communicator, parts: Parts, codec: Codec, lost: Lost) -> Steps[list[Tensor]]:
    """Sums go around a ring and are encoded again at every hop, then the means do: the bytes of a plain ring."""
    num_ranks, rank = comm.world_size, comm.rank

    def passed_on(message: Tensor, index: int) -> Steps[Tensor]:
        """Part `index` from the rank before, while `message` goes to the next one."""
        incoming = message.new_empty(codec.encoded_bytes(len(parts[index])))
        sent = comm.isend(message, (rank + 1) % num_ranks)
        received: Tensor = yield comm.irecv(incoming, (rank - 1) % num_ranks)
        yield sent
        return received

    total, message = parts[rank], _encoded(codec, parts[rank - 1], lost[rank - 1])
    for hop in range(2, num_ranks + 1):
        index = (rank - hop) % num_ranks
        received = yield from passed_on(message, index)
        total = parts[index] + codec.decode(received, len(parts[index]))
        if hop < num_ranks:
            message = _encoded(codec, total, lost[index])
    means = {rank: _encoded(codec, total / num_ranks, lost[rank], num_ranks)}
    for hop in range(1, num_ranks):
        index = (rank - hop) % num_ranks
        means[index] = yield from passed_on(means[(index + 1) % num_ranks], index)
    return [means[index] for index in range(num_ranks)]


_MEANS: Mapping[str, Callable[[Communicator, Parts, Codec, Lost], Steps[list[Tensor]]]] = {
    "direct": direct,
    "ring": ring,
}
"""Name -> the encoded mean of each part, equal on all ranks, given one part per rank.

Rounding errors are added to `lost`, one tensor a part: of this rank's own values, of sums that it passed
on, and of the means that it made (times the number of ranks, so that the next mean is larger by just that).
"""


#: Ways to combine the ranks' values, of which the robust ones need all values on all ranks.
ROBUST = ("median", "trimmed-mean")
AGGREGATES = ("mean", *ROBUST)


class Averaging(Options):
    """Average of flat tensors.

    Args:
        codec: how values travel, by its name in CODECS: "fp32" (as they are), "fp16", "int8", ...; also
            `hivemind_compression` and `grad_compression`.
        error_feedback: the codec's rounding error is added to the next values sent.
        aggregate: of the ranks' values: "mean", or "median" or "trimmed-mean" against ranks that send nonsense;
            these two send `n - 1` times the encoded bytes.

    Attributes:
        aggregates: names that `aggregate` takes.
    """

    aggregates: ClassVar[tuple[str, ...]] = AGGREGATES

    codec: Codec | None = option(None, lambda where, name, value: codec_named(value))
    error_feedback: bool = option(default=False, check=flag)
    aggregate: str = option("mean")

    def check(self, where: str) -> None:
        """Refuse options that contradict each other."""
        if self.aggregate not in self.aggregates:
            with about_option("aggregate"):
                raise unknown_name("aggregate", str(self.aggregate), self.aggregates)
        if self.error_feedback and (self.codec is None or self.aggregate in ROBUST):
            raise InputError(
                "error_feedback=True: needs a codec that rounds, and aggregate='mean'",
                about=("error_feedback", "aggregate"),
            )

    def averaging(self) -> Averaging:
        """Only these options, without those of a subclass."""
        return Averaging(self.codec, self.error_feedback, self.aggregate)

    def charged(self, strategy: Strategy) -> Self:
        """Copy whose codec's work takes virtual time where the strategy's does.

        Raises:
            InputError: there are speeds, but none for this codec.
        """
        return self if self.codec is None else replace(self, codec=strategy.charged(self.codec))

    def residual(self, bucket: Sequence[Tensor]) -> Tensor | None:
        """Zeroed flat buffer for the rounding errors of a bucket's values, if they are kept."""
        return bucket[0].new_zeros(sum(each.numel() for each in bucket)) if self.error_feedback else None

    def steps(
        self, comm: Communicator, flat: Tensor, residual: Tensor | None = None, *, waits: bool = False
    ) -> Steps[Tensor]:
        """Average `flat` (1-D) over all ranks of `comm`, in place; all ranks end with the same bits.

        Where the caller `waits` at once, a plain average is a blocking call, which sends no copy.
        """
        if comm.world_size == 1:
            return flat
        codec = None if self.codec is None else self.codec.on(flat.device)
        if self.aggregate in ROBUST:
            return (yield from _robust_steps(comm, flat, self.aggregate, codec))
        if codec is not None:
            return (yield from _encoded_steps(comm, flat, codec, residual))
        call = comm.all_reduce(flat, "avg", async_op=not waits)
        mean: Tensor = call if waits else (yield call)
        return mean


def _bucket_size(where: str, name: str, value: object) -> str | int:
    """`value` as "one", "parameter" or a size in bytes, which may be a text with a unit."""
    if value in ("one", "parameter"):
        return value
    try:
        size = parse_bytes(value)
    except InputError:
        size = 0
    if size < 1:
        raise InputError(
            f"{where}: {name}={value!r} must be one, parameter, or a size in bytes such as 25 MB"
        )
    return size


_STORE = "store"


def _exchange(where: str, name: str, value: object) -> str | Mapping[str, Any]:
    """`value` as "direct", "store", or a mapping with names of a store and its relays."""
    if (
        isinstance(value, Mapping)
        and value.get("name") == _STORE
        and not set(value) - {"name", "host", "relays"}
    ):
        host, relays = value.get("host", ""), value.get("relays", [])
        if isinstance(relays, list | tuple) and all(isinstance(each, str) for each in (host, *relays)):
            return value
    elif value in ("direct", _STORE):
        return str(value)
    raise InputError(
        f"{where}: {name}={value!r} must be direct, store, or a mapping such as "
        "{name: store, host: HOST, relays: [HOST]}"
    )


class Buckets(Options):
    """Route of a round's values: their buckets, each a call of its own, and the store that they go through, if any.

    Args:
        buckets: "one" (all values in a call), "parameter" (a call for each parameter, as torchft and most scripts send
            them), or the size at which a bucket is closed, such as "25 MB" (as in DDP, but in the model's order).
            Values of different dtypes or devices never share a call.
        exchange: "direct" (members send to each other, by the run's `collectives`), or "store": each uploads its values
            once to the object store of the topology, and downloads those of all others; `{name: store, host: r2,
            relays: [eu]}` names it, and relays from which those that are nearest to them download.
    """

    buckets: str | int = option("one", _bucket_size)
    exchange: str | Mapping[str, Any] = option("direct", _exchange)

    def through(self, comm: Communicator) -> Communicator:
        """Communicator of the ranks of `comm` by which the values travel.

        Raises:
            InputError: through a store that the topology does not have, or a real transport.
        """
        if self.exchange == "direct":
            return comm
        named = self.exchange if isinstance(self.exchange, Mapping) else {}
        return comm.through_store((named.get("host", ""), *named.get("relays", ())))

    def plan(self, tensors: Sequence[Tensor]) -> list[list[int]]:
        """Indices of `tensors` in buckets."""
        sizes = {"one": None, "parameter": 1}
        return plan_buckets(tensors, sizes[self.buckets] if isinstance(self.buckets, str) else self.buckets)


class RoundAveraging(Averaging, Buckets):
    """Average of a round's parameters or pseudo-gradients, in one call or in several that are under way together."""

    def charged(self, strategy: Strategy) -> Self:
        """As `Averaging.charged`; refuses a store that is not there."""
        if self.exchange != "direct":
            self.through(strategy.comm)
        return super().charged(strategy)

    def steps(
        self, comm: Communicator, flat: Tensor, residual: Tensor | None = None, *, waits: bool = False
    ) -> Steps[Tensor]:
        """As `Averaging.steps`, directly or through a store."""
        through = comm if self.exchange == "direct" else self.through(comm)
        return super().steps(through, flat, residual, waits=waits)

    def weigh(self, flats: Sequence[Tensor], weight: float) -> None:
        """Multiply `flats` by this rank's weight, where it counts: in a median each rank counts once."""
        if self.aggregate == "mean":
            for flat in flats:
                flat *= weight

    def means(
        self,
        site: Site,
        flats: Sequence[Tensor],
        residuals: Sequence[Tensor | None],
        weight: float = 1.0,
    ) -> list[Tensor]:
        """Replace `flats`, a bucket each, by their means over sites, this one's times `weight`; calls overlap."""
        if weight != 1.0:
            self.weigh(flats, weight)
        if len(flats) == 1 and site.inside is None:  # no other call to overlap with
            return [Flight(self.steps(site.between, flats[0], residuals[0], waits=True)).wait()]
        flights = [Flight(site.steps(self, *each)) for each in zip(flats, residuals, strict=True)]
        return [flight.wait() for flight in flights]


def _encoded_steps(comm: Communicator, flat: Tensor, codec: Codec, residual: Tensor | None) -> Steps[Tensor]:
    """The mean of encoded values, by the algorithm that the communicator names.

    Usually each goes to one rank, which decodes, sums in rank order in fp32, divides, encodes again and sends the mean
    to all. Over all ranks that is 2(n - 1) times the encoded size, as in a ring. Through a store every rank encodes its
    values once, and decodes all.

    `residual`, shaped like `flat`, has the rounding errors of earlier calls: it is added, and replaced by those of
    this call, both of this rank's values and, in the part that it sums up, of the mean (times n, so that the
    next mean is larger by just that). Seide et al., 1-Bit Stochastic Gradient Descent, Interspeech 2014; Tang
    et al., DoubleSqueeze, arXiv 1905.05957.
    """
    num_ranks = comm.world_size
    if residual is not None:
        flat += residual
    if comm.averaging_algorithm == _STORE:  # of whole values, which are encoded once
        message = _encoded(codec, flat, None if residual is None else residual.zero_())
        messages = yield from gathering(comm, message)
        return flat.copy_(_summed(codec, messages, len(flat)) / num_ranks)
    parts = flat.tensor_split(num_ranks)
    steps = _MEANS[comm.averaging_algorithm](comm, parts, codec, _parts_of(residual, num_ranks))
    means = yield from _counted_parts(comm, steps, codec, parts)
    if residual is not None:
        residual.nan_to_num_(0.0, 0.0, 0.0)  # non-finite errors are dropped
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
    received = yield comm.all_gather(flat if codec is None else codec.encode(flat), async_op=True)
    values = torch.stack(received if codec is None else list(decoded(codec, received, flat)))
    drop = (num_ranks - 1) // 2 if aggregate == "median" else max(num_ranks // 4, int(num_ranks > 2))
    kept = values.sort(dim=0).values[drop : num_ranks - drop]
    return flat.copy_(kept.mean(dim=0))
