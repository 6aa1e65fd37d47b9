"""Networks in the formats of others: measurements and descriptions read into topology files, topologies written out."""
