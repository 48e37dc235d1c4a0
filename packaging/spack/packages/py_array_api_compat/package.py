# Copyright Spack Project Developers. See COPYRIGHT file for details.
#
# SPDX-License-Identifier: (Apache-2.0 OR MIT)

from spack_repo.builtin.build_systems.python import PythonPackage

from spack.package import *


class PyArrayApiCompat(PythonPackage):
    """A wrapper around NumPy and other array libraries to make them compatible with the Array
    API standard."""

    homepage = "https://data-apis.org/array-api-compat/"
    pypi = "array-api-compat/array_api_compat-1.13.0.tar.gz"

    license("MIT")

    version("1.13.0", sha256="8b83a56aa8b9477472fee37f7731968dd213e20c198a05ac49caeff9b03f48a6")

    depends_on("python@3.10:", type=("build", "run"))
    depends_on("py-setuptools", type="build")
    depends_on("py-setuptools-scm", type="build")
