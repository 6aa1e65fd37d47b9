"""How ranks are carried: the `workers` of an experiment."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from netsim.files.errors import InputError, unknown_name, unknown_names

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["WorkerSpec"]

_KINDS = ("auto", "threads", "processes", "ray")
# Below this, handing ranks to other processes costs more than the second core gives (measured on two cores:
# an MLP step of 0.9 ms is slower in two processes, a GPT step of 120 ms nearly twice as fast).
_TINY_STEP_FLOPS = 2e8


@dataclass(frozen=True)
class WorkerSpec:
    """Threads of this process, or some processes with threads in each; results are the same bits.

    Attributes:
        kind: `threads`, `processes`, `ray` (actors on a cluster), or `auto`: a process a core, threads alone for tiny
            steps.
        processes: how many; None: as many as there are cores. Ranks are dealt out in contiguous blocks.
        intra_op_threads: torch's threads for one operator. It changes bits, so it is part of an experiment.
        address: of the Ray cluster; None: that of RAY_ADDRESS, else one of this machine for the time of the run.
        num_gpus: that each actor asks the Ray cluster for; None: one where ranks compute on CUDA, else none.
    """

    kind: str = "auto"
    processes: int | None = None
    intra_op_threads: int = 1
    address: str | None = None
    num_gpus: int | None = None

    @classmethod
    def parse(cls, spec: str | Mapping[str, Any] | WorkerSpec | None) -> WorkerSpec:
        """From a kind, a mapping of the attributes, or nothing (`auto`).

        Raises:
            InputError: a kind, key or number that does not exist; the message says what is accepted.
        """
        if isinstance(spec, WorkerSpec):
            return spec
        mapping = {"kind": spec} if isinstance(spec, str) else dict(spec or {})
        unknown = [str(key) for key in mapping if key not in cls.__dataclass_fields__]
        if unknown:
            raise unknown_names("key in workers", unknown, cls.__dataclass_fields__)
        made = cls(**mapping)
        if made.kind not in _KINDS:
            raise unknown_name("kind of workers", str(made.kind), _KINDS)
        for name in ("processes", "intra_op_threads"):
            value = getattr(made, name)
            missing = value is None and name == "processes"
            if not missing and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                raise InputError(f"workers: {name} is {value!r}; give a whole number from 1 up")
        if made.address is not None and (made.kind != "ray" or not isinstance(made.address, str)):
            raise InputError("workers: address is that of a Ray cluster: add kind: ray, or leave it out")
        gpus = made.num_gpus
        if gpus is not None and (made.kind != "ray" or type(gpus) is not int or gpus < 0):
            raise InputError("workers: num_gpus is what a Ray actor asks for: a whole number, with kind: ray")
        return made

    def settle(
        self, num_ranks: int, num_cores: int, step_flops: float = 0.0, *, on_cuda: bool = False
    ) -> WorkerSpec:
        """This with `auto`, the number of processes and of GPUs decided.

        Args:
            num_ranks: ranks to carry.
            num_cores: cores of this machine.
            step_flops: floating-point operations of one rank's step, if known.
            on_cuda: whether ranks compute on CUDA devices.
        """
        kind = self.kind
        if kind == "auto":
            worth_it = num_cores > 1 and num_ranks > 1 and step_flops >= _TINY_STEP_FLOPS
            kind = "processes" if worth_it or self.processes is not None else "threads"
        if kind == "threads":
            return replace(self, kind=kind, processes=None)
        if kind == "ray":  # how many there is room for is known once the cluster is
            return replace(self, num_gpus=int(on_cuda) if self.num_gpus is None else self.num_gpus)
        wanted = self.processes if self.processes is not None else num_cores
        return replace(self, kind=kind, processes=min(wanted, num_ranks))
