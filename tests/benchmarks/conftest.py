"""The programs of benchmarks/ import each other as files of one folder."""

import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))


@pytest.fixture
def benchmarks():
    """The folder benchmarks/, in the import path."""
    return BENCHMARKS
