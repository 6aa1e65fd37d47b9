"""Ranks in virtual time: streams of requests, the kernel that plays them, and meetings."""
