"""`check`: a strategy held to the laws that every shipped one keeps.

    report = check(MyStrategy, {"H": 5})
    print(report)

A small model trains for some steps on a few workers of one local network: once plainly, and once for each law
with one thing changed. `netgym check module:Class` prints the same rows, and the conformance tests call `find_faults`.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import json
import random
import tempfile
import warnings
from dataclasses import dataclass, field
from functools import cached_property
from operator import itemgetter
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from exogym_core.cost.compute import Coding
from exogym_core.data.samples import digest_of
from exogym_core.plain import decode, encode, packed
from exogym_core.run.loop import set_up, take_step
from exogym_core.run.trainer import Trainer
from exogym_core.strategy import STRATEGIES, StepContext, Strategy, build_strategy
from exogym_core.strategy.options import accepted_arguments
from exogym_core.strategy.parts.codecs import coding_report
from exogym_core.testing.bits import first_difference
from exogym_core.workers.run import run_ranks
from netgym.tasks import build_model, load_callable
from netsim import Topology
from netsim.collectives.schedules.algorithms import ALGORITHMS
from netsim.errors import InputError, NetsimError
from netsim.units import format_count

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from exogym_core.communicator.base import Communicator
    from exogym_core.results.fit_result import FitResult
    from exogym_core.workers.run import RunResult

__all__ = ["LAWS", "CheckReport", "CheckRow", "Workload", "check", "checking", "find_faults"]

_SHORT_ROUND = 6  # local steps of a round where the user gives no H: the default would outlast the check
_MOST_AWAY = 2.0  # times the ranks' way from the start; shipped strategies have at most 0.51
_TOLERANCE = 1e-4  # relative, between simulated and real sockets: sums are formed in another order
_ON_CLOCK = "values off the clock cost nothing: exchange on the clock what reaches parameters"
_COUNTS = ("bytes_sent", "payload_bytes")
_PROCESSES = {"kind": "processes", "processes": 2}
# No law depends on them, and to find the fastest takes longer than such a short training.
_ALGORITHMS = {op: next(iter(names)) for op, names in ALGORITHMS.items()}


@dataclass(frozen=True)
class Workload:
    """A model and the batches that workers train it on.

    Attributes:
        model: `model(batch)` returns the mean loss of a batch.
        batches: by step, then by worker.
        seed: of the run.
    """

    model: nn.Module
    batches: Sequence[Sequence[Any]]
    seed: int = 11

    @classmethod
    def small(cls, num_workers: int, num_steps: int) -> Workload:
        """A perceptron with hidden layers, in fp32, and four labelled samples a batch."""
        generator = torch.Generator().manual_seed(1)

        def batch() -> tuple[Tensor, Tensor]:
            inputs = torch.randn(4, 8, generator=generator)
            return inputs, inputs[:, :4].argmax(dim=1)

        model = build_model("mlp", inputs=8, hidden=[16, 12], classes=4, seed=0)
        return cls(model, [[batch() for _ in range(num_workers)] for _ in range(num_steps)])


@dataclass
class _Trace:
    """The course of one rank: loss and payload of each step, and the model at the end."""

    losses: list[float] = field(default_factory=list)
    step_bytes: list[int] = field(default_factory=list)  # as the strategy reports them
    payload_bytes: int = 0  # as the communicator counted them, when the last step was done
    off_clock: bool = False  # the strategy called off the clock
    warmup_steps: int = 0
    draws: list[str] = field(default_factory=list)  # where a global generator moved
    loaded_step: int | None = None  # the step count of a strategy that has loaded its state
    not_loaded: list[str] = field(default_factory=list)  # its attributes that are others after that
    coding: str | None = None
    judged: dict[int, str] = field(default_factory=dict)  # digest of each version of the judged model
    model: Tensor = field(default_factory=lambda: torch.empty(0))


@dataclass(frozen=True)
class CheckRow:
    """Result of a law: "passed", "failed" or "skipped", and a line with the difference and the remedy."""

    law: str
    about: str
    status: str
    line: str = ""


@dataclass(frozen=True)
class CheckReport:
    """The rows of a check.

    Attributes:
        strategy: name of the class.
        options: with which it was made.
        rows: a law each.
    """

    strategy: str
    options: Mapping[str, Any]
    rows: Sequence[CheckRow]

    @property
    def passed(self) -> bool:
        """True if no law is broken."""
        return all(row.status != "failed" for row in self.rows)

    def __str__(self) -> str:
        return "\n".join(f"{row.status:<8} {row.law:<11} {row.line or row.about}" for row in self.rows)


def check(
    strategy: str | type[Strategy] | Strategy | Callable[..., Strategy],
    options: Mapping[str, Any] | None = None,
    *,
    num_workers: int = 4,
    num_steps: int = 20,
    progress: Callable[[str, int, int], None] = lambda law, position, count: None,
) -> CheckReport:
    """Test a strategy against the laws that shipped strategies keep.

    Args:
        strategy: a class, a factory, an instance that is not set up, `module:Class`, or the name of a shipped one.
        options: the constructor's; where it takes `H` and none is given, H is 6, so that there are rounds.
        num_workers: workers that train; servers come on top.
        num_steps: steps that each does.
        progress: called before each law that is tried with its name, its position from 1, and how many there are.

    Raises:
        InputError: the strategy cannot be made.

    >>> check("AllReduce", {"bucket_bytes": 512}, num_steps=3).passed
    True
    """
    *_, report = checking(strategy, options, num_workers=num_workers, num_steps=num_steps, progress=progress)
    return report


def checking(
    strategy: str | type[Strategy] | Strategy | Callable[..., Strategy],
    options: Mapping[str, Any] | None,
    *,
    num_workers: int,
    num_steps: int,
    progress: Callable[[str, int, int], None],
) -> Iterator[CheckReport]:
    """As `check`; yields the report so far after each law."""
    made, given = _made(strategy, dict(options or {}))
    trials = _Trials(made, Workload.small(num_workers, num_steps))
    rows: list[CheckRow] = []
    failed: set[str] = set()
    for position, (name, law) in enumerate(LAWS.items(), start=1):
        blocked = [earlier for earlier in law.after if earlier in failed]
        if blocked:
            failed.add(name)  # unknown: what builds on it is unknown too
            rows.append(CheckRow(name, law.about, "skipped", f"not tried: fix {blocked[0]!r} first"))
        else:
            progress(name, position, len(LAWS))
            reason = law.skipped(made)
            fault = None if reason else trials.fault_in(name)
            if fault is not None:
                failed.add(name)
            status = "skipped" if reason else "passed" if fault is None else "failed"
            rows.append(CheckRow(name, law.about, status, reason or fault or ""))
        yield CheckReport(type(made).__name__, given, tuple(rows))


def find_faults(strategy: Strategy, problem: Workload, laws: Sequence[str]) -> list[str]:
    """The lines of those of the named `laws` that a strategy breaks on this problem, without a topology."""
    trials = _Trials(strategy, problem, has_network=False)
    return [fault for law in laws if (fault := trials.fault_in(law)) is not None]


def _made(strategy: Any, options: dict[str, Any]) -> tuple[Strategy, dict[str, Any]]:
    """The strategy, and the options that it was made with."""
    if isinstance(strategy, Strategy):
        if options:
            raise InputError("check: options are given with an instance; give its class instead")
        return strategy, {}
    factory = strategy
    if isinstance(strategy, str):
        if ":" in strategy:
            factory = load_callable(strategy, "strategy")
        else:
            factory = STRATEGIES.get(strategy, lambda **given: build_strategy(strategy, **given))
    called = strategy if isinstance(strategy, str) else getattr(factory, "__qualname__", repr(factory))
    try:
        parameters = list(inspect.signature(factory).parameters.values())
    except (TypeError, ValueError):  # written in C
        parameters = []
    names = [each.name for each in parameters]
    if isinstance(factory, type) and issubclass(factory, Strategy):
        names = accepted_arguments(factory)
    rounds = {"H", "local_steps", "num_inner_steps", "sync_every"}
    if "H" in names and not rounds & options.keys():
        options = {"H": _SHORT_ROUND, **options}
    missing = [
        each.name
        for each in parameters
        if each.default is each.empty
        and each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)
        and each.name not in options
    ]
    if missing:
        raise InputError(
            f"check: {called}: needs {', '.join(missing)}: give it in options, or a default in its __init__"
        )
    made = factory(**options)
    if not isinstance(made, Strategy):
        raise InputError(
            f"check: {called}: returned {type(made).__name__}, not an exogym_core.Strategy; name a class that derives "
            "from Strategy, or a function that returns one"
        )
    return made, options


class _Trials:
    """Runs of one strategy on one problem, each with one thing changed.

    Args:
        strategy: not set up; every rank gets a copy.
        problem: to train on.
        has_network: ranks are hosts of a local network, which counts what it carries; else communication is free.
    """

    def __init__(self, strategy: Strategy, problem: Workload, *, has_network: bool = True) -> None:
        self.strategy, self.problem = strategy, problem
        self.num_workers = len(problem.batches[0])
        self.num_ranks = self.num_workers + strategy.num_servers
        self.topology = None
        if has_network:
            lan = {"hosts": self.num_ranks, "nic": "1 Gbit/s", "latency": "100 us"}
            self.topology = Topology.from_mapping({"regions": {"lan": lan}})

    def fault_in(self, law: str) -> str | None:
        """Line on how the strategy breaks that law; None if it keeps it."""
        try:
            return LAWS[law].fault(self)
        except NetsimError as error:
            return str(error).partition("\n")[0]

    @cached_property
    def plain(self) -> RunResult[_Trace]:
        """The run that the others are compared with."""
        return self.run()

    @cached_property
    def fitted(self) -> FitResult:
        """The result of `fit`."""
        return self.fit()

    def run(
        self,
        *,
        stop: int | None = None,
        coding: Coding | None = None,
        withholds: bool = False,
        **options: Any,
    ) -> RunResult[_Trace]:
        """Train; after `stop` steps each worker continues with a fresh strategy that has loaded the state.

        With `withholds`, a call off the clock reaches no other rank.
        """
        given, problem = self.strategy, self.problem

        def reloaded(
            saved: Strategy, model: nn.Module, comm: Communicator, trace: _Trace
        ) -> tuple[Strategy, nn.Module]:
            """A fresh strategy and model with the state of these, encoded and decoded as in a checkpoint."""
            tensors: dict[str, Tensor] = {}
            plain = json.dumps(encode(saved.state_dict(), tensors, f"{type(saved).__name__}.state_dict()"))
            tensors = {name: tensor.clone() for name, tensor in tensors.items()}
            strategy, replica = copy.deepcopy((given, problem.model))
            saved.close()
            set_up(strategy, replica, comm, len(problem.batches), problem.seed, None)
            replica.load_state_dict(model.state_dict())
            strategy.load_state_dict(decode(json.loads(plain), tensors))
            before, after = vars(saved), vars(strategy)
            own = before.keys() - vars(Strategy()).keys() - set(Strategy.__annotations__)
            trace.loaded_step = strategy.local_step
            trace.not_loaded = sorted(
                name for name in own if _packed(before[name]) != _packed(after.get(name))
            )
            return strategy, replica

        def body(comm: Communicator) -> _Trace:
            trace = _Trace()
            comm = cast("Communicator", _Withheld(comm)) if withholds else comm
            strategy, model = copy.deepcopy((given, problem.model))
            with _watched(trace, "setup()"):
                set_up(strategy, model, comm, len(problem.batches), problem.seed, coding)
            if comm.rank >= strategy.num_nodes:
                strategy.serve(lambda steps: None)
                trace.model = torch.cat([v.reshape(-1) for v in (strategy.judged_state() or {}).values()])
                return trace
            for number, step in enumerate(problem.batches):
                if number == stop:
                    strategy, model = reloaded(strategy, model, comm, trace)
                comm.advance(0.01 + 0.002 * comm.rank)
                _train(strategy, model, step[comm.rank], number, trace)
                if strategy.judged == "outer" and (state := strategy.judged_state()) is not None:
                    trace.judged[strategy.judged_version] = digest_of([state])
            trace.payload_bytes = comm.traffic.payload_bytes
            trace.off_clock, trace.warmup_steps = comm.state.num_off_clock > 0, strategy.warmup_steps
            strategy.finish()
            trace.coding = coding_report(comm.traffic, strategy.trainable)
            strategy.close()
            trace.model = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
            return trace

        topology = None if options.get("transport") == "gloo" else self.topology
        return run_ranks(body, self.num_ranks, topology, **options)

    def fit(self, **options: Any) -> FitResult:
        """Train as `fit` does, with evaluations at every step."""
        data: Any = [batch for step in self.problem.batches for batch in step]  # whole batches as samples
        trainer = Trainer(self.problem.model, data, data, device="cpu")
        compute = {"fixed": "10 ms", "jitter": 0.2} if self.topology is not None else None
        settled: dict[str, Any] = {
            "num_nodes": self.num_workers,
            "max_steps": len(self.problem.batches),
            "batch_size": 1,
            "shuffle": False,
            "val_size": 1,
            "val_interval": 1,
            "dataloader_kwargs": {"collate_fn": itemgetter(0)},
            "seed": self.problem.seed,
            "topology": self.topology,
            "collectives": None if self.topology is None else _ALGORITHMS,
            "compute": compute,
            "workers": "threads",
            "servers": self.strategy.num_servers or None,
            "progress": False,
        }
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # laws say it
            trainer.fit(strategy=copy.deepcopy(self.strategy), **{**settled, **options})
        assert trainer.result is not None
        return trainer.result


# --- one rank ----------------------------------------------------------------------------------------------


def _train(strategy: Strategy, model: nn.Module, batch: Any, number: int, trace: _Trace) -> None:
    where = f"step {number + 1}"

    def gradients(batch: Any, context: StepContext) -> float:
        with _watched(trace, where):
            strategy.before_backward(last_micro_batch=True)
        loss = model(batch)
        loss.backward()
        return float(loss.detach())

    with contextlib.ExitStack() as watched:

        def begin_exchange(loss: float) -> None:
            watched.enter_context(_watched(trace, where))

        loss = take_step(strategy, gradients, batch, StepContext(number, samples=1), begin_exchange)
    trace.losses.append(loss)
    trace.step_bytes.append(strategy.nbytes)


def _packed(value: object) -> bytes:
    try:
        return packed(value)
    except (InputError, RecursionError):  # an object, such as an optimizer
        return b""


class _Withheld:
    """A rank's communicator whose calls off the clock reach this rank alone."""

    def __init__(self, comm: Communicator) -> None:
        self._comm = self._used = comm

    def __getattr__(self, name: str) -> Any:
        return getattr(self._used, name)

    @contextlib.contextmanager
    def off_clock(self) -> Iterator[None]:
        self._used = self._comm.group([self._comm.rank])
        try:
            with self._used.off_clock():
                yield
        finally:
            self._used = self._comm


