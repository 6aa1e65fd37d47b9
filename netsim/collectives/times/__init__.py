"""How a collective's times are found on a network."""
