"""Options of stages, the order in which a stage computes its micro-batches, and the hosts of a chain's ranks."""

from __future__ import annotations

from itertools import accumulate, pairwise, permutations
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

from pydantic import AfterValidator, BeforeValidator, Field, WithJsonSchema, model_validator

from exogym_core.names import shown_value, strategy_name
from netsim.errors import InputError, about_option, unknown_name
from netsim.files.documents import Document
from netsim.files.schemas import Schema, validate_document
from netsim.units import parse_fraction

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from exogym_core.strategy.base import Strategy
    from netsim import Topology

__all__ = ["BoundaryCodecOptions", "StagePass", "Stages", "actions", "hosts_of", "refuse_with_stages"]

_SPLITS = ("flops", "bytes")
_NUMBER = {"anyOf": [{"type": "number"}, {"type": "string"}]}


def _split(value: Any) -> Any:
    if callable(value) or value in _SPLITS:
        return value
    if isinstance(value, str):
        raise unknown_name("split", value, _SPLITS)
    raise InputError(
        f"{shown_value(value)} is no split: write flops or bytes, or pass f(model) -> list of modules"
    )


def _share(value: Any) -> Any:
    return parse_fraction(value) if isinstance(value, str) and value.rstrip().endswith("%") else value


class BoundaryCodecOptions(Schema):
    """Codec of what crosses from stage to stage: a name, or a mapping.

    Attributes:
        name: a codec such as `bf16` or `int8`; `top-k`: the largest values, with error feedback; `subspace`:
            coordinates in a fixed subspace of the features.
        share: of the values that `top-k` sends.
        width: of the subspace.
        seed: of the subspace.
        keep: patterns of the names of parameters that are kept in the subspace; `true`: the model's `stream_writers`.
    """

    name: str
    share: Annotated[float, Field(gt=0, le=1), BeforeValidator(_share), WithJsonSchema(_NUMBER)] = 0.1
    width: Annotated[int, Field(ge=1)] | None = None
    seed: Annotated[int, Field(ge=0)] = 0
    keep: bool | list[str] = False

    @model_validator(mode="before")
    @classmethod
    def _name_alone(cls, spec: Any) -> Any:
        return {"name": spec} if isinstance(spec, str) else spec

    @model_validator(mode="after")
    def _has_width(self) -> BoundaryCodecOptions:
        if self.name == "subspace" and self.width is None:
            raise InputError("subspace: give its width, as in {name: subspace, width: 64}")
        if self.keep and self.name != "subspace":
            raise InputError(f"keep: is for subspace, not for {self.name}; leave it out")
        return self


