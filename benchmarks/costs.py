"""Cost of Python: CPU time of a small product outside MPI and the BLAS, and the files that an import opens.

    python -m pmm3d.launcher -n 8 benchmarks/costs.py product
    python benchmarks/costs.py imports

product  C = A B of 64 x 64 x 64. The CPU time of the whole product is measured without a profiler. The waits, which
         poll MPI while other ranks have the core, and the GEMM are timed in further runs. The rest, with the posting of
         messages, is the time of pmm3d.
imports  seconds and opened files (modules, extensions, listed folders) after numpy and mpi4py: for all public names,
         and for a first product on one rank. Also without bytecode, as in a new or read-only installation. Figures are
         medians of several processes. A parallel file system must provide these files to every rank.
"""

import gc
import os
import sys
import tempfile
import time
import timeit
from statistics import median
from unittest.mock import patch

from records import Rows, parser, report
from timing import output_of

SIZE, REPEAT = 64, 200
LAUNCHERS = ("OMPI_", "PMI", "PRTE_", "SLURM_")
COUNTED = """
import sys, time
import numpy, mpi4py.MPI
opened = set()
def hook(event, arguments):
    if event in ("open", "os.listdir", "os.scandir"):
        opened.add(str(arguments[0]))
    elif event == "import" and arguments[1]:
        opened.add(str(arguments[1]))
sys.addaudithook(hook)
before = time.perf_counter()
{body}
print(time.perf_counter() - before, len(opened), sep=",")
"""
CASES = {
    "all public names": "import pmm3d\nfor name in pmm3d.__all__: getattr(pmm3d, name)",
    "a first product": """
import pmm3d
with pmm3d.Grid() as grid:
    a = pmm3d.DistMatrix.random(grid, (64, 64), seed=1)
    a @ a.redistribute(pmm3d.Layout.B)""",
}


def cpu_inside(owner, name: str, work, repeat: int) -> float:
    """CPU seconds per product in the function owner.name, which is replaced only for these runs."""
    function, spent = getattr(owner, name), [0.0]

    def timed(*arguments):
        begun = time.thread_time()
        answer = function(*arguments)
        spent[0] += time.thread_time() - begun
        return answer

    with patch.object(owner, name, timed):
        work()
    return spent[0] / repeat


def product(repeat: int) -> tuple[str, Rows]:
    from mpi4py import MPI

    from pmm3d import DistMatrix, Grid, Layout, matmul
    from pmm3d.arrays import blas
    from pmm3d.comm.engine import Engine

    comm = MPI.COMM_WORLD
    with Grid(comm, "auto", product=(SIZE,) * 3) as grid:
        a = DistMatrix.random(grid, (SIZE, SIZE), seed=1, layout=Layout.A)
        b = DistMatrix.random(grid, (SIZE, SIZE), seed=2, layout=Layout.B)
        c = a @ b
        setup = lambda: (gc.enable(), comm.Barrier())  # garbage is collected as in a program
        all_products = lambda: timeit.repeat(lambda: matmul(a, b, out=c), setup, time.thread_time, repeat, number=1)
        whole = median(all_products())
        waits, gemm = (cpu_inside(*function, all_products, repeat) for function in ((Engine, "wait"), (blas, "gemm")))
        everyone = comm.allgather((whole, waits, gemm, whole - waits - gemm))
        return f"{SIZE} cubed on {comm.size} ranks, grid {grid.shape}: CPU ms of one product, worst rank", [
            ["all", "waiting in MPI", "GEMM", "pmm3d's own, and posting"],
            [f"{1e3 * max(column):.3f}" for column in zip(*everyone)],
        ]


def of_one_process(body: str, bytecode: str = "") -> tuple[float, int]:
    """(seconds, files) of a process of one rank. bytecode: folder of compiled modules; "": modules are compiled."""
    alone = {name: value for name, value in os.environ.items() if not name.startswith((*LAUNCHERS, "PYTHONDONTWRITE"))}
    alone |= {"PYTHONPYCACHEPREFIX": bytecode} if bytecode else {"PYTHONDONTWRITEBYTECODE": "1"}
    seconds, files = output_of([sys.executable, "-c", COUNTED.format(body=body)], alone).split(",")
    return float(seconds), int(files)


def imports(repeat: int) -> tuple[str, Rows]:
    rows = [["", "seconds", "files"]]
    with tempfile.TemporaryDirectory() as folder:
        for name, body in CASES.items():
            for kept, bytecode in (("", folder), (", no bytecode kept", "")):
                seconds, files = zip(*[of_one_process(body, bytecode) for _ in range(1 + repeat)][1:])
                rows.append([name + kept, f"{median(seconds):.3f}", str(max(files))])
    return f"After numpy and mpi4py, medians of {repeat} processes", rows


def main() -> None:
    made = parser(__doc__)
    made.add_argument("part", choices=("product", "imports"))
    options = made.parse_args()
    if options.part == "imports":
        return report(options, imports(1 if options.quick else 7))
    found = product(3 if options.quick else REPEAT)
    from mpi4py import MPI

    if MPI.COMM_WORLD.rank == 0:
        report(options, found)


if __name__ == "__main__":
    main()
