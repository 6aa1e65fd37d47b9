"""The keys of an experiment file: their types and defaults, and how they are written down again."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import yaml
from pydantic import BeforeValidator, ConfigDict, Field, create_model, field_validator

from exogym_core.training.options import OPTIONS, RunOptions
from netsim.files.documents import Schema, parse_document
from netsim.files.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["Checkpoint", "Evaluate", "Named", "Settings", "StrategySettings", "Workers", "yaml_text"]

Count = Annotated[int, Field(ge=1)]
Seed = Annotated[int, Field(ge=0, lt=2**63)]


class Named(Schema):
    """A name with options beside it: `digits`, or `{name: digits, validation_fraction: 0.1}`."""

    model_config: ClassVar[ConfigDict] = ConfigDict(extra="allow", strict=True, frozen=True)

    name: str

    @property
    def options(self) -> dict[str, Any]:
        """What stands beside the name."""
        return dict(self.model_extra or {})

    def to_mapping(self) -> dict[str, Any]:
        """The name, then the options in the order of their names."""
        return {"name": self.name, **dict(sorted(self.options.items()))}


class StrategySettings(Named):
    """A strategy's name, its arguments, and a label of one's own for tables and files."""

    label: str | None = None

    def to_mapping(self) -> dict[str, Any]:
        """The name, the label, then the arguments in the order of their names."""
        return {"name": self.name, "label": self.label, **dict(sorted(self.options.items()))}


class Workers(Schema):
    """How many workers there are, and how this machine carries them (which changes no result)."""

    count: Count
    kind: Literal["auto", "threads", "processes", "ray"] = "auto"
    processes: Count | None = None
    intra_op_threads: Count = 1
    address: str | None = None


class Evaluate(Schema):
    """Evaluation of the local, the mean and the judged model, off the clock.

    Attributes:
        every: steps between two evaluations.
        every_seconds: virtual seconds between them, in place of steps.
        samples: how many validation samples; None: all of them.
        correlation_every: steps between two comparisons of the replicas; None: none.
    """

    every: Count = 100
    every_seconds: float | str | None = None
    samples: Annotated[int, Field(ge=0)] | None = None
    correlation_every: Count | None = None


class Checkpoint(Schema):
    """Steps between two checkpoints."""

    every: Count


def _no_truth_value(value: object) -> object:
    if isinstance(value, bool):  # it would count as 1 or 0
        raise InputError(f"{str(value).lower()} is no number")
    return value


def _name_alone(value: object) -> object:
    return {"name": value} if isinstance(value, str) else value


Choice = Annotated[Named, BeforeValidator(_name_alone)]
StrategyChoice = Annotated[StrategySettings, BeforeValidator(_name_alone)]


class Settings(Schema):
    """The keys of an experiment file, as written or by default.

    Attributes:
        name: of the run folder; by default the file's.
        task: data, and the default model for them.
        model: the model; None: the task's default.
        device: `auto`, `cpu`, `cuda`, `cuda:1` or `mps`; a list is dealt out to the ranks in turn.
        topology: a file, a shipped name or the mapping itself; None: no network, no virtual time.
        placement: the host of each rank; None: evenly over regions.
        protocol: a preset or a mapping; None: the topology's, else ideal.
        collectives: `auto`, the fastest algorithm for each operation, group and size on this network; a name such as
            `ring`; or a mapping such as `all_reduce: ring`.
        compute: how long a step takes, such as `50 ms`, `measured`, or a mapping.
        steps: optimizer steps of each worker.
        batch_size: samples of each worker in a step.
        minibatch_size: samples of one backward pass; None: the whole batch; `auto`: as there is memory for.
        shuffle: a new order in each epoch.
        autocast: compute in half precision: `bf16` (or true), or `fp16` with a scaled loss.
        target_loss: of the judged model; how soon it is reached is the comparison.
        checkpoint: None: no checkpoints.
        seed: of everything random.
        seeds: a number of them, counted up from `seed`, or a list; None: `seed` alone. In the resolved form a list.
        network_seed: of the network's own draws (drift); None: each run's seed.
        loggers: where metrics go besides the CSV files that are always written.
        scales: name -> what `--scale` of that name replaces, in the key paths of `--set`. Not part of the
            resolved form.
        sweep: key paths and their values, for `netgym sweep`; see `exogym_core.app.studies.points:Sweep`. Not part
            of the resolved form.
    """

    name: str | None = None
    task: Choice
    model: Choice | None = None
    workers: Workers
    device: str | Annotated[list[str], Field(min_length=1)] = "auto"
    topology: str | dict[str, Any] | None = None
    placement: Annotated[list[str], Field(min_length=1)] | None = None
    protocol: str | dict[str, Any] | None = None
    collectives: str | dict[str, str] = "auto"
    compute: str | dict[str, Any] = "flops"
    steps: Count
    batch_size: Count = 16
    minibatch_size: Count | Literal["auto"] | None = None
    shuffle: bool = True
    autocast: bool | Literal["bf16", "fp16"] = False
    strategies: Annotated[list[StrategyChoice], Field(min_length=1)]
    evaluate: Evaluate = Evaluate()
    target_loss: (
        Annotated[float, Field(strict=False, allow_inf_nan=False), BeforeValidator(_no_truth_value)] | None
    ) = None
    checkpoint: Checkpoint | None = None
    seed: Seed = 0
    seeds: Count | Annotated[list[Seed], Field(min_length=1)] | None = None
    network_seed: Seed | None = None
    loggers: list[Literal["csv", "tensorboard", "wandb", "mlflow"]] = Field(default=["csv"])
    scales: dict[str, dict[str, Any]] = Field(default={})
    sweep: dict[str, Any] | None = None

    @field_validator("compute", mode="before")
    @classmethod
    def _refuse_bare_seconds(cls, value: object) -> object:
        fixed = value.get("fixed") if isinstance(value, dict) else value
        if isinstance(fixed, int | float) and not isinstance(fixed, bool):
            raise InputError(f"{fixed} has no unit: write '{fixed} s' or '{fixed} ms'")
        return value


if not TYPE_CHECKING:  # the keys that options of a run bring along
    Settings = create_model(
        "Settings",
        __base__=Settings,
        __doc__=Settings.__doc__,
        __module__=__name__,
        **{
            told.key: (told.file_type, each.default)
            for each in fields(RunOptions)
            if (told := OPTIONS[each.name]).file_type is not None
        },
    )


def yaml_text(mapping: Mapping[str, Any]) -> str:
    """Plain data as a YAML file that our reader reads back as they are."""
    return yaml.dump(dict(mapping), Dumper=_Dumper, sort_keys=False, allow_unicode=False, width=110)


class _Dumper(yaml.SafeDumper):
    """Quotes the strings that our reader would take for something else, such as '1e9'."""

    def ignore_aliases(self, data: object) -> bool:
        """Write everything out: the reader refuses aliases."""
        return True


def _represent_text(dumper: _Dumper, text: str) -> yaml.Node:
    try:
        reads_back = parse_document(text).data == text
    except InputError:
        reads_back = False
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=None if reads_back else '"')


_Dumper.add_representer(str, _represent_text)
