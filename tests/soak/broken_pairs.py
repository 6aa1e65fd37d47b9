"""Train four sites whose connections break, again and again: none ends, and their models are equal.

    python tests/soak/broken_pairs.py --schedules 50 --seed 0 --out build/soak

Each schedule draws what happens: pairs of sites that lose each other (one way, both ways, or by an unreachable route),
sites that are killed and started again, sites that come late or stand still, a rendezvous that is killed. Everything
is mended before the end. Sites and rendezvous are real processes, each in a network namespace of its own behind one
bridge, all inside of a user namespace: nothing of it touches the machine's network. The last line of output is a JSON
object, appended to OUT too.
"""

from __future__ import annotations

import argparse
import ctypes
import faulthandler
import hashlib
import json
import mmap
import os
import random
import re
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

SITES, H = 4, 5
SECRET = b"of this bed alone"
PORT = 29400
AVERAGING_SECONDS = 4.0
ROUNDS_AFTER = 20  # of calm, a sixth of a second each, until the end
SECONDS_TO_END = 240.0
INSIDE = "NETGYM_BED_INSIDE"
CLONE_NEWNET, PR_SET_PDEATHSIG = 0x40000000, 1
LIBC = ctypes.CDLL(None, use_errno=True)


def allowed() -> bool:
    """Whether this machine lets a user have network namespaces."""
    tools = all(shutil.which(tool) for tool in ("unshare", "nsenter", "ip"))
    try_it = "ip link add name net0 type bridge && ip link add name net1 type veth peer name net2"
    return (
        tools and not subprocess.run(["unshare", "-Urn", "sh", "-c", try_it], capture_output=True).returncode
    )


def ip(*arguments: str, inside: int | None = None) -> None:
    """Run `ip`, in the network namespace of a process."""
    enter = [] if inside is None else ["nsenter", "-t", str(inside), "-n"]
    done = subprocess.run([*enter, "ip", *arguments], capture_output=True, text=True)
    assert not done.returncode, f"ip {' '.join(arguments)}: {done.stderr}"


def address(site: int) -> str:
    """A site's; -1 is the rendezvous."""
    return f"10.0.0.{site + 2}"


def forked(body: Callable[[], None]) -> int:
    """A child that calls `body`."""
    pid = os.fork()
    if pid:
        return pid
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    try:
        body()
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


class Bed:
    """The namespaces: one bridge, and a process that holds each namespace."""

    def __init__(self) -> None:
        ip("link", "add", "name", "bridge", "type", "bridge")
        ip("link", "set", "bridge", "up")
        self.holders: dict[int, int] = {}
        for site in range(-1, SITES):
            ready, written = os.pipe()
            self.holders[site] = pid = forked(lambda written=written: self._hold(written))  # type: ignore[misc]
            os.close(written)
            assert os.read(ready, 1), "no network namespace"
            name = f"v{site + 1}"
            ip("link", "add", name, "type", "veth", "peer", "name", "eth0", "netns", str(pid))
            ip("link", "set", name, "master", "bridge", "up")
            ip("link", "set", "lo", "up", inside=pid)
            ip("address", "add", f"{address(site)}/24", "dev", "eth0", inside=pid)
            ip("link", "set", "eth0", "up", inside=pid)

    @staticmethod
    def _hold(written: int) -> None:
        assert not LIBC.unshare(CLONE_NEWNET)
        os.write(written, b"y")
        signal.pause()

    def enter(self, site: int) -> None:
        """This process is in that site's namespace from now on."""
        with open(f"/proc/{self.holders[site]}/ns/net") as namespace:
            assert not LIBC.setns(namespace.fileno(), CLONE_NEWNET)

    def cut(self, site: int, other: int, how: str) -> None:
        """What a site sends to another one vanishes, or is refused by its own machine."""
        if how == "vanish":
            nowhere = ["lladdr", "02:00:00:00:00:99", "dev", "eth0", "nud", "permanent"]
            ip("neighbour", "replace", address(other), *nowhere, inside=self.holders[site])
        else:
            ip("route", "replace", "unreachable", address(other), inside=self.holders[site])

    def mend(self, site: int, other: int, how: str) -> None:
        """The reverse."""
        if how == "vanish":
            ip("neighbour", "delete", address(other), "dev", "eth0", inside=self.holders[site])
        else:
            ip("route", "delete", "unreachable", address(other), inside=self.holders[site])

    def close(self) -> None:
        """End the namespaces."""
        for pid in self.holders.values():
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


