"""Trains an experiment file for real, one process a worker, as torchrun starts them.

    torchrun --nproc-per-node 8 examples/opendiloco/train.py examples/opendiloco/150m-diloco-500.yaml --data c4.bin
    torchrun --nproc-per-node 2 examples/opendiloco/train.py examples/opendiloco/150m-diloco-50.yaml --scale tiny

The same strategies run that `netgym run` simulates; the network is the real one, so the file's topology, protocol
and compute are left aside. The number of workers is torchrun's.
"""

import argparse
import os

from exogym_core import Trainer
from exogym_core.app.experiment import Experiment

arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
arguments.add_argument("experiment")
arguments.add_argument("--scale")
arguments.add_argument("--data", metavar="FILE", help="tokens as a .bin of uint16")
arguments.add_argument("--device", help="cpu, cuda or mps [what is there]")
arguments.add_argument("--save", metavar="FILE", help="the averaged model, as safetensors")


def main():
    options = arguments.parse_args()
    overrides = [f"task.paths={options.data}"] if options.data else []
    experiment = Experiment.load(options.experiment, overrides, scale=options.scale)
    settings, task = experiment.settings, experiment.build_task()
    is_first = os.environ.get("RANK", "0") == "0"

    def tell(row):
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
        on_event=tell if is_first else None,
    )
    if is_first:
        print(f"sent {model.fit_result.bytes_sent} bytes in all")
        if options.save:
            from safetensors.torch import save_model

            save_model(model, options.save)


if __name__ == "__main__":
    main()
