"""Experiments: files and their resolved form, comparisons, and code of the user's own."""
