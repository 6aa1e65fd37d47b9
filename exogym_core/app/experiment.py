"""What to run, as one YAML file: read, checked key by key, and resolved into a form that runs again as it is.

    experiment = Experiment.load("examples/digits_wan.yaml", overrides=["steps=20"])
    experiment.strategies[0].label, experiment.settings.workers.count
    print(experiment.to_yaml())          # every default written out, the topology inlined

Nothing here imports torch before a strategy, task or model is built.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from exogym_core.app.overrides import apply_overrides
from exogym_core.app.own_code import OwnCode, find_own_code
from exogym_core.app.settings import Named, Settings, StrategySettings, yaml_text
from exogym_core.names import unique_labels
from exogym_core.results.seal import code_folder_of, is_own
from exogym_core.training.options import OPTIONS, TIMED, file_values
from netsim.files.documents import Document, load_document, validate
from netsim.files.errors import InputError, unknown_name
from netsim.topology.topology import Topology

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import nn

    from exogym_core.cost.compute import Compute
    from exogym_core.strategy import Strategy
    from exogym_core.tasks import Task
    from netsim.files.problems import KeyPath

__all__ = ["Experiment"]

_MOST_SEEDS = 10_000


@dataclass(frozen=True)
class Experiment:
    """A checked experiment. Make one with `load` or `from_document`.

    Attributes:
        settings: every key of the file.
        topology: the network, loaded; None where there is none.
        compute: how long steps take.
        document: what was written where, so that later errors can say so.
        strategies: those to run, each with a label of its own.
        own_code: where the tasks, models and strategies are that are not NetGym's; reading a file runs none of it.
        edited_code: go on from checkpoints although code of one's own was edited since.
    """

    settings: Settings
    topology: Topology | None
    compute: Compute
    document: Document
    strategies: tuple[StrategySettings, ...]
    own_code: tuple[OwnCode, ...] = ()
    edited_code: bool = False

    @classmethod
    def load(
        cls,
        path: str | Path,
        overrides: Sequence[str] = (),
        options: Mapping[str, object] | None = None,
        scale: str | None = None,
        *,
        trust: bool = False,
    ) -> Experiment:
        """Read an experiment file.

        Args:
            path: the YAML file.
            overrides: `key.path=value`, as in `--set`.
            options: top-level keys replaced by flags of their own, such as `--topology`.
            scale: which of the file's `scales` to apply, before the overrides.
            trust: the file is a run's, whose modules are looked for where the run found them, whoever made it.

        Raises:
            InputError: whatever is wrong, one line a mistake with file, line and key.
        """
        path = Path(path)
        document = apply_overrides(load_document(path), overrides, options, scale)
        recorded = code_folder_of(path.parent) if trust or is_own(path.parent) else None
        return cls.from_document(document, path.parent, path.stem, recorded)

    @classmethod
    def from_document(
        cls,
        document: Document,
        folder: Path = Path(),
        default_name: str = "experiment",
        code_folder: Path | None = None,
    ) -> Experiment:
        """Check a document; relative topology files and one's own modules are looked for in `folder` first."""
        settings = validate(Settings, document)
        name = settings.name or default_name
        settings = settings.model_copy(update={"name": name, **_resolved_seeds(settings, document)})
        labels = unique_labels([(entry.name, entry.label) for entry in settings.strategies])
        experiment = cls(
            settings=settings,
            topology=_load_topology(settings, document, folder),
            compute=_parse_compute(settings, document),
            document=document,
            strategies=tuple(
                entry.model_copy(update={"label": label})
                for entry, label in zip(settings.strategies, labels, strict=True)
            ),
        )
        folders = [folder] if code_folder is None else [folder, code_folder]
        experiment = replace(experiment, own_code=experiment._found_code(folders))
        experiment._check_options()
        experiment._check_network()
        experiment._check_machine()
        for entry in experiment.strategies:
            if ":" not in entry.name:
                experiment.build_strategy(entry)
        return experiment

    @property
    def seeds(self) -> list[int]:
        """The seeds with which every strategy is run."""
        seeds = self.settings.seeds
        return seeds if isinstance(seeds, list) else [self.settings.seed]

    def with_seed(self, seed: int) -> Experiment:
        """This with one seed alone: of data order, jitter and, without a `network_seed`, the network's draws.

        The seed of a drift is what the topology says, and this added.
        """
        settings = self.settings.model_copy(update={"seed": seed, "seeds": None})
        shift = seed if settings.network_seed is None else settings.network_seed
        topology = self.topology
        if topology is not None:
            topology = replace(topology, weather=topology.weather.with_seed(shift))
        return replace(self, settings=settings, topology=topology)

    @property
    def shared_hosts(self) -> str | None:
        """A line where more workers than hosts are placed: who computes beside whom, and how fast."""
        if self.topology is None:
            return None
        hosts = self.topology.place(self.settings.workers.count, self.settings.placement)
        most = {host: hosts.count(host) for host in dict.fromkeys(hosts)}
        crowded = [host for host, number in most.items() if number > 1]
        if not crowded:
            return None
        told = f"{len(hosts)} workers are placed on {len(most)} hosts, up to {max(most.values())} on one: "
        alone = [host for host in crowded if self.topology.hosts[host].devices is None]
        if alone:
            name = self.topology.hosts[alone[0]].name
            return f"{told}each computes at full speed (hosts such as {name} do not say how many `devices` they have)"
        return f"{told}those beyond a host's devices share them"

    def only(self, name: str) -> Experiment:
        """This with the one strategy of that name or label.

        Raises:
            UnknownNameError: the experiment has none of that name.
        """
        chosen = [entry for entry in self.strategies if name in (entry.label, entry.name)]
        if not chosen:
            labels = [str(entry.label) for entry in self.strategies]
            raise self.document.error(("strategies",), unknown_name("strategy", name, labels))
        return replace(self, strategies=tuple(chosen[:1]))

    def build_task(self) -> Task:
        """The task, its data loaded."""
        from exogym_core.tasks import build_task
        from exogym_core.tasks.task import MissingDataError

        task = self.settings.task
        try:
            return build_task(self._maker(task.name, "task"), **task.options)
        except MissingDataError as error:
            raise MissingDataError(str(self.document.error(("task", "paths"), error))) from error
        except InputError as error:
            raise self.document.error(_blamed(("task",), task, error), error) from error

    def build_model(self, task: Task) -> nn.Module:
        """The model with its initial parameters, drawn from the seed."""
        from exogym_core.tasks import build_model

        model = self.settings.model
        name, options = (model.name, model.options) if model else (None, {})
        try:
            if name is not None and ":" in name:
                name = self._maker(name, "model")
            return build_model(name, task, seed=self.settings.seed, **options)
        except InputError as error:
            path = _blamed(("model",), model, error) if model else ("task",)
            raise self.document.error(path, error) from error

    def build_strategy(self, entry: StrategySettings) -> Strategy:
        """A fresh strategy object."""
        from exogym_core.strategy import build_strategy

        try:
            if ":" in entry.name:
                return self._maker(entry.name, "strategy")(**entry.options)  # type: ignore[no-any-return]
            return build_strategy(entry.name, **entry.options)
        except (InputError, TypeError) as error:
            told = error if isinstance(error, InputError) else InputError(f"{entry.name}: {error}")
            position = [other.label for other in self.strategies].index(entry.label)
            raise self.document.error(_blamed(("strategies", position), entry, told), told) from error

    def _maker(self, name: str, what: str) -> Any:
        """The name of a task or model of ours, or one's own code, which is imported here."""
        if ":" not in name:
            return name
        return next(code for code in self.own_code if (code.reference, code.what) == (name, what)).load()

    def _found_code(self, folders: Sequence[Path]) -> tuple[OwnCode, ...]:
        """Where one's own code is; each reference once, in the order of the file."""
        settings = self.settings
        named: list[tuple[str, KeyPath, str]] = [("task", ("task",), settings.task.name)]
        if settings.model is not None:
            named.append(("model", ("model",), settings.model.name))
        named += [
            ("strategy", ("strategies", place), entry.name) for place, entry in enumerate(self.strategies)
        ]
        found = {
            (what, name): _at(self.document, path, find_own_code, name, what, folders)
            for what, path, name in reversed(named)
            if ":" in name
        }
        return tuple(reversed(found.values()))

    def fit_arguments(self) -> dict[str, Any]:
        """What the file says, as keywords of `fit`; strategy, data and listeners are the caller's.

        Without `val_size` where all validation samples are asked for: only the task knows how many there are.
        """
        given = file_values(self.settings)
        if given["val_size"] is None:
            del given["val_size"]
        if isinstance(given["device"], list):
            given["devices"] = given.pop("device")
        given["workers"] = self.settings.workers.model_dump(exclude={"count"})
        given["topology"] = self.topology
        given["edited_code"] = self.edited_code
        given["compute"] = self.compute if self.topology is not None else None
        return given

    def with_minibatch(self, minibatch_size: int) -> Experiment:
        """This with another micro-batch, such as one that was found out."""
        return replace(self, settings=self.settings.model_copy(update={"minibatch_size": minibatch_size}))

    def with_compute(self, compute: Compute) -> Experiment:
        """This with another compute time, such as a measured one."""
        return replace(self, compute=compute)

    def to_mapping(self) -> dict[str, Any]:
        """The resolved form: every key in its order, defaults written out, the topology inlined."""
        settings = self.settings
        plain = settings.model_dump(mode="python", exclude={"scales", "sweep"})
        plain["task"] = settings.task.to_mapping()
        plain["model"] = settings.model.to_mapping() if settings.model else None
        plain["topology"] = self.topology.to_mapping() if self.topology else None
        plain["compute"] = self.compute.to_mapping()
        plain["strategies"] = [entry.to_mapping() for entry in self.strategies]
        return plain

    def to_yaml(self) -> str:
        """The resolved form as a YAML file that loads to an equal experiment."""
        return yaml_text(self.to_mapping())

    def _check_options(self) -> None:
        """What `fit` would refuse later, each by itself."""
        for name, value in file_values(self.settings).items():
            told = OPTIONS[name]
            if value is not None and told.check is not None and told.key is not None:
                path = tuple(told.key.split("."))
                try:
                    told.check(name, value)
                except InputError as error:
                    text = str(error).replace(f"fit: {name} is ", "got ", 1).removeprefix("fit: ")
                    raise self.document.error(path, text) from error
                if name == "until" and isinstance(value, float):
                    told_how = f"{value:g} has no unit: write '{value:g} s' or '{value:g} h'"
                    raise self.document.error(path, told_how)
                if self.topology is None and name in TIMED:
                    raise self.document.error(path, "needs virtual time, and there is no topology: add one")

    def _check_network(self) -> None:
        """What only the topology can tell: placement, and a protocol that exists."""
        from exogym_core.cost.compute import NO_DEVICE
        from exogym_core.cost.devices import find_device
        from netsim import parse_collectives
        from netsim.topology.protocol import Protocol

        settings = self.settings
        if settings.protocol is not None:
            _at(self.document, ("protocol",), Protocol.parse, settings.protocol)
        _at(self.document, ("collectives",), parse_collectives, settings.collectives)
        if self.topology is None:
            if settings.placement is not None:
                raise self.document.error(("placement",), "there is no topology to place ranks on: add one")
            return
        hosts = _at(
            self.document, ("placement",), self.topology.place, settings.workers.count, settings.placement
        )
        if self.compute.kind == "flops" and self.compute.device is None:
            for host in (self.topology.hosts[number] for number in dict.fromkeys(hosts)):
                if host.device is None:
                    raise self.document.error(("compute",), f"host {host.name} {NO_DEVICE}")
                _at(self.document, ("topology",), find_device, host.device, f"host {host.name}: ")

    def _check_machine(self) -> None:
        """What this machine is asked for, before data are read: devices, and micro-batches that fit."""
        from exogym_core.training.request import nearest_divisor, parse_device

        settings = self.settings
        several = isinstance(settings.device, list)
        for position, name in enumerate(settings.device if several else [settings.device]):
            if name != "auto" or several:
                path = ("device", position) if several else ("device",)
                _at(self.document, path, parse_device, name, "device")
        size, batch_size = settings.minibatch_size, settings.batch_size
        if isinstance(size, int) and batch_size % size:
            fitting = nearest_divisor(batch_size, size)
            told = f"{size} does not divide batch_size {batch_size}: write {fitting}"
            raise self.document.error(("minibatch_size",), told)


