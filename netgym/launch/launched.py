"""A launch in the processes of its program: a variable of the environment, and a private folder."""

from __future__ import annotations

import json
import os
import socket
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from exogym_core.names import visible
from netsim.errors import InputError

__all__ = ["Clock", "Launched", "clock_of_environment", "listen", "refused"]

Clock = Literal["virtual", "host"]
"""Time that a program reads after `init_process_group`."""

_VARIABLE = "NETGYM_LAUNCH"


@dataclass(frozen=True)
class Launched:
    """A launch, in the processes of its program.

    Attributes:
        folder: private to the run; holds the store of c10d, the socket that ranks come to, and refusals.
        num_ranks: processes that the launcher has started; 0: the program starts its ranks itself.
        compute: cost of computing, as text.
        num_devices: that stand in for CUDA devices; 0: none do.
        clock: `virtual` or `host`, the time that the program reads.
        has_values: False: tensors of the program have shapes alone.
    """

    folder: str
    num_ranks: int
    compute: str
    num_devices: int = 0
    clock: Clock = "virtual"
    has_values: bool = True

    @classmethod
    def current(cls) -> Launched | None:
        """The launch that this process belongs to, if it does."""
        text = os.environ.get(_VARIABLE)
        return None if text is None else cls(**json.loads(text))

    @property
    def socket(self) -> str:
        """Socket for ranks that the program has started itself."""
        return os.path.join(self.folder, "simulation")

    @property
    def store(self) -> str:
        """Address at which ranks meet that the launcher has started."""
        return os.path.join(self.folder, "store")

    @property
    def refusal(self) -> str:
        """First reason for refusing a process of the program; "" where none was refused."""
        path = Path(self.folder, "refused")
        return path.read_text(encoding="utf-8").partition("\n")[0] if path.is_file() else ""

    def refused_rank(self, rank: int, num_ranks: int) -> InputError:
        """Error of a rank that the launcher has not started."""
        return refused(
            f"a process calls init_process_group as rank {rank} of {num_ranks}, and is not one of the {self.num_ranks} "
            "that -n has started: a script that starts its ranks itself (mp.spawn, multiprocessing) runs without -n"
        )

    def to_environment(self) -> None:
        """Add this process, and those that it starts, to the launch."""
        os.environ[_VARIABLE] = json.dumps(asdict(self))
        os.environ["PYTHONUNBUFFERED"] = "1"  # output of killed processes is not lost


def clock_of_environment() -> Clock:
    """Time that ranks read which others than the launcher have started, by NETGYM_CLOCK.

    Raises:
        InputError: it is neither.
    """
    clock = os.environ.get("NETGYM_CLOCK", "host")
    if clock not in ("host", "virtual"):
        raise InputError(f"NETGYM_CLOCK {visible(clock)}: write host or virtual")
    return "virtual" if clock == "virtual" else "host"


def refused(reason: str) -> InputError:
    """Error of a refusal; a launcher reads the reason from its folder, even where the program hides the error."""
    launched = Launched.current()
    if launched is not None:
        with open(os.path.join(launched.folder, "refused"), "a", encoding="utf-8") as file:
            file.write(f"{reason}\n")
    return InputError(reason)


def listen(path: str, backlog: int = 128) -> socket.socket:
    """A listening socket at `path`, whose folder must be private."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen(backlog)
    return listener
