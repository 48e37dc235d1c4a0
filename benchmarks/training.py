"""One training step on two cores: pmm3d on several grids beside PyTorch, and beside the GEMM of one core.

    python apps/step_bench.py                        (or: --rounds 5 --steps 5)
    python -m pmm3d.launcher -n 2 apps/step_bench.py --ours 2x1x1         our side alone
    python apps/step_bench.py --beside ../before/.venv/bin/python         this version and another one, in turns

The network, its weights and the batch are those of apps/torch_rivals.py, and so must be the loss. Rounds over all that
is compared are interleaved, each in another order; a ratio is taken within a round, and the median over the rounds is
printed. Ours is run with the kernel of OpenBLAS that suits this CPU (OPENBLAS_CORETYPE) and, if that is another, with
the one that it chooses itself; --kernels names others.

limit = the step's GEMMs at the rate of a 2048 cubed GEMM of the same BLAS on one core, times two cores (with --ranks 1
on both at once): the better of two medians, taken in the same process before and after the steps (torch: in a process
of its own, each round).
6 m n k operations a layer, 4 in the first, whose input needs no gradient.

A second table says where the time of our steps goes, on rank 0: what is computed (GEMMs; elementwise functions; the
weights' update), what is waited for, and what is left, which is Python's (and that of posting messages): a small
network shows most of it,

    python apps/step_bench.py --width 512 --batch 256 --grids 2x1x1 1x2x1 1x1x2 --rivals --steps 50

With --ranks 1 ours is one process with a thread of the BLAS for each core: what else it computes runs on them too.

    python apps/step_bench.py --ranks 1 --grids 1x1x1 --rivals threads --beside ../before/.venv/bin/python
"""

import argparse
import json
import os
import sys
import timeit
from collections import Counter
from collections.abc import Callable, Mapping
from statistics import median
from typing import Any

import torch_rivals
from measuring import Result, beside, interleaved, markdown, on_ranks, output_of, slowest
from torch_rivals import GEMM, RIVALS, batch_of, weights

from pmm3d.comm.ledger import Ledger
from pmm3d.model import machine

CORES = 2
GRIDS = ("1x1x1", "2x1x1", "1x2x1", "1x1x2")
KERNEL = "OPENBLAS_CORETYPE"
SIZES = ("layers", "width", "batch", "steps", "warm_up")
BESIDE = ", beside"
REST = "Python, and the rest"
LEARNING_RATE = 10.0
"""Large, since the gradient of a mean over batch x width elements is small; yet three times as much, and one ReLU that
rounding turns from 0 to 1e-8 changes the loss by more than 1e-6 within five steps."""
TOLERANCE = 1e-4
"""Of the losses, relative."""


