"""FLOPs of a forward and backward pass.

Products count (matrices, convolutions, attention, recurrent layers), multiply and add as two; elementwise work does
not, as is the custom. Modules and operators without a formula are named, since they would take no time.
"""

from __future__ import annotations

import copy
import warnings
from collections import Counter
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn

from exogym_core.cost.operations import OperationWatch, TorchOperation
from exogym_core.data.batches import device_of
from exogym_core.learner import loss_and_count
from exogym_core.workers.rng import kept_rng
from netsim.errors import InputError

__all__ = ["FlopCount", "count_flops"]

_WITHOUT_PRODUCTS = nn.Embedding, nn.EmbeddingBag, nn.LayerNorm, nn.RMSNorm  # despite their large parameters


@dataclass(frozen=True)
class FlopCount:
    """Operations of a forward and backward pass.

    Attributes:
        total: those counted.
        uncounted: modules with matrices of parameters but no counted operation, and operators that are not torch's,
            such as "scan (Mamba)" and "mylib::scan".
    """

    total: int
    uncounted: tuple[str, ...] = ()

    def warn_or_refuse(self) -> None:
        """Warn about the parts that a step's time by FLOPs leaves out.

        Raises:
            InputError: it would leave out all.
        """
        remedy = "give its time in the experiment or fit, as in compute='50 ms' or compute='measured'"
        names = ", ".join(self.uncounted)
        if not self.total:
            what = f"{names} cannot be counted" if names else "it multiplies no matrices"
            raise InputError(
                f"fit: compute by flops finds no operations in this model: {what}; {remedy}",
                about=("compute",),
            )
        if names:
            warnings.warn(
                f"fit: compute by flops cannot count {names}, which will take no time; {remedy}",
                UserWarning,
                stacklevel=6,
            )


def count_flops(model: nn.Module, batch: Any) -> FlopCount:
    """Operations of one forward and backward pass over `batch`, counted on a copy of the model.

    The RNG is left as it was.
    """
    replica = copy.deepcopy(model)
    foreign: Counter[str] = Counter()
    counted = _Modules(replica)
    watch = OperationWatch(counted.add, lambda name: foreign.update([name]))
    with kept_rng(device_of(model)), watch:
        loss_and_count(replica(batch), "fit: a first batch", with_gradient=True)[0].backward()  # type: ignore[no-untyped-call]
    return FlopCount(counted.total, (*counted.uncounted(), *sorted(foreign)))


class _Modules:
    """Counts the operations of each module with matrices of its own."""

    def __init__(self, model: nn.Module) -> None:
        self.total = 0
        self._counted: Counter[str] = Counter()
        for name, module in model.named_modules():
            matrices = [p for p in module.parameters(recurse=False) if p.dim() > 1 and p.requires_grad]
            if matrices and not isinstance(module, _WITHOUT_PRODUCTS):
                title = f"{name or 'the model'} ({type(module).__name__})"
                module.register_forward_pre_hook(partial(self._note, title, -1))
                module.register_forward_hook(partial(self._note, title, 1))

    def _note(self, title: str, sign: int, *_: object) -> None:
        self._counted[title] += sign * self.total

    def add(self, operation: TorchOperation) -> None:
        self.total += operation.flops

    def uncounted(self) -> list[str]:
        return [title for title, flops in self._counted.items() if not flops]
