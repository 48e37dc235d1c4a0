"""A job of test_driver_memory.py: collectives, products and training on memory that the host cannot touch."""

import faulthandler
import sys

import numpy as np
import standin_driver
from mpi4py import MPI
from networks import CLASSES, largest_difference, train, weights_of
from samples import integers, to_library, to_numpy
from standin_streams import Stream

from pmm3d import DistMatrix, Grid, Layout, matmul

LIBRARY, COMM = "standin_driver", MPI.COMM_WORLD
COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "shift")
GRIDS = {2: [((1, 2, 1), 1), ((2, 1, 1), 1)], 4: [((2, 1, 2), 1), ((1, 2, 1), 2)]}


def collectives(grid):
    """Compare each collective with the same on numpy arrays, for eager messages and for messages with a rendezvous."""
    for rows in (4, 40_000):
        whole = integers((rows, 3), seed=grid.rank)
        for axis in (grid.x, grid.y, grid.everyone):
            for name in COLLECTIVES:
                found = getattr(axis, name)(to_library(whole, LIBRARY)).wait()
                assert np.array_equal(to_numpy(found, LIBRARY), getattr(axis, name)(whole).wait()), (rows, name)


def products(grid):
    whole_a, whole_b = integers((130, 110), seed=1), integers((110, 90), seed=2)
    a = DistMatrix.from_global(grid, to_library(whole_a, LIBRARY))
    b = DistMatrix.from_global(grid, to_library(whole_b, LIBRARY), layout=Layout.B)
    for panels in (1, 3):
        assert np.array_equal(to_numpy(matmul(a, b, panels=panels).gather(), LIBRARY), whole_a @ whole_b)


def training(grid):
    (losses, net), (expected, same) = (
        train(grid, CLASSES, 2, clip=0.5, dropout=0.1, library=library) for library in (LIBRARY, "numpy")
    )
    assert np.abs(losses - expected).max() < 1e-10 and largest_difference(weights_of(net), weights_of(same)) < 1e-10


def main(transport: str) -> None:
    faulthandler.enable()
    for shape, data in GRIDS[COMM.size]:
        with Grid(COMM, shape, data, device_transport=transport) as grid, Stream(non_blocking=True):
            for body in (collectives, products, training):
                body(grid)
            why = grid.transport.why
    if COMM.rank == 0:
        print(f"all right, {why}; device to device: {standin_driver.copied_on_devices()} bytes")


main(sys.argv[1])
