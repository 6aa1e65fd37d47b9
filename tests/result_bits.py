"""What two runs that are the same have in common, to the bit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import Tensor

from exogym_core import Trainer
from exogym_core.results.fit_result import FitResult


def fit_until(trainer: Trainer, stop_at: int | None, **arguments: Any) -> FitResult:
    """The result of a fit that Ctrl-C ends at a step, where one is given."""

    def press(row: Mapping[str, Any]) -> None:
        if row["kind"] == "step" and row["step"] == stop_at:
            raise KeyboardInterrupt

    try:
        trainer.fit(on_event=press, **arguments)
    except KeyboardInterrupt:
        assert stop_at is not None
    assert trainer.result is not None
    return trainer.result


def digest(value: Any) -> Any:
    """The bits of a nested value, in a form that can be compared."""
    if isinstance(value, Tensor):
        return (str(value.dtype), tuple(value.shape), value.numpy().tobytes())
    if isinstance(value, np.ndarray):
        return value.tobytes()
    if isinstance(value, dict):
        return {key: digest(item) for key, item in value.items()}
    return [digest(item) for item in value] if isinstance(value, list | tuple) else repr(value)


def outcome(result: FitResult) -> Any:
    assert result.complete
    fields = {**vars(result)}
    for name in ("checkpoint_folder", "resumed_step"):
        del fields[name]
    return digest(fields)
