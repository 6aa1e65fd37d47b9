"""A trial of what a strategy of one's own keeps: saved, loaded by a fresh one, and compared with what it has.

A `state_dict` that lacks something shows up only when a run is resumed, and then as another run, without an error.
"""

from __future__ import annotations

import copy
import json
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from exogym_core.checkpoints.own_code import is_own_module
from exogym_core.checkpoints.rank_state import decode, encode, random_streams, restore_random_streams
from exogym_core.strategy.base import Strategy
from exogym_core.strategy.chain import Chain, Module
from netsim.files.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

    from exogym_core.communicator.base import Communicator

__all__ = ["StateTrial"]


class _CommunicationError(Exception):
    """The strategy's `setup` or `load_state_dict` talks to other ranks, which a trial cannot."""


class _NoOthers:
    """A communicator of which only what this rank knows by itself is there."""

    def __init__(self, comm: Communicator) -> None:
        self.rank, self.world_size = comm.rank, comm.world_size
        self.traffic, self.inside, self.members_change = copy.deepcopy(comm.traffic), None, False
        self.can_leave_behind = comm.can_leave_behind

    def __getattr__(self, name: str) -> Any:
        raise _CommunicationError(name)


class StateTrial:
    """Saves the state of a strategy of one's own, has a fresh one load it, and compares their attributes.

    Args:
        strategy: not set up yet; copied, as `model` is.
        model: the rank's.
        set_up: sets a strategy up with a model and a communicator.
    """

    def __init__(
        self, strategy: Strategy, model: nn.Module, set_up: Callable[[Strategy, nn.Module, Any], None]
    ) -> None:
        self._own = [is_own_module(type(part).__module__) for part in _parts(strategy)]
        self._before = copy.deepcopy((strategy, model)) if any(self._own) else None
        self._set_up = set_up

    def refuse_incomplete(self, strategy: Strategy) -> None:
        """Try the state of `strategy`, which is between two steps.

        Nothing is tried where a fresh one has to talk to other ranks before it has its state.

        Raises:
            InputError: an attribute is another after that, the state cannot be loaded, or it holds what cannot be kept.
        """
        if self._before is None:
            return
        name = type(strategy).__name__
        tensors: dict[str, Tensor] = {}
        plain = json.dumps(encode(strategy.state_dict(), tensors, f"checkpoint: {name}"))
        fresh, model = copy.deepcopy(self._before)
        streams = random_streams(torch.device("cpu"))
        try:
            self._set_up(fresh, model, _NoOthers(strategy.comm))
            fresh.load_state_dict(decode(json.loads(plain), tensors))
        except _CommunicationError:
            return
        except Exception as error:
            raise InputError(
                f"{name}.load_state_dict(): fails on what state_dict() returned: {type(error).__name__}: {error}"
            ) from error
        finally:
            restore_random_streams(streams, torch.device("cpu"))
        for is_own, part, loaded in zip(self._own, _parts(strategy), _parts(fresh), strict=True):
            if is_own:
                _compare(part, loaded)


def _parts(strategy: Strategy) -> list[Strategy | Module]:
    return [strategy, *(strategy.modules if isinstance(strategy, Chain) else [])]


def _compare(part: Strategy | Module, loaded: Strategy | Module) -> None:
    known = {*vars(Strategy()), *Strategy.__annotations__, *part.not_saved}
    for name, value in vars(part).items():
        if name in known or _is_equal(value, vars(loaded).get(name)):
            continue
        where = f"{type(part).__name__}.state_dict()"
        raise InputError(
            f"{where}: lacks {name!r}, which is another after a save and a load; add it there and in "
            f"load_state_dict(), or, if no step reads it, write not_saved = ({name!r},) in the class"
        )


def _is_equal(value: object, other: object) -> bool:
    """Whether plain values and tensors are equal; what is neither is not compared."""
    if isinstance(value, Tensor):
        if not isinstance(other, Tensor) or value.shape != other.shape or value.dtype != other.dtype:
            return False
        return torch.equal(value.detach().cpu().nan_to_num(), other.detach().cpu().nan_to_num())
    if isinstance(value, torch.Generator):
        return isinstance(other, torch.Generator) and torch.equal(value.get_state(), other.get_state())
    if isinstance(value, list | tuple):
        if not isinstance(other, list | tuple) or len(value) != len(other):
            return False
        return all(map(_is_equal, value, other))
    if isinstance(value, dict):
        if not isinstance(other, dict) or value.keys() != other.keys():
            return False
        return all(_is_equal(each, other[key]) for key, each in value.items())
    if isinstance(value, int | float | str | bytes | None):
        return value == other or value != value  # nan
    return True
