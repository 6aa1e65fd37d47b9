"""`netgym run --resume` and `netgym compare --resume`: after a stop or a kill, to the same bytes."""

from __future__ import annotations

import gzip
import json
import os
import signal
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from experiments import experiment, results_of
from forks import Fork

from exogym_core.run.loop import Loop
from netgym.cli.main import main
from netgym.experiment import comparison

EXPERIMENT = experiment(
    workers="{count: 3, kind: threads}",
    topology="two-datacenters",
    collectives="ring",  # chosen ones take longer than all else: laws/test_choice_laws.py
    compute="50 ms",
    steps=8,
    batch_size=4,
    evaluate="{every: 3, samples: 32}",
    target_loss=2.3,
    checkpoint="{every: 1}",
    strategies="[AllReduce, {name: DiLoCo, H: 3}]",
)


def contents_of(folder: Path) -> dict[Path, tuple[int, bytes]]:
    return {
        path: (path.stat().st_mtime_ns, path.read_bytes()) for path in folder.rglob("*") if path.is_file()
    }


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "small.yaml").write_text(EXPERIMENT)
    return tmp_path


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The results of the run without interruption, and without checkpoints."""
    path = tmp_path_factory.mktemp("whole")
    (path / "small.yaml").write_text(EXPERIMENT.replace("checkpoint: {every: 1}\n", ""))
    assert main(["compare", str(path / "small.yaml"), "--out", str(path / "out")]) == 0
    assert not (path / "out" / "checkpoints").exists()
    return results_of(path / "out")


def stop_at(monkeypatch: pytest.MonkeyPatch, label: str, step: int) -> None:
    """Have Ctrl-C pressed when `label` has done so many steps, once; its process then waits to be interrupted."""
    pressed, command = Path("pressed"), os.getpid()

    class Presser:
        def event(self, row: Mapping[str, Any]) -> None:
            if row["kind"] == "step" and row["step"] == step and not pressed.exists():
                pressed.touch()
                os.kill(command, signal.SIGINT)
                signal.pause()

    def loggers(experiment: Any, folder: Any, of: str) -> Any:
        class Opened:
            def __enter__(self) -> list[Presser]:
                return [Presser()] if of == label else []

            def __exit__(self, *exception: object) -> None:
                pass

        return Opened()

    monkeypatch.setattr(comparison, "open_loggers", loggers)


def test_ctrl_c_leaves_a_run_that_can_go_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], whole: dict[str, bytes]
) -> None:
    stop_at(monkeypatch, "DiLoCo", 5)
    assert main(["compare", "small.yaml", "--out", "out"]) == 130
    assert capsys.readouterr().err.splitlines()[-1].endswith("to continue: netgym compare --resume out")
    summary = {entry["name"]: entry for entry in json.loads(Path("out/summary.json").read_text())}
    assert summary["DiLoCo"]["incomplete"] is True, "the other may have ended meanwhile, in another process"
    assert main(["compare", "--resume", "out"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "out"
    assert results_of(Path("out")) == whole
    folders = {path.relative_to("out").as_posix() for path in Path("out/checkpoints").glob("*/*")}
    assert folders == {"checkpoints/AllReduce/step-00000008", "checkpoints/DiLoCo/step-00000008"}
    Path("out/summary.json").write_text("[{")
    assert main(["compare", "--resume", "out"]) == 2
    assert "move it away, and --resume writes it again" in capsys.readouterr().err
    Path("out/summary.json").unlink()
    assert main(["compare", "--resume", "out"]) == 0
    assert results_of(Path("out")) == whole


def test_a_resumed_logger_gets_each_row_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows up to the checkpoint are replayed, and those after it are trained again."""
    taken, command = Path("taken"), os.getpid()

    class Own:
        def event(self, row: Mapping[str, Any]) -> None:
            with taken.open("a") as file:
                file.write(f"{row['kind']} {row['step']}\n")
            if row["kind"] == "step" and row["step"] == 5:
                os.kill(command, signal.SIGINT)
                signal.pause()

        def close(self, state: str) -> None:
            taken.with_suffix(f".{state}").touch()

    monkeypatch.setitem(comparison.LOGGERS, "tensorboard", lambda _: Own())
    words = (
        "--set",
        "loggers=[tensorboard]",
        "--set",
        "strategies=[AllReduce]",
        "--set",
        "checkpoint.every=2",
    )
    assert main(["compare", "small.yaml", "--out", "out", *words]) == 130
    assert main(["compare", "--resume", "out"]) == 0
    rows = [f"step {step}" for step in range(1, 9)] + [f"validation {step}" for step in (0, 3, 6, 8)]
    assert sorted(taken.read_text().splitlines()) == rows
    assert {path.suffix for path in Path().glob("taken.*")} == {".KILLED", ".FINISHED"}


