"""Time of checkpoints in a training: without checkpoints, written at once, and written in the background.

    python -m pmm3d.launcher -n 2 benchmarks/checkpoint.py --folder /scratch --width 2048 --layers 6

Each pass trains a network of layers of one width by `--steps` steps of AdamW. A checkpoint is saved after the first
step. Choose `--steps` so large that a checkpoint in the background is complete before the end of the pass.

pass     milliseconds of the steps, with the checkpoint
lost     difference from a pass without a checkpoint
held     milliseconds of `save`
"""

import tempfile
import time
from pathlib import Path
from statistics import median

from mpi4py import MPI
from records import parser, report

from pmm3d import DistMatrix, Grid, nn
from pmm3d.io import Checkpoints
from pmm3d.layout import batch_layout
from pmm3d.nn import optim
from pmm3d.nn.training import TrainState

KINDS = ("none", "at once", "in the background")


def one_pass(
    state: TrainState, checkpoints: Checkpoints | None, x: DistMatrix, y: DistMatrix, steps: int
) -> tuple[float, float]:
    """(seconds of the steps, seconds of `save`) on the slowest rank."""
    grid, held = x.grid, 0.0
    grid.comm.Barrier()
    begun = time.perf_counter()
    for step in range(steps):
        nn.mse(state.network(x), y).backward()
        state.optimizer.step()
        if checkpoints is not None:
            checkpoints.poll()
            if step == 0:
                since = time.perf_counter()
                state.save(checkpoints)
                held = time.perf_counter() - since
    if checkpoints is not None:
        checkpoints.finish()
    taken = time.perf_counter() - begun
    return max(grid.comm.allgather(taken)), max(grid.comm.allgather(held))


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--folder", type=Path, help="folder on the tested disk (default: that of temporary files)")
    for name, default in (("--width", 2048), ("--layers", 6), ("--batch", 512), ("--steps", 10), ("--passes", 5)):
        made.add_argument(name, type=int, default=default, help=f"({default})")
    options = made.parse_args()
    if options.quick:
        options.width, options.layers, options.batch, options.steps, options.passes = 64, 2, 32, 3, 1
    with Grid(MPI.COMM_WORLD, "fsdp") as grid, tempfile.TemporaryDirectory(dir=options.folder) as own:
        folder = Path(grid.comm.bcast(own))
        net = nn.MLP(grid, [options.width] * (options.layers + 1), nn.relu, bias=False, seed=1)
        state = TrainState(net, optim.AdamW(net.parameters(), lr=1e-6))
        x = DistMatrix.random(grid, (options.batch, options.width), seed=2, dtype="float32", layout=batch_layout("y"))
        y = DistMatrix.random(grid, (options.batch, options.width), seed=3, dtype="float32", layout=net.output_layout)
        keepers = {
            "none": None,
            "at once": Checkpoints(grid, folder / "once", keep=1),
            "in the background": Checkpoints(grid, folder / "background", keep=1, background=True),
        }
        for keeper in keepers.values():  # warm-up: the first save allocates memory and buffers
            one_pass(state, keeper, x, y, 2)
        found: dict[str, list[tuple[float, float]]] = {kind: [] for kind in KINDS}
        for _ in range(options.passes):
            for kind in KINDS:
                found[kind].append(one_pass(state, keepers[kind], x, y, options.steps))
        size = sum(matrix.shape[0] * matrix.shape[1] * 4 for matrix in state.matrices().values())
        plain = median(seconds for seconds, _ in found["none"])
        rows = [["checkpoint", "pass, ms", "lost, ms", "held, ms"]]
        for kind in KINDS:
            seconds, held = (median(figures) for figures in zip(*found[kind]))
            rows.append([kind, f"{1e3 * seconds:.0f}", f"{1e3 * (seconds - plain):.0f}", f"{1e3 * held:.0f}"])
        if grid.rank == 0:
            report(
                options,
                (
                    f"{options.steps} steps of {options.layers} layers of {options.width}, batch "
                    f"{options.batch}, {grid.size} ranks, a checkpoint of {size / 2**20:.0f} MiB",
                    rows,
                ),
            )


if __name__ == "__main__":
    main()
