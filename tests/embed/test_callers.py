"""C and Fortran programs that call the product: right results, on any number of ranks, repeatedly. `make
test-embed`."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest
from callers import ENVIRONMENT, LIBRARIES, ROOT, Caller

pytestmark = pytest.mark.thorough("all calls from C and Fortran")
IN_PYTHON = """
import ctypes
import os
import sys
from mpi4py import MPI

library = ctypes.CDLL(sys.argv[1])
code, grid, shape = library.pmm3d_start(), ctypes.c_int(), (ctypes.c_int * 3)()
code += library.pmm3d_grid_f(MPI.COMM_WORLD.py2f(), 1, 1, MPI.COMM_WORLD.size, ctypes.byref(grid))
code += library.pmm3d_grid_shape(grid, shape)
os.write(1, f"code {code} {list(shape)}\\n".encode())
"""


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 6, 7])
@pytest.mark.parametrize("sizes", [(300, 200, 100), (13, 5, 7), (1, 1, 1), (4, 3, 0), (0, 6, 6)])
def test_the_program_in_c_is_right(program, ranks, sizes):
    done = program("apps/embed/product.c")(ranks, *sizes)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.fullmatch(rf"{ranks} ranks as \d x \d x \d: right\n", done.stdout)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 6])
def test_the_program_in_fortran_is_right(program, ranks):
    done = program("embed/pmm3d.f90", "apps/embed/product.f90")(ranks)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.fullmatch(rf"{ranks} ranks as \d x \d x \d: right\n", done.stdout)


@pytest.mark.parametrize("ranks", [1, 4])
def test_uneven_blocks_in_fortran(program, ranks):
    done = program("embed/pmm3d.f90", "tests/embed/blocks.f90")(ranks)
    assert done.returncode == 0 and done.stdout.splitlines()[-1] == "right", done.stdout + done.stderr
    assert ranks == 1 or "is in the blocks of rank 0 and of rank 1: the blocks must not overlap" in done.stdout


def test_what_is_installed_compiles_with_pkg_config_and_runs_in_any_folder(tmp_path):
    prefix = tmp_path / "prefix"
    subprocess.run([ENVIRONMENT / "bin" / "python", ROOT / "embed" / "build.py", "--install", prefix], check=True)
    found = subprocess.run(
        ["pkg-config", "--cflags", "--libs", "pmm3d"],
        text=True,
        capture_output=True,
        check=True,
        env=os.environ | {"PKG_CONFIG_PATH": str(prefix / "lib" / "pkgconfig")},
    )
    subprocess.run(
        [
            "mpicc.openmpi",
            ROOT / "apps" / "embed" / "product.c",
            *found.stdout.split(),
            "-lm",
            "-o",
            tmp_path / "product",
        ],
        cwd=tmp_path,
        check=True,
    )
    done = Caller(tmp_path / "product")(2)
    assert done.returncode == 0 and done.stdout.endswith(": right\n"), done.stdout + done.stderr


def test_the_header_is_cs_and_c_plus_pluss(tmp_path):
    for name, compiler in (("a.c", ["mpicc.openmpi", "-std=c99"]), ("a.cc", ["mpic++.openmpi", "-std=c++11"])):
        (tmp_path / name).write_text("#include <pmm3d.h>\nint main(void) { return pmm3d_start() == PMM3D_OK; }\n")
        strict = ["-Wall", "-Wextra", "-Wstrict-prototypes"][: 3 if name == "a.c" else 2]
        subprocess.run(
            [
                *compiler,
                *strict,
                "-pedantic",
                "-Werror",
                "-DOMPI_SKIP_MPICXX",
                name,
                f"-I{ROOT / 'embed'}",
                f"-L{LIBRARIES}",
                "-lpmm3d",
                f"-Wl,-rpath,{LIBRARIES}",
                "-o",
                "a",
            ],
            cwd=tmp_path,
            check=True,
        )
        assert Caller(tmp_path / "a")(1).returncode == 0  # before MPI_Init


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_thousand_calls_leave_no_memory_behind(program, ranks):
    done = program("benchmarks/embed_calls.c")(ranks, 200)
    assert done.returncode == 0, done.stderr
    for name in ("matmul", "pgemm"):
        found = re.findall(rf"{name} after (\d+) calls: VmData (\d+) KiB, VmRSS (\d+) KiB", done.stdout)
        data, resident = ({calls: int(values[which]) for calls, *values in found} for which in (0, 1))
        assert data["1000"] <= data["200"] + 2048, done.stdout  # malloc and Python may each add an arena of 1 MiB
        assert resident["2000"] <= resident["1000"] + 256, done.stdout
        assert f"{name} from C" in done.stdout and f"{name} from Python" in done.stdout


@pytest.mark.parametrize("kind", "sdcz")
@pytest.mark.parametrize("ranks", [1, 4])
def test_every_type_transpose_and_order_is_exact(program, ranks, kind):
    done = program("tests/embed/forms.c")(ranks, kind)
    assert done.returncode == 0, done.stdout + done.stderr
    told = done.stdout.splitlines()
    assert len(told) == 1 and re.fullmatch(r"(\d+) products, (\d+) moves, 0 wrong", told[0]), done.stdout


def test_what_the_process_had_is_as_it_was(program):
    """MPI's error handlers, signals, the locale."""
    done = program("tests/embed/faults.c")(2, "untouched")
    assert done.returncode == 0 and done.stdout.count("untouched: 1 1 1") == 2, done.stdout + done.stderr


def test_a_python_that_is_there_is_used(tmp_path):
    """Nothing is called in it after its end, which is before that of MPI."""
    (tmp_path / "in_python.py").write_text(IN_PYTHON)
    done = Caller(ENVIRONMENT / "bin" / "python")(2, tmp_path / "in_python.py", LIBRARIES / "libpmm3d.so")
    assert done.returncode == 0 and not done.stderr, done.stdout + done.stderr
    assert done.stdout == "code 0 [1, 1, 2]\n" * 2


def test_an_mpi_of_its_own_in_the_environment_is_left_alone(program, site_packages):
    """The environment of these tests, with the wheel of another Open MPI, and cffi."""
    [cffi] = {path.parent for path in site_packages.glob("_cffi_backend*")}
    done = program("apps/embed/product.c")(2, PMM3D_PYTHON=sys.executable, PYTHONPATH=str(cffi))
    assert done.returncode == 0 and done.stdout.endswith(": right\n"), done.stdout + done.stderr


def test_a_subset_of_the_ranks_calls(program):
    done = program("tests/embed/faults.c")(3, "subset")
    assert done.returncode == 0 and done.stdout.count("lives on: right") == 2, done.stdout + done.stderr
    assert "1 stays out" in done.stdout


def test_mpi_finalize_does_what_the_program_did_not(program):
    done = program("tests/embed/faults.c")(2, "not finalized")
    assert done.returncode == 0 and done.stdout.count("ended") == 2 and not done.stderr, done.stdout + done.stderr
