"""Tells a rendezvous of a run that was finished before, so that nobody goes on with it alone to another model."""

from __future__ import annotations

import os
import socket

from exogym_core.meeting_place import SERVICE, MeetingPlace
from exogym_core.names import visible
from netsim.files.secret import shared_secret
from netsim.files.signed import PeerError, connect

__all__ = ["tell_finished"]

_SECONDS = 5.0


def tell_finished(run: str) -> str:
    """Tell the rendezvous of NETGYM_RENDEZVOUS that this site's folder holds the finished `run`.

    Returns:
        Why nobody could be told; "" when they were.

    Raises:
        InputError: a variable is wrong, or there is no secret.
    """
    place = MeetingPlace.from_environment()
    where = f"rendezvous {visible(place.address[0])}:{place.address[1]}"
    about = {
        "run": " ".join(filter(None, [place.run, run])),
        "site": place.site,
        "where": f"{socket.gethostname()}, process {os.getpid()}",
    }
    try:
        channel = connect(place.address, shared_secret(), SERVICE, where, _SECONDS)
        try:
            channel.send(finished=True, **about)
            channel.receive(_SECONDS)
        finally:
            channel.close()
    except PeerError as error:
        return visible(error, 200)
    return ""
