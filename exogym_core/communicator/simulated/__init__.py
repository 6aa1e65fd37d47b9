"""Ranks on the simulated network."""
