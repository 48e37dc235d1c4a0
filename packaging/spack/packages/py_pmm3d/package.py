# Copyright Spack Project Developers. See COPYRIGHT file for details.
#
# SPDX-License-Identifier: (Apache-2.0 OR MIT)

from spack_repo.builtin.build_systems.cuda import CudaPackage
from spack_repo.builtin.build_systems.python import PythonPackage

from spack.package import *


class PyPmm3d(PythonPackage, CudaPackage):
    """Multiply distributed dense matrices by the 3D algorithm, and train networks with
    tensor parallelism, on MPI."""

    homepage = "https://pypi.org/project/pmm3d/"
    pypi = "pmm3d/pmm3d-0.1.0.tar.gz"

    license("Apache-2.0")

    version("0.1.0", sha256="0000000000000000000000000000000000000000000000000000000000000000")

    variant("io", default=True, description="HDF5 data sets, checkpoints, safetensors files")
    variant("cli", default=True, description="The commands of pmm3d")
    variant("train", default=True, description="Training runs with a configuration file")
    variant("report", default=True, description="Pages and pictures of runs")
    variant("text", default=False, description="Tokenizers for text")
    variant("monitor", default=False, description="Metrics for Prometheus")
    variant("torch", default=False, description="Torch arrays, and torch modules on the grid")

    depends_on("python@3.10:", type=("build", "run"))
    depends_on("py-setuptools@77:", type="build")

    depends_on("py-numpy@1.26:", type=("build", "run"))
    depends_on("py-scipy@1.11.1:", type=("build", "run"))
    depends_on("py-mpi4py@4.0.3:", type=("build", "run"))
    depends_on("py-tomli@2:", when="^python@:3.10", type=("build", "run"))

    with when("+io"):
        depends_on("py-h5py@3.10:", type="run")
        depends_on("py-safetensors@0.4:", type="run")

    with when("+cli"):
        depends_on("py-typer@0.19.2:", type="run")
        depends_on("py-rich@13:", type="run")
        depends_on("py-threadpoolctl@3.5:", type="run")

    with when("+train"):
        depends_on("py-array-api-compat@1.9:", type="run")
        depends_on("py-pydantic@2.11.7:", type="run")
        depends_on("py-tomlkit@0.13:", type="run")

    with when("+report"):
        depends_on("py-jinja2@3.1:", type="run")
        depends_on("py-matplotlib@3.8:", type="run")
        depends_on("py-pydantic@2.11.7:", type="run")
        depends_on("py-tomlkit@0.13:", type="run")

    with when("+text"):
        depends_on("py-tokenizers@0.20:", type="run")

    with when("+monitor"):
        depends_on("py-prometheus-client@0.20:", type="run")

    with when("+torch"):
        depends_on("py-torch@2.10:", type="run")
        depends_on("py-array-api-compat@1.9:", type="run")

    with when("+cuda"):
        depends_on("py-cupy@14:", type="run")

    for arch in CudaPackage.cuda_arch_values:
        depends_on(f"py-cupy+cuda cuda_arch={arch}", when=f"+cuda cuda_arch={arch}", type="run")
        depends_on(
            f"py-torch+cuda cuda_arch={arch}", when=f"+torch+cuda cuda_arch={arch}", type="run"
        )

    requires("+io+cli", when="+train", msg="pmm3d train reads HDF5 files and is a command")
    conflicts("cuda_arch=none", when="+cuda", msg="name the GPU: cuda_arch=90")
