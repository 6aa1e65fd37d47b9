"""Recording of a training, and the same training on another network: its requests are replayed, and nothing is trained.

    result = trainer.fit(topology="lan", ...).fit_result
    other = result.retime(topology="home-office")     # the result of training there, to the bit

Losses are those of the recording, times and bytes are those of the other network. This holds where no rank has read a
figure of the network: a communicator notes what its rank reads, see `CallState.reads`.
"""

from __future__ import annotations

import zlib
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError
from safetensors.torch import load

from exogym_core.config import OPTIONS, RunConfig
from exogym_core.cost.compute import Compute
from exogym_core.events import from_record, to_record
from exogym_core.names import visible
from exogym_core.results.run_folder import RunFolder
from exogym_core.run.loop import RankOutcome
from exogym_core.run.recording import Recording, without_network
from exogym_core.workers.spec import WorkerSpec
from exogym_core.workers.streams import ReplayHost, Streams
from netsim.errors import InputError, unknown_name
from netsim.files.plain_files import read_bytes

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from exogym_core.events import Finding
    from exogym_core.results.fit_result import FitResult
    from exogym_core.run.program import Program
    from exogym_core.run.trainer import Trainer

__all__ = ["RETIMED", "RecordedEvaluator", "RecordedTraining", "TrainAgainError"]

#: Options of `fit` that change times and bytes, and no loss.
RETIMED = tuple(name for name, each in OPTIONS.items() if each.is_of_network)

_OTHERS = ("target_loss", "out", "trace", "on_event", "progress")  # that a retimed run may have, too
_DAMAGES = (ValueError, LookupError, TypeError, OSError, EOFError, zlib.error, SafetensorError)
_READS = {
    "clock": "its ranks read the clock, or wait for what comes first",
    "traffic": "its ranks read the bytes that they have sent",
}


class TrainAgainError(InputError):
    """A recording cannot be timed on this network: its losses, or its work, would be others."""


