"""Ranks as actors on a Ray cluster's nodes."""
