"""A training step: pmm3d on several grids, a torch model on a grid of pmm3d, and only PyTorch, in turns.

    python benchmarks/training.py                        (or: --rounds 5 --steps 5)
    python benchmarks/training.py --bridges 1x1x1 2x1x1 1x2x1 1x1x2 --grids
    python benchmarks/training.py --beside ../before/.venv/bin/python         this version and another one, in turns
    python benchmarks/training.py --width 512 --batch 256 --rivals --steps 50     most of a small step is Python

Network, weights and batch are those of torch_rivals.py, and the losses of the fifth step must be equal. A step of
pmm3d.nn is a `train_step`. Each round runs all contestants. Ratios are medians of the ratios within a round. --grids
selects networks of pmm3d.nn, --bridges torch models with pmm3d.torch, --rivals only PyTorch. pmm3d.nn runs with the
best OpenBLAS kernel for this CPU and, if it differs, with OpenBLAS's own choice. --kernels selects others.

of the limit   time of the GEMMs of the step at the rate of a 2048 x 2048 x 2048 GEMM of the same BLAS on one core, for
               2 cores, / time of the step. The rate is the better of two medians, before and after the steps. A layer
               has 6 m n k operations. The first layer has 4 m n k, because its input needs no gradient

The second table shows the parts of a step of pmm3d on rank 0.

With --ranks 1, pmm3d is one process with a BLAS thread for each core.
"""

import json
import os
import sys
import timeit
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from statistics import median
from typing import Any

import torch_rivals
from records import parser, report
from timing import Result, beside, interleaved, on_ranks, one_thread, output_of, slowest
from torch_rivals import COMPARED, GEMM, RIVALS, batch_of, keep_to_cores, weights

from pmm3d.arrays.blas_choice import blas_here
from pmm3d.comm.ledger import Ledger
from pmm3d.model import machine

CORES = 2
GRIDS = ("1x1x1", "2x1x1", "1x2x1", "1x1x2")
KERNEL = "OPENBLAS_CORETYPE"
SIZES = ("layers", "width", "batch", "steps", "warm_up")
QUICK = {
    "layers": 2,
    "width": 32,
    "batch": 16,
    "steps": 1,
    "warm_up": 1,
    "rounds": 1,
    "grids": ["2x1x1"],
    "bridges": ["1x1x2"],
    "rivals": ["ddp"],
    "kernels": ["default"],
}
BESIDE, BRIDGE = ", beside", "torch on "
REST = "Python, and the rest"
LEARNING_RATE = 10.0
"""Learning rate. It is large, because the gradient of a mean over batch x width elements is small. With three times as
much, one ReLU that rounding changes from 0 to 1e-8 would change the loss by more than 1e-6 in five steps."""
TOLERANCE = 1e-4
"""Largest relative difference of the losses."""


