"""Configuration of a run: keywords of `fit`, keys of an experiment file, and settings that checkpoints compare.

    experiment file -> Settings -> RunConfig <- keywords of Trainer.fit
                                   RunConfig -> FitRequest -> ranks

A field of `RunConfig` and its line of documentation are the whole of an option: a keyword of `fit` for type checkers,
`help` and at run time; a key of experiment files, `--set` and `netgym schema`; a check and its error; a setting that
checkpoints compare. Code reads it as `request.NAME`.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field, fields
from functools import lru_cache
from inspect import signature
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, TypeAlias, get_args, get_type_hints

import pydantic.dataclasses
import yaml
from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    create_model,
)

from exogym_core.cost.compute import Compute
from exogym_core.names import file_name, shown_value
from exogym_core.results.loggers import LoggerName
from exogym_core.stages.options import Stages
from exogym_core.workers.spec import WorkerSpec
from netsim import Protocol
from netsim.collectives.choice import parse_collectives
from netsim.docstrings import documented_lines
from netsim.errors import InputError
from netsim.files.documents import parse_document
from netsim.files.schemas import Schema
from netsim.units import parse_seconds, plain_numbers

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    import torch
    from torch import nn

    from exogym_core.strategy.base import Strategy
    from netsim import Topology

    StrategyLike: TypeAlias = Strategy | None
    Device: TypeAlias = str | torch.device | None
    Devices: TypeAlias = Sequence[int | str | torch.device] | None
    TopologyLike: TypeAlias = Topology | str | Path | Mapping[str, Any] | None
    ProtocolLike: TypeAlias = str | Mapping[str, Any] | None
    CollectivesLike: TypeAlias = str | Mapping[str, str]
    ComputeLike: TypeAlias = float | str | Mapping[str, Any] | Compute | None
    WorkersLike: TypeAlias = str | Mapping[str, Any] | WorkerSpec
    StagesLike: TypeAlias = int | Mapping[str, Any] | Stages | None
    Accuracy: TypeAlias = Callable[[nn.Module, Any], float] | None
    Listener: TypeAlias = Callable[[Mapping[str, Any]], None] | None
    PathLike: TypeAlias = str | Path
    Names: TypeAlias = Sequence[str] | None
    Options: TypeAlias = Mapping[str, Any] | None
else:  # checked in `exogym_core.run.request`, which may import torch
    StrategyLike = Device = TopologyLike = ProtocolLike = CollectivesLike = ComputeLike = WorkersLike = Any
    Names = Any

__all__ = [
    "MOST_WORKERS",
    "OPTIONS",
    "Count",
    "Named",
    "Option",
    "RunConfig",
    "Settings",
    "StrategySettings",
    "checked_config",
    "file_values",
    "open_device",
    "option",
    "resolved_protocol",
    "yaml_text",
]

_AS_FIELD: Any = object()  # the default of a key where an option declares none for files


@dataclass(frozen=True)
class Option:
    """Properties of one field of `RunConfig`, besides its name, type and default.

    Attributes:
        key: in experiment files, such as "evaluate.every"; None: no file sets it.
        file_type: type of that key for pydantic, where it is not the field's.
        file_default: default of that key, where it is not the field's; `...`: the key is required.
        same: whether a run that resumes from a checkpoint needs the same value.
        is_timed: values other than the default mean nothing without virtual time.
        is_of_network: values change times and bytes, and no loss where no rank learns the time.
    """

    key: str | None = None
    file_type: Any = None
    file_default: Any = _AS_FIELD
    same: bool = False
    is_timed: bool = False
    is_of_network: bool = False


def option(default: Any, **properties: Any) -> Any:
    """A field of `RunConfig`; `properties` are the attributes of its `Option`."""
    return field(default=default, metadata={"option": Option(**properties)})


# --- types of options --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Expected:
    """Values of a type, for the error about a keyword of `fit`: "give a whole number from 1 up"."""

    text: str
    is_whole: bool = False


def _one(is_such: Callable[[Any], bool], text: str) -> Any:
    """Type whose values a function recognises."""

    def check(value: Any) -> Any:
        if not is_such(value):
            raise ValueError(text)
        return value

    return Annotated[Any, AfterValidator(check), Expected(text)]


_MOST_CHARACTERS_OF_A_PATH = 4096


def _is_path(value: object) -> bool:
    text = os.fspath(value) if isinstance(value, str | os.PathLike) else None
    return isinstance(text, str) and "\0" not in text and len(text) < _MOST_CHARACTERS_OF_A_PATH


def _is_function(value: object) -> bool:
    return callable(value) and not isinstance(value, type)


def _is_options(value: object) -> bool:
    return isinstance(value, Mapping) and all(isinstance(name, str) for name in value)


if not TYPE_CHECKING:
    PathLike = _one(_is_path, "the path of a file or folder")
    Accuracy = _one(_is_function, "a function f(model, batch)") | None
    Listener = _one(_is_function, "a function f(row)") | None
    Options = _one(_is_options, "a mapping of names to values, such as {'num_workers': 2}") | None
    Devices = _one(lambda value: isinstance(value, list | tuple | range), "a list such as [0, 1]") | None


def _seconds(name: str | None, value: Any) -> float:
    seconds = math.nan
    try:
        if isinstance(value, str):
            seconds = parse_seconds(value)
        elif not isinstance(value, bool):
            seconds = float(value)
    except TypeError:
        pass
    except ValueError as error:
        raise InputError(f"fit: {name} is {shown_value(value)}: {error}", about=(str(name),)) from None
    if not 0 < seconds < math.inf:
        raise InputError(
            f"fit: {name} is {shown_value(value)}; give a positive duration such as '2 h'", about=(str(name),)
        )
    return seconds


def _duration(value: object, info: ValidationInfo) -> float:
    return _seconds(info.field_name, value)


def _failures(value: object, info: ValidationInfo) -> Mapping[str, float]:
    if not isinstance(value, Mapping) or "mtbf" not in value or set(value) - {"mtbf", "repair"}:
        raise InputError(
            f"fit: {info.field_name} is {shown_value(value)}; give {{mtbf: 8 h, repair: 10 min}}",
            about=("failures",),
        )
    given = {"repair": "10 min", **value}
    return {key: _seconds(f"{info.field_name}.{key}", each) for key, each in given.items()}


def _collectives(value: Any) -> Any:
    if value != "auto":
        parse_collectives(value)
    return value


def _label(value: str) -> str:
    if re.search(r"\.seed-[0-9]+$", file_name(value), re.IGNORECASE):
        raise InputError("a label cannot end in .seed-N, as files of a strategy's seeds do: choose another")
    return value


def open_device(value: Any) -> Any:
    """None for "" (EXO Gym leaves a device open with it) and "auto" (experiment files do), else `value`."""
    return None if isinstance(value, str) and value in ("", "auto") else value


def _unit_needed(value: object) -> object:
    fixed = value.get("fixed") if isinstance(value, dict) else value
    if isinstance(fixed, int | float) and not isinstance(fixed, bool):
        raise InputError(f"{fixed} has no unit: write '{fixed} s' or '{fixed} ms'")
    return value


def _no_truth_value(value: object) -> object:
    if isinstance(value, bool):  # it would count as 1 or 0
        raise InputError(f"{str(value).lower()} is no number")
    return value


def _name_alone(value: object) -> object:
    return {"name": value} if isinstance(value, str) else value


Count = Annotated[int, Field(ge=1), Expected("a whole number from 1 up", is_whole=True)]
MOST_WORKERS = 100_000
"""Limit of the workers of a run or a plan."""
WorkerCount = Annotated[
    int, Field(ge=1, le=MOST_WORKERS), Expected(f"a whole number from 1 to {MOST_WORKERS:,}", is_whole=True)
]
Natural = Annotated[int, Field(ge=0), Expected("a whole number from 0 up", is_whole=True)]
Seed = Annotated[int, Field(ge=0, lt=2**63)]
Truth = Annotated[bool, Expected("True or False")]  # "no" would count as true
Finite = Annotated[float, Field(allow_inf_nan=False), Expected("a finite number")]
Text = Annotated[str, Expected("text")]
Patience = Annotated[float, Field(gt=0, allow_inf_nan=False), Expected("a number of seconds above 0")]
Duration = Annotated[float | str, BeforeValidator(_duration)] | None
Failures = Annotated[Mapping[str, Any], BeforeValidator(_failures)] | None


class Named(Schema):
    """A name with its options: `digits`, or `{name: digits, validation_fraction: 0.1}`."""

    model_config: ClassVar[ConfigDict] = ConfigDict(extra="allow", strict=True, frozen=True)

    name: str

    @property
    def options(self) -> dict[str, Any]:
        """Options next to the name."""
        return dict(self.model_extra or {})

    def to_mapping(self) -> dict[str, Any]:
        """The name (and the label of a strategy), then the options in the order of their names."""
        return {**self.__dict__, **dict(sorted(self.options.items()))}


class StrategySettings(Named):
    """A strategy's name, its arguments, and a label of one's own for tables and files."""

    label: Annotated[str, AfterValidator(_label)] | None = None

    @property
    def own_code(self) -> list[str]:
        """References to the user's code, `module:callable`: its name, or names in the `modules` of a Chain."""
        modules = self.options.get("modules") if self.name == "Chain" else None
        named = (
            [each.get("name") for each in modules if isinstance(each, dict)]
            if isinstance(modules, list)
            else []
        )
        return [name for name in (self.name, *named) if isinstance(name, str) and ":" in name]


