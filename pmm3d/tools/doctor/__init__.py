"""`pmm3d doctor`: what is right and wrong with the place that pmm3d runs in, each with a verdict and the remedy.

A check gathers facts on every rank and judges those of all ranks on rank 0; judging is plain code without MPI.

finding.py    what a check says: verdicts, problems, remedies, figures
checks.py     the list of checks, and how they are run one by one though any of them may fail
session.py    what checks stand on: ranks, hosts, waiting with a time limit, telling rank 0
software.py   Python and packages, MPI, launcher, parallel HDF5
nodes.py      hosts and ranks on them, cores, BLAS, memory
devices.py    GPUs, and whether MPI takes their pointers
network.py    latency and bandwidth of each axis, progress while computing, clocks
files.py      the folder of the run: file system, how soon others see a file, locks
locks.py      asking for a lock
printing.py   the diagnosis as people read it
guard.py      speaks when MPI_Init ends the process
command.py    the command line
"""
