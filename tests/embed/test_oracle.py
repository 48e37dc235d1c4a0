"""Random routines, types, matrices, parts and letters: pmm3d compared with the machine's ScaLAPACK in one process."""

import re

import pytest
from callers import ENVIRONMENT, ROOT, Caller

pytestmark = pytest.mark.thorough("random descriptors beside ScaLAPACK")
CASES = 120
"""Calls on each number of ranks, 600 in total; oracle.py has the command for 2,000 in one run."""


@pytest.mark.parametrize("ranks", [1, 2, 4, 6, 8])
def test_600_random_calls(ranks):
    python, oracle = Caller(ENVIRONMENT / "bin" / "python"), ROOT / "tests" / "embed" / "oracle.py"
    done = python(ranks, oracle, CASES, ranks, seconds=900)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(f"^{CASES} cases agree to .* roundings$", done.stdout, re.M), done.stdout
