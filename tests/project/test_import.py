"""Cost of the import: with 10,000 ranks, each file that a rank opens is 10,000 requests to the file system."""

import subprocess
import sys
from pathlib import Path

from loops import looped

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

import costs  # noqa: E402


@looped("case, most", (("all public names", 188), ("a first product", 178)))
def test_few_files_are_opened(case, most):
    _, files = costs.of_one_process(costs.CASES[case])
    assert 30 < files <= most


@looped(
    "imports, loaded, absent",
    [
        (
            "pmm3d.nn; from pmm3d.nn import Tape, MLP, mse, optim, exchange, dry",
            "pmm3d.nn.dry",
            ("pmm3d.nn.training", "pydantic", "rich", "matplotlib"),
        ),
        (  # signals of a training count before its long imports
            "mpi4py.MPI, pmm3d.tools.ranks, pmm3d.model.notes, pmm3d.nn.training.job",
            "pmm3d.nn.training.signals",
            ("numpy", "pmm3d.comm", "pmm3d.nn.training.loop"),
        ),
        ("pmm3d.io.lock, pmm3d.io", "pmm3d.io.lock", ("h5py",)),
    ],
)
def test_an_import_does_not_load_what_it_does_not_need(imports, loaded, absent):
    program = f"import sys, {imports}; print(*sys.modules)"
    modules = subprocess.check_output([sys.executable, "-c", program], text=True).split()
    assert loaded in modules and not [
        name for name in modules if f"{name}.".startswith(tuple(f"{no}." for no in absent))
    ]


def test_modules_that_other_threads_import_stay():
    """During the load of the BLAS, scipy is not replaced, and no other entry is removed."""
    program = """
import sys, threading
from importlib.machinery import ExtensionFileLoader
from pmm3d.arrays import blas_library as blas
load, found = ExtensionFileLoader.exec_module, []

def slowly(loader, module):
    load(loader, module)
    if module.__name__ == "cython_blas":
        other = threading.Thread(target=lambda: exec("import scipy.sparse; found.append(scipy.sparse)", globals()))
        other.start(), other.join()

ExtensionFileLoader.exec_module = slowly
blas.scipy_blas()
import scipy.sparse
print(found[0] is scipy.sparse is sys.modules["scipy.sparse"], "scipy.linalg.cython_blas" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout == "True False\n", done.stderr + done.stdout


@looped("before", ["import scipy.linalg", ""])
def test_the_blas_that_is_loaded_alone_is_scipys(before):
    """Before or after scipy.linalg as a whole: the same routines, and both work."""
    program = f"""
{before}
from pmm3d.arrays import blas_library as blas
import ctypes, numpy as np
address = lambda: ctypes.cast(blas.scipy_blas().routines["dgemm"], ctypes.c_void_p).value
pointer = address()
import scipy.linalg.blas, scipy.linalg.cython_blas
a = np.asfortranarray(np.arange(6.0).reshape(2, 3))
assert np.array_equal(scipy.linalg.blas.dgemm(1.0, a, a.T), a @ a.T)
blas._cython_module.cache_clear()
assert pointer == address()
print("same")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout == "same\n", done.stderr
