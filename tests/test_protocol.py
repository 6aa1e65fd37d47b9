"""The protocol of simulation and rank groups: what is read is what was written, and leases end with the last reader."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from exogym_core.communicator.exchange import Part, Signature, reduce_tensors
from exogym_core.workers.processes import protocol
from exogym_core.workers.processes.protocol import (
    Answered,
    Asking,
    Blocked,
    Done,
    Failed,
    Freed,
    MessageDecoder,
    MessageEncoder,
    Requests,
)
from exogym_core.workers.processes.shared_memory import Arena, Block, Leases, TensorRef, blocks_in
from netsim.errors import BrokenCallError, InputError
from netsim.ranks import Advance, Ask, Await, Call, CallEnding, Exit, Key, Lane, Mark, Post, Wait

_GROUPS = st.sampled_from([0, (0, "off"), ((0, 1, 2), 3), Lane(0, 1, 2, 7)])
_KEYS = st.builds(Key, _GROUPS, st.integers(0, 5))
_REFS = st.lists(
    st.builds(
        TensorRef,
        st.one_of(st.binary(max_size=9), st.integers(0, 1 << 45)),
        st.integers(0, 99),
        st.sampled_from([(), (3,), (2, 5)]),
        st.sampled_from([torch.float32, torch.bfloat16]),
    ),
    max_size=3,
)
_BLOCKS = st.lists(st.builds(Block, st.integers(0, 1 << 45), st.integers(1, 99)), max_size=2)
_SECONDS = st.floats(0, 1e6) | st.just(math.inf)
_CALLS = st.builds(Call, st.sampled_from(["all_reduce", "sendrecv"]), st.just((0, 1, 2)), st.integers(0, 99))
_SIGNATURES = st.builds(
    Signature,
    st.just("all_reduce"),
    st.just("float32"),
    st.just(((3,),)),
    st.sampled_from(["sum", "max"]),
    st.integers(0, 2),
    st.none(),
    st.sampled_from([("train.py", 3), ("train.py", 9)]),
)
_REQUESTS = st.one_of(
    st.builds(Advance, st.floats(0, 9)),
    st.builds(Post, _KEYS, st.integers(0, 2), _CALLS, _SECONDS),
    st.builds(Wait, _KEYS),
    st.builds(Await, _KEYS, _SECONDS, st.just(False)),
    st.builds(Ask, st.none() | _KEYS),
    st.builds(Ask, _KEYS, st.floats(0, 9)),
    st.builds(Mark, st.sampled_from([{"waited": "barrier", "place": "a.py:1"}, {"step": 3, "loss": 0.5}])),
    st.just(Exit()),
)
_RECORDS = st.one_of(
    st.builds(Part, _KEYS, st.just((0, 1, 2)), st.integers(0, 2), _SIGNATURES, _REFS),
    st.builds(Requests, st.integers(0, 2), st.lists(_REQUESTS, max_size=4)),
    st.builds(Blocked, st.integers(0, 2), _KEYS, st.integers(0, 2)),
    st.builds(Asking, st.integers(0, 2)),
    st.builds(Freed, _BLOCKS),
    st.builds(Failed, st.integers(0, 2), st.just("told")),
    st.builds(
        Done, _KEYS, st.just((0, 1)), _REFS, st.dictionaries(st.integers(0, 2), _REFS, max_size=2), st.none(), _BLOCKS
    ),
    st.builds(
        Answered, st.integers(0, 2), st.one_of(st.floats(0, 9), st.booleans(), st.none(), st.just(CallEnding.LATE))
    ),
)  # fmt: skip


@given(
    st.lists(st.one_of(_RECORDS, st.lists(_RECORDS, max_size=3)), max_size=12),
    st.sampled_from([3, 400, 1 << 16]),
)
def test_what_is_read_is_what_was_written(messages: list[Any], most: int) -> None:
    """Every record comes back equal and of its own type, also while the memo is cleared and filled again."""
    writer, reader = MessageEncoder(), MessageDecoder()
    before, protocol._MOST_BYTES = protocol._MOST_BYTES, most
    try:
        for each in messages:
            got = reader.read(*writer.write(each))
            assert got == each
            assert repr(got) == repr(each)
    finally:
        protocol._MOST_BYTES = before


def test_what_has_no_short_form_travels_too() -> None:
    """Objects, errors, keys with other numbers, and what follows one of them."""
    writer, reader = MessageEncoder(), MessageDecoder()
    blocked = Blocked(1, Key(0, 3), 1)
    odd = Blocked(1, Key(0, frozenset({3})), 1)
    for each in (blocked, odd, [blocked, odd], blocked, {"a": 1}, (0, 7)):
        assert reader.read(*writer.write(each)) == each
    error = reader.read(*writer.write(Done(Key(0, 1), (1,), [], {}, BrokenCallError("gone"), [])))
    assert str(error.error) == "gone"
    with pytest.raises(InputError):
        writer.write([blocked, Requests(1, [Mark({"loss": (i for i in range(3))})])])
    assert reader.read(*writer.write(blocked)) == blocked


def test_a_call_said_again_is_short() -> None:
    """However long the path and many the ranks: numbers and values alone are left."""
    writer = MessageEncoder()
    signature = Signature("all_reduce", "float32", ((3,),), "sum", 0, None, ("/a/long/path/to/train.py", 30))
    call = Call("all_reduce", tuple(range(64)), 12)

    def step(number: int) -> list[Any]:
        key = Key(0, number)
        ref = TensorRef(b"123456789012", 12, (3,), torch.float32)
        posted = Requests(5, [Post(key, 5, call), Wait(key)])
        return [Part(key, call.ranks, 5, signature, [ref]), Blocked(5, key, 5), posted]

    writer.write(step(0))
    assert len(writer.write(step(1))[0]) < 180


def test_a_row_that_changes_is_written_as_it_is_then() -> None:
    """The memo never stands for a value that may have changed since."""
    writer, reader = MessageEncoder(), MessageDecoder()
    row = {"losses": [1.0]}
    assert reader.read(*writer.write([Requests(0, [Mark(row)])]))[0].requests[0].row == {"losses": [1.0]}
    row["losses"].append(2.0)
    assert reader.read(*writer.write([Requests(0, [Mark(row)])]))[0].requests[0].row == {"losses": [1.0, 2.0]}


def test_blocks_go_back_when_the_last_has_read_them() -> None:
    """Those of the simulation's own region at once, those of processes with the next message to them."""
    arena = Arena(num_regions=3)
    loans = Leases(arena)
    own = arena.put(torch.zeros(5000))
    theirs = Arena(arena.fd, num_regions=3, region=2).put(torch.ones(5000))
    assert isinstance(own.content, int)
    assert isinstance(theirs.content, int)
    mine, lent = Block(own.content, own.num_bytes), Block(theirs.content, theirs.num_bytes)
    loans.lend([mine, lent])
    loans.lend([mine, lent])
    loans.give_back([mine, lent])
    assert loans.due_to(1) == []
    loans.give_back([mine, lent])
    assert loans.due_to(0) == []
    assert loans.due_to(1) == [lent]
    assert loans.due_to(1) == []
    assert arena.put(torch.zeros(5000)).content == own.content
    arena.close()