def ours(options: Namespace) -> dict[str, Any] | None:
    """On every rank: the steps with pmm3d.nn. Rank 0 returns {"seconds", "loss", ...}."""
    from mpi4py import MPI

    from pmm3d import DistMatrix, Grid, nn
    from pmm3d.layout import batch_layout, parse_shape
    from pmm3d.nn import optim
    from pmm3d.nn.training.step import train_step
    from pmm3d.tools.bench import measure as bench

    comm, shape = MPI.COMM_WORLD, parse_shape(options.ours)
    with Grid(comm, shape[:3], data=comm.size // shape.size) as grid:
        net = nn.MLP(grid, [options.width] * (options.layers + 1), nn.relu, bias=False, seed=0, dtype="float32")
        for index, parameter in enumerate(net.parameters()):
            parameter.assign(DistMatrix.from_global(grid, weights(index, options.width), layout=parameter.layout))
        opt, losses = optim.SGD(net.parameters(), lr=LEARNING_RATE), list[float]()
        inputs, targets = batch_of(options.batch, options.width)
        x = DistMatrix.from_global(grid, inputs, layout=batch_layout("y"))
        y = DistMatrix.from_global(grid, targets, layout=net.output_layout)

        def step() -> None:
            losses.append(train_step(net, opt, nn.mse, [(x, y)])[0])

        side = min(GEMM, 8 * options.width)
        case = bench.Case(side, side, side, dtype="float32")
        before = bench.core_rate(grid, case, case.product)
        for _ in range(options.warm_up):
            step()
        grid.ledger.reset()
        own: list[float] = []
        seconds = [slowest(comm, lambda: own.append(timeit.timeit(step, number=1))) for _ in range(options.steps)]
        shares = shares_of(grid.ledger, sum(own))
        core = max(before, bench.core_rate(grid, case, case.product))
        return (
            None
            if grid.rank
            else {
                "seconds": seconds,
                "loss": losses[:COMPARED][-1],
                "core_gflops": core,
                "shares": shares,
                "kernel": blas_here().kernel,
            }
        )


def bridge(options: Namespace) -> dict[str, Any] | None:
    """On every rank: the steps of a torch model with pmm3d.torch. Rank 0 returns {"seconds", "loss"}."""
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
        loss = mean(grid, losses[:COMPARED][-1].detach()).item()
        return None if grid.rank else {"seconds": seconds[options.warm_up :], "loss": loss}


def shares_of(ledger: Ledger, seconds: float) -> dict[str, float]:
    """Kind of work on this rank -> its share of `seconds`."""
    spent = Counter({"waiting": ledger.total().waited})
    for key, entry in ledger.entries.items():
        spent[key.operation] += entry.computed
    shares = {name: took / seconds for name, took in spent.items() if took}
    return {**shares, REST: 1 - sum(shares.values())}


def blas_environment(kernel: str) -> dict[str, str]:
    """This environment with this OPENBLAS_CORETYPE; "default": without it."""
    base = {name: value for name, value in os.environ.items() if name != KERNEL}
    return base if kernel == "default" else base | {KERNEL: kernel}


def kernels() -> list[str]:
    """Settings of OpenBLAS: the best for this CPU, and OpenBLAS's own choice if it differs."""
    better = machine.better_kernel(machine.cpu())
    ask = "from pmm3d.arrays.blas_choice import blas_here; print(blas_here().kernel)"
    chosen = output_of([sys.executable, "-c", ask], blas_environment("default")).strip()
    return [better, "default"] if better and better.lower() != chosen.lower() else ["default"]


def run(
    ranks: int,
    side: str,
    shape: str,
    sizes: Mapping[str, Any],
    environ: Mapping[str, str],
    python: str = sys.executable,
) -> Result:
    """Result of `ours` or `bridge` in a job of this number of ranks."""
    words = [word for name, size in sizes.items() for word in (f"--{name.replace('_', '-')}", str(size))]
    return json.loads(on_ranks(ranks, [__file__, f"--{side}", shape, *words], environ, python).splitlines()[-1])


def contestants(options: Namespace) -> dict[str, Callable[[], Result]]:
    """Name -> function that runs the contestant once and returns {"seconds", "loss", ...}."""
    sizes = {name: getattr(options, name) for name in SIZES}
    sides = [("", sys.executable), *([(BESIDE, options.beside)] if options.beside else [])]
    everyone = {
        f"{shape}, {kernel}{where}": partial(run, options.ranks, "ours", shape, sizes, blas_environment(kernel), python)
        for kernel in options.kernels or kernels()
        for shape in options.grids
        for where, python in sides
    }
    environ = one_thread()
    everyone |= {
        BRIDGE + shape: partial(run, options.ranks, "bridge", shape, sizes, environ) for shape in options.bridges
    }
    task = {**sizes, "lr": LEARNING_RATE}
    return everyone | {rival: partial(torch_rivals.run, rival, task) for rival in options.rivals}


def steps(found: dict[str, Any], options: Namespace) -> list[list[str]]:
    """Medians over the rounds: milliseconds, share of the limit, rate of one core, and rival's time / time of pmm3d."""
    runs = found["runs"]
    rivals = [rival for rival in options.rivals if rival in runs]
    flop = (6 * options.layers - 2) * options.batch * options.width**2
    rows = [["", "ms (min to max)", "of the limit", "core GFLOP/s", *(f"{rival} / this" for rival in rivals)]]
    for name, results in runs.items():
        milliseconds, *ratios = beside(name, runs, rivals)
        of_torch = name in rivals or name.startswith(BRIDGE)
        rates = found["torch_gflops"] if of_torch else [result["core_gflops"] for result in results]
        processes = CORES if name in rivals else options.ranks
        of_limit = median(
            flop / (processes * rate * 1e9) / median(result["seconds"]) for rate, result in zip(rates, results)
        )
        label = f"torch {name}" if name in rivals else name if of_torch else f"{name} ({results[0]['kernel']})"
        rows.append([label, milliseconds, f"{of_limit:.3f}", f"{median(rates):.0f}", *ratios])
    return rows


def versions(found: dict[str, Any]) -> list[list[str]]:
    """Time of a step by this version / by the other one, for each round: median, minimum and maximum."""
    rows = [["", "here / beside", "rounds"]]
    for name, runs in found["runs"].items():
        if others := found["runs"].get(name + BESIDE):
            each = [median(run["seconds"]) / median(other["seconds"]) for run, other in zip(runs, others)]
            rows.append([name, f"{median(each):.3f}", f"{min(each):.3f} to {max(each):.3f}"])
    return rows


def whereabouts(found: dict[str, Any]) -> list[list[str]]:
    """Parts of a step of pmm3d in percent, medians over the rounds."""
    ours = {name: [run["shares"] for run in runs] for name, runs in found["runs"].items() if "shares" in runs[0]}
    kinds = list(dict.fromkeys(kind for runs in ours.values() for run in runs for kind in run if kind != REST))
    return [
        ["% of a step", *kinds, REST],
        *(
            [name, *(f"{100 * median(run.get(kind, 0) for run in runs):.1f}" for kind in (*kinds, REST))]
            for name, runs in ours.items()
        ),
    ]


def differing(runs: Mapping[str, list[Result]]) -> list[str]:
    """Contestants whose loss differs from that of the first."""
    losses = {name: results[-1]["loss"] for name, results in runs.items()}
    first = next(iter(losses.values()), 0.0)
    return [name for name, loss in losses.items() if not abs(loss - first) <= TOLERANCE * abs(first)]


def main() -> int:
    made = parser(__doc__)
    made.add_argument("--rounds", type=int, default=5, help="rounds over all contestants (5)")
    made.add_argument("--steps", type=int, default=5, help="timed steps of each contestant in a round (5)")
    made.add_argument("--warm-up", type=int, default=8, help="steps before the timed ones (8)")
    made.add_argument(
        "--grids",
        nargs="*",
        default=GRIDS,
        metavar="G",
        help=f"grids GxxGyxGz of pmm3d.nn; the other ranks are along data ({' '.join(GRIDS)})",
    )
    made.add_argument("--bridges", nargs="*", default=(), metavar="G", help="grids of pmm3d.torch (none)")
    made.add_argument(
        "--rivals",
        nargs="*",
        default=RIVALS,
        choices=(*RIVALS, "plain"),
        metavar="R",
        help=", ".join((*RIVALS, "plain")),
    )
    made.add_argument(
        "--kernels",
        nargs="+",
        metavar="K",
        help="values of OPENBLAS_CORETYPE for pmm3d.nn, such as SkylakeX; default: not set",
    )
    made.add_argument("--ranks", type=int, default=CORES, choices=range(1, CORES + 1), help="ranks of pmm3d (2)")
    made.add_argument("--layers", type=int, default=8, help="linear layers (8)")
    made.add_argument("--width", type=int, default=2048, help="inputs and outputs of each (2048)")
    made.add_argument("--batch", type=int, default=1024, help="rows, over all ranks (1024)")
    made.add_argument("--beside", metavar="PYTHON", help="Python of an environment with another version of pmm3d")
    made.add_argument("--ours", metavar="GRID", help="internal, on every rank: pmm3d.nn on that grid, as JSON")
    made.add_argument("--bridge", metavar="GRID", help="internal, on every rank: pmm3d.torch on that grid, as JSON")
    options = made.parse_args()
    if options.ours or options.bridge:
        if answer := (ours if options.ours else bridge)(options):
            print(json.dumps(answer))
        return 0
    if options.quick:
        vars(options).update(QUICK)
    torch_gflops: list[float] = []

    def gemm_of_torch(runs: Mapping[str, Any]) -> None:
        if options.bridges or {*options.rivals} & {*runs}:
            torch_gflops.append(torch_rivals.gemm_gflops())

    runs, failed = interleaved(contestants(options), options.rounds, gemm_of_torch)
    found = {"runs": runs, "torch_gflops": torch_gflops}
    title = (
        f"{options.layers} layers, width {options.width}, batch {options.batch}, float32, {options.ranks} ranks; "
        f"medians of {options.rounds} rounds of {options.steps} steps"
    )
    report(
        options,
        (title, steps(found, options)),
        ("Parts of a step", whereabouts(found)),
        *([("This version and the other one", versions(found))] if options.beside else []),
    )
    if different := differing(runs):
        print(f"the losses differ: {', '.join(different)}", file=sys.stderr)
    return 1 if different or failed or not runs else 0


if __name__ == "__main__":
    sys.exit(main())
