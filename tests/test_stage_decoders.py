"""Stages of transformers' causal language models train as one rank with the whole model does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from exogym_core import Trainer
from exogym_core.stages.decoders import decoder_parts
from exogym_core.strategy import DiLoCoStrategy, OptimSpec
from netsim.errors import InputError

transformers = pytest.importorskip("transformers")

TOKENS = TensorDataset(torch.randint(0, 48, (48, 13), generator=torch.Generator().manual_seed(5)))
SIZES = {"vocab_size": 48, "hidden_size": 16, "num_hidden_layers": 4, "num_attention_heads": 2}
SIZES |= {"intermediate_size": 24, "num_key_value_heads": 1, "bos_token_id": 1, "eos_token_id": 2}
WINDOW = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 2}
OWN: dict[str, dict[str, Any]] = {
    "Llama": {"tie_word_embeddings": True},
    "GPT2": {"resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0},
    "Qwen2": WINDOW,
    "Gemma2": {"head_dim": 8, "sliding_window": 4},  # windows in every other block
    "GPTNeoX": {},
}


class Decoder(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def arguments(self, batch: tuple[Tensor]) -> dict[str, Tensor]:
        return {"input_ids": batch[0], "labels": batch[0]}

    def forward(self, batch: tuple[Tensor]) -> Tensor:
        loss: Tensor = self.model(**self.arguments(batch)).loss
        return loss

    def pipeline_parts(self) -> list[nn.Module]:
        return [*decoder_parts(self.model, self.arguments)]


def train(model: nn.Module, stages: Any) -> tuple[list[float], dict[str, Tensor]]:
    sgd = OptimSpec(torch.optim.SGD, lr=0.1)
    about: dict[str, Any] = {"topology": "lan", "compute": "9 ms", "workers": "threads", "progress": False}
    about |= {"num_nodes": 2, "max_steps": 3, "batch_size": 8, "val_interval": 3, "val_size": 16}
    fitted = Trainer(model, TOKENS, TOKENS).fit(
        strategy=DiLoCoStrategy(H=2, optim_spec=sgd), stages=stages, **about
    )
    losses = [row["train_loss"] for row in fitted.fit_result.history]
    return [*losses, fitted.fit_result.final_loss], fitted.state_dict()


def decoder(family: str, **more: Any) -> nn.Module:
    config = getattr(transformers, f"{family}Config")(**(SIZES | OWN.get(family, {}) | more))
    torch.manual_seed(3)
    name = f"{family}LMHeadModel" if family == "GPT2" else f"{family}ForCausalLM"
    made: nn.Module = getattr(transformers, name)(config)
    return made


@pytest.mark.parametrize("family", sorted(OWN))
def test_decoders_are_cut_by_themselves(family: str) -> None:
    losses, weights = train(Decoder(decoder(family)), None)
    others, parts = train(Decoder(decoder(family)), {"count": 3, "microbatches": 4})
    assert others == pytest.approx(losses, rel=1e-5)
    assert set(parts) == set(weights)
    for name, value in weights.items():
        assert torch.allclose(parts[name], value, atol=1e-5), name


def test_decoders_that_cannot_be_cut_are_refused() -> None:
    with pytest.raises(
        InputError, match="OPTForCausalLM is no decoder of transformers with one list of blocks"
    ):
        decoder_parts(decoder("OPT", ffn_dim=24, word_embed_proj_dim=16), dict)

    class Masked(Decoder):
        def arguments(self, batch: tuple[Tensor]) -> dict[str, Tensor]:
            return {**super().arguments(batch), "attention_mask": torch.ones_like(batch[0])}

    with pytest.raises(InputError, match="attention_mask, input_ids, labels; the parts take input_ids and"):
        train(Masked(decoder("Llama")), 2)
