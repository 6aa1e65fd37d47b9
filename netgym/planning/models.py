"""Models of plans by name, and the memory that a worker needs for one."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from exogym_core.cost.flops import count_flops
from exogym_core.plain import reachable
from exogym_core.successors import refuse_unknown_options
from netgym.planning.tables import PLANNED_MODELS
from netgym.tasks.decoders import GPT, GPT_PRESETS, LLAMA_PRESETS, Llama
from netsim.errors import InputError, unknown_name
from netsim.units import shown

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from exogym_core.strategy.base import Strategy

__all__ = [
    "MOST_PARAMETERS",
    "SequenceModel",
    "kept_bytes",
    "memory_in_use",
    "payload_model",
    "planned_model",
    "read_shapes",
    "worker_memory",
]

_COUNTED_LAYERS = 2
MOST_PARAMETERS = 10**14


class SequenceModel:
    """A language model on the meta device, and the cost of a sequence.

    Args:
        model: maps (tokens, targets) to a loss.
        length: tokens a sequence.
        sequence_flops: None: counted.
        activation_bytes: None: counted with `sequence_flops`, else 0.
        checkpointed_bytes: None: all activations.
        samples: a batch; None: two rows of tokens and targets.

    Attributes:
        num_parameters: all of them.
        sequence_flops: of forward and backward over one sequence, counted by running them without values.
        activation_bytes: that one sequence's forward pass keeps for the backward pass, in fp32.
        checkpointed_bytes: the part kept where each layer is computed again: the layers' inputs, and the activations
            of one layer and of those outside of layers. Where layers are not known, all of them.
        epoch: steps of an epoch of its samples whose last batch is short, and that batch's share of a whole one; None:
            all are whole.
    """

    def __init__(
        self,
        model: nn.Module,
        length: int,
        sequence_flops: int | None = None,
        activation_bytes: int | None = None,
        checkpointed_bytes: int | None = None,
        samples: Any = None,
    ) -> None:
        self.model, self.length = model, length
        self.num_parameters = sum(parameter.numel() for parameter in model.parameters())
        tokens = torch.zeros(1, length, dtype=torch.long, device="meta")
        self.samples = (tokens, tokens) if samples is None else samples
        if sequence_flops is None:
            sequence_flops = int(count_flops(model, (tokens, tokens)).total)
            activation_bytes = kept_bytes(model, (tokens, tokens), length)
        self.sequence_flops = sequence_flops
        self.activation_bytes = activation_bytes or 0
        self.checkpointed_bytes = self.activation_bytes if checkpointed_bytes is None else checkpointed_bytes
        self.epoch: tuple[int, float] | None = None


def kept_bytes(model: nn.Module, batch: Any, length: int) -> int:
    """Bytes that a forward pass keeps for the backward pass, parameters aside, on the meta device.

    Attention scores are left out: fused attention keeps none, and on the meta device torch falls back to a kernel that
    does.
    """
    own = {each.untyped_storage()._cdata for each in (*model.parameters(), *model.buffers())}
    kept: dict[int, Any] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        is_score = tensor.dim() > 2 and tensor.shape[-3] > 1 and tensor.shape[-2:] == (length, length)
        if storage._cdata not in own and not is_score:
            kept[storage._cdata] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model(batch)
    return sum(int(storage.nbytes()) for storage in kept.values())


def planned_model(name: str, length: int = 2048, **options: Any) -> SequenceModel:
    """Model of this name on the meta device; nothing is allocated.

    Args:
        name: in `PLANNED_MODELS`, or a preset of the tasks' models as `llama-2m` or `gpt-base`.
        length: tokens a sequence.
        options: dimensions that replace the published ones.

    Raises:
        UnknownNameError: there is no such model, or it has no such option.

    >>> round(planned_model("llama-150m", 128).num_parameters / 1e6)
    215
    """
    model = _built(name, length, options)
    layers = len(model.blocks)
    if layers <= _COUNTED_LAYERS:
        return SequenceModel(model, length, *_counted(name, length, **options))
    # Layers are alike, so their operations are counted once: those of one more layer than another model has.
    (flops, kept), (more_flops, more_kept) = (
        _counted(name, length, **{**options, "num_layers": number}) for number in (1, _COUNTED_LAYERS)
    )
    width = next((each.in_features for each in model.modules() if isinstance(each, nn.Linear)), 0)
    return SequenceModel(
        model,
        length,
        flops + (layers - 1) * (more_flops - flops),
        kept + (layers - 1) * (more_kept - kept),
        kept + 4 * length * width * layers,
    )


@lru_cache(maxsize=256)  # counting takes longer than planning a small model; sweeps plan a model many times
def _counted(name: str, length: int, **options: Any) -> tuple[int, int]:
    """Operations of a sequence, and bytes that its forward pass keeps."""
    made = SequenceModel(_built(name, length, options), length)
    return made.sequence_flops, made.activation_bytes


def payload_model(shapes: Sequence[Sequence[int]], length: int = 2048) -> SequenceModel:
    """Parameters of these shapes without a known computation: 6 operations a parameter and token.

    Args:
        shapes: of the parameters, in the order in which they are sent.
        length: tokens a sequence.

    Source: Kaplan et al. 2020 (arXiv 2001.08361), section 2.1, without attention. Activations count 0.

    >>> payload_model([[1000, 1000], [1000]], 128).num_parameters
    1001000
    """
    model = nn.Module()
    for number, shape in enumerate(shapes):
        tensor = torch.empty([int(size) for size in shape], device="meta")
        model.register_parameter(f"tensor{number}", nn.Parameter(tensor))
    numbers = sum(parameter.numel() for parameter in model.parameters())
    return SequenceModel(model, length, 6 * numbers * length)


def read_shapes(path: Path) -> list[list[int]]:
    """Read the shapes of a model's parameters: a `.safetensors` file, or text with one such as `1024x4096` a line.

    Text from `#` on, and empty lines, are left out.

    Raises:
        InputError: the file cannot be read, or a line is no shape; names the line.
    """
    try:
        if path.suffix == ".safetensors":
            from safetensors import SafetensorError, safe_open

            try:
                with safe_open(path, "pt") as file:
                    shapes = [list(file.get_slice(name).get_shape()) for name in file.keys()]  # noqa: SIM118
            except SafetensorError as error:
                raise InputError(f"{path}: no safetensors file ({error})") from None
        else:
            shapes = []
            for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
                text = line.partition("#")[0].strip()
                sizes = text.split("x")
                if text and not all(
                    size.isascii() and size.isdecimal() and 0 < int(size) < 10**15 for size in sizes
                ):
                    raise InputError(
                        f"{path}:{number}: expected a shape such as 1024x4096, got {shown(text)}"
                    )
                shapes += [[int(size) for size in sizes]] if text else []
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from None
    if not shapes:
        raise InputError(f"{path}: holds no shape; write one such as 1024x4096 a line")
    if sum(math.prod(shape) for shape in shapes) >= MOST_PARAMETERS:
        raise InputError(f"{path}: more than {MOST_PARAMETERS:.0e} parameters")
    return shapes


_FAMILIES: dict[str, tuple[type[Llama | GPT], Any]] = {
    "llama": (Llama, LLAMA_PRESETS),
    "gpt": (GPT, GPT_PRESETS),
}


class _WithoutInit(TorchFunctionMode):
    """Functions of `torch.nn.init` do nothing."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call `func`, unless it is one of those."""
        kwargs = kwargs or {}
        if getattr(func, "__module__", None) == nn.init.__name__:
            return kwargs["tensor"]
        return func(*args, **kwargs)


