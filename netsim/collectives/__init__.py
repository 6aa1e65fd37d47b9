"""Collectives as schedules of messages, and the clock they take on a network."""
