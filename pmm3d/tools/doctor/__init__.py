"""`pmm3d doctor`: what is right and wrong with what pmm3d runs on, each with a verdict and the remedy.

A check gathers facts on every rank (with the help of session.py) and judges those of all ranks on rank 0, which fills
in a Finding (finding.py); judging is plain code without MPI. The checks are in software.py, nodes.py, devices.py,
network.py and files.py; checks.py lists them, and runs them one by one though any of them may fail. command.py is the
command line, printing.py the table; guard.py speaks when MPI_Init ends the process.
"""