def _built(name: str, length: int, options: dict[str, Any]) -> Llama | GPT:
    family, _, preset = name.partition("-")
    kind, presets = (Llama, {}) if name in PLANNED_MODELS else _FAMILIES.get(family, (Llama, {}))
    if name not in PLANNED_MODELS and preset not in presets:
        every = [f"{family}-{key}" for family, (_, keys) in _FAMILIES.items() for key in keys]
        raise unknown_name("model to plan", name, [*PLANNED_MODELS, *every])
    refuse_unknown_options(f"option of model {name}", kind, options)
    sizes: Any = PLANNED_MODELS.get(name, {"preset": preset})
    with torch.device("meta"), _WithoutInit():
        return kind(**{**sizes, "block_size": length, **options})


def memory_in_use(
    states: Mapping[str, int], activations: int, checkpointed: int, choices: Sequence[str]
) -> dict[str, int]:
    """Bytes on a worker's devices by purpose, `activations` included, under the given choices.

    Args:
        states: bytes of `worker_memory`.
        activations: bytes of activations.
        checkpointed: bytes of activations where each layer is recomputed.
        choices: names in MEMORY_CHOICES.
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

    Shared storages count once. Gradients are as large as the optimizer's parameters: a rank's part where
    a replica is sharded. Activations are added by `memory_in_use`; what a round holds for an
    instant is not counted.
    """
    first = strategy.optimizers[:1]
    updated = [each for optimizer in first for group in optimizer.param_groups for each in group["params"]]
    purposes: dict[str, Any] = {
        "weights": [*model.parameters(), *model.buffers()],
        "gradients": [parameter.grad for parameter in (*model.parameters(), *updated)],
        "optimizer": [optimizer.state for optimizer in first],
        "outer": vars(strategy),
    }
    counted: dict[str, int] = {}
    seen: set[int] = set()
    for name, things in purposes.items():
        # Tensors with values are random states and tables, equal in all plans.
        tensors = (
            each for each in reachable(things, _is_searched) if isinstance(each, Tensor) and each.is_meta
        )
        storages = {each.untyped_storage()._cdata: each.untyped_storage() for each in tensors}
        counted[name] = sum(storage.nbytes() for key, storage in storages.items() if key not in seen)
        seen |= storages.keys()
    counted["gradients"] = sum(each.nbytes for each in updated if each.requires_grad)
    return {**counted, "total": sum(counted.values())}


def _is_searched(value: object) -> bool:
    """True for strategies, models and objects of torch, not for those of communicators, which are the transport's."""
    module = type(value).__module__
    return (
        not isinstance(value, Tensor)
        and module.partition(".")[0] in ("exogym_core", "netgym", "torch")
        and not module.startswith("exogym_core.communicator")
    )
