"""pmm3d.arrays.blas_library: which BLAS PMM3D_BLAS names, what is refused, and that products are its own."""

import ctypes
import ctypes.util
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from loops import looped

from pmm3d import Pmm3dError
from pmm3d.arrays import blas_library
from pmm3d.arrays.blas_library import ILP64_LARGEST, KNOWN, LP64_LARGEST, named_blas

[NUMPYS] = (Path(np.__file__).parents[1] / "numpy.libs").glob("libscipy_openblas64_-*.so")
"""An OpenBLAS of 64-bit integers, whose routines are called scipy_dgemm_64_ and so on."""
PRODUCT = """
    import numpy as np
    from mpi4py import MPI
    from pmm3d import DistMatrix, Grid, Layout, matmul
    from pmm3d.arrays.blas_library import chosen
    from pmm3d.model import machine
    from pmm3d.arrays import library_named

    kind = "torch" if "torch" in chosen_library else "numpy"
    with Grid(MPI.COMM_WORLD, (1, 1, 2)) as grid:
        a = DistMatrix.random(grid, (60, 50), seed=1, library=kind)
        b = DistMatrix.random(grid, (50, 40), seed=2, layout=Layout.B, library=kind)
        whole = [np.asarray(part) for part in (a.gather(), b.gather(), matmul(a, b).gather())]
        if grid.rank == 0:
            print(np.allclose(whole[0] @ whole[1], whole[2]), chosen().file, machine.blas_of(a.library).name)
"""


@pytest.fixture(autouse=True)
def fresh():
    named_blas.cache_clear()
    yield
    named_blas.cache_clear()


def test_a_library_of_64_bit_integers_is_taken():
    found = named_blas(str(NUMPYS))
    assert found.file == str(NUMPYS.resolve()) and found.largest == ILP64_LARGEST > LP64_LARGEST


def test_integers_are_wide_enough_for_either_kind():
    """One that has the usual names and 64-bit integers all the same reads all 8 bytes."""
    value = ctypes.pointer(blas_library.integer(5)._obj)
    assert [ctypes.cast(value, ctypes.POINTER(kind))[0] for kind in (ctypes.c_int64, ctypes.c_int32)] == [5, 5]


@looped("name", KNOWN)
def test_the_place_that_a_module_names_comes_first(tmp_path, monkeypatch, name):
    known = KNOWN[name]
    file = tmp_path / name / "lib" / known.files[0]
    file.parent.mkdir(parents=True)
    file.symlink_to(NUMPYS)
    monkeypatch.setenv(known.places[-1], str(tmp_path / name))
    assert named_blas(name).file == str(NUMPYS.resolve())


@looped("asked, said", [
    ("nonesuch", r"no such BLAS can be loaded here \(.*\)\. It is one of scipy, auto, mkl, blis"),
    ("/no/such/libblas.so", "no such BLAS can be loaded here"),
    (__file__, "no such BLAS can be loaded here .*invalid ELF header"),
    (ctypes.util.find_library("m"), "has no sgemm, dgemm, cgemm, zgemm, by any of the usual names"),
])
def test_what_is_no_blas_is_refused(monkeypatch, asked, said):
    if asked.startswith("libm"):
        monkeypatch.setitem(KNOWN, asked, blas_library.Known((asked,)))
    with pytest.raises(Pmm3dError, match=f"^PMM3D_BLAS={asked}: .*{said}"):
        named_blas(asked)


@pytest.mark.parametrize("lacking", ["cgemm", "sgemm"])
def test_one_that_lacks_a_routine_is_refused(monkeypatch, lacking):
    whole = blas_library._routine
    monkeypatch.setattr(blas_library, "_routine", lambda handle, name: None if name == lacking else whole(handle, name))
    with pytest.raises(Pmm3dError, match=f"has no {lacking}, by any"):
        named_blas(str(NUMPYS))


@pytest.mark.parametrize("wrong", ["sgemm", "zgemm"])
def test_one_that_is_wrong_is_refused(monkeypatch, wrong):
    """It does not conjugate, say, or leaves C as it was."""
    whole = blas_library._routine
    nothing = ctypes.CFUNCTYPE(None, *blas_library.ARGUMENTS)(lambda *arguments: None)
    monkeypatch.setattr(blas_library, "_routine",
                        lambda handle, name: (nothing, False) if name == wrong else whole(handle, name))
    with pytest.raises(Pmm3dError, match=rf"{wrong} of \S+ gives wrong results \(NN, 37 x 29 x 131\); it is not used"):
        named_blas(str(NUMPYS))


@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_products_are_those_of_the_blas_that_is_named(job, kind):
    done = job(2, f"    chosen_library = {kind!r}" + PRODUCT, env={"PMM3D_BLAS": str(NUMPYS)})
    assert done.returncode == 0 and done.stdout == f"True {NUMPYS.resolve()} openblas\n", done.stdout + done.stderr


def test_ranks_that_name_different_ones_are_told(job):
    program = f"""
        import os
        from mpi4py import MPI
        if MPI.COMM_WORLD.rank == 1:
            os.environ["PMM3D_BLAS"] = {str(NUMPYS)!r}
        from pmm3d import Grid
        with Grid(MPI.COMM_WORLD):
            pass
    """
    done = job(3, program)
    assert done.returncode != 0 and "scipy" in done.stderr and str(NUMPYS) in done.stderr, done.stderr


def test_one_that_a_rank_cannot_load_is_refused_by_all_and_said_once(job):
    program = "from mpi4py import MPI\nfrom pmm3d import Grid\nGrid(MPI.COMM_WORLD)\n"
    done = job(3, program, env={"PMM3D_BLAS": "nonesuch"})
    assert done.returncode != 0 and done.stderr.count("PMM3D_BLAS=nonesuch: no such BLAS") == 1, done.stderr


@pytest.mark.parametrize("own", [None, "20"])
def test_the_environment_is_left_as_it_was(monkeypatch, own):
    """OpenBLAS reads how long its threads spin when it is loaded."""
    name, seen = blas_library.SHORT_SPIN[0], []
    monkeypatch.delenv(name, raising=False)
    monkeypatch.delenv("PMM3D_BLAS", raising=False)
    if own is not None:
        monkeypatch.setenv(name, own)
    monkeypatch.setattr(blas_library, "scipy_blas", lambda: seen.append(os.environ[name]))
    blas_library.chosen.__wrapped__()
    assert seen == [own or "16"] and os.environ.get(name) == own


def test_the_address_space_is_looked_at_here_too():
    code = """
import resource
import numpy as np
from pmm3d.arrays import blas_library
limit = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize() + 2**26
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
try:
    blas_library.chosen()
except MemoryError as error:
    print(error)
"""
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OPENBLAS_NUM_THREADS": "1",
                            "PMM3D_BLAS": str(NUMPYS)}
    done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True)
    assert "the BLAS needs 160 MiB of address space" in done.stdout, done
