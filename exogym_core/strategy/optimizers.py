"""Optimizers and learning-rate schedules as values, built by every rank on its own parameters."""

from __future__ import annotations

import inspect
import math
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from itertools import chain
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, Union, get_args, get_origin, get_type_hints

import torch
from torch import nn
from torch.optim import Optimizer, lr_scheduler
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, ReduceLROnPlateau

from exogym_core.strategy.options import flag, number, positive_int
from exogym_core.strategy.parts.muon import Lion
from exogym_core.successors import refuse_unknown_options
from netsim.errors import InputError, about_option, unknown_name
from netsim.units import format_count, plain_numbers

if TYPE_CHECKING:
    from exogym_core.strategy.base import Strategy

__all__ = [
    "OPTIMIZERS",
    "LRSchedulerLike",
    "OptimSpec",
    "OptimizerLike",
    "build_scheduler",
    "cosine_factor",
    "ensure_optim_spec",
    "require_plain_sgd",
    "resolve_scheduler",
    "schedule_end",
    "state_bytes",
    "trial_step",
    "try_schedule",
    "without_updates",
]


Factory: TypeAlias = Callable[..., Optimizer]

#: Optimizers by name: torch's but L-BFGS, which needs a closure, and Lion.
OPTIMIZERS: Mapping[str, type[Optimizer]] = {
    name: each
    for name, each in vars(torch.optim).items()
    if isinstance(each, type) and issubclass(each, Optimizer) and name not in ("Optimizer", "LBFGS")
} | {"Lion": Lion}


class OptimSpec:
    """An optimizer yet to be built: a class, a name such as "adamw", or a factory, and its options.

    Args:
        cls: an optimizer class, the name of one of torch's or `lion` (in any case), or a callable that takes the
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
        known: dict[str, Factory] = {each.lower(): made for each, made in OPTIMIZERS.items()}
        if isinstance(cls, str) and cls.lower() not in known:
            with about_option("name"):
                raise unknown_name("optimizer", cls, known)
        self.cls = known[cls.lower()] if isinstance(cls, str) else cls
        if not callable(self.cls) or (isinstance(self.cls, type) and not issubclass(self.cls, Optimizer)):
            raise InputError(f"OptimSpec: {cls!r} is not an optimizer class, name or factory")
        if self.cls is torch.optim.LBFGS:
            raise InputError(
                "optimizer LBFGS: computes the loss several times a step, by a closure; take another"
            )
        if params is not None and not callable(params):
            what = f"optimizer {_name_of(self.cls)}: params={params!r} must be a function of the model: leave it out"
            raise InputError(what, about=("params",))
        self.params = params
        self.kwargs = plain_numbers(kwargs)
        _check_options(self.cls, self.kwargs)

    @classmethod
    def from_string(cls, name: str, **kwargs: Any) -> OptimSpec:
        """The spec of the optimizer called `name`, with `kwargs` as its options."""
        return cls(name, **kwargs)

    def with_options(self, **kwargs: Any) -> OptimSpec:
        """Copy with `kwargs` added or replaced."""
        return OptimSpec(self.cls, params=self.params, **{**self.kwargs, **kwargs})

    def build(self, model: nn.Module | Iterable[Any], held: Callable[[Any], Any] | None = None) -> Optimizer:
        """The optimizer over `model`'s trainable parameters, or over the given parameters or groups.

        Args:
            model: a model, or parameters or groups.
            held: maps a parameter or a group to the part of it that this rank updates; None: to itself.

        Raises:
            InputError: one of torch's refuses the value of an option; a factory returns no optimizer, or one that does
                not update all that it was given, or updates something else.
        """
        if not isinstance(model, nn.Module):
            groups = list(model)
        elif self.params is not None:
            groups = list(self.params(model))
        else:
            groups = [parameter for parameter in model.parameters() if parameter.requires_grad]
            if not groups:
                raise InputError(
                    f"OptimSpec: {type(model).__name__} has no parameter that requires a gradient"
                )
        if held is not None:
            groups = list(map(held, groups))
        try:
            built: Any = self.cls(groups, **self.kwargs)
        except (TypeError, ValueError, RuntimeError) as error:
            if not _is_torchs(self.cls):
                raise
            remedy = ""
            if self.cls is torch.optim.Muon:
                remedy = (
                    "; MuLoCoStrategy, and OptimSpec(TorchMuon, params=split_by_shape) of strategy.parts.muon, give "
                    "matrices to Muon and the others to AdamW"
                )
            wrong = _culprit(lambda options: self.cls(groups, **options), self.kwargs)
            given = f"{_name_of(self.cls)}: {wrong}={self.kwargs[wrong]!r}" if wrong else repr(self)
            raise InputError(f"optimizer {given}: {error}{remedy}", about=[wrong] if wrong else ()) from error
        if self.params is None and _is_torchs(self.cls):  # which takes all that it is given
            return built  # type: ignore[no-any-return]
        if not isinstance(built, Optimizer):
            returned = f"the class {built.__name__}" if isinstance(built, type) else f"{built!r:.60}"
            raise InputError(
                f"optimizer {self!r}: the factory returned {returned}: return a torch.optim.Optimizer over the "
                "parameters that it gets"
            )
        self._check_covers(built, groups, model, held)
        return built

    def _check_covers(self, built: Optimizer, groups: list[Any], model: Any, held: Any) -> None:
        """Refuse an optimizer that leaves out parameters to train, or updates others."""
        covered = {id(each): each for group in built.param_groups for each in group["params"]}
        if isinstance(model, nn.Module):
            parameters = model.named_parameters()
            named = [
                (repr(name), held(each) if held else each, each.requires_grad) for name, each in parameters
            ]
        else:
            members = [each["params"] if isinstance(each, Mapping) else [each] for each in groups]
            named = [(f"parameter {n}", each, True) for n, each in enumerate(chain.from_iterable(members))]
        trainable = [(name, each) for name, each, is_trained in named if is_trained]
        left_out = [name for name, each in trainable if id(each) not in covered]
        if left_out:
            raise InputError(
                f"optimizer {self!r}: leaves out {left_out[0]} ({len(left_out)} of "
                f"{format_count(len(trainable), 'parameter')}): give it all of them, or set requires_grad = False on "
                "those that are not to be trained"
            )
        foreign = [covered[key] for key in covered.keys() - {id(each) for _, each, _ in named}]
        if foreign:
            raise InputError(
                f"optimizer {self!r}: updates {format_count(len(foreign), 'parameter')}, one of shape "
                f"{tuple(foreign[0].shape)}, that the model does not have: make it from the parameters that it gets"
            )

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, OptimSpec):
            return NotImplemented
        return (self.cls, self.params, self.kwargs) == (other.cls, other.params, other.kwargs)

    __hash__ = None  # type: ignore[assignment]  # options may be lists

    def __repr__(self) -> str:
        return (
            f"OptimSpec({', '.join([_name_of(self.cls), *(f'{k}={v!r}' for k, v in self.kwargs.items())])})"
        )


OptimizerLike: TypeAlias = str | OptimSpec | Factory | Mapping[str, Any]


def ensure_optim_spec(
    optim: OptimizerLike | None, default: OptimSpec | None = None, **kwargs: Any
) -> OptimSpec:
    """An OptimSpec from any form of naming an optimizer; `kwargs` are added to its options.

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
            raise InputError(f"{spec!r}: {name}={value!r} is given as well; give one of them", about=(name,))
    return spec.with_options(**kwargs) if kwargs else spec


