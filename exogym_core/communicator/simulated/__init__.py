"""The simulated transport."""