@contextlib.contextmanager
def _watched(trace: _Trace, where: str) -> Iterator[None]:
    """Note in `trace.draws` which global generators move inside."""
    before = _generators()
    yield
    after = _generators()
    trace.draws += [f"{name} in {where}" for name, state in before.items() if state != after[name]]


def _generators() -> dict[str, Any]:
    numpy = np.random.get_state(legacy=False)["state"]
    return {
        "torch's": torch.get_rng_state().numpy().tobytes(),
        "numpy's": (numpy["key"].tobytes(), numpy["pos"]),
        "random's": random.getstate(),
    }


# --- the laws ----------------------------------------------------------------------------------------------


def _runs(trials: _Trials) -> str | None:
    traces = trials.plain.results[: trials.num_workers]
    for rank, trace in enumerate(traces):
        bad = next((n for n, loss in enumerate(trace.losses, 1) if not np.isfinite(loss)), None)
        if bad is not None:
            return f"the loss of rank {rank} is not finite at step {bad}: lower lr, or set max_norm"
    start = torch.cat([p.detach().reshape(-1) for p in trials.problem.model.parameters()])
    if all(torch.equal(trace.model, start) for trace in traces):
        steps = format_count(len(trials.problem.batches), "step")
        return f"no parameter changed in {steps}: call self.optimizer_step() in step(), or leave step() out"
    payload = sum(traffic.payload_bytes for traffic in trials.plain.traffic)
    silent = trials.num_ranks > 1 and not payload
    if uncalled := _uncalled(trials, only_own=not silent):
        nothing = "nothing was sent: " if silent else ""
        return f"{nothing}step() never calls self.{uncalled[0]}(); call it there, or leave step() out"
    if silent:
        steps, period = format_count(len(trials.problem.batches), "step"), trials.strategy.round_steps
        declared = f", and round_steps is {period}" if period is not None and period > 1 else ""
        return f"nothing was sent in {steps}{declared}: shorten the round (H=5), or raise --steps"
    return None


