"""`make install`: libraries that need no clone, for pkg-config and CMake."""

import os
import shutil
import subprocess

import pytest
from callers import FOREIGN, ROOT, Caller

CMAKE_PROJECT = """
cmake_minimum_required(VERSION 3.13)
project(users C Fortran)
set(CMAKE_Fortran_MODULE_DIRECTORY ${CMAKE_BINARY_DIR}/modules)
find_package(MPI REQUIRED)
find_package(pmm3d {version} REQUIRED)
find_package(pmm3d 9.0 QUIET)
if(pmm3d_FOUND)
  message(FATAL_ERROR "a version that is not there")
endif()
find_package(pmm3d REQUIRED)
add_executable(in_c {apps}/product.c)
target_link_libraries(in_c pmm3d::pmm3d MPI::MPI_C m)
add_executable(in_fortran {apps}/product.f90)
target_link_libraries(in_fortran pmm3d::fortran MPI::MPI_Fortran)
add_executable(unchanged {tests}/factors.f90)
target_link_libraries(unchanged -Wl,--as-needed pmm3d::scalapack scalapack-openmpi MPI::MPI_Fortran)
install(TARGETS in_c in_fortran unchanged)
"""

pytestmark = pytest.mark.thorough("an environment of its own")


def flags(prefix, *names):
    environ = os.environ | {"PKG_CONFIG_PATH": str(prefix / "lib" / "pkgconfig")}
    command = ["pkg-config", "--cflags", "--libs", *names]
    return subprocess.run(command, env=environ, text=True, capture_output=True, check=True).stdout.split()


def test_what_is_installed_over_an_older_version_runs_without_the_clone(tmp_path):
    """Compiled with pkg-config, in any folder. The linker keeps a drop-in of which the program needs no symbol."""
    clone, prefix = tmp_path / "clone", tmp_path / "prefix"
    for name in subprocess.check_output(["git", "ls-files", "-z"], cwd=ROOT, text=True).rstrip("\0").split("\0"):
        if not name.startswith(("docs/", "tests/")):
            (clone / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, clone / name)
    older = prefix / "lib" / "libpmm3d.so.0.0.9", prefix / "lib" / "pmm3d" / "bin" / "pip"
    interrupted = prefix / "lib" / "pmm3d.old" / "bin" / "pip"  # left by an install that was interrupted
    for path in (*older, interrupted):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch(0o755)
    command = ["make", "install", f"PREFIX={prefix}", "MPICC=mpicc.openmpi"]
    environ = {name: value for name, value in os.environ.items() if not name.startswith((*FOREIGN, "MAKE", "MFLAGS"))}
    environ["PYTHONPATH"] = os.pathsep.join(map(str, ROOT.glob(".venv-embed/lib/python*/site-packages")))
    done = subprocess.run(command, cwd=clone, env=environ, text=True, capture_output=True)
    assert done.returncode == 0 and not older[0].exists(), done.stdout + done.stderr
    assert not interrupted.parents[1].exists()
    command[-1] = "MPICC=false"
    assert subprocess.run(command, cwd=clone, env=environ, capture_output=True).returncode != 0  # nothing is replaced
    shutil.rmtree(clone)

    program = tmp_path / "product"
    linked = [*flags(prefix, "pmm3d", "pmm3d_scalapack"), "-lscalapack-openmpi", "-lm"]
    source = ROOT / "apps" / "embed" / "product.c"
    subprocess.run(["mpicc.openmpi", "-Wl,--as-needed", source, *linked, "-o", program], cwd=tmp_path, check=True)
    needed = subprocess.check_output(["readelf", "-d", program], text=True)
    version = (ROOT / "CITATION.cff").read_text().partition("\nversion: ")[2].split()[0]
    for name in ("pmm3d", "pmm3d_scalapack"):
        assert f"[lib{name}.so.{version.partition('.')[0]}" in needed, needed
        assert (prefix / "lib" / f"lib{name}.so").resolve().name == f"lib{name}.so.{version}"
    assert Caller(program)(2).stdout.endswith(": right\n")
    check_cmake(tmp_path, prefix, version)


def check_cmake(tmp_path, prefix, version):
    """Programs of a CMake project run, also after they were installed: the path of the libraries stays in them."""
    folder = tmp_path / "users"
    folder.mkdir()
    text = CMAKE_PROJECT.replace("{version}", version).replace("{apps}", str(ROOT / "apps" / "embed"))
    (folder / "CMakeLists.txt").write_text(text.replace("{tests}", str(ROOT / "tests" / "embed")))
    for command in (
        ["-S", folder, "-B", folder / "build", f"-DCMAKE_PREFIX_PATH={prefix}", f"-DCMAKE_INSTALL_PREFIX={folder}/to"],
        ["--build", folder / "build"],
        ["--install", folder / "build"],
    ):
        compilers = {"CC": "mpicc.openmpi", "FC": "mpifort.openmpi"}
        done = subprocess.run(["cmake", *command], env=os.environ | compilers, text=True, capture_output=True)
        assert done.returncode == 0, done.stdout + done.stderr
    for name in ("in_c", "in_fortran"):
        assert Caller(folder / "to" / "bin" / name)(2).stdout.endswith(": right\n")
    log = tmp_path / "log"
    Caller(folder / "to" / "bin" / "unchanged").written(2, PMM3D_EMBED_LOG=str(log))
    assert log.read_text().count("is loaded") == 2
