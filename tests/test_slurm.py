"""Slurm: points of a sweep as an array of jobs, which comes to what the sweep comes to here."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from types import SimpleNamespace

import pytest
from experiments import PLACED_ON_LAN, experiment

from netgym.studies.runners import run_points
from netgym.studies.slurm import SlurmCluster
from netgym.studies.study import Study, read_experiment
from netsim.errors import InputError

submitit = pytest.importorskip("submitit")
pytestmark = pytest.mark.filterwarnings("ignore")  # submitit leaves files of a log open

EXPERIMENT = experiment(
    topology="lan",
    compute="50 ms",
    strategies="[{name: DiLoCo, H: 2}]",
    sweep=f"{{points: {PLACED_ON_LAN}}}",
)


def test_an_array_of_jobs_is_the_sweep_that_ran_here(tmp_path: Path) -> None:
    path = tmp_path / "small.yaml"
    path.write_text(EXPERIMENT)
    studies = {}
    # The second is submitit's executor in this process.
    for place in (None, "slurm:cluster=debug,time=10"):
        document, folder, name = read_experiment(path)
        study = studies[place] = Study.create(document, folder, str(tmp_path / f"out-{len(studies)}"), name)
        run_points(study, lambda *line: None, place, None if place else 1)
        study.folder.release()
    here, there = studies.values()
    assert there.entries == here.entries
    assert [bool(entry.get("failed")) for entry in there.entries] == [False, True, False]
    assert there.entries[-1]["retimed"] == ["DiLoCo"]
    assert there.digest() == here.digest()
    last = Path("points/0002")
    files = [
        {
            each.relative_to(study.folder.path)
            for each in (study.folder.path / last).rglob("*")
            if each.is_file()
        }
        for study in (here, there)
    ]
    assert files[1] == files[0]
    assert [each.name for each in (there.folder.path / "slurm").iterdir()] == ["jobs.json"]


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folder of a cluster's commands: job 7 is submitted and runs for ever."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, text in {
        "sbatch": f"cat $1 >> {folder}/script\necho Submitted batch job 7",
        "srun": "",
        "sacct": "echo 'JobID|State|NodeList'; echo '7_[0-1]|RUNNING|n1'",
    }.items():
        (folder / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)
    return folder


def test_jobs_ask_for_what_points_need_and_outlive_the_process_that_submitted_them(
    tmp_path: Path, commands: Path
) -> None:
    options = "partition=gpu,nodelist=a,b,time=1-2:30,cpus-per-task=3,array_parallelism=1"
    points = [SimpleNamespace(name=name) for name in ("0000", "0001")]
    results = []
    for _ in range(2):
        with SlurmCluster(options) as cluster:
            assert cluster.room(0) > 100
            with cluster.batch(tmp_path):
                for number, point in enumerate(points):
                    cluster.submit(str, point, needs={"num_gpus": number, "memory": 3e9}, tries=1)
            assert cluster.room(2) == 0, "one array after the other"
            results.append(cluster.ready(["0000", "0001"], 0.0))
            done = submitit.SlurmJob(tmp_path / "slurm", "7_1").paths.result_pickle
            done.write_bytes(pickle.dumps(("success", "of the first process")))
    assert results == [[], ["0001"]]
    assert cluster.result("0001") == "of the first process"
    assert not done.exists()
    lines = (commands / "script").read_text().splitlines()
    flags = [line.removeprefix("#SBATCH --") for line in lines if line.startswith("#SBATCH")]
    expected = [
        "array=0-1%1",
        "cpus-per-task=3",
        "gpus-per-node=1",
        "mem=6000M",
        "nodelist=a,b",
        "partition=gpu",
        "time=1590",
    ]
    assert [flag for flag in flags if flag in expected] == expected, "and submitted once"


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ("gpu", "--on slurm:gpu: write KEY=VALUE, such as slurm:partition=gpu,time=2:00:00"),
        ("time=soon", "--on slurm: time=soon is no time limit: write minutes, H:MM:SS or D-HH:MM:SS"),
        (
            "",
            "slurm: there is no sbatch on this machine: run this on a node that submits jobs of the cluster",
        ),
    ],
)
def test_mistakes_are_reported_in_a_line(options: str, line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(InputError) as error, SlurmCluster(options):
        pass
    assert str(error.value) == line
