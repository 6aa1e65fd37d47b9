"""Threads and processes of ranks: the `workers` of an experiment and of `fit`."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, model_validator

from netsim.errors import InputError
from netsim.files.documents import Document
from netsim.files.schemas import Schema, validate_document

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["IN_ONE_PROCESS", "WorkerSpec", "num_cores"]

IN_ONE_PROCESS = ("threads", "stacked")
"""Kinds whose ranks are threads of the process that starts the run."""

# Processes gain a core each and cost a tenth of a second at the start (measured on two cores). Runs that take less than
# two seconds, by a floor for a step and the operations that a core does in a second, stay in threads.
_LARGE_STEP_FLOPS = 2e8
_SHORT_SECONDS, _LEAST_STEP_SECONDS, _FLOPS_PER_SECOND = 2.0, 5e-4, 1e10


def num_cores() -> int:
    """Number of processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class WorkerSpec(Schema):
    """Threads of this process, or some processes with threads in each; results are the same bits.

    Attributes:
        kind: `threads`, `processes`, `ray` (actors on a cluster), `stacked` (all replicas as one batched model: faster
            for many small ones, with other roundings), or `auto`: a process a core, threads alone for short runs.
        processes: number of processes; None: as many as there are cores. Ranks are dealt out in contiguous blocks.
        intra_op_threads: torch's threads for one operator. It changes bits, so it is part of an experiment.
        cuda_graphs: with `kind: stacked` on CUDA, launch each forward and backward pass as one graph, which helps small
            models.
        address: of the Ray cluster; None: that of RAY_ADDRESS, else one of this machine for the time of the run.
        num_gpus: that each actor asks the Ray cluster for; None: one where ranks compute on CUDA, else none.
    """

    kind: Literal["auto", "threads", "processes", "ray", "stacked"] = "auto"
    processes: Annotated[int, Field(ge=1)] | None = None
    intra_op_threads: Annotated[int, Field(ge=1)] = 1
    cuda_graphs: bool = False
    address: str | None = None
    num_gpus: Annotated[int, Field(ge=0)] | None = None

    @model_validator(mode="after")
    def _check_kind(self) -> WorkerSpec:
        if self.kind in IN_ONE_PROCESS and self.processes is not None:
            raise InputError(
                f"processes has no effect with kind: {self.kind}: leave it out, or write kind: processes"
            )
        if self.cuda_graphs and self.kind != "stacked":
            raise InputError(
                f"cuda_graphs is for kind: stacked, not {self.kind}; in other kinds leave it out, and give a model of "
                "torch.compile(model, mode='reduce-overhead')"
            )
        for name in ("address", "num_gpus"):
            if getattr(self, name) is not None and self.kind != "ray":
                raise InputError(f"{name} is for a Ray cluster: add kind: ray, or leave {name} out")
        return self

    @classmethod
    def parse(cls, spec: str | Mapping[str, Any] | WorkerSpec | None) -> WorkerSpec:
        """Parse a kind, a mapping of the attributes, or nothing (`auto`).

        Raises:
            InputError: a kind, key or number that does not exist; the message has the accepted ones.
        """
        if isinstance(spec, WorkerSpec):
            return spec
        given = {"kind": spec} if isinstance(spec, str) else {} if spec is None else spec
        return validate_document(cls, Document("workers", given))

    def settle(
        self,
        num_ranks: int,
        num_cores: int,
        step_flops: float = 0.0,
        *,
        num_steps: int | None = None,
        on_cuda: bool = False,
    ) -> WorkerSpec:
        """Resolve `auto`, the number of processes and of GPUs.

        Args:
            num_ranks: ranks to run.
            num_cores: cores of this machine.
            step_flops: floating-point operations of one rank's step, if known.
            num_steps: of each rank, if known, where processes can be forked.
            on_cuda: whether ranks compute on CUDA devices.
        """
        kind = self.kind
        if kind == "auto":
            seconds = num_ranks * (num_steps or 0) * (_LEAST_STEP_SECONDS + step_flops / _FLOPS_PER_SECOND)
            is_long = step_flops >= _LARGE_STEP_FLOPS or seconds >= _SHORT_SECONDS
            worth_it = num_cores > 1 and num_ranks > 1 and is_long
            kind = "processes" if worth_it or self.processes is not None else "threads"
        if kind in IN_ONE_PROCESS:
            return self.model_copy(update={"kind": kind, "processes": None})
        if kind == "ray":  # the number that fit is resolved with the cluster
            return self.model_copy(
                update={"num_gpus": int(on_cuda) if self.num_gpus is None else self.num_gpus}
            )
        wanted = self.processes if self.processes is not None else num_cores
        return self.model_copy(update={"kind": kind, "processes": min(wanted, num_ranks)})
