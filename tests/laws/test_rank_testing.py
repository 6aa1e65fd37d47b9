"""`netgym.testing`: each law finds a bug that is planted, and shows it by a program that fails by itself."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from exogym_core.results.fit_result import FitResult, Rows
from exogym_core.results.run_folder import RunFolder
from exogym_core.testing.rank_programs import Actor
from netgym.cli.main import main
from netgym.testing import (
    RankProgram,
    assert_same_bits,
    check_collective,
    check_communicator,
    programs,
)
from netsim.errors import InputError, NetsimError
from netsim.testing import LawError


def ring_gather(comm: Any, tensor: Tensor) -> list[Tensor]:
    """All-gather of tensors of other sizes; each bug below breaks one thing of it."""
    size, rank = comm.world_size, comm.rank
    shapes = comm.all_gather_object(list(tensor.shape))
    parts = [torch.empty(shape, dtype=tensor.dtype) for shape in shapes]
    parts[rank] = tensor.clone()
    for step in range(size - 1):
        sent = comm.isend(parts[(rank - step) % size], (rank + 1) % size)
        comm.recv(parts[(rank - step - 1) % size], (rank - 1) % size)
        sent.wait()
    return parts


def misses_empty(comm: Any, tensor: Tensor) -> list[Tensor]:
    return [part for part in ring_gather(comm, tensor) if part.numel() or comm.world_size < 5]


def changes_its_input(comm: Any, tensor: Tensor) -> list[Tensor]:
    parts = ring_gather(comm, tensor)
    tensor.zero_()
    return parts


def is_free(comm: Any, tensor: Tensor) -> list[Tensor]:
    with comm.off_clock():
        return ring_gather(comm, tensor)


def sends_twice(comm: Any, tensor: Tensor) -> list[Tensor]:
    return ring_gather(comm, tensor) and ring_gather(comm, tensor)


def differs_over_gloo(comm: Any, tensor: Tensor) -> list[Tensor]:
    return [part + (comm.transport == "gloo") for part in ring_gather(comm, tensor)]


def is_random(comm: Any, tensor: Tensor) -> Tensor:
    return tensor.copy_(comm.all_reduce(tensor) + (comm.rank == 0) * random.SystemRandom().random() / 1e7)


def keeps_its_own(comm: Any, tensor: Tensor) -> Tensor:
    total: Tensor = comm.all_reduce(tensor.clone())
    return total * (1 + 1e-6) if comm.rank == 1 else total


def depends_on_arrival(comm: Any, tensor: Tensor) -> None:
    """The rank that is first adds a little."""
    got = torch.empty_like(tensor)
    if comm.rank:
        comm.send(tensor, 0)
    else:
        senders = [comm.recv(got) for _ in range(comm.world_size - 1)]
    comm.all_reduce(tensor)
    if comm.rank == 0 and senders:
        tensor *= 1 + 1e-6 * senders[0]
    comm.broadcast(tensor)
    comm.barrier()


def lets_one_go(comm: Any) -> None:
    if comm.rank:
        comm.barrier()
    elif comm.world_size > 1:
        comm.barrier(async_op=True)


FLOATS = {"dtypes": [torch.float32]}
SMALL = {"shapes": [(1,)], "layouts": ["plain"], **FLOATS}
BUGS: list[tuple[Callable[..., Any], str, dict[str, Any], str]] = [
    (misses_empty, "all_gather", {"is_uneven": True, **FLOATS}, "not a list of 5"),
    (changes_its_input, "all_gather", FLOATS, "changes input 0 of all_gather"),
    (is_free, "all_gather", FLOATS, "communicates off the clock"),
    (
        sends_twice,
        "all_gather",
        {"most_bytes": lambda sizes: 100 + 2 * len(sizes) * sum(sizes)},
        "at most are allowed",
    ),
    (
        differs_over_gloo,
        "all_gather",
        {"num_ranks": [2], "places": ["gloo"], "cases": 2, **FLOATS},
        "differs_over_gloo over gloo: all_gather",
    ),
    (is_random, "all_reduce", FLOATS, "when it runs again"),
    (keeps_its_own, "all_reduce", {"num_ranks": [3], **SMALL}, "give all the same bits"),
    (
        depends_on_arrival,
        "all_reduce",
        {"num_ranks": [3], "seed": 4, **SMALL},
        "without network and stragglers",
    ),
    (lets_one_go, "barrier", {}, "leaves the barrier|still in flight|waits for"),
]


@pytest.mark.parametrize(("function", "like", "options", "line"), BUGS)
def test_each_law_finds_a_bug_and_prints_a_program_that_shows_it(
    function: Callable[..., Any], like: str, options: dict[str, Any], line: str
) -> None:
    with pytest.raises(LawError, match=line) as caught:
        check_collective(function, like, **{"cases": 100, "seed": 0, **options})
    program = caught.value.program
    assert len(program.splitlines()) <= 15
    if "is local" in program:  # what is allowed is a lambda
        return
    program = f"{program}\n" * (20 if function is is_random else 1)  # its draws may round to the same sum
    with pytest.raises((AssertionError, NetsimError)):
        exec(program, {})


class LosesAnswers:
    def __init__(self, comm: Any) -> None:
        self.comm = comm

    def __getattr__(self, name: str) -> Any:
        return getattr(self.comm, name)

    def take(self, box: str = "", wait: float = 0.0) -> Any:
        return [] if box == "answers" else self.comm.take(box, wait)


def test_a_check_of_a_communicator_that_loses_messages_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """That each law finds a bug is in conformance/test_collectives.py."""
    monkeypatch.setattr("exogym_core.testing.communicators._MOST_POLLS", 100)
    with pytest.raises(LawError, match="law 'mailboxes' "):
        check_communicator(LosesAnswers)


def test_what_is_right_passes() -> None:
    options = {"num_ranks": [2, 3], "dtypes": [torch.float32], "layouts": ["plain"]}
    report = check_collective(ring_gather, "all_gather", is_uneven=True, cases=6, **options)
    assert str(report) == "all_gather by ring_gather: 8 programs passed"
    own = check_collective(
        lambda comm, tensor: comm.all_gather(tensor)[comm.rank - 1],
        lambda given: [given[-1], *given[:-1]],
        cases=3,
        places=[],
    )
    assert own.num_cases == 3


def test_a_program_that_depends_on_host_time_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """And shows itself by a program that builds it again."""
    from exogym_core.testing.drawing import hold_for_all

    clock = iter(range(10**6))
    monkeypatch.setattr(Actor, "now", lambda self: next(clock))
    with pytest.raises(LawError, match=r"in threads, .* in threads that sleep") as caught:
        hold_for_all(programs(), lambda program: program.check([0]), 200, 0)
    names: dict[str, Any] = {}
    source = caught.value.program
    assert len(source.splitlines()) <= 15
    assert sum(len(actions) for actions in eval_program(source, names).ranks) <= 3


def eval_program(source: str, names: dict[str, Any]) -> RankProgram:
    with pytest.raises(LawError):
        exec(source, names)
    return RankProgram(names["ranks"], names["topology"])


def a_result(**changed: Any) -> FitResult:
    rows = [{"step": step, "train_loss": 0.5} for step in (1, 2)]
    states = [{"w": torch.ones(2, 3)}, {"w": torch.ones(2, 3)}]
    return FitResult(**{"strategy": "DiLoCo", "history": Rows(rows), "rank_states": states, **changed})


def test_the_first_difference_of_two_folders_is_named(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in "ab"]
    for folder, loss, weight in zip(folders, (0.5, 0.25), (1.0, 2.0), strict=True):
        run = RunFolder.create(folder, "run")
        (folder / "experiment.yaml").write_text("")
        result = a_result(history=Rows([{"step": 1, "train_loss": loss}]))
        run.write_result("diloco", result)
        run.write_model("diloco", {"w": torch.tensor([weight])})
        run.write_summary([{"name": "diloco", "final_loss": loss}])
        run.release()
    for name, line in (
        ("metrics/diloco.csv", "row 1 (step 1): train_loss is '0.5' and '0.25'"),
        ("models/diloco.safetensors", "parameter w[0] is 1.0 and 2.0 (1 of 1 values differ)"),
        ("summary.json", "diloco: final_loss is 0.5 and 0.25"),
    ):
        with pytest.raises(AssertionError) as caught:
            assert_same_bits(*folders)
        assert str(caught.value) == f"{name}: {line}"
        (folders[1] / name).write_bytes((folders[0] / name).read_bytes())
    assert_same_bits(*map(str, folders))
    with pytest.raises(InputError, match="FitResult: give two results of fit, or two folders"):
        assert_same_bits(folders[0], a_result())


OWN = """
import torch
from exogym_core.workers.run import Transport, transport_named
from netgym import run_ranks

