"""Calls of `fit` as type checkers see them: `make lint` fails where a wrong one passes, or a right one does not."""

from __future__ import annotations

from exogym_core import Trainer


def calls(trainer: Trainer) -> None:
    """Never run: an ignored error that mypy does not find is an error itself."""
    trainer.fit(2, None, 4, batch_size=8, until="2 h", workers={"kind": "threads"})
    trainer.fit(batchsize=3)  # type: ignore[call-arg]
    trainer.fit(batch_size="3")  # type: ignore[arg-type]
    trainer.fit(until=[2])  # type: ignore[arg-type]