class Shared:
    """What all processes see: the round after which sites end, and the round of each."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, 8 * (SITES + 1))
        self[SITES] = 1 << 40

    def __getitem__(self, place: int) -> int:
        return int(struct.unpack_from("q", self._memory, 8 * place)[0])

    def __setitem__(self, place: int, number: int) -> None:
        struct.pack_into("q", self._memory, 8 * place, number)


def train(bed: Bed, site: int, shared: Shared, result: Path, slow: float) -> None:
    """One site's process."""
    import torch
    from torch import nn

    from exogym_core.run.optimizer import DiLoCoOptimizer
    from netgym.sites.communicator import SiteCommunicator
    from netgym.sites.link import SiteLink

    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)
    bed.enter(site)
    with SiteCommunicator(SiteLink((address(-1), PORT), SECRET, site, patience_seconds=60), SECRET) as comm:
        weight = nn.Parameter(torch.zeros(30_000))
        optimizer = DiLoCoOptimizer(
            batch_size=1,
            num_inner_steps=H,
            inner_optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
            params=[weight],
            communicator=comm,
            averaging_timeout=AVERAGING_SECONDS,
            timeout_waiting_for_peers=4,
        )
        while optimizer.local_epoch < shared[SITES]:
            time.sleep(0.02 + slow)
            weight.grad = weight.detach() - (1.0 + site) * torch.arange(30_000.0) / 1000
            optimizer.step()
            shared[site] = optimizer.local_epoch
    bits = hashlib.sha256(weight.detach().numpy().tobytes()).hexdigest()
    result.write_text(json.dumps({"rounds": optimizer.local_epoch, "model": bits}))


def meet(bed: Bed, log: Path) -> None:
    """The rendezvous' process."""
    from netgym.sites.service import RendezvousService

    bed.enter(-1)
    began = time.monotonic()
    with log.open("a", buffering=1) as lines:

        def say(line: str) -> None:
            lines.write(f"{time.monotonic() - began:7.1f} s  {line}\n")

        RendezvousService(SITES, (address(-1), PORT), SECRET, 5.0, say, 5.0).serve()


class Schedule:
    """One run: what happens, drawn from a seed, and how it ended."""

    def __init__(self, bed: Bed, seed: int, folder: Path) -> None:
        self.bed, self.folder, self.random = bed, folder, random.Random(seed)
        self.shared, self.log = Shared(), folder / "rendezvous.log"
        self.cuts: list[tuple[int, int, str]] = []
        self.stopped: set[int] = set()
        self.done: Counter[str] = Counter()
        self.sites: dict[int, int] = {}  # site -> process

    def start(self, site: int, slow: float = 0.0) -> None:
        """A process of a site; what it prints goes to a file."""

        def body() -> None:
            with open(self.folder / f"site{site}.log", "a") as log:
                os.dup2(log.fileno(), 1)
                os.dup2(log.fileno(), 2)
            train(self.bed, site, self.shared, self.folder / f"site{site}.json", slow)

        self.sites[site] = forked(body)

    def run(self, num_events: int) -> None:
        """The whole of it.

        Raises:
            AssertionError: a site has ended, or models differ.
        """
        rendezvous = forked(lambda: meet(self.bed, self.log))
        late = self.random.random() < 0.3
        for site in range(SITES - late):
            self.start(site, slow=self.random.choice((0.0, 0.0, 0.02)))
        try:
            self.wait_for_round(2, range(SITES - late))
            if late:
                self.start(SITES - 1)
            for _ in range(num_events):
                what = self.random.choice(("cut", "cut", "cut", "kill", "stand still", "rendezvous"))
                self.done[what] += 1
                if what == "rendezvous":
                    os.kill(rendezvous, signal.SIGKILL)
                    os.waitpid(rendezvous, 0)
                    time.sleep(self.random.uniform(0.0, 2.0))
                    rendezvous = forked(lambda: meet(self.bed, self.log))
                else:
                    getattr(self, what.replace(" ", "_"))()
                time.sleep(self.random.choice((0.3, 2.0, 6.0)))
                self.check_alive()
                if self.random.random() < 0.5:
                    self.mend_all()
            self.mend_all()
            # All take part again before the last round is set: a killed one may need longer to start than that takes,
            # and a broken pair is tested every few seconds only.
            self.wait_for_round(max(self.shared[site] for site in range(SITES)) + 1, range(SITES))
            self.wait_for(lambda: self.who_met().endswith(": sites 0, 1, 2, 3"), self.who_met)
            self.end()
        finally:
            for pid in (rendezvous, *self.sites.values()):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)

    # --- what happens ---------------------------------------------------------------------------------------

    def cut(self) -> None:
        """Some pairs lose each other."""
        for _ in range(self.random.choice((1, 1, 2, 3))):
            site, other = self.random.sample(range(SITES), 2)
            how = self.random.choice(("vanish", "vanish", "unreachable"))
            for pair in ((site, other), (other, site))[: self.random.choice((1, 2))]:
                if (*pair, how) not in self.cuts:
                    self.bed.cut(*pair, how)
                    self.cuts.append((*pair, how))

    def kill(self) -> None:
        """A site's process is killed, and started again."""
        site = self.random.choice(sorted(self.sites))
        os.kill(self.sites[site], signal.SIGKILL)
        os.waitpid(self.sites[site], 0)
        time.sleep(self.random.uniform(0.0, 2.0))
        self.stopped.discard(site)
        self.start(site)

    def stand_still(self) -> None:
        """A site's process stands still until the next repair."""
        site = self.random.choice(sorted(self.sites))
        os.kill(self.sites[site], signal.SIGSTOP)
        self.stopped.add(site)

    def mend_all(self) -> None:
        """Everything works again."""
        for each in self.cuts:
            self.bed.mend(*each)
        for site in self.stopped:
            os.kill(self.sites[site], signal.SIGCONT)
        self.cuts.clear()
        self.stopped.clear()

    # --- how it goes ----------------------------------------------------------------------------------------

    def check_alive(self) -> None:
        """No site has ended."""
        for site, pid in self.sites.items():
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                self.sites[site] = forked(signal.pause)  # for the end
                log = (self.folder / f"site{site}.log").read_text()
                raise AssertionError(f"site {site} has ended with {status}: {log[-3000:]}")

    def wait_for_round(self, number: int, sites: Any) -> None:
        """Until these sites have that many rounds behind them."""
        self.wait_for(
            lambda: all(self.shared[site] >= number for site in sites),
            lambda: f"not in round {number}: {[self.shared[site] for site in range(SITES)]}",
        )

    def wait_for(self, is_so: Callable[[], bool], what: Callable[[], str]) -> None:
        """Until something is so; no site has ended meanwhile."""
        until = time.monotonic() + SECONDS_TO_END
        while not is_so():
            self.check_alive()
            assert time.monotonic() < until, what()
            time.sleep(0.05)

    def who_met(self) -> str:
        """The rendezvous' last line on the members of a round; one that begins again with all keeps them."""
        others = ".* waited |begins again as a connection broke"
        lines = re.findall(rf" s  ((?:the run begins|round \d+): (?!{others}).*)", self.log.read_text())
        return str(lines[-1])

    def end(self) -> None:
        """All sites come to the same round with the same model."""
        last = max(self.shared[site] for site in range(SITES)) + ROUNDS_AFTER
        self.shared[SITES] = last
        until = time.monotonic() + SECONDS_TO_END
        pending = dict(self.sites)
        while pending and time.monotonic() < until:
            for site, pid in list(pending.items()):
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    del pending[site]
                    self.sites[site] = forked(signal.pause)
                    log = (self.folder / f"site{site}.log").read_text()
                    assert not status, f"site {site} has ended with {status}: {log[-3000:]}"
            time.sleep(0.05)
        rounds = [self.shared[site] for site in range(SITES)]
        for site, pid in pending.items():
            os.kill(pid, signal.SIGUSR1)
            time.sleep(1.0)
            print((self.folder / f"site{site}.log").read_text(), flush=True)
        assert not pending, f"sites {sorted(pending)} do not come to their end: rounds {rounds} of {last}"
        results = [json.loads((self.folder / f"site{site}.json").read_text()) for site in range(SITES)]
        assert all(each == {"rounds": last, "model": results[0]["model"]} for each in results), results
        assert self.who_met().endswith(": sites 0, 1, 2, 3"), f"somebody has not come back: {self.who_met()}"


