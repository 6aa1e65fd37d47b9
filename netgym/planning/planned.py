"""Requests for plans: settings from an experiment or from the command line."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_map_only
from torch.utils.data import Dataset, IterableDataset, default_collate

from exogym_core.config import checked_config, file_values
from exogym_core.cost.flops import count_flops
from exogym_core.cost.speeds import with_measured_speeds
from exogym_core.data.batches import batch_reader
from exogym_core.learner import loss_and_count
from exogym_core.results.run_folder import code_folder_of, is_own
from exogym_core.run.request import unlike_hosts
from exogym_core.stages.boundaries import boundary_trials
from exogym_core.stages.options import Stages, refuse_with_stages
from exogym_core.strategy.trials import coding_trials
from netgym.experiment.experiment import Experiment, apply_overrides, apply_values, opened_topology
from netgym.planning.measure import Setting
from netgym.planning.models import (
    MOST_PARAMETERS,
    SequenceModel,
    kept_bytes,
    payload_model,
    planned_model,
    read_shapes,
)
from netgym.planning.page import placement_text
from netgym.planning.setting import Crashes, Known, with_wan_bandwidth
from netgym.planning.stages import stages_text
from netgym.planning.tables import LONGEST_SEQUENCE
from netgym.tasks import MODELS, Task, TokenWindows
from netgym.tasks.task import MissingDataError
from netsim.errors import InputError, UnknownNameError, locate_errors, unknown_name
from netsim.files.documents import Document, load_document
from netsim.units import format_count, parse_bits_per_second

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from exogym_core.config import Settings

__all__ = [
    "WAN_BANDWIDTH",
    "Request",
    "parse_dollars",
    "parse_parameters",
    "parse_tokens",
    "request_of",
    "trained_model",
]

_COUNTED_SAMPLES = 2  # of one alone some normalisations refuse to train
_BLOCK_SIZE, _BYTES, _TOKENS = 128, 256, 50304  # as the task text has them


def trained_model(experiment: Experiment) -> tuple[SequenceModel, tuple[str, ...]]:
    """The experiment's model on samples of its task, and remarks.

    The task is built as in a run, and two of its samples are read. If files of the task `text` are missing, its options
    replace them.

    Raises:
        InputError: the task or the model cannot be made, or the operations of a step cannot be counted.
    """
    remarks: tuple[str, ...] = ()
    try:
        task = experiment.build_task()
        batch = _first_samples(task, experiment.settings.workers.count)
    except MissingDataError as error:
        task, remarks = _without_files(experiment, error)
        batch = _first_samples(task, 1)
    with torch.device("meta"):
        model = experiment.build_model(task).to("meta")
    inputs = batch[0] if isinstance(batch, tuple | list) else batch
    is_text = isinstance(inputs, torch.Tensor) and inputs.dim() == 2 and not inputs.is_floating_point()
    if not is_text:
        remarks += ("its samples are no rows of tokens: a token of this plan is a sample",)
    length = inputs.shape[1] if is_text else 1
    shapes = tree_map_only(torch.Tensor, lambda tensor: tensor.to("meta"), batch)
    flops = 0
    if experiment.compute.flops is not None:
        counted = count_flops(model, shapes)
        counted.warn_or_refuse()
        flops = counted.total // _COUNTED_SAMPLES
    kept = kept_bytes(model, shapes, length) // _COUNTED_SAMPLES
    with torch.no_grad():
        _, count = loss_and_count(model(shapes), "plan")
    if count is not None:
        remarks += ("its model returns counts: that ranks sum them, by 4 bytes a step, is not in this plan",)
    made = SequenceModel(model, length, flops, kept, samples=shapes)
    made.epoch = _epoch(experiment, task) if flops else None
    return made, remarks


def _epoch(experiment: Experiment, task: Task) -> tuple[int, float] | None:
    """Steps of an epoch whose last batch is short, by which a run charges it, and its share of a whole one; or None."""
    settings, data = experiment.settings, task.train
    if (
        not isinstance(data, Dataset)
        or isinstance(data, IterableDataset)
        or "partition" in settings.task.options
    ):
        return None
    full, left = divmod(len(data), settings.batch_size * settings.workers.count)  # type: ignore[arg-type]
    share = left // settings.workers.count / settings.batch_size
    return (full + 1, share) if share else None


def _first_samples(task: Task, num_workers: int) -> Any:
    """Batch of the first samples, which may be the first rank's."""
    if isinstance(task.train, TokenWindows):
        size = _COUNTED_SAMPLES, task.train.block_size
        return [torch.zeros(size, dtype=torch.long, device="meta")] * 2
    data: Any = task.train
    if not isinstance(data, Dataset) and callable(data):
        data = data(rank=0, num_nodes=num_workers, train_dataset=True)
    if isinstance(data, IterableDataset):
        return default_collate(list(itertools.islice(data, _COUNTED_SAMPLES)))
    return batch_reader(data)(torch.arange(_COUNTED_SAMPLES))


