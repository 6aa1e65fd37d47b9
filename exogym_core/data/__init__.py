"""Samples of each rank, and batches of them."""
