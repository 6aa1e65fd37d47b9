"""What starting ranks gives them, alike on every transport, and the real one's own options."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import random
import socket
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transports import TRANSPORTS, run

from exogym_core.communicator import Communicator
from exogym_core.communicator.gloo import rendezvous as gloo_rendezvous
from exogym_core.communicator.gloo.communicator import GlooCommunicator
from exogym_core.communicator.gloo.rendezvous import NoAnswerError, Rendezvous
from exogym_core.plain import packed, unpacked
from exogym_core.testing import check_communicator
from exogym_core.workers.gloo import GlooHost
from exogym_core.workers.processes.children import Children, Pipe
from exogym_core.workers.run import Transport, run_ranks
from exogym_core.workers.torchrun.side_channel import SideChannel
from netsim.errors import DeadlockError, InputError, RankError
from netsim.files.signed import shared_secret


def _draws(comm: Communicator) -> tuple[float, float, float]:
    return torch.rand(1).item(), float(np.random.rand()), random.random()


def test_random_streams_are_the_ranks_own_and_the_same_on_every_transport() -> None:
    drawn = {transport: run(transport, _draws, 3, seed=5).results for transport in TRANSPORTS}
    assert drawn == dict.fromkeys(TRANSPORTS, drawn["gloo"])
    assert len(set(drawn["gloo"])) == 3
    assert run("gloo", _draws, 3, seed=6).results != drawn["gloo"]


def _marks(comm: Communicator) -> None:
    for step in range(2):
        comm.mark({"step": step, "rank": comm.rank})
        comm.barrier()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_every_marked_row_comes_with_its_rank_in_its_order(transport: str) -> None:
    rows = [(stamped.rank, stamped.row["step"]) for stamped in run(transport, _marks, 3).rows]
    assert sorted(rows) == [(rank, step) for rank in range(3) for step in range(2)]
    assert [step for rank, step in rows if rank == 1] == [0, 1]
    if transport == "gloo":  # without a clock: everyone's first row, then the second
        assert rows == [(rank, step) for step in range(2) for rank in range(3)]


@pytest.mark.parametrize(
    "options", [{"check": False}, pytest.param({"method": "spawn"}, marks=pytest.mark.thorough)]
)
def test_the_real_transport_without_checks_and_in_fresh_processes(options: dict[str, Any]) -> None:
    check_communicator(Transport("own", lambda job: GlooHost(job.num_ranks, **options)), ["operations"])


def test_a_result_that_cannot_be_sent_is_named() -> None:
    with pytest.raises(InputError, match=r"\['rows'\] \(generator\) cannot be sent"):
        run_ranks(lambda comm: {"rows": (number for number in range(3))}, 1, transport="gloo")


def test_without_torchrun_the_missing_variables_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    for name in ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(InputError, match=r"WORLD_SIZE, MASTER_ADDR, MASTER_PORT not set; .*torchrun"):
        GlooCommunicator.from_environment()


def _errors(body: Callable[[str, int, Pipe], None]) -> list[str]:
    """What two processes that meet at a file report."""
    store = os.memfd_create("rendezvous")
    path = f"/proc/{os.getpid()}/fd/{store}"
    with Children(partial(body, path), 2) as children:
        errors = [channel.recv() for channel in children.channels]
    os.close(store)
    return errors


def test_waiting_for_ranks_that_never_start_times_out(tmp_path: Path) -> None:
    """A rendezvous by a file used to wait for torch's five minutes, whatever time-out was given."""
    lonely = Rendezvous(0, 2, str(tmp_path / "store"), timeout_seconds=0.2, secret=b"s" * 32)
    with pytest.raises(
        DeadlockError, match=r"rank 0 waits for all 2 ranks to start: no answer .* within 0\.2 s"
    ):
        lonely.join()
    assert "GLOO_SOCKET_IFNAME" not in os.environ  # or groups of later runs would listen on loopback


def _connected_stranger(ended: Any, path: str, index: int, channel: Pipe) -> None:
    """Rank 1 has a connection to rank 0, by whatever means, and cannot prove that it is one of the run."""
    torch.set_num_threads(1)
    rendezvous = Rendezvous(index, 2, path)
    rendezvous.join()
    rendezvous.secret = bytes([index]) * 32
    try:
        rendezvous.subgroup([0, 1])
    except RankError as error:
        channel.send(str(error))
    ended.wait(60)  # the other would lose a rank that ends while it still connects


