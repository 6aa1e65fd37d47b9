"""Sites as processes: some are killed, some come late, and nothing is lost."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from experiments import experiment
from forks import Fork
from leaks import leaks

EXPERIMENT = experiment(
    name="apart",
    workers="{count: 3, kind: threads}",
    topology="two-datacenters",
    collectives="ring",
    compute="50 ms",
    steps="STEPS",
    batch_size=4,
    evaluate="{every: 50, samples: 32}",
    checkpoint="{every: 20}",
    strategies="[{name: DiLoCo, H: 5, averaging_timeout: 10 min, timeout_waiting_for_peers: 10 min}]",
)

TWO_SITES = EXPERIMENT.replace("count: 3", "count: 2")

CANARY = "canary-0cc175b9c0f1b6a831c399e269772661"

# Forks: each site is a process as one that a shell has started, but sooner. All end with the test.
DRIVER = """
import ctypes, glob, os, re, signal, socket, sys, time
from netgym.cli.main import main

names = {}

def end_with_parent():
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)

def start(name, *arguments, **variables):
    if pid := os.fork():
        names[pid] = name
        return pid
    end_with_parent()
    os.environ.update(variables)
    log = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(log, 1); os.dup2(log, 2)
    code = main(list(arguments))
    sys.stdout.flush(); sys.stderr.flush()
    os._exit(code)

def seen(name, pattern):
    # However slow the machine is: until it is there, or a process has failed.
    while True:
        if os.path.exists(name) and (found := re.search(pattern, open(name).read())):
            return found
        for pid in [pid for pid in names if os.path.exists(names[pid])]:
            about = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if about is not None and about.si_code == os.CLD_EXITED and about.si_status:
                sys.exit(f"{names[pid]} has failed: " + open(names[pid]).read())
        time.sleep(0.02)

def ended(pids):
    for pid in pids:
        # What everybody on the machine can read of them.
        for about in ("cmdline", "comm", "stat"):
            if os.path.exists(f"/proc/{pid}/{about}"):
                open(f"seen-{pid}-{about}", "wb").write(open(f"/proc/{pid}/{about}", "rb").read())
        names.pop(pid, None)
    return [os.waitpid(pid, 0)[1] for pid in pids]

def site(number, *arguments):
    folder = arguments or ("real.yaml", "--out", f"out{number}")
    return start(f"site{number}", "compare", *folder, NETGYM_RENDEZVOUS=address, NETGYM_SITE=str(number))

def shared_site(number, *arguments):
    # Two processes, as torchrun starts them.
    folder = arguments or ("real.yaml", "--out", f"out{number}")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    about = dict(NETGYM_RENDEZVOUS=address, NETGYM_SITE=str(number), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2",
                 MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), TORCHELASTIC_RUN_ID="none")
    return [start(f"site{number}-{rank}", "compare", *folder, **about, RANK=str(rank), LOCAL_RANK=str(rank))
            for rank in range(2)]

end_with_parent()
at = start("rendezvous", "rendezvous", "--sites", "SITES", "--listen", "127.0.0.1:0", "--silent", "600")
address = seen("rendezvous", r"NETGYM_RENDEZVOUS=(\\S+)")[1]
"""

# However slow the machine is, a site is killed before step 120, and comes again before the others finish.
HELD = """
import time
from pathlib import Path
from exogym_core.strategy import DiLoCoStrategy

class Held(DiLoCoStrategy):
    def step(self):
        super().step()
        while (gate := {120: "killed", 160: "again"}.get(self.local_step)) and not Path(gate).exists():
            Path("waits").touch()
            time.sleep(0.01)
"""


def held(experiment: str, num_steps: int) -> str:
    return experiment.replace("STEPS", str(num_steps)).replace(
        "name: DiLoCo,", "name: 'own:Held', label: DiLoCo,"
    )


DISTURBED = """
sites = [site(0), site(1)]
seen("rendezvous", "site 1 has joined")
sites.append(site(2))
seen("waits", "")
os.kill(sites[1], signal.SIGKILL)
ended(sites[1:2])
open("killed", "w").close()
seen("rendezvous", "without site 1")
sites[1] = site(1, "--resume", "out1")
seen("rendezvous", "site 1 has joined[^$]*site 1 has joined")
open("again", "w").close()
print(ended(sites))
os.kill(at, signal.SIGINT)
print(ended([at])[0] >> 8)
"""


def drive(folder: Path, script: str, experiment: str, sites: int = 3) -> list[str]:
    """What the script prints; nothing that it leaves, nor what is printed or seen of processes, tells the secret."""
    (folder / "real.yaml").write_text(experiment)
    (folder / "own.py").write_text(HELD)
    (folder / "temporary").mkdir()
    environment = {
        "NETGYM_SECRET": CANARY,
        "TMPDIR": str(folder / "temporary"),
        "XDG_CONFIG_HOME": str(folder),
    }
    code = compile(DRIVER.replace("SITES", str(sites)) + script, "driver", "exec")
    done = Fork(exec, code, {}, folder=folder, environment=environment).end()
    assert done.returncode == 0, done.stderr[-4000:]
    assert leaks(folder, CANARY, stdout=done.stdout, stderr=done.stderr) == []
    return done.stdout.splitlines()


@pytest.mark.thorough
def test_all_sites_keep_the_same_run_though_one_was_killed_and_came_again(tmp_path: Path) -> None:
    """The killed one's folder, too, holds every row of everybody, from the start to the end."""
    assert drive(tmp_path, DISTURBED, held(EXPERIMENT, 240)) == ["[0, 0, 0]", "130"]
    files = ["metrics/DiLoCo.csv", "metrics/DiLoCo.validation.csv"]
    folders = [tmp_path / f"out{number}" for number in range(3)]
    for name in files:
        texts = [(folder / name).read_text() for folder in folders]
        assert texts[0] == texts[1] == texts[2]
    rows = (folders[1] / files[0]).read_text().splitlines()
    assert len(rows) == 1 + 240
    (summary,) = json.loads((folders[1] / "summary.json").read_text())
    assert [peer["rank"] for peer in summary["dropped_peers"]].count(1) >= 1
    assert summary["wall_seconds"] > 0
    last = [path.name for path in (folders[1] / "checkpoints" / "DiLoCo").iterdir()]
    assert last == ["step-00000240"]


