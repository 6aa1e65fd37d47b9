"""Experiment, as one YAML file: read, checked key by key, and resolved into a form that runs again as it is.

    experiment = Experiment.load("examples/digits_wan.yaml", overrides=["steps=20"])
    experiment.strategies[0].label, experiment.settings.workers.count
    print(experiment.to_yaml())          # every default written out, the topology inlined

`--set a.b=c` replaces single keys of a document, as strictly read as the file itself; `--scale tiny` replaces the keys
that the document lists under `scales: {tiny: ...}`. torch is imported only when a strategy, task or model is built.
"""

from __future__ import annotations

import copy
import json
import os
import re
import warnings
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from exogym_core.config import (
    OPTIONS,
    Settings,
    StrategySettings,
    checked_config,
    file_values,
    resolved_protocol,
    yaml_text,
)
from exogym_core.meeting_place import LauncherError, is_at_rendezvous, under_torchrun
from exogym_core.names import PROGRAM_TASK, unique_labels, visible
from exogym_core.results.reading import value_text
from exogym_core.results.run_folder import code_folder_of, is_own
from exogym_core.stages.options import Stages, hosts_of
from netgym.experiment.own_code import OwnCode, find_own_code
from netsim import Protocol, Topology
from netsim.collectives.choice import parse_collectives
from netsim.errors import InputError, UnknownNameError, about_option, unknown_name
from netsim.files.documents import ConfigError, Document, load_document, parse_document
from netsim.files.schemas import validate_document
from netsim.units import format_count

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Iterator, Sequence

    from torch import nn

    from exogym_core.cost.compute import Compute
    from exogym_core.strategy import Strategy
    from netgym.tasks import Task
    from netsim.files.documents import KeyPath

__all__ = [
    "Experiment",
    "apply_overrides",
    "apply_values",
    "differing_key",
    "differing_training",
    "more_seeds",
    "opened_topology",
    "program_remedy",
    "refuse_replaced",
    "retimable",
    "training_of",
    "trainings_of",
]


_MOST_SEEDS = 10_000
_MOST_LINKS = 8  # named in an error

# Keys that change times and bytes, and no loss where no rank learns the time; and what is made of the results.
_TIMED = (
    *(each.key for each in OPTIONS.values() if each.is_of_network and each.key is not None),
    *("name", "network_seed", "target_loss", "loggers", "checkpoint"),
)

# Those of them that change no result.
_WITHOUT_RESULTS = ("name", "loggers", "checkpoint")

# Settings that mean nothing without a network.
_OF_NETWORK = ("compute", "placement", "protocol", "collectives")


