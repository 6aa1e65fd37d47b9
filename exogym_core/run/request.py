"""Request of `fit`: its options, checked before anything starts."""

from __future__ import annotations

import copy
import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import torch

from exogym_core.checkpoints.checkpoint import find_checkpoint, step_folders
from exogym_core.config import OPTIONS, RunConfig
from exogym_core.cost.compute import Compute
from exogym_core.data.batches import PRECISIONS, collate_of
from exogym_core.meeting_place import is_at_rendezvous, torchrun_rank, under_torchrun, whole_number_of
from exogym_core.names import shown_value, visible
from exogym_core.results.loggers import X_AXES
from exogym_core.results.run_folder import is_run_folder
from exogym_core.stages.boundaries import boundary_codec
from exogym_core.stages.options import hosts_of, refuse_with_stages
from exogym_core.strategy.base import Strategy
from exogym_core.workers.run import Transport, loaded_topology, transport_named
from netsim import Topology
from netsim.errors import InputError, about_option, locate_errors, unknown_name
from netsim.topology.weather import random_crashes
from netsim.units import format_count

if TYPE_CHECKING:
    from collections.abc import Sequence

    from exogym_core.stages.options import Stages
    from exogym_core.workers.spec import WorkerSpec
    from netsim import HostEvent


__all__ = ["FitRequest", "MissingDeviceError", "by_speed_conflict", "unlike_hosts", "with_servers"]


class MissingDeviceError(InputError):
    """This machine does not have the device, and others may."""


def with_servers(
    topology: Topology, num_workers: int, placement: Sequence[str] | None, groups: Sequence[int]
) -> Sequence[str] | None:
    """The host of each worker, then of each server: as named in the placement, else each kind spread as workers are.

    Args:
        topology: the network.
        num_workers: number of workers.
        placement: of the workers, as `run_ranks` has it, and perhaps of servers, which a strategy without leaves out.
        groups: number of servers of each kind.

    Raises:
        InputError: hosts of servers are named, and of another number.
    """
    num_servers, num_named = sum(groups), num_workers if placement is None else len(placement)
    if placement is not None and (not num_servers or num_named == num_workers + num_servers):
        return placement[: num_workers + num_servers]
    if not num_servers:
        return None
    if num_named != num_workers:
        raise InputError(
            f"placement: expected {num_workers} host names, one a worker, or {num_workers + num_servers} with those of "
            f"{format_count(num_servers, 'server')}, got {num_named}",
            about=("placement",),
        )
    hosts = list(topology.place(num_workers, placement))
    for number in groups:
        hosts += topology.place(number)
    return [topology.hosts[host].name for host in hosts]


TopologyLike: TypeAlias = Topology | str | Path | Mapping[str, Any]


