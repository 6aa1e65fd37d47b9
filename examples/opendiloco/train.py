"""Trains an experiment file for real, one process a worker, as torchrun starts them.

    torchrun --nproc-per-node 8 examples/opendiloco/train.py examples/opendiloco/150m-diloco-500.yaml --data c4.bin
    torchrun --nproc-per-node 2 examples/opendiloco/train.py examples/opendiloco/150m-diloco-50.yaml --scale tiny
    torchrun ... train.py FILE --out run --set steps=1000 --set checkpoint.every=100      (and --resume run, --seeds 3)

With --out, --resume or --seeds it leaves the folder that `netgym compare` leaves: metrics, checkpoints, models, report.
The same strategies run that `netgym run` simulates; the network is the real one, so the file's topology, protocol
and compute are left aside. The number of workers is torchrun's; of sites that meet at a rendezvous (NETGYM_RENDEZVOUS),
each a torchrun of its own, the file's, and each leaves a folder.
"""

import argparse
import os
import sys

from netgym import Trainer
from netgym.cli.main import main as netgym
from netgym.experiment.experiment import Experiment

IS_SITE = bool(os.environ.get("NETGYM_RENDEZVOUS"))

arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
arguments.add_argument("experiment", nargs="?")
arguments.add_argument("--scale")
arguments.add_argument("--data", metavar="FILE", help="tokens as a .bin of uint16")
arguments.add_argument("--device", help="cpu, cuda or mps [what is there]")
arguments.add_argument(
    "--set", metavar="KEY=VALUE", action="append", default=[], help="change one key of the file"
)
arguments.add_argument("--out", metavar="DIR", help="the run's folder")
arguments.add_argument("--resume", metavar="DIR", help="resume the run in this folder")
arguments.add_argument("--seeds", metavar="N", help="train with N seeds, or with a list such as 0,3,4")
arguments.add_argument("--save", metavar="FILE", help="the averaged model, as safetensors")


def in_folder(options, overrides):
    """As `netgym compare` does it, in the processes that torchrun has started."""
    given = ["--resume", options.resume] if options.resume else [options.experiment]
    if not options.resume:
        workers = [] if IS_SITE else [f"workers.count={os.environ['WORLD_SIZE']}"]
        device = [f"device={options.device}"] if options.device else []
        given += [part for each in [*overrides, *workers, *device] for part in ("--set", each)]
        for name in ("scale", "out", "seeds"):
            if getattr(options, name):
                given += [f"--{name}", getattr(options, name)]
    return netgym(["compare", *given])


def main():
    options = arguments.parse_args()
    if "WORLD_SIZE" not in os.environ:
        arguments.error("start it with torchrun; to simulate the file: netgym run")
    if not options.experiment and not options.resume:
        arguments.error("give an experiment file, or --resume DIR")
    overrides = [*options.set, *([f"task.paths={options.data}"] if options.data else [])]
    if options.out or options.resume or options.seeds or IS_SITE:
        sys.exit(in_folder(options, overrides))
    experiment = Experiment.load(options.experiment, overrides, scale=options.scale)
    settings, task = experiment.settings, experiment.build_task()
    is_first = os.environ.get("RANK", "0") == "0"

    def show(row):
        if row["kind"] == "validation":
            print(f"step {row['step']}: loss {row['global_loss']:.4f}", flush=True)

    model = Trainer(experiment.build_model(task), task.train, task.validation, device=options.device).fit(
        strategy=experiment.build_strategy(experiment.strategies[0]),
        transport="gloo",
        max_steps=settings.steps,
        batch_size=settings.batch_size,
        minibatch_size=settings.minibatch_size,
        autocast=settings.autocast,
        val_size=settings.evaluate.samples or 512,
        val_interval=settings.evaluate.every,
        seed=settings.seed,
        on_event=show if is_first else None,
    )
    if is_first:
        print(f"sent {model.fit_result.bytes_sent} bytes in all")
        if options.save:
            from safetensors.torch import save_model

            save_model(model, options.save)


if __name__ == "__main__":
    main()
