"""Names of EXO Gym and OpenDiLoCo that do not exist here, each with its successor."""

from __future__ import annotations

import inspect
import re
from typing import TYPE_CHECKING, Any, NoReturn

from netsim.errors import UnknownNameError, unknown_names

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

__all__ = [
    "ATTRIBUTES",
    "FIT_ARGUMENTS",
    "STRATEGY_ARGUMENTS",
    "dropped_function",
    "refuse_unknown_options",
    "unknown_arguments",
    "unknown_attribute",
]

_NETWORK = "workers meet in the simulation, or through torchrun with transport='gloo'; leave it out"
_PATIENCE = "ranks that drop out are listed in the summary's dropped_peers; leave it out"
_OF_THE_TRAINER = "the Trainer gives it to the strategy; leave it out"
_OF_THE_STRATEGY = "it belongs to the strategy, as in DiLoCoStrategy({})"

_OF_MICRO_BATCHES = "give minibatch_size=, which is batch_size divided by the number of accumulated batches"
_OF_ROWS = "give on_event=, a function that is called with each finished row"
_OF_LOGS = (
    "they are run_name= (CSV files), wandb_project=, out= (a folder with a page), and loggers: of experiments"
)
_OF_TARGETS = "target_loss= reports when a loss was reached and held; the run ends at max_steps= or until="

#: Arguments of Trainer and fit -> their successors.
FIT_ARGUMENTS: Mapping[str, str] = {
    "accelerator": "it is device=",
    "accumulate_grad_batches": _OF_MICRO_BATCHES,
    "announce_maddrs": _NETWORK,
    "averaging_timeout": _OF_THE_STRATEGY.format("averaging_timeout=..."),
    "bf16": "it is autocast='bf16'",
    "callback": _OF_ROWS,
    "callbacks": _OF_ROWS,
    "ckpt_path": "it is resume_from=",
    "compute_metrics": "it is accuracy=",
    "dataloader_num_workers": "it is dataloader_kwargs={'num_workers': ...}",
    "dht": _NETWORK,
    "early_stopping": _OF_TARGETS,
    "early_stopping_patience": _OF_TARGETS,
    "epochs": "it is num_epochs=",
    "eval_interval": "it is val_interval=",
    "eval_size": "it is val_size=",
    "eval_steps": "it is val_interval=",
    "fail_rank_drop": _PATIENCE,
    "force_minibatch_recalculate": "minibatch_size='auto' measures it again each time",
    "fp16": "it is autocast='fp16'",
    "galaxy_size": "it is num_nodes=",
    "gradient_accumulation_steps": _OF_MICRO_BATCHES,
    "gradient_clip_val": _OF_THE_STRATEGY.format("max_norm=..."),
    "host_maddrs": _NETWORK,
    "initial_peers": _NETWORK,
    "kwargs": "name each argument by itself, as in fit(..., val_size=64)",
    "lazily_load_dataset": "a dataset is never copied, and files are mapped lazily; leave it out",
    "learning_rate": _OF_THE_STRATEGY.format("lr=..."),
    "local_steps": _OF_THE_STRATEGY.format("H=..."),
    "log_dir": "logs/<run_name>/ is written where run_name= is given",
    "logger": _OF_LOGS,
    "loggers": _OF_LOGS,
    "lr": _OF_THE_STRATEGY.format("lr=..."),
    "lr_scheduler": _OF_THE_STRATEGY.format("lr_scheduler=..."),
    "matchmaking_time": _OF_THE_STRATEGY.format("matchmaking_time=..."),
    "max_epochs": "it is num_epochs=",
    "max_grad_norm": _OF_THE_STRATEGY.format("max_norm=..."),
    "max_time": "it is until=, in virtual time",
    "num_steps": "it is max_steps=",
    "num_train_epochs": "it is num_epochs=",
    "optimizer": _OF_THE_STRATEGY.format("optim_spec=..."),
    "outer_lr": _OF_THE_STRATEGY.format("outer_lr=..."),
    "output_dir": "it is out=",
    "patience": _OF_TARGETS,
    "per_device_train_batch_size": "it is minibatch_size=",
    "port": "nothing listens on a port; leave it out",
    "precision": "it is autocast=, 'bf16' or 'fp16'",
    "project": "it is wandb_project=",
    "report_to": _OF_LOGS,
    "resume_from_checkpoint": "it is resume_from=",
    "save_steps": "it is checkpoint_interval=",
    "seed_everything": "it is seed=",
    "stop_at_target": _OF_TARGETS,
    "timeout_waiting_for_peers": _OF_THE_STRATEGY.format("timeout_waiting_for_peers=..."),
    "total_batch_size": "it is batch_size=, of each process: a worker's batch divided by ranks_per_worker",
    "total_steps": "it is max_steps=",
    "wandb_name": "it is run_name=",
    "wandb_run_name": "it is run_name=",
    "warmup_steps": _OF_THE_STRATEGY.format(
        "lr_scheduler='lambda_cosine', lr_scheduler_kwargs={'warmup_steps': ...}"
    ),
    "weight_decay": _OF_THE_STRATEGY.format("optim_spec=OptimSpec('adamw', weight_decay=...)"),
    "world_rank": _NETWORK,
    "world_size": "it is num_nodes=",
}