def _uncalled(trials: _Trials, *, only_own: bool) -> list[str]:
    """Exchanges that the strategy's class defines and its step() does not call.

    Args:
        trials: of the strategy.
        only_own: leave out exchanges that are inherited and replaced by a `step`; if none is left, nothing runs.
    """
    kind, called = type(trials.strategy), set[str]()
    definer = {
        name: next(place for place, each in enumerate(kind.__mro__) if name in vars(each))
        for name in ("step", "before_update", "communicate")
    }
    has_step = kind.step not in (Strategy.step, Strategy.take_step)
    own = [
        name
        for name in ("before_update", "communicate")
        if getattr(kind, name) is not getattr(Strategy, name)
        and (not only_own or (has_step and definer[name] <= definer["step"]))
    ]

    def noting(name: str) -> Callable[..., Any]:
        def call(strategy: Strategy, *arguments: Any) -> Any:
            called.add(name)
            return getattr(kind, name)(strategy, *arguments)

        return call

    if own:
        noted: Any = copy.deepcopy(trials.strategy)
        noted.__class__ = type(kind.__name__, (kind,), {name: noting(name) for name in own})
        _Trials(noted, trials.problem, has_network=trials.topology is not None).run()
    return [name for name in own if name not in called]


def _agrees(trials: _Trials) -> str | None:
    result = trials.fitted
    if trials.strategy.judged not in ("outer", "server"):
        return None
    where = f"{type(trials.strategy).__name__}.judged_state()"
    first, *others = trials.plain.results[: trials.num_workers]
    for rank, trace in enumerate(others, start=1):  # of outer models; a server's have no versions here
        for version, digest in trace.judged.items():
            if first.judged.get(version, digest) != digest:
                return (
                    f"{where} of version {version} is another on rank {rank} than on rank 0: return what all ranks "
                    "have after a round, or write judged = 'own'"
                )
    start = dict(trials.problem.model.named_parameters())
    ranks = [_flat(state, start) for state in result.rank_states]
    judged, begin, mean = _flat(result.judged_state, start), _flat(start, start), torch.stack(ranks).mean(0)
    moved = max(float((rank - begin).norm()) for rank in ranks)
    if moved and torch.equal(judged, begin):
        return f"{where} is still the model of the start after {len(trials.problem.batches)} steps: return the newest"
    # What rounds lead to lies among the models that they average, give or take momentum.
    if (away := float((judged - mean).norm())) > _MOST_AWAY * moved:
        return (
            f"{where} is {away:.2g} away from the mean of the ranks' models, which moved by {moved:.2g} at most: "
            "return the parameters that rounds lead to"
        )
    return None


