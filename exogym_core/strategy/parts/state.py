"""Declared state: attributes that a checkpoint keeps of an object, named once in its class."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from netsim.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

__all__ = ["State", "Stateful"]


class State:
    """Names of attributes to keep, in addition to those of base classes.

    An attribute is a tensor, a generator, an object with a state of its own, a list of these, or a plain value.

    Args:
        names: of attributes, which are their keys in a checkpoint too.
        called: keys of attributes with other names.
    """

    def __init__(self, *names: str, **called: str) -> None:
        self.attributes = {**{name: name for name in names}, **called}


class Stateful:
    """Object whose state is the attributes that its class and its bases declare.

    >>> class Momentum(Stateful):
    ...     state = State("velocity", num_steps="_num_steps")
    ...
    ...     def __init__(self, size):
    ...         self.velocity, self._num_steps = torch.ones(size), 3
    >>> Momentum(2).state_dict()
    {'velocity': tensor([1., 1.]), 'num_steps': 3}
    """

    def declared_state(self) -> dict[str, str]:
        """Attribute by key, of the bases first."""
        declared = [each for base in reversed(type(self).__mro__) for each in vars(base).values()]
        return {
            k: name for each in declared if isinstance(each, State) for k, name in each.attributes.items()
        }

    def state_dict(self) -> dict[str, Any]:
        """Copies of the declared attributes.

        Raises:
            InputError: the object lacks one of them.
        """
        for name in self.declared_state().values():
            if not hasattr(self, name):
                where = type(self).__name__
                raise InputError(
                    f"{where}: declares State({name!r}) and has no attribute {name!r}; set it in setup()"
                )
        return {key: _saved(getattr(self, name)) for key, name in self.declared_state().items()}

    def state_of(self, names: Iterable[str]) -> dict[str, Any]:
        """Copies of some attributes, by name."""
        return {name: _saved(getattr(self, name)) for name in names}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned, tensors in place, since others may have views of them.

        Raises:
            InputError: an attribute is missing, as in a state that was saved before the class declared it.
        """
        declared = self.declared_state()
        for key in declared:
            if key not in state:
                raise InputError(
                    f"{type(self).__name__}: the saved state has no {key!r}: resume with the version that saved it, or "
                    "start a new run"
                )
        self.load_state_of({name: state[key] for key, name in declared.items()})

    def load_state_of(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_of` returned, tensors in place."""
        for name, saved in state.items():
            if not _restored(getattr(self, name), saved):
                setattr(self, name, copy.deepcopy(saved))


def _saved(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, torch.Generator):
        return value.get_state()
    if hasattr(value, "state_dict"):
        return value.state_dict()
    if _is_list_of_states(value):
        return [_saved(each) for each in value if each is not None]
    return copy.deepcopy(value)


@torch.no_grad()
def _restored(held: Any, saved: Any) -> bool:
    """Restore an attribute in place; False: it has to be replaced."""
    if isinstance(held, Tensor) and saved is not None:
        held.copy_(saved)
    elif isinstance(held, torch.Generator):
        held.set_state(saved)
    elif hasattr(held, "load_state_dict"):
        held.load_state_dict(saved)
    elif _is_list_of_states(held):
        there = [each for each in held if each is not None]
        return len(there) == len(saved) and all([*map(_restored, there, saved)])
    else:
        return False
    return True


def _is_list_of_states(value: Any) -> bool:
    """True if a list holds nothing but tensors and objects with a state, or None in their places."""
    kinds = (Tensor, torch.Generator, type(None))
    return isinstance(value, list) and all(
        isinstance(each, kinds) or hasattr(each, "load_state_dict") for each in value
    )