@dataclass(kw_only=True)
class FitRequest(RunConfig):
    """The options of a run, checked and completed; the fields listed here have their final types.

    Raises:
        InputError: an argument is wrong, or two contradict each other; the line says which and what to do.
    """

    strategy: Strategy
    num_nodes: int
    minibatch_size: int
    finds_minibatch: bool
    autocast: str | None
    topology: Topology | None
    compute: Compute | None
    workers: WorkerSpec
    timeout_seconds: float | None
    until: float | None
    val_seconds: float | None
    failures: Mapping[str, float] | None
    stages: Stages | None
    crashes: tuple[HostEvent, ...] = ()  # drawn for `failures`, part of the weather
    places: Sequence[str] | None = None  # `placement` with servers, each kind of them spread as workers are

    @classmethod
    def check(cls, options: RunConfig) -> FitRequest:
        """From options that are checked each by itself."""
        values = dict(vars(options))
        values["topology"] = loaded_topology(values["topology"])
        with about_option("num_nodes"):
            values["num_nodes"] = _num_nodes(values["num_nodes"], values["transport"], values["topology"])
        if values["compute"] is None and values["topology"] is not None:
            values["compute"] = Compute()
        batch_size, given = values["batch_size"], values["minibatch_size"]
        stages: Stages | None = values["stages"]
        if stages is not None:
            if given == "auto":
                raise InputError(
                    "fit: stages: minibatch_size 'auto' looks at whole models: give a number, or leave it out",
                    about=("stages",),
                )
            given = batch_size // stages.settle_microbatches(batch_size, given)
        values["finds_minibatch"] = given == "auto"
        values["minibatch_size"] = size = batch_size if given in (None, "auto") else given
        if batch_size % size:
            raise InputError(
                f"fit: minibatch_size {size} does not divide batch_size {batch_size}; "
                f"use {nearest_divisor(batch_size, size)}",
                about=("minibatch_size",),
            )
        autocast = values["autocast"]
        if autocast is None or isinstance(autocast, bool):
            values["autocast"] = "bf16" if autocast else None
        elif not isinstance(autocast, str) or autocast not in PRECISIONS:
            shown = autocast if isinstance(autocast, str) else shown_value(autocast)
            raise unknown_name("autocast", shown, ["true", "false", *PRECISIONS])
        if values["num_epochs"] is None and values["max_steps"] is None:
            values["num_epochs"] = 1
        request = cls(**values)
        request._check_strategy()
        if request.batch_by_speed:
            request._check_batches()
        if request.target_loss is not None and not request.val_size:
            raise InputError(
                f"fit: target_loss={request.target_loss:g} is judged in evaluations, and val_size=0 makes none: "
                "leave one of them out",
                about=("target_loss",),
            )
        if request.workers.cuda_graphs:
            request._check_graphs()
        request._settle_servers()
        if stages is not None:
            request._check_stages()
        request._settle_places()
        if request.launch == "local":
            for rank in range(min(request.num_nodes, len(request.devices or [None]))):
                _refuse_missing(request.device_of(rank))
        collate_of(request.dataloader_kwargs)
        if request.resume_from is not None and not request.place and request.launch != "site":
            _require_checkpoint(Path(request.resume_from))
        return request

    def __getstate__(self) -> dict[str, Any]:
        """State for ranks in other processes, without the listener of this one."""
        return {**vars(self), "on_event": None}

    # --- checks --------------------------------------------------------------------------------------------

    def _check_strategy(self) -> None:
        if isinstance(self.strategy, type) and issubclass(self.strategy, Strategy):
            raise InputError(
                f"fit: strategy is the class {self.strategy.__name__}; pass one: {self.strategy.__name__}()"
            )
        if not isinstance(self.strategy, Strategy):
            what = "missing" if self.strategy is None else f"a {type(self.strategy).__name__}"
            raise InputError(
                f"fit: strategy is {what}; pass one such as exogym_core.strategy.DiLoCoStrategy()"
            )
        clients = self.strategy.clients
        if (clients.are_drawn or clients.balance) and self.val_seconds is not None:
            raise InputError(
                "fit: evaluations by virtual seconds do not go with clients_per_round, fraction or balance; count them "
                "in steps (val_interval=, evaluate.every)"
            )
        if self.log_x_axis not in X_AXES:
            raise unknown_name("log_x_axis", str(self.log_x_axis), X_AXES)
        if not self.carrier.has_clock:
            for name in ("topology", "placement", "protocol", "trace"):
                if getattr(self, name) is not None:
                    raise InputError(
                        f"fit: transport {self.transport!r} has no virtual time and no {name}; "
                        f"drop {name} or use 'netsim'",
                        about=("transport",),
                    )
            if self.strategy.arguments.get("exchange", "direct") != "direct":
                raise InputError(
                    f"fit: {type(self.strategy).__name__}: exchange: store needs simulated links: set transport: "
                    f"netsim, or leave exchange out over {self.transport!r}"
                )
        if self.strategy.clients.balance and self.topology is None:
            raise InputError(
                f"fit: {type(self.strategy).__name__}: balance needs the time of each worker's step: pass topology= "
                "and compute=, or leave balance out"
            )
        if self.topology is None and self.compute is not None:
            warnings.warn("fit: compute has no effect without a topology", UserWarning, stacklevel=6)
            self.compute = None

    @about_option("workers")
    def _check_graphs(self) -> None:
        others = {self.device_of(rank).type for rank in range(self.num_nodes)} - {"cuda"}
        if others:
            kind = MissingDeviceError if self.device is None else InputError
            raise kind(
                f"workers: cuda_graphs is for CUDA, and ranks compute on {others.pop()}; "
                "leave it out, or set device: cuda"
            )
        if self.autocast == "fp16":
            raise InputError("workers: cuda_graphs does not scale losses, as autocast: fp16 does; use bf16")

    @about_option("batch_by_speed")
    def _check_batches(self) -> None:
        if self.topology is None or self.compute is None or self.compute.flops is None:
            raise InputError(
                "fit: batch_by_speed needs devices' speeds: pass topology= with devices and leave compute.fixed and "
                "compute.measured out, or leave batch_by_speed out"
            )
        others = {
            "workers.kind: stacked": self.workers.kind == "stacked",
            "minibatch_size: auto": self.finds_minibatch,
        }
        conflict = by_speed_conflict(self.strategy, self.stages, others)
        if conflict is not None:
            raise InputError(f"fit: batch_by_speed does not go with {conflict}: leave it out")

    def _check_stages(self) -> None:
        assert self.stages is not None
        boundary_codec(self.stages.codec)  # raises for an unknown name
        keeps = self.checkpoint_interval is not None or self.resume_from is not None
        others = {
            "torchrun (start it without)": self.launch != "local",
            f"checkpoints under pipedream over {self.transport!r}, where messages in flight are not kept": (
                keeps and self.stages.is_asynchronous and not self.carrier.has_clock
            ),
            "checkpoints of steps with waiting times": keeps and self.waits_for_some,
        }
        refuse_with_stages("fit", self.strategy, self.autocast, self.val_seconds, others, self.stages)

    def _settle_servers(self) -> None:
        """Give a strategy that has servers as many as were asked for."""
        if self.servers is not None:
            self.strategy = copy.deepcopy(self.strategy)
            self.strategy.take_servers(self.servers)
        if self.strategy.num_servers and self.launch == "torchrun":
            raise InputError(
                f"fit: {type(self.strategy).__name__} has {format_count(self.strategy.num_servers, 'server')}, which "
                "processes of torchrun do not run: start it without torchrun (transport 'gloo' or 'netsim'), or use a "
                "strategy without servers"
            )
        if self.topology is None or not self.carrier.has_clock:
            for name in (name for name, each in OPTIONS.items() if each.is_timed):
                if getattr(self, name) not in (None, "auto"):
                    raise InputError(
                        f"fit: {name} needs virtual time; pass topology=, and transport 'netsim'",
                        about=(name,),
                    )

    def _settle_places(self) -> None:
        """Place the ranks of stages and servers, and add what happens to hosts to the topology's weather."""
        self.places, topology = self.placement, self.topology
        if topology is None:
            return
        if self.stages is not None:
            of_stages = hosts_of(topology, self.num_nodes, self.stages, self.placement)
            self.places = [topology.hosts[host].name for host in of_stages]
        if self.strategy.num_servers:
            groups = self.strategy.server_groups
            self.places = with_servers(topology, self.num_nodes, self.placement, groups)
        hosts = self.hosts
        if self.failures is not None:
            if self.until is None:
                raise InputError(
                    "fit: failures need until=, the virtual time until which hosts may fail",
                    about=("failures",),
                )
            names, given = sorted(set(hosts), key=topology.host_index), self.failures
            with locate_errors("fit: failures", ("failures",)):
                crashes = random_crashes(names, given["mtbf"], given["repair"], self.until, self.seed)
            self.crashes = tuple(crashes)
            self.topology = replace(topology, weather=topology.weather.with_events(crashes))
        if self.placement is None and self.stages is None and (line := unlike_hosts(topology, hosts)):
            warnings.warn(f"fit: {line}", UserWarning, stacklevel=6)
        if (unused := topology.unused_links) is not None:
            warnings.warn(f"fit: topology {topology.name}: {unused}", UserWarning, stacklevel=6)

    def take_minibatch(self, size: int) -> None:
        """Settle the micro-batch that was to be found: `size` samples."""
        self.minibatch_size, self.finds_minibatch = size, False

    # --- what follows from them ----------------------------------------------------------------------------

    @property
    def waits_for_some(self) -> bool:
        """True if the strategy goes on without absent ranks."""
        return self.strategy.patience.patience(self.strategy.where) is not None

    @property
    def num_training(self) -> int:
        """Number of ranks that train: those of all workers."""
        return self.num_nodes * (1 if self.stages is None else self.stages.count)

    @property
    def num_ranks(self) -> int:
        """Number of ranks: those that train, and servers."""
        return self.num_training + self.strategy.num_servers

    @property
    def hosts(self) -> list[str]:
        """Host of each rank that trains, by name; none without a topology."""
        if self.topology is None:
            return []
        placed = self.topology.place(self.num_ranks, self.places)[: self.num_training]
        return [self.topology.hosts[host].name for host in placed]

    def weather_after(self, seconds: float) -> str | None:
        """Weather of the topology that begins at `seconds` or later, in a line; drawn crashes are left out."""
        if self.topology is None:
            return None
        weather = self.topology.weather
        drawn = set(self.crashes)
        given = tuple(event for event in weather.events if event not in drawn)
        return weather.model_copy(update={"events": given}).after(seconds)

    @property
    def carrier(self) -> Transport:
        """The transport, and what it can do."""
        return transport_named(self.transport)

    @property
    def launch(self) -> Literal["local", "torchrun", "site"]:
        """Start of this process: as one rank among those of torchrun, as a site that meets others, or by itself."""
        if not self.carrier.joins_launchers:
            return "local"
        return "site" if is_at_rendezvous() else "torchrun" if under_torchrun() else "local"

    @property
    def place(self) -> int:
        """This process's number among those that torchrun has started for this run, or for its site of it."""
        return (torchrun_rank() or 0) if self.carrier.joins_launchers else 0

    @about_option("device")
    def device_of(self, rank: int) -> torch.device:
        """Device of `rank`: the given one, one of `devices` in turn, else cuda, mps or cpu."""
        if self.device is not None:
            kind = parse_device(self.device, "fit: device")
        elif self.devices is None and torch.cuda.is_available():
            kind = torch.device("cuda")
        elif self.devices is None and torch.backends.mps.is_available():
            kind = torch.device("mps")
        else:
            kind = torch.device("cuda" if self.devices is not None else "cpu")
        if kind.type != "cuda" or kind.index is not None:
            return kind
        choice = list(self.devices) if self.devices is not None else list(range(torch.cuda.device_count()))
        if not choice:
            raise MissingDeviceError(
                "fit: device is 'cuda', but there is no CUDA device here; pass device='cpu'"
            )
        chosen = choice[rank % len(choice)]
        return (
            torch.device("cuda", chosen) if isinstance(chosen, int) else parse_device(chosen, "fit: devices")
        )

    def limit(self, steps_per_epoch: int | None) -> int:
        """Number of steps: epochs or steps, whichever end sooner.

        Raises:
            InputError: the length of an epoch is not known before the data are read, and `max_steps` is not given.
        """
        if steps_per_epoch is None or self.num_epochs is None:
            if self.max_steps is None:
                raise InputError(
                    "fit: an iterable training set has no known length; pass max_steps= (num_epochs may end it sooner)"
                )
            return self.max_steps
        steps = self.num_epochs * steps_per_epoch
        return steps if self.max_steps is None else min(steps, self.max_steps)


