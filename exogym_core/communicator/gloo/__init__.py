"""Ranks over real sockets, by gloo."""
