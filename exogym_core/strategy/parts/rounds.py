"""Rounds under way while training continues, and fragments of a model, each with rounds of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from exogym_core.strategy.options import Options, name_in, option, positive_int
from exogym_core.strategy.parts.average import Averaging, Flight
from exogym_core.strategy.parts.flat import flatten
from exogym_core.strategy.parts.outer import GlobalModel, OuterAveraging, OuterOptimizer, OuterStep
from exogym_core.strategy.parts.state import State, Stateful
from netsim.errors import InputError, about_option, unknown_names

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from torch.optim import Optimizer

    from exogym_core.strategy.base import Strategy
    from exogym_core.strategy.optimizers import OptimSpec
    from exogym_core.strategy.participation.site import Site

__all__ = [
    "FragmentOptimizer",
    "FragmentOptions",
    "Fragments",
    "Round",
    "UnderWay",
    "embeddings_of",
    "fragments_of",
    "layers_of",
    "merged",
    "packed",
    "second_order",
]


class Round:
    """Values on their way to their means over sites.

    Args:
        site: this rank's.
        averaging: how.
        sent: this site's values, flat; they stay as they are.
        residuals: rounding errors of earlier rounds, which this one changes; empty: they are not kept.
        calls: of a round before a restart, which are repeated.

    Attributes:
        sent: as given.
    """

    @torch.no_grad()
    def __init__(
        self,
        site: Site,
        averaging: Averaging,
        sent: Sequence[Tensor],
        residuals: Sequence[Tensor | None] = (),
        calls: Sequence[Any] = (),
    ) -> None:
        self.sent = sent
        self._owed = [residual.clone() for residual in residuals if residual is not None]
        copies = [flatten([flat], site.between) for flat in sent]
        work = zip(copies, residuals or [None] * len(sent), calls or [()] * len(sent), strict=True)
        self._flights = [
            Flight(site.steps(averaging, flat, residual), site.between, numbers)
            for flat, residual, numbers in work
        ]

    def wait(self) -> list[Tensor]:
        """Wait for the mean of each bucket, a flat tensor."""
        return [flight.wait() for flight in self._flights]

    def go_on(self) -> None:
        """Post the next call, if its inputs have arrived; never waits."""
        for flight in self._flights:
            flight.go_on()

    def state_dict(self) -> dict[str, Any]:
        """Values sent, and the calls that carry them."""
        sent, owed = ([flat.clone() for flat in flats] for flats in (self.sent, self._owed))
        return {"sent": sent, "owed": owed, "calls": [flight.calls for flight in self._flights]}


class UnderWay(Stateful):
    """Place of a round that may be under way between two steps; a checkpoint keeps it, and it is sent again.

    Args:
        site: this rank's; with groups of its own (`Site.apart`) where the collectives of several are under way at once.
        averaging, residuals: of its rounds.

    Attributes:
        round: under way; None: there is none.
    """

    def __init__(
        self, site: Site, averaging: Averaging | None = None, residuals: Sequence[Tensor | None] = ()
    ) -> None:
        self._site, self._averaging, self._residuals = site, averaging or Averaging(), residuals
        self._is_staged = site.inside is not None or self._averaging.codec is not None
        self.round: Round | None = None

    def send(self, values: Sequence[Tensor], calls: Sequence[Any] = ()) -> Round:
        """Send flat values on their way to their means."""
        self.round = Round(self._site, self._averaging, values, self._residuals, calls)
        return self.round

    def take(self) -> Round | None:
        """The round, which is under way no longer."""
        taken, self.round = self.round, None
        return taken

    def go_on(self) -> None:
        """Post the next calls of a round of several calls, where their inputs have arrived; never waits."""
        if self._is_staged and self.round is not None:
            self.round.go_on()

    def state_dict(self) -> dict[str, Any]:
        """The round under way."""
        return {} if self.round is None else self.round.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Send a round that was under way again."""
        self.round = None
        if state:
            for residual, owed in zip(self._residuals, state["owed"], strict=False):
                if residual is not None:
                    residual.copy_(owed)
            self.send(state["sent"], state["calls"])


class FragmentOptimizer(OuterOptimizer):
    """Outer optimizer of fragments; the default's learning rate is 0.4."""

    default_lr: ClassVar[float] = 0.4


def _module_names(where: str, name: str, value: Any) -> Any:
    """`value` as a list of names of modules, or of lists of them."""
    lists = (
        [[each] if isinstance(each, str) else each for each in value]
        if isinstance(value, list | tuple)
        else [value]
    )
    if not all(
        isinstance(each, list | tuple) and all(isinstance(one, str) for one in each) for each in lists
    ):
        raise InputError(f"{where}: {name}={value!r} must be a list of modules' names, or of lists of them")
    return value


