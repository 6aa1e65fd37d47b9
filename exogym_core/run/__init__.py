"""Training: what a user asks, what every rank runs, and what comes back."""