class Stages(Schema):
    """Pipeline stages of a worker: `4`, or a mapping.

    Attributes:
        count: ranks of a worker, each with one stage of the model (`chunks` of them under `interleaved`).
        microbatches: micro-batches of a step; None: those of `minibatch_size`; where that is not given either, `count`
            of them, or as few more as divide `batch_size`.
        schedule: `gpipe`: all forward passes, then all backward passes (Huang et al., arXiv 1811.06965); `1f1b`: a
            backward pass after each forward pass, so that at most `count` micro-batches are alive (Narayanan et al.,
            arXiv 1806.03377); `interleaved`: `1f1b` with `chunks` stages a rank (arXiv 2104.04473); `pipedream`: `1f1b`
            without an end of the step, with a copy of the weights for passes in flight (arXiv 1806.03377, section 3.3).
        split: `flops` or `bytes`: stages of about equal operations, or parameters; in Python also a function
            `model -> list of modules`.
        chunks: stages of each rank under `interleaved`; None: 2.
        delay: micro-batches that a stage is ahead of the one after it, under `pipedream`: more of them hide latency;
            None: 1.
        codec: of activations and their gradients; None: as they are.
    """

    count: Annotated[int, Field(ge=1)]
    microbatches: Annotated[int, Field(ge=1)] | None = None
    schedule: Literal["gpipe", "1f1b", "interleaved", "pipedream"] = "1f1b"
    split: Annotated[Any, AfterValidator(_split), WithJsonSchema({"enum": list(_SPLITS)})] = "flops"
    chunks: Annotated[int, Field(ge=2)] | None = None
    delay: Annotated[int, Field(ge=1)] | None = None
    codec: BoundaryCodecOptions | None = None

    @model_validator(mode="before")
    @classmethod
    def _count_alone(cls, spec: Any) -> Any:
        return {"count": spec} if isinstance(spec, int) and not isinstance(spec, bool) else spec

    @model_validator(mode="after")
    def _options_are_used(self) -> Stages:
        if self.chunks is not None and self.schedule != "interleaved":
            raise InputError("chunks: is for schedule: interleaved; leave it out")
        if self.delay is not None and not self.is_asynchronous:
            raise InputError("delay: is for schedule: pipedream; leave it out")
        return self

    @classmethod
    def parse(cls, spec: Any) -> Stages | None:
        """Parse the `stages` of `fit`; None for one stage.

        Raises:
            InputError: a wrong value or key.
        """
        if spec is None:
            return None
        made = spec if isinstance(spec, Stages) else validate_document(cls, Document("stages", spec))
        return made if made.count > 1 else None

    @property
    def num_stages(self) -> int:
        """Stages of the whole model."""
        return self.count * ((self.chunks or 2) if self.schedule == "interleaved" else 1)

    @property
    def is_asynchronous(self) -> bool:
        """True if steps do not wait for their own gradients."""
        return self.schedule == "pipedream"

    def lag(self, position: int) -> int:
        """Micro-batches between the forward and backward passes of a rank beyond those of its step; 0: none."""
        return (self.delay or 1) * (self.count - 1 - position) if self.is_asynchronous else 0

    def staleness(self, position: int) -> int:
        """Most updates of the weights between the two passes of a micro-batch, once `microbatches` are settled."""
        return -(-self.lag(position) // (self.microbatches or 1))

    def most_alive(self, position: int) -> int:
        """Most micro-batches whose activations a rank holds at once, once `microbatches` are settled."""
        if self.is_asynchronous:
            return self.lag(position) + 1
        passes = actions(self, position, self.microbatches or 1)
        return max(accumulate(1 if each.is_forward else -1 for each in passes))

    @about_option("stages")
    def settle_microbatches(self, batch_size: int, minibatch_size: int | None) -> int:
        """Number of micro-batches of a step.

        Args:
            batch_size: samples of a step.
            minibatch_size: samples of a micro-batch, where it is given.

        Raises:
            InputError: the batch cannot be cut into so many, or two options contradict each other.
        """
        given = None if minibatch_size is None else batch_size // minibatch_size
        step = self.count if self.schedule == "interleaved" else 1
        sizes = [each for each in range(self.count, batch_size + 1, step) if batch_size % each == 0]
        wanted = self.microbatches or given or min(sizes, default=batch_size)
        if given is not None and wanted != given:
            raise InputError(
                f"fit: stages.microbatches is {wanted}, but minibatch_size {minibatch_size} makes {given} of "
                f"batch_size {batch_size}: leave one of them out"
            )
        if batch_size % wanted:
            raise InputError(
                f"fit: stages: {wanted} micro-batches do not divide batch_size {batch_size}: take one of "
                f"{', '.join(str(each) for each in range(1, batch_size + 1) if batch_size % each == 0)}"
            )
        if self.schedule == "interleaved" and wanted % self.count:
            raise InputError(
                f"fit: stages: the interleaved schedule takes a multiple of {self.count} micro-batches, not {wanted}"
            )
        return wanted


class StagePass(NamedTuple):
    """A pass of a stage over a micro-batch.

    Attributes:
        is_forward: forward or backward pass.
        stage: number of the stage in the model.
        micro: number of the micro-batch in the step; below 0 it is of an earlier one.
        worker: whose micro-batch it is, where a rank computes those of several.
    """

    is_forward: bool
    stage: int
    micro: int
    worker: int = 0


def actions(stages: Stages, position: int, num_micro: int) -> list[StagePass]:
    """Passes of the rank at `position` of its worker's chain in a step, in order.

    Micro-batches that the interleaved schedule cannot deal out, at an epoch's end, all go forward first.

    >>> [f"{'BF'[each.is_forward]}{each.micro}" for each in actions(Stages(count=2), 0, 3)]
    ['F0', 'F1', 'B0', 'F2', 'B1', 'B2']
    >>> [f"{'BF'[each.is_forward]}{each.micro}" for each in actions(Stages(count=2, schedule="pipedream"), 0, 3)]
    ['F0', 'B-1', 'F1', 'B0', 'F2', 'B1']
    """
    if stages.is_asynchronous:
        lags = {True: 0, False: stages.lag(position)}
        return [
            StagePass(is_forward, position, index - lag)
            for index in range(num_micro)
            for is_forward, lag in lags.items()
        ]
    count, chunks = stages.count, stages.num_stages // stages.count
    total, group = num_micro * chunks, count
    warmup = min(total, count - 1 - position)
    if chunks > 1:
        warmup = min(total, (chunks - 1) * count + 2 * (count - 1 - position))
    if stages.schedule == "gpipe" or (chunks > 1 and num_micro % count):
        warmup, group = total, num_micro

    def action(is_forward: bool, index: int) -> StagePass:
        """The `index`-th pass of its kind: a group of micro-batches through each chunk in turn."""
        first, within = divmod(index, group * chunks)
        chunk = within // group if is_forward else chunks - 1 - within // group
        return StagePass(is_forward, chunk * count + position, first * group + within % group)

    order = [action(True, index) for index in range(warmup)]
    for index in range(total):
        if warmup + index < total:
            order.append(action(True, warmup + index))
        order.append(action(False, index))
    return order


def _waiting_times(strategy: Strategy, stages: Stages | None) -> dict[str, bool]:
    """True what of a strategy's waiting times does not go with stages."""
    patience, name = strategy.patience, strategy_name(strategy)
    if patience == type(patience)():
        return {}
    if stages is None:
        return {f"the waiting times of {name}": True}
    return {
        f"the waiting times of {name}, whose workers' models differ (AllReduce and others that exchange gradients "
        "have equal ones)": not patience.of_steps,
        f"waiting times under {stages.schedule} (take gpipe or 1f1b)": stages.schedule
        not in ("gpipe", "1f1b"),
        "join_at and min_ranks": bool(patience.join_at) or patience.min_ranks is not None,
        f"waiting times and max_norm of {name}, which clips gradients before they are exchanged": (
            strategy.max_norm is not None and "clip_gradients" in vars(type(strategy))
        ),
    }


def refuse_with_stages(
    where: str,
    strategy: Strategy | None = None,
    autocast: object = None,
    val_seconds: object = None,
    others: Mapping[str, bool] = {},
    stages: Stages | None = None,
) -> None:
    """Refuse what does not go with stages.

    Args:
        where: `fit` or `plan`.
        strategy: of the workers; None: not known yet.
        autocast, val_seconds: as for `fit`.
        others: true what is given of other things.
        stages: the options, where ranks may be absent from steps; None: they may not.

    Raises:
        InputError: something of it is given.
    """
    refused = {
        "autocast: fp16, whose scaler is a worker's (take bf16)": autocast == "fp16",
        "evaluate.every_seconds (count evaluations in steps)": val_seconds is not None,
    }
    if strategy is not None:
        name, sites, clients = strategy_name(strategy), strategy.sites, strategy.clients
        refused |= {
            f"{name}, whose workers go at their own pace": not strategy.is_synchronous,
            **_waiting_times(strategy, stages),
            f"{name} with ranks_per_worker or sharding": (sites.ranks_per_worker or 1) > 1
            or sites.sharding != "NO_SHARD",
            "clients_per_round, fraction or balance": clients.are_drawn or clients.balance,
        }
    for what, is_given in {**refused, **others}.items():
        if is_given:
            raise InputError(f"{where}: stages do not go with {what}", about=("stages",))


_MOST_PERMUTED = 7  # hosts of a chain whose orders are all compared


def hosts_of(
    topology: Topology,
    num_workers: int,
    stages: Stages | None,
    placement: Sequence[str] | None,
    *,
    names_servers: bool = False,
) -> Sequence[int]:
    """Host of each rank, worker by worker.

    Without a `placement` a worker's ranks are in one region where it has as many hosts, in the order with the least sum
    of one-way latencies: the longest hop is crossed least often (Yuan et al., DT-FM, arXiv 2206.01288). Of more than
    seven hosts each is followed by the nearest one left.

    Args:
        topology: the network.
        num_workers: number of workers.
        stages: what each of them is cut into.
        placement: host of each rank, worker by worker.
        names_servers: whether the placement may go on with hosts of servers.

    Raises:
        InputError: the placement does not fit the ranks or the topology.
    """
    count = 1 if stages is None else stages.count
    num_ranks = num_workers * count
    num_named = max(num_ranks, len(placement)) if names_servers and placement is not None else num_ranks
    hosts = topology.place(num_named, placement)[:num_ranks]
    if count == 1 or placement is not None:
        return hosts
    places: list[int] = []
    for first in range(0, len(hosts), count):
        own = hosts[first : first + count]

        def length(order: Iterable[int]) -> float:
            return sum(topology.route_latency_seconds(a, b) for a, b in pairwise(order))

        if count <= _MOST_PERMUTED:
            places += min(permutations(own), key=length)
            continue
        left, chain = list(own[1:]), [own[0]]
        while left:
            nearest = min(left, key=lambda host: topology.route_latency_seconds(chain[-1], host))
            left.remove(nearest)
            chain.append(nearest)
        places += chain
    return places
