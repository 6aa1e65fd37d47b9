"""What changes on a network while it runs: faults, traces, drift, the traffic of others."""