def _without_files(experiment: Experiment, error: MissingDataError) -> tuple[Task, tuple[str, ...]]:
    """The task `text`, built from its options alone."""
    options = experiment.settings.task.options
    paths, dataset = options.get("paths") or [], options.get("dataset")
    suffixes = {Path(path).suffix for path in ([paths] if isinstance(paths, str) else paths)}
    tokenizer = dataset.get("tokenizer", "bytes") if isinstance(dataset, dict) else "bytes"
    is_bytes = tokenizer == "bytes" if dataset else bool(suffixes) and not suffixes & {".bin", ".npy", ""}
    vocabulary = options.get("vocab_size") or (_BYTES if is_bytes else _TOKENS)
    sizes = {"vocab_size": vocabulary, "block_size": options.get("block_size", _BLOCK_SIZE)}
    task = Task(TokenWindows([], sizes["block_size"]), None, "gpt", {"gpt": sizes, "llama": sizes})
    model = experiment.settings.model
    is_known = "vocab_size" in options or (model is not None and "vocab_size" in model.options)
    if is_known or (dataset and is_bytes):
        return task, ()
    reason = str(error).splitlines()[0]
    return task, (
        f"ITS VOCABULARY IS GUESSED as {vocabulary:,} tokens, since its data are not here ({reason}): with another one "
        "bytes, memory and seconds are others; say --set task.vocab_size=...",
    )


#: The one key of sweeps and --set that is not an experiment's: the rate of every link between sites.
WAN_BANDWIDTH = "wan.bandwidth"

_OF_SETTING = ("devices_per_worker", "batch_by_speed", "memory", "micro_batch")

_SCALES = {"K": 1e3, "M": 1e6, "B": 1e9, "G": 1e9, "T": 1e12}
_MOST_TOKENS, _MOST_DOLLARS = 1e30, 1e15
_BATCH_SIZE = 256
_SEQUENCE = 2048
_LONG_SEQUENCE = 8192  # tokens of those whose share of the peak was published, each on one group of devices
_BILLION = 1e9


_PAYLOAD = "payload"
"""Model of `--parameters` and `--shapes`: its options are `shapes`."""


def _scaled(given: object, text: str, most: float, wrong: str) -> float:
    """Parse a number between 0 and `most` with an optional suffix K, M, B, G or T; `wrong` is the error's text."""
    scale = _SCALES.get(text[-1:].upper())
    with suppress(ValueError):
        number = float(text if scale is None else text[:-1])
        if 0 < number < most:
            return number * (scale or 1.0)
    raise InputError(wrong.format(given))