def ours(options: argparse.Namespace) -> None:
    """On every rank: the same network and steps with pmm3d. Rank 0 prints {"seconds", "final_loss", ...}."""
    from mpi4py import MPI

    from pmm3d import DistMatrix, Grid, nn
    from pmm3d.layout import batch_layout, parse_shape
    from pmm3d.nn import optim
    from pmm3d.tools.bench import measure as bench

    comm, shape = MPI.COMM_WORLD, parse_shape(options.ours)
    with Grid(comm, shape[:3], data=comm.size // shape.size) as grid:
        net = nn.MLP(grid, [options.width] * (options.layers + 1), nn.relu, bias=False, seed=0, dtype="float32")
        for index, parameter in enumerate(net.parameters()):
            parameter.assign(DistMatrix.from_global(grid, weights(index, options.width), layout=parameter.layout))
        opt, losses = optim.SGD(net.parameters(), lr=LEARNING_RATE), []
        inputs, targets = batch_of(options.batch, options.width)
        x = DistMatrix.from_global(grid, inputs, layout=batch_layout("y"))
        y = DistMatrix.from_global(grid, targets, layout=net.output_layout)

        def step() -> None:
            losses.append(nn.mse(net(x), y))
            losses[-1].backward()
            opt.step()

        case = bench.Case(GEMM, GEMM, GEMM, dtype="float32")
        before = bench.core_rate(grid, case, case.product)
        for _ in range(options.warm_up):
            step()
        grid.ledger.reset()
        own: list[float] = []
        seconds = [slowest(comm, lambda: own.append(timeit.timeit(step, number=1))) for _ in range(options.steps)]
        shares = shares_of(grid.ledger, sum(own))
        final_loss = losses[-1].item()
        core = max(before, bench.core_rate(grid, case, case.product))
        if grid.rank == 0:
            print(json.dumps({"seconds": seconds, "final_loss": final_loss, "core_gflops": core, "shares": shares,
                              "kernel": machine.loaded_blas().kernel}))


def shares_of(ledger: Ledger, seconds: float) -> dict[str, float]:
    """What this rank did in so many seconds -> the part of them that it took."""
    spent = Counter({"waiting": ledger.total().waited})
    for key, entry in ledger.entries.items():
        spent[key.operation] += entry.computed
    shares = {name: took / seconds for name, took in spent.items() if took}
    return {**shares, REST: 1 - sum(shares.values())}


def blas_environment(kernel: str) -> dict[str, str]:
    """This environment with that OPENBLAS_CORETYPE; "default": without."""
    base = {name: value for name, value in os.environ.items() if name != KERNEL}
    return base if kernel == "default" else base | {KERNEL: kernel}


def kernels() -> list[str]:
    """The settings of OpenBLAS to try: the best for this CPU, and its own choice if that is another."""
    better = machine.better_kernel(machine.cpu())
    ask = "import scipy.linalg.blas; from pmm3d.model import machine; print(machine.loaded_blas().kernel)"
    chosen = output_of([sys.executable, "-c", ask], blas_environment("default")).strip()
    return [better, "default"] if better and better.lower() != chosen.lower() else ["default"]


def run_ours(ranks: int, shape: str, kernel: str, sizes: dict[str, Any], python: str = sys.executable) -> Result:
    """What `ours` prints, of a run on a grid with a kernel of OpenBLAS."""
    words = [word for name, size in sizes.items() for word in (f"--{name.replace('_', '-')}", str(size))]
    output = on_ranks(ranks, [__file__, "--ours", shape, *words], blas_environment(kernel), python)
    return json.loads(output.splitlines()[-1])


def contestants(options: argparse.Namespace) -> dict[str, Callable[[], Result]]:
    """Name -> what runs it once and returns {"seconds", "final_loss", ...}."""
    sizes = {name: getattr(options, name) for name in SIZES}
    everyone = {f"{shape}, {kernel}{where}":
                lambda shape=shape, kernel=kernel, python=python: run_ours(options.ranks, shape, kernel, sizes, python)
                for kernel in options.kernels or kernels() for shape in options.grids
                for where, python in [("", sys.executable), *([(BESIDE, options.beside)] if options.beside else [])]}
    task = {**sizes, "lr": LEARNING_RATE}
    return everyone | {rival: lambda rival=rival: torch_rivals.run(rival, task) for rival in options.rivals}


def rounds_of(options: argparse.Namespace) -> dict[str, Any]:
    """{"runs": name -> one result per round, "torch_gflops": [...], "failed": name -> why}."""
    torch_gflops: list[float] = []

    def gemm_of_torch(runs: Mapping[str, Any]) -> None:
        if {*options.rivals} & {*runs}:
            torch_gflops.append(torch_rivals.gemm_gflops())

    runs, failed = interleaved(contestants(options), options.rounds, gemm_of_torch)
    return {"runs": runs, "failed": failed, "torch_gflops": torch_gflops}


def row(name: str, found: dict[str, Any], options: argparse.Namespace, rivals: list[str]) -> list[str]:
    """Of one contestant, as medians over the rounds: milliseconds, share of the limit, the core's rate, and, of ours,
    rival's time / our time."""
    results, (milliseconds, *ratios) = found["runs"][name], beside(name, found["runs"], rivals)
    rates = found["torch_gflops"] if name in rivals else [result["core_gflops"] for result in results]
    flop = (6 * options.layers - 2) * options.batch * options.width**2
    processes = CORES if name in rivals else options.ranks  # each at the rate of its own GEMM
    of_limit = median(flop / (processes * rate * 1e9) / median(result["seconds"])
                      for rate, result in zip(rates, results))
    return [f"torch {name}" if name in rivals else f"{name} ({results[0]['kernel']})", milliseconds,
            f"{of_limit:.3f}", f"{median(rates):.0f}", *ratios]


def table(found: dict[str, Any], options: argparse.Namespace) -> str:
    rivals = [rival for rival in options.rivals if rival in found["runs"]]
    heading = ["", "ms (min to max)", "of the limit", "core GFLOP/s", *(f"{rival} / ours" for rival in rivals)]
    rows = [row(name, found, options, rivals) for name in found["runs"]]
    sizes = f"{options.layers} layers, width {options.width}, batch {options.batch}, float32, {options.ranks} ranks"
    return (f"{sizes}; medians of {options.rounds} rounds of {options.steps} steps. rival / ours above 1: ours is "
            f"faster.\n\n{markdown([heading, *rows])}")


def ratios(found: dict[str, Any]) -> str:
    """Time of a step here / there, of each round: the median, and the least and the most."""
    rows = [["", "here / beside", "rounds"]]
    for name, runs in found["runs"].items():
        if others := found["runs"].get(name + BESIDE):
            each = [median(run["seconds"]) / median(other["seconds"]) for run, other in zip(runs, others)]
            rows.append([name, f"{median(each):.3f}", f"{min(each):.3f} to {max(each):.3f}"])
    return markdown(rows)


def whereabouts(found: dict[str, Any]) -> str:
    """The medians over the rounds of what our steps consist of, in percent."""
    ours = {name: [run["shares"] for run in runs] for name, runs in found["runs"].items() if "shares" in runs[0]}
    kinds = list(dict.fromkeys(kind for runs in ours.values() for run in runs for kind in run if kind != REST))
    rows = [[name, *(f"{100 * median(run.get(kind, 0) for run in runs):.1f}" for kind in (*kinds, REST))]
            for name, runs in ours.items()]
    return markdown([["% of a step", *kinds, REST], *rows])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="rounds over everyone (5)")
    parser.add_argument("--steps", type=int, default=5, help="timed steps of each in a round (5)")
    parser.add_argument("--warm-up", type=int, default=2, help="steps before them (2)")
    parser.add_argument("--grids", nargs="*", default=GRIDS, metavar="G",
                        help=f"grids GxxGyxGz; data takes the ranks left over ({' '.join(GRIDS)})")
    parser.add_argument("--rivals", nargs="*", default=RIVALS, choices=RIVALS, metavar="R", help=", ".join(RIVALS))
    parser.add_argument("--kernels", nargs="+", metavar="K",
                        help="values of OPENBLAS_CORETYPE for ours, as SkylakeX or Haswell; default: not set")
    parser.add_argument("--ranks", type=int, default=CORES, choices=range(1, CORES + 1), help="of ours (2)")
    parser.add_argument("--layers", type=int, default=8, help="linear layers (8)")
    parser.add_argument("--width", type=int, default=2048, help="inputs and outputs of each (2048)")
    parser.add_argument("--batch", type=int, default=1024, help="rows, over all ranks (1024)")
    parser.add_argument("--beside", metavar="PYTHON", help="of an environment with another version of pmm3d")
    parser.add_argument("--ours", metavar="GRID", help="on every rank of a job: our side on that grid, as JSON")
    options = parser.parse_args()
    if options.ours:
        ours(options)
        return 0
    found = rounds_of(options)
    losses = {name: results[-1]["final_loss"] for name, results in found["runs"].items()}
    print(table(found, options))
    print("\n" + whereabouts(found))
    if options.beside:
        print("\n" + ratios(found))
    print(f"\nloss of the last step: {'; '.join(f'{name} {loss:.7f}' for name, loss in losses.items())}")
    first = next(iter(losses.values()), 0.0)
    differ = [name for name, loss in losses.items() if not abs(loss - first) <= TOLERANCE * abs(first)]
    if differ:
        print(f"the losses differ: {', '.join(differ)}", file=sys.stderr)
    return 1 if differ or found["failed"] or not losses else 0


if __name__ == "__main__":
    sys.exit(main())
