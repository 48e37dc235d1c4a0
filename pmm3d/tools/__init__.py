"""What people run: the command, the benchmark, doctor, the pages, the launcher."""
