"""Training strategies over simulated and real networks."""
