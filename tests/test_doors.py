"""Files from others run no code, and a folder has one owner."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from experiments import experiment
from forks import Fork
from torch import nn

from exogym_core.checkpoints.checkpoint import run_identity
from exogym_core.checkpoints.writing import CheckpointWriter
from exogym_core.results import report
from exogym_core.results.disk import FolderLock
from exogym_core.results.run_folder import RunFolder
from netgym.cli.main import main
from netgym.experiment.own_code import find_own_code
from netsim.errors import InputError

EXPERIMENT = experiment(steps=2, batch_size=4, evaluate="{every: 2, samples: 16}", strategies="[STRATEGY]")

MINE = """\
import pathlib
pathlib.Path("imported").touch()
from exogym_core.strategy import SimpleReduceStrategy
from netgym.tasks import MLP, digits


class Mine(SimpleReduceStrategy):
    pass
"""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(report, "write_report", lambda folder: folder.write_text("report.html", ""))
    return tmp_path


def written(*changes: tuple[str, str]) -> None:
    text = EXPERIMENT
    for old, new in changes:
        text = text.replace(old, new)
    Path("file.yaml").write_text(text)


def invoke(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    code = main(list(arguments))
    captured = capsys.readouterr()
    return code, captured.out + captured.err


# --- whose code runs ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("task: digits", "task: {name: 'subprocess:getoutput', cmd: 'touch made'}"),
        ("STRATEGY", "{name: 'subprocess:Popen', args: [touch, made]}"),
        ("{name: mlp, hidden: [4]}", "{name: 'os:mkdir', path: made}"),
    ],
)
def test_nothing_of_pythons_own_is_called(old: str, new: str, capsys: pytest.CaptureFixture[str]) -> None:
    written((old, new), ("STRATEGY", "AllReduce"))
    for command in ("validate", "run", "compare"):
        code, text = invoke(capsys, command, "file.yaml")
        assert code == 2
        assert "is Python's own library" in text
        assert text.startswith("error: file.yaml:")
        assert not Path("made").exists()


def test_validating_runs_no_code_of_the_file(capsys: pytest.CaptureFixture[str]) -> None:
    Path("mine.py").write_text(MINE)
    written(("task: digits", "task: 'mine:digits'"), ("STRATEGY", "{name: 'mine:Mine', label: own}"))
    code, text = invoke(capsys, "validate", "file.yaml")
    assert code == 0
    assert (
        "valid: experiment of 2 workers with own; not tried, since that would run its code: mine:digits"
        in text
    )
    assert not Path("imported").exists()


def test_running_prints_once_whose_code_runs(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    Path("mine.py").write_text(MINE)
    written(("STRATEGY", "{name: 'mine:Mine', label: own}, {name: 'mine:Mine', label: other}"))
    code, text = invoke(capsys, "compare", "file.yaml", "--out", "out")
    assert code == 0
    assert [line for line in text.splitlines() if line.startswith("code: ")] == [
        "code: strategy mine:Mine of mine.py"
    ]
    # The stored experiment runs again though the module is not beside it, as long as it is one's own.
    assert invoke(capsys, "run", "out/experiment.yaml", "--strategy", "own")[0] == 0


def test_two_files_of_one_module_name_are_two_modules(here: Path) -> None:
    for name in ("first", "second"):
        (here / name).mkdir()
        (here / name / "mine_again.py").write_text(f"def which():\n    return {name!r}\n")
    found = [
        find_own_code("mine_again:which", "task", [here / name]).load()() for name in ("first", "second")
    ]
    assert found == ["first", "second"]


def test_installed_code_is_reported_with_its_distribution() -> None:
    code = find_own_code("netgym.tasks:MLP", "model", [Path()])
    assert str(code).startswith("netgym.tasks:MLP of netgym ")
    assert code.load().__name__ == "MLP"


# --- whose folder it is ------------------------------------------------------------------------------------


def stopped_run(capsys: pytest.CaptureFixture[str]) -> None:
    """A run in `out` whose page is missing, as if it had been stopped."""
    written(("STRATEGY", "AllReduce"))
    assert invoke(capsys, "run", "file.yaml", "--out", "out")[0] == 0
    Path("out/report.html").unlink()


def changed() -> None:
    path = Path("out/experiment.yaml")
    path.write_text(path.read_text().replace("steps: 2", "steps: 3"))


def of_somebody_else() -> None:
    shutil.rmtree("config")  # his secret, and not this user's


@pytest.mark.parametrize("how", [changed, of_somebody_else])
def test_going_on_with_anothers_run_asks_for_trust(
    how: Callable[[], None], capsys: pytest.CaptureFixture[str]
) -> None:
    stopped_run(capsys)
    how()
    code, text = invoke(capsys, "run", "--resume", "out")
    assert code == 2
    assert text.startswith("error: out: another user made this run, or its experiment.yaml was changed since")
    assert text.count("--trust") == 1
    assert invoke(capsys, "run", "--resume", "out", "--trust")[0] == 0


def test_planning_anothers_run_asks_for_trust(capsys: pytest.CaptureFixture[str]) -> None:
    """Its code was imported."""
    Path("mine.py").write_text(MINE)
    written(("STRATEGY", "{name: mine:Mine, label: own}"), ("steps", "topology: lan\ncompute: 1 s\nsteps"))
    assert invoke(capsys, "run", "file.yaml", "--out", "out")[0] == 0
    assert invoke(capsys, "plan", "out")[0] == 0
    changed()
    shutil.move("mine.py", "out/mine.py")
    Path("imported").unlink()
    sys.modules.pop("mine", None)
    code, text = invoke(capsys, "plan", "out")
    assert (code, text.count("--trust")) == (2, 1)
    assert "names code, which would run with your permissions" in text
    assert not Path("imported").exists()
    assert invoke(capsys, "plan", "out", "--trust")[0] == 0


def test_going_on_with_ones_own_run_asks_for_nothing_also_elsewhere(
    capsys: pytest.CaptureFixture[str],
) -> None:
    stopped_run(capsys)
    shutil.copytree("out", "moved")
    assert invoke(capsys, "compare", "--resume", "moved")[0] == 0
    assert "seal" in json.loads(Path("out/environment.json").read_text())


# --- one owner ---------------------------------------------------------------------------------------------


def hold(folder: str) -> None:
    lock = FolderLock(Path(folder))
    print("has it", flush=True)
    signal.pause()
    lock.release()


@pytest.mark.parametrize("arguments", [["--resume", "out"], ["file.yaml", "--out", "new"]])
def test_the_second_in_a_folder_is_refused_with_the_pid_of_the_first(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    stopped_run(capsys)
    Path("new").mkdir()
    first = Fork(hold, arguments[-1])
    first.wait_for(lambda: "has it" in first.out)
    code, text = invoke(capsys, "run", *arguments)
    assert code == 2
    assert text.splitlines()[0] == (
        f"error: {arguments[-1]}: process {first.process.pid} works in this folder: let it end, or choose another one"
    )
    first.kill()
    # However the first ends, its lock ends with it.
    assert invoke(capsys, "run", *arguments)[0] == 0
    assert not list(Path().rglob(".lock"))


def test_two_fits_do_not_make_checkpoints_in_one_folder(here: Path) -> None:
    identity = run_identity(nn.Linear(1, 1), "AllReduce", {}, 1, {})
    (here / "checkpoints" / ".step-00000002").mkdir(parents=True)
    first = CheckpointWriter(here / "checkpoints", identity, 1)
    (here / "checkpoints" / ".step-00000004").mkdir()
    with pytest.raises(InputError, match="works in this folder"):
        CheckpointWriter(here / "checkpoints", identity, 1)
    assert (here / "checkpoints" / ".step-00000004").is_dir(), "what the first is writing is left alone"
    first.close()
    first.release()
    assert not list((here / "checkpoints").iterdir())


def test_a_folder_that_was_taken_meanwhile_is_not_empty(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    owned = RunFolder.owned

    def taken_first(folder: RunFolder) -> RunFolder:
        (folder.path / "experiment.yaml").touch()  # by one that is through already
        return owned(folder)

    monkeypatch.setattr(RunFolder, "owned", taken_first)
    with pytest.raises(InputError, match="the folder is not empty"):
        RunFolder.create("out", "small")
    assert not (here / "out" / ".lock").exists()


# --- what no system takes ----------------------------------------------------------------------------------


@pytest.mark.thorough
def test_processes_share_less_memory_where_the_address_space_is_limited() -> None:
    code = (
        "import resource, torch\n"
        "from exogym_core.workers.processes.shared_memory import Arena\n"
        "resource.setrlimit(resource.RLIMIT_AS, (40 << 30, 40 << 30))\n"
        "ours = Arena(); theirs = Arena(ours.fd, region=1)\n"
        "sent = torch.arange(10_000.0)\n"
        "print(torch.equal(Arena(ours.fd).get(theirs.put(sent)), sent))\n"
    )
    # No fork: what the tests have mapped would count too.
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "True\n"
