"""Random matrices, parts, operations and types: pmm3d compared with the machine's ScaLAPACK in the same processes."""

import re

import pytest
from callers import ENVIRONMENT, ROOT, Caller

pytestmark = pytest.mark.thorough("random descriptors beside ScaLAPACK")
CASES = 60
"""Products and redistributions on each number of ranks: three and two random descriptors each, 300 in total."""


@pytest.mark.parametrize("ranks", [1, 2, 4, 6, 8])
def test_300_random_descriptors(ranks):
    python, oracle = Caller(ENVIRONMENT / "bin" / "python"), ROOT / "tests" / "embed" / "oracle.py"
    done = python(ranks, oracle, CASES, ranks, seconds=600)
    assert done.returncode == 0, done.stdout + done.stderr
    agreed = f"^{CASES} products agree to .* units of rounding, {CASES} redistributions bit for bit$"
    assert re.search(agreed, done.stdout, re.M), done.stdout