Choice = Annotated[Named, BeforeValidator(_name_alone)]
StrategyChoice = Annotated[StrategySettings, BeforeValidator(_name_alone)]
OpenDevice = Annotated[Device, BeforeValidator(open_device)]
OpenDevices = Annotated[Devices, BeforeValidator(open_device)]
Algorithms = Annotated[CollectivesLike, AfterValidator(_collectives), Expected("the name of an algorithm")]
Costs = Annotated[ComputeLike, BeforeValidator(Compute.parse)] | None
Workers = Annotated[WorkersLike, BeforeValidator(WorkerSpec.parse)]
if not TYPE_CHECKING:
    StagesLike = Annotated[Any, BeforeValidator(Stages.parse)] | None
# Types of keys of experiment files: values as written, which the resolved form repeats.
NameList = Annotated[list[str], Field(min_length=1)]
Precision = bool | Literal["bf16", "fp16"]
Sampler = Annotated[Literal["torch"], Expected("'torch', or None")]
FileSeconds = float | str | None
FileFailures = dict[str, float | str] | None
FileChoice = str | dict[str, str]
FileCompute = Annotated[Compute, BeforeValidator(_unit_needed)]
FileName = str | dict[str, Any] | None
FileNumber = Annotated[float, Field(strict=False, allow_inf_nan=False), BeforeValidator(_no_truth_value)]


