"""Stages: a worker is a chain of ranks that hold a part of the model each; activations and gradients are messages.

A strategy sees the ranks of its own stage as its workers and knows nothing of the others.
"""
