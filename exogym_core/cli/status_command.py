"""`netgym status`: progress of a run while it trains."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from exogym_core.annexes import declared
from exogym_core.cli.common_options import debug_flag, plain_json
from exogym_core.cli.experiment import program_remedy
from exogym_core.meeting_place import SERVICE, parse_address
from exogym_core.names import visible
from exogym_core.results.progress import eta_seconds, folder_status, format_loss
from exogym_core.results.reading import comparison_of, is_study
from netsim import PeerError, connect_peer, load_document, shared_secret
from netsim.errors import InputError
from netsim.units import format_count, format_seconds

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["status"]

_SECONDS = 5.0
_GREETING_SECONDS = 2.0  # a rendezvous greets within a round trip; torchrun's store never does
_SILENT_SECONDS = 30.0  # without a step, until the line mentions it


@click.command()
@click.argument("place", metavar="FOLDER|HOST:PORT")
@plain_json
@debug_flag
def status(place: str, as_json: bool) -> None:
    """Show the progress of a run: step, loss, time left; at a rendezvous also members, absences and waits.

    FOLDER is a run's, a sweep's, a launch's or a plan's; it knows the absences of rounds that have ended.
    HOST:PORT is a rendezvous, or where the ranks of torchrun meet (MASTER_ADDR:MASTER_PORT); both want the run's
    secret. It changes nothing, and no rank waits for it.
    """
    path = Path(place)
    found = _of_folder(path) if os.path.exists(path) else _of_address(place)
    if as_json:
        click.echo(json.dumps(found))
        return
    lines = {"run": _run_lines, "runs": _runs_lines, "rendezvous": _rendezvous_lines, "group": _group_lines}
    for line in lines[found["kind"]](found):
        click.echo(line)


# --- documents ----------------------------------------------------------------------------------------------


def _of_folder(path: Path) -> dict[str, Any]:
    """Status of a run's folder, or of one that holds several.

    Raises:
        InputError: nothing of netgym is there.
    """
    points = []
    if (comparison := comparison_of(path)) is not None:
        points = sorted({each.parent for each in path.glob("search/*/points/*/experiment.yaml")})
        points += [comparison] if (comparison / "experiment.yaml").is_file() else []
    elif is_study(path) or not (path / "experiment.yaml").is_file():  # what lies in a run's folder is another
        points = sorted({each.parent for each in path.glob("*/*/experiment.yaml")})
    if points:
        return {"kind": "runs", "folder": str(path), "runs": [folder_status(point) for point in points]}
    if (path / "experiment.yaml").is_file():
        return folder_status(path)
    marks = sorted(["experiment.yaml", *declared("run_folders")])
    if any((path / name).is_file() for name in marks):
        return {"kind": "run", "folder": str(path), "state": "finished", "strategies": [], "now": None}
    accepted = " or ".join([", ".join(marks[:-1]), marks[-1]] if len(marks) > 1 else marks)
    raise InputError(
        f"{visible(path)}: is no run: it has no {accepted}; name a run's "
        "folder, or HOST:PORT of a rendezvous or of torchrun's ranks"
    )


def _of_address(place: str) -> dict[str, Any]:
    """Status of a rendezvous, else of torchrun's ranks.

    Raises:
        InputError: neither is there.
    """
    if "/" in place:
        raise InputError(f"status: {visible(place)}: there is no such folder")
    address, secret = parse_address(place, "status"), shared_secret()
    where = f"rendezvous {visible(address[0])}:{address[1]}"
    try:
        channel = connect_peer(address, secret, SERVICE, where, _SECONDS, _GREETING_SECONDS)
        try:
            channel.send(status=True)
            answer = channel.receive(_SECONDS)
        finally:
            channel.close()
    except PeerError as error:
        if "another secret" in str(error) or "cannot be reached" in str(error):
            raise InputError(visible(error, 300)) from None
        from exogym_core.workers.torchrun.side_channel import group_status

        return group_status(address, secret)
    return {"kind": "rendezvous", "address": place, "runs": answer["runs"]}


# --- in words -----------------------------------------------------------------------------------------------


def _progress(
    step: int, steps: int | None, loss: float | None, eta: float | None, silent: float = 0.0
) -> str:
    words = [f"step {step}" + (f" of {steps}" if steps else "")]
    if loss is not None:
        words.append(f"loss {format_loss(loss)}")
    if eta is not None:
        words.append(f"ETA {format_seconds(round(eta))}")
    if silent > _SILENT_SECONDS:
        words.append(f"no step for {format_seconds(round(silent))}")
    return ", ".join(words)


def _run_lines(found: Mapping[str, Any]) -> list[str]:
    process = f", process {found['process']}" if found.get("process") else ""
    lines = [f"{found['folder']}: {found['state']}{process}"]
    for each in found["strategies"]:
        loss = "" if each["final_loss"] is None else f", final loss {format_loss(each['final_loss'])}"
        absent = len(each["dropped_peers"])
        absences = f", {format_count(absent, 'absence')} (dropped_peers)" if absent else ""
        lines.append(f"  {visible(each['name'])}: {each['state']} after step {each['steps']}{loss}{absences}")
    first = found["now"]
    for now in () if first is None else (first, *first.get("others", ())):
        is_running = found["state"] == "running"
        left = (now.get("eta_seconds"), now["silent_seconds"]) if is_running else (None, 0.0)
        progress = _progress(now["step"], now["steps"], now.get("train_loss"), *left)
        which = f" ({now['position']} of {now['num_strategies']})" if now["num_strategies"] > 1 else ""
        clock = (
            f", virtual time {format_seconds(now['virtual_seconds'])}" if now.get("virtual_seconds") else ""
        )
        peers = f", {format_count(now['num_peers'], 'worker')} in this round" if "num_peers" in now else ""
        lines.append(f"  {visible(now['strategy'])}{which}: {progress}{clock}{peers}")
        lines += _absence_lines(now.get("dropped_peers", ()))
    if found["state"] == "stopped":
        kept = found.get("checkpoint")
        since = "from its start" if kept is None else f"from step {kept}"
        lines.append(f"  to continue {since}: {_remedy(Path(found['folder']))}")
    return lines


def _absence_lines(absences: Sequence[Mapping[str, Any]]) -> list[str]:
    """A line on each rank that is absent at present, and one on those that are back."""
    absent = [each for each in absences if each["back_step"] is None]
    lines = [f"    absent: rank {each['rank']}, from step {each['step']} on" for each in absent]
    if len(absences) > len(absent):
        lines.append(f"    {format_count(len(absences) - len(absent), 'absence')} before (dropped_peers)")
    return lines


def _remedy(folder: Path) -> str:
    own = program_remedy(load_document(folder / "experiment.yaml"), folder)
    if own is not None:
        return own
    command = "tune" if comparison_of(folder) is not None else "sweep" if is_study(folder) else "compare"
    return f"netgym {command} --resume {visible(folder)}"


def _runs_lines(found: Mapping[str, Any]) -> list[str]:
    states = [each["state"] for each in found["runs"]]
    counts = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states))
    lines = [f"{found['folder']}: {format_count(len(states), 'run')}: {counts}"]
    for each in found["runs"]:
        if each["state"] != "finished":
            lines += [f"  {line}" for line in _run_lines(each)]
    return lines


def _rendezvous_lines(found: Mapping[str, Any]) -> list[str]:
    lines = [f"rendezvous {visible(found['address'])}: {format_count(len(found['runs']), 'run')}"]
    for run in found["runs"]:
        begun = "" if run["seconds"] is None else f", begun {format_seconds(round(run['seconds']))} ago"
        state = "over" if run["is_over"] else f"round {run['rounds'] + 1}"
        lines.append(f"run {visible(run['run'], 80)}: {state}{begun}")
        for site, pulse in sorted(run["sites"].items(), key=lambda item: int(item[0])):
            lines.append(f"  site {site}: {_site(pulse, run['steps'])}")
            if site in run["absent"] and not pulse["has_ended"]:
                lines.append(f"    absent: {visible(run['absent'][site], 300)}")
        for wait in run["waits"]:
            whom = ", ".join(map(str, wait["for"])) or "none"
            names = ", ".join(map(str, wait["sites"])) or "none yet"
            waited = f"{format_seconds(round(wait['seconds']))} {wait['where']}"
            lines.append(f"  round {wait['round']}: sites {names} have waited {waited}; missing: {whom}")
        lines += [f"  sites {one} and {other} do not reach each other" for one, other in run["broken"]]
    return lines


def _site(pulse: Mapping[str, Any], steps: int | None) -> str:
    state = "ended" if pulse["has_ended"] else "present" if pulse["is_there"] else "lost"
    line = f"{state}, {visible(pulse['where'], 80)}"
    if pulse.get("step"):
        eta = None if pulse["has_ended"] else _eta(pulse, steps)
        line += f": {_progress(pulse['step'], steps, pulse.get('loss'), eta)}"
    return (
        line if pulse["has_ended"] else f"{line}, last message {format_seconds(round(pulse['silent']))} ago"
    )


def _eta(pulse: Mapping[str, Any], steps: int | None) -> float | None:
    if not steps or not pulse.get("first") or not pulse["seconds"]:
        return None
    return eta_seconds(pulse["step"], steps, pulse["first"], pulse["seconds"])


def _group_lines(found: Mapping[str, Any]) -> list[str]:
    strategy = f", {visible(found['strategy'])}" if found.get("strategy") else ""
    lines = [f"torchrun {found['address']}: {format_count(found['num_ranks'], 'rank')}{strategy}"]
    for each in found["ranks"]:
        progress = _progress(each["step"], found.get("steps"), each["loss"], _eta(each, found.get("steps")))
        words = f", failed: {visible(each['words'], 200)}" if each["words"] else ""
        place = f", in {visible(each['place'], 120)}" if each["place"] else ""
        lines.append(f"  rank {each['rank']} on {visible(each['host'], 40)}: {progress}{place}{words}")
    return lines
