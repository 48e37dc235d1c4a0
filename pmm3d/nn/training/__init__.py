"""Training runs: the loop, its configuration, record and log."""
