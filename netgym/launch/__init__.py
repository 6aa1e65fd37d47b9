"""The torch.distributed backend `netsim`: any program's collectives over a simulated network, with its clock.

Importing this module registers it; `netgym launch` does so for the program that it runs. The process group carries
real data, combined in rank order as everywhere in NetGym, and charges every call to the chosen topology.
"""

from netgym.launch.compute import ComputeClock
from netgym.launch.group import NetsimGroup
from netgym.launch.registration import register
from netgym.launch.session import RankSession, advance, attach, current_session, now

__all__ = [
    "ComputeClock",
    "NetsimGroup",
    "RankSession",
    "advance",
    "attach",
    "current_session",
    "now",
    "register",
]

register()