def _require_checkpoint(folder: Path) -> None:
    """Refuse a folder without a checkpoint, which a run would fill from its first step: the files may lie elsewhere.

    A run's folder, and its folder of checkpoints, may have none yet: the run was killed before the first.
    """
    if is_run_folder(folder) or is_run_folder(folder.absolute().parent.parent) or find_checkpoint(folder):
        return
    inner = [visible(path) for path in sorted(folder.iterdir()) if path.is_dir() and step_folders(path)]
    remedy = f"name {' or '.join(inner[:3])}" if inner else "leave it out to train from the start"
    raise InputError(f"fit: resume_from: {visible(folder)} has no checkpoint: {remedy}")


def _num_nodes(given: int | None, transport: str, topology: Topology | None) -> int:
    # At a rendezvous torchrun has started this site alone.
    joins = transport_named(transport).joins_launchers and not is_at_rendezvous()
    by_torchrun = joins and under_torchrun()
    if joins and not by_torchrun and "RANK" in os.environ:
        warnings.warn(
            f"fit: RANK={os.environ['RANK']} is set, but not by torchrun: this process starts all ranks itself; to "
            "have processes join each other, start them with torchrun",
            UserWarning,
            stacklevel=6,
        )
    started = whole_number_of("WORLD_SIZE") if by_torchrun else None
    if started is not None and given not in (None, started):
        raise InputError(
            f"fit: num_nodes is {given}, but torchrun has started {format_count(started, 'process')}; make them equal"
        )
    if given is not None:
        return given
    if started is not None:
        return started
    if topology is not None:
        return len(topology.rank_hosts)
    raise InputError("fit: num_nodes is missing; pass how many workers there are")


