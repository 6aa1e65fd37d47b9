"""Jobs of a Slurm cluster, submitted as one array by submitit, in the interface of `RayCluster`.

Jobs and results are files in a folder that all nodes share; nothing listens on a network. Jobs outlive this process: a
sweep that is resumed takes the results of those that it had submitted.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import pickle
import shutil
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Self

from exogym_core.names import visible
from exogym_core.results.disk import write_whole
from netsim.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

__all__ = ["SlurmCluster", "minutes"]

_MOST_AT_ONCE = 500  # Slurm's own limit of an array is 1,001 by default
_MINUTES = "60"
_LEAST_BYTES = 2e9
_SPARE = 2.0  # of the memory measured here: Slurm ends a job that takes more than it asked for
_UNDER_WAY = ("PENDING", "RUNNING", "REQUEUED", "COMPLETING", "CONFIGURING", "SUSPENDED")
_POLL_SECONDS = 1.0


class SlurmCluster:
    """Context manager: checks that jobs can be submitted.

    Args:
        options: of sbatch, as in `partition=gpu,time=2:00:00`; `array_parallelism`, jobs that run at once (256); and
            `cluster=local`, processes on this machine in place of jobs.

    Raises:
        InputError: an option has no value, or (on entering) submitit or Slurm's commands are missing.
    """

    def __init__(self, options: str = "") -> None:
        self._options: dict[str, str] = {"time": _MINUTES}
        key = ""
        for part in filter(None, options.split(",")):
            name, separator, value = part.partition("=")
            if separator:
                key = name.strip().replace("-", "_")
                self._options[key] = value
            elif key:  # a list, such as nodelist=a,b
                self._options[key] += f",{part}"
            else:
                raise InputError(
                    f"--on slurm:{options}: write KEY=VALUE, such as slurm:partition=gpu,time=2:00:00"
                )
        self._cluster = self._options.pop("cluster", "slurm")
        self._minutes = minutes(self._options.pop("time"))
        self._jobs: dict[str, Any] = {}  # by reference
        self._waiting: list[tuple[str, Callable[[Any], Any], Any, Mapping[str, float]]] = []

    def __enter__(self) -> Self:
        try:
            import submitit  # noqa: F401
        except ImportError:
            raise InputError("slurm: submitit is not installed: pip install 'netgym[slurm]'") from None
        missing = [name for name in ("sbatch", "srun", "sacct") if shutil.which(name) is None]
        if self._cluster == "slurm" and missing:
            raise InputError(
                f"slurm: there is no {missing[0]} on this machine: run this on a node that submits jobs of the cluster"
            )
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing to end: jobs that were not cancelled go on."""

    def room(self, num_under_way: int) -> int:
        """Number of calls to submit now: arrays follow each other."""
        return 0 if num_under_way else _MOST_AT_ONCE

    def require(self, needs: Mapping[str, float], who: str) -> None:
        """Nothing: Slurm refuses what no node has."""

    @contextmanager
    def batch(self, folder: Path) -> Iterator[None]:
        """Submit the calls of the block as one array, without those whose job of an earlier process is there.

        Args:
            folder: of the jobs' files, on a disk that all nodes share.

        Raises:
            InputError: Slurm refuses the jobs.
        """
        yield
        calls, self._waiting = self._waiting, []
        if not calls:
            return
        import submitit

        folder = folder / "slurm"
        folder.mkdir(exist_ok=True)
        record = folder / "jobs.json"
        known: dict[str, list[str]] = json.loads(record.read_text()) if record.is_file() else {}
        digests = {name: hashlib.sha256(pickle.dumps(job)).hexdigest() for name, _, job, _ in calls}
        for name, digest in digests.items():
            if known.get(name, [""])[0] == digest:
                job = (submitit.SlurmJob if self._cluster == "slurm" else submitit.LocalJob)(
                    folder, known[name][1]
                )
                is_there = job.paths.result_pickle.exists()
                if is_there or job.get_info(mode="force").get("State", "").split(" ")[0] in _UNDER_WAY:
                    self._jobs[name] = job
        new = [call for call in calls if call[0] not in self._jobs]
        if not new:
            return
        try:
            executor = submitit.AutoExecutor(folder, cluster=self._cluster)
            executor.update_parameters(**self._parameters([needs for *_, needs in new]))
            with executor.batch():
                submitted = {name: executor.submit(call, job) for name, call, job, _ in new}
            self._jobs |= submitted
        except Exception as error:  # whatever sbatch says
            reason = visible(str(error).strip().rpartition("\n")[2], 300)
            raise InputError(f"slurm: the jobs cannot be submitted: {reason}") from None
        known |= {name: [digests[name], job.job_id] for name, job in submitted.items()}
        write_whole(record, json.dumps(known))

    def _parameters(self, needs: Sequence[Mapping[str, float]]) -> dict[str, Any]:
        """Parameters of submitit for the largest of the `needs`; the user's options replace them."""
        most: dict[str, float] = {}
        for each in needs:
            most |= {key: max(value, most.get(key, 0.0)) for key, value in each.items()}
        asked: dict[str, Any] = {"cpus_per_task": int(most.get("num_cpus", 1))}
        if "num_gpus" in most:
            asked["gpus_per_node"] = int(most["num_gpus"])
        if "memory" in most:
            asked["mem"] = f"{math.ceil(max(_SPARE * most['memory'], _LEAST_BYTES) / 1e6)}M"
        asked |= self._options
        parallel = asked.pop("array_parallelism", None)
        return {
            "name": "netgym",
            "timeout_min": self._minutes,
            "slurm_use_srun": False,  # one process a job
            "slurm_additional_parameters": asked,
            **({"slurm_array_parallelism": int(parallel)} if parallel is not None else {}),
        }

    def submit(self, call: Callable[[Any], Any], job: Any, *, needs: Mapping[str, float], tries: int) -> str:
        """Add a call to the batch; returns a reference. Slurm itself requeues jobs whose node is lost."""
        self._waiting.append((job.name, call, job, needs))
        return str(job.name)

    def ready(self, references: Sequence[str], timeout_seconds: float) -> list[str]:
        """Finished references, waiting up to `timeout_seconds` for the first."""
        deadline = time.monotonic() + timeout_seconds
        while True:
            found = [name for name in references if self._jobs[name].done()]
            left = deadline - time.monotonic()
            if found or left <= 0:
                return found
            time.sleep(min(left, _POLL_SECONDS))

    def result(self, reference: str) -> Any:
        """Result of a call, whose files are then removed; a text with the cause where there is none."""
        job = self._jobs.pop(reference)
        try:
            found = job.result()
        except Exception:  # of the job's, or submitit's where it left no result
            return (
                f"Slurm job {job.job_id} ended without a result (state {job.state}): see {job.paths.stderr}"
            )
        for path in (job.paths.submitted_pickle, job.paths.result_pickle, job.paths.stdout, job.paths.stderr):
            path.unlink(missing_ok=True)
        return found

    def cancel(self, reference: str) -> None:
        """Cancel a call's job, if it has one already."""
        if reference in self._jobs:
            with contextlib.suppress(OSError):
                self._jobs.pop(reference).cancel(check=False)


def minutes(text: str) -> int:
    """Whole minutes of a time limit as Slurm writes it, rounded up.

    Raises:
        InputError: it is none.

    >>> minutes("90"), minutes("2:00:00"), minutes("1-12"), minutes("10:30")
    (90, 120, 2160, 11)
    """
    days, _, rest = text.strip().rpartition("-")
    parts = rest.split(":")
    try:
        numbers = [int(part) for part in parts]
        if days:
            hours, mins, seconds = (*numbers, 0, 0)[:3]
        else:
            hours, mins, seconds = {1: (0, *numbers, 0), 2: (0, *numbers), 3: tuple(numbers)}[len(numbers)]
        total = ((int(days or 0) * 24 + hours) * 60 + mins) * 60 + seconds
    except (KeyError, ValueError):
        total = 0
    if total <= 0:
        raise InputError(
            f"--on slurm: time={visible(text)} is no time limit: write minutes, H:MM:SS or D-HH:MM:SS"
        )
    return -(-total // 60)
