"""Collectives as schedules of messages, and the clock they take on a network."""

from netsim.collectives.abridged import Abridged, Gathering, are_many, is_crowd
from netsim.collectives.choice import Choices, parse_collectives, schedule
from netsim.collectives.schedules.algorithms import (
    ALGORITHMS,
    OPERATIONS,
    algorithm_names,
    default_algorithm,
)
from netsim.collectives.schedules.arrays import run_on_arrays
from netsim.collectives.schedules.schedule import Schedule
from netsim.collectives.start import Collective, start_all_to_all, start_collective
from netsim.collectives.timing import Timing, time_collective

__all__ = [
    "ALGORITHMS",
    "OPERATIONS",
    "Abridged",
    "Choices",
    "Collective",
    "Gathering",
    "Schedule",
    "Timing",
    "algorithm_names",
    "are_many",
    "default_algorithm",
    "is_crowd",
    "parse_collectives",
    "run_on_arrays",
    "schedule",
    "start_all_to_all",
    "start_collective",
    "time_collective",
]
