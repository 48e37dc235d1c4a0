"""The simulation of a step from tables of actions. Knows nothing of training: a pipeline's schedule is such a table
too."""

from .engine import simulate
from .task import PROCESSOR, Task
from .timeline import Timeline

__all__ = ["PROCESSOR", "Task", "Timeline", "simulate"]