@pytest.mark.thorough
def test_going_on_and_ctrl_c_at_once_lose_no_killed_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], whole: dict[str, bytes]
) -> None:
    """It has checkpoints and no summary: to take it for a run that had not begun would take its experiment away."""
    killed("AllReduce/step-00000003", "workers.kind=processes", "workers.processes=2")
    assert json.loads(Path("out/summary.json").read_text()) == []

    def press(*arguments: object, **more: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(comparison, "compare", press)
        assert main(["compare", "--resume", "out"]) == 130
    assert capsys.readouterr().err.splitlines()[-1].endswith("to continue: netgym compare --resume out")
    assert main(["compare", "--resume", "out"]) == 0
    assert results_of(Path("out")) == whole


def killed(at_least: str, *changes: str) -> None:
    """Train one strategy after the other in a process, and kill it when that checkpoint or a later one is there."""
    arguments = ["compare", "small.yaml", "--out", "out", "--jobs", "1"]
    run = Fork(main, arguments + [part for change in changes for part in ("--set", change)])
    folder, name = Path("out/checkpoints") / Path(at_least).parent, Path(at_least).name
    run.wait_for(lambda: folder.is_dir() and any(path.name >= name for path in folder.glob("step-*")))
    run.process.kill()
    run.process.join()


def test_a_run_killed_in_its_second_strategy_goes_on_to_the_same_bytes(whole: dict[str, bytes]) -> None:
    killed("DiLoCo/step-00000004")
    assert main(["run", "--resume", "out"]) == 0
    assert results_of(Path("out")) == whole
    assert not [path for path in Path("out").rglob(".*") if path.name not in (".", "..")]


def kill_ranks_at(monkeypatch: pytest.MonkeyPatch, folder: Path, kills: list[tuple[str, int, int]]) -> None:
    """Have the process of a rank die of SIGKILL before it does its step so-and-so of a strategy, each once."""
    do = Loop.do

    def dying(loop: Loop, step: Any) -> None:
        here = type(loop.strategy).__name__.removesuffix("Strategy"), loop.comm.rank, loop.local_step
        mark = folder / "-".join(map(str, here))
        if here in kills and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        do(loop, step)

    monkeypatch.setattr(Loop, "do", dying)


def test_a_run_whose_ranks_were_killed_goes_on_to_the_same_bytes(
    monkeypatch: pytest.MonkeyPatch, here: Path, whole: dict[str, bytes]
) -> None:
    """In the first strategy, after which the last goes on, in both, and again while they go on."""
    kills = [("AllReduce", 0, 4), ("AllReduce", 1, 6), ("DiLoCo", 1, 2)]
    kill_ranks_at(monkeypatch, here, kills)
    changes = ["--set", "workers={count: 3, kind: processes, processes: 2}"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that the others go on
        main(["compare", "small.yaml", "--out", "out", *changes])
        assert results_of(Path("out")) != whole, "what failed is marked as such"
        for _ in range(3):
            if main(["compare", "--resume", "out"]) == 0 and results_of(Path("out")) == whole:
                break
    assert results_of(Path("out")) == whole
    assert len(list(here.glob("*-*-*"))) == len(kills)


def test_a_run_without_a_checkpoint_begins_again_and_keeps_what_was_finished(
    monkeypatch: pytest.MonkeyPatch, whole: dict[str, bytes]
) -> None:
    Path("small.yaml").write_text(EXPERIMENT.replace("checkpoint: {every: 1}\n", ""))
    stop_at(monkeypatch, "DiLoCo", 4)
    assert main(["compare", "small.yaml", "--out", "out", "--jobs", "1"]) == 130
    kept = Path("out/models/AllReduce.safetensors").stat().st_mtime_ns
    assert main(["compare", "--resume", "out"]) == 0
    assert results_of(Path("out")) == whole
    assert Path("out/models/AllReduce.safetensors").stat().st_mtime_ns == kept


def test_seeds_of_edited_code_are_refused_next_to_those_of_the_former(
    monkeypatch: pytest.MonkeyPatch, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A row had the mean of two codes, in silence."""
    text = EXPERIMENT.replace("checkpoint: {every: 1}\n", "seeds: 2\n")
    Path("small.yaml").write_text(text.replace("AllReduce", "{name: 'own_seeded:Own', label: Own}"))
    code = here / "own_seeded.py"
    code.write_text("from netgym.strategy import AllReduceStrategy as Own\n")
    stop_at(monkeypatch, "Own.seed-0", 4)
    train = ["compare", "small.yaml", "--strategy", "Own", "--out", "out", "--jobs", "1"]
    assert main(train) == 130
    code.write_text(
        "from netgym.strategy import AllReduceStrategy as Own  # edited before a seed has ended\n"
    )
    Path("pressed").unlink()
    stop_at(monkeypatch, "Own.seed-1", 4)
    assert main(["compare", "--resume", "out", "--jobs", "1"]) == 130
    code.write_text("from netgym.strategy import AllReduceStrategy as Own  # edited\n")
    kept = contents_of(Path("out/metrics"))
    for command in ("compare", "run"):
        capsys.readouterr()
        assert main([command, "--resume", "out"]) == 2
        line = "out: own_seeded was edited since its first results; undo the edit, or add --edited-code"
        assert line in capsys.readouterr().err
    assert contents_of(Path("out/metrics")) == kept
    assert main(["compare", "--resume", "out", "--edited-code"]) == 0
    line = "out: own_seeded was edited since its first results; the run continues with the current code"
    assert f"warning: {line}" in capsys.readouterr().err
    assert main(["retime", "out", "--topology", "lan", "--out", "lan"]) == 0
    line = "own_seeded was edited since: rows that are retimed are of the recorded code"
    assert line not in capsys.readouterr().err
    code.write_text("")
    assert main(["retime", "out", "--topology", "lan", "--out", "again"]) == 0
    assert f"out: {line}" in capsys.readouterr().err


def test_a_finished_run_is_left_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", "small.yaml", "--out", "out", "--set", "steps=2"]) == 0
    before = contents_of(Path("out"))
    capsys.readouterr()
    assert main(["compare", "--resume", "out"]) == 0
    assert capsys.readouterr().out == "out: this run is finished and left as it is\nout\n"
    assert contents_of(Path("out")) == before


def test_the_trace_and_the_comparisons_of_replicas_are_those_of_the_whole_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    arguments = ["--strategy", "DiLoCo", "--set", "evaluate.correlation_every=2"]
    assert main(["run", "small.yaml", "--out", "whole", "--trace", *arguments]) == 0
    stop_at(monkeypatch, "DiLoCo", 5)
    assert main(["run", "small.yaml", "--out", "out", "--trace", *arguments]) == 130
    assert main(["run", "--resume", "out", "--trace"]) == 0
    assert results_of(Path("out")) == results_of(Path("whole"))
    rows = Path("out/metrics/DiLoCo.correlation.csv").read_text().splitlines()
    assert rows[0] == "step,correlation"
    assert [row.split(",")[0] for row in rows[1:]] == ["2", "4", "6", "8"]
    traces = [gzip.decompress(Path(folder, "trace.json.gz").read_bytes()) for folder in ("out", "whole")]
    assert traces[0] == traces[1]
