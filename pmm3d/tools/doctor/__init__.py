"""`pmm3d doctor`: a verdict and a remedy for each part of the system that pmm3d runs on.

A check (checks.py) gathers facts on every rank. On rank 0, a judge fills in a Finding (finding.py) from the facts of
all ranks. Judges need no MPI. The checks are in software.py, nodes.py, devices.py, network.py and files.py. session.py
contains waits with a time limit; command.py contains the command and its table.
"""
