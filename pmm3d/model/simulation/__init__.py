"""The simulation of a step from the table of actions of one rank. It is independent of training."""

from .timeline import PROCESSOR, Task, Timeline, simulate

__all__ = ["PROCESSOR", "Task", "Timeline", "simulate"]
