"""Tasks and models: sizes, laziness, errors, and text from the models of a run."""

from __future__ import annotations

import gzip
import hashlib
import pickle
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from netgym import tasks
from netgym.cli.main import main
from netgym.cli.sampling import draw_tokens
from netgym.tasks import MLP, MODELS, Task, build_model, build_task
from netsim.errors import InputError


def num_parameters(model: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(
    ("model", "preset", "expected"),
    [  # OpenDiLoCo's configurations, and GPT-2's published sizes (untied position table included)
        ("llama", "2m", 262_464),
        ("llama", "14m", 9_766_528),
        ("llama", "60m", 102_898_688),
        ("llama", "150m", 214_983_680),
        ("llama", "1b", 1_100_048_384),
        ("gpt", "byte", 1_040_768),
        ("gpt", "small", 7_363_328),
        ("gpt", "sbase", 51_500_032),
        ("gpt", "base", 124_475_904),
        ("gpt", "medium", 354_871_296),
        ("gpt", "large", 774_090_240),
        ("gpt", "xl", 1_557_686_400),
    ],
)
def test_presets_have_their_published_number_of_parameters(model, preset, expected):
    with torch.device("meta"):
        assert num_parameters(MODELS[model](preset)) == expected


def test_cnn_is_the_example_of_exo_gym():
    assert num_parameters(build_model("cnn")) == 1_868_234


@pytest.mark.parametrize("name", ["gpt", "llama"])
def test_decoders_do_not_see_the_future(name):
    preset = {"gpt": "byte", "llama": "2m"}[name]
    model = build_model(name, preset=preset, vocab_size=50, seed=1).eval()
    tokens = torch.randint(0, 50, (2, 12), generator=torch.Generator().manual_seed(0))
    changed = tokens.clone()
    changed[:, 8:] = (changed[:, 8:] + 1) % 50
    before, after = model.logits(tokens), model.logits(changed)
    assert torch.allclose(before[:, :8], after[:, :8], atol=1e-5)
    assert not torch.allclose(before[:, 8:], after[:, 8:], atol=1e-3)


def test_gpt_learns_and_samples():
    model = build_model("gpt", num_layers=1, width=32, num_heads=2, vocab_size=5, block_size=8, seed=0)
    tokens = torch.arange(9).remainder(5).repeat(4, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(60):
        optimizer.zero_grad()
        model((tokens[:, :-1], tokens[:, 1:])).backward()
        optimizer.step()
    continued = draw_tokens(model, torch.tensor([[0, 1]]), num_tokens=6, temperature=0.0)
    assert continued[0].tolist() == [index % 5 for index in range(8)]


def test_seeded_model_leaves_the_global_generator_alone():
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    first, second = build_model("mlp", seed=3), build_model("mlp", seed=3)
    assert torch.equal(torch.rand(3), expected)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))


def test_digits_is_split_once_and_fits_its_model():
    task = build_task("digits")
    assert (len(task.train), len(task.validation)) == (1438, 359)
    model = build_model(task=task, hidden=[8])
    batch = task.validation[:100]
    assert model(batch).shape == ()
    assert 0.0 <= task.accuracy(model, batch) <= 1.0
    assert float(task.train.tensors[0].max()) == 1.0


