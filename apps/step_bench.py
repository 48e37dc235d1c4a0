"""One training step on two cores: pmm3d on several grids beside PyTorch, and beside the GEMM of one core.

    python apps/step_bench.py                        (or: --rounds 5 --steps 5 --json runs/step.json)
    python -m pmm3d.launcher -n 2 apps/step_bench.py --ours 2x1x1         our side alone

The network, its weights and the batch are those of apps/torch_rivals.py, and so must be the loss. Rounds over all that
is compared are interleaved, each in another order; a ratio is taken within a round, and the median over the rounds is
printed. Ours is run with the kernel of OpenBLAS that suits this CPU (OPENBLAS_CORETYPE) and, if that is another, with
the one that it chooses itself; --kernels names others.

limit = the step's GEMMs at the rate of a 2048 cubed GEMM of the same BLAS on one core, times two cores: the better of
two medians, taken in the same process before and after the steps (torch: in a process of its own, each round).
6 m n k operations a layer, 4 in the first, whose input needs no gradient.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

import torch_rivals
from torch_rivals import LEARNING_RATE, RIVALS, RivalError, batch_of, check_losses, weights

from pmm3d.comm.hosts import mpi_name
from pmm3d.model import machine
from pmm3d.tools import launcher

RANKS = 2
GRIDS = ("1x1x1", "2x1x1", "1x2x1", "1x1x2")
KERNEL = "OPENBLAS_CORETYPE"
SIZES = ("layers", "width", "batch", "steps", "warm_up", "seed")


def ours(options: argparse.Namespace) -> None:
    """On every rank: the same network and steps with pmm3d. Rank 0 prints {"seconds", "final_loss", ...}."""
    from mpi4py import MPI

    from pmm3d import DistMatrix, Grid, nn
    from pmm3d.layout import batch_layout
    from pmm3d.nn import optim
    from pmm3d.tools.bench import measure as bench

    comm = MPI.COMM_WORLD
    with Grid(comm, options.ours, data=data_of(options.ours, comm.size)) as grid:
        net = nn.MLP(grid, [options.width] * (options.layers + 1), activation=nn.relu, bias=False, seed=options.seed,
                     dtype="float32")
        for index, parameter in enumerate(net.parameters()):
            array = weights(index, options.width, options.seed)
            parameter.assign(DistMatrix.from_global(grid, array, layout=parameter.layout))
        opt = optim.SGD(net.parameters(), lr=options.lr)
        inputs, targets = batch_of(options.batch, options.width, options.seed)
        x = DistMatrix.from_global(grid, inputs, layout=batch_layout("y"))
        y = DistMatrix.from_global(grid, targets, layout=net.output_layout)
        case = bench.Case(2048, 2048, 2048, dtype="float32")
        core = [bench.core_rate(grid, case, (case.m, case.n, case.k))]
        seconds = []
        for _ in range(options.warm_up + options.steps):
            comm.Barrier()
            begun = time.perf_counter()
            loss = nn.mse(net(x), y)
            loss.backward()
            opt.step()
            seconds.append(max(comm.allgather(time.perf_counter() - begun)))
        found = {"seconds": seconds[options.warm_up:], "final_loss": loss.item()}
        core.append(bench.core_rate(grid, case, (case.m, case.n, case.k)))
        found["core_gflops"] = max(core)
        if grid.rank == 0:
            blas = machine.loaded_blas()
            print(json.dumps(found | {"kernel": blas.kernel, "mpi": mpi_name(), "grid": str(grid.shape)}))


def data_of(shape: str, ranks: int) -> int:
    """The data axis takes the ranks that a shape leaves."""
    x, y, z = map(int, shape.split("x"))
    return ranks // (x * y * z)


def blas_environment(kernel: str) -> dict[str, str]:
    """This environment with that OPENBLAS_CORETYPE; "default": without."""
    base = {name: value for name, value in os.environ.items() if name != KERNEL}
    return base if kernel == "default" else base | {KERNEL: kernel}


def kernels() -> list[str]:
    """The settings of OpenBLAS to try: the best for this CPU, and its own choice if that is another."""
    better = machine.better_kernel(machine.cpu())
    ask = "import scipy.linalg.blas; from pmm3d.model import machine; print(machine.loaded_blas().kernel)"
    chosen = subprocess.check_output([sys.executable, "-c", ask], env=blas_environment("default"), text=True).strip()
    return [better, "default"] if better and better.lower() != chosen.lower() else ["default"]


def pmm3d_step_times(shape: str, kernel: str, options: argparse.Namespace) -> dict:
    """What `ours` prints, of a run on a grid with a kernel of OpenBLAS."""
    program = [__file__, "--ours", shape, "--lr", str(options.lr)]
    for name in SIZES:
        program += [f"--{name.replace('_', '-')}", str(getattr(options, name))]
    environment = launcher.environment(RANKS, blas_environment(kernel))
    done = subprocess.run(launcher.command(RANKS, program), env=environment, capture_output=True, text=True)
    if done.returncode:
        last = (done.stdout + done.stderr).strip().splitlines()[-6:]
        raise RivalError(f"ended with status {done.returncode}: " + " | ".join(last))
    return json.loads(done.stdout.splitlines()[-1])


def contestants(options: argparse.Namespace) -> dict:
    """Name -> what runs it once and returns {"seconds", "final_loss", ...}."""
    found = {}
    for kernel in options.kernels or kernels():
        for shape in options.grids:
            found[f"{shape}, {kernel}"] = lambda shape=shape, kernel=kernel: pmm3d_step_times(shape, kernel, options)
    sizes = {name: getattr(options, name) for name in SIZES}
    for rival in options.rivals:
        found[rival] = lambda rival=rival: torch_rivals.run(rival, **sizes, lr=options.lr)
    return found


def interleaved(options: argparse.Namespace) -> dict:
    """{"runs": name -> one result per round, "torch_gflops": [...], "failed": name -> why}."""
    everyone, runs, failed, torch_gflops = contestants(options), {}, {}, []
    for turn in range(options.rounds):
        names = [name for name in everyone if name not in failed]
        for name in names[turn % len(names):] + names[:turn % len(names)]:
            try:
                result = everyone[name]()
            except RivalError as reason:
                failed[name] = str(reason)
                print(f"{name} could not run: {reason}", file=sys.stderr)
                continue
            runs.setdefault(name, []).append(result)
            progress = f"round {turn + 1} of {options.rounds}: {name:20} {1e3 * median(result['seconds']):7.1f} ms"
            print(progress, file=sys.stderr, flush=True)
        if any(rival in runs for rival in options.rivals):
            torch_gflops.append(torch_rivals.gemm_gflops())
        if len(failed) == len(everyone):
            break
    return {"runs": {name: found for name, found in runs.items() if name not in failed}, "failed": failed,
            "torch_gflops": torch_gflops}


def step_flop(options: argparse.Namespace) -> int:
    return (6 * options.layers - 2) * options.batch * options.width**2


def figures(name: str, found: dict, options: argparse.Namespace) -> dict:
    """Of one of ours: milliseconds, share of the limit, and rival's time / our time, as medians over the rounds."""
    times = [median(run["seconds"]) for run in found["runs"][name]]
    limits = [step_flop(options) / (RANKS * run["core_gflops"] * 1e9) for run in found["runs"][name]]
    ratios = {}
    for rival in options.rivals:
        if rival in found["runs"]:
            theirs = [median(run["seconds"]) for run in found["runs"][rival]]
            ratios[rival] = median(their / our for their, our in zip(theirs, times))
    return {"ms": 1e3 * median(times), "min": 1e3 * min(times), "max": 1e3 * max(times),
            "of_limit": median(limit / our for limit, our in zip(limits, times)), "ratios": ratios,
            "core_gflops": median(run["core_gflops"] for run in found["runs"][name])}