def parse_tokens(text: str) -> float:
    """Parse a number of tokens, such as 200B.

    Raises:
        InputError: the text is no such number.

    >>> parse_tokens("200B"), parse_tokens("1.5 T"), parse_tokens("20b")
    (200000000000.0, 1500000000000.0, 20000000000.0)
    """
    return _scaled(
        text, text.strip(), _MOST_TOKENS, "tokens: {!r} is no number of tokens; write for example 200B"
    )


def parse_parameters(text: str) -> int:
    """Parse a number of parameters, such as 51.2M.

    Raises:
        InputError: the text is no such number.

    >>> parse_parameters("51.2M"), parse_parameters("72b")
    (51200000, 72000000000)
    """
    wrong = "{!r} is no number of parameters; write for example 51.2M"
    number = round(_scaled(text, text.strip(), MOST_PARAMETERS, wrong))
    if not 1 <= number < MOST_PARAMETERS:
        raise InputError(wrong.format(text))
    return number


def parse_dollars(given: str | float) -> float:
    """Parse dollars to spend, above zero.

    Raises:
        InputError: the text is no such number.

    >>> parse_dollars("500,000"), parse_dollars("500k"), parse_dollars(1.5e6)
    (500000.0, 500000.0, 1500000.0)
    """
    text = str(given).strip().lstrip("$").replace(",", "")
    wrong = "budget: {!r} is no number of dollars; write for example 500000 or 500k"
    return _scaled(given, text, _MOST_DOLLARS, wrong)


