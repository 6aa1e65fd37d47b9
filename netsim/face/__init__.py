"""What the library does in one call each: the time of a collective, and of a list of transfers."""
