"""The rendezvous of the ranks of a real run: a store with signed values, gloo's groups, and the names of failures."""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import hmac
import json
import os
import re
import secrets
import socket
import stat
import time
import weakref
from collections import Counter
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import FileStore, HashStore, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from exogym_core.communicator.gloo.wire import Wire
from exogym_core.meeting_place import LauncherError, allow_many_files, whole_number_of
from netsim.errors import DeadlockError, MismatchError, NetsimError, RankError, unknown_name
from netsim.files.signed import shared_secret

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

__all__ = [
    "TIMEOUT_SECONDS",
    "ConnectionLostError",
    "NoAnswerError",
    "ProcessGroups",
    "Rendezvous",
    "SignedStore",
    "choose_backend",
]

# --- a signed store ------------------------------------------------------------------------------------------


_DIGEST_BYTES = 32


class SignedStore(Store):
    """Store of signed values: values written without the secret are refused.

    Keep it alive as long as a process group that was made with it: torch holds the C++ half alone.

    Raises:
        RankError: (`get`) the value under this key was not written by a rank of this run.
    """

    def __init__(self, inner: Store, secret: bytes, rank: int) -> None:
        super().__init__()
        self._inner, self._secret, self._rank = inner, secret, rank

    def set(self, key: str, value: Any) -> None:
        """Write a signed value."""
        content = value.encode() if isinstance(value, str) else bytes(value)
        self._inner.set(key, self._seal(key, content) + content)  # type: ignore[arg-type]

    def get(self, key: str) -> bytes:
        """The value under `key`, waiting for it."""
        raw = self._inner.get(key)
        seal, content = raw[:_DIGEST_BYTES], raw[_DIGEST_BYTES:]
        if not hmac.compare_digest(seal, self._seal(key, content)):
            raise RankError(
                f"rank {self._rank}: a value at the rendezvous was not written by a rank of this run; give all ranks "
                "the same secret (NETGYM_SECRET, or a file of mode 0600 by NETGYM_SECRET_FILE)",
                self._rank,
            )
        return content

    def _seal(self, key: str, content: bytes) -> bytes:
        return hmac.digest(self._secret, key.encode() + b"\0" + content, "sha256")

    # Unsigned calls are passed on: nothing of ours, nor of gloo's, trusts them.

    def wait(self, keys: list[str], timeout: datetime.timedelta | None = None) -> None:
        """Wait for all `keys`."""
        self._inner.wait(keys) if timeout is None else self._inner.wait(keys, timeout)

    def check(self, keys: list[str]) -> bool:
        """True if all `keys` are there."""
        return bool(self._inner.check(keys))

    def add(self, key: str, amount: int) -> int:
        """Count: the sum of all that has been added under `key`."""
        return int(self._inner.add(key, amount))

    def delete_key(self, key: str) -> bool:
        """Delete a value from the store."""
        return bool(self._inner.delete_key(key))

    def set_timeout(self, timeout: datetime.timedelta) -> None:
        """Time-out of `get` and `wait`."""
        self._inner.set_timeout(timeout)

    def has_extended_api(self) -> bool:
        """False, so that torch uses the methods here alone."""
        return False

    def clone(self) -> SignedStore:
        """Store for another thread, on this one's connection."""
        return self


# --- sockets of gloo -----------------------------------------------------------------------------------------


_DESCRIPTORS = "/dev/fd"  # of this process; there on Linux and macOS


def _open_sockets(before: Mapping[int, int] = MappingProxyType({})) -> dict[int, int]:
    """This process's sockets, without those open `before`: descriptor -> inode, which its next one does not share."""
    found = {}
    with contextlib.suppress(OSError):
        for name in os.listdir(_DESCRIPTORS):
            with contextlib.suppress(OSError, ValueError):
                about = os.fstat(int(name))
                if stat.S_ISSOCK(about.st_mode) and before.get(int(name)) != about.st_ino:
                    found[int(name)] = about.st_ino
    return found


# --- the rendezvous ------------------------------------------------------------------------------------------


T = TypeVar("T")

TIMEOUT_SECONDS = 1800.0
"""Least seconds that ranks of a real run wait for each other, where no time-out is given."""

# A rank may be 3 % slower than the others over rounds of many hours, or thrice as slow at once: without a time-out
# a rank waits for this many times its own work since its last call.
_TIMES_OWN_WORK = 4.0