@dataclass(frozen=True)
class Experiment:
    """A checked experiment. Make one with `load` or `from_document`.

    Attributes:
        settings: every key of the file.
        topology: the network, loaded; None where there is none.
        document: keys and their lines, for later errors.
        strategies: strategies to run, each with a label of its own.
        own_code: places of tasks, models and strategies that are not NetGym's; reading a file runs none of it.
        edited_code: resume from checkpoints although the user's code was edited since.
    """

    settings: Settings
    topology: Topology | None
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
            trust: search the modules of a run's file where the run found them, even if another user made it.

        Raises:
            InputError: mistakes, one line each with file, line and key.
        """
        path = Path(path)
        document = apply_overrides(load_document(path), overrides, options, scale, path.parent)
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
        """Check a document; relative topology files and the user's modules are searched in `folder` first."""
        if (remedy := program_remedy(document, folder)) is not None:
            raise document.error(
                ("task",),
                f"is of a Python program: continue there with {remedy}, on another network with fit(topology=...)",
            )
        settings = validate_document(Settings, document)
        name = settings.name or default_name
        topology = opened_topology(document, settings.topology, folder)
        resolved = {"name": name, "protocol": resolved_protocol(settings.protocol, topology)}
        if topology is not None:  # stored with the keys of its file, so that --set finds them there
            written = settings.topology
            if isinstance(written, str):
                written = Topology.document_of(_place(written, folder)).data
            resolved["topology"] = topology.without_files(written)
        settings = settings.model_copy(update={**resolved, **_resolved_seeds(settings, document)})
        labels = unique_labels([(entry.name, entry.label) for entry in settings.strategies])
        experiment = cls(
            settings=settings,
            topology=topology,
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
        built = [experiment.build_strategy(each) for each in experiment.strategies if not each.own_code]
        is_served = len(built) < len(labels) or any(each.num_servers for each in built)
        if settings.servers is not None and not is_served:
            raise document.error(("servers",), "no strategy of this experiment has servers: leave it out")
        if topology is not None and (placement := settings.placement) is not None and not is_served:
            _at(document, ("placement",), topology.place, experiment._num_training, placement)
        return experiment

    def require_trusted(self, folder: Path) -> None:
        """Refuse to run the code that the experiment of the run in `folder` names, unless this user made it.

        Raises:
            InputError: it names code, and another user made the run, or its experiment was changed.
        """
        if self.own_code and not is_own(folder):
            raise InputError(
                f"{visible(folder)}: another user made this run, and it names code, which would run with your "
                f"permissions: {visible(self.own_code[0])}; read it, then add --trust"
            )

    @property
    def seeds(self) -> list[int]:
        """The seeds with which every strategy is run."""
        seeds = self.settings.seeds
        return seeds if isinstance(seeds, list) else [self.settings.seed]

    def with_seed(self, seed: int) -> Experiment:
        """Copy with a single seed, of data order, jitter and, without a `network_seed`, the network's draws.

        The seed of a drift is that of the topology plus this one.
        """
        settings = self.settings.model_copy(update={"seed": seed, "seeds": None})
        shift = seed if settings.network_seed is None else settings.network_seed
        topology = self.topology
        if topology is not None:
            topology = replace(topology, weather=topology.weather.with_seed(shift))
        return replace(self, settings=settings, topology=topology)

    @property
    def compute(self) -> Compute:
        """Virtual time of steps."""
        return self.settings.compute  # type: ignore[no-any-return]

    @property
    def code_folder(self) -> Path | None:
        """Folder of the modules that it names; None where it names none in its folder."""
        return next((code.folder for code in self.own_code if code.folder), None)

    @property
    def shared_hosts(self) -> str | None:
        """Line about hosts with several workers, and their speeds; None where each worker has its host."""
        if self.topology is None:
            return None
        hosts = self._hosts(self.topology)
        counts = Counter(hosts)
        most = max(counts.values())
        if most < 2:
            return None
        ranks = "workers" if self.settings.stages is None else "ranks of workers"
        placed = (
            f"{len(hosts)} {ranks} are placed on {format_count(len(counts), 'host')}, up to {most} on one"
        )
        for host, number in counts.items():
            if number > 1 and self.topology.hosts[host].devices is None:
                unknown = (
                    f"hosts such as {self.topology.hosts[host].name} do not say how many `devices` they have"
                )
                return f"{placed}: each computes at full speed ({unknown})"
        return f"{placed}: those beyond a host's devices share them"

    @property
    def _num_training(self) -> int:
        stages = Stages.parse(self.settings.stages)
        return int(self.settings.workers.count) * (1 if stages is None else stages.count)

    def _hosts(self, topology: Topology) -> Sequence[int]:
        """Host of each rank that trains."""
        settings, stages = self.settings, Stages.parse(self.settings.stages)
        return hosts_of(topology, settings.workers.count, stages, settings.placement, names_servers=True)

    def only(self, *names: str) -> Experiment:
        """Copy with the strategies of these names or labels, in this order.

        Raises:
            UnknownNameError: the experiment has none of a name.
        """
        chosen = {}
        for name in names:
            entry = next((each for each in self.strategies if name in (each.label, each.name)), None)
            if entry is None:
                labels = [str(each.label) for each in self.strategies]
                raise self.document.error(("strategies",), unknown_name("strategy", name, labels))
            chosen[entry.label] = entry
        return replace(self, strategies=tuple(chosen.values()))

    def build_task(self) -> Task:
        """The task, its data loaded."""
        from exogym_core.data.partition import Partition
        from netgym.tasks import build_task
        from netgym.tasks.task import MissingDataError

        task = self.settings.task
        try:
            made = build_task(self._maker(task.name, "task"), **task.options)
            if isinstance(made.train, Partition):
                with about_option("partition"):  # refused here, with the key
                    made.train.shares(self.settings.workers.count)
            return made
        except MissingDataError as error:
            key = "dataset" if "dataset" in task.options else "paths"
            raise MissingDataError(str(self.document.error(("task", key), error))) from error
        except InputError as error:
            place = _place_of(error, ("task",), task.options)
            raise self.document.error(place, error) from error

    def build_model(self, task: Task) -> nn.Module:
        """The model with its initial parameters, drawn from the seed."""
        from netgym.tasks import build_model

        model = self.settings.model
        name, options = (model.name, model.options) if model else (None, {})
        try:
            if name is not None and ":" in name:
                name = self._maker(name, "model")
            return build_model(name, task, seed=self.settings.seed, **options)
        except InputError as error:
            raise self.blame_model(error) from error

    def blame_model(self, error: InputError) -> InputError:
        """`error` with the place of the model's option that it is about."""
        model = self.settings.model
        if model is None:
            return self.document.error(("task",), error)
        return self._of_options(("model",), model.options, error)

    def _of_options(self, path: KeyPath, options: Mapping[str, Any], error: InputError) -> InputError:
        """Lines of an `error`, each at the option that it is about; says where a name was replaced alone."""
        return self.document.errors([self._of_option(path, options, each) for each in error.parts])

    def _of_option(self, path: KeyPath, options: Mapping[str, Any], error: InputError) -> ConfigError:
        place, line, is_unknown = (
            _place_of(error, path, options),
            str(error),
            isinstance(error, UnknownNameError),
        )
        origin = self.document.lines.get((*path, "name"))
        if is_unknown and place != path and isinstance(origin, str):
            whole = ".".join(map(str, path))
            line += f"; {visible(origin)} replaces the name alone: remove these options, or replace {whole} as a whole"
        return ConfigError(place, line, is_unknown)

    def build_strategy(self, entry: StrategySettings) -> Strategy:
        """A fresh strategy object."""
        from exogym_core.strategy import build_strategy

        try:
            if ":" in entry.name:
                strategy: Strategy = self._maker(entry.name, "strategy")(**entry.options)
            else:
                options = entry.options
                if entry.own_code:  # in its modules
                    options["modules"] = [self._own_module(each) for each in options["modules"]]
                strategy = build_strategy(entry.name, **options)
        except (InputError, TypeError) as error:
            message = error if isinstance(error, InputError) else InputError(f"{entry.name}: {error}")
            raise self._blame(entry, message) from error
        if self.settings.servers is not None and strategy.num_servers:
            _at(self.document, ("servers",), strategy.take_servers, self.settings.servers)
        return strategy

    def _own_module(self, given: Any) -> Any:
        """A module of a Chain, where it is the user's; else what is given."""
        if not isinstance(given, dict) or ":" not in str(given.get("name")):
            return given
        options = {key: value for key, value in given.items() if key != "name"}
        return self._maker(given["name"], "strategy")(**options)

    def _maker(self, name: str, what: str) -> Any:
        """The name of a shipped task or model, or the user's callable, which is imported here."""
        if ":" not in name:
            return name
        return next(code for code in self.own_code if (code.reference, code.what) == (name, what)).load()

    def _found_code(self, folders: Sequence[Path]) -> tuple[OwnCode, ...]:
        """Places of the user's own code; each reference once, in the order of the file."""
        settings = self.settings
        named: list[tuple[str, KeyPath, str]] = [("task", ("task",), settings.task.name)]
        if settings.model is not None:
            named.append(("model", ("model",), settings.model.name))
        named += [
            ("strategy", ("strategies", place), name)
            for place, entry in enumerate(self.strategies)
            for name in entry.own_code
        ]
        found = {
            (what, name): _at(self.document, path, find_own_code, name, what, folders)
            for what, path, name in reversed(named)
            if ":" in name
        }
        return tuple(reversed(found.values()))

    def fit_arguments(self, entry: StrategySettings) -> dict[str, Any]:
        """Keywords of `fit` from the file, for one of its strategies; data and listeners are the caller's.

        Without `val_size` where all validation samples are asked for: only the task knows how many there are.
        """
        given = file_values(self.settings)
        given["strategy"] = strategy = self.build_strategy(entry)
        if not strategy.num_servers:
            del given["servers"]
            if given["placement"] is not None:  # which may go on with hosts of others' servers
                given["placement"] = given["placement"][: self._num_training]
        if given["val_size"] is None:
            del given["val_size"]
        if isinstance(given["device"], list):
            given["devices"] = given.pop("device")
        given["topology"] = self.topology
        given["edited_code"] = self.edited_code
        given["compute"] = self.compute
        if self.topology is None:
            for name in _OF_NETWORK:
                del given[name]
        return given

    def with_settings(self, **settings: object) -> Experiment:
        """Copy with other settings, such as a measured compute time, or the largest micro-batch that fits."""
        return replace(self, settings=self.settings.model_copy(update=settings))

    def to_mapping(self) -> dict[str, Any]:
        """The resolved form: every key in its order, defaults written out, the topology inlined."""
        settings = self.settings
        plain = settings.model_dump(mode="python", exclude={"scales", "sweep", "tune"})
        plain["task"] = settings.task.to_mapping()
        plain["model"] = settings.model.to_mapping() if settings.model else None
        plain["strategies"] = [entry.to_mapping() for entry in self.strategies]
        return plain

    def to_yaml(self) -> str:
        """The resolved form as a YAML file that loads to an equal experiment."""
        return yaml_text(self.to_mapping())

    def check_runs(self, *, elsewhere: bool = False, trained: Container[str] = ()) -> str | None:
        """Refuse what `fit` refuses before its first step, and shipped strategies that a rehearsal cannot set up.

        Args:
            elsewhere: other machines, with other devices, may run it; none of the user's code is run here.
            trained: labels of strategies with which the same training has been done, which are not rehearsed.

        Returns:
            Line on a device that is not here.

        Raises:
            InputError: failures have no end; the transport has no virtual time, and the file a topology, a placement
                or a protocol (launchers drop these three on purpose); a codec or an optimizer with a speed does not
                exist, or one in use has none; an optimizer, a schedule or sites do not fit the workers and steps; or
                `fit` does not take the values together.
        """
        from torch import cuda
        from torch.backends import mps

        from exogym_core.cost.compute import MissingSpeedError
        from exogym_core.run.request import FitRequest, MissingDeviceError
        from exogym_core.workers.run import transport_named
        from netgym.experiment.rehearsal import rehearse

        settings = self.settings
        if settings.failures is not None and settings.until is None:
            raise self.document.error(
                ("failures",), "needs until, the virtual time until which hosts may fail"
            )
        # Real ranks take what simulated ones refuse.
        if settings.transport == "netsim" and not is_at_rendezvous():
            on_cpu = settings.device == "cpu" or (
                settings.device == "auto" and not cuda.is_available() and not mps.is_available()
            )
            self._check_speeds()
            updates = self.compute.updates if self.topology is not None else None
            for entry in self.strategies:
                is_known = entry.label in trained and (updates is None or not updates.speeds)
                if not (entry.own_code or is_known):
                    strategy = self.build_strategy(entry)
                    try:
                        rehearse(strategy, settings.workers.count, settings.steps, updates, on_cpu=on_cpu)
                    except InputError as error:
                        error.args = (str(error).partition("\n")[0],)
                        is_of_compute = isinstance(error, MissingSpeedError)
                        raise (self.placed(error) if is_of_compute else self._blame(entry, error)) from error
        if under_torchrun() or is_at_rendezvous():
            return None
        unused = [key for key in ("topology", "placement", "protocol") if getattr(settings, key) is not None]
        if unused and not transport_named(settings.transport).has_clock:
            keys = " and ".join(unused)
            message = f"'{settings.transport}' has no virtual time, so {keys} would go unused"
            remedy = f"write transport: netsim, or leave {keys} out"
            raise self.document.error(("transport",), f"{message}: {remedy}")
        for entry in self.strategies:
            if elsewhere and entry.own_code:
                continue
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # the run gives them again
                    FitRequest.check(checked_config(**self.fit_arguments(entry)))
            except MissingDeviceError as error:
                if elsewhere:
                    return str(error).removeprefix("fit: ").partition(";")[0]
                raise self.placed(error) from error
            except InputError as error:
                raise self.placed(error) from error
        return None

    def placed(self, error: InputError) -> InputError:
        """Error of `fit`, with the place of the key that causes it."""
        named = [*map(str, error.inside), *error.about]
        if isinstance(error, LauncherError) or (is_at_rendezvous() and not named):
            return error  # no key of the file causes it
        key = OPTIONS[named[0]].key if named and named[0] in OPTIONS else "".join(named[:1])
        if key:
            text = str(error).removeprefix("fit: ").removeprefix(f"{key}: ")
            return self.document.error(tuple(key.split(".")), text)
        found = type(error)(f"{self.document.where}: {error}")
        found.document = self.document.where
        return found

    def _check_speeds(self) -> None:
        """Refuse speeds of codecs and optimizers that do not exist, unless the user's code may have them."""
        from exogym_core.stages.boundaries import BOUNDARY_CODECS
        from exogym_core.strategy.trials import CODEC_NAMES, OPTIMIZER_NAMES

        if any(entry.own_code for entry in self.strategies):
            return
        for key, what, speeds, known in (
            ("coding", "codec", self.compute.coding, {*CODEC_NAMES, *BOUNDARY_CODECS}),
            ("updates", "optimizer", self.compute.updates, OPTIMIZER_NAMES),
        ):
            for name in speeds.speeds:
                if name not in (speeds.for_all, *known):
                    raise self.document.error(("compute", key, name), unknown_name(what, name, known))

    def _blame(self, entry: StrategySettings, error: InputError) -> InputError:
        """`error`, each line of it with the place of the strategy's option that it is about."""
        path = "strategies", [other.label for other in self.strategies].index(entry.label)
        return self._of_options(path, entry.options, error)

    def _check_options(self) -> None:
        """Check each option as `fit` does, devices and the micro-batch, before data are read."""
        from exogym_core.run.request import nearest_divisor, parse_device
        from exogym_core.successors import refuse_unknown_options
        from netgym.tasks import MODELS

        for name, value in file_values(self.settings).items():
            key = OPTIONS[name].key
            if value is None or key is None:
                continue
            path = tuple(key.split("."))
            try:
                checked_config(**{name: value})
            except InputError as error:
                text = str(error).replace(f"fit: {name} is ", "got ", 1)
                text = text.removeprefix("fit: ").removeprefix(f"{key}: ")
                raise self.document.error(path, text) from error
            if name == "until" and isinstance(value, float):
                needs_unit = f"{value:g} has no unit: write '{value:g} s' or '{value:g} h'"
                raise self.document.error(path, needs_unit)
        device, size, batch_size = (
            getattr(self.settings, key) for key in ("device", "minibatch_size", "batch_size")
        )
        model = self.settings.model
        if model is not None and model.name in MODELS:
            try:
                refuse_unknown_options(f"option of model {model.name}", MODELS[model.name], model.options)
            except InputError as error:
                raise self.blame_model(error) from error
        for position, each in enumerate(device if isinstance(device, list) else ()):
            _at(self.document, ("device", position), parse_device, each, "device")
        if isinstance(device, str) and device != "auto":
            _at(self.document, ("device",), parse_device, device, "device")
        if self.settings.target_loss is not None and self.settings.evaluate.samples == 0:
            problem = "is judged in evaluations, and evaluate.samples: 0 makes none: leave one of them out"
            raise self.document.error(("target_loss",), problem)
        if isinstance(size, int) and batch_size % size:
            message = (
                f"{size} does not divide batch_size {batch_size}: write {nearest_divisor(batch_size, size)}"
            )
            raise self.document.error(("minibatch_size",), message)

    def _check_network(self) -> None:
        """Check placement, protocol and devices against the topology."""
        from exogym_core.cost.compute import NO_DEVICE, Compute
        from exogym_core.cost.devices import find_device

        settings = self.settings
        if settings.protocol is not None:
            _at(self.document, ("protocol",), Protocol.parse, settings.protocol)
        if self.topology is None:
            data = self.document.data
            is_off = isinstance(data, dict) and "topology" in data  # `topology: null` asks for no network
            timed = {
                OPTIONS[name].key: value
                for name, value in file_values(settings).items()
                if OPTIONS[name].is_timed
            }
            defaults = (None, "auto", Compute())
            for key, value in (
                timed | {"compute": self.compute, "network_seed": settings.network_seed}
            ).items():
                if value not in defaults and not (is_off and key in (*_OF_NETWORK, "network_seed")):
                    message = "needs virtual time, and there is no topology: add one"
                    raise self.document.error(tuple(str(key).split(".")), message)
            return
        hosts = _at(self.document, ("placement",), self._hosts, self.topology)
        if self.compute.flops is not None and self.compute.device is None:
            for host in (self.topology.hosts[number] for number in dict.fromkeys(hosts)):
                if host.device is None:
                    raise self.document.error(("compute",), f"host {host.name} {NO_DEVICE}")
                _at(self.document, ("topology",), find_device, host.device, f"host {host.name}: ")


def _place_of(error: InputError, path: KeyPath, options: Mapping[str, Any]) -> KeyPath:
    """`path`, continued to the first of `options` under it, however deep, that an error is about and that was given."""
    inner, given = path, options
    for name in error.inside:
        if (key := _key_of(given, name)) is not None:
            inner, given = (*inner, key), given[key]  # type: ignore[index]
    for place, held in ((inner, given), (path, options)):
        for name in error.about:
            if (key := _key_of(held, name)) is not None:
                return (*place, key)
    return inner


def _key_of(given: object, name: str | int) -> str | int | None:
    """Key under which an option is `given`, by any of its names, or its position; None: it was not."""
    from exogym_core.strategy.options import SYNONYMS

    if isinstance(given, list):
        return name if isinstance(name, int) and name < len(given) else None
    names = next((group for group in SYNONYMS if name in group), (name,))
    return next((each for each in names if isinstance(given, Mapping) and each in given), None)


def _at(document: Document, path: KeyPath, call: Any, *arguments: Any) -> Any:
    """Call `call(*arguments)`, whose InputError then names the place in the document."""
    try:
        return call(*arguments)
    except InputError as error:
        # The message may begin with the key, for callers without a document.
        message = str(error).removeprefix(f"{'.'.join(map(str, path))}: ")
        for key in error.about[:1]:
            if (*path, key) in document.lines:
                path, message = (*path, key), message.removeprefix(f"{key}: ")
        raise document.error(path, type(error)(message)) from error


def _resolved_seeds(settings: Settings, document: Document) -> dict[str, Any]:
    """`seed` and `seeds` of the resolved form: a list of at least two, or none."""
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
        raise document.error(("seed",), f"{first} is not among seeds: leave seed out")
    return {"seed": seeds[0], "seeds": seeds if len(seeds) > 1 else None}


def more_seeds(has: Sequence[int], asked: object, where: Path) -> list[int]:
    """Seeds of a run or a sweep that gets more: a list, or a number of them, counted from the first that it has.

    Raises:
        InputError: one that it has is not among them.
    """
    seeds = list(range(has[0], has[0] + asked)) if isinstance(asked, int) else asked
    if isinstance(seeds, list) and all(seed in seeds for seed in has):
        return seeds
    raise InputError(
        f"--seeds: {visible(where)} has {format_count(len(has), 'seed')} ({', '.join(map(str, has))}), and seeds can "
        "only be added: give these and others, or begin in a new folder"
    )


def program_remedy(document: Document, folder: Path) -> str | None:
    """Call that resumes the run of a `folder` that `fit(out=...)` wrote; None for other experiments."""
    task = document.data.get("task") if isinstance(document.data, dict) else None
    name = task.get("name") if isinstance(task, dict) else None
    if not isinstance(name, str) or not name.startswith(PROGRAM_TASK):
        return None
    return f"fit(resume_from={visible(folder)!r})"


def _expanded(key: str | int, plain: str) -> dict[str, Any]:
    """Mapping for which a plain text stands under a key of experiments."""
    if key == "compute":
        return {plain: {}} if plain in ("flops", "measured") else {"fixed": plain}
    if key == "collectives":
        return dict(parse_collectives(plain))
    return {"preset" if key == "protocol" else "name": plain}


def training_of(experiment: Experiment) -> dict[str, Any]:
    """The resolved form of an experiment without what changes times and bytes alone: equal for equal losses."""
    plain = experiment.to_mapping()
    for key in _TIMED:
        del plain[key]
    workers = plain["workers"]
    plain["workers"] = {key: workers[key] for key in ("count", "intra_op_threads")}
    plain["workers"]["stacked"] = workers["kind"] == "stacked"  # one batched model: the last bits are others
    return plain


def retimable(experiment: Experiment) -> dict[str, str]:
    """Key of each strategy's training by label, equal for equal losses; without those that are known to need the time.

    A strategy may need it all the same: its recording says so.
    """
    return {label: key for label, (key, reason) in trainings_of(experiment).items() if reason is None}


def trainings_of(experiment: Experiment) -> dict[str, tuple[str, str | None]]:
    """Key of each strategy's training by label, and why it is trained again on each network; None: it is retimed."""
    settings = experiment.settings
    if experiment.topology is None or settings.transport != "netsim":
        return {}
    common = training_of(experiment)
    del common["strategies"]
    if experiment.compute.is_measured:  # seconds are measured where it is trained
        common["compute"] = experiment.compute.model_dump()

    def reason(entry: StrategySettings) -> str | None:
        if settings.until:
            return "until ends it by the clock"
        if settings.evaluate.every_seconds:
            return "evaluate.every_seconds goes by the clock"
        if entry.own_code:
            return None
        strategy = experiment.build_strategy(entry)
        if not strategy.is_synchronous:
            return f"{'its server takes' if strategy.num_servers else 'its ranks take'} what comes first"
        if strategy.patience.patience(entry.name) is not None:
            return "time-outs or absences leave ranks out"
        if settings.batch_by_speed or strategy.clients.balance:
            return "shares of the work go by the speeds of hosts"
        return None

    return {
        str(entry.label): (
            json.dumps([common, entry.name, entry.options], sort_keys=True, default=repr),
            reason(entry),
        )
        for entry in experiment.strategies
    }


def differing_training(one: Experiment, other: Experiment) -> str | None:
    """First key in which two experiments train differently; None: they differ in times and bytes alone."""
    first, second = training_of(one), training_of(other)
    return next((key for key, value in first.items() if value != second[key]), None)


def differing_key(stored: Experiment, asked: Experiment) -> str | None:
    """First key in which the experiment of a stored run gives other results than one that is asked for; None: none.

    Values that the run has measured are those that were asked for.
    """
    if asked.compute.may_become(stored.compute):
        asked = asked.with_settings(compute=stored.compute)
    if asked.settings.minibatch_size == "auto":
        asked = asked.with_settings(minibatch_size=stored.settings.minibatch_size)
    forms = []
    for each in (stored, asked):
        plain = each.to_mapping()
        if each.topology is not None:  # whose name changes no result
            plain["topology"] = {**each.topology.to_mapping(), "name": ""}
        forms.append(training_of(each) | {key: plain[key] for key in _TIMED if key not in _WITHOUT_RESULTS})
    first, second = forms
    return next((key for key, value in first.items() if value != second[key]), None)


def opened_topology(document: Document, given: object, folder: Path) -> Topology | None:
    """Topology under its key of an experiment's document.

    Args:
        document: of the experiment.
        given: name, path of a file, searched in `folder` first, or anything else but None for the content there.
        folder: of the experiment.

    Raises:
        InputError: it does not exist, or has mistakes.
    """
    if isinstance(given, str):
        found: Topology = _at(document, ("topology",), Topology.load, _place(given, folder))
        return found
    return None if given is None else Topology.from_document(document.part(("topology",)))


def apply_overrides(
    document: Document,
    overrides: Sequence[str],
    options: Mapping[str, object] | None = None,
    scale: str | None = None,
    folder: Path = Path(),
    *,
    swept: Sequence[str] = (),
) -> Document:
    """Replace keys of a document by `key.path=value` texts, and top-level keys by `options` of that name.

    Keys that the document's `scales` list for `scale` are replaced first. `swept` are such texts of `--sweep`.

    A path leads through mappings by key and through lists by position or by an entry's name
    (`strategies.DiLoCo.H=20`); `*` is every key or entry there is (`strategies.*.lr=0.01`). Missing
    mappings are made; a plain text inside the path becomes the mapping for which it stands, such as `{name: ...}`, and
    a topology's name the content of its file, which is searched in `folder` first (`topology.regions.us.hosts=8`).

    Raises:
        InputError: an override cannot be read or placed; the line begins with the flag.
    """
    given = options or {}
    # A flag of its own replaces a whole key, and --set what is inside: `--protocol gloo --set protocol.streams=8`.
    changes: list[_Change] = []
    for name, replacement in given.items():
        text = ",".join(map(str, replacement)) if isinstance(replacement, list) else replacement
        changes.append((name, replacement, f"--{name} {text}"))
    for flag in [*(f"--set {text}" for text in overrides), *(f"--sweep {text}" for text in swept)]:
        _, _, text = flag.partition(" ")
        key, separator, value = text.partition("=")
        if not separator or not key.strip():
            raise InputError(f"{flag}: expected KEY=VALUE, such as --set steps=20")
        if key.strip() in given:
            raise InputError(f"{flag}: --{key.strip()} is given too: leave one of them out")
        if key.strip() in {earlier for earlier, *_ in changes}:
            raise InputError(f"{flag}: '{key.strip()}' is set twice: leave one of them out")
        changes.append((key.strip(), _read(value, flag), flag))
    changed = _changed(document if scale is None else _scaled(document, scale, folder), changes, folder)
    for key, _, flag in changes:
        if "." in key and changed.lines and flag not in changed.lines.values():
            raise InputError(f"{flag}: a later option replaces it: leave one of them out")
    return changed


def apply_values(
    document: Document, values: Mapping[str, object], origin: str, folder: Path = Path()
) -> Document:
    """Replace keys of a document by `values`, each under a key path as `--set` has it.

    Args:
        document: not changed itself.
        values: plain data by key path.
        origin: begins errors about these keys, such as `point lr=0.1`.
        folder: where topology files are searched first.

    Raises:
        InputError: there is no place for a key.
    """
    return _changed(document, [(key, value, origin) for key, value in values.items()], folder)


def refuse_replaced(
    document: Document, values: Iterable[tuple[str, object, KeyPath]], folder: Path = Path()
) -> None:
    """Refuse an option such as --set of which nothing is left once `values` are set, as at every point of a sweep.

    Args:
        document: with the values of options.
        values: key path as `apply_values` takes it, value, and place in the document of both; those that do not fit are
            left to the caller.
        folder: where topology files are searched first.

    Raises:
        InputError: of the first such option; the line names it and the place.
    """
    flags = dict.fromkeys(line for line in document.lines.values() if str(line).startswith("--"))
    changed = document
    for key, value, place in values if flags else ():
        with suppress(InputError):
            changed = apply_values(changed, {key: value}, key, folder)
        kept = set(changed.lines.values())
        if lost := [flag for flag in flags if flag not in kept]:
            problem = f"replaces {visible(lost[0])} at every point: leave one of them out"
            raise document.error(place, problem)


_Change = tuple[str, object, str]
"""Key path, value, and what errors about it begin with."""


def _changed(
    document: Document,
    changes: Iterable[_Change],
    folder: Path,
    written: Mapping[str, Mapping[KeyPath, int | str]] | None = None,
) -> Document:
    """Copy with changed values; `written`: lines of a value's keys in the file, by key path, in place of its origin."""
    if not isinstance(document.data, dict):
        return document  # the schema names the mistake
    data, lines = copy.deepcopy(document.data), dict(document.lines)
    # A whole key first, then what is inside, in whatever order they are given.
    for key, value, origin in sorted(changes, key=lambda change: "." in change[0]):
        own = {(): origin} if written is None else written[key]
        keys = key.split(".")
        if keys[0] == "topology" and len(keys) > 1:
            if isinstance(data.get("topology"), str):
                place = _place(data["topology"], folder)
                inlined = _at(replace(document, lines=lines), ("topology",), Topology.document_of, place)
                data["topology"] = inlined.data
                # The name itself stays that of its option or line.
                lines |= {
                    ("topology", *at): f"{inlined.where}:{line}" for at, line in inlined.lines.items() if at
                }
            _refuse_new_names(data.get("topology"), keys, origin)
        for path in _set(data, keys, value, origin):
            if len(path) < len(keys):
                lines[path] = own[()]
                continue
            lines = {known: at for known, at in lines.items() if known[: len(path)] != path}
            lines |= {(*path, *rest): at for rest, at in own.items()}
        if (
            keys[0] == "topology"
            and len(keys) > 1
            and keys[1] != "name"
            and isinstance(data["topology"], dict)
        ):
            data["topology"]["name"] = _changed_name(data["topology"].get("name"), ".".join(keys[1:]), value)
    return replace(document, data=data, lines=lines)


def _changed_name(name: object, key: str, value: object) -> str:
    """Name of a topology in which a key was changed: `two-datacenters with wan.0.bandwidth 10 Mbit/s`."""
    base, _, changes = (name if isinstance(name, str) else "topology").partition(" with ")
    others = [each for each in changes.split("; ") if each and not each.startswith(f"{key} ")]
    return f"{base} with {'; '.join([*others, f'{key} {visible(value_text(value), 80)}'])}"[:2000]


def _place(topology: str, folder: Path) -> str | Path:
    """Path of a topology file in `folder`; without one the text, a name or another path."""
    near = folder / topology
    return near if os.path.isfile(near) else topology


def _refuse_new_names(topology: object, keys: Sequence[str], origin: str) -> None:
    """Refuse a key inside a region, host or link that the topology lacks, which would begin an incomplete one."""
    known = topology if isinstance(topology, dict) else {}
    if len(keys) > 3 and keys[1] in ("wan", "links") and not known.get(keys[1]):
        other = "wan" if keys[1] == "links" else "links"
        entries = [each for each in known.get(other) or () if isinstance(each, dict)][: _MOST_LINKS + 1]
        ends = [visible(" - ".join(map(str, each.get("between") or ())), 60) for each in entries]
        named = [f"{other}.{number} ({pair})" for number, pair in enumerate(ends)]
        named[_MOST_LINKS:] = ["..."] if len(named) > _MOST_LINKS else []
        there = f"its links are {', '.join(named)}" if named else f"it has {', '.join(map(visible, known))}"
        raise InputError(f"{origin}: the topology has no '{keys[1]}': {there}")
    if len(keys) < 4 or keys[1] not in ("regions", "hosts") or keys[2] == "*":
        return
    named_hosts = known.get(keys[1])
    if not isinstance(named_hosts, list) and keys[2] not in (named_hosts or {}):
        error = unknown_name(keys[1][:-1], keys[2], named_hosts or {})
        raise type(error)(f"{origin}: {error}")


def _scaled(document: Document, scale: str, folder: Path) -> Document:
    """Copy with the keys that `scales` lists for `scale`, and the lines of these."""
    scales = document.data.get("scales") if isinstance(document.data, dict) else None
    if not isinstance(scales, dict) or not scales:
        raise InputError(f"--scale {scale}: {document.where} has no 'scales'; leave --scale out")
    if scale not in scales:
        raise document.error(("scales",), unknown_name("scale", scale, scales))
    changes = scales[scale] if isinstance(scales[scale], dict) else {}  # else the schema names the mistake
    made, written = [], {}
    for key, value in changes.items():
        origin = ("scales", scale, key)
        made.append((key, value, f"{document.where}:{document.line_of(origin)}: scales.{scale}.{key}"))
        written[key] = {known[3:]: at for known, at in document.lines.items() if known[:3] == origin}
    return _changed(document, made, folder, written)


def _read(value: str, flag: str) -> object:
    try:
        return parse_document(value, flag).data
    except InputError as error:
        # A flag has no lines.
        raise type(error)(re.sub(rf"^{re.escape(flag)}:\d+: ", lambda _: f"{flag}: ", str(error))) from None


def _set(
    container: Any, keys: Sequence[str], value: object, flag: str, path: KeyPath = ()
) -> Iterator[KeyPath]:
    """Set copies of `value` at `keys`; yields their key paths, several for a `*`, after those of mappings made."""
    position = len(path) + 1
    for step in _steps(container, keys[position - 1], flag):
        if position == len(keys):
            container[step] = copy.deepcopy(value)
            yield (*path, step)
        else:
            inside = container.get(step) if isinstance(container, dict) else container[step]
            if inside is None:
                yield (*path, step)
            # A mapping replaces a missing value or a plain name.
            inside = {} if inside is None else _expanded(step, inside) if isinstance(inside, str) else inside
            if not isinstance(inside, dict | list):
                raise InputError(f"{flag}: '{'.'.join(keys[:position])}' has no keys inside")
            container[step] = inside
            yield from _set(inside, keys, value, flag, (*path, step))


def _steps(container: dict[str, Any] | list[Any], key: str, flag: str) -> list[str | int]:
    """Keys or positions that a step of a path stands for."""
    if key == "*":
        if not container:
            raise InputError(f"{flag}: * matches no key: the mapping or list is empty")
        return list(container) if isinstance(container, dict) else list(range(len(container)))
    if isinstance(container, dict):
        if not key:
            raise InputError(f"{flag}: an empty key between dots")
        return [key]
    names = [
        (entry.get("label") or entry.get("name")) if isinstance(entry, dict) else entry for entry in container
    ]
    if key in names:
        return [names.index(key)]
    if key.isascii() and key.isdigit() and int(key) < len(container):
        return [int(key)]
    positions = [f"0 to {len(container) - 1}"] if container else []
    error = unknown_name("entry", key, [str(name) for name in names if name] + positions)
    raise type(error)(f"{flag}: {error}")
