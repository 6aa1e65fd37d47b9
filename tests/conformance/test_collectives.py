"""Every collective of every transport against its definition, in random programs."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from conformance_cases import OPERATIONS, TRANSPORTS, Case, carry_out, check, programs, run
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from exogym_core.communicator import Communicator, run_ranks
from exogym_core.communicator.simulated.simulation import Schedules, World
from exogym_core.strategy import AveragingCommunicator
from netsim import schedule
from netsim.collectives.schedules.algorithms import default_algorithm
from netsim.errors import InputError
from netsim.ranks import Call


@st.composite
def _sized_programs(draw: st.DrawFn, num_cases: int) -> tuple[int, Any]:
    num_ranks = draw(st.integers(1, 5))
    return num_ranks, draw(programs(num_ranks, num_cases))


# Processes cost: few programs of many calls there, many small ones in threads.
@pytest.mark.parametrize(
    ("transport", "num_examples", "num_cases"), [("threads", 40, 20), ("processes", 5, 30), ("gloo", 6, 30)]
)
def test_random_programs_give_what_the_definitions_say(
    transport: str, num_examples: int, num_cases: int
) -> None:
    phases = [phase for phase in Phase if phase is not Phase.shrink or transport == "threads"]

    @settings(max_examples=num_examples, phases=phases, suppress_health_check=list(HealthCheck))
    @given(_sized_programs(num_cases))
    def holds(example: tuple[int, Any]) -> None:
        num_ranks, program = example
        results = run(transport, partial(carry_out, program), num_ranks).results
        check(program, results, exact=transport != "gloo")

    holds()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_every_collective_once_in_all_dtypes(transport: str) -> None:
    """So that no row depends on chance."""
    cases = []
    for number, operation in enumerate(OPERATIONS):
        for dtype in (torch.float32, torch.bfloat16, torch.int16, torch.uint8):
            later = 0 if number % 2 else None
            cases.append(Case(operation, 0, dtype, (3, 2), "transposed", "sum", 1, later, False, number))
    program = [(0, 1, 2)], cases
    check(program, run(transport, partial(carry_out, program), 3).results, exact=transport != "gloo")


def _in_place(comm: Communicator) -> dict[str, bool]:
    """Which calls return the tensor that they were given."""
    parameter = torch.nn.Parameter(torch.ones(3))
    view = torch.zeros(4, 4)
    comm.all_reduce(view[:, 1])
    part = torch.zeros(3)
    parts = [torch.ones(3)] * comm.world_size if comm.rank == 0 else None
    return {
        "all_reduce": comm.all_reduce(parameter) is parameter,
        "broadcast": comm.broadcast(part) is part,
        "reduce": comm.reduce(part, 1) is part,
        "scatter": comm.scatter(part, parts) is part,
        "async": comm.all_reduce(part, async_op=True).wait() is part,
        "gradient": parameter.requires_grad and parameter.tolist() == [comm.world_size] * 3,
    }


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_in_place_calls_return_their_tensor_and_take_parameters(transport: str) -> None:
    for row in run(transport, _in_place, 2).results:
        assert all(row.values()), row


def _handles(comm: Communicator) -> list[bool]:
    """A handle can be asked and waited for as often as one likes; new groups start their own order of calls."""
    tensor = torch.ones(2)
    handle = comm.all_reduce(tensor, async_op=True)
    first, second = handle.wait().clone(), handle.wait()
    alone = comm.group([comm.rank])
    alone.all_reduce(tensor)
    pair = comm.group([1, 0])
    return [
        handle.is_completed(),
        torch.equal(first, second),
        (alone.rank, alone.world_size) == (0, 1),
        pair.rank == 1 - comm.rank,
        pair.broadcast(torch.tensor(comm.rank), 0).item() == 1,
        pair.all_gather_object(comm.rank) == [1, 0],
        torch.equal(tensor, torch.full((2,), 2.0)),
        comm.now() >= 0.0,
    ]


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_handles_and_groups(transport: str) -> None:
    for row in run(transport, _handles, 2).results:
        assert all(row), row


def _overlapping_groups(comm: Communicator) -> list[float]:
    """Members of one group may have made other groups before, and the same group twice."""
    totals = []
    if comm.rank:
        totals.append(comm.group([1, 2]).all_reduce(torch.ones(1)).item())
    totals += [comm.group([1, 0, 2]).all_reduce(torch.ones(1)).item() for _ in range(2)]
    if comm.rank != 1:
        totals.append(comm.group([0, 2]).group([1, 0]).all_reduce(torch.ones(1)).item())
    return totals


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_groups_overlap_and_repeat(transport: str) -> None:
    results = run(transport, _overlapping_groups, 3).results
    assert results == [[3.0, 3.0, 2.0], [2.0, 3.0, 3.0], [2.0, 3.0, 3.0, 2.0]]


_BAD_ARGUMENTS = {
    "all_reduce: op='avg' of torch.int64": lambda comm: comm.all_reduce(torch.ones(2).long(), "avg"),
    "all_reduce: torch.bool cannot be reduced": lambda comm: comm.all_reduce(torch.ones(2).bool()),
    "all_reduce: unknown reduce op 'mean': did you mean 'avg'? Accepted: avg, ": (
        lambda comm: comm.all_reduce(torch.ones(2), "mean")
    ),
    "reduce: unknown reduce op 'add': did you mean 'sum'?": lambda comm: comm.reduce(torch.ones(2), 0, "add"),
    "all_reduce: takes a tensor, got list": lambda comm: comm.all_reduce([1, 2]),
    "broadcast: takes a tensor, got list": lambda comm: comm.broadcast([1, 2]),
    "reduce: takes a tensor, got int": lambda comm: comm.reduce(1),
    "all_gather: takes a tensor, got float": lambda comm: comm.all_gather(1.0),
    "gather: takes a tensor, got NoneType": lambda comm: comm.gather(None),
    "scatter: takes a tensor, got list": lambda comm: comm.scatter([1, 2], src=comm.rank),
    "reduce_scatter: each of the list: takes a tensor, got int": lambda comm: comm.reduce_scatter([1, 2]),
    "all_to_all: takes a tensor, or a list of one a rank, got int": lambda comm: comm.all_to_all(2),
    "send: takes a tensor, got list": lambda comm: comm.send([1, 2], 1 - comm.rank),
    "recv: takes a tensor, got list": lambda comm: comm.recv([1, 2], 1 - comm.rank),
    "put: takes a tensor, got str": lambda comm: comm.put("letter", 1 - comm.rank),
    "broadcast: src=2 is not a rank; use 0 to 1": lambda comm: comm.broadcast(torch.ones(2), 2),
    "reduce: dst=-1 is not a rank": lambda comm: comm.reduce(torch.ones(2), -1),
    "send: dst=True is not a rank": lambda comm: comm.send(torch.ones(2), True),
    "reduce_scatter: a tensor of shape [3] cannot be cut into 2": (
        lambda comm: comm.reduce_scatter(torch.ones(3))
    ),
    "all_to_all: 3 tensors given, not one for each of 2 ranks": lambda comm: comm.all_to_all(
        [torch.ones(1)] * 3
    ),
    "all_to_all: the tensors have several dtypes": (
        lambda comm: comm.all_to_all([torch.ones(1), torch.ones(1).long()])
    ),
    "scatter: scatter_list has torch.float32[3], tensor is torch.float32[2]": (
        lambda comm: comm.scatter(torch.ones(2), [torch.ones(3)] * 2, src=comm.rank)
    ),
    "must name this rank, and each rank once": lambda comm: comm.group([1 - comm.rank]),
}


def _messages(comm: Communicator) -> list[str]:
    messages = []
    for bad in _BAD_ARGUMENTS.values():
        try:
            bad(comm)
        except InputError as error:
            messages.append(str(error))
    return messages


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_what_is_wrong_by_itself_is_refused_alike(transport: str) -> None:
    """An argument is refused before anything is sent, so the other ranks need not know.

    The line names the rank and the place of the call in the caller's code, never a line of this package.
    """
    for rank, messages in enumerate(run(transport, _messages, 2).results):
        assert len(messages) == len(_BAD_ARGUMENTS)
        for wanted, line in zip(_BAD_ARGUMENTS, messages, strict=True):
            assert line.startswith(f"rank {rank}, ")
            assert wanted in line
            assert re.search(r" \(at test_collectives\.py:\d+\)$", line)


def _to_nobody(comm: Communicator) -> None:
    comm.broadcast(torch.ones(1), 7)


def test_each_rank_is_named_once_where_all_fail_alike():
    """Over gloo the line of another rank began with `rank 1: rank 1, broadcast:`."""
    with pytest.raises(InputError, match=r"^rank \d, broadcast: src=7 is not a rank") as caught:
        run("gloo", _to_nobody, 2)
    for line in str(caught.value).splitlines():
        assert len(re.findall(r"rank \d", line)) <= 1


@pytest.mark.parametrize("transport", ["netsim", "gloo"])
def test_reuse_gives_one_group_for_the_same_ranks(transport: str) -> None:
    def body(comm: Communicator) -> list[float]:
        got = []
        for round_number in range(4):
            pair = [0, comm.rank or 1 + round_number % 2]
            if comm.rank in (0, 1 + round_number % 2):
                group = comm.group(pair, reuse=True)
                handle = group.all_reduce(torch.tensor([float(comm.rank + round_number)]), async_op=True)
                got.append(float(comm.group(pair, reuse=True).all_reduce(torch.tensor([1.0]))))
                got.append(float(handle.wait()))
                # Another order and a group of its own are others.
                got.append(float(comm.group(pair[::-1], reuse=True).broadcast(torch.tensor([comm.rank]))))
                got.append(float(comm.group(pair).all_reduce(torch.tensor([2.0]))))
        return got

    zero, one, two = run_ranks(body, 3, transport=transport).results  # type: ignore[arg-type]
    assert one == [2.0, 1.0, 1.0, 4.0, 2.0, 5.0, 1.0, 4.0]
    assert two == [2.0, 4.0, 2.0, 4.0, 2.0, 8.0, 2.0, 4.0]
    assert zero == one[:4] + two[:4] + one[4:] + two[4:]


def test_islands_over_sockets_connect_once(monkeypatch: pytest.MonkeyPatch) -> None:
    import strategy_reference as reference

    from exogym_core.communicator.gloo.rendezvous import Rendezvous
    from exogym_core.strategy import FedAvgStrategy

    model, batches = reference.make_problem(3, 8, 3, 3, seed=1)
    made = Rendezvous.subgroup
    asked: list[tuple[int, ...]] = []

    def subgroup(self: Rendezvous, ranks: tuple[int, ...], place: str) -> object:
        asked.append(tuple(ranks))
        assert len(asked) == len(set(asked)), "an island that comes again is connected already"
        return made(self, ranks, place)

    monkeypatch.setattr(Rendezvous, "subgroup", subgroup)  # ranks are forked: each has a list of its own
    islands = AveragingCommunicator(2, H=1)
    islands.seed = 0
    drawn = [tuple(islands.island(0, 3, round_number)) for round_number in range(8)]
    assert len(set(drawn)) < len(drawn)
    strategy = FedAvgStrategy("sgd", lr=0.1, island_size=2)
    real = reference.run_strategy(strategy, model, batches, transport="gloo")
    simulated = reference.run_strategy(strategy, model, batches)
    for ours, theirs in zip(simulated.results, real.results, strict=True):
        torch.testing.assert_close(ours, theirs)


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
def test_changing_a_tensor_after_a_call_changes_no_result(call: str, transport: str) -> None:
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


# --- traffic ------------------------------------------------------------------------------------------------


def counted(load: Call, member: int) -> int:
    """Bytes that a rank over sockets counts."""
    return Schedules(World.build(1, None, None, None, None)).traffic(load, member)[0]


_WHOLE = ("all_reduce", "broadcast", "reduce", "reduce_scatter")


@pytest.mark.parametrize(
    "op", ["all_reduce", "broadcast", "reduce", "reduce_scatter", "all_gather", "gather", "scatter"]
)
@given(st.integers(1, 20), st.integers(0, 50), st.sampled_from([1, 2, 4, 8]), st.integers(0, 19))
def test_bytes_over_sockets_are_those_of_the_schedules(
    op: str, num_ranks: int, elements: int, width: int, root: int
) -> None:
    root %= num_ranks
    num_bytes = elements * width * (num_ranks if op == "reduce_scatter" else 1)
    plan_bytes = num_bytes * (1 if op in _WHOLE else num_ranks)
    plan = schedule(
        op,
        num_ranks,
        num_bytes=plan_bytes,
        algorithm=default_algorithm(op),
        root=root,
        element_bytes=width,
    )
    load = Call(op, tuple(range(num_ranks)), plan_bytes, root, width)
    assert [counted(load, member) for member in range(num_ranks)] == plan.sent_bytes.tolist()


@given(st.integers(1, 6), st.data())
def test_uneven_parts_are_counted_as_they_are(num_ranks: int, data: st.DataObject) -> None:
    row = st.lists(st.integers(0, 9), min_size=num_ranks, max_size=num_ranks)
    parts = [tuple(data.draw(row)) for _ in range(num_ranks)]
    plan = schedule("all_to_all", num_ranks, parts=tuple(parts))
    ranks = tuple(range(num_ranks))
    own = [
        counted(Call("all_to_all", ranks, sum(row), parts=(row,)), member) for member, row in enumerate(parts)
    ]
    assert own == plan.sent_bytes.tolist()


def _calls(comm: Communicator) -> None:
    size, rank = comm.world_size, comm.rank
    comm.all_reduce(torch.ones(7))
    comm.all_reduce(torch.ones(7, dtype=torch.float64), async_op=True).wait()
    comm.broadcast(torch.ones(5), src=1)
    comm.reduce(torch.ones(5), dst=2)
    comm.all_gather(torch.ones(3, dtype=torch.int16))
    comm.gather(torch.ones(3), dst=1)
    comm.scatter(torch.ones(3), [torch.ones(3)] * size if rank == 1 else None, src=1)
    comm.reduce_scatter(torch.ones(2 * size, 3))
    comm.all_to_all([torch.ones(rank + part) for part in range(size)])
    comm.all_to_all(torch.ones(size, 2))
    comm.barrier()
    ring = [comm.irecv(torch.ones(4), (rank - 1) % size), comm.isend(torch.ones(4), (rank + 1) % size)]
    for handle in ring:
        handle.wait()
    comm.broadcast_object("some text")
    comm.all_gather_object({"rank": rank})
    if rank > 0:
        comm.group([2, 1]).all_reduce(torch.ones(9))
    with comm.off_clock():
        comm.all_reduce(torch.ones(100))
        comm.send(torch.ones(4), 1) if rank == 0 else comm.recv(torch.ones(4), 0) if rank == 1 else None
    with comm.counted_as(11):
        comm.all_gather(torch.ones(6))
        comm.all_gather(torch.ones(2))
    comm.group([rank]).all_reduce(torch.ones(9))


def _counters(transport: str) -> list[tuple[int, int]]:
    traffic: list[Any] = run(transport, _calls, 3).traffic
    return [(rank.bytes_sent, rank.payload_bytes) for rank in traffic]


def test_every_transport_counts_the_same() -> None:
    counted = {transport: _counters(transport) for transport in TRANSPORTS}
    assert counted == dict.fromkeys(TRANSPORTS, counted["gloo"])
    sent, payload = counted["gloo"][0]
    assert payload > 0
    assert sent > 0


def _one(op: str, comm: Communicator) -> int:
    tensor = torch.ones(6)  # 24 bytes
    {"all_reduce": comm.all_reduce, "broadcast": comm.broadcast, "all_gather": comm.all_gather}[op](tensor)
    return comm.traffic.bytes_sent


@pytest.mark.parametrize(("op", "sent"), [("all_reduce", 32), ("broadcast", 48), ("all_gather", 48)])
def test_what_rank_0_of_three_sends(op: str, sent: int) -> None:
    assert run("threads", partial(_one, op), 3).results[0] == sent
