"""A small training step: pmm3d compared with eager PyTorch, in the same processes, in turns.

    python benchmarks/small_step.py                                          (1, 2 and 8 ranks, two passes)
    python benchmarks/small_step.py --ranks 1 --libraries torch --rounds 9

All train the perceptron 64-256-256-10 (ReLU, biases, float32) with the cross entropy of a batch of 64 rows, clipping of
the gradient's norm at 1, and AdamW. Weights and batch are equal, and so must be the losses of the first steps. Each
rank has one thread. With more ranks than cores, ranks share cores.

pmm3d   `train_step` with arrays of each library, on the grid "ddp". All ranks also agree on loss and norm
torch   zero_grad, forward pass, loss, backward pass, clip_grad_norm_, and AdamW(fused=True) or AdamW(foreach=True).
        Several ranks use DistributedDataParallel on gloo, and each rank has its part of the batch

ms              milliseconds of a step on the slowest rank. In each round every contestant takes some steps, and the
                order changes. A pass is a separate job. Figures are medians over the rounds of all passes
ratio           time of a step / time of torch's faster optimizer, medians of ratios within a round
Python calls    calls of Python functions of a step on rank 0, without calls that poll while a message has not
                arrived, which have a column of their own

For 8 layers of 512 see `training.py --width 512 --batch 256 --rivals --steps 50`: its second table contains the share
of Python. For the network of apps/digits.toml see `digits_rate.py --ranks 1 2 8`.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from argparse import Namespace
from collections.abc import Callable
from contextlib import ExitStack
from itertools import pairwise
from statistics import median
from typing import Any

import numpy as np
from mpi4py import MPI
from records import parser, report
from timing import all_rounds, on_ranks, one_thread, python_calls, slowest
from torch_rivals import keep_to_cores

from pmm3d import DistMatrix, Grid, Layout, nn
from pmm3d.layout import batch_layout
from pmm3d.model import machine
from pmm3d.nn import optim
from pmm3d.nn.training.step import train_step
from pmm3d.text import counted

SIZES, ROWS, CLIP = (64, 256, 256, 10), 64, 1.0
LEARNING_RATE, WEIGHT_DECAY = 1e-4, 0.01
LIBRARIES, OPTIMIZERS = ("torch", "numpy"), ("fused", "foreach")
WARM_UP, COUNTED = 6, 3
"""Steps before the rounds, whose losses are compared, and steps whose calls are counted."""
TOLERANCE = 1e-4
"""Largest relative difference of the losses."""
QUICK = {"ranks": [1, 2], "passes": 1, "rounds": 1, "steps": 2}
Step = Callable[[], Any]
"""A step. It returns the loss: pmm3d of the whole batch, torch of this rank's rows."""
Result = dict[str, Any]


def weights(layer: int) -> tuple[np.ndarray, np.ndarray]:
    """Weight (inputs, outputs) and bias (1, outputs) of a layer: normal numbers / sqrt(inputs)."""
    source, (inputs, outputs) = np.random.default_rng([1, layer]), [*pairwise(SIZES)][layer]
    weight, bias = (source.standard_normal((rows, outputs), np.float32) for rows in (inputs, 1))
    return weight / np.float32(np.sqrt(inputs)), bias / np.float32(np.sqrt(inputs))


def batch() -> tuple[np.ndarray, np.ndarray]:
    """Inputs, which are normal numbers, and labels (rows, 1)."""
    source = np.random.default_rng(2)
    return source.standard_normal((ROWS, SIZES[0]), np.float32), source.integers(0, SIZES[-1], (ROWS, 1))


