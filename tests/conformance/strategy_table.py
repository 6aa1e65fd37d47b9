"""The table of strategies. A new one is a row: how it is made, its algorithm in one process, and its payload.

`test_strategy_table.py` beside this file holds every row to the common laws; docs/strategies.md tells how to add one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import compression_references as compression
import mixing_references as mixing
import outer_references as outer_rounds
import strategy_reference as reference
import torch
from strategy_reference import DTYPE_BYTES, SEED, adamw, every, local, named_codec, num_values, sgd, whole
from torch import Tensor, nn

from exogym_core.strategy import (
    ACCOStrategy,
    AllReduceStrategy,
    AsyncSPARTAStrategy,
    Chain,
    CoCoDCStrategy,
    DelayedDiLoCoStrategy,
    DeMoStrategy,
    DiLoCoCommunicator,
    DiLoCoStrategy,
    EagerDiLoCoStrategy,
    EDiTStrategy,
    FedAvgStrategy,
    GPAStrategy,
    LocalSGDStrategy,
    RandomIndexSelector,
    SlowMoStrategy,
    SNOOStrategy,
    SparseCommunicator,
    SPARTADiLoCoStrategy,
    SPARTAStrategy,
    Strategy,
    StreamingDiLoCoStrategy,
)
from exogym_core.strategy.parts.codecs import Codec


@dataclass(frozen=True)
class Row:
    """One strategy: how to make it, its algorithm, and the payload of a 1-based step.

    `payload(model, step, num_ranks)` is in bytes per rank; `sent_factor(n)` turns it into bytes sent by all
    `n` ranks together, or `sent` tells them by step. Without an `algorithm`, golden/ has the parameters of its authors'
    code, of several ranks or of one that an equality extends to several. `apart` marks strategies whose replicas never
    are all alike.
    """

    name: str
    make: Callable[[], Strategy]
    algorithm: Callable[[nn.Module, reference.Batches], list[nn.Module]] | None
    payload: Callable[[nn.Module, int, int], int]
    sent_factor: Callable[[int], int] = lambda n: 2 * (n - 1)
    sent: Callable[[nn.Module, int, int], int] | None = None
    tolerance: float = 1e-9
    apart: bool = field(default=False)


def share(p: float) -> Callable[[nn.Module], int]:
    return lambda model: DTYPE_BYTES * max(1, round(p * num_values(model)))


def over_steps(after: Callable[[nn.Module, int], Any], make_optim: Any = adamw) -> Any:
    """As `local`, for exchanges that end with the run: `after` gets the number of the last step, too."""
    return lambda model, batches: reference.reference_local(
        model, batches, make_optim, after(model, len(batches))
    )


def fragments(members: list[list[int]], H: int) -> Callable[[nn.Module, int, int], int]:  # noqa: N803
    """The fragments that leave after a step."""

    def payload(model: nn.Module, step: int, _: int) -> int:
        sizes = [p.numel() for p in model.parameters()]
        leaving = [of for p, of in enumerate(members) if (step - (p + 1) * H // len(members)) % H == 0]
        return DTYPE_BYTES * sum(sizes[index] for of in leaving for index in of)

    return payload


def through(codec: Codec) -> Callable[[Tensor], Tensor]:
    """What `codec` leaves of values; exact enough as a whole for codecs without chunks."""
    return lambda values: codec.decode(codec.encode(values), len(values)).double()


def demo_payload(topk: int, chunk: int, entry_bytes: int) -> Callable[[nn.Module, int, int], int]:
    def payload(model: nn.Module, step: int, num_ranks: int) -> int:
        blocks = [b for p in model.parameters() for b in reference.matrix_blocks(p.detach(), chunk)]
        return sum(min(topk, block.numel()) for block in blocks) * entry_bytes

    return payload


def norms(model: nn.Module) -> int:
    return 4 * len(list(model.parameters()))


TABLE = [
    Row(
        "AllReduce",
        lambda: AllReduceStrategy("adamw", lr=0.01, max_norm=0.5, bucket_bytes=64),
        lambda model, batches: reference.reference_all_reduce(model, batches, adamw, max_norm=0.5),
        every(1, whole),
    ),
    Row(
        "FedAvg",
        lambda: FedAvgStrategy(torch.optim.SGD, H=2, island_size=99, lr=0.05),
        local(lambda _: reference.averaging(2, 99, SEED), partial(torch.optim.SGD, lr=0.05)),
        every(2, whole),
    ),
    Row(
        "LocalSGD",
        lambda: LocalSGDStrategy(H=3, optim_spec=sgd, max_norm=0.3),
        local(lambda _: reference.averaging(3, None, SEED), sgd, max_norm=0.3),
        every(3, whole),
    ),
    Row(
        "DiLoCo",
        lambda: DiLoCoStrategy(adamw, H=3),
        local(lambda model: reference.outer(model, 3)),
        every(3, whole),
    ),
    Row(
        "DiLoCo fp16",
        lambda: DiLoCoStrategy(adamw, H=2, codec="fp16", outer_lr=0.5, outer_momentum=0.8),
        local(lambda model: reference.outer(model, 2, 0.5, 0.8, through(named_codec("fp16")))),
        every(2, lambda model: 2 * num_values(model)),
        tolerance=1e-3,  # a value on the border between two codes may round either way
    ),
    Row(
        "SPARTA",
        lambda: SPARTAStrategy(adamw, p_sparta=0.1, interval=2),
        local(lambda _: reference.sparse(RandomIndexSelector(0.1), 2, SEED)),
        every(2, share(0.1)),
        apart=True,
    ),
    Row(
        "AsyncSPARTA",
        lambda: AsyncSPARTAStrategy(adamw, p_sparta=0.3, interval=3, delay=2, ema=0.4),
        over_steps(lambda _, last: outer_rounds.sparse_late(RandomIndexSelector(0.3), 3, 2, SEED, last, 0.4)),
        every(3, share(0.3)),
        apart=True,
    ),
    Row(
        "SPARTA+DiLoCo",
        lambda: SPARTADiLoCoStrategy(adamw, p_sparta=0.2, sparta_interval=2, H=3),
        local(
            lambda model: reference.both(
                reference.sparse(RandomIndexSelector(0.2), 2, SEED), reference.outer(model, 3)
            )
        ),
        lambda model, step, n: every(2, share(0.2))(model, step, n) + every(3, whole)(model, step, n),
    ),
    Row(
        "DeMo",
        lambda: DeMoStrategy(lr=0.01, compression_topk=3, compression_chunk=4, weight_decay=0.1),
        None,
        demo_payload(3, 4, 12),
        sent_factor=lambda n: n * (n - 1),
    ),
    Row(
        "Chain",
        lambda: Chain([SparseCommunicator(p_sparta=0.2, interval=2), DiLoCoCommunicator(H=2)], adamw),
        local(
            lambda model: reference.both(
                reference.sparse(RandomIndexSelector(0.2), 2, SEED), reference.outer(model, 2)
            )
        ),
        lambda model, step, n: every(2, share(0.2))(model, step, n) + every(2, whole)(model, step, n),
    ),
    Row(
        "StreamingDiLoCo",
        lambda: StreamingDiLoCoStrategy(adamw, H=5, num_fragments=2, tau=2, alpha=0.25),
        over_steps(lambda model, last: outer_rounds.streaming(model, [[0, 2], [1, 3]], 5, 2, 0.25, last)),
        fragments([[0, 2], [1, 3]], 5),
        apart=True,
    ),
    Row(
        "StreamingDiLoCo sequential",
        lambda: StreamingDiLoCoStrategy(
            sgd,
            sync_every=4,
            num_fragments=3,
            pattern="sequential",
            fragment_sync_delay=3,
            fragment_update_alpha=0.5,
        ),
        over_steps(
            lambda model, last: outer_rounds.streaming(model, [[0], [1], [2, 3]], 4, 3, 0.5, last), sgd
        ),
        fragments([[0], [1], [2, 3]], 4),
        apart=True,
    ),
    Row(
        "CoCoDC",  # as many departures as fragments: they take turns
        lambda: CoCoDCStrategy(adamw, H=4, num_fragments=2, tau=1, transmissions=2),
        over_steps(
            lambda model, last: outer_rounds.cocodc(model, [[0, 2], [1, 3]], 4, 1, last, transmissions=2)
        ),
        fragments([[0, 2], [1, 3]], 4),
        apart=True,
    ),
    Row(
        "DelayedDiLoCo",
        lambda: DelayedDiLoCoStrategy(adamw, H=2),
        over_steps(lambda model, last: outer_rounds.delayed(model, 2, last)),
        every(2, whole),
        apart=True,
    ),
    Row(
        "EagerDiLoCo",
        lambda: EagerDiLoCoStrategy(adamw, H=2, outer_lr=0.5, outer_momentum=0.8),
        over_steps(
            lambda model, last: outer_rounds.delayed(model, 2, last, eager=True, lr=0.5, momentum=0.8)
        ),
        every(2, whole),
        apart=True,
    ),
    *(Row(**row) for row in compression.ROWS),
    *(Row(**row) for row in mixing.ROWS),
    Row(
        "SlowMo",
        lambda: SlowMoStrategy(sgd, H=2, outer_lr=0.9, outer_momentum=0.6),
        None,
        every(2, whole),
    ),
    Row(
        "IsoLoCo",
        lambda: DiLoCoStrategy(adamw, H=2, outer_lr=0.8, outer_momentum=0.7, aggregate="isotropic"),
        None,
        every(2, whole),
    ),
    Row("SNOO", lambda: SNOOStrategy(sgd, H=3, outer_lr=0.8, outer_momentum=0.5), None, every(1, whole)),
    Row(
        "GPA",
        lambda: GPAStrategy(adamw, eval_interp_coeff=0.9, train_interp_coeff=0.6),
        None,
        every(1, whole),
    ),
    Row("ACCO", lambda: ACCOStrategy(adamw), None, every(1, whole)),
    Row(
        "EDiT",  # beside a model's bytes, 4 for the norm of each tensor
        lambda: EDiTStrategy(adamw, H=2, clip_outer=0.02),
        None,
        every(2, lambda model: whole(model) + norms(model)),
        sent=lambda model, step, n: (
            2 * (n - 1) * every(2, whole)(model, step, n) + n * (n - 1) * every(2, norms)(model, step, n)
        ),
    ),
]