class FragmentOptions(Options):
    """Fragments of a model.

    Args:
        num_fragments: P; a third of the model's layers if it is not given, one at least.
        fragments: instead, which modules make up each: a list of names, or of lists of names; what none names is a
            fragment of its own.
        pattern: "strided" (fragment p has layers p, p + P, ...) or "sequential" (neighbouring layers).

    Attributes:
        H: steps in which each fragment leaves once: an option of the strategy.
        tau: steps from a fragment's departure to its application, where the strategy has that option.
    """

    H: ClassVar[Any] = None
    tau: ClassVar[Any] = 0

    num_fragments: int | None = option(None, positive_int)
    fragments: Sequence[str | Sequence[str]] | None = option(None, _module_names)
    pattern: str = option("strided", name_in("strided", "sequential"))

    def check(self, where: str) -> None:
        """Refuse options under which a fragment would be sent again before its mean arrives."""
        if self.H is None:
            raise InputError(
                f"{where}: has FragmentOptions, but no H, the steps in which each fragment leaves once: declare "
                "H: int = option(100, positive_int)"
            )
        if self.tau >= self.H:
            raise InputError(
                f"{where}: tau={self.tau} must be below H={self.H}: a fragment must arrive before it is sent again",
                about=("tau", "H"),
            )
        if self.num_fragments is not None and self.num_fragments > self.H:
            raise InputError(
                f"{where}: num_fragments={self.num_fragments} must be at most H={self.H}",
                about=("num_fragments", "H"),
            )
        if self.num_fragments is not None and self.fragments is not None:
            raise InputError(f"{where}: num_fragments and fragments say the same; give one of them")


class Fragments(GlobalModel):
    """Global parameters and outer optimizers of a model's fragments, which leave one by one.

    Args:
        strategy: whose parameters are cut.
        options: how.
        num_steps: H, in which each leaves once.
        optimizer, averaging: of the outer steps.

    Attributes:
        members: indices of parameters, by fragment.
        outers, under_way: outer steps, and the places of their rounds, by fragment.
        sent_at: the step after which each last left; 0 before it has.
    """

    state = State("outers", "sent_at", "under_way")

    def __init__(
        self,
        strategy: Strategy,
        options: FragmentOptions,
        num_steps: int,
        optimizer: OptimSpec,
        averaging: OuterAveraging,
    ) -> None:
        names = [name for name, _ in strategy.named_trainable()]
        self.members = fragments_of(names, options, num_steps, strategy.where)
        averaging = averaging.charged(strategy)
        parts = [[strategy.held[index] for index in members] for members in self.members]
        self.outers = [OuterStep(part, optimizer, averaging) for part in parts]
        self.under_way = [
            UnderWay(strategy.site.apart(), outer.averaging, outer.residuals) for outer in self.outers
        ]
        self.sent_at = [0] * len(parts)

    @property
    def away(self) -> list[int]:
        """Numbers of the fragments whose mean has been sent and not taken."""
        return [p for p, each in enumerate(self.under_way) if each.round is not None]

    def send(self, p: int, step: int) -> None:
        """Send a fragment's pseudo-gradients after this step."""
        self.sent_at[p] = step
        self.under_way[p].send(self.outers[p].values())

    def take(self, p: int) -> Round:
        """The round of a fragment, which is under way no longer."""
        taken = self.under_way[p].take()
        assert taken is not None
        return taken

    def go_on(self) -> None:
        """Post the next calls of fragments under way, where their inputs have arrived; never waits."""
        for each in self.under_way:
            each.go_on()

    def __len__(self) -> int:
        return len(self.members)

    @property
    def optimizers(self) -> list[Optimizer]:
        """The outer optimizers of all fragments."""
        return [outer.optim for outer in self.outers]

    @property
    def theta(self) -> list[Tensor]:
        """Global parameters, each fragment as last applied, in the model's order."""
        values: dict[int, Tensor] = {}
        for members, outer in zip(self.members, self.outers, strict=True):
            values |= zip(members, outer.theta, strict=True)
        return [values[index] for index in range(len(values))]


def layers_of(names: Sequence[str]) -> list[list[int]]:
    """Indices of parameters by layer: the module up to the first number in its name, or the one that owns them.

    >>> layers_of(["embed.weight", "blocks.0.a.weight", "blocks.0.b.weight", "blocks.1.a.weight", "scale"])
    [[0], [1, 2], [3], [4]]
    """
    layers: dict[str, list[int]] = {}
    for index, name in enumerate(names):
        parts = name.split(".")
        number = next((at for at, part in enumerate(parts) if part.isdecimal()), None)
        key = ".".join(parts[:-1] if number is None else parts[: number + 1]) or name
        layers.setdefault(key, []).append(index)
    return list(layers.values())


