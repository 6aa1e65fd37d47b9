"""Measuring a real network from its hosts: latency and throughput pair by pair, each host's own limit, a topology."""
