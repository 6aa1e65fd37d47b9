"""Programs in forks of the tests' process, which has imported torch already: as a shell starts them, but sooner."""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
import runpy
import signal
import sys
import tempfile
import time
import traceback
import warnings
import weakref
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest
import torch._dynamo  # optimizers import it: once here, and not in each of the forks

_UNSET = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "TORCHELASTIC_RUN_ID",
)


class Fork:
    """A call in a process with a session and output of its own; its result, if any, is the exit code."""

    def __init__(
        self,
        body: Callable[..., Any],
        *arguments: Any,
        folder: Path | str = ".",
        environment: Mapping[str, str] | None = None,
        stdin: str = "",
    ) -> None:
        self._streams = [_unnamed_file() for _ in range(3)]
        weakref.finalize(self, _close, self._streams)
        os.pwrite(self._streams[0], stdin.encode(), 0)
        context = multiprocessing.get_context("fork")
        self.process = context.Process(target=self._call, args=(body, arguments, folder, environment or {}))
        self.process.start()

    def _call(
        self, body: Callable[..., Any], arguments: Any, folder: Path | str, environment: Mapping[str, str]
    ) -> None:
        os.setsid()
        for number, stream in enumerate(self._streams):
            os.dup2(stream, number)
        sys.stdin, sys.stdout, sys.stderr = (
            os.fdopen(number, mode, closefd=False) for number, mode in enumerate("rww")
        )
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for number in (signal.SIGHUP, signal.SIGQUIT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)  # an exec would drop the handlers of tests, too
        warnings.resetwarnings()
        for category in (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning):
            warnings.simplefilter("ignore", category)  # as Python does
        os.chdir(folder)
        for name in _UNSET:
            os.environ.pop(name, None)
        os.environ.update(environment)
        tempfile.tempdir = None  # TMPDIR may be another
        try:
            code = body(*arguments)
        except KeyboardInterrupt:  # Python's end, not that of multiprocessing
            traceback.print_exc()
            sys.stdout.flush()
            sys.stderr.flush()
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
        sys.exit(code)

    @property
    def out(self) -> str:
        """Standard output until now."""
        return self._read(1)

    @property
    def err(self) -> str:
        """Standard error until now."""
        return self._read(2)

    def _read(self, number: int) -> str:
        stream = self._streams[number]
        return os.pread(stream, os.fstat(stream).st_size, 0).decode()

    def wait_for(self, is_there: Callable[[], bool]) -> None:
        """Wait until it has done something; an error where it ends before."""
        while not is_there():
            assert self.process.exitcode is None, f"ended with {self.process.exitcode}: {self.err}"
            time.sleep(0.002)

    def send_signal(self, number: int) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def end(self, seconds: float = 200.0) -> CompletedProcess[str]:
        """Wait for its end; a process that does not end is killed with its session."""
        self.process.join(seconds)
        self.kill()
        code = self.process.exitcode
        assert code is not None
        return CompletedProcess([], code, self.out, self.err)

    def kill(self) -> None:
        """Kill it with all processes of its session, unless it has ended."""
        if self.process.exitcode is None:
            assert self.process.pid is not None
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.join()


def _unnamed_file() -> int:
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def _close(streams: list[int]) -> None:
    for stream in streams:
        os.close(stream)


def run_script(path: str, *arguments: str) -> None:
    """A script as `python PATH ARGUMENTS` runs it."""
    sys.argv = [path, *arguments]
    sys.path.insert(0, os.path.dirname(os.path.abspath(path)))
    runpy.run_path(path, run_name="__main__")


def benchmark(name: str) -> Any:
    """A program of benchmarks/ as a module; programs there import each other."""
    folder = Path(__file__).parents[1] / "benchmarks"
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        spec = importlib.util.spec_from_file_location(f"benchmark_{name}", folder / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
    return module


def agent_store() -> torch.distributed.TCPStore:
    """The store that torchrun's agent has for its ranks."""
    return torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def ranks(
    num_ranks: int,
    body: Callable[..., Any],
    *arguments: Any,
    folder: Path | str = ".",
    store: torch.distributed.TCPStore | None = None,
    seconds: float = 200.0,
    **environment: str,
) -> list[CompletedProcess[str]]:
    """A call in processes with the environment and store of torchrun's, each of which imports torch by itself."""
    store = store or agent_store()
    shared = {
        "TORCHELASTIC_RUN_ID": "none",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
    } | environment
    with ExitStack() as stack:
        started = []
        for rank in range(num_ranks):
            own = shared | dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank))
            started.append(Fork(body, *arguments, folder=folder, environment=own))
            stack.callback(started[-1].kill)
        until = time.monotonic() + seconds
        return [fork.end(max(until - time.monotonic(), 1.0)) for fork in started]


def torchrun(num_ranks: int, *arguments: str, max_restarts: int = 0) -> None:
    """Become torchrun's agent, whose ranks are executed: forks of it, which has threads, may hang."""
    options = ["--standalone", "--nproc-per-node", str(num_ranks), "--max-restarts", str(max_restarts)]
    os.environ["OMP_NUM_THREADS"] = "1"
    agent = importlib.import_module("torch.distributed.run")
    agent.main([*options, *arguments])


def left_of(session: int | None) -> list[int]:
    """Living processes of a session."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[3]) == session and fields[0] != "Z":
            found.append(int(path.parent.name))
    return found