@dataclass(frozen=True)
class Request:
    """An experiment to plan.

    Attributes:
        experiment: experiment with the strategies.
        setting: setting of the plans.
        tokens: budget on the command line; None: the steps of an experiment's file, or no budget.
    """

    experiment: Experiment
    setting: Setting
    tokens: float | None = None

    @classmethod
    def of(
        cls,
        experiment: Experiment,
        sequence: int | None = None,
        tokens: float | None = None,
        *,
        known: Known | None = None,
        wan_bandwidth: str | None = None,
        is_file: bool = True,
        remarks: tuple[str, ...] = (),
        **options: Any,
    ) -> Request:
        """Request with the experiment's model on the meta device: its task's, or a published one by name.

        Args:
            experiment: to plan.
            sequence: tokens a sequence of a model by name; None: the task's block size, else 2,048.
            tokens: the budget.
            known: cache shared with other requests.
            wan_bandwidth: on every link between sites, as text; None: the topology's.
            is_file: the experiment has a task and a number of steps of its own.
            remarks: differences between the plan and a run.
            options: attributes of the setting.

        Raises:
            InputError: the model cannot be made, there is no topology, or steps are measured.
        """
        settings, topology = experiment.settings, experiment.topology
        shared = (experiment.shared_hosts,) if experiment.shared_hosts is not None else ()
        known = known if known is not None else Known()
        model, of_model = _model(experiment, sequence, known, is_file=is_file)
        if topology is None:
            raise InputError("plan: there is no network; add --topology, such as --topology wan-4-regions")
        if wan_bandwidth is not None:
            with locate_errors(WAN_BANDWIDTH):
                rate = parse_bits_per_second(wan_bandwidth)
            topology = with_wan_bandwidth(topology, rate)
        _refuse_measured(experiment)
        stages = Stages.parse(settings.stages)
        if stages is not None:
            refuse_with_stages("plan", None, settings.autocast, settings.evaluate.every_seconds)
            size = settings.minibatch_size
            number = stages.settle_microbatches(settings.batch_size, size if isinstance(size, int) else None)
            stages = stages.model_copy(update={"microbatches": number})
        count, budget, failures = settings.workers.count, tokens, _checked("failures", settings)
        is_of_steps = tokens is None and is_file and options.get("dollars") is None
        if is_of_steps:
            budget = float(settings.steps * settings.batch_size * count * model.length)
        num_values = sum(each.numel() for each in model.model.parameters() if each.requires_grad)
        trials = itertools.chain(coding_trials(num_values, count), boundary_trials(stages))
        setting = Setting(
            model,
            topology,
            with_measured_speeds(experiment.compute, 1, trials, []),
            count,
            settings.batch_size,
            budget,
            placement=settings.placement,
            protocol=settings.protocol,
            collectives=settings.collectives,
            half=bool(settings.autocast),
            seed=settings.seed,
            failures=None if failures is None else Crashes(failures["mtbf"], failures["repair"]),
            until=_checked("until", settings),
            stages=stages,
            remarks=(*of_model, *shared, *remarks),
            known=known,
            is_of_steps=is_of_steps,
            **options | {"batch_by_speed": settings.batch_by_speed or bool(options.get("batch_by_speed"))},
        )
        if setting.placement is None:
            used = [topology.hosts[host].name for host in setting.hosts]
            if (unlike := unlike_hosts(topology, used)) is not None:
                setting = replace(setting, remarks=(*setting.remarks, unlike))
        if (unused := topology.unused_links) is not None:
            setting = replace(setting, remarks=(*setting.remarks, f"topology {topology.name}: {unused}"))
        return cls(experiment, setting, tokens)

    def of_own_sites(self, every: Collection[str]) -> Request:
        """Request with values by site for its own network only, of those given for `every` site.

        Raises:
            InputError: a value is given for none of these.
        """
        setting, own = self.setting, self.setting.sites()
        changes: dict[str, Any] = {}
        for name in ("devices_per_worker", "utilisation", "dollars_per_hour"):
            if isinstance(given := getattr(setting, name), Mapping):
                if unknown := [site for site in given if site not in every]:
                    flag = {"dollars_per_hour": "price"}.get(name, name.replace("_", "-"))
                    raise unknown_name(f"site of --{flag}", unknown[0], every)
                changes[name] = {site: value for site, value in given.items() if site in own}
        return replace(self, setting=replace(setting, **changes))

    def title(self) -> str:
        """Model, network and number of workers."""
        settings = self.experiment.settings
        name = settings.model.name if settings.model is not None else f"the model of {settings.task.name}"
        preset = None if settings.model is None else settings.model.options.get("preset")
        workers = format_count(self.setting.num_ranks, "worker")
        if self.setting.stages is not None:
            workers += f" of {self.setting.ranks_a_worker} stages"
        return f"{name}{f'-{preset}' if preset else ''} on {self.setting.topology.name}: {workers}"

    def facts(self) -> list[tuple[str, str]]:
        """Names and values of all that the plans share."""
        setting, length = self.setting, self.setting.model.length
        a_step, size = setting.tokens_a_round(1), setting.model.num_parameters
        batch, price = setting.batch_size, setting.dollars_per_hour
        compute, computing = self.experiment.compute, self.experiment.compute.describe()
        if compute.flops is not None and setting.utilisation is not None:
            shares = ", ".join(f"{site} {share:.0%}" for site, share in setting.utilisation.items())
            if setting.published_range is not None:
                shares = "published shares"
            computing = f"flops at {shares} of {compute.device or 'each host'}'s peak"
        hour = "no price"
        if isinstance(price, Mapping):
            hour = ", ".join(f"{site} {dollars:g}" for site, dollars in price.items()) + " dollars"
        elif price is not None:
            hour = f"{price:g} dollars"
        budget = []
        if self.tokens is not None:
            steps = format_count(math.ceil(self.tokens / a_step), "step")
            budget += [("budget", f"{self.tokens:,.0f} tokens, {steps}")]
        if setting.dollars is not None:
            budget += [("budget", f"{setting.dollars:,.0f} dollars; tokens are those that it pays for")]
        return [
            ("protocol", setting.resolved_protocol.describe()),
            ("collectives", _in_one_line(setting.collectives)),
            ("workers", placement_text(setting.workers_by_site())),
            ("parameters", f"{size / 1e9:,.3g}B" if size >= _BILLION else f"{size / 1e6:,.3g}M"),
            (
                "a step",
                f"{setting.num_ranks * batch:,} sequences ({batch:,} a worker) of {length:,}, {a_step:,} tokens",
            ),
            *([] if setting.cut is None else [("stages", stages_text(setting.cut, batch))]),
            ("computing", computing),
            *budget,
            ("a worker's hour", hour),
        ]