def _blamed(path: KeyPath, named: Named, error: InputError) -> KeyPath:
    """`path`, and the option in it that the error is about, if its text names one."""
    text = str(error)
    places = {key: max(text.find(f"'{key}'"), text.find(f"{key}=")) for key in named.options}
    found = [key for key, place in places.items() if place >= 0]
    return (*path, min(found, key=lambda key: places[key])) if found else path


def _at(document: Document, path: KeyPath, call: Any, *arguments: Any) -> Any:
    """`call(*arguments)`, its InputError told with the place in the document."""
    try:
        return call(*arguments)
    except InputError as error:
        # What is called may tell the key itself, for callers without a document.
        told = str(error).removeprefix(f"{'.'.join(map(str, path))}: ")
        raise document.error(path, type(error)(told)) from error


def _resolved_seeds(settings: Settings, document: Document) -> dict[str, Any]:
    """`seed` and `seeds` as they are stored: a list of two and more, or none."""
    given, first = settings.seeds, settings.seed
    if given is None:
        return {}
    if (given if isinstance(given, int) else len(given)) > _MOST_SEEDS:
        raise document.error(("seeds",), f"expected at most {_MOST_SEEDS:,} seeds")
    seeds = given if isinstance(given, list) else [first + number for number in range(given)]
    if len(set(seeds)) < len(seeds):
        twice = next(seed for seed in seeds if seeds.count(seed) > 1)
        raise document.error(("seeds",), f"{twice} is there twice: give each seed once")
    if "seed" in settings.model_fields_set and first not in seeds:
        raise document.error(("seed",), f"{first} is none of seeds: leave seed out")
    return {"seed": seeds[0], "seeds": seeds if len(seeds) > 1 else None}


def _load_topology(settings: Settings, document: Document, folder: Path) -> Topology | None:
    given = settings.topology
    if given is None:
        return None
    if isinstance(given, str):
        beside = folder / given
        return _at(document, ("topology",), Topology.load, beside if os.path.isfile(beside) else given)  # type: ignore[no-any-return]
    return Topology.from_document(document.part(("topology",)))


def _parse_compute(settings: Settings, document: Document) -> Compute:
    from exogym_core.cost.compute import Compute

    return _at(document, ("compute",), Compute.parse, settings.compute)  # type: ignore[no-any-return]
