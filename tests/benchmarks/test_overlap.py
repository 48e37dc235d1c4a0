"""apps/overlap_choice.py: what it counts, and that it runs on the ranks of a job."""

from pathlib import Path

import pytest

APPS = Path(__file__).parents[2] / "apps"


@pytest.fixture
def bench(monkeypatch):
    monkeypatch.syspath_prepend(str(APPS))
    import overlap_choice

    return overlap_choice


def test_a_choice_is_held_against_the_fastest(bench):
    found = {"none": {"seconds": 1.0, "waited": 0.4}, "panels": {"seconds": 0.5, "waited": 0.1}}
    row, figures = bench.row_of((2, 3, 4), "C = A B", found, "none")
    assert row == ["2, 3, 4", "C = A B", "1000.0", "500.0", "", "40%", "none", "100.0%"]
    assert figures == {"near": False, "share": 0.4, "gain": 2.0}
    assert bench.row_of((2, 3, 4), "C = A B", found, "panels")[1]["near"]


def test_every_product_has_a_line(bench):
    from measuring import on_ranks

    printed = on_ranks(2, [bench.__file__, "--shapes", "96x130x80,70x200x65", "--rounds", "1"])
    lines = [line for line in printed.splitlines() if line.startswith("| ")]
    assert len(lines) == 1 + 2 * 3
    assert [line.split(" | ")[1] for line in lines[1:4]] == ["C = A B", "dA = dC B^T", "dB = A^T dC"]
    assert all("none" in line for line in lines[1:]), "one node has no choice"
    assert "choice the fastest or within 5%: " in printed and " of 6" in printed
