"""Parts of causal language models of Hugging Face's transformers, for stages."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from exogym_core.stages.split import StagePart
from netsim.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = ["decoder_parts"]


def decoder_parts(model: nn.Module, arguments: Callable[[Any], Mapping[str, Tensor]]) -> list[StagePart]:
    """Parts of a causal language model of transformers: embeddings, each block, and the head with the loss.

    Each part calls the forward method of a shallow copy of the model in which the other parts' modules do
    nothing, so that masks, rotary angles and the loss are the library's.

    Args:
        model: such as `LlamaForCausalLM`, `GPT2LMHeadModel` or `Qwen2ForCausalLM`.
        arguments: function of a batch that returns its `input_ids` and `labels`.

    Raises:
        InputError: the model has no list of blocks, or a batch has other arguments, such as a mask of padding.
    """
    prefix = getattr(model, "base_model_prefix", "")
    base = getattr(model, prefix, model)
    children = dict(base.named_children())
    lists = [key for key, child in children.items() if isinstance(child, nn.ModuleList)]
    if base is model or len(lists) != 1:
        raise InputError(
            f"decoder_parts: {type(model).__name__} is no decoder of transformers with one list of blocks: write its "
            "parts by hand"
        )
    blocks = children.pop(lists[0])
    assert isinstance(blocks, nn.ModuleList)
    order = list(base._modules)
    stem = [child for key, child in children.items() if order.index(key) < order.index(lists[0])]
    tail = [child for child in children.values() if child not in stem]
    # Rotary angles and the like: no parameters, in every part; a dropout is of the embeddings.
    common = [
        child
        for child in children.values()
        if not isinstance(child, nn.Dropout) and not any(True for _ in child.parameters())
    ]

    def with_modules(*kept: nn.Module) -> nn.Module:
        """The base model, of whose modules all but these and the common ones pass their first argument on."""
        kept = (*kept, *common)
        made = copy.copy(base)
        made._modules = {key: child if child in kept else _idle(child) for key, child in children.items()} | {
            lists[0]: nn.ModuleList(block if block in kept else _idle(block) for block in blocks)
        }
        return made

    def embed(batch: Any) -> Tensor:
        given = arguments(batch)
        if set(given) != {"input_ids", "labels"}:
            raise InputError(
                f"decoder_parts: a batch has {', '.join(sorted(given))}; the parts take input_ids and labels"
            )
        values = with_modules(*stem)(input_ids=given["input_ids"], use_cache=False)
        return values.last_hidden_state  # type: ignore[no-any-return]

    def pass_on(values: Tensor, block: nn.Module) -> Tensor:
        passed = with_modules(block)(inputs_embeds=values, use_cache=False)
        return passed.last_hidden_state  # type: ignore[no-any-return]

    def loss(values: Tensor, batch: Any) -> Tensor:
        whole = copy.copy(model)
        whole._modules = {**model._modules, prefix: with_modules(*tail)}
        return whole(inputs_embeds=values, labels=arguments(batch)["labels"], use_cache=False).loss  # type: ignore[no-any-return]

    heads = [child for key, child in model.named_children() if key != prefix]
    middle = [
        StagePart(lambda values, block=block: pass_on(values, block), block, *common) for block in blocks
    ]
    first, last = StagePart(embed, *stem, *common), StagePart(loss, *tail, *common, *heads)
    return [first, *middle, last]


def _idle(module: nn.Module) -> nn.Module:
    """A module in place of this one, with its attributes: passes values on, and adds no positions to them."""
    made = copy.copy(module)
    made._modules = {}
    if isinstance(module, nn.Embedding):
        made.forward = lambda positions: positions.new_zeros(1)
    else:
        made.forward = lambda values, *_, **__: values
    return made