def _model(
    experiment: Experiment, sequence: int | None, known: Known, *, is_file: bool
) -> tuple[SequenceModel, tuple[str, ...]]:
    """Model that an experiment's task would train, or the published one of its name; and remarks."""
    settings = experiment.settings
    name = None if settings.model is None else settings.model.name
    if settings.model is not None and name == _PAYLOAD:
        shapes = settings.model.options["shapes"]
        length = sequence or settings.task.options.get("block_size", _SEQUENCE)
        remark = "operations are 6 a parameter and token (arXiv 2001.08361), activations are not counted"
        return known.call(payload_model, shapes, length), (remark,)
    is_preset = name in ("llama", "gpt") and not is_file
    if settings.model is None or name is None or (not is_preset and (name in MODELS or ":" in name)):
        if sequence is not None:
            raise InputError("plan: sequences are as long as the task makes them: --set task.block_size=...")
        of_model = settings.model and settings.model.to_mapping()
        has_flops = experiment.compute.flops is not None
        sizes = settings.workers.count, settings.batch_size
        given = ("trained model", settings.task.to_mapping(), of_model, has_flops, sizes)
        return known.once(given, lambda: trained_model(experiment))
    arguments = dict(settings.model.options)
    preset = arguments.pop("preset", None)
    of_task = settings.task.options.get("block_size", _SEQUENCE)
    length = int(arguments.pop("block_size", sequence or of_task))
    if length > LONGEST_SEQUENCE:
        raise InputError(
            f"plan: block_size: expected at most {LONGEST_SEQUENCE:,} tokens a sequence, got {length}"
        )
    if is_preset:
        name = f"{name}-{preset or ('2m' if name == 'llama' else 'byte')}"
    try:
        return known.call(_named_model, name, length, arguments)
    except UnknownNameError as error:
        raise experiment.blame_model(error) if arguments else error from None


