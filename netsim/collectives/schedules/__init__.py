"""Collectives as data: one family of algorithms a file."""