def fragments_of(
    names: Sequence[str], options: FragmentOptions, num_steps: int, where: str
) -> list[list[int]]:
    """Indices of the parameters called `names`, by fragment, each in the model's order.

    Raises:
        InputError: there are fewer layers than fragments, a fragment has no parameter, or there are more than H.
    """
    layers, named = layers_of(names), options.fragments
    count = options.num_fragments or max(1, len(layers) // 3)
    if named is not None:
        cut = _named(names, named, where)
    elif count > len(layers):
        raise InputError(
            f"{where}: num_fragments={count}, but the model has {len(layers)} layers; cut it into as many at most",
            about=("num_fragments",),
        )
    else:
        ends = [p * len(layers) // count for p in range(count + 1)]
        is_strided = options.pattern == "strided"
        parts = [layers[p::count] if is_strided else layers[ends[p] : ends[p + 1]] for p in range(count)]
        cut = [sorted(index for layer in fragment for index in layer) for fragment in parts]
    if len(cut) > num_steps:
        raise InputError(f"{where}: {len(cut)} fragments need an H of as many steps at least")
    return cut


def packed(sizes: Sequence[int], count: int, apart: Collection[int] = ()) -> list[list[int]]:
    """Indices of tensors of these sizes in `count` fragments of about equal size, fewer where there are fewer tensors.

    Greedily: the largest tensor left goes to the smallest fragment so far. Those `apart` share one of their own, if
    there are two fragments at least.

    >>> packed([4, 1, 3, 2], 2)
    [[0, 1], [2, 3]]
    >>> packed([4, 1, 3, 2], 3, apart=[0, 1])
    [[0, 1], [2], [3]]
    """
    among = [index for index in range(len(sizes)) if index not in apart or count == 1]
    cut = [[index for index in range(len(sizes)) if index in apart]] if len(among) < len(sizes) else []
    bins: list[list[int]] = [[] for _ in range(min(count - len(cut), len(among)))]
    for index in sorted(among, key=lambda index: -sizes[index]):
        smallest = min(bins, key=lambda members: sum(sizes[other] for other in members))
        smallest.append(index)
    return sorted(sorted(members) for members in [*cut, *bins])


def _named(names: Sequence[str], fragments: Sequence[str | Sequence[str]], where: str) -> list[list[int]]:
    left, cut = dict.fromkeys(range(len(names))), []
    for fragment in fragments:
        modules = [fragment] if isinstance(fragment, str) else list(fragment)
        members = [i for i in left if any(f"{names[i]}.".startswith(f"{module}.") for module in modules)]
        if not members:
            with about_option("fragments"):
                raise unknown_names(
                    f"fragment of {where}", modules, {name.rpartition(".")[0] or name for name in names}
                )
        for index in members:
            del left[index]
        cut.append(members)
    return [*cut, list(left)] if left else cut


def embeddings_of(model: nn.Module, parameters: Sequence[Tensor]) -> set[int]:
    """Indices of `parameters` that are embedding tables of `model`."""
    tables = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    return {index for index, parameter in enumerate(parameters) if id(parameter) in tables}


def merged(parts: Sequence[Tensor], weights: Sequence[float], *, by_direction: bool) -> Tensor:
    """Weighted mean of several tensors of one shape.

    With `by_direction` it is as long as they are in the mean, along the mean of their directions; displacements that
    disagree then do not shrink each other. Zero where directions cancel.

    >>> parts = [torch.tensor([2.0, 0.0]), torch.tensor([0.0, 4.0])]
    >>> merged(parts, [1, 1], by_direction=False)
    tensor([1., 2.])
    >>> round(float(merged(parts, [1, 1], by_direction=True).norm()), 6)
    3.0
    """
    total = sum(weights)
    if not by_direction:
        return _sum(parts, [weight / total for weight in weights])
    lengths = [float(part.norm()) for part in parts]
    units = [part / length if length else part for part, length in zip(parts, lengths, strict=True)]
    direction = _sum(units, weights)
    length = sum(weight * each for weight, each in zip(weights, lengths, strict=True)) / total
    norm = float(direction.norm())
    return direction * (length / norm) if norm else direction


def second_order(trained: Tensor, apart: Tensor, strength: float, per_steps: int | None) -> Tensor:
    """Displacement `trained` of a tensor, corrected to second order for a start `apart` from the present one.

    `t + lambda t * t * D` with t the training of some steps, lambda the `strength` over `per_steps`; where these are
    None the correction is as long as `strength` times t.
    """
    wide = torch.promote_types(trained.dtype, torch.float32)
    moved = trained.to(wide)
    term = moved * moved * apart.to(wide)
    if per_steps is None:
        term = term / term.norm().clamp(min=torch.finfo(wide).tiny) * (strength * moved.norm())
    else:
        term = term * (strength / per_steps)
    return trained + term.to(trained.dtype)


def _sum(parts: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    result = torch.zeros_like(parts[0])
    for part, weight in zip(parts, weights, strict=True):
        result.add_(part, alpha=weight)
    return result
