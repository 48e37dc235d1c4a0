"""A step of a mixture of experts: pmm3d compared with a plain implementation in torch on gloo, in turns.

    python benchmarks/experts.py                                        (1 and 2 ranks, two passes)
    python benchmarks/experts.py --ranks 2 --hidden 512 --rounds 9

One layer: router (softmax, the k largest, normalized), experts of two matrices with GELU between them, without
capacity. A step is the forward pass, the mean squared error and the backward pass, also for the input, without an
optimizer. Each rank has its tokens, and 1/P of the experts. Weights and batch are equal, and so must be loss and
gradients. float32, one thread per rank. In each round every contestant takes some steps, and the order changes. A pass
is a separate job.

    pmm3d   `nn.MoE` on data = expert = P, with arrays of each library
    torch   the tokens sorted by expert, one all-to-all of counts and one of rows (torch.distributed.all_to_all_single),
            the rows of each expert brought together, a loop of GEMMs over the experts, the way back, and an all-reduce
            of the router's gradient. On one rank nothing is exchanged
    GEMMs   only the GEMMs of the experts of one rank, by torch.mm into existing arrays, for even routing. This is a
            lower bound for a step

ms              milliseconds of a step on the slowest rank: median over the rounds of all passes
ratio           time / torch's time, the median of the ratios within a round, and of each pass
of GEMMs        time of the GEMMs / time of the step, the median of the ratios within a round

The second table contains the bytes that a rank receives along the axis "expert" in a step, as the ledger counts, beside
the count of this routing, 16 h bytes for each pair of a token and an expert on another rank, and beside the formula for
even routing, 16 k T h (P - 1) / P with T tokens on a rank.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from argparse import Namespace
from contextlib import ExitStack
from statistics import median
from typing import Any

import numpy as np
from mpi4py import MPI
from records import parser, report
from timing import all_rounds, on_ranks, one_thread, slowest
from torch_rivals import keep_to_cores

from pmm3d import DistMatrix, Grid, nn
from pmm3d.layout import Layout, batch_layout
from pmm3d.text import counted

LIBRARIES, TORCH, LIMIT = ("torch", "numpy"), "torch", "GEMMs"
SIZES = ("tokens", "experts", "top_k", "widening", "rounds", "steps")
QUICK = {"ranks": [1, 2], "hidden": [16], "tokens": 32, "passes": 1, "rounds": 1, "steps": 1}
TOLERANCE = 1e-4
"""Largest relative difference of losses and of norms of gradients."""
Result = dict[str, Any]


def weights(sizes: Namespace, hidden: int) -> dict[str, np.ndarray]:
    """Name -> weight (inputs, outputs): normal numbers / sqrt(inputs)."""
    inner = sizes.widening * hidden
    shapes = {"router.weight": (hidden, sizes.experts)}
    for expert in range(sizes.experts):
        shapes |= {f"experts.{expert}.up.weight": (hidden, inner), f"experts.{expert}.down.weight": (inner, hidden)}
    return {
        name: np.random.default_rng([0, number]).standard_normal(shape, np.float32) / np.float32(np.sqrt(shape[0]))
        for number, (name, shape) in enumerate(shapes.items())
    }


def batch(sizes: Namespace, hidden: int, ranks: int) -> tuple[np.ndarray, np.ndarray]:
    """Inputs and targets of the tokens of all ranks: normal numbers."""
    source = np.random.default_rng(1)
    return tuple(source.standard_normal((ranks * sizes.tokens, hidden), np.float32) for _ in range(2))  # type: ignore


class Ours:
    """A function that makes a step of pmm3d, and returns the loss."""

    def __init__(self, library: str, sizes: Namespace, hidden: int, grid: Grid):
        self.grid, self._library = grid, library
        inner = sizes.widening * hidden
        self._net = nn.MoE(
            grid, hidden, inner, sizes.experts, sizes.top_k, activation="gelu", library=library, dtype="float32"
        )
        whole = weights(sizes, hidden)
        for name, parameter in self._net.named_parameters().items():
            parameter.assign(self._spread(whole[name], parameter.layout))
        self._parameters, self._router = self._net.parameters(), self._net.named_parameters()["router.weight"]
        self._batch = [self._spread(each, batch_layout("y")) for each in batch(sizes, hidden, grid.size)]

    def _spread(self, whole: np.ndarray, layout: Layout) -> DistMatrix:
        library = self.grid.library(self._library)
        return DistMatrix.from_global(self.grid, library.from_numpy(whole, "float32"), layout=layout)

    def __call__(self) -> float:
        inputs, targets = self._batch
        self._x = nn.Tensor(inputs, requires_grad=True)
        for parameter in self._parameters:
            parameter.grad = None
        loss = nn.mse(self._net(self._x), targets)
        loss.backward()
        for parameter in self._parameters:
            assert parameter.grad is not None  # waits for the sums over the ranks
        return loss.item()

    def figures(self) -> list[float]:
        """Loss of a step, and norms of the gradients of router and input."""
        return [self(), *(each.grad.norm() for each in (self._router, self._x))]  # type: ignore[union-attr]

    def received(self) -> float:
        """Bytes that a rank receives along "expert" in a step: mean of the ranks."""
        self.grid.ledger.reset()
        self()
        return self.grid.comm.allreduce(self.grid.ledger.total(axis="expert").received) / self.grid.size


def exchange_of(torch: Any) -> Any:
    """The all-to-all of rows, whose gradient is the all-to-all back."""

    class Exchange(torch.autograd.Function):
        @staticmethod
        def forward(context: Any, rows: Any, sent: list[int], arrived: list[int]) -> Any:
            context.counts = sent, arrived
            return Exchange.moved(rows, sent, arrived)

        @staticmethod
        def backward(context: Any, gradient: Any) -> Any:
            sent, arrived = context.counts
            return Exchange.moved(gradient.contiguous(), arrived, sent), None, None

        @staticmethod
        def moved(rows: Any, sent: list[int], arrived: list[int]) -> Any:
            found = rows.new_empty(sum(arrived), rows.shape[1])
            torch.distributed.all_to_all_single(found, rows, arrived, sent)
            return found

    return Exchange.apply


class Torch:
    """A function that makes a step of torch, and returns the loss. Expert e is on rank e % P."""

    def __init__(self, sizes: Namespace, hidden: int, comm: MPI.Intracomm):
        import torch

        self._torch, self._comm, self._top_k, self._experts = torch, comm, sizes.top_k, sizes.experts
        whole = weights(sizes, hidden)
        leaf = lambda name: torch.from_numpy(whole[name]).requires_grad_()
        self._router = leaf("router.weight")
        own = range(comm.rank, sizes.experts, comm.size)
        self._own = [(leaf(f"experts.{expert}.up.weight"), leaf(f"experts.{expert}.down.weight")) for expert in own]
        self._parts = [torch.from_numpy(each).chunk(comm.size)[comm.rank] for each in batch(sizes, hidden, comm.size)]
        self._exchange = exchange_of(torch)
        self.elsewhere = 0
        """Pairs of a token here and an expert on another rank, in the last step."""

    def _layer(self, x: Any) -> Any:
        torch, ranks, k = self._torch, self._comm.size, self._top_k
        gates, chosen = torch.softmax(x @ self._router, 1).topk(k, sorted=False)
        gates = gates / gates.sum(1, keepdim=True)
        place = (chosen % ranks * len(self._own) + chosen // ranks).flatten()  # owners first, then their experts
        order = place.argsort(stable=True)
        counts = place.bincount(minlength=self._experts)
        rows, tokens = x[order // k], order // k
        if ranks > 1:
            arrived = torch.empty_like(counts)
            torch.distributed.all_to_all_single(arrived, counts)
            sent, got = (each.view(ranks, -1).sum(1).tolist() for each in (counts, arrived))
            self.elsewhere = sum(sent) - sent[self._comm.rank]
            expert = torch.arange(self._experts) % len(self._own)
            together = expert.repeat_interleave(arrived).argsort(stable=True)
            of_each = arrived.view(ranks, -1).sum(0).tolist()
            results = self._experts_on(self._exchange(rows, sent, got)[together], of_each)
            apart = torch.empty_like(together)
            apart[together] = torch.arange(len(together))
            results = self._exchange(results[apart], got, sent)
        else:
            results = self._experts_on(rows, counts.tolist())
        return torch.zeros_like(x).index_add(0, tokens, results * gates.flatten()[order, None])

    def _experts_on(self, rows: Any, counts: list[int]) -> Any:
        gelu = self._torch.nn.functional.gelu
        return self._torch.cat([gelu(part @ up) @ down for part, (up, down) in zip(rows.split(counts), self._own)])

    def __call__(self) -> float:
        torch, (inputs, targets) = self._torch, self._parts
        for each in (self._router, *(weight for both in self._own for weight in both)):
            each.grad = None
        self._x = inputs.detach().requires_grad_()
        loss = torch.nn.functional.mse_loss(self._layer(self._x), targets) / self._comm.size
        loss.backward()
        found = loss.detach()
        if self._comm.size > 1:
            torch.distributed.all_reduce(self._router.grad)
            torch.distributed.all_reduce(found)
        return float(found)

    def figures(self) -> list[float]:
        """Loss of a step, and norms of the gradients of router and input."""
        loss, square = self(), float((self._x.grad**2).sum())
        return [loss, float(self._router.grad.norm()), self._comm.allreduce(square) ** 0.5]


class Limit:
    """Only the GEMMs of the experts of one rank, for even routing."""

    def __init__(self, sizes: Namespace, hidden: int, ranks: int):
        import torch

        rows, inner = max(1, sizes.tokens * sizes.top_k * ranks // sizes.experts), sizes.widening * hidden
        self._torch, self._times, rand = torch, sizes.experts // ranks, torch.rand
        shapes = ((rows, hidden, inner), (rows, inner, hidden))
        self._weights = [[(rand(k, n), rand(k, n)) for _, k, n in shapes] for _ in range(self._times)]
        self._arrays = [(rand(m, k), rand(m, n), rand(m, k)) for m, k, n in shapes]

    def __call__(self) -> float:
        for both in self._weights:
            for (weight, gradient), (rows, result, slope) in zip(both, self._arrays):
                self._torch.mm(rows, weight, out=result)
                self._torch.mm(result, weight.T, out=slope)
                self._torch.mm(rows.T, result, out=gradient)
        return 0.0

    def figures(self) -> list[float]:
        return [self()]


def measured(options: Namespace) -> dict[str, Result]:
    """On every rank: run the rounds of all contestants. Return name -> {"figures", "seconds"}, and "bytes"."""
    import torch

    comm, (hidden,) = MPI.COMM_WORLD, options.hidden
    torch.set_num_threads(1)
    keep_to_cores(comm.rank, 1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    with tempfile.TemporaryDirectory() as folder, ExitStack() as grids:
        torch.distributed.init_process_group(
            "gloo", init_method=f"file://{comm.bcast(folder)}/gloo", rank=comm.rank, world_size=comm.size
        )
        everyone: dict[str, Ours | Torch | Limit] = {}
        for library in options.libraries:
            grid = grids.enter_context(Grid(comm, (1, 1, 1), comm.size, expert=comm.size, library=library))
            everyone[f"pmm3d, {library} arrays"] = ours = Ours(library, options, hidden, grid)
        everyone |= {TORCH: (theirs := Torch(options, hidden, comm)), LIMIT: Limit(options, hidden, comm.size)}
        figures = {name: step.figures() for name, step in everyone.items()}
        elsewhere = comm.allreduce(theirs.elsewhere) / comm.size
        sizes = {"received": ours.received(), "elsewhere": 16 * hidden * elsewhere}
        seconds = all_rounds(everyone, lambda name: slowest(comm, everyone[name], options.steps), options.rounds)
        torch.distributed.destroy_process_group()
        comm.Barrier()
    found: dict[str, Result] = {name: {"figures": figures[name], "seconds": seconds[name]} for name in everyone}
    return {**found, "bytes": sizes}


def rows_of(ranks: int, hidden: int, passes: list[dict[str, Result]]) -> list[list[str]]:
    """The rows of the table of times of one job."""
    rows = []
    seconds = lambda name: [each[name]["seconds"] for each in passes]
    divided = lambda one, other: [[a / b for a, b in zip(*pair)] for pair in zip(seconds(one), seconds(other))]
    for name in (each for each in passes[0] if each != "bytes"):
        ratios = divided(name, TORCH)
        rows.append(
            [
                str(ranks),
                str(hidden),
                name,
                f"{1e3 * median(sum(seconds(name), [])):.1f}",
                f"{median(sum(ratios, [])):.3f} ({', '.join(f'{median(one):.3f}' for one in ratios)})",
                f"{median(sum(divided(LIMIT, name), [])):.3f}",
            ]
        )
    return rows


def bytes_of(ranks: int, hidden: int, sizes: Namespace, found: Result) -> list[str]:
    """The row of the table of bytes of one job."""
    formula = 16 * sizes.top_k * sizes.tokens * hidden * (ranks - 1) / ranks
    return [str(ranks), str(hidden), *(f"{nbytes / 1e6:.3f}" for nbytes in (*found.values(), formula))]


def differing(jobs: dict[tuple[int, int], list[dict[str, Result]]]) -> list[str]:
    """Contestants whose loss or gradients differ from those of the first."""
    found = []
    for (ranks, hidden), passes in jobs.items():
        first, *others = [(name, each["figures"]) for one in passes for name, each in one.items() if "figures" in each]
        found += [
            f"{name} on {counted(ranks, 'rank')}, hidden {hidden}: {figures} in place of {first[1]}"
            for name, figures in others
            if name != LIMIT and not np.allclose(figures, first[1], rtol=TOLERANCE, atol=0)
        ]
    return found


def main() -> int:
    made = parser(__doc__)
    made.add_argument("--ranks", nargs="+", type=int, default=[1, 2], metavar="N", help="numbers of ranks (1 2)")
    made.add_argument("--hidden", nargs="+", type=int, default=[256, 512], metavar="H", help="features (256 512)")
    made.add_argument(
        "--libraries",
        nargs="+",
        choices=LIBRARIES,
        default=LIBRARIES,
        metavar="NAME",
        help=f"array libraries of pmm3d ({' '.join(LIBRARIES)})",
    )
    made.add_argument("--tokens", type=int, default=2048, help="tokens of each rank (2048)")
    made.add_argument("--experts", type=int, default=8, help="experts, a multiple of the ranks (8)")
    made.add_argument("--top-k", type=int, default=2, help="experts of a token (2)")
    made.add_argument(
        "--widening", type=int, default=4, help="columns between the matrices of an expert / features (4)"
    )
    made.add_argument("--passes", type=int, default=2, help="jobs of each kind, one after the other (2)")
    made.add_argument("--rounds", type=int, default=5, help="rounds over all contestants in a pass (5)")
    made.add_argument("--steps", type=int, default=2, help="timed steps of each contestant in a round (2)")
    made.add_argument("--here", action="store_true", help="internal, on every rank: one pass, as JSON")
    options = made.parse_args()
    if options.here:
        found = measured(options)
        if MPI.COMM_WORLD.rank == 0:
            print(json.dumps(found), flush=True)
        return 0
    if options.quick:
        vars(options).update(QUICK)
    if uneven := [ranks for ranks in options.ranks if options.experts % ranks]:
        made.error(f"--experts {options.experts} is no multiple of {counted(uneven[0], 'rank')}")
    words = [word for name in SIZES for word in (f"--{name.replace('_', '-')}", str(getattr(options, name)))]
    environ = one_thread()
    jobs: dict[tuple[int, int], list[dict[str, Result]]] = {
        (ranks, hidden): [] for hidden in options.hidden for ranks in options.ranks
    }
    for turn in range(options.passes):
        for (ranks, hidden), passes in jobs.items():
            command = [__file__, "--here", *words, "--hidden", str(hidden), "--libraries", *options.libraries]
            passes.append(json.loads(on_ranks(ranks, command, environ).splitlines()[-1]))
            print(
                f"pass {turn + 1} of {options.passes}: {counted(ranks, 'rank')}, hidden {hidden}",
                file=sys.stderr,
                flush=True,
            )
    sizes = (
        f"{options.experts} experts, {options.top_k} of them for each token, {options.tokens} tokens a rank, inner "
        f"{options.widening} h, float32, one thread a rank"
    )
    times = [["ranks", "h", "step", "ms", "ratio (of each pass)", "of GEMMs"]]
    volumes = [["ranks", "h", "received", "of this routing", "of even routing"]]
    for (ranks, hidden), passes in jobs.items():
        times += rows_of(ranks, hidden, passes)
        volumes.append(bytes_of(ranks, hidden, options, passes[0]["bytes"]))
    of_passes = f"{counted(options.passes, 'pass')} of {counted(options.rounds, 'round')} of {options.steps} steps"
    report(
        options, (f"{sizes}; {of_passes}", times), (f"MB that a rank receives along expert in a step: {sizes}", volumes)
    )
    if different := differing(jobs):
        print(f"loss or gradients differ: {'; '.join(different)}", file=sys.stderr)
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