_LOOPBACK = "127.0.0.1"
_SOURCE = re.compile(r"\[[^]]*\.(cc|cpp|h):\d+\] ?")  # a place in gloo's code
# In such a place: gloo raises plain RuntimeErrors, and its reductions some, too.
_TRANSPORT = "gloo/transport/"


class ConnectionLostError(RankError):
    """A rank lost its connection to another one, which has most likely failed: look there for the cause."""

    is_consequence = True


class NoAnswerError(DeadlockError):
    """A call has waited for its whole time-out."""


@dataclass(frozen=True)
class ProcessGroups:
    """The process groups of some ranks: `data` for tensors, `control` always gloo, their store, and their name.

    A rank alone has no groups, and a store of its own.
    """

    data: Any = None
    control: Any = None
    store: Store = field(default_factory=HashStore)
    name: str = ""


@dataclass
class _MadeGroups:
    """Process groups that a rank has made.

    Attributes:
        num_with: their number with each other rank.
        num_of: their number of just these ranks, by a digest.
        alive: gloo's groups.
        sockets: opened while groups were made.
    """

    num_with: Counter[int] = field(default_factory=Counter)
    num_of: Counter[str] = field(default_factory=Counter)
    alive: weakref.WeakSet[Any] = field(default_factory=weakref.WeakSet)
    sockets: dict[int, int] = field(default_factory=dict)