@about_option("device")
def _refuse_missing(device: torch.device) -> None:
    """Raise InputError where this machine has no such device."""
    if device.type == "cuda":
        count = torch.cuda.device_count()
        if (device.index or 0) >= count:
            there = (
                f"there are only {', '.join(f'cuda:{i}' for i in range(count))}" if count else "there is none"
            )
            raise MissingDeviceError(
                f"fit: device '{device}' is not here: {there}; pass device='cpu' or one that is"
            )
    elif device.type == "mps" and not torch.backends.mps.is_available():
        raise MissingDeviceError("fit: device 'mps' is not here; pass device='cpu'")
    elif device.type not in ("cpu", "mps"):
        raise InputError(f"fit: device '{device}' does not train; use 'cpu', 'cuda', 'cuda:1' or 'mps'")


def nearest_divisor(number: int, wanted: int) -> int:
    """The divisor of `number` nearest to `wanted`.

    >>> nearest_divisor(16, 5)
    4
    """
    divisors = [size for size in range(1, number + 1) if number % size == 0]
    return min(divisors, key=lambda size: abs(size - wanted))


def parse_device(given: Any, where: str) -> torch.device:
    """The device of that name; `where` names the argument or key in the error.

    Raises:
        InputError: torch has no such device.
    """
    try:
        return torch.device(given)
    except (RuntimeError, TypeError, ValueError):
        raise InputError(
            f"{where} {shown_value(given)} is no device; use 'cpu', 'cuda', 'cuda:1' or 'mps'"
        ) from None