@dataclass(eq=False, repr=False)
class RecordedTraining:
    """A training that can be timed on other networks.

    Attributes:
        streams: requests of its ranks.
        findings: of its evaluator, in order.
        outcomes: of its ranks.
        mean_state, judged_state: the models at its end.
        asked, compute: time of computing as it was asked for, and as it was settled.
        step_flops: operations of a step; 0 where they were not needed.
        minibatch_size: samples of a forward pass.
        averaging_algorithm: of encoded means, if its ranks have read it; else None.
        first_rounds: requests by which algorithms are chosen; None: to be recorded.
        trainer, options: model, data and settings; None for one of a run's folder.
    """

    streams: Streams
    findings: list[Finding]
    outcomes: list[RankOutcome]
    mean_state: dict[str, Any]
    judged_state: dict[str, Any]
    asked: Compute | None
    compute: Compute | None
    step_flops: float
    minibatch_size: int
    averaging_algorithm: str | None
    first_rounds: Recording | None = None
    trainer: Trainer | None = None
    options: RunConfig | None = None
    _content: bytes = b""

    @classmethod
    def of(
        cls,
        program: Program,
        streams: Streams,
        findings: list[Finding],
        outcomes: Sequence[RankOutcome],
        result: FitResult,
    ) -> RecordedTraining:
        """Recording of a run that has ended."""
        request, reads = program.request, set().union(*(outcome.reads for outcome in outcomes))
        if request.topology is None:
            streams.refuse("it had no topology, so its computing was not timed")
        if request.batch_by_speed or request.strategy.clients.balance:
            streams.refuse("its workers' shares of the work go by the speeds of their hosts")
        for name, reason in _READS.items():
            if name in reads:
                streams.refuse(reason)
        streams.close()
        averaging = None
        if "averaging_algorithm" in reads:
            averaging = _averaging_algorithm(program.collectives)
        by_flops = program.compute is not None and program.compute.flops is not None
        return cls(
            streams,
            findings,
            list(outcomes),
            result.mean_state,
            result.judged_state,
            request.compute,
            program.compute,
            program.step_flops if by_flops else 0.0,
            request.minibatch_size,
            averaging,
            program.first_rounds,
        )

    def __repr__(self) -> str:
        return f"RecordedTraining(refused={self.streams.refused!r})"

    def __deepcopy__(self, memo: object) -> RecordedTraining:
        return self  # nothing changes it

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()  # data and model need not be such that they can be pickled

    def to_bytes(self) -> bytes:
        """Content of the recording's file in a run's folder, without models."""
        if not self._content:
            mappings = [None if each is None else each.model_dump() for each in (self.asked, self.compute)]
            outcomes = [
                [each.max_steps, list(each.remarks), each.coding, each.options] for each in self.outcomes
            ]
            about: dict[str, Any] = {
                "findings": list(map(to_record, self.findings)),
                "outcomes": outcomes,
                "compute": mappings,
            }
            for name in ("step_flops", "minibatch_size", "averaging_algorithm"):
                about[name] = getattr(self, name)
            rounds = self.first_rounds
            about["rounds"] = None if rounds is None else rounds.to_plain()
            self._content = self.streams.to_bytes(about)
        return self._content

    @classmethod
    def of_run(cls, folder: Path, name: str) -> RecordedTraining | None:
        """Recording of a finished run in its folder, `name` as in the names of files; None: it has none.

        Raises:
            InputError: a file is damaged.
        """
        path, model = (RunFolder(folder).place(kind, name) for kind in ("requests", "model"))
        if not (path.is_file() and model.is_file()):
            return None
        try:
            content = read_bytes(path)
            streams, about = Streams.from_bytes(content)
            asked, compute = (None if each is None else Compute.parse(each) for each in about["compute"])
            rounds = about.get("rounds")  # earlier files have them by another name, in another form
            return cls(
                streams,
                list(map(from_record, about["findings"])),
                [
                    RankOutcome({}, steps, tuple(remarks), coding=coding, options=options)
                    for steps, remarks, coding, options in about["outcomes"]
                ],
                {},
                load(read_bytes(model)),
                asked,
                compute,
                about["step_flops"],
                about["minibatch_size"],
                about["averaging_algorithm"],
                None if rounds is None else Recording.of_plain(rounds),
                _content=content,
            )
        except _DAMAGES as error:
            raise InputError(f"{visible(path)}: is damaged: {visible(error)}; train again") from None

    def retime(self, **changes: Any) -> FitResult:
        """The result of the same training with other options of the network, see `FitResult.retime`."""
        assert self.trainer is not None
        assert self.options is not None
        for name in changes:
            if name not in (*RETIMED, *_OTHERS):
                raise unknown_name("argument of retime", name, (*RETIMED, *_OTHERS))
        kept = dict(vars(self.options))
        for name in ("trace", "out", "on_event", "run_name", "wandb_project"):
            kept[name] = None
        return self.trainer.retime(self, **(kept | changes))

    def settle(self, program: Program) -> None:
        """Settle the computing of a program that is to be retimed.

        Raises:
            InputError: its times or losses are not those of the recording.
        """
        if program.request.finds_minibatch:
            program.request.take_minibatch(self.minibatch_size)
        request = program.request
        asked, known, settled = request.compute, self.asked, self.compute
        if self.streams.refused:
            raise TrainAgainError(f"retime: this run has to be trained again: {self.streams.refused}")
        if request.topology is None or asked is None or known is None or settled is None:
            raise TrainAgainError("retime: there is no virtual time without a topology: pass topology=")
        if (asked.coding, asked.updates) != (known.coding, known.updates):
            raise TrainAgainError(
                "retime: other compute.coding or compute.updates: the recording has no work of codecs and optimizers, "
                "only its seconds: train again"
            )
        of_work = {"coding": settled.coding, "updates": settled.updates}
        program.compute = settled if asked == known else asked.model_copy(update=of_work)
        program.step_flops = self.step_flops
        if program.compute.is_measured or (program.compute.flops is not None and not self.step_flops):
            request.compute = program.compute
            program.prepare()

    def host(self, program: Program) -> ReplayHost:
        """Host that replays the recording as `program` says.

        Raises:
            TrainAgainError: encoded means go by another algorithm there.
        """
        request = program.request
        program.first_rounds = self.first_rounds
        collectives = program.collectives
        self.first_rounds = program.first_rounds
        averaging = _averaging_algorithm(collectives)
        if self.averaging_algorithm not in (None, averaging):
            raise TrainAgainError(
                f"retime: encoded means go by {self.averaging_algorithm!r} in the recording, and by {averaging!r} with "
                "these collectives, which changes their values: train again"
            )
        return ReplayHost(
            program.world(collectives),
            request.seed,
            WorkerSpec(),
            request.trace,
            streams=self.streams,
            seconds=[each.seconds for each in program.durations],
            results=self.outcomes,
        )


def _averaging_algorithm(collectives: Mapping[str, str]) -> str:
    """Algorithm of encoded means, which nothing but a run's `collectives` says: those asked for, and those chosen."""
    return without_network(1, collectives).averaging_algorithm


class RecordedEvaluator:
    """Evaluator of a run that is retimed: it has found everything before."""

    def __init__(self, recording: RecordedTraining) -> None:
        self.found: deque[Finding] = deque(recording.findings)
        self.num_taken: dict[int, int] = {}
        self._states = recording.mean_state, recording.judged_state

    def take(self, rank: int, snapshot: Any, tensors: Sequence[Any]) -> None:
        """Ignore a snapshot: there is none."""

    def result(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Models at the end of the run."""
        return self._states

    def close(self) -> None:
        """Do nothing: no thread runs."""
