"""A whole run on disk, and on from there."""
