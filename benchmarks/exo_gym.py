"""NetGym against EXO Gym: the same training with both libraries, side by side.

    git clone https://github.com/exo-explore/gym && pip install einops pandas psutil tqdm wandb
    python benchmarks/exo_gym.py --exo-gym gym [--quick] [--rounds N] [CASE ...]

Four workers train the same models from the same parameters on the same data with each library's `fit`. Each run is
a process of its own, and the two take turns, so that other work of the machine slows both. A worker has one intra-op
thread, unless OMP_NUM_THREADS says otherwise: EXO Gym gives each of its processes one a core. A cell of the table
has NetGym's best round, EXO Gym's, their ratio, and between brackets the least and the greatest ratio of a round: of
wall seconds of the whole `fit`; of processor seconds of all processes, start and imports included (a busy machine
hardly changes them); of wall and processor milliseconds of a step of all workers, after the first fifth. The losses
are those of the models that `fit` returns, on the same samples.

Both read samples in the order of torch's DistributedSampler, and NetGym's DiLoCo averages one step late (after steps
21, 41, ...), as EXO Gym's does. Losses with AllReduce are equal. DiLoCo's differ from the second round on: on CPUs
rank 0 of EXO Gym shares the storage of its outer parameters, so displacements are zero (docs/speed.md). SPARTA draws
other indices.

EXO Gym's newest commit, 9fa323c, names macOS's loopback interface: `--exo-gym` trains with a copy that names Linux's.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import harness
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from netgym.tasks import CNN, GPT, MLP

if TYPE_CHECKING:
    from collections.abc import Callable

WORKERS = 4
SIDES = ("NetGym", "EXO Gym")
STRATEGIES = ("AllReduce", "DiLoCo", "SPARTA", "DeMo")
ARGUMENTS: dict[str, dict[str, Any]] = {"DiLoCo": {"H": 20}, "SPARTA": {"p_sparta": 0.005}}


class Images(Dataset[tuple[Tensor, int]]):
    """Bytes of the shape of MNIST, one blurred pattern a class, normalised sample by sample as torchvision does."""

    def __init__(self, num_samples: int, seed: int) -> None:
        patterns = torch.rand(10, 28, 28, generator=torch.Generator().manual_seed(0))
        generator = torch.Generator().manual_seed(seed)
        self.labels = torch.randint(10, (num_samples,), generator=generator)
        noise = torch.rand(num_samples, 28, 28, generator=generator)
        self.images = ((0.3 * patterns[self.labels] + 0.7 * noise) * 255).to(torch.uint8)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.images[index].unsqueeze(0).float().div(255).sub(0.1307).div(0.3081), int(
            self.labels[index]
        )


def whole_images(num_samples: int, seed: int) -> TensorDataset:
    """`Images`, normalised at once."""
    images = Images(num_samples, seed)
    return TensorDataset((images.images.unsqueeze(1).float() / 255 - 0.1307) / 0.3081, images.labels)


def tokens(num_samples: int, seed: int) -> TensorDataset:
    """Windows of a text of three words that repeat in random order."""
    words = [torch.arange(start, start + 8) for start in (10, 50, 90)]
    order = torch.randint(3, (num_samples, 17), generator=torch.Generator().manual_seed(seed))
    text = torch.stack([torch.cat([words[word] for word in row]) for row in order.tolist()])
    return TensorDataset(text[:, :128].clone(), text[:, 1:129].clone())


def cnn() -> nn.Module:
    model = CNN()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):  # EXO Gym averages counters too, and whole ones have no mean
            module.num_batches_tracked = module.num_batches_tracked.float()
    return model


@dataclass(frozen=True)
class Case:
    model: Callable[[], nn.Module]
    data: Callable[[int, int], Dataset[Any]]
    batch_size: int
    steps: int
    val_interval: int | None = None
    strategies: tuple[str, ...] = STRATEGIES


def mlp() -> nn.Module:
    return MLP(784)


CASES = {
    "mlp-16": Case(mlp, whole_images, 16, 150),
    "mlp-16-evaluated": Case(mlp, whole_images, 16, 150, 10, STRATEGIES[:2]),
    "mlp-256": Case(mlp, whole_images, 256, 150, None, STRATEGIES[:3]),
    "cnn-16": Case(cnn, Images, 16, 10, None, STRATEGIES[:3]),  # DeMo: EXO Gym's takes no convolutions
    "cnn-16-evaluated": Case(cnn, Images, 16, 10, 5, STRATEGIES[:1]),
    "gpt-8": Case(lambda: GPT("byte"), tokens, 8, 10),
}


class Stamped(nn.Module):
    """A model that notes when it computes gradients, in a file shared by all workers."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: Any) -> Tensor:
        """The model's loss."""
        if torch.is_grad_enabled():
            with open("stamps", "a") as file:
                file.write(f"{time.perf_counter()} {os.getpid()} {time.process_time()}\n")
        loss: Tensor = self.model(batch)
        return loss


