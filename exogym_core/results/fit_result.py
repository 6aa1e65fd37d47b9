"""The result of a run in memory: `FitResult`, and `Rows`, its metrics in columns."""

from __future__ import annotations

import importlib
import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from typing import TYPE_CHECKING, Any, overload

from exogym_core.results.schema import summary_fields
from netsim.errors import InputError
from netsim.units import format_bytes, format_count, format_seconds

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, MutableSequence
    from pathlib import Path

    from exogym_core.run.retiming import RecordedTraining

__all__ = ["FitResult", "Rows", "load_pandas"]

_ABSENT = object()  # marks a column that a row lacks
_CODES = {int: "q", float: "d"}  # types that fit an array, exactly


class Rows(Sequence[dict[str, Any]]):
    """A sequence of rows, of which only the end grows.

    Reading a row returns a new dict: changing it changes nothing here. Values come back as they were given, type
    included; a column of whole numbers or of floats alone is packed.

    >>> rows = Rows([{"step": 1, "loss": 0.5}])
    >>> rows.append({"step": 2, "loss": None})
    >>> rows[-1], len(rows), rows.column("step")
    ({'step': 2, 'loss': None}, 2, [1, 2])
    >>> rows == [{"step": 1, "loss": 0.5}, {"step": 2, "loss": None}]
    True
    """

    def __init__(self, rows: Iterable[Mapping[str, Any]] = ()) -> None:
        self._columns: dict[str, MutableSequence[Any]] = {}
        self._num_rows = 0
        self.extend(rows)

    def append(self, row: Mapping[str, Any]) -> None:
        """Add a row behind the others."""
        for name, value in row.items():
            if name not in self._columns:
                is_packed = not self._num_rows and type(value) in _CODES
                self._columns[name] = array(_CODES[type(value)]) if is_packed else [_ABSENT] * self._num_rows
            column = self._columns[name]
            if isinstance(column, array) and not _fits(column, value):
                column = self._columns[name] = list(column)
            column.append(value)
        self._num_rows += 1
        if len(row) < len(self._columns):
            for name in self._columns.keys() - row.keys():
                column = self._columns[name] = list(self._columns[name])
                column.append(_ABSENT)

    def extend(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Add rows behind the others."""
        for row in rows:
            self.append(row)

    def column(self, name: str) -> list[Any]:
        """Values of a column, of the rows that have it.

        Raises:
            KeyError: no row has it.
        """
        return [value for value in self._columns[name] if value is not _ABSENT]

    @overload
    def __getitem__(self, place: int) -> dict[str, Any]: ...

    @overload
    def __getitem__(self, place: slice) -> list[dict[str, Any]]: ...

    def __getitem__(self, place: int | slice) -> dict[str, Any] | list[dict[str, Any]]:
        if isinstance(place, slice):
            return [self[each] for each in range(*place.indices(self._num_rows))]
        if not -self._num_rows <= place < self._num_rows:
            raise IndexError(f"the table has {format_count(self._num_rows, 'row')}")
        row = {name: column[place] for name, column in self._columns.items()}
        return {name: value for name, value in row.items() if value is not _ABSENT}

    def __len__(self) -> int:
        return self._num_rows

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Rows | list | tuple):
            return NotImplemented
        return len(self) == len(other) and all(map(dict.__eq__, self, other))

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Rows({list(self)!r})"


def _fits(column: array[Any], value: object) -> bool:
    if _CODES.get(type(value)) != column.typecode:
        return False
    return not isinstance(value, int) or -(1 << 63) <= value < 1 << 63


Row = dict[str, Any]


@dataclass(repr=False)
class FitResult:
    """Result of `fit` besides the model: rows of metrics, times, bytes, losses and final states.

    Attributes:
        strategy: name of the strategy's class.
        num_nodes, max_steps: ranks, and steps of the run.
        history: a row a step: step, examples_trained, train_loss, train_perplexity, lr, virtual_seconds,
            bytes_sent, payload_bytes, wan_bytes, compute_utilisation. Losses are means over all samples of
            all ranks, bytes are sums over ranks from the start (payload_bytes: the mean, each encoded message
            once), seconds are when the last rank finished. Kept as columns; a row that is read is a dict.
        validation: a row an evaluation: step, local_loss, local_perplexity (the lowest present rank's model),
            global_loss, global_perplexity (the mean of all present ranks' models, which no rank need hold); these
            four are None where a server is judged, without evaluating workers;
            virtual_seconds of that step; judged_loss and accuracy of the judged model, judged_step and
            judged_virtual_seconds, when that model was made.
        correlation: a row a comparison of the replicas: step, correlation.
        rank_states: every rank's final state_dict, on the CPU.
        virtual_seconds: when the last rank ended; None without a topology.
        wall_seconds: likewise by a real transport's clock, where rows have it in the place of virtual seconds.
        bytes_sent: sum over workers.
        wan_bytes: what workers and servers sent to other regions.
        payload_bytes: encoded messages of a worker once each, mean over workers.
        compute_utilisation: computing / the run's virtual seconds, mean over ranks; None without a topology.
        window_limit: where a sender's window limited collectives most, with the remedy; None where links did.
        later_weather: entries of the topology's weather that begin after the end; None where all were met.
        hosts: of each worker, by name in the topology; empty without one.
        collectives: the algorithms by which collectives went over the simulated network, by operation.
        link_history: rows of virtual_seconds and of the payload bytes that had crossed each link by then (`a->b`), at
            some instants.
        compute_seconds, exposed_seconds: virtual seconds of each rank's computing, and of its waiting.
        computing_seconds, network_seconds, waiting_seconds: where the run's virtual seconds went, means over
            ranks which sum to them: computing; waiting for bytes that were under way; waiting for those that had
            not come yet, or after the rank's own end. None without a topology.
        options: options of the strategy as they were used, defaults included, with its optimizers and what they were
            given.
        parameters: parameters of the model.
        judged: which model is judged: "replica", "outer", "server" or "own".
        judged_state: the state of the model that could be shipped at the end (of "own" the lowest rank's);
            buffers that a state_dict leaves out are there under their names.
        mean_state: that of the mean of all present ranks' models, which costs no virtual time and is not judged.
        target_loss, virtual_seconds_to_target: the target, and, if it is held, when the first judged model that
            reached it was made; None if it is not, or without a topology.
        target: "held", "touched" or "missed", see `exogym_core.results.recorder:reach`; None without a target.
        final_loss, accuracy: the judged model's at the end, on the evaluation samples; None if there are none.
        mean_of_replicas_loss: the mean model's at the end, a diagnostic.
        minibatch_size: samples a forward pass, as resolved.
        compute: the compute time as resolved, in the form of an experiment; None where it is free.
        dropped_peers: absences of ranks that rounds continued without, see `exogym_core.results.recorder:Rounds`; None
            where all are waited for. Rows of `history` are then means over the ranks in the round (bytes: sums over
            all), `num_peers` is their number, and `virtual_seconds` is when they ended.
        averaged_ranks: ranks in such rounds, by the step that ended them.
        alive_ranks, averaging_ranks: numbers of ranks that were alive, and that took part, when such rounds were
            formed; means over rounds.
        coding: "charged", or "not charged" where a strategy sent encoded values and called neither `charged` nor
            `charge`: its times lack what encoding takes; None where coding is free, or nothing was encoded.
        first_non_finite_step: the first step with a loss that was nan or infinite on some rank; None if
            there was none. Training continues after it.
        checkpoint_folder: where this run's checkpoints are; None where none are made.
        resumed_step: the step of the checkpoint that it resumed from; 0 for a run from the start.
        complete: whether the run ended, neither stopped nor failed.
        recording: the requests of its ranks, for `retime`; None where nothing was simulated, or it was stopped.
    """

    strategy: str = ""
    num_nodes: int = 1
    max_steps: int = 0
    history: Rows = field(default_factory=Rows)
    validation: Rows = field(default_factory=Rows)
    correlation: Rows = field(default_factory=Rows)
    rank_states: list[dict[str, Any]] = field(default_factory=list)
    virtual_seconds: float | None = None
    wall_seconds: float | None = None
    bytes_sent: int = 0
    payload_bytes: int = 0
    wan_bytes: int = 0
    compute_utilisation: float | None = None
    window_limit: str | None = None
    later_weather: str | None = None
    hosts: list[str] = field(default_factory=list)
    collectives: dict[str, list[str]] = field(default_factory=dict)
    link_history: list[dict[str, float]] = field(default_factory=list)
    compute_seconds: list[float] = field(default_factory=list)
    exposed_seconds: list[float] = field(default_factory=list)
    computing_seconds: float | None = None
    network_seconds: float | None = None
    waiting_seconds: float | None = None
    options: dict[str, Any] = field(default_factory=dict)
    parameters: int = 0
    judged: str = "replica"
    judged_state: dict[str, Any] = field(default_factory=dict, repr=False)
    mean_state: dict[str, Any] = field(default_factory=dict, repr=False)
    target_loss: float | None = None
    target: str | None = None
    virtual_seconds_to_target: float | None = None
    final_loss: float | None = None
    accuracy: float | None = None
    mean_of_replicas_loss: float | None = None
    minibatch_size: int | None = None
    compute: dict[str, Any] | None = None
    coding: str | None = None
    first_non_finite_step: int | None = None
    dropped_peers: list[Row] | None = None
    averaged_ranks: dict[int, list[int]] = field(default_factory=dict)
    alive_ranks: float | None = None
    averaging_ranks: float | None = None
    checkpoint_folder: Path | None = None
    resumed_step: int = 0
    complete: bool = False
    recording: RecordedTraining | None = None

    def __repr__(self) -> str:
        return f"FitResult({', '.join(f'{name} {text}' for name, text in self._headline().items())})"

    def _repr_html_(self) -> str:
        """The headline figures as a small table, for notebooks."""
        pairs = [(escape(name), escape(text)) for name, text in self._headline().items()]
        return f"<table>{''.join(f'<tr><th>{name}</th><td>{text}</td></tr>' for name, text in pairs)}</table>"

    def _headline(self) -> dict[str, str]:
        state = "" if self.complete else " (stopped)"
        figures = {
            "strategy": self.strategy or "-",
            "ranks": str(self.num_nodes),
            "steps": f"{len(self.history)} of {self.max_steps}{state}",
        }
        if self.final_loss is not None:
            if self.complete or not self.validation:
                figures["final loss"] = f"{self.final_loss:.4g} ({self.judged})"
            else:  # not that of the end
                at = self.validation[-1]["step"]
                figures["last evaluated"] = f"loss {self.final_loss:.4g} at step {at} ({self.judged})"
        if self.virtual_seconds is not None:
            figures["virtual time"] = format_seconds(self.virtual_seconds)
        if self.target is not None:
            figures["target"] = f"{self.target_loss:g} {self.target}"
        if self.coding == "not charged":
            figures["coding"] = self.coding
        return figures | {"sent": format_bytes(self.bytes_sent)}

    def summary(self, label: str, strategy: str) -> dict[str, Any]:
        """The run's object in the summary of a run folder; see `exogym_core.results.schema`.

        Args:
            label: of the run in tables and file names.
            strategy: name in experiment files.
        """
        a_worker = self.bytes_sent / self.num_nodes
        values = vars(self) | {
            "name": label,
            "strategy": strategy,
            "steps": len(self.history),
            "bytes_sent_per_worker": int(a_worker) if a_worker.is_integer() else a_worker,
            "coding": self.coding if self.coding == "not charged" else None,
            "incomplete": not self.complete,
        }
        has_diverged = self.final_loss is not None and not math.isfinite(self.final_loss)
        return summary_fields(values, kept=["first_non_finite_step"] if has_diverged else [])

    def retime(self, **options: Any) -> FitResult:
        """The result of the same training on another network, to the bit, without training.

        Args:
            options: of `fit`, those of the network: `topology`, `placement`, `protocol`, `collectives` and `compute`;
                and `target_loss`, `out`, `trace`, `on_event` and `progress`. What is not given stays as it was.

        Raises:
            InputError: the run has to be trained again, as its losses depend on times or bytes; or an option is wrong.
        """
        if self.recording is None:
            raise InputError("retime: this run has no recording: it was stopped, or nothing was simulated")
        return self.recording.retime(**options)

    def to_pandas(self) -> Any:
        """`history` as a DataFrame.

        Raises:
            ImportError: pandas is not installed; the line names the extra.
        """
        return load_pandas("to_pandas").DataFrame(list(self.history))


def load_pandas(caller: str) -> Any:
    """The module pandas, imported where it is first used.

    Raises:
        ImportError: it is not installed; the line names the `caller` and the extra.
    """
    try:
        return importlib.import_module("pandas")
    except ImportError as error:
        raise ImportError(f"{caller}: pandas is not installed: run: pip install 'netgym[pandas]'") from error
