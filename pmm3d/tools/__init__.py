"""The command line: benchmark, doctor, planning, tuning, pages of runs, launcher."""
