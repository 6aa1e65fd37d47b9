"""What a run of `fit` leaves in memory."""

from __future__ import annotations

import importlib
from dataclasses import dataclass, field
from html import escape
from typing import TYPE_CHECKING, Any

from exogym_core.results.rows import Rows
from netsim.files.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["FitResult"]

Row = dict[str, Any]


@dataclass(repr=False)
class FitResult:
    """All that a run of `fit` tells besides the model.

    Attributes:
        strategy: name of the strategy's class.
        num_nodes, max_steps: ranks, and steps asked for.
        history: a row a step: step, examples_trained, train_loss, train_perplexity, lr, virtual_seconds,
            bytes_sent, payload_bytes, wan_bytes, compute_utilisation. Losses are means over all samples of
            all ranks, bytes are sums over ranks from the start (payload_bytes: the mean, each encoded message
            once), seconds are when the last rank was through. Kept as columns; a row that is read is a dict.
        validation: a row an evaluation: step, local_loss, local_perplexity (the lowest present rank's model),
            global_loss, global_perplexity (the mean of all present ranks' models, which nobody need have); these
            four are None where a server is judged, whose evaluations look at no worker;
            virtual_seconds of that step; judged_loss and accuracy of the judged model, judged_step and
            judged_virtual_seconds, when that model came to exist.
        correlation: a row a comparison of the replicas: step, correlation.
        rank_states: every rank's final state_dict, on the CPU.
        virtual_seconds: when the last rank ended; None without a topology.
        wall_seconds: likewise by a real transport's clock, where rows have it in the place of virtual seconds.
        bytes_sent: sum over workers.
        wan_bytes: what workers and servers sent to other regions.
        payload_bytes: a rank's encoded messages, their mean.
        compute_utilisation: computing / the run's virtual seconds, mean over ranks; None without a topology.
        window_limit: where a sender's window limited collectives most, with the remedy; None where links did.
        hosts: of each worker, by name in the topology; empty without one.
        collectives: the algorithms by which collectives went over the simulated network, by operation.
        link_history: rows of virtual_seconds and of the payload bytes that had crossed each link by then (`a->b`), at
            some instants.
        compute_seconds, exposed_seconds: virtual seconds of each rank's computing, and of its waiting.
        computing_seconds, network_seconds, waiting_seconds: where the run's virtual seconds went, means over
            ranks which sum to them: computing; waiting for bytes that were under way; waiting for those who had
            not come yet, or after the rank's own end. None without a topology.
        judged: which model is judged: "replica", "outer", "server" or "own".
        judged_state: the state of the model that could be shipped at the end (of "own" the lowest rank's);
            buffers that a state_dict leaves out are there under their names.
        mean_state: that of the mean of all present ranks' models, which costs no virtual time and is not judged.
        target_loss, virtual_seconds_to_target: what was asked for, and, if it is held, when the first judged model
            that reached it came to exist; None if it is not, or without a topology.
        target: "held", "touched" or "missed", see `exogym_core.results.target:reach`; None where nothing was asked.
        final_loss, accuracy: the judged model's at the end, on the evaluation samples; None if there are none.
        mean_of_replicas_loss: the mean model's at the end, a diagnostic.
        minibatch_size: samples a forward pass, as it was settled.
        compute: the compute time as it was settled, in the form of an experiment; None where it is free.
        dropped_peers: absences of ranks that rounds went on without, see `exogym_core.results.rounds:Rounds`; None
            where all are waited for. Rows of `history` are then means over those who took part in the round (bytes:
            sums over all), `num_peers` is how many did, and `virtual_seconds` is when they ended.
        averaged_ranks: who took part in such rounds, by the step that ended them.
        coding: "charged", or "not charged" where a strategy sent encoded values and called neither `charged` nor
            `charge`: its times lack what encoding takes; None where coding is free, or nothing was encoded.
        first_non_finite_step: the first step with a loss that was nan or infinite on some rank; None if
            there was none. Training goes on after it.
        checkpoint_folder: where this run's checkpoints are; None where none are made.
        resumed_step: the step of the checkpoint that it went on from; 0 for a run from the start.
        complete: whether the run came to its end.
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
    hosts: list[str] = field(default_factory=list)
    collectives: dict[str, list[str]] = field(default_factory=dict)
    link_history: list[dict[str, float]] = field(default_factory=list)
    compute_seconds: list[float] = field(default_factory=list)
    exposed_seconds: list[float] = field(default_factory=list)
    computing_seconds: float | None = None
    network_seconds: float | None = None
    waiting_seconds: float | None = None
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
    checkpoint_folder: Path | None = None
    resumed_step: int = 0
    complete: bool = False

    def __repr__(self) -> str:
        told = ", ".join(f"{name} {text}" for name, text in self._told().items())
        return f"FitResult({told})"

    def _repr_html_(self) -> str:
        """The same as a small table, for notebooks."""
        rows = (
            f"<tr><th>{escape(name)}</th><td>{escape(text)}</td></tr>" for name, text in self._told().items()
        )
        return f"<table>{''.join(rows)}</table>"

    def _told(self) -> dict[str, str]:
        """What one wants to know first."""
        state = "" if self.complete else " (stopped)"
        told = {
            "strategy": self.strategy or "-",
            "ranks": str(self.num_nodes),
            "steps": f"{len(self.history)} of {self.max_steps}{state}",
        }
        if self.final_loss is not None:
            if self.complete or not self.validation:
                told["final loss"] = f"{self.final_loss:.4g} ({self.judged})"
            else:  # not that of the end
                at = self.validation[-1]["step"]
                told["last evaluated"] = f"loss {self.final_loss:.4g} at step {at} ({self.judged})"
        if self.virtual_seconds is not None:
            told["virtual time"] = format_seconds(self.virtual_seconds)
        if self.target is not None:
            told["target"] = f"{self.target_loss:g} {self.target}"
        if self.coding == "not charged":
            told["coding"] = self.coding
        return told | {"sent": format_bytes(self.bytes_sent)}

    def to_pandas(self) -> Any:
        """`history` as a DataFrame.

        Raises:
            ImportError: pandas is not installed; the line names the extra.
        """
        try:
            pandas = importlib.import_module("pandas")
        except ImportError:
            raise ImportError(
                "to_pandas: pandas is not installed: run: pip install 'netgym[pandas]'"
            ) from None
        return pandas.DataFrame(list(self.history))
