"""Optimizers as values: what to build, said once, built by every rank on its own parameters."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.optim import Optimizer

from netsim.files.errors import InputError, unknown_name, unknown_names

__all__ = ["OptimSpec", "OptimizerLike", "ensure_optim_spec"]

Factory: TypeAlias = Callable[..., Optimizer]


def _torch_optimizers() -> dict[str, Factory]:
    """torch's optimizers by lower-case name; L-BFGS is left out because it needs a closure."""
    classes = (getattr(torch.optim, name) for name in dir(torch.optim))
    found = [c for c in classes if isinstance(c, type) and issubclass(c, Optimizer)]
    return {c.__name__.lower(): c for c in found if c not in (Optimizer, torch.optim.LBFGS)}


class OptimSpec:
    """An optimizer yet to be built: a class, a name such as "adamw", or a factory, and its options.

    Args:
        cls: an optimizer class, the name of one of torch's (in any case), or a callable that takes the
            parameters (a `functools.partial`, for example).
        params: maps the model to parameters or parameter groups; all trainable parameters if None.
        kwargs: options such as `lr`, in the optimizer's own names.

    Raises:
        UnknownNameError: the name or an option does not exist.

    >>> OptimSpec("sgd", lr=0.1, momentum=0.9)
    OptimSpec(SGD, lr=0.1, momentum=0.9)
    """

    def __init__(
        self,
        cls: str | Factory,
        *,
        params: Callable[[nn.Module], Iterable[Any]] | None = None,
        **kwargs: Any,
    ) -> None:
        self.cls = _optimizer_named(cls) if isinstance(cls, str) else cls
        if not callable(self.cls):
            raise InputError(f"OptimSpec: {cls!r} is not an optimizer class, name or factory")
        self.params = params
        self.kwargs = kwargs
        _check_options(self.cls, kwargs)

    @classmethod
    def from_string(cls, name: str, **kwargs: Any) -> OptimSpec:
        """The spec of torch's optimizer called `name`, with `kwargs` as its options."""
        return cls(name, **kwargs)

    def with_options(self, **kwargs: Any) -> OptimSpec:
        """This spec with `kwargs` added or replaced."""
        return OptimSpec(self.cls, params=self.params, **{**self.kwargs, **kwargs})

    def build(self, model: nn.Module | Iterable[Any]) -> Optimizer:
        """The optimizer over `model`'s trainable parameters, or over the given parameters or groups."""
        return self.cls(self.groups(model) if isinstance(model, nn.Module) else list(model), **self.kwargs)

    def groups(self, model: nn.Module) -> list[Any]:
        """What the optimizer of `model` gets: its trainable parameters, or what `params` makes of it."""
        if self.params is not None:
            return list(self.params(model))
        trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
        if not trainable:
            raise InputError(f"OptimSpec: {type(model).__name__} has no parameter that requires a gradient")
        return trainable

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, OptimSpec):
            return NotImplemented
        return (self.cls, self.params, self.kwargs) == (other.cls, other.params, other.kwargs)

    __hash__ = None  # type: ignore[assignment]  # options may be lists

    def __repr__(self) -> str:
        name = getattr(self.cls, "__name__", repr(self.cls))
        return f"OptimSpec({', '.join([name, *(f'{k}={v!r}' for k, v in self.kwargs.items())])})"


OptimizerLike: TypeAlias = str | OptimSpec | Factory | Mapping[str, Any]


def ensure_optim_spec(
    optim: OptimizerLike | None, default: OptimSpec | None = None, **kwargs: Any
) -> OptimSpec:
    """An OptimSpec from whatever names an optimizer; `kwargs` are added to its options.

    `optim` may be an OptimSpec, a name, a class, a factory, or a mapping as experiment files write it:
    `{name: adamw, lr: 0.001}`. None is `default`, or AdamW.

    Raises:
        UnknownNameError: the name or an option does not exist.
        InputError: an option is given twice with different values, a mapping has no `name`, or it is an
            optimizer that is built already.

    >>> ensure_optim_spec({"name": "adam", "lr": 0.01})
    OptimSpec(Adam, lr=0.01)
    """
    if optim is None:
        return (default or OptimSpec(torch.optim.AdamW)).with_options(**kwargs)
    if isinstance(optim, Optimizer):
        name = type(optim).__name__
        raise InputError(
            f"optimizer {name}(...): is built already; each rank builds its own, pass OptimSpec({name}, lr=...)"
        )
    if isinstance(optim, Mapping):
        options = dict(optim)
        name = options.pop("name", None)
        if name is None:
            raise InputError(f"optimizer {dict(optim)!r}: say which one, as in {{name: adamw, lr: 0.001}}")
        optim = OptimSpec(name, **options)
    spec = optim if isinstance(optim, OptimSpec) else OptimSpec(optim)
    for name, value in kwargs.items():
        if spec.kwargs.get(name, value) != value:
            raise InputError(f"{spec!r}: {name}={value!r} is given as well; give one of them")
    return spec.with_options(**kwargs) if kwargs else spec


def _optimizer_named(name: str) -> Factory:
    known = _torch_optimizers()
    if name.lower() not in known:
        raise unknown_name("optimizer", name, known)
    return known[name.lower()]


def _check_options(factory: Factory, options: Mapping[str, Any]) -> None:
    """Refuse an option that `factory` does not take, here and not when the first rank builds it."""
    try:
        parameters = list(inspect.signature(factory).parameters.values())[1:]
    except (TypeError, ValueError):  # a callable written in C has no signature
        return
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return
    accepted = [p.name for p in parameters]
    unknown = [name for name in options if name not in accepted]
    if unknown:
        raise unknown_names(f"option of {getattr(factory, '__name__', factory)}", unknown, accepted)
    for name, value in options.items():
        if name == "lr" and isinstance(value, str):
            raise InputError(
                f"optimizer option lr={value!r} must be a number; in YAML write 1.0e-3, not 1e-3"
            )
