"""The command line `netsim`, its tables and pictures."""