def of_pmm3d(grid: Grid) -> Step:
    def spread(whole: np.ndarray, layout: Layout) -> DistMatrix:
        return DistMatrix.from_global(grid, grid.library().from_numpy(whole, whole.dtype.name), layout=layout)

    net = nn.MLP(grid, SIZES, nn.relu, seed=0, dtype="float32")
    for path, parameter in net.named_parameters().items():
        place, kind = path.split(".")
        parameter.assign(spread(weights(int(place) // 2)[kind == "bias"], parameter.layout))
    optimizer = optim.AdamW(net.parameters(), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY)
    x, labels = batch()
    pair = spread(x, batch_layout("y")), spread(labels, batch_layout(None))
    return lambda: train_step(net, optimizer, nn.cross_entropy, [pair], CLIP)[0]


def of_torch(kind: str, comm: MPI.Intracomm) -> Step:
    """kind: of the optimizer, "fused" or "foreach"."""
    import torch

    parts: list[Any] = []
    for index, (inputs, outputs) in enumerate(pairwise(SIZES)):
        layer, (weight, bias) = torch.nn.Linear(inputs, outputs), map(torch.from_numpy, weights(index))
        layer.weight.data.copy_(weight.T)
        layer.bias.data.copy_(bias[0])
        parts += [layer, torch.nn.ReLU()]
    model: Any = torch.nn.Sequential(*parts[:-1])
    if comm.size > 1:
        model = torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    parameters = [*model.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY, **{kind: True})
    x, labels = (torch.from_numpy(whole).chunk(comm.size)[comm.rank].clone() for whole in batch())
    labels = labels[:, 0].clone()

    def step() -> Any:
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(x), labels)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, CLIP)
        optimizer.step()
        return loss.detach()

    return step


def measured(options: Namespace) -> dict[str, Result]:
    """On every rank: run the rounds of all contestants. Return name -> {"losses", "seconds", "work", "polling"}."""
    import torch

    comm = MPI.COMM_WORLD
    torch.set_num_threads(1)
    keep_to_cores(comm.rank, 1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    with tempfile.TemporaryDirectory() as folder, ExitStack() as grids:
        torch.distributed.init_process_group(
            "gloo", init_method=f"file://{comm.bcast(folder)}/gloo", rank=comm.rank, world_size=comm.size
        )
        everyone: dict[str, Step] = {}
        for library in options.libraries:
            grid = grids.enter_context(Grid(comm, "ddp", library=library))
            everyone[f"pmm3d, {library} arrays"] = of_pmm3d(grid)
        everyone |= {f"torch, {kind}": of_torch(kind, comm) for kind in OPTIMIZERS}
        losses = {name: [comm.allreduce(float(step())) for _ in range(WARM_UP)] for name, step in everyone.items()}
        seconds = all_rounds(everyone, lambda name: slowest(comm, everyone[name], options.steps), options.rounds)
        found = {}
        for name, step in everyone.items():
            comm.Barrier()
            calls = python_calls(step, COUNTED)
            found[name] = {
                "losses": [loss / comm.size for loss in losses[name]],
                "seconds": seconds[name],
                **calls._asdict(),
            }
        torch.distributed.destroy_process_group()
        comm.Barrier()
    return found


def rows_of(ranks: int, passes: list[dict[str, Result]]) -> list[list[str]]:
    """For each contestant: milliseconds, the medians of the passes, the ratios, and the calls."""
    seconds = lambda name: [each[name]["seconds"] for each in passes]
    whole = {name: median(sum(seconds(name), [])) for name in passes[0]}
    faster = min((f"torch, {kind}" for kind in OPTIMIZERS), key=whole.__getitem__)
    rows = []
    for name, own in whole.items():
        ratios = [[one / other for one, other in zip(*pair)] for pair in zip(seconds(name), seconds(faster))]
        of_passes = lambda figures, digits: ", ".join(f"{figure:.{digits}f}" for figure in figures)
        rows.append(
            [
                str(ranks),
                name,
                f"{1e3 * own:.3f} ({of_passes([1e3 * median(one) for one in seconds(name)], 3)})",
                f"{median(sum(ratios, [])):.2f} ({of_passes(map(median, ratios), 2)})",
                *(f"{median(each[name][kind] for each in passes):,.0f}" for kind in ("work", "polling")),
            ]
        )
    return rows


def differing(passes: dict[int, list[dict[str, Result]]]) -> list[str]:
    """Contestants whose first losses differ from those of the first."""
    everyone = [
        (ranks, name, each[name]["losses"]) for ranks, found in passes.items() for each in found for name in each
    ]
    first = everyone[0][2]
    return [
        f"{name} on {counted(ranks, 'rank')}: {losses}"
        for ranks, name, losses in everyone
        if not np.allclose(losses, first, rtol=TOLERANCE, atol=0)
    ]


def main() -> int:
    made = parser(__doc__)
    made.add_argument("--ranks", nargs="+", type=int, default=[1, 2, 8], metavar="N", help="numbers of ranks (1 2 8)")
    made.add_argument(
        "--libraries",
        nargs="+",
        choices=LIBRARIES,
        default=LIBRARIES,
        metavar="NAME",
        help=f"array libraries of pmm3d ({' '.join(LIBRARIES)})",
    )
    made.add_argument("--passes", type=int, default=2, help="jobs with each number of ranks, one after the other (2)")
    made.add_argument("--rounds", type=int, default=7, help="rounds over all contestants in a pass (7)")
    made.add_argument("--steps", type=int, default=50, help="timed steps of each contestant in a round (50)")
    made.add_argument("--here", action="store_true", help="internal, on every rank: one pass, as JSON")
    options = made.parse_args()
    if options.here:
        found = measured(options)
        if MPI.COMM_WORLD.rank == 0:
            print(json.dumps(found), flush=True)
        return 0
    if options.quick:
        vars(options).update(QUICK)
    if uneven := [ranks for ranks in options.ranks if ROWS % ranks]:
        made.error(f"--ranks {uneven[0]}: {ROWS} rows have no equal parts for {counted(uneven[0], 'rank')}")
    command = [__file__, "--here", "--libraries", *options.libraries]
    command += ["--rounds", str(options.rounds), "--steps", str(options.steps)]
    environ = one_thread()
    machine.set_blas_environment(environ)
    passes: dict[int, list[dict[str, Result]]] = {ranks: [] for ranks in options.ranks}
    for turn in range(options.passes):
        for ranks in options.ranks:
            passes[ranks].append(json.loads(on_ranks(ranks, command, environ).splitlines()[-1]))
            print(f"pass {turn + 1} of {options.passes}: {counted(ranks, 'rank')}", file=sys.stderr, flush=True)
    print(f"{machine.cpu().name}, {counted(machine.usable_cores(), 'core')}")
    heading = ["ranks", "step", "ms (of each pass)", "ratio (of each pass)", "Python calls", "polling calls"]
    report(
        options,
        (
            f"Perceptron {'-'.join(map(str, SIZES))}, batch {ROWS}, float32, one thread a rank; medians of "
            f"{counted(options.passes, 'pass')} of {counted(options.rounds, 'round')} of "
            f"{counted(options.steps, 'step')}",
            [heading, *(row for ranks, found in passes.items() for row in rows_of(ranks, found))],
        ),
    )
    if different := differing(passes):
        print(f"the losses differ from the first: {'; '.join(different)}", file=sys.stderr)
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