def step_times(steps: int) -> dict[str, float]:
    """Seconds of a step and processor seconds of its processes, from the stamps; the first steps set up."""
    lines = [line.split() for line in Path("stamps").read_text().splitlines()]
    stamps = sorted((float(at), int(pid), float(used)) for at, pid, used in lines)[-WORKERS * steps :]
    stamps = stamps[WORKERS * (steps // 5) :]
    used: dict[int, list[float]] = {}
    for _, pid, seconds in stamps:
        used.setdefault(pid, []).append(seconds)
    num_steps = len(stamps) / WORKERS
    # Of n stamps that a process makes, the last one's work is not in what lies between the first and the last.
    return {
        "step": (stamps[-1][0] - stamps[0][0]) / (len(stamps) - 1) * WORKERS,
        "step_cpu": sum((own[-1] - own[0]) * len(own) / (len(own) - 1) for own in used.values()) / num_steps,
    }


def strategy_of(side: str, name: str) -> Any:
    if side == "NetGym":
        from exogym_core import strategy as classes

        class Late(classes.DiLoCoStrategy):
            """DiLoCo that averages when EXO Gym's does: it counts steps from 0 and skips that one."""

            def communicate(self, step: int) -> None:
                if step > 1:
                    super().communicate(step - 1)

        if name == "DiLoCo":
            return Late(classes.OptimSpec(torch.optim.AdamW, lr=1e-3), **ARGUMENTS[name])
    else:
        from exogym import strategy as classes
        from exogym.strategy.strategy import SimpleReduceStrategy

        classes.AllReduceStrategy = SimpleReduceStrategy
    if name == "DeMo":
        return classes.DeMoStrategy(lr=1e-3)
    optim = classes.OptimSpec(torch.optim.AdamW, lr=1e-3)
    return getattr(classes, f"{name}Strategy")(optim_spec=optim, **ARGUMENTS.get(name, {}))


def run_one(side: str, case: Case, strategy: str, steps: int) -> dict[str, float]:
    """One `fit`, in this process."""
    if side == "NetGym":
        from exogym_core import Trainer
    else:
        from exogym import Trainer
    torch.manual_seed(0)
    train, validation = case.data(WORKERS * case.batch_size * 50, 1), case.data(1024, 2)
    trainer = Trainer(Stamped(case.model()), train, validation)
    begin = time.perf_counter()
    model = trainer.fit(
        num_epochs=1000,
        strategy=strategy_of(side, strategy),
        num_nodes=WORKERS,
        max_steps=steps,
        device="cpu",
        batch_size=case.batch_size,
        minibatch_size=case.batch_size,
        val_size=0 if case.val_interval is None else 1024,
        val_interval=case.val_interval or 1000,
        run_name="run",
        **({"sampler": "torch"} if side == "NetGym" else {}),
    )
    end = time.perf_counter()
    with torch.no_grad():
        loss = model.model.eval()(validation_batch(validation))
    return {"fit": end - begin, "loss": float(loss), **step_times(steps)}


def validation_batch(dataset: Dataset[Any]) -> tuple[Tensor, ...]:
    return tuple(torch.utils.data.default_collate([dataset[index] for index in range(512)]))


def measure(side: str, case: str, strategy: str, steps: int) -> dict[str, float]:
    """`run_one` in a process and a folder of its own, with the processor seconds of all its processes."""
    asked = json.dumps([side, case, strategy, steps])
    order = [sys.executable, str(Path(__file__).resolve()), "--one", asked]
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    with tempfile.TemporaryDirectory() as folder, open(Path(folder) / "log", "w+") as log:
        process = subprocess.Popen(order, cwd=folder, env=environment, stdout=log, stderr=log)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            log.seek(0)
            sys.exit(f"{side}, {case}, {strategy}:\n{log.read()[-2000:]}")
        result: dict[str, float] = json.loads((Path(folder) / "result.json").read_text())
    return {**result, "cpu": usage.ru_utime + usage.ru_stime}


FIGURES = {"fit": 1.0, "cpu": 1.0, "step": 1e3, "step_cpu": 1e3}


def compare(name: str, strategy: str, rounds: int, steps: int) -> None:
    """Print a row of the table."""
    taken = [[measure(side, name, strategy, steps) for side in SIDES] for _ in range(rounds)]
    cells = []
    for key, scale in FIGURES.items():
        ours, theirs = (min(side[key] for side in sides) for sides in zip(*taken, strict=True))
        ratios = [their[key] / our[key] for our, their in taken]
        figures = f"{ours * scale:.3g}, {theirs * scale:.3g}, **{theirs / ours:.1f}x**"
        cells.append(f"{figures} ({min(ratios):.1f} to {max(ratios):.1f})")
    losses = (f"{side['loss']:.5f}" for side in taken[0])
    harness.row(f"{name}, {steps} steps", strategy, *cells, ", ".join(losses))


def copy_for_linux(checkout: Path, folder: Path) -> None:
    """Copy EXO Gym's package, with Linux's name of the loopback interface in place of macOS's."""
    if not (checkout / "exogym").is_dir():
        sys.exit(
            f"--exo-gym {checkout}: no folder exogym in it; pass a checkout of github.com/exo-explore/gym"
        )
    shutil.copytree(checkout / "exogym", folder / "exogym")
    for file in folder.rglob("*.py"):
        file.write_text(file.read_text().replace('"lo0"', '"lo"'))


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"of {', '.join(CASES)}; all by default")
    parser.add_argument("--exo-gym", type=Path, metavar="DIR", help="a checkout of EXO Gym [installed]")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="one short round")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        side, name, strategy, steps = json.loads(arguments.one)
        Path("result.json").write_text(json.dumps(run_one(side, CASES[name], strategy, steps)))
        return
    if unknown := set(arguments.cases) - set(CASES):
        parser.error(f"no case {', '.join(sorted(unknown))}; known: {', '.join(CASES)}")
    if arguments.exo_gym is None and importlib.util.find_spec("exogym") is None:
        parser.error("EXO Gym is not installed: clone https://github.com/exo-explore/gym, pass --exo-gym gym")
    with tempfile.TemporaryDirectory() as folder:
        if arguments.exo_gym is not None:
            if sys.platform == "linux":
                copy_for_linux(arguments.exo_gym, Path(folder))
            package = folder if sys.platform == "linux" else str(arguments.exo_gym.resolve())
            os.environ["PYTHONPATH"] = os.pathsep.join(
                [package, *filter(None, [os.environ.get("PYTHONPATH")])]
            )
        print(f"{harness.machine()}; {WORKERS} workers; each NetGym, EXO Gym, ratio\n")
        titles = ("`fit`, s", "processor, s", "a step, ms", "a step, processor ms", "loss")
        harness.heading("training", "strategy", *titles)
        for name in arguments.cases or CASES:
            for strategy in CASES[name].strategies:
                steps = max(5, CASES[name].steps // 10) if arguments.quick else CASES[name].steps
                compare(name, strategy, 1 if arguments.quick else arguments.rounds, steps)


if __name__ == "__main__":
    main()
