"""Results of runs: rows, the run folder, loggers, reports."""
