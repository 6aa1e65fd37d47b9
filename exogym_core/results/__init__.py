"""What a run leaves: rows, the run folder, loggers, the report."""
