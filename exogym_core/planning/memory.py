"""What a worker keeps in memory: every tensor that its strategy and model can reach, by what it is for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torch import nn

    from exogym_core.strategy.base import Strategy

__all__ = ["MEMORY_CHOICES", "memory_in_use", "worker_memory"]

_DEEPEST = 12

#: How a worker may keep less in memory, and what that means.
MEMORY_CHOICES: Mapping[str, str] = {
    "bf16": "weights, gradients and optimizer states in two bytes a number instead of four",
    "8bit": "optimizer states in one byte a number",
    "offload": "optimizer and outer states in the machine's memory",
    "checkpointing": "of activations the layers' inputs alone, the rest computed again",
}


def memory_in_use(
    states: Mapping[str, int], activations: int, checkpointed: int, choices: Sequence[str]
) -> dict[str, int]:
    """Bytes on a worker's devices by purpose, with `activations`, as the choices make them.

    Args:
        states: of `worker_memory`.
        activations: bytes of them.
        checkpointed: bytes of them where each layer is computed again.
        choices: of MEMORY_CHOICES.
    """
    found = {name: size for name, size in states.items() if name != "total"}
    found["activations"] = checkpointed if "checkpointing" in choices else activations
    if "bf16" in choices:
        found |= {name: found[name] // 2 for name in ("weights", "gradients", "optimizer")}
    if "8bit" in choices:
        found["optimizer"] = states["optimizer"] // 4
    if "offload" in choices:
        found |= {"optimizer": 0, "outer": 0}
    return {**found, "total": sum(found.values())}


def worker_memory(model: nn.Module, strategy: Strategy) -> dict[str, int]:
    """Bytes by purpose: `weights`, `gradients`, `optimizer`, `outer` (all else that the strategy keeps), `total`.

    Storages count once, whoever shares them. Activations are added by `memory_in_use`; what a round holds for an
    instant is not counted.
    """
    seen: set[int] = set()
    parameters = list(model.parameters())
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    states = [state for optimizer in strategy.optimizers[:1] for state in optimizer.state.values()]
    purposes: dict[str, Any] = {
        "weights": [*parameters, *model.buffers()],
        "gradients": gradients,
        "optimizer": states,
        "outer": vars(strategy),
    }
    counted = {
        name: sum(_new_bytes(tensor, seen) for tensor in _tensors(things, set()))
        for name, things in purposes.items()
    }
    return {**counted, "total": sum(counted.values())}


def _new_bytes(tensor: Tensor, seen: set[int]) -> int:
    storage = tensor.untyped_storage()
    key = storage._cdata
    if key in seen:
        return 0
    seen.add(key)
    return storage.nbytes()


def _tensors(thing: Any, visited: set[int], depth: int = 0) -> Iterator[Tensor]:
    """All tensors within reach of `thing`, through containers and objects of ours."""
    if id(thing) in visited or depth > _DEEPEST:
        return
    visited.add(id(thing))
    if isinstance(thing, Tensor):
        if thing.is_meta:  # others are random states and tables, alike in every plan
            yield thing
        return
    inside: Any = ()
    if isinstance(thing, dict):
        inside = list(thing.values())
    elif isinstance(thing, list | tuple | set):
        inside = thing
    elif _is_searched(type(thing).__module__) and hasattr(thing, "__dict__"):
        inside = list(vars(thing).values())
    for part in inside:
        yield from _tensors(part, visited, depth + 1)


def _is_searched(module: str) -> bool:
    """Whether objects of a module are strategies', models' or torch's; what communicators hold is the transport's."""
    return module.partition(".")[0] in ("exogym_core", "torch") and not module.startswith(
        "exogym_core.communicator"
    )
