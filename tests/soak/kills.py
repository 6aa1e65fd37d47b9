"""Kill runs at random moments, again and again: resumed, they give the result of an undisturbed run.

    python tests/soak/kills.py --kills 100 --first 0 --out build/soak

A small comparison runs in a session of its own, with threads or processes as ranks; at a drawn moment it, or one of
its ranks' processes, gets SIGKILL (or SIGTERM, SIGINT). Then `--resume` goes on: its results must be the undisturbed
ones to the byte; a run whose rank was killed must have ended by itself in one line; nothing may be left behind. The
last line of output is a JSON object, appended to OUT too.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).parents[1]))

from experiments import results_of
from forks import left_of
from numbered import soak

from exogym_core.results.report import page
from netgym.cli.main import main as netgym

EXPERIMENT = """\
name: small
task: digits
model: {name: mlp, hidden: [4]}
workers: {count: 3, kind: KIND}
device: cpu
topology: two-datacenters
compute: 50 ms
steps: 14
batch_size: 4
evaluate: {every: 5, samples: 32}
checkpoint: {every: 2}
strategies: [AllReduce, {name: DiLoCo, H: 3}]
"""
KINDS = {"threads": "threads", "processes": "processes, processes: 2"}
SECONDS_TO_END = 60.0


def started(arguments: list[str], errors: Path) -> int:
    """A process, leader of its own session, that runs `netgym`; forked, since importing torch takes long."""
    pid = os.fork()
    if pid:
        return pid
    os.setsid()
    with errors.open("wb") as file, open(os.devnull, "wb") as nothing:
        os.dup2(nothing.fileno(), 1)
        os.dup2(file.fileno(), 2)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    code = 70
    try:
        code = netgym(arguments)
    finally:
        sys.stderr.flush()
        os._exit(code)


def ended(pid: int) -> int:
    """Wait for it; minus the signal or the exit code."""
    deadline = time.monotonic() + SECONDS_TO_END
    while time.monotonic() < deadline:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.002)
    os.killpg(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    raise TimeoutError(f"did not end within {SECONDS_TO_END:g} s")


def children_of(pid: int) -> list[int]:
    """Its processes."""
    found = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            found += [int(word) for word in task.read_text().split()]
        except OSError:
            continue
    return found


class Kills:
    """Kills in one folder, each against the undisturbed run of its kind."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._draw = folder, random.Random()
        self._whole: dict[str, dict[str, bytes]] = {}
        self._seconds: dict[str, float] = {}
        for kind, text in KINDS.items():
            (folder / f"{kind}.yaml").write_text(EXPERIMENT.replace("KIND", text))
            began = time.monotonic()
            assert (
                ended(
                    started(
                        ["compare", str(folder / f"{kind}.yaml"), "--out", str(folder / kind)], folder / "e"
                    )
                )
                == 0
            )
            self._seconds[kind] = time.monotonic() - began
            self._whole[kind] = results_of(folder / kind)

    def one(self, number: int) -> str:
        """Kill the run of a number and go on; returns what was done."""
        self._draw, shared = random.Random(number), set(os.listdir("/dev/shm"))
        kind, out = self._draw.choice(list(KINDS)), self._folder / "out"
        by = self._draw.choice([signal.SIGKILL] * 4 + [signal.SIGTERM, signal.SIGINT])
        errors, resumed = self._folder / "errors", 0
        shutil.rmtree(out, ignore_errors=True)
        arguments = fresh = ["compare", str(self._folder / f"{kind}.yaml"), "--out", str(out)]
        ending = kind
        for _ in range(self._draw.choice((1, 1, 2, 3))):  # the run that goes on is killed too
            pid = started(arguments, errors)
            time.sleep(self._draw.random() * self._seconds[kind] * (1.1 if not resumed else 0.7))
            ending += f", {self._kill(pid, by)}"
            self._check_end(pid, ended(pid), errors)
            if not (out / "experiment.yaml").exists():
                assert not list(out.glob("checkpoints/*/*")), (
                    f"{ending}: checkpoints are left without their experiment"
                )
                shutil.rmtree(out, ignore_errors=True)  # nothing had been trained
                resumed, arguments = 0, fresh
            else:
                resumed, arguments = resumed + 1, ["compare", "--resume", str(out)]
        summary = out / "summary.json"
        entries = json.loads(summary.read_text()) if summary.exists() else []
        cut_short = len(entries) < 2 or any(
            entry.get("incomplete") or entry.get("failed") for entry in entries
        )
        if cut_short or not (out / "report.html").exists():
            code = ended(started(arguments, errors))
            assert code == 0, f"{ending}: {arguments[1]} ended with {code}: {errors.read_text()[-800:]}"
        assert results_of(out) == self._whole[kind], f"{ending}: other results"
        left = [name for name in set(os.listdir("/dev/shm")) - shared if "netgym-fuzz" not in name]
        assert not left, f"{ending}: {left} are left"
        return ending

    def _kill(self, pid: int, number: signal.Signals) -> str:
        ranks = children_of(pid)
        if ranks and number == signal.SIGKILL and self._draw.random() < 0.5:
            victim = self._draw.choice(ranks)
            try:
                os.kill(victim, number)
            except ProcessLookupError:
                return "a rank that had ended"
            return "a rank's SIGKILL"
        os.kill(pid, number)
        return number.name

    def _check_end(self, pid: int, code: int, errors: Path) -> None:
        text = errors.read_text()
        assert code in (0, 1, -signal.SIGKILL, -signal.SIGTERM, -signal.SIGINT, 130, 143), (
            f"exit code {code}: {text}"
        )
        assert "Traceback" not in text or code in (-signal.SIGINT, -signal.SIGTERM), text[-1500:]
        assert code != 1 or "error:" in text.lower(), text[-800:]
        deadline = time.monotonic() + 5
        while left_of(pid):
            assert time.monotonic() < deadline, f"processes are left: {left_of(pid)}"
            time.sleep(0.01)


if __name__ == "__main__":
    torch.set_num_threads(1)
    page.draw_pictures = lambda *_: {}  # which takes longer than all the rest
    with tempfile.TemporaryDirectory() as folder:
        soak(__doc__, "kills", 100, Kills(Path(folder)).one)