# --- the options -------------------------------------------------------------------------------------------


@pydantic.dataclasses.dataclass(config=ConfigDict(strict=True, validate_default=True))
class RunConfig:
    """The options of a run, each checked by itself.

    Attributes:
        num_epochs: passes over the training set; one where neither this nor `max_steps` is given.
        strategy: update at the end of a local step; each rank gets its own copy.
        num_nodes: number of workers; by default torchrun's world size, or the hosts of the topology.
        max_steps: optimizer steps of each worker; with `num_epochs`, whichever ends first.
        device: `auto`, `cpu`, `cuda`, `cuda:1` or `mps`, as for `Trainer`; giving different ones to both is an error.
            In a file a list is dealt out to the ranks in turn.
        devices: CUDA devices that ranks take in turn.
        batch_size: samples of each worker in a step. The last step of an epoch may be smaller; averages over ranks
            are weighted by samples.
        batch_by_speed: deal out a step's samples of all workers, `batch_size` for each, by the speeds of the
            hosts' devices, so that all arrive together; gradients and rounds are weighed by samples. For strategies
            that average gradients or rounds of all workers, on one data set with a length.
        minibatch_size: samples of one backward pass; divides `batch_size`. It changes no gradient but by rounding,
            unless the model draws random numbers, normalises over the batch (BatchNorm), or returns a loss that is a
            mean over something else than samples without its count. None: the whole batch; `auto`: the largest for
            which there is memory.
        shuffle: draw a new order from `seed` in each epoch.
        val_size: samples of an evaluation, the same every time; 0 for no evaluation. In a file None: all of them.
        val_interval: steps between evaluations; also at step 0 and at the end. They cost no virtual time.
        autocast: forward passes in half precision: `bf16` (or True), or `fp16`, which scales the loss and leaves out
            steps whose gradients overflow.
        checkpoint_interval: steps between checkpoints of the whole run; they cost no virtual time. Only the newest is
            kept.
        correlation_interval: steps between comparisons of the replicas; None: none.
        save_dir: folder of checkpoints, in a new folder called as the run or its strategy; `result.checkpoint_folder`
            is its path.
        dataloader_kwargs: keywords of torch's DataLoader, such as `collate_fn`, `drop_last` and `num_workers`.
        sampler: `torch` deals one dataset out as torch's DistributedSampler does as EXO Gym uses it: its seed 0 and its
            epoch 0 in every epoch, filled up with the first samples where ranks would get unequally many. None: the
            order of `seed`, a new one each epoch, without repeated samples.
        val_seconds: virtual seconds between evaluations, in place of `val_interval` steps.
        seed: of data order, of every rank's own random stream, and of virtual jitter.
        run_name: write `logs/<run_name>/` with train.csv, validation.csv and config.json. Nothing is written without
            it.
        out: the run's folder, new or empty, as `netgym run` writes it: metrics, model, summary, checkpoints and page,
            for `netgym report`, `netgym status` and `netgym.load`. None: no folder.
        wandb_project: log to Weights & Biases too (extra `tracking`).
        log_x_axis: x axis of logs to Weights & Biases: `step`, `examples` or `virtual_seconds`.
        disable_logging: write no logs/<run_name>/, and nothing to Weights & Biases.
        until: virtual seconds (or text such as '2 h') after which no step begins; `max_steps` may end the run before.
        servers: number of server ranks, which come on top of the workers; by default as many as the strategy needs.
        failures: workers' hosts crash at random: {'mtbf': '8 h', 'repair': '10 min'}, exponential times drawn by
            seed.
        topology: the network: a file, the name of a shipped one, a mapping or a Topology. None: no virtual time.
        placement: host names, one a rank, and perhaps those of servers; None: spread evenly over regions.
        protocol: how transfers use links, a preset or a mapping; None: the topology's, else `linux-tcp`.
        collectives: algorithms of the simulated collectives: `auto`, those by which whole rounds are fastest on
            this network (`gloo`'s own under that protocol); a name such as `ring`; or a mapping such as
            `all_reduce: ring`. `result.collectives` reports which were used.
        compute: virtual seconds of a step, such as `50 ms`, `measured`, or a mapping, see `Compute.parse`; by default
            by FLOPs on each host's device, which the topology must name.
        transport: `netsim`; `gloo` for real processes and sockets (torchrun's, where it has started this process:
            then rank 0 has the history and returns the mean model, the others return their own); or a registered one
            (`exogym_core.workers.run`).
        workers: `auto`, `threads`, `processes`, or a mapping of kind, processes and intra_op_threads.
        stages: make each worker a chain of ranks, each with a stage of the model: `4`, or a mapping with `count`,
            `microbatches`, `schedule` (`gpipe`, `1f1b`, `interleaved`, `pipedream`) and `split`. `num_nodes` counts
            workers, and `batch_size` their samples; `placement` names a host for each of their ranks, worker by worker.
        target_loss: loss that the judged model should reach. `target` reports whether it was held,
            `virtual_seconds_to_target` when the first judged model that reached it came to exist.
        resume_from: a folder of checkpoints, or a run's folder that `out` named; resumes from its newest checkpoint,
            or from the start where there is none yet, to the same bits as without an interruption; new checkpoints
            go there too. All other arguments must be those of the interrupted run, but for `workers` and its length:
            a longer run extends the folder of a finished one. A resume that is refused, or has no step left to do,
            changes no file.
        edited_code: resume although your code was edited since the checkpoint.
        trace: file of a Perfetto trace of the run, such as `trace.json.gz`; costs no virtual time.
        timeout_seconds: over `gloo`, seconds that ranks wait for each other; None: four times as long as a rank has
            itself worked since its last call, half an hour at least. A rank that dies is noticed at once, as is
            a deadlock.
        compare_calls: over `gloo`, ranks compare each call before it runs, so that those that disagree end
            with an error and do not hang: a round trip a call, which strategies that communicate every step may want
            to save.
        accuracy: `f(model, batch) -> fraction right`, for the judged model.
        on_event: called with every finished row, with its `kind`, during the run.
        progress: show a bar on a terminal, lines elsewhere, and the outcome, on stderr; False: nothing.
    """

    num_epochs: Count | None = None
    strategy: StrategyLike = None
    num_nodes: WorkerCount | None = option(None, key="workers.count", file_type=WorkerCount, file_default=...)
    max_steps: Count | None = option(None, key="steps", file_type=Count, file_default=...)
    device: OpenDevice = option(None, key="device", file_type=str | NameList, file_default="auto")
    devices: OpenDevices = None
    batch_size: Count = option(16, key="batch_size", same=True)
    minibatch_size: Count | Literal["auto"] | None = option(None, key="minibatch_size", same=True)
    shuffle: Truth = option(True, key="shuffle", same=True)
    val_size: Natural = option(64, key="evaluate.samples", file_type=Natural | None, file_default=None)
    val_interval: Count = option(100, key="evaluate.every")
    autocast: Any = option(False, key="autocast", file_type=Precision, same=True)
    checkpoint_interval: Count | None = option(
        None, key="checkpoint.every", file_type=Count, file_default=...
    )
    correlation_interval: Count | None = option(None, key="evaluate.correlation_every")
    save_dir: PathLike = "./checkpoints"
    dataloader_kwargs: Options = None
    _: KW_ONLY
    batch_by_speed: Truth = option(False, key="batch_by_speed", same=True)
    sampler: Sampler | None = option(None, key="sampler", file_type=Literal["torch"] | None, same=True)
    val_seconds: Duration = option(None, key="evaluate.every_seconds", file_type=FileSeconds, is_timed=True)
    seed: Natural = option(42, key="seed", file_type=Seed, file_default=0, same=True)
    run_name: Text | None = None
    wandb_project: Text | None = None
    log_x_axis: Text = "step"
    disable_logging: Truth = False
    until: Duration = option(None, key="until", file_type=FileSeconds, same=True, is_timed=True)
    servers: Count | None = option(None, key="servers", file_type=int | None, same=True)
    failures: Failures = option(None, key="failures", file_type=FileFailures, same=True, is_timed=True)
    topology: TopologyLike = option(None, key="topology", file_type=FileName, is_of_network=True)
    placement: Names = option(
        None, key="placement", file_type=NameList | None, same=True, is_timed=True, is_of_network=True
    )
    protocol: ProtocolLike = option(
        None, key="protocol", file_type=FileName, same=True, is_timed=True, is_of_network=True
    )
    collectives: Algorithms = option(
        "auto", key="collectives", file_type=FileChoice, same=True, is_timed=True, is_of_network=True
    )
    compute: Costs = option(
        None, key="compute", file_type=FileCompute, file_default=Compute(), is_of_network=True
    )
    transport: Text = option("netsim", key="transport", file_type=str, same=True)
    workers: Workers = option("auto", key="workers")
    stages: StagesLike = option(None, key="stages", file_type=int | Stages | None, same=True)
    target_loss: Finite | None = option(None, key="target_loss", file_type=FileNumber | None)
    resume_from: PathLike | None = None
    edited_code: Truth = False
    trace: PathLike | None = None
    timeout_seconds: Patience | None = None
    compare_calls: Truth = option(True, key="compare_calls")
    accuracy: Accuracy = None
    out: PathLike | None = None
    on_event: Listener = None
    progress: Truth = True


