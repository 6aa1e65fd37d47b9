"""The real transport."""