def table(found: dict, options: argparse.Namespace) -> list[str]:
    """Lines of markdown."""
    rivals = [rival for rival in options.rivals if rival in found["runs"]]
    lines = [f"{options.layers} layers, width {options.width}, batch {options.batch}, float32, {RANKS} ranks; medians "
             f"of {options.rounds} rounds of {options.steps} steps. rival / ours above 1: ours is faster.", "",
             "| | ms (min to max) | of the limit | core GFLOP/s |" + "".join(f" {rival} / ours |" for rival in rivals),
             "|---" * (4 + len(rivals)) + "|"]
    for name, runs in found["runs"].items():
        if name in rivals:
            times = [1e3 * median(run["seconds"]) for run in runs]
            cells = [f"torch {name}", f"{median(times):.0f} ({min(times):.0f} to {max(times):.0f})",
                     f"{step_flop(options) / RANKS / 1e6 / median(found['torch_gflops']) / median(times):.3f}",
                     f"{median(found['torch_gflops']):.0f}"] + [""] * len(rivals)
        else:
            mine = figures(name, found, options)
            cells = [f"{name} ({runs[0]['kernel']})", f"{mine['ms']:.0f} ({mine['min']:.0f} to {mine['max']:.0f})",
                     f"{mine['of_limit']:.3f}", f"{mine['core_gflops']:.0f}"]
            cells += [f"{mine['ratios'][rival]:.3f}" for rival in rivals]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="rounds over everyone (5)")
    parser.add_argument("--steps", type=int, default=5, help="timed steps of each in a round (5)")
    parser.add_argument("--warm-up", type=int, default=2, help="steps before them (2)")
    parser.add_argument("--grids", nargs="+", default=GRIDS, metavar="G",
                        help=f"grids GxxGyxGz; data takes the ranks left over ({' '.join(GRIDS)})")
    parser.add_argument("--rivals", nargs="*", default=RIVALS, choices=RIVALS, metavar="R", help=", ".join(RIVALS))
    parser.add_argument("--kernels", nargs="+", metavar="K",
                        help="values of OPENBLAS_CORETYPE for ours, as SkylakeX or Haswell; default: not set")
    parser.add_argument("--layers", type=int, default=8, help="linear layers (8)")
    parser.add_argument("--width", type=int, default=2048, help="inputs and outputs of each (2048)")
    parser.add_argument("--batch", type=int, default=1024, help="rows, over all ranks (1024)")
    parser.add_argument("--lr", type=float, default=LEARNING_RATE, help=f"learning rate ({LEARNING_RATE:g})")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all that was measured")
    parser.add_argument("--ours", metavar="GRID", help="on every rank of a job: our side on that grid, as JSON")
    return parser.parse_args()


def main() -> int:
    options = parse()
    if options.ours:
        ours(options)
        return 0
    found = interleaved(options)
    losses = {name: runs[-1]["final_loss"] for name, runs in found["runs"].items()}
    problem = check_losses(losses) if losses else "nothing could be measured"
    if losses:
        print("\n".join(table(found, options)))
        print(f"\nloss of the last step: {'; '.join(f'{name} {loss:.7f}' for name, loss in losses.items())}")
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        summary = {name: figures(name, found, options) for name in found["runs"] if name not in options.rivals}
        settings = {name: getattr(options, name) for name in (*SIZES, "rounds", "lr")}
        options.json.write_text(json.dumps({"settings": settings, "cpu": machine.cpu().name, "ours": summary, **found}))
    if problem:
        print(problem, file=sys.stderr)
    return 1 if problem or found["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