OPTIONS: Mapping[str, Option] = {
    each.name: each.metadata.get("option", Option()) for each in fields(RunConfig)
}
"""Properties of each option, by its name."""

_HINTS = get_type_hints(RunConfig, include_extras=True)


def checked_config(*positional: Any, **keywords: Any) -> RunConfig:
    """Check the options of `fit`, each by itself.

    Raises:
        InputError: an option has a wrong value; the line says what to give.
    """
    given = signature(RunConfig).bind(*positional, **keywords).arguments
    for name, value in given.items():
        value = given[name] = plain_numbers(value)
        if isinstance(value, float) and value.is_integer():
            expected = _expected(name)
            if expected is not None and expected.is_whole:
                given[name] = int(value)  # users of EXO Gym pass 150.0 steps
    try:
        return RunConfig(**given)
    except ValidationError as error:
        first = error.errors()[0]
        cause, name = first.get("ctx", {}).get("error"), str(first["loc"][0])
        if isinstance(cause, InputError):
            raise cause from None
        expected = _expected(name)
        assert expected is not None
        raise InputError(
            f"fit: {name} is {shown_value(given[name])}; give {expected.text}", about=(str(name),)
        ) from None


def _expected(name: str) -> Expected | None:
    kinds = [_HINTS[name]]
    for kind in kinds:  # and those inside
        if isinstance(kind, Expected):
            return kind
        kinds += [*getattr(kind, "__metadata__", ()), *get_args(kind)]
    return None


