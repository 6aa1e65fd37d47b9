"""Collectives as schedules of messages, and the clock they take on a network."""

from netsim.collectives.schedules.algorithms import (
    ALGORITHMS,
    OPERATIONS,
    algorithm_names,
    default_algorithm,
)
from netsim.collectives.schedules.arrays import run_on_arrays
from netsim.collectives.schedules.schedule import Schedule
from netsim.collectives.times.abridged import Abridged, Gathering
from netsim.collectives.times.choose import Choices, parse_collectives, schedule
from netsim.collectives.times.collective import Collective, start_collective
from netsim.collectives.times.crowd import are_many, is_crowd
from netsim.collectives.times.uneven import start_all_to_all

__all__ = [
    "ALGORITHMS",
    "OPERATIONS",
    "Abridged",
    "Choices",
    "Collective",
    "Gathering",
    "Schedule",
    "algorithm_names",
    "are_many",
    "default_algorithm",
    "is_crowd",
    "parse_collectives",
    "run_on_arrays",
    "schedule",
    "start_all_to_all",
    "start_collective",
]
