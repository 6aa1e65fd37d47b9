"""Tests of code on ranks: tensors and programs drawn by hypothesis, and laws that communicators and collectives keep.

    from netgym.testing import check_collective

    def test_my_ring():
        check_collective(my_ring, like="all_reduce")

What is drawn needs the extra `test` (hypothesis).
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from exogym_core.testing.bits import assert_same_bits
    from exogym_core.testing.collectives import CollectiveTrial
    from exogym_core.testing.communicators import COMMUNICATOR_LAWS, check_communicator
    from exogym_core.testing.drawing import call_sequences, programs, tensors
    from exogym_core.testing.functions import check_collective
    from exogym_core.testing.group_calls import CallSequence, GroupCall, TensorForm, laid_out
    from exogym_core.testing.rank_programs import Action, RankProgram

__all__ = [
    "COMMUNICATOR_LAWS",
    "Action",
    "CallSequence",
    "CollectiveTrial",
    "GroupCall",
    "RankProgram",
    "TensorForm",
    "assert_same_bits",
    "call_sequences",
    "check_collective",
    "check_communicator",
    "laid_out",
    "programs",
    "tensors",
]

_MODULES = {
    "bits": ("assert_same_bits",),
    "collectives": ("CollectiveTrial",),
    "communicators": ("COMMUNICATOR_LAWS", "check_communicator"),
    "drawing": ("call_sequences", "programs", "tensors"),
    "functions": ("check_collective",),
    "group_calls": ("CallSequence", "GroupCall", "TensorForm", "laid_out"),
    "rank_programs": ("Action", "RankProgram"),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    # Imported when asked for: drawing needs hypothesis.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