def state_bytes(spec: OptimSpec, model: nn.Module) -> int:
    """Bytes that one of torch's optimizers keeps after a step on `model`; 0 for others, and where a step needs values.

    Found by a step without values on one parameter of each shape.
    """
    if not _is_torchs(spec.cls):
        return 0
    trainable = (parameter for parameter in model.parameters() if parameter.requires_grad)
    counts = Counter((parameter.shape, parameter.dtype) for parameter in trainable)
    of_shapes = [nn.Parameter(torch.empty(shape, dtype=dtype, device="meta")) for shape, dtype in counts]
    for parameter in of_shapes:
        parameter.grad = torch.empty_like(parameter)
    try:
        optimizer = spec.build(of_shapes)
        trial_step(optimizer)
    except (InputError, RuntimeError):
        return 0
    return sum(
        count * sum(value.nbytes for value in optimizer.state[parameter].values() if torch.is_tensor(value))
        for parameter, count in zip(of_shapes, counts.values(), strict=True)
    )


def trial_step(optimizer: Optimizer) -> None:
    """Step without looking for an accelerator, which starts CUDA: no process forked after that could use it."""
    for name in (
        "_accelerator_graph_capture_health_check",
        "_cuda_graph_capture_health_check",
    ):  # by torch's version
        setattr(optimizer, name, lambda: None)
    optimizer.step()


def _name_of(factory: Any) -> str:
    return getattr(factory, "__name__", None) or repr(factory)


def _is_torchs(factory: Any) -> bool:
    return getattr(factory, "__module__", "").startswith("torch.optim")


def _check_options(factory: Factory, options: Mapping[str, Any]) -> None:
    """Refuse an option that `factory` does not take, here and not when the first rank builds it."""
    refuse_unknown_options(f"option of {_name_of(factory)}", factory, options, skipped=1)
    called: Any = factory
    if isinstance(called, partial):
        called, options = called.func, {**called.keywords, **options}
    _check_types(f"optimizer {_name_of(called)}", called, options)


