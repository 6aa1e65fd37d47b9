"""Plans: what a strategy costs on a network, from its own code on tensors without values."""
