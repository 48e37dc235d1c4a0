"""The benchmark of memory that ranks share: a product, and a training step, beside the same with messages."""

import re
import sys
from pathlib import Path
from subprocess import run

import pytest

APP = Path(__file__).parents[2] / "apps/shared_operands.py"


@pytest.mark.parametrize("words, what, title", [
    (["--size", "96", "64", "80", "--grid", "1x1x2"], "operands", "96x64x80 float32 on 1x1x2, 1 rounds"),
    (["--network", "2", "128", "32"], "weights", "2 layers of 128, batch 32, float32 on 1x1x2, 1 rounds")])
def test_nothing_is_received_where_memory_is_shared(words, what, title):
    printed = run([sys.executable, "-m", "pmm3d.launcher", "-n", "2", str(APP), "--rounds", "1", *words],
                  capture_output=True, text=True, timeout=100, check=True).stdout
    rows = dict(re.findall(r"^\| (\w+) \| [\d.]+ \| ([\d.]+) \|", printed, re.M))
    assert printed.startswith(title) and f"| {what} | ms |" in printed
    assert float(rows["shared"]) == 0 and set(rows) == {"messages", "shared"}
    assert re.search(r"time [\d.]+, memory -?[\d.]+$", printed.strip())
