"""`netgym status`: of a run's folder, a rendezvous and a group that torchrun has started."""

from __future__ import annotations

import datetime
import hmac
import json
import re
import time
from pathlib import Path

from click.testing import CliRunner
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from exogym_core.communicator.gloo.rendezvous import SignedStore
from exogym_core.events import RoundPlace, StepDone
from exogym_core.results.progress import PlainProgress
from exogym_core.results.run_folder import RunFolder
from exogym_core.workers.torchrun.side_channel import RUN_TEXT, Pulse
from netgym.cli.main import cli
from netgym.sites.link import SiteLink
from netgym.sites.service import RendezvousService

SECRET = "known to these tests, and to nobody else"


def status(place: object, code: int = 0, *options: str) -> str:
    done = CliRunner().invoke(cli, ["status", str(place), *options], env={"NETGYM_SECRET": SECRET})
    assert (done.exit_code == 0) == (code == 0), done.output
    return str(done.exception) if code else done.output


def test_a_folder_tells_how_far_its_run_is_while_it_goes_on_and_afterwards(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run", "run")
    folder.write_text("experiment.yaml", "name: run\n")
    absences = [{"rank": 1, "step": 5}, {"rank": 2, "step": 7}]
    summary = {"name": "AllReduce", "steps": 900, "final_loss": 0.5, "dropped_peers": absences}
    folder.write_summary([summary])
    with PlainProgress(lambda line: None, lambda line: None, folder.path) as progress:
        run, other = progress.begin("DiLoCo", 2, 3, 900), progress.begin("DeMo", 3, 3, 900)
        row = {"kind": "step", "step": 700, "train_loss": 0.25, "virtual_seconds": 12.0, "num_peers": 3}
        away = {"rank": 1, "step": 690, "back_step": None}
        run.event(row | {"dropped_peers": [away, away | {"rank": 0, "step": 3, "back_step": 9}]})
        run.event(row)  # of the same round
        other.event(row | {"step": 5, "train_loss": 2.0})
        text, document = status(folder.path), json.loads(status(folder.path, 0, "--json"))
        run.event(row | {"step": 703, "train_loss": 0.125})  # shown a second after the last write
        while "DiLoCo (2 of 3): step 703 of 900, loss 0.1250" not in status(folder.path):
            time.sleep(0.05)
        folder.release()
        for name in ("step-00000600", ".step-00000650"):  # the second was not finished
            (folder.path / "checkpoints/DiLoCo" / name).mkdir(parents=True)
        stopped = status(folder.path).splitlines()
        assert stopped[0] == f"{folder.path}: stopped"
        assert stopped[-1] == f"  to continue from step 600: netgym compare --resume {folder.path}"
        run.end("")
        assert json.loads(status(folder.path, 0, "--json"))["now"]["strategy"] == "DeMo"
        other.end("")
    assert (
        "  DiLoCo (2 of 3): step 700 of 900, loss 0.2500, virtual time 12 s, 3 workers in this round\n"
        "    absent: rank 1, from step 690 on\n"
        "    1 absence before (dropped_peers)\n" in text
    )
    assert document["now"]["dropped_peers"][0] == away
    assert "  DeMo (3 of 3): step 5 of 900, loss 2.0000" in text
    assert "  AllReduce: finished after step 900, final loss 0.5000, 2 absences (dropped_peers)" in text
    assert document["strategies"][0]["dropped_peers"] == absences
    assert (document["state"], document["now"]["step"]) == ("running", 700)
    assert status(folder.path).splitlines()[0] == f"{folder.path}: finished"
    assert sorted(path.name for path in folder.path.iterdir()) == [
        "checkpoints",
        "experiment.yaml",
        "summary.json",
    ]


def test_a_folder_of_runs_tells_of_each(tmp_path: Path) -> None:
    """`netgym report` took it, and `netgym status` said that it is no run. What lies in a run's folder is another's."""
    for name in ("runs/a", "runs/b", "runs/sweep", "runs/sweep/points/p", "runs/b/metrics/inner"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "experiment.yaml").write_text("name: run\n")
    runs = json.loads(status(tmp_path / "runs", 0, "--json"))["runs"]
    names = [Path(run["folder"]).relative_to(tmp_path / "runs").as_posix() for run in runs]
    assert names == ["a", "b", "sweep/points/p"]
    folder = RunFolder.open(tmp_path / "runs/sweep").owned()
    (folder.path / "experiment.yaml").write_text("{name: run, sweep: {steps: [1, 2, 3]}}")
    folder.write_summary([{"name": "p", "incomplete": True}, {"name": "q"}, {"name": "r", "failed": True}])
    folder.log("point 1 of 3: DiLoCo: step 7 of 9, loss 0.5, ETA 5 s")
    running = status(folder.path).splitlines()
    assert running[0].startswith(f"{folder.path}: running, process ")
    assert running[0].endswith(": 1 of 3 points finished, 1 failed")
    assert running[1] == "  point 1 of 3: DiLoCo: step 7 of 9, loss 0.5, ETA 5 s"
    folder.release()
    remedy = f"netgym sweep --resume {folder.path}"
    assert status(folder.path).splitlines()[1] == f"  to continue: {remedy}"
    for each in (tmp_path / "runs", folder.path / "points/p"):
        assert f"from its start: {remedy}" in status(each)


def test_a_rendezvous_reports_sites_present_and_waits() -> None:
    with RendezvousService(2, ("127.0.0.1", 0), SECRET.encode()) as at:
        place = f"{at.address[0]}:{at.address[1]}"
        assert status(place) == f"rendezvous {place}: 0 runs\n"
        link = SiteLink(at.address, SECRET.encode(), 1, run="r", facts={"max_steps": "900"})
        done = StepDone(699, 0.5, 1, 0.1, 0, 0, 0, place=RoundPlace(7))
        link.rows.add(1, done)
        link.rows.add(1, done._replace(step=700, loss=0.25))
        link.ask("pulse", pulse=link.rows.pulse)
        about = {"number": 7, "seconds": 600.0, "averaging_seconds": 60.0, "weight": 1.0, "awaited": [0, 1]}
        link.send("join", id=0, **about)
        link.ask("clock", elapsed=None)  # it has been heard
        text, document = status(place), json.loads(status(place, 0, "--json"))
        link.close()
    assert "  site 1: present, " in text
    assert ": step 700 of 900, loss 0.2500" in text
    assert re.search(r"  round 8: sites 1 have waited \d s for a round's end; missing: 0", text)
    assert document["runs"][0]["waits"][0]["for"] == [0]


def test_ranks_of_torchrun_tell_where_they_are() -> None:
    store = TCPStore("127.0.0.1", 0, None, True, datetime.timedelta(seconds=10), wait_for_workers=False)
    place = f"127.0.0.1:{store.port}"
    assert "no run of netgym has begun" in failure(place)
    counted = PrefixStore("netgym 0", store)
    counted.add("runs of rank 0", 1)
    run = PrefixStore("netgym 0 1", store)
    sealed = SignedStore(run, SECRET.encode(), 0)
    for rank in range(2):
        sealed.set(f"number {rank}", bytes([rank]))
    beside = SignedStore(PrefixStore("beside", run), hmac.digest(SECRET.encode(), b"\0\1", "sha256"), 0)
    beside.set(RUN_TEXT, json.dumps({"strategy": "DiLoCo", "steps": 900}))
    beside.set("pulse 0", json.dumps(Pulse(3, "near", 700, 7, "", "train.py:3", 0.25, 500, 100.0)))
    beside.set("pulse 1", json.dumps(Pulse(3, "far", 690, 7, "OSError: no disk")))
    assert status(place).splitlines() == [
        f"torchrun {place}: 2 ranks, DiLoCo",
        "  rank 0 on near: step 700 of 900, loss 0.2500, ETA 100 s, in train.py:3",
        "  rank 1 on far: step 690 of 900, failed: OSError: no disk",
    ]
    sealed.set("number 1", b"of another secret")
    assert "another secret" in failure(place)


def failure(place: str) -> str:
    return str(CliRunner().invoke(cli, ["status", place], env={"NETGYM_SECRET": SECRET}).exception)