def _check_types(where: str, factory: Any, options: Mapping[str, Any]) -> None:
    """Refuse plain values, such as texts, where a class of torch is annotated with another type."""
    if not (_is_torchs(factory) and isinstance(factory, type) and "__init__" in vars(factory)):
        return
    # Names that torch imports for type checkers alone.
    names = {"Callable": Callable, "Iterable": list, "Sequence": list}
    hints = get_type_hints(vars(factory)["__init__"], localns=names)
    for name, value in options.items():
        hint = hints.get(name, Any)
        wanted, remedy = _expected(value, hint), ""
        counts = int in (hint, *get_args(hint)) and name != "last_epoch"
        if not wanted and counts and isinstance(value, int | float) and value < 0:
            wanted = "at least 0"
        if isinstance(value, str) and value.startswith("("):
            remedy = f"; in YAML write a list: [{value.strip('()')}]"
        if wanted:
            raise InputError(f"{where}: {name}={value!r} must be {wanted}{remedy}", about=(name,))


# What files hold; the rest is torch's to check.
_PLAIN = (bool, int, float, str, list, tuple, dict, NoneType)
_WORDS = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    Callable: "a function",
}


def _expected(value: Any, hint: Any) -> str:
    """Description of what `hint` expects in the place of a plain `value`; "" where it fits."""
    kind, parts = get_origin(hint) or hint, get_args(hint)
    if kind in (Union, UnionType):
        words = [_expected(value, part) for part in parts]
        return "" if "" in words else " or ".join(word for word in words if word != "left out")
    if kind is Literal:
        return "" if value in parts else " or ".join(map(repr, parts))
    if kind is Any or not isinstance(value, _PLAIN):
        return ""
    if kind in (list, tuple) and isinstance(value, list | tuple):
        parts = parts if kind is tuple else parts * len(value)
        if len(parts) != len(value):
            return f"a list of {len(parts)}"
        words = [_expected(each, part) for each, part in zip(value, parts, strict=True)]
        return next((f"a list, each of it {word}" for word in words if word), "")
    if isinstance(value, bool) or kind not in (int, float):
        fits = value is None if kind is NoneType else isinstance(value, kind)
    else:
        fits = isinstance(value, int | float) and (kind is float or value == int(value))
    return "" if fits else "a list" if kind in (list, tuple) else _WORDS.get(kind, "left out")


def _culprit(attempt: Callable[[dict[str, Any]], Any], options: Mapping[str, Any]) -> str | None:
    """The option without which `attempt` succeeds, or with 1 in its place; None where that is no single one."""
    for name in options:
        others = {other: value for other, value in options.items() if other != name}
        for changed in (others, others | {name: 1}):
            with suppress(Exception):
                attempt(changed)
                return name
    return None


LRSchedulerLike: TypeAlias = str | Callable[..., LRScheduler]


def cosine_factor(
    step: int,
    *,
    warmup_steps: int = 1,
    cosine_anneal: bool = False,
    max_steps: int = 1,
    floor: float = 0.1,
) -> float:
    """Factor of "lambda_cosine" on the learning rate at the 0-based `step`; never 0 before `max_steps`.

    Linear warm-up `(step + 1) / warmup_steps`, then 1, or with `cosine_anneal` half a cosine from 1 down
    to `floor` at `max_steps` (0.1 as in EXO Gym; 0 as in OpenDiLoCo).

    >>> [cosine_factor(step, warmup_steps=4) for step in range(5)]
    [0.25, 0.5, 0.75, 1.0, 1.0]
    """
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    if not cosine_anneal:
        return 1.0
    progress = min(1.0, (step - warmup_steps) / max(1, max_steps - warmup_steps))
    return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress))


def resolve_scheduler(scheduler: LRSchedulerLike, options: Mapping[str, Any]) -> LRSchedulerLike:
    """`scheduler`, its name looked up and its options checked, before any rank starts.

    Raises:
        UnknownNameError: no schedule or option of that name.
        InputError: a schedule that needs a metric, or an option that is wrong or missing.
    """
    where = "lr_scheduler_kwargs"
    if scheduler == "lambda_cosine":
        with about_option(where):
            refuse_unknown_options("option of lambda_cosine", cosine_factor, options, skipped=1)
            given = {name: value for name, value in options.items() if value is not None}
            checks: dict[str, Callable[[str, str, Any], Any]] = {
                "warmup_steps": positive_int,
                "max_steps": positive_int,
                "floor": number,
                "cosine_anneal": flag,
            }
            for name in [name for name in checks if name in given]:
                with about_option(name):
                    if given[name] or checks[name] is not positive_int:  # no steps are none
                        checks[name](where, name, given[name])
            if given.get("floor", 0) > 1:
                raise InputError(
                    f"{where}: floor={given['floor']!r} must be a share of the learning rate, 0 to 1",
                    about=("floor",),
                )
        return scheduler
    with about_option("lr_scheduler"):
        if isinstance(scheduler, str):
            classes = {name: getattr(lr_scheduler, name) for name in lr_scheduler.__all__}
            if scheduler not in classes:
                raise unknown_name("lr_scheduler", scheduler, ["lambda_cosine", *classes])
            scheduler = classes[scheduler]
        if scheduler is ReduceLROnPlateau:
            raise InputError(
                "lr_scheduler: ReduceLROnPlateau needs a metric; use a schedule that counts steps"
            )
        if not callable(scheduler):
            raise InputError(f"lr_scheduler={scheduler!r} must be 'lambda_cosine' or a torch scheduler class")
    with about_option(where):
        refuse_unknown_options(f"option of {_name_of(scheduler)}", scheduler, options, skipped=1)
        try:
            inspect.signature(scheduler).bind(None, **options)
        except TypeError as error:
            raise InputError(f"{where}: {_name_of(scheduler)}: {error}") from None
        except ValueError:  # no signature to look at
            pass
        _check_types(f"{where}: {_name_of(scheduler)}", scheduler, options)
    return scheduler


