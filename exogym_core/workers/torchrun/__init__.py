"""Ranks whose processes torchrun has started."""
