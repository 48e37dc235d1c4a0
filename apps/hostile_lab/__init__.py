"""What `apps/hostile.py` does to the commands: inputs that make no sense, and faults around a run."""
