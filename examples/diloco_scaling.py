"""DiLoCo with more and more workers at equal tokens: what do more workers cost in loss, and save in time?

EXO Gym's scaling study. Every run sees the same number of tokens with the same batch over all workers, the same
learning rate, warm-up, dropout (none) and H; only the number of workers K differs, and K = 1 is DiLoCo too. DDP on
eight workers is the baseline.

    python examples/diloco_scaling.py                       # minutes on two cores
    python examples/diloco_scaling.py --tokens 2000000 --preset byte --block-size 128
    python examples/diloco_scaling.py --save models         # keeps the models, as safetensors
"""

import argparse
from pathlib import Path

from netgym import LocalTrainer, OptimSpec
from netgym.strategy import DiLoCoStrategy, SimpleReduceStrategy
from netgym.tasks import build_model, build_task

arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
arguments.add_argument("--tokens", type=int, default=320_000, help="all workers' together")
arguments.add_argument("--batch-tokens", type=int, default=4096, help="of all workers in one step")
arguments.add_argument("--block-size", type=int, default=32)
arguments.add_argument("--preset", default="tiny", help="tiny, or one of GPT's presets")
arguments.add_argument("--H", type=int, default=10)
arguments.add_argument("--lr", type=float, default=3e-3)
arguments.add_argument("--workers", type=int, nargs="+", default=[1, 2, 4, 8])
arguments.add_argument("--topology", default="wan-4-regions")
arguments.add_argument("--save", metavar="DIR", type=Path)

SIZES = {"tiny": {"num_layers": 2, "width": 32, "num_heads": 2}}


def runs(options):
    """A name, a strategy and a number of workers each."""
    inner = OptimSpec("adamw", lr=options.lr)
    schedule = {
        "lr_scheduler": "lambda_cosine",
        "lr_scheduler_kwargs": {"warmup_steps": 5, "cosine_anneal": True},
    }
    yield (
        f"DDP K={max(options.workers)}",
        SimpleReduceStrategy(inner, max_norm=1.0, **schedule),
        max(options.workers),
    )
    for count in options.workers:
        yield f"DiLoCo K={count}", DiLoCoStrategy(inner, H=options.H, max_norm=1.0, **schedule), count


def main():
    options = arguments.parse_args()
    task = build_task("text", block_size=options.block_size)
    size = SIZES.get(options.preset, {"preset": options.preset})
    batch_size = options.batch_tokens // options.block_size
    print(f"{'run':<12} {'tokens':>10} {'steps':>6} {'loss':>7} {'seconds':>9} {'MB a worker':>12}")
    for name, strategy, count in runs(options):
        trainer = LocalTrainer(build_model("gpt", task, seed=0, **size), task.train, task.validation)
        model = trainer.fit(
            strategy=strategy,
            num_nodes=count,
            max_steps=options.tokens // options.batch_tokens,
            batch_size=batch_size // count,
            val_size=256,
            topology=options.topology,
            compute=f"{800 // count} ms",  # a step's work is shared by the workers
        )
        result = model.fit_result
        tokens = result.history[-1]["examples_trained"] * options.block_size
        megabytes = result.bytes_sent / count / 1e6
        print(
            f"{name:<12} {tokens:10,} {len(result.history):6} {result.final_loss:7.3f} "
            f"{result.virtual_seconds:9.2f} {megabytes:12.3f}"
        )
        if options.save:
            save(model, options.save / f"{name.replace(' ', '-')}.safetensors")


def save(model, path):
    from safetensors.torch import save_model

    path.parent.mkdir(parents=True, exist_ok=True)
    save_model(model, str(path))


if __name__ == "__main__":
    main()
