"""Topologies that ship with NetGym, found by name wherever a path is accepted."""