#: Arguments of strategies -> their successors.
STRATEGY_ARGUMENTS: Mapping[str, str] = {
    "async_sparta_delay": "averages are never late here; leave it out",
    "dht": _NETWORK,
    "galaxy_size": "it is num_nodes= of fit",
    "max_local_steps": "it is max_steps= of fit",
    "model": _OF_THE_TRAINER,
    "num_nodes": _OF_THE_TRAINER,
    "optimizer": "it is optim_spec=, an optimizer's name or class and its options",
    "p": "it is p_sparta=",
    "rank": _OF_THE_TRAINER,
    "sharding_strategy": "it is sharding=, with ranks_per_worker=",
    "topk": "it is compression_topk=",
    "warmup_steps": "it is lr_scheduler='lambda_cosine', lr_scheduler_kwargs={'warmup_steps': ...}",
}

#: Methods of trainers -> their successors.
ATTRIBUTES: Mapping[str, str] = {
    "_build_connection": "ranks are connected by fit; for your own code on ranks: exogym_core.communicator.run_ranks",
    "launch": "it is fit(...)",
    "train": "it is fit(...)",
}


def dropped_function(name: str, successor: str) -> Callable[..., NoReturn]:
    """A function in place of a removed one: calling it raises with the call to write.

    >>> dropped_function("all_reduce", "write self.comm.all_reduce(tensor)")()
    Traceback (most recent call last):
        ...
    netsim.errors.UnknownNameError: all_reduce: write self.comm.all_reduce(tensor)
    """

    def dropped(*_: Any, **__: Any) -> NoReturn:
        raise UnknownNameError(f"{name}: {successor}")

    return dropped


def unknown_arguments(
    where: str, names: Iterable[str], known: Iterable[str], successors: Mapping[str, str]
) -> UnknownNameError:
    """Error for arguments that do not exist, all at once: their successors, and accepted names.

    >>> str(unknown_arguments("fit", ["eval_interval"], ["val_interval"], FIT_ARGUMENTS))
    "unknown argument of fit 'eval_interval': it is val_interval="
    """
    names, known = list(names), list(known)
    accepted = {f"it is {name}=" for name in known}

    def is_gone(name: str) -> bool:
        # A successor that is an argument alone must be one that is accepted here.
        successor = successors.get(name)
        return successor is not None and (
            successor in accepted or re.fullmatch(r"it is \w+=", successor) is None
        )

    gone = [name for name in names if is_gone(name)]
    others = [name for name in names if not is_gone(name)]
    lines = [f"unknown argument of {where} '{name}': {successors[name]}" for name in gone]
    if others:
        lines.append(str(unknown_names(f"argument of {where}", others, known)))
    return UnknownNameError("; ".join(lines), about=names)


def refuse_unknown_options(
    kind: str, called: Callable[..., Any], options: Iterable[str], skipped: int = 0
) -> None:
    """Raise UnknownNameError for options of this `kind` that a callable does not take, behind its `skipped` first."""
    try:
        parameters = list(inspect.signature(called).parameters.values())[skipped:]
    except (TypeError, ValueError):  # a callable written in C has no signature
        return
    accepted = [each.name for each in parameters]
    unknown = [name for name in options if name not in accepted]
    if unknown and all(each.kind is not each.VAR_KEYWORD for each in parameters):
        raise UnknownNameError(str(unknown_names(kind, unknown, accepted)), about=unknown)


def unknown_attribute(owner: str, name: str) -> AttributeError:
    """The error for an attribute that does not exist, with its successor if it has one."""
    if name in ATTRIBUTES:
        return AttributeError(f"{owner}.{name} does not exist: {ATTRIBUTES[name]}")
    return AttributeError(f"'{owner}' object has no attribute '{name}'")