def _pays(trials: _Trials) -> str | None:
    if not any(trace.off_clock for trace in trials.plain.results):
        return None
    try:
        withheld = trials.run(withholds=True)
    except NetsimError as error:
        return (
            f"cannot run without what comes off the clock ({str(error).partition(chr(10))[0]}): {_ON_CLOCK}"
        )
    return _difference(trials.plain, withheld, "the run that withholds what comes off the clock", _ON_CLOCK)


def _keeps_its_round(trials: _Trials) -> str | None:
    made = trials.strategy
    period, traces = made.round_steps, trials.plain.results[: trials.num_workers]
    if period is None or made.sends_by_value or not made.is_synchronous:
        return None
    warmup = max(trace.warmup_steps for trace in traces)
    steps = list(zip(*(trace.step_bytes[warmup:] for trace in traces), strict=False))
    for step, (ones, later) in enumerate(zip(steps, steps[period:], strict=False), warmup + 1):
        if sorted(ones) != sorted(later):  # partners are drawn: of three ranks another has none in each round
            rank = next(rank for rank, sent in enumerate(ones) if sent != later[rank])
            return (
                f"round_steps is {period}, and rank {rank} sends {ones[rank]} bytes in step {step} and "
                f"{later[rank]} in step {step + period}: declare the period of what is sent, or leave round_steps out"
            )
    return None


