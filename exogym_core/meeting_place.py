"""Where sites of a run meet, as the environment tells; known without importing torch."""

from __future__ import annotations

import contextlib
import os
from typing import NamedTuple

from netsim.files.errors import InputError

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]

__all__ = [
    *(
        "SERVICE",
        "MeetingPlace",
        "allow_many_files",
        "is_at_rendezvous",
        "parse_address",
        "processes_of_site",
    ),
]

SERVICE = "netgym rendezvous"
"""What who connects there expects to find."""

_MOST_FILES = 1 << 20
_RENDEZVOUS, _SITE, _RUN = "NETGYM_RENDEZVOUS", "NETGYM_SITE", "NETGYM_RUN"


def is_at_rendezvous() -> bool:
    """Whether this process is a site that meets others at a rendezvous."""
    return bool(os.environ.get(_RENDEZVOUS))


def allow_many_files() -> None:
    """Raise this process's soft limit of open files, often 1,024, towards the hard one.

    Whoever reaches a port of gloo's can hold connections to it, and a process at its limit ends.
    """
    if resource is None:
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, _MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):  # macOS allows fewer than it says
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def processes_of_site() -> int:
    """How many processes torchrun has started for this site."""
    return int(os.environ.get("WORLD_SIZE", "1"))


class MeetingPlace(NamedTuple):
    """What a site is told of its rendezvous.

    Attributes:
        address: host and port, of NETGYM_RENDEZVOUS.
        site: which one this process is, of NETGYM_SITE; None: the rendezvous says.
        run: a name for the run, of NETGYM_RUN, where the same rendezvous sees the same run several times.
    """

    address: tuple[str, int]
    site: int | None
    run: str

    @classmethod
    def from_environment(cls) -> MeetingPlace:
        """As the variables say.

        Raises:
            InputError: one is missing, or wrong.
        """
        address, site = os.environ.get(_RENDEZVOUS, ""), os.environ.get(_SITE, "")
        if site and not site.isdecimal():
            raise InputError(f"environment: {_SITE}={site!r} is no number of a site: write 0, 1, ...")
        where = parse_address(address, f"environment: {_RENDEZVOUS}")
        return cls(where, int(site) if site else None, os.environ.get(_RUN, ""))

    def check(self, num_processes: int) -> None:
        """See that there is such a site in a run of so many processes, at all sites together.

        Raises:
            InputError: there are fewer.
        """
        num_sites = max(num_processes // processes_of_site(), 1)
        if self.site is not None and self.site >= num_sites:
            raise InputError(
                f"environment: {_SITE}={self.site}: there is no such site: they are numbered 0 to {num_sites - 1}, "
                "as many as the run has workers"
                + (f", of {processes_of_site()} processes each" if processes_of_site() > 1 else "")
            )


def parse_address(text: str, where: str) -> tuple[str, int]:
    """Host and port of "host:port"; `where` begins the line of what is refused.

    Raises:
        InputError: it is something else.

    >>> parse_address("[::1]:29400", "here")
    ('::1', 29400)
    """
    host, colon, port = text.rpartition(":")
    if not colon or not host or not port.isdecimal() or int(port) > 65535:
        raise InputError(f"{where}: {text!r} is no address: write HOST:PORT, such as 10.0.0.1:29400")
    return host.removeprefix("[").removesuffix("]"), int(port)