def by_speed_conflict(
    strategy: Strategy, stages: Stages | None, others: Mapping[str, bool] = {}
) -> str | None:
    """Reason why a run or plan of `strategy` cannot have batches by speed, in words; None if it can.

    Args:
        strategy: of the workers.
        stages: of each worker.
        others: true what else is given that does not go with them.
    """
    name, sites = type(strategy).__name__, strategy.sites
    refused = {
        f"{name}, whose averages are not weighed by samples": not strategy.weighs_by_samples,
        f"{name} with ranks_per_worker or sharding": (sites.ranks_per_worker or 1) > 1
        or sites.sharding != "NO_SHARD",
        "balance (both make all arrive together)": strategy.clients.balance,
        "stages": stages is not None,
        **others,
    }
    return next((what for what, is_given in refused.items() if is_given), None)


def unlike_hosts(topology: Topology, used: Sequence[str]) -> str | None:
    """Line on hosts without workers whose links are others than those of the hosts `used`; None without such hosts."""
    figures = {}
    for host, links in zip(topology.hosts, topology.access_links, strict=True):
        if host.store is None:
            figures[host.name] = links and (links[0].figures, links[1].figures)
    mine = {figures[name] for name in used}
    left = [name for name, kind in figures.items() if kind is not None and kind not in mine]
    if not left or None in mine or len(used) < 2:
        return None
    more = f" or {len(left) - 1} more hosts" if len(left) > 1 else ""
    return (
        f"topology {topology.name}: the workers are on {', '.join(map(visible, dict.fromkeys(used)))}; "
        f"none is on {visible(left[0])}{more} with other links: name the hosts by placement"
    )
