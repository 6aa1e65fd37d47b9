"""`netgym sample`: text from the models of a run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from netgym.cli.main import main
from netgym.cli.sampling import Sampler, draw_tokens
from netgym.tasks import build_model
from netsim.errors import InputError

EXPERIMENT = """\
task: {name: text, block_size: 8, num_bytes: 4000}
model: {name: MODEL}
workers: {count: 2, kind: threads}
device: cpu
steps: 1
batch_size: 2
evaluate: {samples: 2}
strategies:
  - {name: FedAvg, label: often}
  - {name: FedAvg, H: 2, label: seldom}
"""
SIZES = {"gpt": "gpt, width: 8, num_layers: 1, num_heads: 2", "llama": "llama, vocab_size: 300"}


@pytest.fixture(scope="module", params=["gpt", "llama"])
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    folder = tmp_path_factory.mktemp("sampling")
    experiment = folder / "text.yaml"
    experiment.write_text(EXPERIMENT.replace("MODEL", SIZES[request.param]))
    assert main(["compare", str(experiment), "--out", str(folder / "run")]) == 0
    return request.param, folder / "run"


@pytest.fixture
def sample(capfd: pytest.CaptureFixture[str]) -> Callable[..., str]:
    def sample(*arguments: object, code: int = 0) -> str:
        capfd.readouterr()
        assert main(["sample", *map(str, arguments)]) == code
        captured = capfd.readouterr()
        return captured.err if code else captured.out

    return sample


def test_a_run_writes_on_from_a_prompt(run: tuple[str, Path], sample: Callable[..., str]) -> None:
    kind, folder = run
    prompt = "def f(" if kind == "gpt" else "100 299"
    one = sample(folder, "--strategy", "often", "--prompt", prompt, "--tokens", 20, "--seed", 1)
    assert one.startswith(prompt)
    assert one == sample(
        folder / "models" / "often.safetensors", "--prompt", prompt, "--tokens", 20, "--seed", 1
    )
    assert one != sample(folder, "--strategy", "often", "--prompt", prompt, "--tokens", 20, "--seed", 2)
    if kind == "llama":
        assert len(one.split()) == 22


def test_mistakes_are_reported_in_one_line(run: tuple[str, Path], sample: Callable[..., str]) -> None:
    kind, folder = run
    assert "several models: add --strategy with one of often, seldom" in sample(
        folder, "--prompt", "1", code=2
    )
    output = sample(folder, "--strategy", "offen", "--prompt", "1", code=2)
    assert "unknown strategy 'offen': did you mean 'often'?" in output
    empty = sample(folder, "--strategy", "often", "--prompt", "", code=2)
    assert "the prompt is empty" in empty
    output = sample(folder, "--strategy", "often", "--prompt", "1", "--tokens", -1, code=2)
    assert "must be 0 or more" in output
    if kind == "llama":
        output = sample(folder, "--strategy", "often", "--prompt", "def", code=2)
        assert "the model has 300 tokens and no text; give token numbers" in output
        output = sample(folder, "--strategy", "often", "--prompt", "300", code=2)
        assert "token 300 is beyond the model's 300" in output
    assert "is no run folder" in sample(folder / "models", "--prompt", "1", code=2)


def test_a_classifier_cannot_write(tmp_path: Path) -> None:
    (tmp_path / "experiment.yaml").write_text(
        "task: digits\nworkers: {count: 1}\nsteps: 1\nstrategies: [FedAvg]\n"
    )
    with pytest.raises(InputError, match="MLP is no language model; sample from a gpt or llama"):
        Sampler.of_run(tmp_path)


def test_drawing_leaves_mode_and_generators_alone() -> None:
    model = build_model("gpt", width=8, num_layers=1, num_heads=2, dropout=0.5, seed=0).train()
    before = torch.get_rng_state()
    start = torch.zeros(2, 1, dtype=torch.long)
    drawn = draw_tokens(model, start, 200, 1.0, torch.Generator().manual_seed(0))
    assert drawn.shape == (2, 201)
    assert torch.equal(drawn, draw_tokens(model, start, 200, 1.0, torch.Generator().manual_seed(0)))
    assert model.training
    assert torch.equal(before, torch.get_rng_state())