def schedule_end(scheduler: LRSchedulerLike | None, options: Mapping[str, Any], max_steps: int) -> int | None:
    """The step at which a schedule ends that depends on a run's `max_steps`; None for others."""
    if scheduler != "lambda_cosine" or not options.get("cosine_anneal"):
        return None
    return min(options.get("max_steps") or max_steps, max_steps)


def build_scheduler(
    optimizer: Optimizer, scheduler: LRSchedulerLike, options: Mapping[str, Any], max_steps: int
) -> LRScheduler:
    """The schedule on `optimizer` for a run of `max_steps` steps."""
    if scheduler != "lambda_cosine":
        resolved = resolve_scheduler(scheduler, options)
        assert callable(resolved)
        return resolved(optimizer, **options)
    # `null` in a file is the default.
    given = {name: value for name, value in options.items() if value is not None}
    if (end := schedule_end(scheduler, given, max_steps)) is not None:
        given["max_steps"] = end
    return LambdaLR(optimizer, partial(cosine_factor, **given))


def try_schedule(
    spec: OptimSpec,
    model: nn.Module,
    scheduler: LRSchedulerLike | None,
    options: Mapping[str, Any] | None,
    num_steps: int,
) -> None:
    """Take a schedule of torch's to a run's last step, on an optimizer of `model` that updates nothing.

    Raises:
        InputError: it cannot be built, or fails at a step.
    """
    if scheduler is None or scheduler == "lambda_cosine":  # which is checked where it is given
        return
    options = options or {}
    step = 0

    def attempt(options: Mapping[str, Any]) -> None:
        nonlocal step
        optimizer = spec.build(model)
        schedule = build_scheduler(optimizer, scheduler, options, num_steps)
        for step in range(num_steps + 1):
            rates = [float(group["lr"]) for group in optimizer.param_groups]
            if not all(-1e-9 < rate < math.inf for rate in rates):
                raise ValueError(f"the learning rate is {min(rates):g}")
            if step < num_steps:
                schedule.step()

    with without_updates():
        try:
            attempt(options)
        except Exception as error:
            fault = f"fails at step {step + 1} of {num_steps}: {type(error).__name__}: {error}"
            wrong = _culprit(attempt, options)
            if wrong is None:
                given = ", ".join(f"{name}={value!r}" for name, value in options.items())
                raise InputError(
                    f"lr_scheduler={_name_of(scheduler)}({given}): {fault}", about=("lr_scheduler",)
                ) from error
            if isinstance(error, ZeroDivisionError):
                fault = "must be at least 1"
            with about_option("lr_scheduler_kwargs"):
                raise InputError(
                    f"lr_scheduler_kwargs: {_name_of(scheduler)}: {wrong}={options[wrong]!r}: {fault}",
                    about=(wrong,),
                ) from error


@contextmanager
def without_updates() -> Iterator[None]:
    """Schedules may advance in here though their optimizers have not made a step yet."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step")
        yield


def require_plain_sgd(strategy: Strategy) -> None:
    """Refuse an optimizer that would take for gradients what a strategy `applies` as it is.

    Raises:
        InputError: it is neither the strategy's own, nor SGD without momentum, nor a factory of your own.
    """
    spec = strategy.optim_spec
    given = spec.cls if isinstance(spec.cls, type) else torch.optim.SGD
    accepted = given is strategy.default_optim.cls or issubclass(given, torch.optim.SGD)
    if not accepted or spec.kwargs.get("momentum"):
        raise InputError(
            f"{type(strategy).__name__}: optim_spec={given.__name__} would take {strategy.applies} for gradients, "
            "which is another algorithm; leave optim_spec out and write lr= (SGD without momentum applies them)",
            about=("optim_spec", "lr"),
        )
