"""Solve the plume of pde.py for many parameters, on all ranks, and write the data set for train.py.

    python -m pmm3d.launcher -n 2 apps/surrogate/generate.py --samples 20000 --out surrogate.h5

The file contains

    x        (samples, parameters)  float32    the parameters, scaled to [-1, 1]
    y        (samples, points^2)    float32    the fields, row by row, scaled: u = mean + std y
    attributes: parameters, low, high (x = -1 is low, x = 1 is high), points, refine, mean, std

The parameters of a sample are a point of Sobol's sequence, so the data are bitwise the same on any number of ranks.
Each rank writes its samples to a file of its own in the folder NAME.parts. Virtual data sets in NAME.h5 join these
files: keep both together. They get their names when they are complete. Any HDF5 reader sees whole arrays:
h5py.File("surrogate.h5")["y"][:10].
"""

import argparse
import shutil
from collections.abc import Callable
from pathlib import Path
from time import perf_counter

import h5py
import numpy as np
from command import at_least, parsed, progress, said_once
from mpi4py import MPI
from pde import PARAMETERS, Plume, in_units
from scipy.stats import qmc

from pmm3d import Grid, Pmm3dError
from pmm3d.layout import part_range


def parameters(first: int, last: int) -> np.ndarray:
    """x of the samples first:last. The first point of the sequence is skipped, because it is a corner."""
    return 2 * qmc.Sobol(len(PARAMETERS), scramble=False).fast_forward(first + 1).random(last - first) - 1


class Output:
    """The files of the data set: their names when complete (`path`, `parts`), and before (`partial_...`)."""

    def __init__(self, path: Path, samples: int, points: int):
        self.path, self.parts = path, path.with_suffix(".parts")
        self.partial_path, self.partial_parts = (each.with_name(each.name + ".partial") for each in (path, self.parts))
        self.widths = {"x": len(PARAMETERS), "y": points**2}
        self.samples = samples

    def prepare(self, overwrite: bool) -> None:
        """Raise Pmm3dError if the data set cannot be written."""
        for each in (self.path, self.parts):
            if each.exists() and not overwrite:
                raise Pmm3dError(f"{each} exists already; --overwrite replaces it, --out names another")
        folder = self.path.resolve().parent
        needed = 4 * self.samples * sum(self.widths.values())
        try:
            free = shutil.disk_usage(folder).free
            if free < needed:
                raise Pmm3dError(f"{folder} has {free / 1e9:.2f} GB free; the data set takes {needed / 1e9:.2f} GB")
            self.discard()
            self.partial_parts.mkdir()
        except OSError as error:
            raise Pmm3dError(f"cannot write in {folder}: {error.strerror}") from None

    def write(self, rank: int, values: dict[str, np.ndarray]) -> None:
        """Write the samples of a rank."""
        with h5py.File(self.partial_parts / f"{rank:05d}.h5", "w") as file:
            for name, rows in values.items():
                file[name] = rows.astype("float32")

    def publish(self, ranks: int, **attributes) -> None:
        """Join the files of the ranks by virtual data sets, add the attributes, and rename. If a file of a rank is
        removed later, its rows read as NaN."""
        with h5py.File(self.partial_path, "w") as file:
            for name, width in self.widths.items():
                layout = h5py.VirtualLayout((self.samples, width), "float32")
                for rank in range(min(ranks, self.samples)):
                    first, last = part_range(self.samples, ranks, rank)
                    part = f"{self.parts.name}/{rank:05d}.h5"
                    layout[first:last] = h5py.VirtualSource(part, name, (last - first, width), "float32")
                file.create_virtual_dataset(name, layout, fillvalue=np.nan)
            names, low, high = zip(*PARAMETERS)
            file.attrs.update({"parameters": names, "low": low, "high": high, **attributes})
        self.path.unlink(missing_ok=True)
        shutil.rmtree(self.parts, ignore_errors=True)
        self.partial_parts.rename(self.parts)
        self.partial_path.rename(self.path)

    def discard(self) -> None:
        self.partial_path.unlink(missing_ok=True)
        shutil.rmtree(self.partial_parts, ignore_errors=True)


def generate(
    grid: Grid,
    path: Path,
    samples: int,
    points: int = 32,
    refine: int = 2,
    overwrite: bool = False,
    tell: Callable[[int], None] = lambda count: None,
) -> None:
    """Write the data set. Collective. tell(1) is called after each sample that this rank solves."""
    output = Output(path, samples, points)
    first, last = part_range(samples, grid.size, grid.rank)
    with grid.collective_call("generate", str(path), samples, points, refine, overwrite):
        if grid.rank == 0:
            output.prepare(overwrite)
    try:
        with grid.collective_call("generate: solve"):
            plume, x = Plume(points, refine), parameters(first, last)
            y = np.empty((last - first, points**2))
            for field, chosen in zip(y, in_units(x)):
                field[:] = plume.field(chosen).ravel()
                tell(1)
            moments = np.stack([y.mean(axis=1), (y**2).mean(axis=1)], axis=1)
        mean, square = np.concatenate(grid.comm.allgather(moments)).mean(axis=0)
        std = np.sqrt(square - mean**2)
        with grid.collective_call("generate: write"):
            output.write(grid.rank, {"x": x, "y": (y - mean) / std})
        with grid.collective_call("generate: publish"):
            if grid.rank == 0:
                output.publish(grid.size, points=points, refine=refine, mean=mean, std=std)
    except Exception:
        if grid.rank == 0:
            output.discard()
        raise


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=at_least(1), default=20000, help="sets of parameters to solve for (20000)")
    parser.add_argument("--points", type=at_least(2), default=32, help="points per side that are kept (32)")
    parser.add_argument("--refine", type=at_least(1), default=2, help="solve on a mesh this many times finer (2)")
    parser.add_argument("--out", type=Path, default=Path("surrogate.h5"), help="file to write (surrogate.h5)")
    parser.add_argument("--overwrite", action="store_true", help="replace the file if it exists")
    comm = MPI.COMM_WORLD
    options = parsed(parser, comm)
    with said_once(comm), Grid(comm, (1, 1, 1), data=comm.size) as grid:
        begun = perf_counter()
        share = part_range(options.samples, comm.size, 0)[1]
        tell = progress(comm, f"solving on rank 0 of {comm.size}", share)
        generate(grid, options.out, options.samples, options.points, options.refine, options.overwrite, tell)
        if comm.rank == 0:
            seconds = perf_counter() - begun
            print(
                f"wrote {options.out}: {options.samples} samples of {options.points} x {options.points} points "
                f"in {seconds:.1f} s on {comm.size} rank{'s' * (comm.size > 1)}",
                flush=True,
            )


if __name__ == "__main__":
    main()