def _named_model(
    name: str, length: int, arguments: Mapping[str, Any]
) -> tuple[SequenceModel, tuple[str, ...]]:
    """Published model, and a remark on long sequences."""
    model = planned_model(name, length, **arguments)
    if length <= _LONG_SEQUENCE:
        return model, ()
    # Operations are a * length + b * length^2, the latter self-attention's.
    half = planned_model(name, length // 2, **arguments)
    attention = 2 - 2 * length / half.length * half.sequence_flops / model.sequence_flops
    grown = 2 * (model.num_parameters - half.num_parameters)
    table = f"; {grown / 1e6:,.3g}M of its parameters are the table of positions" if grown else ""
    return model, (
        f"sequences of {length:,} tokens: self-attention is {attention:.0%} of a step's operations, and each "
        f"device holds whole sequences{table}; published shares of the peak are for {_LONG_SEQUENCE:,} tokens and "
        "fewer (38 % for 131,072, each divided over 16 devices, arXiv 2407.21783)",
    )


def _refuse_measured(experiment: Experiment) -> None:
    """Raise InputError, with the option to set, where a step's time would have to be measured."""
    compute = experiment.compute
    plain = {key: value for key, value in compute.model_dump().items() if key != "updates"}
    if plain.pop("measured", None) is not None:
        words = ", ".join(f"{key}: {_in_one_line(value)}" for key, value in {"fixed": "1 s", **plain}.items())
        raise InputError(
            f"plan: the time of a step is measured by running it, which a plan does not do; add "
            f"--set compute='{{{words}}}' with your seconds, or plan a run folder, which holds the measured time"
        )
    if compute.updates.speeds or compute.updates.is_measured:
        raise InputError("plan: optimizers' steps are free in plans; add --set compute.updates=free")


def _in_one_line(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {_in_one_line(each)}" for key, each in value.items()) + "}"
    return str(value)


def _checked(name: str, settings: Settings) -> Any:
    """Option of the settings as a run takes it: durations in seconds."""
    return getattr(checked_config(**{name: file_values(settings)[name]}), name)


def _of_words(model: str | None, strategies: Sequence[str], topology: str | None) -> Document:
    """Experiment document made from the command line; its data are not used."""
    given = {"--model, --parameters or --shapes": model, "--strategy": strategies, "--topology": topology}
    if missing := [flag for flag, value in given.items() if not value]:
        raise InputError(f"plan: without an EXPERIMENT add {', '.join(missing)}")
    assert topology is not None
    words = {
        "name": "plan",
        "task": "digits",
        "model": {"name": model},
        "topology": topology,
        "steps": 1,
        "autocast": "bf16",
        "strategies": [{"name": name} for name in strategies],
    }
    return Document("command line", words)


def request_of(
    path: Path | None,
    point: Mapping[str, str],
    *,
    tokens: str | None = None,
    budget: str | float | None = None,
    price: float | Mapping[str, float] | None = None,
    sequence: int | None = None,
    utilisation: float | str | Mapping[str, float] | None = None,
    known: Known | None = None,
    **words: Any,
) -> Request:
    """Request from a command line, at one point of its sweeps.

    Args:
        path: of the experiment, or a run's folder; None: words stand for it.
        point: values of swept keys.
        tokens, budget, price, sequence, utilisation: flags.
        known: cache shared with other requests.
        words: flags of the setting, `_OF_SETTING`, and those that make or change the experiment, `_experiment_of`.

    Raises:
        InputError: neither an experiment nor a model, a strategy and a topology; or a mistake in them.
    """
    if tokens is not None and budget is not None:
        raise InputError("plan: --tokens and --budget exclude each other: the budget's tokens are computed")
    if budget is not None and price is None:
        raise InputError("plan: --budget needs the price of a worker's hour: add --price DOLLARS")
    sites = utilisation if isinstance(utilisation, Mapping) else None
    is_published = utilisation == "published"
    flops = (
        None
        if utilisation is None
        else {}
        if sites is not None or is_published
        else {"utilisation": utilisation}
    )
    options = {name: words.pop(name) for name in _OF_SETTING if name in words}
    experiment, bandwidth, remarks = _experiment_of(path, point, flops, **words)
    is_given = (
        experiment.compute.flops is not None and "utilisation" in experiment.compute.flops.model_fields_set
    )
    request = Request.of(
        experiment,
        sequence,
        None if tokens is None else parse_tokens(tokens),
        known=known,
        wan_bandwidth=bandwidth,
        is_file=path is not None,
        remarks=remarks,
        dollars=None if budget is None else parse_dollars(budget),
        dollars_per_hour=price,
        utilisation=sites,
        is_utilisation_given=is_given and not (path is not None and path.is_dir()),
        **options,
    )
    return replace(request, setting=request.setting.at_published_shares()) if is_published else request


def _experiment_of(
    path: Path | None,
    point: Mapping[str, str],
    flops: Mapping[str, Any] | None,
    *,
    model: str | None = None,
    parameters: str | None = None,
    shapes: Path | None = None,
    strategies: Sequence[str] = (),
    topology: str | None = None,
    workers: int | None = None,
    batch_size: int | None = None,
    device: str | None = None,
    protocol: str | None = None,
    overrides: Sequence[str] = (),
    trust: bool = False,
) -> tuple[Experiment, str | None, tuple[str, ...]]:
    """Experiment from a file, a run's folder or flags; the bandwidth of links between sites; and remarks.

    Flags come first, then `overrides`, then the swept `point`, so that the later change values of the earlier.
    """
    sets, swept, bandwidth = list[str](), list[str](), None
    texts = [(sets, text) for text in overrides]
    texts += [(swept, f"{key}={value}") for key, value in point.items()]
    for own, text in texts:
        key, _, value = text.partition("=")
        if not key.strip().startswith("wan."):
            own.append(text)
        elif key.strip() == WAN_BANDWIDTH:
            bandwidth = value
        else:
            raise unknown_name("key of links between sites", key.strip(), [WAN_BANDWIDTH])
    if topology is not None and Path(topology).is_file():
        topology = str(Path(topology).resolve())
    payload = _payload(model, parameters, shapes)
    is_run = path is not None and path.is_dir()
    if path is None:
        document = _of_words(model or (payload and _PAYLOAD) or point.get("model.name"), strategies, topology)
        folder, name, batch_size = Path(), "plan", batch_size or _BATCH_SIZE
    else:
        path = path / "experiment.yaml" if is_run else path  # of a run, with its measured times
        document, folder, name = load_document(path), path.parent, path.stem
    compute = _mapping(document.data, "compute")
    charges_updates = is_run and "updates" in compute
    flags: dict[str, Any] = {"workers.count": workers, "batch_size": batch_size}
    if payload is not None:
        flags["model"] = {"name": _PAYLOAD, "shapes": payload}
    elif model is not None:  # in place of the file's, whose options are its own
        flags["model"] = {"name": model}
    if flops is not None or device is not None:
        named = {**_mapping(compute, "flops"), **(flops or {})} | (
            {} if device is None else {"device": device}
        )
        kept = {key: value for key, value in compute.items() if key not in ("fixed", "measured")}
        flags["compute"] = {**kept, "flops": named}  # other keys, such as jitter and coding, stay
    data = document.data if isinstance(document.data, dict) else {}
    changes = {
        key: value
        for key, value in flags.items()
        # A list or a number has no key to change: the schema names its line.
        if value is not None
        and ("." not in key or isinstance(data.get(key.split(".")[0]), dict | str | None))
    }
    document = apply_values(document, changes, "plan", folder)
    replaced = {"topology": topology, "protocol": protocol}
    given = {key: value for key, value in replaced.items() if value is not None}
    sets += ["compute.updates=free"] if charges_updates else []
    settled = apply_overrides(document, sets, given, None, folder, swept=swept)
    if path is None:
        data = settled.data  # type: ignore[assignment]
        data.setdefault("compute", {"flops": {}})
        if "count" not in _mapping(data, "workers"):
            network = opened_topology(settled, data["topology"], folder)
            assert network is not None
            data["workers"] = {**_mapping(data, "workers"), "count": len(network.rank_hosts)}
    code = code_folder_of(folder) if is_run and (trust or is_own(folder)) else None
    experiment = Experiment.from_document(settled, folder, name, code)
    if is_run and not trust:
        experiment.require_trusted(folder)
    if path is not None and strategies:
        experiment = experiment.only(*strategies)
    remark = "optimizers' steps are not charged, which the run did"
    return experiment, bandwidth, (remark,) if charges_updates else ()


def _payload(model: str | None, parameters: str | None, shapes: Path | None) -> list[Any] | None:
    """Shapes of a model without a name; None for one with a name."""
    given_ways = {"--model": model, "--parameters": parameters, "--shapes": shapes}
    if len(both := [flag for flag, value in given_ways.items() if value is not None]) > 1:
        raise InputError(f"plan: {' and '.join(both)} exclude each other: leave one of them out")
    if parameters is not None:
        with locate_errors("--parameters"):
            return [[parse_parameters(parameters)]]
    return None if shapes is None else read_shapes(shapes)


def _mapping(data: object, key: str) -> dict[str, Any]:
    """Mapping under a key of a document; empty where there is none."""
    found = data.get(key) if isinstance(data, dict) else None
    return found if isinstance(found, dict) else {}
