"""Train a network on the data of generate.py, and print its error on held-out parameters.

    python -m pmm3d.launcher -n 2 apps/surrogate/train.py surrogate.h5
    python -m pmm3d.launcher -n 8 apps/surrogate/train.py surrogate.h5 --grid 2x2x1 --hidden 1024 1024 1024

--grid GxxGyxGz distributes one copy of the network. Other ranks hold further copies and share the batch: 8 ranks on
2x2x1 hold two copies. The default, one copy on each rank, is fastest for a network this small. Losses on all grids are
equal except for rounding.

The program prints the relative errors of the network and of predictions without a network, and draws the loss and
some fields.
"""

import argparse
from collections.abc import Callable
from pathlib import Path
from time import perf_counter

import h5py
import numpy as np
from baselines import baseline_errors, relative_errors, table
from command import at_least, parsed, progress, said_once
from figure import draw
from mpi4py import MPI
from pde import Plume, in_units

from pmm3d import Grid, Pmm3dError, nn
from pmm3d.io import DataSet, Loader
from pmm3d.layout import parse_shape
from pmm3d.nn import optim


def train(
    net: nn.Module, batches: Loader, held_out: Loader, epochs: int, rate: float, tell: Callable[[int, str], None]
) -> list[tuple[float, float]]:
    """Train. Return (loss of the batches, loss of the held-out samples) of each epoch."""
    opt = optim.AdamW(net.parameters(), lr=rate, weight_decay=1e-4, decay_vectors=False)
    schedule = optim.Cosine(opt, steps=epochs * len(batches), warm_up=min(100, len(batches)))
    losses = []
    for _ in range(epochs):
        total = 0.0
        for x, y in batches:
            loss = nn.mse(net(x), y)
            loss.backward()
            opt.step()
            schedule.step()
            total += loss.item()
        with nn.no_grad(net.grid):
            unseen = [nn.mse(net(x), y).item() for x, y in held_out]
        losses.append((total / len(batches), sum(unseen) / len(unseen)))
        tell(1, "loss {:.2e}, held out {:.2e}".format(*losses[-1]))
    return losses


def predict(net: nn.Module, batches: Loader) -> np.ndarray:
    """Outputs of the network for all samples of a loader, in order, on all ranks."""
    with nn.no_grad(net.grid):
        return np.concatenate([np.array(net(x).gather()) for x, _ in batches])


def attributes(path: Path) -> dict:
    """Attributes that generate.py wrote. Raises Pmm3dError for another file."""
    with h5py.File(path) as file:
        missing = {"points", "refine", "mean", "std"} - set(file.attrs)
        if missing:
            raise Pmm3dError(f"generate.py did not write {path}: it lacks the attributes {', '.join(sorted(missing))}")
        return dict(file.attrs)


def show_results(
    grid: Grid,
    options: argparse.Namespace,
    noted: dict,
    losses: list[tuple[float, float]],
    predicted: np.ndarray,
    seconds_of_net: float,
) -> None:
    """Print the errors of the network and of the baselines, and draw the figure."""
    with h5py.File(options.data) as file:
        x, y = (file[name][-options.held_out :] for name in ("x", "y"))
    mean, std, points = noted["mean"], noted["std"], noted["points"]
    errors = {"this network": relative_errors(predicted, y, mean, std)}
    errors |= baseline_errors(options.data, options.held_out)
    print(table(errors))
    plume, begun, few = Plume(points, noted["refine"]), perf_counter(), min(20, len(x))
    for each in in_units(x[:few]):
        plume.field(each)
    seconds = (perf_counter() - begun) / few
    print(
        f"a field takes the solver {1e3 * seconds:.2f} ms on one rank, the network {1e3 * seconds_of_net:.3f} ms on "
        f"{grid.size} rank{'s' * (grid.size > 1)}, in batches of {options.batch}"
    )
    fields = (mean + std * each.reshape(-1, points, points) for each in (y, predicted))
    draw(options.figure, losses, *fields, errors["this network"])
    print(f"wrote {options.figure}", flush=True)


def run(grid: Grid, data: DataSet, options: argparse.Namespace) -> None:
    """Check the data, train, and show the results."""
    known = data.samples - options.held_out
    with grid.collective_call("train", vars(options)):
        noted = attributes(options.data)
        if known < 1:
            raise Pmm3dError(f"{options.data} has {data.samples} samples; --held-out {options.held_out} leaves none")
        if not options.figure.resolve().parent.is_dir():
            raise Pmm3dError(f"cannot write {options.figure}: {options.figure.resolve().parent} is no folder")
    batches = data.loader(options.batch, seed=options.seed, rows=(0, known))
    held_out = data.loader(options.batch, shuffle=False, rows=(known, data.samples))
    net = nn.MLP(grid, [data.features, *options.hidden, data.outputs], nn.gelu, seed=options.seed, dtype="float32")
    tell = progress(grid.comm, f"{net.size:,} parameters on {grid.shape}", options.epochs)
    losses = train(net, batches, held_out, options.epochs, options.rate, tell)
    begun = perf_counter()
    predicted = predict(net, held_out)
    seconds = (perf_counter() - begun) / options.held_out
    with grid.collective_call("results"):
        if grid.rank == 0:
            show_results(grid, options, noted, losses, predicted, seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, help="file that generate.py wrote")
    parser.add_argument("--grid", default="1x1x1", help="GxxGyxGz of one copy of the network (1x1x1)")
    parser.add_argument("--hidden", type=at_least(1), nargs="+", default=[256] * 4, help="hidden layers (4 of 256)")
    parser.add_argument("--epochs", type=at_least(1), default=100, help="passes over the samples (100)")
    parser.add_argument("--batch", type=at_least(1), default=250, help="rows of a batch, over all ranks (250)")
    parser.add_argument("--rate", type=float, default=4e-3, help="learning rate, after the warm-up (4e-3)")
    parser.add_argument("--held-out", type=at_least(1), default=2000, help="last samples, held out (2000)")
    parser.add_argument("--seed", type=at_least(0), default=0, help="of initial weights and order of samples (0)")
    parser.add_argument("--figure", type=Path, default=Path("surrogate.png"), help="to draw (surrogate.png)")
    comm = MPI.COMM_WORLD
    options = parsed(parser, comm)
    with said_once(comm):
        shape = parse_shape(options.grid)
        with Grid(comm, shape[:3], data=max(1, comm.size // max(1, shape.size))) as grid:
            with DataSet(grid, options.data) as data:  # whose file generate.py wrote
                run(grid, data, options)


if __name__ == "__main__":
    main()
