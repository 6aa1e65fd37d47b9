"""The benchmark: fixed tasks, networks and seeds; virtual seconds and bytes to a target loss."""

__all__ = ["UNCHARGED"]

UNCHARGED = "coding not charged"
"""The error of a score that the benchmark refuses, since its times lack those of encoding."""
