"""Jobs side by side: calls in forked processes of this machine, each on its share of the cores.

    def train(report): report.step(1); return 0.5
    for job, end in run_jobs(iter([Job("a", train, progress), Job("b", train, progress)]), num_jobs=2):
        end.error or end.result

A fork shares imported modules and loaded data, so a job starts within milliseconds.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import traceback
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import torch

from exogym_core.uncompiled import without_compiler
from exogym_core.workers.processes.children import (
    ChannelClosed,
    Children,
    Pipe,
    can_fork,
    interruptions_deferred,
)
from netsim.cli.signals import raise_lost_interrupt
from netsim.errors import NetsimError

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Iterator
    from types import FrameType

__all__ = ["Job", "JobEnd", "call_each", "run_jobs"]


@dataclass(eq=False)
class Job:
    """A call that may run in a process of its own.

    Attributes:
        name: precedes warnings.
        call: `call(report)`.
        report: object of this process; methods that `call` calls on its argument run here, and return None there.
        is_dropped: the result is no longer wanted: a running process is killed.
    """

    name: str
    call: Callable[[Any], Any]
    report: Any
    is_dropped: bool = False


class JobEnd(NamedTuple):
    """Result of a job, or the error that ended it."""

    result: Any = None
    error: Exception | None = None


def run_jobs(jobs: Iterator[Job | None], num_jobs: int) -> Generator[tuple[Job, JobEnd]]:
    """Run jobs, up to `num_jobs` at once; yields each with its end. One at a time runs in this process.

    Closing the generator, Ctrl-C and errors of reports interrupt what runs: a job in a process gets KeyboardInterrupt,
    and its reports are taken until it has ended.

    Args:
        jobs: asked for the next one when there is room; None: none before a running job has reported or ended.
            The run ends when no job runs and none follows.
        num_jobs: at once; more than one needs `can_fork()`.
    """
    if num_jobs == 1:
        for job in jobs:
            if job is not None:
                with _warnings_named(job):
                    end = _attempt(job.call, job.report)
                yield job, end
        return
    with without_compiler(), _Pool(num_jobs) as pool:
        try:
            while True:
                while len(pool.running) < num_jobs and (job := next(jobs, None)) is not None:
                    pool.start(job)
                if not pool.running:  # several may have ended at once
                    return
                yield from pool.receive()
        except BaseException:
            pool.interrupt()
            raise


def call_each(call: Callable[[Any], Any], items: Iterable[Any], num_jobs: int | None = None) -> list[Any]:
    """Results of `call(item)` for each item, in their order.

    Args:
        call: of one item; its result can be pickled.
        items: of the calls.
        num_jobs: calls at once; None: one a core where this process can be forked.
    """

    if num_jobs is None:
        num_jobs = len(os.sched_getaffinity(0)) if can_fork() else 1
    jobs = [Job("", lambda _, item=item: call(item), None) for item in items]  # type: ignore[misc]
    ends = dict(run_jobs(iter(jobs), num_jobs))
    for end in ends.values():
        if end.error is not None:
            raise end.error
    return [ends[job].result for job in jobs]


def _attempt(call: Callable[[Any], Any], report: Any) -> JobEnd:
    try:
        return JobEnd(call(report))
    except Exception as error:
        raise_lost_interrupt(error)
        return JobEnd(error=error)


class _Running(NamedTuple):
    job: Job
    share: int  # of the cores


class _Pool:
    """Processes of running jobs: context manager.

    Attributes:
        running: by index of the child.
    """

    def __init__(self, num_jobs: int) -> None:
        self.running: dict[int, _Running] = {}
        self._num_jobs = num_jobs
        self._children = Children(self._run, 0, method="fork")

    def __enter__(self) -> Self:
        self._children.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        self._children.__exit__(*exception)

    def start(self, job: Job) -> None:
        """Fork a process for `job`."""
        taken = {each.share for each in self.running.values()}
        share = next(share for share in range(self._num_jobs) if share not in taken)
        self._starting = _Running(job, share)  # read by the child
        index = self._children.add(f"netgym job {share}")
        self.running[index] = self._starting

    def receive(self) -> Iterator[tuple[Job, JobEnd]]:
        """Wait for messages of jobs and pass them to their reports; yields the jobs that have ended."""
        for index in self._children.ready(self.running):
            job = self.running[index].job
            if job.is_dropped:
                self._children.send_signal(index, signal.SIGKILL)
            try:
                with interruptions_deferred():
                    message = self._children.channels[index].recv()
            except ChannelClosed:
                how = self._children.reap(index, timeout_seconds=10.0) or "closed its channel"
                hint = " (too little memory? try fewer --jobs)" if "SIGKILL" in how else ""
                message = JobEnd(error=NetsimError(f"its process ended: {how}{hint}"))
            if isinstance(message, JobEnd):
                del self.running[index]
                self._children.reap(index, timeout_seconds=10.0)
                yield job, message
            elif not job.is_dropped:
                _take(job, *message)

    def interrupt(self) -> None:
        """Interrupt every job and take its reports until it has ended; errors of reports are ignored."""
        for index in self.running:
            self._children.send_signal(index, signal.SIGTERM)
        while self.running:
            with contextlib.suppress(NetsimError):  # the cause of the interruption is raised already
                for _ in self.receive():
                    pass

    def _run(self, index: int, channel: Pipe) -> None:
        """Run a job in its process."""
        job, share = self._starting
        if hasattr(os, "sched_getaffinity"):
            cores = sorted(os.sched_getaffinity(0))
            os.sched_setaffinity(0, set(cores[share :: self._num_jobs]) or {cores[share % len(cores)]})
        torch.set_num_threads(1)
        reporter = _Reporter(channel)
        warnings.showwarning = lambda message, *_, **__: reporter.warn(str(message))
        try:
            signal.signal(signal.SIGTERM, _interrupt_once)
            end = _attempt(job.call, reporter)
        except KeyboardInterrupt:
            end = JobEnd(error=NetsimError("interrupted"))
        reporter.send(JobEnd(end.result, end.error and _portable(end.error)))


@contextlib.contextmanager
def _warnings_named(job: Job) -> Iterator[None]:
    """Precede warnings in the block by the job's name, as those of a process are."""
    with warnings.catch_warnings():
        show = warnings.showwarning
        warnings.showwarning = lambda message, *rest, **keywords: show(
            _named(job, message), *rest, **keywords
        )
        yield


def _named(job: Job, message: Warning | str) -> str:
    return f"{job.name}: {message}" if job.name else str(message)


def _take(job: Job, method: str, arguments: tuple[Any, ...]) -> None:
    if method == "warn":
        warnings.warn(_named(job, arguments[0]), UserWarning, stacklevel=2)
    else:
        getattr(job.report, method)(*arguments)


def _interrupt_once(number: int, frame: FrameType | None) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a second one must not interrupt the saving
    raise KeyboardInterrupt


class _Reporter:
    """A report's methods, called in the parent."""

    def __init__(self, channel: Pipe) -> None:
        self._channel = channel

    def __getattr__(self, method: str) -> Callable[..., None]:
        def call(*arguments: Any) -> None:
            self.send((method, arguments))

        return call

    def send(self, message: object) -> None:
        with interruptions_deferred():
            self._channel.send(message)


def _portable(error: Exception) -> Exception:
    """An error that can be sent, with the frames of one that is not reported by its line alone."""
    if not isinstance(error, NetsimError):
        error.add_note("".join(traceback.format_exception(error)).rstrip())
    try:
        return pickle.loads(pickle.dumps(error))  # type: ignore[no-any-return]
    except Exception:
        return NetsimError(f"{type(error).__name__}: {error}")
