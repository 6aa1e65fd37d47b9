"""`check_communicator`: the contract of communicators as a table of laws, for transports and wrappers of them."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from exogym_core.testing.group_calls import (
    OPERATIONS,
    CallSequence,
    GroupCall,
    TensorForm,
    difference,
    import_of,
    name_of,
)
from exogym_core.workers.host import RankJob, Sinks
from exogym_core.workers.run import Transport, run_ranks, transport_named
from netsim.errors import InputError, NetsimError, unknown_names
from netsim.testing import LawError
from netsim.units import format_count

if TYPE_CHECKING:
    from collections.abc import Mapping

    from exogym_core.communicator.base import Communicator
    from exogym_core.workers.host import RunResult

__all__ = ["COMMUNICATOR_LAWS", "CommunicatorLaw", "CommunicatorReport", "Trial", "check_communicator"]

Body = Callable[["Communicator"], Any]


@dataclass(frozen=True)
class Trial:
    """Runs of ranks on the communicator that is checked.

    Attributes:
        factory: a transport, its name, or what wraps a rank's communicator.
        options: of `run_ranks`.
        exact: reductions are in rank order, so results have the definition's bits.
        has_clock: ranks live in virtual time.
        num_calls: calls of each drawn sequence.
        num_sequences: number of drawn sequences.
        on_case: called before each run of ranks.
    """

    factory: str | Transport | Callable[[Communicator], Any]
    options: Mapping[str, Any]
    exact: bool
    has_clock: bool
    num_calls: int
    num_sequences: int
    on_case: Callable[[], object]

    def run(self, body: Body, num_ranks: int) -> RunResult[Any]:
        """Run a body on so many ranks."""
        self.on_case()
        made = self.factory
        if isinstance(made, Transport):
            return made.host(RankJob(num_ranks=num_ranks, **self.options)).run(body, Sinks())
        if isinstance(made, str):
            return run_ranks(body, num_ranks, transport=made, **self.options)
        return run_ranks(lambda comm: body(_made(made, comm)), num_ranks, **self.options)

    def program(self, arguments: str) -> str:
        """Program that checks it again, from the other arguments of `check_communicator`."""
        given = "".join(f", {name}={value!r}" for name, value in self.options.items())
        lines = ["import torch", *import_of(self.factory)]
        lines += ["from netgym.testing import CallSequence, GroupCall, TensorForm, check_communicator"]
        lines += [f"check_communicator({name_of(self.factory)}, {arguments}, exact={self.exact}{given})\n"]
        return "\n".join(lines)

    def check(self, sequence: CallSequence) -> None:
        """Raise LawError where results of these calls are not those of the definitions."""
        try:
            problem = sequence.problem(self.run(sequence.body, sequence.num_ranks).results, self.exact)
        except NetsimError as error:
            problem = str(error).partition("\n")[0]
        if problem:
            raise LawError(problem, lambda: self.program(f"calls={sequence!r}"))

    def hold(self, name: str) -> None:
        """Raise LawError where the law of that name is broken."""
        law = COMMUNICATOR_LAWS[name]
        write: str | Callable[[], str] = partial(self.program, f"[{name!r}]")
        try:
            problem = law.problem(self)
        except LawError as error:
            problem, write = error.problem, error.program
        except (NetsimError, AttributeError) as error:
            problem = str(error).partition("\n")[0]
        if problem:
            raise LawError(f"law {name!r} ({law.about}): {problem}", write)


def check_communicator(
    factory: str | Transport | Callable[[Communicator], Any],
    laws: Sequence[str] = (),
    *,
    exact: bool | None = None,
    calls: CallSequence | None = None,
    num_calls: int = 20,
    num_sequences: int = 40,
    on_case: Callable[[], object] = lambda: None,
    **options: Any,
) -> CommunicatorReport:
    """Hold a communicator to the contract that the shipped ones keep.

    Args:
        factory: a `Transport`, the name of a registered one, or a class or function that wraps a rank's communicator.
        laws: names of those to check, of COMMUNICATOR_LAWS; by default all.
        exact: reductions are in rank order, so results have the bits of the definition; by default so on a transport
            with a clock.
        calls: check these alone.
        num_calls: calls of each drawn sequence; where starting ranks takes long, few sequences of many calls.
        num_sequences: number of drawn sequences.
        on_case: called before each run of ranks.
        options: of `run_ranks`, such as `workers`.

    Raises:
        LawError: a law is broken; the error has the difference and a program that shows it.
        InputError: `factory` is none of these.

    >>> print(check_communicator("netsim", ["handles", "groups"]))
    'netsim': 2 laws passed
    """
    if isinstance(laws, str) or not isinstance(laws, Sequence):
        raise InputError(f"check_communicator: laws={laws!r}: expected a list, such as [handles, groups]")
    if unknown := [str(name) for name in laws if name not in COMMUNICATOR_LAWS]:
        raise unknown_names("law of communicators", unknown, COMMUNICATOR_LAWS)
    for name, number in (("num_calls", num_calls), ("num_sequences", num_sequences)):
        if not isinstance(number, int) or number < 1:
            raise InputError(f"check_communicator: {name}={number!r}: expected a number from 1")
    is_transport = isinstance(factory, str | Transport)
    if not (is_transport or callable(factory)):
        raise InputError(
            f"check_communicator: {type(factory).__name__} is no transport, and no function of a communicator that "
            "returns one"
        )
    transport = transport_named(factory) if isinstance(factory, str) else factory
    has_clock = transport.has_clock if isinstance(transport, Transport) else True
    exact = has_clock if exact is None else exact
    trial = Trial(factory, options, exact, has_clock, num_calls, num_sequences, on_case)
    if calls is not None:
        trial.check(calls)
        return CommunicatorReport(name_of(factory), ())
    names = tuple(laws or COMMUNICATOR_LAWS)
    if "sequences" in names:
        import_module("exogym_core.testing.drawing")  # raises without hypothesis
    for name in names:
        trial.hold(name)
    return CommunicatorReport(name_of(factory), names)


def _made(factory: Callable[[Communicator], Any], comm: Communicator) -> Any:
    made = factory(comm)
    if not hasattr(made, "world_size"):
        raise InputError(f"{name_of(factory)}(comm) returns {type(made).__name__}, which is no communicator")
    return made


@dataclass(frozen=True)
class CommunicatorReport:
    """A communicator that keeps these laws; printed as a line."""

    communicator: str
    laws: Sequence[str]

    def __str__(self) -> str:
        return f"{self.communicator}: {format_count(len(self.laws), 'law')} passed"


# --- collectives ---------------------------------------------------------------------------------------------


def _operations(trial: Trial) -> str:
    calls = [
        GroupCall(
            operation,
            TensorForm(dtype, (3, 2), "transposed", number, is_rough=True),
            root=1,
            is_uneven=operation == "all_to_all" and is_listed,
            is_listed=is_listed,
            wait_after=0 if number % 2 else None,
        )
        for number, operation in enumerate(OPERATIONS)
        for dtype in (torch.float32, torch.bfloat16, torch.int16, torch.uint8)
        for is_listed in {False, operation in ("reduce_scatter", "all_to_all")}
    ]
    try:
        trial.check(CallSequence(3, calls))
    except LawError as error:
        return error.problem  # the law is a shorter program than its calls
    return ""


def _sequences(trial: Trial) -> str:
    from exogym_core.testing.drawing import call_sequences, hold_for_all

    hold_for_all(call_sequences(trial.num_calls), trial.check, trial.num_sequences)
    return ""


def _claims(results: Sequence[dict[str, bool]]) -> str:
    """First claim that is not true on a rank, in a line."""
    return next(
        (
            f"rank {rank}: {claim}: no"
            for rank, row in enumerate(results)
            for claim, holds in row.items()
            if not holds
        ),
        "",
    )


def _in_place(comm: Communicator) -> dict[str, bool]:
    parameter, part = torch.nn.Parameter(torch.ones(3)), torch.zeros(3)
    view = torch.zeros(4, 4)
    comm.all_reduce(view[:, 1])
    parts = [torch.ones(3)] * comm.world_size if comm.rank == 0 else None
    return {
        "all_reduce returns its parameter": comm.all_reduce(parameter) is parameter,
        "broadcast returns its tensor": comm.broadcast(part) is part,
        "reduce returns its tensor": comm.reduce(part, 1) is part,
        "scatter returns its tensor": comm.scatter(part, parts) is part,
        "wait returns the call's tensor": comm.all_reduce(part, async_op=True).wait() is part,
        "a parameter is reduced": parameter.requires_grad and parameter.tolist() == [comm.world_size] * 3,
    }


def _handles(comm: Communicator) -> dict[str, bool]:
    tensor = torch.ones(2)
    handle = comm.all_reduce(tensor, async_op=True)
    first, second = handle.wait().clone(), handle.wait()
    return {
        "a handle that was waited for is completed": handle.is_completed(),
        "waiting twice gives the same": torch.equal(first, second),
        "the sum is there once": torch.equal(tensor, torch.full((2,), 2.0)),
        "now() is not negative": comm.now() >= 0.0,
    }


def _groups(comm: Communicator) -> dict[str, bool]:
    alone = comm.group([comm.rank])
    alone.all_reduce(torch.ones(2))
    pair = comm.group([1, 0])
    return {
        "a rank alone is a group": (alone.rank, alone.world_size) == (0, 1),
        "ranks of a group are in the order given": pair.rank == 1 - comm.rank,
        "rank 0 of a group is its root 0": pair.broadcast(torch.tensor(comm.rank), 0).item() == 1,
        "objects come in the group's order": pair.all_gather_object(comm.rank) == [1, 0],
    }


def _overlapping_groups(comm: Communicator) -> list[float]:
    """Members of one group may have made other groups before, and the same group twice."""
    totals = []
    if comm.rank:
        totals.append(comm.group([1, 2]).all_reduce(torch.ones(1)).item())
    totals += [comm.group([1, 0, 2]).all_reduce(torch.ones(1)).item() for _ in range(2)]
    if comm.rank != 1:
        totals.append(comm.group([0, 2]).group([1, 0]).all_reduce(torch.ones(1)).item())
    return totals


def _reused_groups(comm: Communicator) -> list[float]:
    got = []
    for number in range(4):
        pair = [0, comm.rank or 1 + number % 2]
        if comm.rank in (0, 1 + number % 2):
            group = comm.group(pair, reuse=True)
            handle = group.all_reduce(torch.tensor([float(comm.rank + number)]), async_op=True)
            got.append(float(comm.group(pair, reuse=True).all_reduce(torch.tensor([1.0]))))
            got.append(float(handle.wait()))
            # Another order and a group of its own are others.
            got.append(float(comm.group(pair[::-1], reuse=True).broadcast(torch.tensor([comm.rank]))))
            got.append(float(comm.group(pair).all_reduce(torch.tensor([2.0]))))
    return got


def _all_groups(trial: Trial) -> str:
    one, two = [2.0, 1.0, 1.0, 4.0, 2.0, 5.0, 1.0, 4.0], [2.0, 4.0, 2.0, 4.0, 2.0, 8.0, 2.0, 4.0]
    return (
        _claims(trial.run(_groups, 2).results)
        or difference(
            trial.run(_overlapping_groups, 3).results,
            [[3.0, 3.0, 2.0], [2.0, 3.0, 3.0], [2.0, 3.0, 3.0, 2.0]],
        )
        or difference(trial.run(_reused_groups, 3).results, [one[:4] + two[:4] + one[4:] + two[4:], one, two])
    )


# By what the line says: calls with an argument that is wrong by itself, on the first of two ranks or on both.
_WRONG: dict[str, Callable[[Communicator], object]] = {
    "all_reduce: op='avg' of torch.int64": lambda comm: comm.all_reduce(torch.ones(2).long(), "avg"),
    "all_reduce: torch.bool cannot be reduced": lambda comm: comm.all_reduce(torch.ones(2).bool()),
    "all_reduce: unknown reduce op 'mean': did you mean 'avg'? Accepted: avg, ": (
        lambda comm: comm.all_reduce(torch.ones(2), "mean")
    ),
    "reduce: unknown reduce op 'add': did you mean 'sum'?": lambda comm: comm.reduce(torch.ones(2), 0, "add"),
    "all_reduce: takes a tensor, got list": lambda comm: comm.all_reduce([1, 2]),  # type: ignore[arg-type]
    "broadcast: takes a tensor, got list": lambda comm: comm.broadcast([1, 2]),  # type: ignore[arg-type]
    "reduce: takes a tensor, got int": lambda comm: comm.reduce(1),  # type: ignore[arg-type]
    "all_gather: takes a tensor, got float": lambda comm: comm.all_gather(1.0),  # type: ignore[arg-type]
    "gather: takes a tensor, got NoneType": lambda comm: comm.gather(None),  # type: ignore[arg-type]
    "scatter: takes a tensor, got list": lambda comm: comm.scatter([1, 2], src=comm.rank),  # type: ignore[arg-type]
    "reduce_scatter: each of the list: takes a tensor, got int": lambda comm: comm.reduce_scatter([1, 2]),  # type: ignore[list-item]
    "all_to_all: takes a tensor, or a list of one a rank, got int": lambda comm: comm.all_to_all(2),  # type: ignore[arg-type]
    "send: takes a tensor, got list": lambda comm: comm.send([1, 2], 1 - comm.rank),  # type: ignore[arg-type]
    "recv: takes a tensor, got list": lambda comm: comm.recv([1, 2], 1 - comm.rank),  # type: ignore[arg-type]
    "put: takes a tensor, got str": lambda comm: comm.put("letter", 1 - comm.rank),  # type: ignore[arg-type]
    "broadcast: src=2 is not a rank; use 0 to 1": lambda comm: comm.broadcast(torch.ones(2), 2),
    "reduce: dst=-1 is not a rank": lambda comm: comm.reduce(torch.ones(2), -1),
    "send: dst=True is not a rank": lambda comm: comm.send(torch.ones(2), True),
    "reduce_scatter: a tensor of shape [3] cannot be cut into 2": lambda comm: comm.reduce_scatter(
        torch.ones(3)
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
    **{
        f"{name}: writes into its tensor, and [3] is expanded": (
            lambda comm, name=name: getattr(comm, name)(torch.zeros(1).expand(3))  # type: ignore[misc]
        )
        for name in ("all_reduce", "broadcast", "reduce")
    },
    "scatter: writes into its tensor": (
        lambda comm: comm.scatter(torch.zeros(1).expand(3), [torch.zeros(1).expand(3)] * 2)
    ),
}


def _messages(comm: Communicator) -> list[str]:
    messages = []
    for wrong in _WRONG.values():
        try:
            wrong(comm)
            messages.append("")
        except InputError as error:
            messages.append(str(error))
    return messages


def _arguments(trial: Trial) -> str:
    place = re.compile(r" \(at [\w-]+\.py:\d+\)$")
    for rank, messages in enumerate(trial.run(_messages, 2).results):
        for wanted, line in zip(_WRONG, messages, strict=True):
            if not (line.startswith(f"rank {rank}, ") and wanted in line and place.search(line)):
                return (
                    f"rank {rank}: {line or 'no error'!r}, not 'rank {rank}, ...{wanted}... (at FILE:LINE)'"
                )
    return ""


def _changed_later(comm: Communicator) -> dict[str, bool]:
    """Whether results stay what they are when what was given to the call is changed after it."""
    last = comm.world_size - 1
    calls: dict[str, Callable[[Tensor], Any]] = {
        "all_gather": comm.all_gather,
        "all_reduce": lambda x: comm.all_reduce(x).clone(),
        "all_to_all": lambda x: comm.all_to_all([x] * comm.world_size),
        "broadcast": lambda x: comm.broadcast(x, src=last).clone(),
        "gather": lambda x: comm.gather(x, dst=1),
        "reduce": lambda x: comm.reduce(x, dst=1).clone(),
        "reduce_scatter": lambda x: comm.reduce_scatter([x] * comm.world_size),
        "scatter": lambda x: comm.scatter(
            torch.zeros(2), [x] * comm.world_size if comm.rank == last else None, src=last
        ),
    }
    same = {}
    for name, call in calls.items():
        results = []
        for change in (False, True):
            x = torch.tensor([float(comm.rank), 1.0])
            got = call(x)
            if change:
                x.fill_(99.0)
            comm.barrier()
            results.append(
                [each.tolist() for each in (got if isinstance(got, list) else [got]) if each is not None]
            )
        same[f"{name}: its result outlives what was given"] = results[0] == results[1]
    return same


def _counted(comm: Communicator) -> tuple[int, int]:
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
    coming, going = comm.irecv(torch.ones(4), (rank - 1) % size), comm.isend(torch.ones(4), (rank + 1) % size)
    coming.wait()
    going.wait()
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
    return comm.traffic.bytes_sent, comm.traffic.payload_bytes


def _counts(trial: Trial) -> str:
    wanted = run_ranks(_counted, 3).results
    for rank, (got, expected) in enumerate(zip(trial.run(_counted, 3).results, wanted, strict=True)):
        if tuple(got) != expected:
            return f"rank {rank}: bytes_sent and payload_bytes are {tuple(got)}, not {expected}"
    return ""


# --- messages ------------------------------------------------------------------------------------------------


def _serve(comm: Communicator) -> list[tuple[int, float]]:
    """Double each message, until no rank can send any more."""
    log = []
    while messages := comm.take(wait=math.inf):
        for source, tensor in messages:
            log.append((source, tensor[0].item()))
            comm.put(2 * tensor, source, "answers")
    return log


_MOST_POLLS = 20_000  # for an answer; in real time 20 s at least


def _ask(comm: Communicator) -> list[list[float]]:
    """Send numbers to the server and poll for each answer."""
    got: list[list[float]] = []
    for number in range(3):
        comm.advance(0.1 * comm.rank)
        comm.put(torch.tensor([100.0 * comm.rank + number, 1.0]), 0)
        for _ in range(_MOST_POLLS):
            if messages := comm.take("answers"):
                break
            comm.advance(0.01)
            if comm.transport != "netsim":
                time.sleep(0.001)
        got += [tensor.tolist() for _, tensor in messages]
    return got


def _server(trial: Trial) -> str:
    log, *answers = trial.run(lambda comm: _serve(comm) if comm.rank == 0 else _ask(comm), 3).results
    sent = [[100.0 * rank + number for number in range(3)] for rank in (1, 2)]
    arrived = [[value for source, value in log if source == rank] for rank in (1, 2)]
    return difference(arrived, sent) or difference(
        answers, [[[2 * value, 2.0] for value in values] for values in sent]
    )


def _to_itself_and_next(comm: Communicator) -> dict[str, bool]:
    sent = [torch.arange(6).view(2, 3), torch.zeros(0), torch.tensor(2.5, dtype=torch.float16)]
    for tensor in sent:
        comm.put(tensor, comm.rank, "own")
        comm.put(tensor, (comm.rank + 1) % comm.world_size, "next")
    comm.barrier()
    comm.barrier()
    got = comm.take("own", wait=5.0)
    while len(got) < 6 and (more := comm.take("next", wait=5.0)):
        got += more
    sources, tensors = [source for source, _ in got], [tensor for _, tensor in got]
    return {
        "each message arrives": len(got) == 6,
        "messages name their senders": sources == [comm.rank] * 3 + [1 - comm.rank] * 3,
        "messages arrive as they were sent, in order": not difference(tensors, sent * 2),
    }


def _on_device(comm: Communicator) -> list[str]:
    pair = comm.group([0, 1])
    if comm.rank == 1:
        comm.put(torch.ones(3), 0)
        return []
    pair.device = torch.device("meta")
    return [tensor.device.type for _, tensor in comm.take(wait=math.inf)]


def _mailboxes(trial: Trial) -> str:
    return (
        _claims(trial.run(_to_itself_and_next, 2).results)
        or difference(trial.run(_on_device, 2).results[0], ["meta"])
        or _server(trial)
    )


def _crosswise(comm: Communicator) -> list[list[float]]:
    """Two messages each way, received in the other order: first by `recv`, then by `irecv`, sent by `send`."""
    other, got = 1 - comm.rank, [torch.zeros(1) for _ in range(4)]
    sent = [torch.full((1,), 10.0 * comm.rank + tag) for tag in range(4)]
    going = [comm.isend(sent[tag], other, tag) for tag in (0, 1)]
    for tag in (1, 0):
        comm.recv(got[tag], other, tag)
    coming = [comm.irecv(got[tag], other, tag) for tag in (3, 2)]
    for tag in (2, 3):
        comm.send(sent[tag], other, tag)
    for sending in going:
        sending.wait()
    for receiving in coming:
        receiving.wait()
    return [each.tolist() for each in got]


def _tags(trial: Trial) -> str:
    wanted = [[[10.0 * other + tag] for tag in range(4)] for other in (1, 0)]
    return difference(trial.run(_crosswise, 2).results, wanted)


def _from_anyone(comm: Communicator) -> Any:
    tensor = torch.zeros(2)
    if comm.rank:
        for number in range(2):
            comm.advance(0.5 + 0.5 * comm.rank)
            comm.send(torch.full((2,), 10.0 * comm.rank + number), 0)
        return None
    return [(comm.recv(tensor), tensor[0].item()) for _ in range(4)]


def _anyone(trial: Trial) -> str:
    got = trial.run(_from_anyone, 3).results[0]
    # In order of virtual time: at 1, 1.5, 2 and 3 s.
    in_order = [(1, 10.0), (2, 20.0), (1, 11.0), (2, 21.0)]
    return difference(got, in_order) if trial.has_clock else difference(sorted(got), sorted(in_order))


def _taken_back(comm: Communicator) -> Any:
    tensor = torch.zeros(2)
    if comm.rank:
        comm.recv(torch.zeros(1), 0)
        comm.advance(5.0)
        comm.send(torch.full((2,), 7.0), 0)
        return None
    handle = comm.irecv(torch.zeros(2), 1)
    is_cancelled = handle.cancel()
    comm.send(torch.zeros(1), 1)
    return [is_cancelled, comm.recv(tensor, 1).tolist()]


def _too_late(comm: Communicator) -> Any:
    tensor = torch.zeros(1)
    if comm.rank:
        handle: Any = comm.isend(torch.ones(1), 0)
        return [handle.cancel(), handle.wait()]
    handle = comm.irecv(tensor, 1)
    comm.advance(1.0)
    return [handle.cancel(), handle.wait().item()]


def _cancelled(trial: Trial) -> str:
    found = difference(trial.run(_taken_back, 2).results[0], [True, [7.0, 7.0]])
    if trial.has_clock and not found:
        return difference(trial.run(_too_late, 2).results, [[False, 1.0], [False, None]])
    return found


@dataclass(frozen=True)
class CommunicatorLaw:
    """A law of communicators: what it says, and a function that finds what breaks it, in a line."""

    about: str
    problem: Callable[[Trial], str]


COMMUNICATOR_LAWS: dict[str, CommunicatorLaw] = {
    "operations": CommunicatorLaw("each operation in several dtypes is its definition", _operations),
    "in place": CommunicatorLaw(
        "calls in place return their tensor, and take parameters and views",
        lambda trial: _claims(trial.run(_in_place, 2).results),
    ),
    "handles": CommunicatorLaw(
        "handles may be waited for again", lambda trial: _claims(trial.run(_handles, 2).results)
    ),
    "groups": CommunicatorLaw("groups have their own ranks, overlap and come again", _all_groups),
    "arguments": CommunicatorLaw(
        "an argument that is wrong by itself is refused before anything is sent, in a line with rank and place",
        _arguments,
    ),
    "inputs": CommunicatorLaw(
        "inputs are read at the call", lambda trial: _claims(trial.run(_changed_later, 4).results)
    ),
    "bytes": CommunicatorLaw("bytes are counted as on the simulated network", _counts),
    "mailboxes": CommunicatorLaw(
        "messages lie in mailboxes in their senders' order, and a server ends", _mailboxes
    ),
    "tags": CommunicatorLaw("a message is received under its tag, in any order", _tags),
    "anyone": CommunicatorLaw("a receive from anyone takes the first message and names its sender", _anyone),
    "cancelled": CommunicatorLaw("a receive that is cancelled leaves its message to the next", _cancelled),
    "sequences": CommunicatorLaw(
        "drawn calls of groups, asynchronous and off the clock too, are their definitions", _sequences
    ),
}
"""Laws by name, in the order in which they are checked."""
