"""Ranks in virtual time: streams of requests, the kernel that serves them, and meetings."""
