"""`python -m pmm3d.launcher`: ranks with the mpiexec that belongs to this Python; see `pmm3d.tools.launcher`."""

from .tools.launcher import command, environment, installed_wheel, run, run_as_program

__all__ = ["command", "environment", "installed_wheel", "run", "run_as_program"]

if __name__ == "__main__":
    run_as_program()
