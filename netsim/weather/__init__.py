"""Changes of a network while it runs: faults, traces, drift, background traffic."""
