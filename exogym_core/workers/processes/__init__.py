"""Ranks in child processes of this one: blocks by turns, tensors in shared memory, a private connection each."""
