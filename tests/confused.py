"""Programs of three ranks that cannot end, or whose calls disagree."""

from __future__ import annotations

import torch

from exogym_core.communicator import Communicator


def ones(num: int = 3) -> torch.Tensor:
    return torch.ones(num)


def circle_of_receives(comm: Communicator) -> None:
    comm.recv(ones(), (comm.rank + 1) % 3)


def missing_send(comm: Communicator) -> None:
    if comm.rank == 1:
        comm.recv(ones(), 0)
    comm.barrier()


def missing_receive(comm: Communicator) -> None:
    if comm.rank == 1:
        comm.send(ones(), 0)
    comm.barrier()


def another_tag(comm: Communicator) -> None:
    if comm.rank == 0:
        comm.send(ones(), 1, tag=7)
    elif comm.rank == 1:
        comm.recv(ones(), 0, tag=8)


def crossed_groups(comm: Communicator) -> None:
    first, second = comm.group([0, 1, 2]), comm.group([0, 1, 2])
    for group in (second, first) if comm.rank == 1 else (first, second):
        group.all_reduce(ones())


def from_anyone(comm: Communicator) -> None:  # rank 1 waits for a message while the others wait for it
    comm.recv(ones()) if comm.rank == 1 else comm.barrier()


def one_leaves(comm: Communicator) -> None:
    comm.advance(0.1)
    if comm.rank:
        comm.all_reduce(ones())


def handles_in_a_circle(comm: Communicator) -> None:
    handle = comm.irecv(ones(), (comm.rank + 1) % 3)
    assert not handle.is_completed()
    handle.wait()


def nobody_sends(comm: Communicator) -> None:
    comm.advance(1.0)
    if comm.rank == 0:
        comm.recv(ones())


def never_waited_for(comm: Communicator) -> None:
    if comm.rank == 2:
        comm.all_reduce(ones(), async_op=True)


def a_send_that_nobody_takes(comm: Communicator) -> None:
    if comm.rank == 0:
        comm.send(ones(), 1)


def another_operation(comm: Communicator) -> None:
    comm.broadcast(ones(), src=0) if comm.rank == 1 else comm.all_reduce(ones())


def another_shape(comm: Communicator) -> None:
    comm.all_reduce(ones(4 if comm.rank == 2 else 3))


def another_dtype(comm: Communicator) -> None:
    comm.all_reduce(ones().double() if comm.rank == 0 else ones())


def another_reduction(comm: Communicator) -> None:
    comm.all_reduce(ones(), op="max" if comm.rank == 1 else "sum")


def another_root(comm: Communicator) -> None:
    comm.broadcast(ones(), src=comm.rank % 2)


def swapped(comm: Communicator) -> list[float]:
    """Two calls of equal shapes, on rank 1 the other way round."""
    first, second = torch.full((3,), 1.0), torch.full((3,), 100.0)
    if comm.rank == 1:
        comm.all_reduce(second)
        comm.all_reduce(first)
    else:
        comm.all_reduce(first)
        comm.all_reduce(second)
    return [float(first[0]), float(second[0])]


def a_message_of_another_size(comm: Communicator) -> None:
    if comm.rank == 0:
        comm.send(ones(5), 1)
    elif comm.rank == 1:
        comm.recv(ones(), 0)


def an_error_of_ones_own(comm: Communicator) -> None:
    comm.advance(0.25)
    if comm.rank == 2:
        raise ZeroDivisionError("one's own")
    comm.all_reduce(ones())