@dataclass
class Rendezvous:
    """Connection of one rank to the others.

    Attributes:
        rank: this rank.
        num_ranks: all ranks of the run.
        store_path: a file that all ranks on this machine can open; empty: by torchrun's environment.
        check: whether calls are compared before they run.
        timeout_seconds: limit of a rank's wait for others; None: by its own rounds, see `TIMEOUT_SECONDS`.
        backend: carrier of tensors, `gloo` or `nccl`.
        device: where the backend takes tensors.
        secret: known to the run's ranks alone: their records at the rendezvous are signed with it, and
            every connection is authenticated, since any process that reaches their ports can connect.
        address: of this machine, for gloo to listen on; empty: that of GLOO_SOCKET_IFNAME, or what gloo finds.
        time_option: users' name of `timeout_seconds`.
        store: of ranks that have met already, of which `subgroup` connects some; else `join` sets it.
    """

    rank: int
    num_ranks: int
    store_path: str = ""
    check: bool = True
    timeout_seconds: float | None = 60.0
    backend: str = "gloo"
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    secret: bytes = field(default=b"", repr=False)
    address: str = ""
    time_option: str = "timeout_seconds"
    store: Store = field(default_factory=HashStore)
    _number: int = field(init=False, default=0)  # of this run, among those of these ranks
    _grows: bool = field(init=False, default=False)  # no time-out was given
    _left: float = field(init=False, default_factory=time.monotonic)  # when its last call had finished
    _made: _MadeGroups = field(init=False, default_factory=_MadeGroups)

    def __post_init__(self) -> None:
        if self.timeout_seconds is None:
            self.timeout_seconds, self._grows = TIMEOUT_SECONDS, True

    @classmethod
    def from_environment(cls, check: bool, timeout_seconds: float | None, backend: str) -> Rendezvous:
        """Rendezvous of a process started by torchrun.

        Raises:
            InputError: a variable is missing or no number, the backend is unknown, or there is no secret.
        """
        needed = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        missing = [name for name in needed if name not in os.environ]
        if missing:
            raise LauncherError(
                f"environment: {', '.join(missing)} not set; start this program with torchrun"
            )
        allow_many_files()
        rank, num_ranks = whole_number_of("RANK"), whole_number_of("WORLD_SIZE")
        chosen = choose_backend(backend, whole_number_of("LOCAL_WORLD_SIZE", num_ranks))
        made = cls(rank, num_ranks, "", check, timeout_seconds, chosen, secret=shared_secret())
        if chosen == "nccl":
            made.device = torch.device("cuda", whole_number_of("LOCAL_RANK", rank))  # the rank's own
            torch.cuda.set_device(made.device)
        return made

    def join(self) -> ProcessGroups:
        """Connect to all other ranks; returns the group of the whole run."""
        if self.num_ranks == 1:
            return ProcessGroups()

        def start() -> ProcessGroups:
            self.store = self._sealed(self._open_store())
            return self._groups(range(self.num_ranks))

        return self.guarded(f"rank {self.rank} waits for all {self.num_ranks} ranks to start", start)

    def subgroup(self, ranks: Sequence[int], place: str = "") -> ProcessGroups:
        """Process groups of `ranks` (of the run), in which this one is; called by their members alone.

        `place` is that of the call in the user's code.

        Raises:
            MismatchError: a member names other ranks, or another order.
        """
        if len(ranks) == 1:
            return ProcessGroups()
        call = f"group({list(ranks)}){place}"

        def start() -> ProcessGroups:
            if self.check:
                self._compare(ranks, call)
            return self._groups(ranks)

        return self.guarded(f"rank {self.rank} waits in {call}", start)

    def guarded(self, waiting: str, call: Callable[[], T]) -> T:
        """`call()`, with torch's errors as ours; `waiting` describes the wait."""
        needed = _TIMES_OWN_WORK * (time.monotonic() - self._left)
        if self._grows and self.timeout_seconds is not None and needed > self.timeout_seconds:
            self.timeout_seconds = needed
            for group in self._made.alive:
                group.set_timeout(self.timeout)
        try:
            return call()
        except NetsimError:
            raise
        except RuntimeError as error:
            reason = _SOURCE.sub("", str(error).partition("\n")[0]).partition(". This is")[0]
            late = "imed out" in reason or "imeout" in reason
            if not (late or isinstance(error, dist.DistError) or _TRANSPORT in str(error)):
                raise
        finally:
            self._left = time.monotonic()
        # Outside of the handler: gloo's own traceback is no context that a user could use.
        if late:
            raise NoAnswerError(
                f"{waiting}: no answer from every rank within {self.timeout_seconds:g} s; look for a rank that "
                f"does not make this call, or raise {self.time_option}"
            )
        raise ConnectionLostError(f"{waiting}: the connection to another rank was lost ({reason})", self.rank)

    @property
    def timeout(self) -> datetime.timedelta:
        """Time-out of calls and messages as torch takes it: gloo has one for a group."""
        assert self.timeout_seconds is not None
        return datetime.timedelta(seconds=self.timeout_seconds)

    def another_store(self) -> SignedStore:
        """A connection of its own to the store at which the ranks met, for another thread."""
        return SignedStore(PrefixStore("beside", self._open_store(again=True)), self.secret, self.rank)

    def kept_store(self) -> SignedStore | None:
        """Store that outlives a restart of the ranks by torchrun, or None."""
        if self.store_path or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
            return None
        store = PrefixStore("netgym kept", self._open_store(again=True, of_restart=False))
        return SignedStore(store, shared_secret(), self.rank)

    def _open_store(self, again: bool = False, of_restart: bool = True) -> Store:
        if self.store_path:
            self.address = _LOOPBACK  # else the interface of this machine's name
            meeting = FileStore(self.store_path, self.num_ranks)
            meeting.set_timeout(self.timeout)  # torch's own is 5 minutes
            return meeting
        address, port = os.environ["MASTER_ADDR"], whole_number_of("MASTER_PORT")
        if address == "localhost" or address.startswith("127."):
            self.address = self.address or _LOOPBACK  # and not the interface of this machine's name
        hosting = not again and self.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        store = TCPStore(
            address,
            port,
            None if again else self.num_ranks,
            is_master=hosting,
            wait_for_workers=not again,
            timeout=self.timeout,
            # Left to itself it would listen on all interfaces of this machine.
            master_listen_fd=_listener(address, port) if hosting else None,
        )
        if not of_restart:
            return store
        # Under torchrun's agent the store outlives a restart of the ranks, and a run before this one of the same ranks.
        prefix = f"netgym {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
        if not again:
            self._number = PrefixStore(prefix, store).add(f"runs of rank {self.rank}", 1)
        return PrefixStore(f"{prefix} {self._number}", store)

    def _sealed(self, store: Store) -> Store:
        """`store` with signed values, by a secret of this run's own.

        Every rank adds a number to it that is not known before: what was signed in another run is worth nothing.
        """
        if not self.secret:
            return store
        sealed = SignedStore(store, self.secret, self.rank)
        sealed.set(f"number {self.rank}", secrets.token_bytes(16))
        numbers = [sealed.get(f"number {rank}") for rank in range(self.num_ranks)]
        self.secret = hmac.digest(self.secret, b"".join(numbers), "sha256")
        return SignedStore(store, self.secret, self.rank)

    def _groups(self, ranks: Sequence[int]) -> ProcessGroups:
        """New groups of these ranks.

        Not by `torch.distributed.new_group`: ranks that have made different numbers of groups before give
        one group different names there, and wait for each other for ever. Nor by `init_process_group`, which
        keeps state in the module and puts a prefix before every later traceback.
        """
        members = sorted(ranks)
        digest = hashlib.blake2b(repr(members).encode(), digest_size=6).hexdigest()
        self._made.num_of[digest] += 1
        name = f"{digest} {self._made.num_of[digest]}"
        store = PrefixStore(f"group {name}", self.store)
        place = members.index(self.rank), len(members)
        before = _open_sockets()
        control = self._gloo(PrefixStore("gloo", store), *place)
        self._made.sockets |= _open_sockets(before)
        self._made.alive.add(control)
        if self.secret:
            self._authenticate(Wire(control, members, place[0], torch.device("cpu")), members)
        data = control
        if self.backend == "nccl":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = self.timeout
            data = dist.ProcessGroupNCCL(PrefixStore("nccl", store), *place, options)
        return ProcessGroups(data, control, PrefixStore("mailboxes", store), name)

    def cut(self) -> None:
        """Shut down gloo's connections: calls waiting in them fail; listening sockets stay, as gloo would throw."""
        for number, node in self._made.sockets.items():
            with contextlib.suppress(OSError):
                if os.fstat(number).st_ino != node:
                    continue
                with socket.socket(fileno=os.dup(number)) as connection:
                    if not connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                        connection.shutdown(socket.SHUT_RDWR)

    def _gloo(self, store: Store, place: int, size: int) -> Any:
        if not self.address or ("GLOO_SOCKET_IFNAME" in os.environ and not self.store_path):
            return dist.ProcessGroupGloo(store, place, size, timeout=self.timeout)
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout = self.timeout
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=self.address)]
        return dist.ProcessGroupGloo(store, place, size, options)

    def _authenticate(self, wire: Wire, ranks: list[int]) -> None:
        """Show every other member, on the connection to it, that this rank knows the secret."""
        shown = [_proof(self.secret, self.rank, other, ranks) for other in ranks]
        got = wire.all_to_all(
            [torch.frombuffer(bytearray(proof), dtype=torch.uint8) for proof in shown],
            [len(proof) for proof in shown],
        )
        for other, proof in zip(ranks, got, strict=True):
            if not hmac.compare_digest(proof.numpy().tobytes(), _proof(self.secret, other, self.rank, ranks)):
                raise RankError(
                    f"rank {self.rank}: the process that connected as rank {other} belongs to another run; "
                    "run it again",
                    self.rank,
                )

    def _compare(self, ranks: Sequence[int], call: str) -> None:
        """Agree with every member on the next group."""
        store = self.store
        mine = json.dumps([list(ranks), call])
        others = [rank for rank in ranks if rank != self.rank]
        for other in others:
            store.set(f"call {self.rank} {other} {self._made.num_with[other]}", mine)
        for other in others:
            theirs = json.loads(store.get(f"call {other} {self.rank} {self._made.num_with[other]}"))
            self._made.num_with[other] += 1
            if theirs[0] != list(ranks):
                raise MismatchError(
                    f"ranks disagree: rank {self.rank} called {call}; rank {other} called {theirs[1]}"
                )


def _proof(secret: bytes, sender: int, receiver: int, ranks: list[int]) -> bytes:
    return hmac.digest(secret, repr((sender, receiver, ranks)).encode(), "sha256")


def choose_backend(backend: str, num_local_ranks: int) -> str:
    """`gloo` or `nccl`; `auto` takes nccl where every rank of this machine has a GPU of its own.

    Raises:
        UnknownNameError: it is none of the three.
    """
    if backend not in ("auto", "gloo", "nccl"):
        raise unknown_name("backend", str(backend), ("auto", "gloo", "nccl"))
    if backend == "auto":
        return "nccl" if torch.cuda.device_count() >= num_local_ranks else "gloo"
    return backend


def _listener(address: str, port: int) -> int:
    """A listening socket on this address alone; the store closes it."""
    family = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0][0]
    with socket.create_server((address, port), family=family) as listener:
        return listener.detach()