def _flat(state: Mapping[str, Tensor], names: Iterable[str]) -> Tensor:
    return torch.cat([state[name].detach().double().reshape(-1) for name in names])


def _draws_nothing(trials: _Trials) -> str | None:
    for rank, trace in enumerate(trials.plain.results):
        if trace.draws:
            return (
                f"{trace.draws[0]} on rank {rank} draws from the global generator; draw from "
                "shared_generator(self.seed, name, self.local_step) or from a torch.Generator of its own"
            )
    return None


def _counts(trials: _Trials) -> str | None:
    run = trials.plain
    for rank, trace in enumerate(run.results[: trials.num_workers]):
        reported = sum(trace.step_bytes)
        if reported != trace.payload_bytes:
            return (
                f"steps of rank {rank} report {reported} payload bytes, and {trace.payload_bytes} were sent: call "
                "super().step() last, after all communication, and leave nbytes and comm.traffic alone"
            )
    if trials.topology is None:
        return None
    for rank, traffic in enumerate(run.traffic):
        host = trials.topology.hosts[rank].name
        left = sum(
            carried
            for link, carried in zip(trials.topology.links, run.link_bytes, strict=True)
            if link.source == host
        )
        # Bytes in flight when a run without rounds ends have left their rank, and not crossed its link.
        lost = traffic.bytes_sent - round(left)
        if lost if trials.strategy.is_synchronous else lost < 0:
            return (
                f"bytes_sent of rank {rank} is {traffic.bytes_sent}, and {left:.0f} bytes left it: "
                "leave comm.traffic to the communicator"
            )
    return None


