"""Four workers learn handwritten digits with three strategies: which has the lowest loss, and which is soonest?

EXO Gym's MNIST example, with seconds in addition to losses. Every strategy starts from the same model and
sees the same samples in the same order; the workers sit in four homes, on cable and DSL.

    python examples/digits.py                      # scikit-learn's 8x8 digits, offline
    python examples/digits.py --mnist data         # MNIST's four IDX files in the folder `data`, and a CNN
    python examples/digits.py --plot digits.png    # train and validation losses, by step and by second
"""

import argparse

from netgym import LocalTrainer, OptimSpec
from netgym.strategy import DiLoCoStrategy, SimpleReduceStrategy, SPARTAStrategy
from netgym.tasks import build_model, build_task

arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
arguments.add_argument("--mnist", metavar="DIR")
arguments.add_argument("--steps", type=int, default=150)
arguments.add_argument("--batch-size", type=int, default=32)
arguments.add_argument("--topology", default="home-broadband")
arguments.add_argument("--target-loss", type=float, default=0.5)
arguments.add_argument("--plot", metavar="FILE")


def strategies():
    optimizer = OptimSpec("adam", lr=2e-3)
    return {
        "ddp": SimpleReduceStrategy(optimizer),
        "diloco": DiLoCoStrategy(optimizer, H=20),
        "sparta": SPARTAStrategy(optimizer, p_sparta=0.05),
    }


def main():
    options = arguments.parse_args()
    task = build_task("mnist", path=options.mnist) if options.mnist else build_task("digits")
    results = {}
    for name, strategy in strategies().items():
        trainer = LocalTrainer(build_model(task=task, seed=0), task.train, task.validation)
        model = trainer.fit(
            strategy=strategy,
            num_nodes=4,
            max_steps=options.steps,
            batch_size=options.batch_size,
            val_size=256,
            val_interval=10,
            topology=options.topology,
            compute="50 ms",
            target_loss=options.target_loss,
            accuracy=task.accuracy,
        )
        results[name] = model.fit_result
    show("By loss at the end:", sorted(results.items(), key=lambda item: item[1].final_loss), options)
    show(f"By time to loss {options.target_loss:g}:", sorted(results.items(), key=by_seconds), options)
    if options.plot:
        plot(results, options.plot)


def by_seconds(item):
    seconds = item[1].virtual_seconds_to_target
    return float("inf") if seconds is None else seconds


def show(title, results, options):
    print(title)
    print(
        f"  {'strategy':<8} {'loss':>6} {'accuracy':>9} {'seconds':>8} {'to target':>10} {'MB a worker':>12}"
    )
    for name, result in results:
        reached = result.virtual_seconds_to_target
        print(
            f"  {name:<8} {result.final_loss:6.3f} {result.accuracy:9.1%} {result.virtual_seconds:8.2f} "
            f"{'never' if reached is None else f'{reached:.2f}':>10} {result.bytes_sent / result.num_nodes / 1e6:12.3f}"
        )


def plot(results, path):
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    panes = figure.subplots(1, 2, sharey=True)
    for pane, axis in zip(panes, ("step", "virtual_seconds"), strict=True):
        for name, result in results.items():
            (line,) = pane.plot(*columns(result.history, axis, "train_loss"), alpha=0.3)
            pane.plot(*columns(result.validation, axis, "global_loss"), color=line.get_color(), label=name)
        pane.set(xlabel=axis.replace("_", " "), yscale="log")
    panes[0].set_ylabel("loss (pale: training)")
    panes[1].legend()
    figure.savefig(path)


def columns(rows, *names):
    return [[row[name] for row in rows] for name in names]


if __name__ == "__main__":
    main()
