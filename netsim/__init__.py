"""Networks, collectives and ranks in virtual time; knows nothing of tensors."""