def _comes_back(trials: _Trials) -> str | None:
    num_steps, where = len(trials.problem.batches), type(trials.strategy).__name__
    for stop in sorted({1, num_steps // 2, num_steps - 2} & set(range(1, num_steps))):
        run = trials.run(stop=stop)
        for trace in run.results[: trials.num_workers]:
            if trace.loaded_step != stop:
                return (
                    f"local_step is {trace.loaded_step} after load_state_dict() and was {stop}: "
                    f"call super().load_state_dict(state) in {where}"
                )
        reloaded = f"the run that saved and loaded after step {stop}"
        lost = ", ".join(repr(name) for name in run.results[0].not_loaded)
        remedy = f"have {where}.state_dict() return, and load_state_dict() restore, all that step() changes"
        if lost:
            remedy = f"declare what step() reads of {lost} in {where}: state = State({lost})"
        # Messages in flight are sent again by the rank that loads them: such bytes count twice here.
        if fault := _difference(trials.plain, run, reloaded, remedy, counts=()):
            return fault
    return None


def _runs_on_sockets(trials: _Trials) -> str | None:
    return _difference(
        trials.plain,
        trials.run(transport="gloo"),
        "the run over gloo",
        "let no value depend on comm.transport, comm.now() or the order of arrival",
        tolerance=_TOLERANCE,
        # The fastest algorithm, and so the number of times that a value is sent, depends on the network.
        counts=("payload_bytes",) if trials.topology is not None else _COUNTS,
    )


def _resumes(trials: _Trials) -> str | None:
    every = len(trials.problem.batches) // 2 + 1  # once
    where = f"the run resumed from its checkpoint of step {every}"
    with tempfile.TemporaryDirectory() as folder:
        kept = {"checkpoint_interval": every, "workers": _PROCESSES}
        begun = trials.fit(save_dir=folder, **kept)
        resumed = trials.fit(resume_from=begun.checkpoint_folder, **kept)
    remedy = "keep all that step() reads in self, and in state_dict(): class attributes and globals are lost"
    if found := first_difference(trials.fitted, resumed):
        return f"{found} in {where}: {remedy}"
    return None


def _charges(trials: _Trials) -> str | None:
    run = trials.run(coding=Coding.model_validate("1 GB/s"))
    for rank, trace in enumerate(run.results[: trials.num_workers]):
        if trace.coding == "not charged":
            return (
                f"rank {rank} sends whole numbers or encoded values whose encoding takes no time: encode by "
                "self.charged(codec), or call self.charge(NAME, 'encode', num_values) (an own setup() takes "
                "coding=None and passes it to super().setup()); else results say 'coding not charged'"
            )
    return None


def _difference(
    plain: RunResult[_Trace],
    other: RunResult[_Trace],
    where: str,
    remedy: str,
    *,
    tolerance: float = 0.0,
    counts: Sequence[str] = _COUNTS,
) -> str | None:
    """The first difference of two runs."""
    for rank, (one, two) in enumerate(zip(plain.results, other.results, strict=True)):
        for number, (loss, again) in enumerate(zip(one.losses, two.losses, strict=True), start=1):
            if abs(loss - again) > tolerance * max(abs(loss), abs(again)):
                return f"the loss of rank {rank} at step {number} is {loss} and {again} in {where}: {remedy}"
        far = (one.model - two.model).abs() > tolerance * (1 + one.model.abs())
        if bool(far.any()):
            distance = float((one.model - two.model).abs().max())
            return f"the model of rank {rank} ends {distance:.2g} away in {where}: {remedy}"
    for rank, (sent, again_sent) in enumerate(zip(plain.traffic, other.traffic, strict=True)):
        for name in counts:
            if (count := getattr(sent, name)) != (again := getattr(again_sent, name)):
                return f"{name} of rank {rank} is {count} and {again} in {where}: {remedy}"
    if counts and not tolerance and plain.virtual_seconds != other.virtual_seconds:
        return f"it takes {plain.virtual_seconds} virtual seconds and {other.virtual_seconds} in {where}: {remedy}"
    return None


@dataclass(frozen=True)
class _Law:
    about: str
    fault: Callable[[_Trials], str | None]
    after: tuple[str, ...] = ("runs",)
    skipped: Callable[[Strategy], str | None] = lambda strategy: None


#: Name -> law, in the order in which they are tried.
LAWS: dict[str, _Law] = {
    "runs": _Law("trains and communicates", _runs, after=()),
    "judged": _Law("the judged model is the one that `judged` claims", _agrees),
    "bytes": _Law("payload_bytes and bytes_sent are what was sent", _counts),
    "round": _Law("sends the same in each round, where it declares round_steps", _keeps_its_round),
    "generator": _Law("draws nothing from the global generators", _draws_nothing),
    "twice": _Law(
        "gives the same bits twice",
        lambda trials: _difference(
            trials.plain,
            trials.run(),
            "the second run",
            "take nothing from clocks, os.urandom, id() or the order of a set, nor keep anything in class or module",
        ),
    ),
    "clock": _Law("lets no value that comes off the clock reach parameters", _pays, ("runs", "twice")),
    "state": _Law(
        "continues from a saved and loaded state with the same bits", _comes_back, ("runs", "twice")
    ),
    "processes": _Law(
        "gives the same bits in threads and in processes",
        lambda trials: _difference(
            trials.plain,
            trials.run(workers=_PROCESSES),
            "the run in processes",
            "keep what a rank has in self: ranks in processes share no class attributes, globals or closures",
        ),
        ("runs", "twice"),
    ),
    "gloo": _Law(
        "gives the same losses over real sockets, to 1e-4",
        _runs_on_sockets,
        ("runs", "twice", "processes"),
        lambda strategy: (
            None
            if strategy.is_synchronous
            else "not tried: its ranks meet in the order of real time, which no two runs over sockets share"
        ),
    ),
    "resume": _Law(
        "continues from a checkpoint with the same bits",
        _resumes,
        ("runs", "judged", "twice", "state", "processes"),
    ),
    "coding": _Law("charges the time of encoding, or encodes nothing", _charges),
}
