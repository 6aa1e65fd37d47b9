"""Ranks of the real transport on this machine, and a pair of them that times it."""