# --- experiment files --------------------------------------------------------------------------------------


class FileKeys(Schema):
    """Keys of an experiment file, as written or by default.

    Attributes:
        name: of the run folder; by default the file's.
        task: data, and the default model for them.
        model: the model; None: the task's default.
        strategies: strategies to compare, each a name or a mapping with `name` and its arguments.
        seeds: a number of them, counted up from `seed`, or a list; None: `seed` alone. In the resolved form a list.
        network_seed: of the network's own draws (drift); None: each run's seed.
        loggers: where metrics go besides the CSV files that are always written.
        scales: name -> what `--scale` of that name replaces, in the key paths of `--set`. Not part of the resolved
            form.
        sweep: key paths and their values, for `netgym sweep`; see `netgym.studies.points:Sweep`. Not part of the
            resolved form.
        tune: options and their values for `netgym tune`; see `netgym.studies.tuning`. Not part of the resolved
            form.
    """

    name: str | None = None
    task: Choice
    model: Choice | None = None
    strategies: Annotated[list[StrategyChoice], Field(min_length=1)]
    seeds: Count | Annotated[list[Seed], Field(min_length=1)] | None = None
    network_seed: Seed | None = None
    loggers: list[LoggerName] = Field(default=["csv"])
    scales: dict[str, dict[str, Any]] = Field(default={})
    sweep: dict[str, Any] | None = None
    tune: dict[str, Any] | None = None


