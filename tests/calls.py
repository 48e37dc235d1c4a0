"""Number of calls of Python functions: a measure of overhead that depends neither on the machine nor on its load."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

from timing import python_calls


def calls_of(function, times=1):
    """Mean calls of Python functions in function(), by this thread, without polling."""
    return python_calls(function, times).work
