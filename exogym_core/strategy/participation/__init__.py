"""Participants of a strategy: workers that train, servers that combine, sites, and ranks that are absent."""
