"""A training loop to copy and change. `pmm3d train CONFIG.toml` does the same from a configuration file.

    python apps/digits.py runs/digits.h5
    python -m pmm3d.launcher -n 8 apps/train_fc.py runs/digits.h5 --grid 2x2x1 --data 2

A second start resumes from the newest checkpoint in the folder, on any grid.
"""

import argparse

from mpi4py import MPI

from pmm3d import Grid, nn
from pmm3d.io import Checkpoints, DataSet
from pmm3d.nn import optim
from pmm3d.nn.training import TrainState


class Network(nn.Module):
    """Two hidden layers, the second with a residual connection around it."""

    def __init__(self, grid, features: int, classes: int, width: int = 128):
        self.grid = grid
        self.first = nn.Linear(grid, features, width, seed=1)
        self.block = nn.Residual(
            nn.Sequential(
                grid,
                nn.LayerNorm(grid, width),
                nn.Linear(grid, width, width, seed=2),
                nn.gelu,
                nn.Linear(grid, width, width, seed=3),
            )
        )
        self.last = nn.Linear(grid, width, classes, seed=4)

    def forward(self, x):
        return self.last(nn.gelu(self.block(nn.gelu(self.first(x)))))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", help="HDF5 with the data sets x (samples) and y (classes)")
    parser.add_argument("--grid", default="ddp", help="GxxGyxGz, ddp, fsdp, hsdp or megatron")
    parser.add_argument("--data", type=int, default=1, help="Gdata")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--checkpoints", default="runs/train_fc", help="folder")
    options = parser.parse_args()

    with Grid(MPI.COMM_WORLD, options.grid, options.data) as grid, DataSet(grid, options.file) as data:
        known, held_out = data.split(0.2, seed=0)
        batches = data.loader(batch_size=64, seed=0, rows=known)
        test = data.loader(batch_size=256, shuffle=False, rows=held_out)
        net = Network(grid, data.features, data.classes)
        net.settle(data.features)
        optimizer = optim.AdamW(net.parameters(), lr=2e-3, weight_decay=0.05, decay_vectors=False)
        schedule = optim.Cosine(optimizer, steps=options.epochs * len(batches), warm_up=20)
        checkpoints = Checkpoints(grid, options.checkpoints)
        state = TrainState(net, optimizer, schedule, batches)
        resumed = state.resume(checkpoints)
        if resumed and grid.rank == 0:
            print(f"resumed {resumed['path']}, after epoch {batches.epoch}", flush=True)

        while batches.epoch < options.epochs:
            for x, y in batches:
                loss = nn.cross_entropy(net(x), y)
                loss.backward()
                optimizer.clip(1.0)
                optimizer.step()
                schedule.step()
            with net.evaluating():
                right = sum(nn.accuracy(net(x), y) * x.shape[0] for x, y in test) / len(held_out)
            last = loss.item()
            if grid.rank == 0:
                print(f"epoch {batches.epoch}: loss {last:.4f}, test accuracy {right:.3f}", flush=True)
            state.save(checkpoints)


if __name__ == "__main__":
    main()