#: Description of each group of keys, and its value where the file has none: `...` if it needs one.
_GROUPS = {
    "workers": ("Number of workers, and their processes and threads (which change no result).", ...),
    "evaluate": ("Evaluation of the local, the mean and the judged model, off the clock.", _AS_FIELD),
    "checkpoint": ("Steps between two checkpoints.", None),
}

#: Order of the resolved form; other keys follow.
_ORDER = (
    "name task model workers workers.count device topology placement protocol collectives compute steps batch_size "
    "batch_by_speed minibatch_size stages shuffle sampler autocast strategies evaluate evaluate.every "
    "evaluate.every_seconds evaluate.samples target_loss checkpoint seed seeds network_seed loggers scales sweep tune "
    "until servers failures"
)


def _settings() -> type[Schema]:
    """Schema of experiment files: the keys of options, and those of files alone."""
    keys: dict[str, dict[str, Any]] = {group: {} for group in ("", *_GROUPS)}  # type and default of each
    about = documented_lines(RunConfig)
    for each in fields(RunConfig):
        properties = OPTIONS[each.name]
        group, _, key = (properties.key or "").rpartition(".")
        if key and key not in _GROUPS:
            default = each.default if properties.file_default is _AS_FIELD else properties.file_default
            kind = _HINTS[each.name] if properties.file_type is None else properties.file_type
            keys[group][key] = (kind, Field(default=default, description=about[each.name]))
    for group, model in (("", FileKeys), ("workers", WorkerSpec)):
        about, hints = documented_lines(model), get_type_hints(model, include_extras=True)
        for key, info in model.model_fields.items():
            keys[group][key] = (hints[key], Field(default=info.default, description=about[key]))
    del keys["workers"]["num_gpus"]  # a keyword's alone
    order = _ORDER.split()

    def place(path: str) -> int:
        return order.index(path) if path in order else len(order)

    def model_of(name: str, doc: str, group: str = "", prefix: str = "") -> type[Schema]:
        in_order: Any = dict(sorted(keys[group].items(), key=lambda item: place(f"{prefix}{item[0]}")))
        return create_model(name, __base__=Schema, __doc__=doc, __module__=__name__, **in_order)

    for name, (doc, default) in _GROUPS.items():
        made = model_of(name.capitalize(), doc, name, f"{name}.")
        value = made() if default is _AS_FIELD else default
        keys[""][name] = (made | None if default is None else made, value)
    return model_of("Settings", "Keys of an experiment file, as written or by default.")


