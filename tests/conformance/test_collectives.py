"""Every transport keeps the laws of communicators, each of which finds a bug; bytes are those of the schedules."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transports import TRANSPORTS, run

from exogym_core.communicator import Communicator
from exogym_core.communicator.simulated.simulation import Schedules, World
from exogym_core.testing import COMMUNICATOR_LAWS, check_communicator
from netsim import schedule
from netsim.collectives.schedules.algorithms import default_algorithm
from netsim.errors import InputError
from netsim.ranks import Call
from netsim.testing import LawError


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_every_transport_keeps_the_laws(transport: str) -> None:
    options = dict(TRANSPORTS[transport])
    # Processes cost: few sequences of many calls there, many small ones in threads.
    sizes = {} if transport == "threads" else {"num_calls": 20, "num_sequences": 1}
    check_communicator(options.pop("transport"), **sizes, **options)


class Wrapped:
    """A communicator with other methods, in groups too."""

    methods: dict[str, Callable[..., Any]]

    def __init__(self, comm: Communicator) -> None:
        self.comm = comm

    def __getattr__(self, name: str) -> Any:
        return partial(self.methods[name], self.comm) if name in self.methods else getattr(self.comm, name)

    def group(self, ranks: Any, **options: Any) -> Any:
        made = self.methods.get("group", type(self.comm).group)(self.comm, ranks, **options)
        return type(self)(made)


def shares_memory(comm: Any, tensor: Any, **options: Any) -> Any:
    got = comm.all_gather(tensor, **options)
    return got if options.get("async_op") else [*got[: comm.rank], tensor, *got[comm.rank + 1 :]]


class Late:
    """A handle whose call is made when it is waited for."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self.call, self.done = call, False

    def wait(self) -> Any:
        self.result = self.result if self.done else self.call()
        self.done = True
        return self.result

    def is_completed(self) -> bool:
        return self.done


class Kept:
    """A receive that says that it is cancelled, and is not."""

    def __init__(self, handle: Any) -> None:
        self.wait, self.is_completed = handle.wait, handle.is_completed

    def cancel(self) -> bool:
        return True


def free_of_charge(comm: Any, *given: Any, **options: Any) -> Any:
    with comm.off_clock():
        return comm.reduce_scatter(*given, **options)


BUGS: dict[str, tuple[str, Callable[..., Any]]] = {
    "operations": ("gather", lambda comm, x, dst=0, **o: comm.gather(x, 0, **o)),
    "in place": ("broadcast", lambda comm, x, src=0, **o: comm.broadcast(x.clone(), src, **o)),
    "handles": (
        "all_reduce",
        lambda comm, x, op="sum", async_op=False: (
            Late(lambda: comm.all_reduce(x.clone(), op)) if async_op else comm.all_reduce(x, op)
        ),
    ),
    "groups": ("group", lambda comm, ranks, **o: comm.group(sorted(ranks), **o)),
    "arguments": (
        "all_reduce",
        lambda comm, x, op="sum", **o: comm.all_reduce(x, "avg" if op == "mean" else op, **o),
    ),
    "inputs": ("all_gather", shares_memory),
    "bytes": ("reduce_scatter", free_of_charge),
    "mailboxes": ("take", lambda comm, *given, **o: comm.take(*given, **o)[::-1]),
    "tags": ("isend", lambda comm, x, dst, tag=0: comm.isend(x, dst)),
    "anyone": ("recv", lambda comm, x, src=None, tag=0: comm.recv(x, 1 if src is None else src, tag) and src),
    "cancelled": ("irecv", lambda comm, *given, **o: Kept(comm.irecv(*given, **o))),
    "sequences": (
        "all_reduce",
        lambda comm, x, op="sum", async_op=False: (
            Late(lambda: comm.all_reduce(x, op)) if async_op else comm.all_reduce(x, op)
        ),
    ),
}


@pytest.mark.parametrize("law", COMMUNICATOR_LAWS)
def test_each_law_finds_a_bug(law: str) -> None:
    name, method = BUGS[law]
    broken = type("Broken", (Wrapped,), {"methods": {name: method}})
    with pytest.raises(LawError, match=f"law '{law}'") as caught:
        check_communicator(broken, [law], num_calls=4)
    assert len(caught.value.program.splitlines()) <= 15


def _to_nobody(comm: Communicator) -> None:
    comm.broadcast(torch.ones(1), 7)


def test_each_rank_is_named_once_where_all_fail_alike():
    """Over gloo the line of another rank began with `rank 1: rank 1, broadcast:`."""
    with pytest.raises(InputError, match=r"^rank \d, broadcast: src=7 is not a rank") as caught:
        run("gloo", _to_nobody, 2)
    for line in str(caught.value).splitlines():
        assert len(re.findall(r"rank \d", line)) <= 1


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
