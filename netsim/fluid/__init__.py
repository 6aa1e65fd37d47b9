"""Transfers in flight as a fluid: rates, TCP, overflow, and networks that can be copied."""