if TYPE_CHECKING:

    class Settings(FileKeys):
        """Keys of an experiment file; those of options exist at run time."""

        def __getattr__(self, name: str) -> Any: ...

else:
    Settings = _settings()


def file_values(settings: object) -> dict[str, Any]:
    """Values of an experiment's settings by option, as the file has them; options without a key are left out."""
    values: dict[str, Any] = {}
    for name, properties in OPTIONS.items():
        if properties.key is None:
            continue
        value: Any = settings
        for part in properties.key.split("."):
            value = getattr(value, part) if value is not None else None
        # The number of workers is an option of its own.
        values[name] = value.model_dump(exclude={"count"}) if name == "workers" else value
    return values


def resolved_protocol(given: Any, topology: Topology | None) -> Any:
    """Protocol of the resolved form: the one given, else the topology's, else the default; None without a network."""
    if given is not None or topology is None:
        return given
    found = topology.protocol if topology.protocol is not None else Protocol.parse(None).name
    return found if isinstance(found, str) else dict(found)


def yaml_text(mapping: Mapping[str, Any]) -> str:
    """YAML of plain data that our reader reads back unchanged."""
    return yaml.dump(
        plain_numbers(dict(mapping)), Dumper=_Dumper, sort_keys=False, allow_unicode=False, width=110
    )


class _Dumper(yaml.SafeDumper):
    """Quotes strings that our reader would read as another type, such as '1e9'."""

    def ignore_aliases(self, data: object) -> bool:
        """Write everything out: the reader refuses aliases."""
        return True


@lru_cache(maxsize=4096)
def _reads_back(text: str) -> bool:
    """True if our reader reads a plain text as itself."""
    try:
        return bool(parse_document(text).data == text)
    except InputError:
        return False


def _represent_text(dumper: _Dumper, text: str) -> yaml.Node:
    style = None if _reads_back(text) else '"'
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _represent_text)
