"""What a rank does to its tensors after a call is its own affair, over every transport."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from torch import Tensor

from exogym_core.communicator import Communicator, run_ranks
from netsim.files.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable

CALLS: dict[str, Callable[[Communicator, Tensor], object]] = {
    "all_gather": lambda comm, x: comm.all_gather(x),
    "all_reduce": lambda comm, x: comm.all_reduce(x).clone(),
    "all_to_all": lambda comm, x: comm.all_to_all([x] * comm.world_size),
    "broadcast": lambda comm, x: comm.broadcast(x, src=3).clone(),
    "gather": lambda comm, x: comm.gather(x, dst=1),
    "reduce": lambda comm, x: comm.reduce(x, dst=1).clone(),
    "reduce_scatter": lambda comm, x: comm.reduce_scatter([x] * comm.world_size),
    "scatter": lambda comm, x: comm.scatter(
        torch.zeros(2), [x] * comm.world_size if comm.rank == 3 else None, src=3
    ),
}


@pytest.mark.parametrize("transport", ["netsim", "gloo"])
@pytest.mark.parametrize("call", CALLS)
def test_changing_ones_tensor_after_a_call_changes_nobodys_result(call: str, transport: str) -> None:
    def body(comm: Communicator) -> list[list[float]]:
        results = []
        for change in (False, True):
            x = torch.tensor([float(comm.rank), 1.0])
            got = CALLS[call](comm, x)
            if change:
                x.fill_(99.0)
            comm.barrier()
            tensors = got if isinstance(got, list) else [got]
            results.append([float(value) for t in tensors if t is not None for value in t])
        return results

    for untouched, changed in run_ranks(body, 4, transport=transport).results:  # type: ignore[arg-type]
        assert untouched == changed


@pytest.mark.parametrize("transport", ["netsim", "gloo"])
@pytest.mark.parametrize("call", ["all_reduce", "broadcast", "reduce", "scatter"])
def test_a_call_that_writes_refuses_an_expanded_tensor(call: str, transport: str) -> None:
    """It was torch's RuntimeError about memory, inside of a RankError."""

    def body(comm: Communicator) -> None:
        x = torch.zeros(1).expand(3)
        comm.scatter(x, [x] * 2) if call == "scatter" else getattr(comm, call)(x)

    with pytest.raises(InputError, match=rf"rank \d, {call}: writes into its tensor, and \[3\] is expanded"):
        run_ranks(body, 2, transport=transport)
