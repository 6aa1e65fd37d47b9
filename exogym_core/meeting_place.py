"""Launchers and rendezvous of this process, from its environment; torch is not imported."""

from __future__ import annotations

import contextlib
import os
from typing import NamedTuple

from netsim.errors import InputError

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]

__all__ = [
    "SERVICE",
    "LauncherError",
    "MeetingPlace",
    "allow_many_files",
    "is_at_rendezvous",
    "parse_address",
    "processes_of_site",
    "register_sites",
    "registered_sites",
    "torchrun_rank",
    "under_torchrun",
    "whole_number_of",
]

SERVICE = "netgym rendezvous"
"""Name of the service that a site expects there."""

_MOST_FILES = 1 << 20
_RENDEZVOUS, _SITE, _RUN = "NETGYM_RENDEZVOUS", "NETGYM_SITE", "NETGYM_RUN"


class LauncherError(InputError):
    """Variables of the environment, which a launcher sets, are wrong or missing: no option is."""


def under_torchrun() -> bool:
    """Return True if torchrun has started this process and others with it.

    RANK and WORLD_SIZE alone do not prove it: shells of other launchers have them too.
    """
    return {"TORCHELASTIC_RUN_ID", "RANK", "WORLD_SIZE"} <= os.environ.keys()


def torchrun_rank() -> int | None:
    """Rank of this process under torchrun; None without torchrun.

    Raises:
        InputError: RANK is no number.
    """
    return whole_number_of("RANK") if under_torchrun() else None


def whole_number_of(variable: str, default: int | None = None) -> int:
    """The whole number that a variable of the environment holds; `default` where it is not set.

    Raises:
        InputError: it holds something else.
    """
    value = os.environ.get(variable, "" if default is None else str(default))
    if not value.isdecimal():
        raise LauncherError(
            f"environment: {variable}={value!r} is no whole number: set it as torchrun does, or unset it"
        )
    return int(value)


def is_at_rendezvous() -> bool:
    """Return True if this process is a site that meets others at a rendezvous."""
    return bool(os.environ.get(_RENDEZVOUS))


_SITES: list[str] = []


def register_sites(reference: str) -> None:
    """Declare the function that trains as a site, as `module:name`; `import netgym` does.

    Args:
        reference: called with a program, its result and listeners.
    """
    _SITES[:] = [reference]


def registered_sites() -> str:
    """Reference of the function that trains as a site.

    Raises:
        InputError: none is registered.
    """
    if not _SITES:
        raise InputError(
            f"environment: {_RENDEZVOUS} is set: sites are a part of netgym: write `import netgym`"
        )
    return _SITES[0]


def allow_many_files() -> None:
    """Raise this process's soft limit of open files, often 1,024, towards the hard one.

    A client that reaches a port of gloo can hold connections to it, and a process at its limit ends.
    """
    if resource is None:
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, _MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):  # macOS allows fewer than its limit
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def processes_of_site() -> int:
    """Number of processes that torchrun has started for this site."""
    return whole_number_of("WORLD_SIZE") if under_torchrun() else 1


class MeetingPlace(NamedTuple):
    """Rendezvous of a site, from its environment.

    Attributes:
        address: host and port, of NETGYM_RENDEZVOUS.
        site: number of this site, of NETGYM_SITE; None: the rendezvous chooses it.
        run: a name for the run, of NETGYM_RUN, where the same rendezvous sees the same run several times.
    """

    address: tuple[str, int]
    site: int | None
    run: str

    @classmethod
    def from_environment(cls) -> MeetingPlace:
        """Address, site and name of the run from their variables.

        Raises:
            InputError: one is missing, or wrong.
        """
        address, site = os.environ.get(_RENDEZVOUS, ""), os.environ.get(_SITE, "")
        if site and not site.isdecimal():
            raise InputError(f"environment: {_SITE}={site!r} is no number of a site: write 0, 1, ...")
        where = parse_address(address, f"environment: {_RENDEZVOUS}")
        return cls(where, int(site) if site else None, os.environ.get(_RUN, ""))

    def check(self, num_processes: int) -> None:
        """Check that a run of `num_processes`, at all sites together, has this site.

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
    """Host and port of "host:port"; `where` begins the error.

    Raises:
        InputError: it is something else.

    >>> parse_address("[::1]:29400", "here")
    ('::1', 29400)
    """
    host, colon, port = text.rpartition(":")
    if not colon or not host or not port.isdecimal() or int(port) > 65535:
        raise InputError(f"{where}: {text!r} is no address: write HOST:PORT, such as 10.0.0.1:29400")
    return host.removeprefix("[").removesuffix("]"), int(port)