def run(first: int, num_schedules: int, num_events: int, out: Path | None) -> int:
    """Play schedules; returns how many failed."""
    import torch._dynamo  # here with all that follows, and not in each of the forks: optimizers need it

    import netgym.sites.service  # noqa: F401

    torch.set_num_threads(1)
    bed = Bed()
    failed, done = [], Counter[str]()
    for seed in range(first, first + num_schedules):
        folder = Path(tempfile.mkdtemp(prefix=f"broken-pairs-{seed}-"))
        schedule, began = Schedule(bed, seed, folder), time.monotonic()
        try:
            schedule.run(num_events)
        except AssertionError as error:
            failed.append({"seed": seed, "error": str(error)[:1000], "folder": str(folder)})
            print(f"schedule {seed}: {error}\n{schedule.log.read_text()}", flush=True)
        else:
            shutil.rmtree(folder)
        schedule.mend_all()
        done.update(schedule.done)
        print(f"schedule {seed}: {dict(schedule.done)}, {time.monotonic() - began:.0f} s", flush=True)
    bed.close()
    report = {"soak": "broken pairs", "schedules": num_schedules, "events": dict(done), "failed": failed}
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        with (out / "broken_pairs.jsonl").open("a") as file:
            file.write(json.dumps(report) + "\n")
    print(json.dumps(report))
    return len(failed)


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--schedules", type=int, default=50)
    parser.add_argument("--events", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("build/soak"))
    given = parser.parse_args()
    if INSIDE not in os.environ:
        if not allowed():
            print("no network namespaces here (unshare -Urn, ip, nsenter): nothing was tried")
            return 0
        os.environ[INSIDE] = "yes"
        os.execvp("unshare", ["unshare", "-Urn", sys.executable, *sys.argv])
    return min(run(given.seed, given.schedules, given.events, given.out), 1)


if __name__ == "__main__":
    sys.exit(main())
