"""Values that travel through shared memory between processes, while it is used again at once."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from exogym_core.communicator import Communicator, run_ranks

_ROUNDS = 100
_NUMBERS = 40_000  # large enough not to travel inside the messages


def _gather_rounds(comm: Communicator) -> int:
    """How many values were not what their rank had sent."""
    wrong = 0
    for turn in range(_ROUNDS):
        got = comm.all_gather(torch.full((_NUMBERS,), 100 * turn + comm.rank))
        expected = torch.arange(comm.world_size)[:, None] + 100 * turn
        wrong += int((torch.stack(got) != expected).sum())
        root = turn % comm.world_size
        sent = comm.broadcast(torch.full((_NUMBERS,), 100 * turn + comm.rank), root)
        wrong += int((sent != 100 * turn + root).sum())
    return wrong


def test_a_process_that_has_its_values_overwrites_none_of_the_others() -> None:
    run = run_ranks(_gather_rounds, 4, workers={"kind": "processes", "processes": 4})
    assert run.results == [0, 0, 0, 0]


OTHER_PROCESSES: dict[str, dict[str, Any]] = {
    "processes": {"workers": {"kind": "processes", "processes": 1}},
    "gloo": {"transport": "gloo"},
}


@pytest.mark.parametrize("where", OTHER_PROCESSES)
@pytest.mark.parametrize("name", ["uint16", "uint32", "uint64", "float8_e4m3fn", "float8_e5m2", "bfloat16"])
def test_results_of_newer_dtypes_come_back(name: str, where: str) -> None:
    """torch's own pickles of most of them cannot be read: it ended in an AttributeError."""
    dtype = getattr(torch, name)

    def body(comm: Communicator) -> torch.Tensor:
        return torch.arange(6).to(dtype).view(2, 3)[:, ::2]

    (result,) = run_ranks(body, 1, **OTHER_PROCESSES[where]).results
    assert result.dtype == dtype
    assert result.to(torch.int64).tolist() == [[0, 2], [3, 5]]


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("name", ["complex32", "int4", "bits8", "float8_e8m0fnu", "float4_e2m1fn_x2"])
def test_results_of_dtypes_that_no_operator_knows_come_back(name: str) -> None:
    dtype = getattr(torch, name)

    def body(comm: Communicator) -> torch.Tensor:
        return torch.arange(8, dtype=torch.uint8).view(dtype)

    (result,) = run_ranks(body, 1, workers={"kind": "processes", "processes": 1}).results
    assert (result.dtype, result.view(torch.uint8).tolist()) == (dtype, list(range(8)))


@pytest.mark.parametrize(
    ("transport", "workers"), [("netsim", {"kind": "processes", "processes": 2}), ("gloo", "threads")]
)
def test_large_results_come_back_as_they_were(transport: str, workers: Any) -> None:
    """They travel outside of the pickle: values, dtypes, layouts and identities stay, and they are the caller's own."""

    def body(comm: Communicator) -> dict[str, Any]:
        large = torch.arange(100_000) + comm.rank
        parameter = torch.nn.Parameter(torch.full((300, 300), 2.0))
        return {
            "one": large,
            "again": [large],
            "whole": parameter,
            "half": large.bfloat16(),
            "t": large.view(2, -1).T,
        }

    results = run_ranks(body, 2, transport=transport, workers=workers).results
    for rank, got in enumerate(results):
        assert got["one"] is got["again"][0]
        assert torch.equal(got["one"], torch.arange(100_000) + rank)
        assert isinstance(got["whole"], torch.nn.Parameter)
        assert got["whole"].requires_grad
        assert torch.equal(got["half"], got["one"].bfloat16())
        assert torch.equal(got["t"], got["one"].view(2, -1).T)
        got["one"].add_(1)
        assert got["again"][0][0] == rank + 1
