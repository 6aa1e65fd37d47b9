"""Measurement on this machine: seconds of a step, and speeds of codecs and optimizers."""

from __future__ import annotations

import copy
import itertools
import select
import statistics
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from exogym_core.cost.compute import VALUE_BYTES, BothWays, Coding, Compute, Updates
from exogym_core.data.batches import autocast_to, device_of
from exogym_core.learner import loss_and_count
from exogym_core.workers.processes.children import Children
from exogym_core.workers.rng import kept_rng
from exogym_core.workers.spec import num_cores
from exogym_core.workers.threads import intra_op_threads
from netsim.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from torch import nn
    from torch.optim import Optimizer

    from exogym_core.workers.processes.children import Pipe

    #: For every codec its name, how many values there are, and how it encodes them and decodes them.
    CodingTrials: TypeAlias = Iterable[tuple[str, int, tuple[Callable[[], Any], Callable[[], Any]]]]

__all__ = ["charge_updates", "measure_seconds", "seconds_of", "with_measured_speeds"]

_CPU = torch.device("cpu")
_REPEATS = 5
_CACHE_BYTES = 1 << 26  # more than a core's caches hold
_BUDGET_SECONDS = 1.0  # slow work is not repeated for longer


def seconds_of(
    work: Callable[[], Any], shared_cores: int | None = None, device: torch.device = _CPU
) -> float:
    """Seconds of `work` on a device of this machine: the median of up to five runs, after one to warm up.

    Where ranks share cores, forked processes repeat the work on the other cores (of those that this machine has), since
    caches and memory are shared. Work must then be possible in a forked process.
    """
    if device.type == "cuda":

        def finished() -> None:
            work()
            torch.cuda.synchronize(device)

        return _median(finished)
    with _parallel_work(work, min(shared_cores or 1, num_cores()) - 1):
        return _median(work)


def _median(work: Callable[[], Any]) -> float:
    times: list[float] = []
    began = time.perf_counter()
    others = torch.zeros(_CACHE_BYTES, dtype=torch.uint8)
    for _ in range(_REPEATS + 1):
        others.add_(1)  # fills the caches, as other work does between two steps of a run
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
        if time.perf_counter() - began > _BUDGET_SECONDS and len(times) > 1:
            break
    return statistics.median(times[1:])


@contextmanager
def _parallel_work(work: Callable[[], Any], num: int) -> Iterator[None]:
    """Repeat `work` in `num` processes while the block runs, each once at least before it begins."""
    if num < 1:
        yield
        return

    def repeat(_: int, channel: Pipe) -> None:
        work()
        channel.send(None)
        while not select.select([channel.fileno()], [], [], 0)[0]:  # readable once the parent has left
            work()

    with Children(repeat, num, names=["netgym measuring"] * num) as children:
        for channel in children.channels:
            channel.recv()
        yield


_TRIED: Mapping[str, Mapping[str, Any]] = {
    "SGD": {},
    "SGD with momentum": {"momentum": 0.9, "nesterov": True},
    "Adam": {},
    "AdamW": {},
    "Adagrad": {},
    "RMSprop": {},
    "NAdam": {},
    "RAdam": {},
}


def with_measured_speeds(
    compute: Compute,
    threads: int,
    trials: CodingTrials,
    shapes: Sequence[torch.Size],
    own: CodingTrials = (),
    device: torch.device = _CPU,
) -> Compute:
    """`compute` with measured speeds of codecs and optimizers, where they are to be measured.

    Args:
        compute: of the run.
        threads: torch's.
        trials: work of codecs.
        shapes: of the parameters that are updated.
        own: work of the user's codecs, which is measured also where speeds by name lack it.
        device: of the ranks, and of what is tried.

    Raises:
        InputError: ranks are to share cores, and compute on a GPU.
    """
    if compute.shared_cores is not None and device.type != "cpu":
        raise InputError(
            f"compute.shared_cores: ranks compute on {device.type}, not on cores; leave it out",
            about=("compute.shared_cores",),
        )

    def seconds(work: Callable[[], Any]) -> float:
        return seconds_of(work, compute.shared_cores, device)

    coding, updates, speeds = compute.coding, compute.updates, dict(compute.coding.speeds)
    with intra_op_threads(threads):
        # By name: user's codecs may lack one.
        if coding.is_measured or (speeds and Coding.for_all not in speeds):
            for name, num_values, ways in itertools.chain(trials if coding.is_measured else (), own):
                if name not in speeds:
                    encoded, decoded = (round(num_values * VALUE_BYTES / seconds(work)) for work in ways)
                    speeds[name] = BothWays.model_construct(encode=encoded, decode=decoded)
            coding = Coding.model_construct(speeds)
        if updates.is_measured:
            updates = _measured_updates(shapes, device, seconds)
    return compute.model_copy(update={"coding": coding, "updates": updates})


def _measured_updates(
    shapes: Sequence[torch.Size], device: torch.device, seconds: Callable[[Callable[[], Any]], float]
) -> Updates:
    """Speeds of torch's usual optimizers over tensors of these shapes; all others get that of AdamW."""
    generator = torch.Generator().manual_seed(0)
    parameters = [torch.randn(shape, generator=generator).to(device) for shape in shapes]
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape, generator=generator).to(device) * 1e-3
    num_bytes = sum(parameter.numel() for parameter in parameters) * VALUE_BYTES
    speeds = {}
    for name, options in _TRIED.items():
        make = getattr(torch.optim, name.partition(" ")[0])
        speeds[name] = round(num_bytes / seconds(make(parameters, lr=1e-6, **options).step))
    speeds[Updates.for_all] = speeds["AdamW"]
    return Updates.model_construct(dict(sorted(speeds.items())))


def charge_updates(
    optimizers: Iterable[Optimizer], updates: Updates, advance: Callable[[float], None]
) -> None:
    """Charge each step of the optimizers by `advance`, as `Communicator.advance` does."""
    for optimizer in optimizers:
        if seconds := updates.seconds(optimizer):
            optimizer.register_step_post_hook(lambda *_, seconds=seconds: advance(seconds))


def measure_seconds(
    model: nn.Module, batch: Any, shared_cores: int | None = None, precision: str | None = None
) -> float:
    """Host seconds of a forward and backward pass over `batch` on a copy of the model, see `seconds_of`.

    The RNG is left as it was.

    Args:
        model: on its device.
        batch: there too.
        shared_cores: as for `seconds_of`.
        precision: of the forward pass, as `autocast`.
    """
    replica, device = copy.deepcopy(model), device_of(model)

    def work() -> None:
        with autocast_to(precision, device):
            loss, _ = loss_and_count(replica(batch), "fit: a first batch", with_gradient=True)
        loss.backward()  # type: ignore[no-untyped-call]
        loss.item()  # on a GPU: waits for all that was queued

    with kept_rng(device):
        work()
        return seconds_of(work, shared_cores, device)
