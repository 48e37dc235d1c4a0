"""What importing pmm3d costs a rank: seconds, and files opened, which a parallel file system must serve to every rank.

    python apps/import_cost.py

Each line is a process of its own, the median of several: after numpy and mpi4py all public names; those that a product
needs, and a first one of two matrices on one rank; both again where no bytecode is kept (a new or read-only
installation). Files are
those that Python opens (modules, extensions, folders that it lists).
"""

import argparse
import os
import sys
import tempfile
from statistics import median

from measuring import output_of

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
NAMES = "import pmm3d\nfor name in pmm3d.__all__: getattr(pmm3d, name)"
PRODUCT = """
import pmm3d
with pmm3d.Grid() as grid:
    a = pmm3d.DistMatrix.random(grid, (64, 64), seed=1)
    a @ a.redistribute(pmm3d.Layout.B)"""
CASES = {"all public names": NAMES, "a first product": PRODUCT}


def measured(body: str, bytecode: str = "") -> tuple[float, int]:
    """Seconds and files of a process of one rank that runs these lines after numpy and mpi4py. bytecode: the folder in
    which Python keeps compiled modules; they are compiled anew if it is left out."""
    alone = {name: value for name, value in os.environ.items() if not name.startswith((*LAUNCHERS, "PYTHONDONTWRITE"))}
    alone |= {"PYTHONPYCACHEPREFIX": bytecode} if bytecode else {"PYTHONDONTWRITEBYTECODE": "1"}
    seconds, files = output_of([sys.executable, "-c", COUNTED.format(body=body)], alone).split(",")
    return float(seconds), int(files)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=7, help="processes of each kind (7)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for name, body in CASES.items():
            for kept, bytecode in (("", folder), (", no bytecode kept", "")):
                seconds, files = zip(*[measured(body, bytecode) for _ in range(1 + options.repeat)][1:])
                print(f"{name + kept:38} {median(seconds):.3f} s, {max(files)} files")


if __name__ == "__main__":
    main()
