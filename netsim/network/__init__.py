"""The live network: links shared fairly, TCP's windows, transfers, collectives, and the clock above them."""

from netsim.network.build import load_sources, runs_compiled

if not runs_compiled():
    load_sources()