def ring(comm, tensor, op="sum"):
    return comm.all_reduce(tensor, op)

def short_gather(comm, tensor):
    return comm.all_gather(tensor)[: max(comm.world_size - 1, 2)]

class Counting:
    def __init__(self, comm):
        self.comm = comm
    def __getattr__(self, name):
        return getattr(self.comm, name)

class Forgetful(Counting):
    def broadcast(self, tensor, src=0, async_op=False):
        return self.comm.broadcast(tensor.clone(), src, async_op)

own = Transport("own", lambda job: transport_named("netsim").host(job), has_clock=True)
"""


def test_the_command_recognises_what_it_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("own_ranks.py").write_text(OWN, encoding="utf-8")
    few = ["--cases", "10"]
    assert main(["check", "own_ranks:ring", *few, "places=[]"]) == 0
    assert capsys.readouterr().out == "all_reduce by ring: 10 programs passed\n"
    assert main(["check", "own_ranks:Counting", "laws=[handles, in place]"]) == 0
    assert main(["check", "own_ranks:own", "laws=[handles]"]) == 0
    assert capsys.readouterr().out == "Counting: 2 laws passed\nown: 1 law passed\n"
    assert main(["check", "own_ranks:Forgetful", "laws=[in place]", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert (found["as"], found["line"][:14]) == ("communicator", "law 'in place'")
    assert (
        main(["check", "own_ranks:short_gather", "--like", "all_gather", "dtypes=[float32]", "places=[]"])
        == 1
    )
    shown = capsys.readouterr()
    assert "not a list of 3" in shown.err
    with pytest.raises(AssertionError):
        exec(shown.out, {})
    assert main(["check", "own_ranks:ring", "--as", "strategy"]) == 2
    assert main(["check", "own_ranks.py:ring"]) == 2
    assert "is a file: write module:object, such as own_ranks:ring" in capsys.readouterr().err
    Path("own_ending.py").write_text("raise SystemExit(0)", encoding="utf-8")
    assert main(["check", "own_ending:ring"]) == 2
    assert "its import fails with SystemExit at own_ending.py:1: 0" in capsys.readouterr().err
    assert main(["check", "own_ranks:ring", "speed=3"]) == 2
    assert "unknown option of check_collective 'speed'" in capsys.readouterr().err
