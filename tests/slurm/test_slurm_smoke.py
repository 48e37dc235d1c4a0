"""A script of jobs/ under a real Slurm, in the environment of these tests. For the others see test_slurm.py."""

import sys

import pytest


@pytest.mark.nightly
def test_a_product_is_verified(verified_product):
    verified_product(sys.prefix)