ALL_KILLED = """
sites = [site(number) for number in range(2)]
for number in range(2):
    while not glob.glob(f"out{number}/checkpoints/DiLoCo/step-*"):
        time.sleep(0.01)
for pid in [at, *sites]:  # no site sees another go
    os.kill(pid, signal.SIGKILL)
ended([*sites, at])
at = start("again", "rendezvous", "--sites", "2", "--listen", "127.0.0.1:0", "--silent", "600")
address = seen("again", r"NETGYM_RENDEZVOUS=(\\S+)")[1]
sites = [site(number, "--resume", f"out{number}") for number in range(2)]
print(ended(sites))
os.kill(at, signal.SIGINT)
ended([at])
"""


def test_nothing_is_lost_when_all_sites_and_the_rendezvous_are_killed_at_once(tmp_path: Path) -> None:
    """Their last checkpoints are of unlike steps, and the rows between them were told to processes that are gone."""
    assert drive(tmp_path, ALL_KILLED, TWO_SITES.replace("STEPS", "60"), 2)[0] == "[0, 0]"
    texts = [(tmp_path / f"out{number}" / "metrics" / "DiLoCo.csv").read_text() for number in range(2)]
    assert texts[0] == texts[1]
    assert len(texts[0].splitlines()) == 1 + 60


WHOLE = """
sites = [site(number) for number in range(2)]
print(ended(sites))
os.kill(at, signal.SIGINT)
ended([at])
from netgym.cli.main import main
main(["compare", "real.yaml", "--out", "simulated"])
"""


def check_losses(home: Path, real: str, simulated: str) -> None:
    def columns(folder: str, name: str, *wanted: str) -> list[list[float]]:
        header, *rows = (home / folder / "metrics" / name).read_text().splitlines()
        places = [header.split(",").index(each) for each in wanted]
        return [[float(row.split(",")[place]) for place in places] for row in rows]

    for name, wanted in (
        ("DiLoCo.csv", ("step", "train_loss", "examples_trained")),
        ("DiLoCo.validation.csv", ("step", "judged_loss")),
    ):
        for found, expected in zip(
            columns(real, name, *wanted), columns(simulated, name, *wanted), strict=True
        ):
            assert found == pytest.approx(expected, rel=1e-4)


def test_sites_that_are_always_there_train_as_in_simulation(tmp_path: Path) -> None:
    """The same losses to 1e-4, by step and by evaluation, and the same bytes."""
    assert drive(tmp_path, WHOLE, TWO_SITES.replace("STEPS", "20"), 2)[0] == "[0, 0]"

    check_losses(tmp_path, "out1", "simulated")


SHARED_EXPERIMENT = EXPERIMENT.replace("count: 3", "count: 4").replace(
    "H: 5,", "H: 5, ranks_per_worker: 2, sharding: FULL_SHARD,"
)


SHARED_DISTURBED = """
os.environ["NETGYM_CHECKPOINTS"] = os.path.abspath("scratch")  # the second process of a site has a disk of its own
sites = [shared_site(0), shared_site(1)]
seen("waits", "")
os.kill(sites[1][1], signal.SIGKILL)
os.kill(sites[1][0], signal.SIGTERM)
lost = ended(sites[1])
open("killed", "w").close()
seen("rendezvous", "without site 1")
print(lost[1], lost[0] >> 8)
sites[1] = shared_site(1, "--resume", "out1")
seen("rendezvous", "site 1 has joined[^$]*site 1 has joined")
open("again", "w").close()
print(ended([pid for site in sites for pid in site]))
os.kill(at, signal.SIGINT)
ended([at])
"""


@pytest.mark.thorough
def test_a_site_of_two_processes_that_was_killed_resumes_from_its_own_disk(tmp_path: Path) -> None:
    """One of its processes is killed, and torchrun ends the other; the folder of the site holds the whole run then.

    Each of its processes has a disk of its own for checkpoints.
    """
    experiment = held(SHARED_EXPERIMENT, 200).replace("every: 50", "every: 100")
    assert drive(tmp_path, SHARED_DISTURBED, experiment, 2) == ["9 143", "[0, 0, 0, 0]"]
    for name in ("DiLoCo.csv", "DiLoCo.validation.csv"):
        texts = [(tmp_path / f"out{number}" / "metrics" / name).read_text() for number in range(2)]
        assert texts[0] == texts[1]
    assert len((tmp_path / "out1" / "metrics" / "DiLoCo.csv").read_text().splitlines()) == 1 + 200
    (summary,) = json.loads((tmp_path / "out1" / "summary.json").read_text())
    assert {2, 3} <= {peer["rank"] for peer in summary["dropped_peers"]}
    last = tmp_path / "out1" / "checkpoints" / "DiLoCo" / "step-00000200"
    assert [path.name for path in last.glob("rank-*.json")] == ["rank-0002.json"]
    parts = [
        path for path in (tmp_path / "scratch").rglob("part-00000200/rank-*.json") if "out1" in path.parts
    ]
    assert [path.name for path in parts] == ["rank-0003.json"]
