"""Text from a trained language model.

    model = model_of_run("runs/text-1", strategy="DiLoCo")
    print(sampled_text(model, "def ", num_tokens=100, temperature=0.8, seed=0))

A prompt is bytes of text where the model's vocabulary has 256 tokens, else token numbers such as "15 496".
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from exogym_core.names import file_name, visible
from exogym_core.results.run_folder import RUN_FILES, RunFolder
from netgym.experiment.experiment import Experiment
from netgym.tasks import Decoder
from netsim.errors import InputError, unknown_name

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["draw_tokens", "model_of_run", "sampled_text"]

_NUM_BYTES = 256


@torch.no_grad()
def draw_tokens(
    model: Decoder,
    tokens: Tensor,
    num_tokens: int,
    temperature: float = 1.0,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Extend `tokens` (samples, length) by `num_tokens` drawn ones.

    Args:
        model: computes logits, (samples, length, vocabulary).
        tokens: at least one a sample.
        num_tokens: number to draw.
        temperature: logits are divided by it; 0 takes the likeliest.
        generator: draws; torch's own if None.
    """
    was_training = model.training
    model.eval()
    try:
        for _ in range(num_tokens):
            logits = model.logits(tokens[:, -model.block_size :])[:, -1]
            if temperature == 0:
                chosen = logits.argmax(dim=-1, keepdim=True)
            else:
                shares = torch.softmax(logits / temperature, dim=-1)
                chosen = torch.multinomial(shares, 1, generator=generator)
            tokens = torch.cat([tokens, chosen], dim=1)
    finally:
        model.train(was_training)
    return tokens


def model_of_run(path: str | Path, strategy: str | None = None, *, trust: bool = False) -> Decoder:
    """Load the judged model of a run's strategy: a GPT, a Llama, or another `Decoder`.

    Args:
        path: a run folder, or one of the files in its `models/`.
        strategy: of the model; may be left out where there is one only.
        trust: run the code that the run names, even if another user has made or changed it.

    Raises:
        InputError: there is no such model, it is no language model, or it needs `trust`.
    """
    path = Path(path)
    if path.suffix == ".safetensors":
        if strategy is not None:
            raise InputError(f"{visible(path)}: is one model already; leave --strategy out")
        path, strategy = path.parent.parent, path.stem
    folder = RunFolder.open(path)
    experiment = Experiment.load(folder.path / "experiment.yaml", trust=trust)
    if not trust:
        experiment.require_trusted(folder.path)
    model = experiment.build_model(experiment.build_task())
    if not isinstance(model, Decoder):
        raise InputError(
            f"{visible(path)}: {type(model).__name__} is no language model: sample from a gpt, a llama or a model "
            "derived from netgym.tasks.Decoder"
        )
    from safetensors.torch import load_model

    load_model(model, str(_model_file(folder, strategy)))
    return model


def sampled_text(
    model: Decoder, prompt: str, num_tokens: int = 200, temperature: float = 0.8, seed: int | None = None
) -> str:
    """Continue a prompt; returns it with the continuation.

    Args:
        model: a language model.
        prompt: text, or token numbers; see the module.
        num_tokens: number to draw.
        temperature: 0 takes the likeliest token each time.
        seed: of the draws; None: another text each time.

    Raises:
        InputError: the prompt is empty or no token numbers, or a number is negative.
    """
    if num_tokens < 0 or temperature < 0:
        raise InputError(f"sample: tokens {num_tokens} and temperature {temperature:g} must be 0 or more")
    generator = torch.Generator()
    if seed is None:
        generator.seed()
    else:
        generator.manual_seed(seed)
    known = model.tokens.num_embeddings
    if known == _NUM_BYTES:
        tokens = list(prompt.encode())
    elif all(word.isascii() and word.isdigit() for word in prompt.split()):
        tokens = [int(word) for word in prompt.split()]
    else:
        raise InputError(
            f"sample: the model has {known} tokens and no text; give token numbers, as in --prompt '15 496'"
        )
    if not tokens:
        raise InputError("sample: the prompt is empty; give at least one character or token")
    if max(tokens) >= known:
        raise InputError(f"sample: token {max(tokens)} is beyond the model's {known}; give smaller numbers")
    (drawn,) = draw_tokens(model, torch.tensor([tokens]), num_tokens, temperature, generator).tolist()
    if known == _NUM_BYTES:
        return bytes(drawn).decode("utf-8", errors="replace")
    return " ".join(map(str, drawn))


def _model_file(folder: RunFolder, strategy: str | None) -> Path:
    names = sorted(path.stem for path in folder.path.glob(RUN_FILES["model"].format("*")))
    if not names:
        raise InputError(f"{visible(folder.path)}: holds no model yet; let the run end")
    if strategy is None and len(names) > 1:
        raise InputError(
            f"{visible(folder.path)}: has several models: add --strategy with one of {', '.join(names)}"
        )
    name = names[0] if strategy is None else file_name(strategy)
    if name not in names:
        raise unknown_name("strategy", str(strategy), names)
    return folder.place("model", name)
