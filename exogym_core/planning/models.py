"""Language models by name in their published dimensions, on the meta device: shapes without values."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from exogym_core.cost.flops import count_flops
from exogym_core.tasks.gpt import GPT, GPT_PRESETS
from exogym_core.tasks.llama import LLAMA_PRESETS, Llama
from netsim.files.errors import unknown_name

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["PLANNED_MODELS", "SequenceModel", "kept_bytes", "planned_model", "without_values"]

_COUNTED_LAYERS = 2


def _llama(width: int, mlp: int, layers: int, heads: int, kv_heads: int, vocabulary: int) -> dict[str, int]:
    return {
        "width": width,
        "mlp_width": mlp,
        "num_layers": layers,
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "vocab_size": vocabulary,
    }


#: Dimensions as published: OpenDiLoCo (arXiv 2407.07852) for 150m and 1b, Llama (2302.13971), Llama 2 (2307.09288),
#: Llama 3 (2407.21783) and INTELLECT-1 (2412.01152). Embedding and head are not tied.
PLANNED_MODELS: dict[str, dict[str, int]] = {
    "llama-150m": {"vocab_size": 32000, **LLAMA_PRESETS["150m"]},
    "llama-1b": {"vocab_size": 32000, **LLAMA_PRESETS["1b"]},
    "llama-7b": _llama(4096, 11008, 32, 32, 32, 32000),
    "llama-13b": _llama(5120, 13824, 40, 40, 40, 32000),
    "llama-33b": _llama(6656, 17920, 60, 52, 52, 32000),
    "llama-65b": _llama(8192, 22016, 80, 64, 64, 32000),
    "llama-2-70b": _llama(8192, 28672, 80, 64, 8, 32000),
    "llama-3-8b": _llama(4096, 14336, 32, 32, 8, 128256),
    "llama-3-70b": _llama(8192, 28672, 80, 64, 8, 128256),
    "llama-3-405b": _llama(16384, 53248, 126, 128, 8, 128256),
    "intellect-1": _llama(4096, 14336, 42, 32, 8, 128256),
}


class SequenceModel:
    """A language model on the meta device and what a sequence costs it.

    Args:
        model: maps (tokens, targets) to a loss.
        length: tokens a sequence.
        sequence_flops: if known already.
        activation_bytes: likewise; 0 where they are not known.
        checkpointed_bytes: likewise.

    Attributes:
        num_parameters: all of them.
        sequence_flops: of forward and backward over one sequence, counted by running them without values.
        activation_bytes: that one sequence's forward pass keeps for the backward pass, in fp32.
        checkpointed_bytes: of these what is kept where each layer is computed again: the layers' inputs, and what one
            layer and those outside of layers keep. Where layers are not known, all of them.
    """

    def __init__(
        self,
        model: nn.Module,
        length: int,
        sequence_flops: int | None = None,
        activation_bytes: int | None = None,
        checkpointed_bytes: int | None = None,
    ) -> None:
        self.model, self.length = model, length
        self.num_parameters = sum(parameter.numel() for parameter in model.parameters())
        tokens = torch.zeros(1, length, dtype=torch.long, device="meta")
        if sequence_flops is None:
            sequence_flops = int(count_flops(model, (tokens, tokens)).total)
            activation_bytes = kept_bytes(model, (tokens, tokens), length)
        self.sequence_flops = sequence_flops
        self.activation_bytes = activation_bytes or 0
        self.checkpointed_bytes = self.activation_bytes if checkpointed_bytes is None else checkpointed_bytes


def kept_bytes(model: nn.Module, batch: Any, length: int) -> int:
    """Bytes that a forward pass keeps for the backward pass, parameters aside, on the meta device.

    Scores of attention, from each place to each, are left out: fused attention keeps none, and only without values
    torch falls back to a kind that does.
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
    """The model of this name; nothing is allocated.

    Args:
        name: in `PLANNED_MODELS`, or a preset of the tasks' models as `llama-2m` or `gpt-base`.
        length: tokens a sequence.
        options: dimensions that replace the published ones.

    Raises:
        UnknownNameError: there is no such model.

    >>> round(planned_model("llama-150m", 128).num_parameters / 1e6)
    215
    """
    layers = options.get("num_layers", _num_layers(name))
    model = _built(name, length, options)
    if not isinstance(layers, int) or layers <= _COUNTED_LAYERS:
        return SequenceModel(model, length)
    # Layers are alike, so their operations are counted once: those of one more layer than another model has.
    one, two = (
        SequenceModel(_built(name, length, {**options, "num_layers": number}), length)
        for number in (1, _COUNTED_LAYERS)
    )
    more = layers - 1
    width = next((each.in_features for each in one.model.modules() if isinstance(each, nn.Linear)), 0)
    return SequenceModel(
        model,
        length,
        one.sequence_flops + more * (two.sequence_flops - one.sequence_flops),
        one.activation_bytes + more * (two.activation_bytes - one.activation_bytes),
        one.activation_bytes + 4 * length * width * layers,
    )


def _num_layers(name: str) -> int | None:
    family, _, preset = name.partition("-")
    presets = {"llama": LLAMA_PRESETS, "gpt": GPT_PRESETS}.get(family, {})
    sizes: dict[str, Any] = PLANNED_MODELS.get(name) or presets.get(preset) or {}
    return sizes.get("num_layers")


def _built(name: str, length: int, options: dict[str, Any]) -> nn.Module:
    family, _, preset = name.partition("-")
    with without_values():
        if name in PLANNED_MODELS:
            return Llama(**{**PLANNED_MODELS[name], "block_size": length, **options})
        if family == "llama" and preset in LLAMA_PRESETS:
            return Llama(preset, **{"block_size": length, **options})
        if family == "gpt" and preset in GPT_PRESETS:
            return GPT(preset, **{"block_size": length, **options})
    presets = [f"llama-{key}" for key in LLAMA_PRESETS] + [f"gpt-{key}" for key in GPT_PRESETS]
    raise unknown_name("model to plan", name, [*PLANNED_MODELS, *presets])


@contextmanager
def without_values() -> Iterator[None]:
    """Models that are made meanwhile have shapes alone; nothing is allocated and nothing drawn."""
    with torch.device("meta"), _WithoutDrawing():
        yield


class _WithoutDrawing(TorchFunctionMode):
    """Parameters keep what they have: where there are no values, drawing them takes longer than all else."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Do what is asked, but for random initial values."""
        drawing = func in (torch.Tensor.normal_, torch.Tensor.uniform_)
        return args[0] if drawing else func(*args, **(kwargs or {}))
