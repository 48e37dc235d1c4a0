"""One training step of a torch model on a grid of pmm3d, beside torch's own ways to train it on the same cores.

    python apps/torch_peers.py                       (or: --rounds 5 --steps 5 --layers 8 --width 2048 --batch 1024)

Model, weights and batch are those of apps/torch_rivals.py, and so must be the loss; loss, autograd and optimizer are
torch's on both sides. One process of one thread: the bridge beside plain torch. Two: the bridge on four grids beside
DDP, FSDP2 and tensor parallel on gloo. Rounds over all of them are interleaved, each in another order; a ratio is taken
within a round, and its median is printed. Both sides multiply by torch's BLAS, each process
on a core of its own. Linux.
"""

import argparse
import json
import os
import sys
from functools import partial

import torch_rivals
from measuring import Result, beside, interleaved, markdown, on_ranks, slowest
from torch_rivals import batch_of, keep_to_cores, weights

LEARNING_RATE = 10.0
TOLERANCE = 1e-4
"""Of the losses, relative."""
SIZES = ("layers", "width", "batch", "steps", "warm_up")
ONE = ("torch plain", "1 rank")
TWO = ("torch ddp", "torch fsdp2", "torch tp", "1x1x1 (data 2)", "2x1x1", "1x2x1", "1x1x2")


def bridge(options: argparse.Namespace) -> None:
    """On every rank. Rank 0 prints {"seconds", "final_loss"}."""
    import torch
    from mpi4py import MPI

    from pmm3d import Grid
    from pmm3d.layout import parse_shape
    from pmm3d.torch import input_rows, mean, parallelize

    torch.set_num_threads(1)
    comm, shape = MPI.COMM_WORLD, parse_shape(options.bridge)
    keep_to_cores(comm.rank, 1)
    layers = [torch.nn.Linear(options.width, options.width, bias=False) for _ in range(options.layers)]
    for index, layer in enumerate(layers):
        layer.weight.data.copy_(torch.from_numpy(weights(index, options.width)).T)
    with Grid(comm, shape[:3], data=comm.size // shape.size) as grid:
        parts = [part for layer in layers for part in (layer, torch.nn.ReLU())][:-1]
        model = parallelize(torch.nn.Sequential(*parts), grid)
        optimizer, losses = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, fused=True), []
        x, y = (input_rows(grid, torch.from_numpy(part)) for part in batch_of(options.batch, options.width))

        def step() -> None:
            optimizer.zero_grad()
            losses.append(torch.nn.functional.mse_loss(model(x), y))
            losses[-1].backward()
            optimizer.step()

        seconds = [slowest(comm, step) for _ in range(options.warm_up + options.steps)]
        loss = mean(grid, losses[-1].detach()).item()
        if grid.rank == 0:
            print(json.dumps({"seconds": seconds[options.warm_up :], "final_loss": loss}))


def run(name: str, options: argparse.Namespace) -> Result:
    """A side once: what `bridge` prints, or torch_rivals.run returns."""
    sizes = {key: getattr(options, key) for key in SIZES}
    if name.startswith("torch "):
        return torch_rivals.run(name.split()[1], {**sizes, "lr": LEARNING_RATE})
    words = [word for key, size in sizes.items() for word in (f"--{key.replace('_', '-')}", str(size))]
    ranks, shape = (1, "1x1x1") if name in ONE else (2, name.split()[0])
    environ = os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    return json.loads(on_ranks(ranks, [__file__, "--bridge", shape, *words], environ).splitlines()[-1])


def table(names: tuple[str, ...], runs: dict[str, list[Result]]) -> str:
    """Medians over the rounds, and each peer's time / the bridge's."""
    there = [name for name in names if name in runs]
    peers = [name for name in there if name.startswith("torch ")]
    heading = ["", "ms (min to max)", *(f"{peer} / this" for peer in peers)]
    return markdown([heading, *([name, *beside(name, runs, peers)] for name in there)])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="rounds over everyone (5)")
    parser.add_argument("--steps", type=int, default=5, help="timed steps of each in a round (5)")
    parser.add_argument("--warm-up", type=int, default=2, help="steps before them (2)")
    parser.add_argument("--layers", type=int, default=8, help="linear layers (8)")
    parser.add_argument("--width", type=int, default=2048, help="inputs and outputs of each (2048)")
    parser.add_argument("--batch", type=int, default=1024, help="rows, over all ranks (1024)")
    parser.add_argument("--bridge", metavar="GRID", help="on every rank of a job: our side on that grid, as JSON")
    options = parser.parse_args()
    if options.bridge:
        bridge(options)
        return 0
    runs, failed = interleaved({name: partial(run, name, options) for name in (*ONE, *TWO)}, options.rounds)
    print(f"{options.layers} layers, width {options.width}, batch {options.batch}, float32; medians of "
          f"{options.rounds} rounds of {options.steps} steps; above 1: this is faster\n")
    print(table(ONE, runs), "", table(TWO, runs), sep="\n")
    losses = {name: results[-1]["final_loss"] for name, results in runs.items()}
    first = next(iter(losses.values()), 1.0)
    differ = [name for name, loss in losses.items() if not abs(loss / first - 1) <= TOLERANCE]
    print(f"\nloss of the last step: {'; '.join(f'{name} {loss:.7f}' for name, loss in losses.items())}")
    return 1 if differ or failed else 0


if __name__ == "__main__":
    sys.exit(main())
