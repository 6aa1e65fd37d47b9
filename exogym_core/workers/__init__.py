"""Runners of ranks: threads of this process, or processes."""
