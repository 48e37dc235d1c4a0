"""Two catalogues of faults: faults injected into running jobs, and hostile inputs to the commands."""
