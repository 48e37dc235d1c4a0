"""The simulation of a step from tables of actions. Knows nothing of training: a pipeline's schedule is such a table
too."""

from .engine import Task, Timeline, simulate

__all__ = ["Task", "Timeline", "simulate"]
