"""Ratio of a strategy's steps to data-parallel's at the same loss, from runs, DiLoCo's law, or our benchmark.

The law is that of Charles et al. 2025, "Communication-Efficient Language Model Training Scales Reliably and Robustly:
Scaling Laws for DiLoCo" (arXiv 2503.09799v1), table 7: the loss of N parameters on 20 N tokens is A N^alpha, with
constants for data-parallel and for 1, 2, 4 and 8 workers (H = 30, AdamW, batch and rates the best of each).
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from exogym_core.names import visible
from exogym_core.results.run_folder import RunFolder
from netsim.errors import InputError
from netsim.files.documents import load_document
from netsim.units import format_count

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = [
    "BENCHMARK_STEPS",
    "LOSS_LAW",
    "PRINTED_LOSSES",
    "Ratio",
    "law_ratio",
    "relative_loss",
    "step_ratios",
    "steps_range",
    "with_coded_boundaries",
]

_DATA: Any = load_document(Path(__file__).with_name("step_ratios.yaml")).data

#: (A, alpha) by workers; 0 is data-parallel.
LOSS_LAW: Mapping[int, tuple[float, float]] = {int(key): tuple(law) for key, law in _DATA["loss_law"].items()}

#: The losses to which the law was fitted, by parameters: data-parallel, 1, 2, 4, 8 workers.
PRINTED_LOSSES: Mapping[float, tuple[float, ...]] = {
    float(key): tuple(losses) for key, losses in _DATA["printed_losses"].items()
}

#: Steps to the targets of examples/strategies.yaml; None: missed.
BENCHMARK_STEPS: Mapping[str, tuple[int | None, int | None]] = {
    name: tuple(steps) for name, steps in _DATA["benchmark_steps"].items()
}

_CODED_GRADIENTS = 30 / 25  # QSGD's steps on digits, in four bits a gradient, over AllReduce's
_FITTED_H = 30
_FAMILY = ("DiLoCo", "StreamingDiLoCo")
_FEWEST_TOKENS, _MOST_TOKENS = 10, 320  # a parameter; the law is for 20, and 16 times as many were tried
_RESIDUAL = 0.0065  # of relative losses by the law and as printed; the largest, of 4 workers at 10B


@dataclass(frozen=True)
class Ratio:
    """Ratio of two strategies' steps to the same loss.

    Attributes:
        mean, low, high: of the ratio; low and high over the runs' seeds (alike where there was one), or by how far the
            law is from the losses that were printed.
        source: runs and loss; or the law, and options outside of those for which it was fitted.
        is_law: a published law says so, and no run of the user's.
    """

    mean: float
    low: float
    high: float
    source: str
    is_law: bool = False

    def to_json(self) -> dict[str, Any]:
        """Plain data; the end of an unbounded range is None."""
        return {**vars(self), "high": self.high if math.isfinite(self.high) else None}


def relative_loss(num_parameters: float, num_workers: int) -> float:
    """DiLoCo's loss over data-parallel's by the law, interpolated in the logarithm of the number of workers.

    >>> round(relative_loss(2.4e9, 4), 4), round(relative_loss(35e6, 8), 3)
    (1.002, 1.037)
    """
    low, high = 1 << (num_workers.bit_length() - 1), 1 << (num_workers - 1).bit_length()
    share = math.log2(num_workers / low) if low < high else 0.0
    base, first, last = (
        math.log(factor) + exponent * math.log(num_parameters)
        for factor, exponent in (LOSS_LAW[0], LOSS_LAW[low], LOSS_LAW[high])
    )
    return math.exp((1 - share) * first + share * last - base)


def law_ratio(
    strategy: str,
    options: Mapping[str, Any],
    num_parameters: float,
    num_workers: int,
    tokens: float | None,
) -> Ratio | None:
    """Ratio by the law of a strategy's steps to data-parallel's; None where the law does not apply.

    The law gives losses at 20 tokens per parameter. Half of its exponent belongs to tokens and half to parameters, as
    both matter equally at the compute-optimal point; so a loss that is higher by a share needs (1 + share)^(2 /
    |alpha|) times the tokens.

    Args:
        strategy: its class.
        options: its own.
        num_parameters: of the model, 35M to 10B.
        num_workers: replicas, up to 8.
        tokens: the budget; 10 to 320 a parameter. None: taken to be the law's.
    """
    length = options.get("H")
    a_parameter = 20.0 if tokens is None else tokens / num_parameters
    if (
        strategy not in _FAMILY
        or not isinstance(length, int)
        or length < _FITTED_H
        or not min(PRINTED_LOSSES) <= num_parameters <= 1.05 * max(PRINTED_LOSSES)
        or not 1 <= num_workers <= max(LOSS_LAW)
        or not _FEWEST_TOKENS <= a_parameter <= _MOST_TOKENS
    ):
        return None
    power = 2 / -LOSS_LAW[0][1]
    loss = relative_loss(num_parameters, num_workers)
    mean, low, high = ((loss * (1 + error)) ** power for error in (0.0, -_RESIDUAL, _RESIDUAL))
    beyond = [f"H = {length}"] if length > _FITTED_H else []
    beyond += [f"codec {options['codec']}"] if "codec" in options else []
    beyond += ["fragments"] if strategy == "StreamingDiLoCo" else []
    outside = f"; it does not cover {' and '.join(beyond)}, which may need more" if beyond else ""
    where = "above" if loss > 1 else "below"
    source = (
        f"DiLoCo's scaling law (arXiv 2503.09799, table 7, H = 30), by which the loss of "
        f"{format_count(num_workers, 'worker')} is {abs(loss - 1):.2%} {where} data-parallel's at "
        f"{num_parameters / 1e9:.3g}B parameters{outside}"
    )
    return Ratio(mean, low, high, source, is_law=True)


def steps_range(
    strategy: str,
    options: Mapping[str, Any],
    num_parameters: float,
    num_workers: int,
    tokens: float | None,
) -> Ratio:
    """Range of a strategy's steps relative to data-parallel's, where it was not run at this size.

    The law's range, where the law was fitted to these options. Otherwise from the law's low end, or 1, to the most that
    our benchmark took, on far smaller models; unbounded where it missed its target.

    Args:
        strategy, options, num_parameters, num_workers, tokens: see `law_ratio`.
    """
    if strategy == "AllReduce":
        codec = options.get("codec")
        if codec in (None, "fp32"):
            return Ratio(1.0, 1.0, 1.0, "data-parallel itself")
        source = (
            f"not measured with {codec} at this size; QSGD, which is coarser, took 1.20 times on our digits"
        )
        return Ratio(_CODED_GRADIENTS**0.5, 1.0, _CODED_GRADIENTS, source)
    law = law_ratio(strategy, options, num_parameters, num_workers, tokens)
    if law is not None and not _is_beyond(strategy, options):
        # Fewer steps than data-parallel's are no gain over strategies of which the law does not speak.
        return replace(law, mean=max(law.mean, 1.0), high=max(law.high, 1.0))
    base, own = BENCHMARK_STEPS["AllReduce"], BENCHMARK_STEPS.get(strategy, (None, None))
    ratios = [
        ours / steps for ours, steps in zip(own, base, strict=True) if ours is not None and steps is not None
    ]
    low = 1.0 if law is None else law.low
    high = math.inf if len(ratios) < len(base) else max(*ratios, 1.0 if law is None else law.high)
    mean = math.sqrt(low * high) if math.isfinite(high) else low
    text = (
        f"our benchmark's {' and '.join(f'{ratio:.2f}' for ratio in ratios)} times" if ratios else "nothing"
    )
    if math.isinf(high):
        text += ", and it missed a target there" if ratios else " was measured"
    source = f"not measured at this size: {text} (digits and a byte GPT, docs/benchmark.md)"
    lowest = (
        ""
        if law is None
        else f"from DiLoCo's scaling law, arXiv 2503.09799, table 7, which is for H = {_FITTED_H}; "
    )
    return Ratio(mean, low, high, lowest + source)


def with_coded_boundaries(ratio: Ratio, codec: str) -> Ratio:
    """Ratio with a codec on the boundaries of stages: up to as many more steps as QSGD took, which is coarser."""
    source = f"boundaries in {codec}: not measured at this size; QSGD, which is coarser, took 1.20 times on our digits"
    text = source if ratio.low == ratio.high else f"{ratio.source}; {source}"
    return replace(
        ratio, mean=ratio.mean * _CODED_GRADIENTS**0.5, high=ratio.high * _CODED_GRADIENTS, source=text
    )


def _is_beyond(strategy: str, options: Mapping[str, Any]) -> bool:
    """True if options are outside those to which the law was fitted."""
    coded = options.get("codec") not in (None, "fp32")
    return coded or strategy == "StreamingDiLoCo" or options.get("H") != _FITTED_H


def step_ratios(path: str | Path) -> dict[str, Ratio]:
    """Steps to the lowest loss reached by all strategies of a run, relative to the fewest.

    That loss is the highest of their lowest validation losses; a strategy's steps are those of its first evaluation at
    or below it. Several seeds give the range.

    Args:
        path: a run's folder.

    Raises:
        InputError: the folder is no run, or has no evaluations.
    """
    folder = RunFolder.open(Path(path))
    curves: dict[str, list[list[tuple[float, float]]]] = defaultdict(list)
    labels, seeds = defaultdict[str, set[str]](set), set[int | None]()
    for entry in folder.finished():
        name = str(entry.get("strategy", entry["name"]))
        labels[name].add(str(entry["name"]))
        seeds.update(entry.get("seeds") or [None])
        for seed in entry.get("seeds") or [None]:
            rows = folder.read_metrics(str(entry["name"]), "validation", seed)
            losses = [(row["step"], row.get("judged_loss", row.get("global_loss"))) for row in rows]
            curves[name].append(
                [(step, loss) for step, loss in losses if loss is not None and math.isfinite(loss)]
            )
    curves = {name: runs for name, runs in curves.items() if all(runs)}
    if not curves:
        raise InputError(f"{visible(path)}: has no evaluations to take steps from; set evaluate.every")
    target = max(min(loss for _, loss in run) for runs in curves.values() for run in runs)
    steps = {
        name: [max(next(step for step, loss in run if loss <= target), 1.0) for run in runs]
        for name, runs in curves.items()
    }
    fewest = min(sum(needed) / len(needed) for needed in steps.values())
    source = f"{visible(path)} to loss {target:.4g}, {format_count(len(seeds), 'seed')}"
    source += ", so how much seeds differ is not known" if len(seeds) == 1 else ""
    together = {
        name: f"; {len(of)} settings of it together" if len(of) > 1 else "" for name, of in labels.items()
    }
    return {
        name: Ratio(
            sum(needed) / len(needed) / fewest,
            min(needed) / fewest,
            max(needed) / fewest,
            source + together[name],
        )
        for name, needed in steps.items()
    }
