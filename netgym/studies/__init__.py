"""Studies: one experiment at many points of its settings, in one folder."""
