"""`netgym status`: progress of a run while it trains."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from exogym_core.meeting_place import SERVICE, parse_address
from exogym_core.names import visible
from exogym_core.results.disk import owner_of
from exogym_core.results.progress import eta_seconds, folder_status
from exogym_core.results.reading import POINTS, SEARCH, comparison_of, is_study, runs_in
from exogym_core.results.run_folder import RunFolder
from netgym.command_options import takes
from netgym.experiment.experiment import program_remedy
from netgym.studies.points import Sweep
from netsim.cli.terminal import given
from netsim.errors import InputError
from netsim.files.documents import load_document
from netsim.files.signed import PeerError, SecretError, UnreachableError, connect_peer, shared_secret

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["status"]

_SECONDS = 5.0
_GREETING_SECONDS = 2.0  # a rendezvous greets within a round trip; torchrun's store never does


@click.command()
@takes()
def status(
    place: str = given(is_argument=True, required=True, metavar="FOLDER|HOST:PORT"), as_json: bool = given()
) -> None:
    """Show the progress of a run: step, loss, time left; of a rendezvous also members, absences and waits.

    FOLDER belongs to a run, sweep, launch or plan. HOST:PORT is a rendezvous, or MASTER_ADDR:MASTER_PORT of a
    torchrun job; both need the run's secret. The command changes nothing and delays no rank.
    """
    path = Path(place)
    found = _of_folder(path) if os.path.exists(path) else _of_address(place)
    if as_json:
        click.echo(json.dumps(found))
        return
    from exogym_core.results.templates import rendered

    text = rendered("cli/status.txt", "netgym", kind=found["kind"], found=found, remedy=_remedy, eta=_eta)
    click.echo(text, nl=False)


# --- documents ----------------------------------------------------------------------------------------------


def _of_folder(path: Path) -> dict[str, Any]:
    """Status of a run's folder, or of one that holds several.

    Raises:
        InputError: nothing of netgym is there.
    """
    if _is_study(path):
        return _of_study(path)
    if runs := runs_in(path):
        return {"kind": "runs", "folder": str(path), "runs": [folder_status(run) for run in runs]}
    if (path / "experiment.yaml").is_file():
        return folder_status(path)
    marks = ["experiment.yaml", "launch.json", "plan.json"]
    if any((path / name).is_file() for name in marks):
        return {"kind": "run", "folder": str(path), "state": "finished", "strategies": [], "now": None}
    raise InputError(
        f"{visible(path)}: is no run: it has no {marks[0]}, {marks[1]} or {marks[2]}; name a run's "
        "folder, or HOST:PORT of a rendezvous or of torchrun's ranks"
    )


def _of_study(path: Path) -> dict[str, Any]:
    """Status of a sweep or tuning: its process, points and last line of progress, and its runs."""
    sweeps = [path] if is_study(path) else sorted(each.parent for each in path.glob(f"{SEARCH}/*/{POINTS}"))
    num_points = sum(Sweep.parse(load_document(each / "experiment.yaml")).num_points for each in sweeps)
    points = [entry for each in sweeps for entry in RunFolder(each).read_summary()]
    num_failed = sum(bool(entry.get("failed")) for entry in points)
    num_finished = sum(not (entry.get("failed") or entry.get("incomplete")) for entry in points)
    owner, log = owner_of(path), path / "log.txt"
    is_over = num_finished + num_failed >= num_points and (is_study(path) or (path / "tune.json").is_file())
    lines = log.read_text(encoding="utf-8").splitlines() if log.is_file() else []
    return {
        "kind": "runs",
        "folder": str(path),
        "state": "running" if owner is not None else "finished" if is_over else "stopped",
        "process": owner,
        "num_points": num_points,
        "num_finished": num_finished,
        "num_failed": num_failed,
        "progress": lines[-1] if lines else None,
        "runs": [folder_status(run) for run in runs_in(path)],
    }


def _of_address(place: str) -> dict[str, Any]:
    """Status of a rendezvous, else of torchrun's ranks.

    Raises:
        InputError: neither is there.
    """
    if "/" in place:
        raise InputError(f"status: {visible(place)}: there is no such folder")
    if ":" not in place:
        raise InputError(f"status: {visible(place)}: there is no such folder, and an address is HOST:PORT")
    address, secret = parse_address(place, "status"), shared_secret()
    where = f"rendezvous {visible(address[0])}:{address[1]}"
    try:
        channel = connect_peer(address, secret, SERVICE, where, _SECONDS, _GREETING_SECONDS)
        try:
            channel.send(status=True)
            answer = channel.receive(_SECONDS)
        finally:
            channel.close()
    except (SecretError, UnreachableError) as error:
        raise InputError(visible(error, 300)) from None
    except PeerError:
        from exogym_core.workers.torchrun.side_channel import group_status

        return group_status(address, secret)
    return {"kind": "rendezvous", "address": place, "runs": answer["runs"]}


def _is_study(path: Path) -> bool:
    return is_study(path) or comparison_of(path) is not None


# --- for the text -------------------------------------------------------------------------------------------


def _remedy(path: str) -> str:
    """The line that continues a stopped run, or the study whose point it is."""
    folder = Path(path)
    if (own := program_remedy(load_document(folder / "experiment.yaml"), folder)) is not None:
        return own
    for each in folder.parents[:4]:  # the folder of a tuning has those of sweeps
        if any(run == folder for run in (runs_in(each) if _is_study(each) else ())):
            folder = each
            break
    command = "tune" if comparison_of(folder) is not None else "sweep" if is_study(folder) else "compare"
    return f"netgym {command} --resume {visible(folder)}"


def _eta(pulse: Mapping[str, Any], steps: int | None) -> float | None:
    """Seconds until a site of a rendezvous ends; None before its first steps."""
    if not steps or not pulse.get("first") or not pulse["seconds"]:
        return None
    return eta_seconds(pulse["step"], steps, pulse["first"], pulse["seconds"])