def test_a_connection_without_the_secret_is_detected() -> None:
    errors = _errors(partial(_connected_stranger, multiprocessing.get_context("fork").Barrier(2)))
    strangers = [
        error.startswith(f"rank {rank}: the process that connected as rank {1 - rank} belongs to another run")
        for rank, error in enumerate(errors)
    ]
    assert any(strangers), errors
    # Whoever is second may find the connection closed already.
    assert all(found or "closed" in error for found, error in zip(strangers, errors, strict=True)), errors


class _Command:
    """What runs a command when it is unpickled."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (self.path,)


def _attack(port: int, made: str, home: str, index: int, channel: Pipe) -> None:
    """Rank 0 is the user's, rank 1 a stranger's: he has another home and sends a pickle."""
    torch.set_num_threads(1)
    os.environ.update(RANK=str(index), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    os.environ["XDG_CONFIG_HOME"] = os.path.join(home, str(index))
    try:
        with GlooCommunicator.from_environment(backend="gloo", timeout_seconds=20) as comm:
            if index == 0:
                comm.all_gather_object("mine")
            else:
                payload = torch.frombuffer(bytearray(pickle.dumps(_Command(made))), dtype=torch.uint8)
                comm.all_gather(torch.tensor([payload.numel()]))
                comm.all_gather(payload)
    except (RankError, InputError) as error:
        channel.send(str(error))
    else:
        channel.send("joined")


def test_a_stranger_neither_joins_ranks_started_by_torchrun_nor_runs_code_in_them(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    target = partial(_attack, port, str(tmp_path / "made"), str(tmp_path))
    with Children(target, 2) as children:
        message = children.channels[0].recv()
    assert message.startswith("rank 0: a value at the rendezvous was not written by a rank of this run")
    assert "NETGYM_SECRET" in message
    assert not (tmp_path / "made").exists()


def test_objects_carry_no_code(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="not in NetGym's form"):
        unpacked(pickle.dumps(_Command(str(tmp_path / "made"))))
    assert not (tmp_path / "made").exists()
    with pytest.raises(
        InputError, match=r"object\['x'\] is a _Command|object.x is a _Command; it must hold tensors"
    ):
        packed({"x": _Command("")})


def test_the_users_secret_is_made_once_and_is_his_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NETGYM_SECRET", raising=False)
    monkeypatch.delenv("NETGYM_SECRET_FILE", raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    first, path = shared_secret(), tmp_path / "netgym" / "secret"
    assert len(first) == 64
    assert shared_secret() == first
    assert [entry.name for entry in path.parent.iterdir()] == ["secret"]
    path.chmod(0o644)
    with pytest.raises(InputError, match=r"secret: the secret can be read by others.*chmod 600"):
        shared_secret()
    monkeypatch.setenv("NETGYM_SECRET", "short")
    with pytest.raises(InputError, match="NETGYM_SECRET has 5 characters"):
        shared_secret()


def _hangs(channel: Pipe) -> None:
    channel.recv()


def _waits_or_hangs(path: str, index: int, channel: Pipe) -> None:
    torch.set_num_threads(1)
    rendezvous = Rendezvous(index, 2, path, secret=b"s" * 32)
    rendezvous.join()
    with SideChannel(rendezvous, lambda rank, row: None) as beside:
        if index == 1:
            _hangs(channel)
        else:
            beside.mark({"step": 4})
            channel.send(str(beside.explained(NoAnswerError("rank 0 waits: no answer within 1 s"), "")))


def test_a_hanging_ranks_place_is_reported_after_the_time_out() -> None:
    store = os.memfd_create("rendezvous")
    path = f"/proc/{os.getpid()}/fd/{store}"
    with Children(partial(_waits_or_hangs, path), 2) as children:
        first, place = children.channels[0].recv().splitlines()
        children.channels[1].send("go on")
    os.close(store)
    assert first == "rank 0 waits: no answer within 1 s"
    assert place.startswith("  rank 1 on host ")
    assert "is in _hangs at test_launch.py:" in place


def test_a_rank_that_works_long_waits_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds of many hours: the default time-out follows the rank's own work; a given one is kept."""
    now = [0.0]
    monkeypatch.setattr(gloo_rendezvous.time, "monotonic", lambda: now[0])
    found = []
    for given in (None, 60.0):
        rendezvous = Rendezvous(0, 1, timeout_seconds=given)
        rendezvous.guarded("", lambda: None)
        now[0] += 100.0
        found.append(rendezvous.guarded("", lambda made=rendezvous: made.timeout_seconds))
        now[0] += 36_000.0
        found.append(rendezvous.guarded("", lambda made=rendezvous: made.timeout_seconds))
        found.append(rendezvous.guarded("", lambda made=rendezvous: made.timeout_seconds))
    assert found == [1800.0, 144_000.0, 144_000.0, 60.0, 60.0, 60.0]
