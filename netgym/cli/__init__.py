"""`netgym`: experiments as files, and the command line."""