def test_what_lies_in_shared_memory_is_not_copied_again() -> None:
    arena = Arena(num_regions=2)
    ref = Arena(arena.fd, region=1).put(torch.arange(5000.0))
    assert arena.put(arena.get(ref)) == ref
    room = arena.empty((5000,), torch.float32)
    assert arena.get(arena.put(room.fill_(3.0))).eq(3).all()
    arena.close()


def test_a_room_is_sent_in_place_as_a_whole_and_once() -> None:
    """A part, a second message, or values that change soon are copied: each block goes back by itself."""
    arena = Arena(region=1)
    room = arena.empty((40, 1000), torch.float32)
    places = [arena.put(tensor).content for tensor in (room[:30], room.T, room, room)]
    places.append(arena.put(arena.empty((40, 1000), torch.float32), copies=True).content)
    assert len(set(places)) == 5
    assert arena.get(TensorRef(places[2], room.nbytes, room.shape, room.dtype)).data_ptr() == room.data_ptr()
    arena.close()


@pytest.mark.parametrize("is_read_first", [False, True])
def test_a_room_is_free_when_its_tensor_is_gone_and_others_have_read_it(is_read_first: bool) -> None:
    """They read its values until they say so; its memory then goes back to the system at once."""
    arena = Arena(region=1)
    room = arena.empty((1 << 20,), torch.float32, once=True).fill_(3.0)
    ref, view = arena.put(room), room[5:]
    del room
    if is_read_first:
        arena.free(blocks_in([ref]))
        assert not arena.get(ref).any()
    else:
        del view
        assert arena.get(ref).eq(3.0).all()
    other = arena.put(torch.ones(1 << 20))
    assert other.content != ref.content
    if is_read_first:
        del view
    else:
        arena.free(blocks_in([ref]))
    assert arena.put(torch.ones(1 << 20)).content == ref.content
    arena.close()


def test_blocks_that_may_be_needed_again_soon_keep_their_memory() -> None:
    arena = Arena(region=1)
    for once in (False, True, False):
        ref = arena.put(arena.empty((1 << 20,), torch.float32, once=once).fill_(3.0))
        arena.free(blocks_in([ref]))
        assert arena.get(ref).eq(0.0 if once else 3.0).all()
    arena.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64])
@pytest.mark.parametrize("op", ["sum", "avg", "product", "min", "max"])
def test_pieces_give_the_bits_of_the_whole(dtype: torch.dtype, op: str) -> None:
    """Large tensors are reduced piece by piece, into shared memory, to the same bits."""
    if op == "avg" and not dtype.is_floating_point:
        return
    generator = torch.Generator().manual_seed(3)
    tensors = [(torch.randn(300_001, generator=generator) * 9).to(dtype) for _ in range(3)]
    strided = [torch.stack([tensor, tensor], dim=1)[:, 0] for tensor in tensors]  # these go whole
    arena = Arena()
    shared = reduce_tensors(tensors, op, arena.empty)
    assert arena.put(shared).num_bytes == shared.nbytes
    assert torch.equal(shared.view(torch.uint8), reduce_tensors(strided, op).contiguous().view(torch.uint8))
    arena.close()