def write_idx(path, array):
    path.write_bytes(
        b"\0\0\x08" + bytes([array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()
    )


@pytest.fixture
def mnist_folder(tmp_path):
    generator = np.random.default_rng(0)
    for prefix, count in (("train", 12), ("t10k", 5)):
        write_idx(
            tmp_path / f"{prefix}-images-idx3-ubyte",
            generator.integers(0, 256, (count, 28, 28), dtype=np.uint8),
        )
        write_idx(tmp_path / f"{prefix}-labels-idx1-ubyte", generator.integers(0, 10, count, dtype=np.uint8))
    return tmp_path


def test_mnist_reads_idx_files_plain_and_gzipped(mnist_folder):
    plain = mnist_folder / "t10k-labels-idx1-ubyte"
    plain.with_suffix(".gz").write_bytes(gzip.compress(plain.read_bytes()))
    labels = torch.tensor(list(plain.read_bytes()[8:]))
    plain.unlink()
    task = build_task("mnist", path=str(mnist_folder))
    assert task.train.tensors[0].shape == (12, 1, 28, 28)
    assert torch.equal(task.validation.tensors[1], labels)
    for name in ("cnn", "mlp"):
        assert build_model(name, task=task)(task.train[:4]).shape == ()


def test_mnist_refuses_what_is_missing_or_torn(mnist_folder):
    images = mnist_folder / "train-images-idx3-ubyte"
    images.write_bytes(images.read_bytes()[:-1])
    with pytest.raises(InputError, match="train-images-idx3-ubyte: holds 9407 bytes"):
        build_task("mnist", path=str(mnist_folder))
    images.unlink()
    with pytest.raises(InputError, match="set download: true"):
        build_task("mnist", path=str(mnist_folder))


def test_mnist_download_is_checked(mnist_folder, monkeypatch, tmp_path):
    import io
    import urllib.request

    from netgym.tasks import mnist as module

    content = gzip.compress((mnist_folder / "train-images-idx3-ubyte").read_bytes())
    (mnist_folder / "train-images-idx3-ubyte").unlink()
    monkeypatch.setattr(urllib.request, "urlopen", lambda *args, **kwargs: io.BytesIO(content))
    with pytest.raises(InputError, match="not the published file"):
        build_task("mnist", path=str(mnist_folder), download=True)
    digest = hashlib.md5(content, usedforsecurity=False).hexdigest()
    files = __import__("sys").modules["netgym.tasks.images"]._FILES
    monkeypatch.setitem(files, "train-images-idx3-ubyte", digest)
    assert callable(module)
    assert len(build_task("mnist", path=str(mnist_folder), download=True).train) == 12


def test_text_comes_from_the_standard_library_in_fixed_order():
    first, second = (build_task("text", num_bytes=60_000, block_size=32) for _ in range(2))
    assert len(first.train) == len(second.train) > 1500
    inputs, targets = first.train[3]
    assert torch.equal(inputs[1:], targets[:-1])
    assert torch.equal(first.train[7][0], second.train[7][0])
    with pytest.raises(IndexError):
        first.train[len(first.train)]


@pytest.mark.parametrize("suffix", ["bin", "npy"])
def test_memory_maps_are_read_lazily_and_pickled_as_descriptions(tmp_path, suffix):
    tokens = (np.arange(100_000) % 1000).astype(np.uint16)
    path = tmp_path / f"tokens.{suffix}"
    if suffix == "npy":
        np.save(path, tokens)
    else:
        tokens.tofile(path)
    task = build_task("text", paths=[str(path)], block_size=10)
    assert task.validation[0][0].tolist() == [(90_000 + index) % 1000 for index in range(10)]
    assert isinstance(task.train.files[0].tokens, np.memmap)
    sent = pickle.dumps(task.train)
    assert len(sent) < 1000
    assert torch.equal(pickle.loads(sent)[5][1], task.train[5][1])
    assert task.model_options["gpt"]["vocab_size"] == 50304


def test_ones_own_task_and_model_by_reference(monkeypatch, tmp_path):
    (tmp_path / "my_task.py").write_text(
        "import torch\nfrom netgym.tasks import MLP, Task\n"
        "data = torch.utils.data.TensorDataset(torch.zeros(4, 3), torch.zeros(4, dtype=torch.long))\n"
        "def make(width=2):\n    return Task(data, data, lambda: MLP(3, [width], 2))\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    task = build_task("my_task:make", width=5)
    assert isinstance(task, Task)
    assert num_parameters(build_model(task=task)) == 3 * 5 + 5 + 5 * 2 + 2
    assert isinstance(build_model("netgym.tasks:MLP", inputs=3), MLP)


@pytest.mark.parametrize("name", ["data/${NETGYM_SECRET}.txt", "$OTHER/x.npy"])
def test_values_of_variables_are_in_no_error(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """`validate`, `compare` and `plan` of a foreign file printed the secret."""
    monkeypatch.setenv("NETGYM_SECRET", "a-secret-of-32-characters-and-more")
    monkeypatch.setenv("OTHER", str(tmp_path / "a-secret"))
    (tmp_path / "a-secret").mkdir()
    (tmp_path / "a-secret/x.npy").write_bytes(b"no array")
    with pytest.raises(InputError) as caught:
        tasks.text(paths=name)
    assert "a-secret" not in str(caught.value)
    assert str(caught.value).startswith(f"task text: {name}")


# --- netgym sample ------------------------------------------------------------------------------------------

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
def sampled_run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
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


def test_a_run_writes_on_from_a_prompt(sampled_run: tuple[str, Path], sample: Callable[..., str]) -> None:
    kind, folder = sampled_run
    prompt = "def f(" if kind == "gpt" else "100 299"
    one = sample(folder, "--strategy", "often", "--prompt", prompt, "--tokens", 20, "--seed", 1)
    assert one.startswith(prompt)
    assert one == sample(
        folder / "models" / "often.safetensors", "--prompt", prompt, "--tokens", 20, "--seed", 1
    )
    assert one != sample(folder, "--strategy", "often", "--prompt", prompt, "--tokens", 20, "--seed", 2)
    if kind == "llama":
        assert len(one.split()) == 22


def test_mistakes_are_reported_in_one_line(sampled_run: tuple[str, Path], sample: Callable[..., str]) -> None:
    kind, folder = sampled_run
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
