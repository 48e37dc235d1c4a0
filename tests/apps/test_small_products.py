"""apps/small_products.py: its own side of the comparison, and what it says where the peer is not installed."""

import sys
from pathlib import Path

import pytest

APPS = Path(__file__).parents[2] / "apps"


@pytest.fixture
def small_products(monkeypatch):
    monkeypatch.syspath_prepend(str(APPS))
    import small_products

    return small_products


def test_a_plan_and_matmul_are_timed_on_the_ranks_of_a_job(small_products):
    from measuring import on_ranks

    printed = on_ranks(2, [small_products.__file__, "--here", "48:float32"]).split()
    assert len(printed) == 3 and min(map(float, printed[1:])) > 0


def test_without_scalapack_it_says_what_to_install(small_products, monkeypatch, tmp_path):
    monkeypatch.setattr(small_products.shutil, "which", lambda name: None)
    monkeypatch.setattr(sys, "argv", ["small_products.py"])
    with pytest.raises(SystemExit, match="apt-get install libscalapack-openmpi-dev"):
        small_products.main()
