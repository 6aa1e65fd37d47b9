"""Which samples each rank sees, and how they become batches."""
