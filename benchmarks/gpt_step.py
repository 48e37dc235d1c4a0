"""A training step of a GPT: pmm3d compared with torch on gloo, in the same two processes, in turns.

    python benchmarks/gpt_step.py                                                      (2 ranks, two passes)
    python benchmarks/gpt_step.py --only "pmm3d, TP" "torch, TP" --layers 2 --rounds 5

All train the same GPT (float32, torch arrays, plain SGD, an untied head) with the same weights and batch, and one
thread per rank. The losses must be equal. In each round every contestant takes some steps, and the order changes.

    pmm3d, TP            heads and columns over x                 torch, TP            parallelize_module
    pmm3d, TP+SP         activations="sharded"                    torch, TP+SP         the same with SequenceParallel
    pmm3d, FSDP          rows and weights over z                  torch, FSDP2         fully_shard of each block
    torch, two threads   one process on both cores, while the other one sleeps
    GEMMs and kernel     only the computation of one rank of TP: torch.mm into existing arrays, and torch's flash
                         kernel, forward and backward. This is a lower bound for a step

ms                    milliseconds of a step on the slowest rank, with the update: median over the rounds of all
                      passes, and range
of GEMMs and kernel   their time / time of the step, the median of the ratios within a round

The second table compares attention alone, causal, forward and backward, on one rank: `nn.transformer.attention` and
torch's scaled_dot_product_attention with autograd.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable
from statistics import median
from typing import Any

import numpy as np
from mpi4py import MPI
from records import parser, report
from timing import all_rounds, on_ranks, one_thread
from torch_rivals import keep_to_cores

from pmm3d import DistMatrix, Grid, nn
from pmm3d.layout import Layout
from pmm3d.nn import optim
from pmm3d.nn.training.step import train_step
from pmm3d.nn.transformer import attention

SIZES = ("layers", "hidden", "heads", "sequence", "batch", "vocabulary", "steps", "rounds")
QUICK = {
    "layers": 1,
    "hidden": 16,
    "heads": 2,
    "sequence": 8,
    "batch": 2,
    "vocabulary": 8,
    "steps": 1,
    "rounds": 1,
    "passes": 1,
}
OURS = {
    "pmm3d, TP": ((2, 1, 1), "replicated"),
    "pmm3d, TP+SP": ((2, 1, 1), "sharded"),
    "pmm3d, FSDP": ((1, 1, 2), "replicated"),
}
"""Name -> shape of the grid, and activations."""
RIVALS = ("torch, TP", "torch, TP+SP", "torch, FSDP2", "torch, two threads")
LIMIT = "GEMMs and kernel"
ALONE = "attention, pmm3d", "attention, torch"
LEARNING_RATE = 0.1
TOLERANCE = 1e-4
"""Largest relative difference of the losses."""


def weights_of(sizes: Namespace, comm: MPI.Intracomm) -> dict[str, np.ndarray]:
    """Name -> initial weight, the same for every contestant."""
    with Grid(comm, (1, 1, 1), comm.size, library="numpy") as grid:
        net = network(grid, sizes, "replicated", "numpy")
        return {name: each.gather() for name, each in net.named_parameters().items()}


def network(grid: Grid, sizes: Namespace, activations: str, library: str) -> nn.GPT:
    return nn.GPT(
        grid,
        vocabulary=sizes.vocabulary,
        positions=sizes.sequence,
        layers=sizes.layers,
        hidden=sizes.hidden,
        heads=sizes.heads,
        tied=False,
        activations=activations,
        library=library,
        seed=0,
    )


def batch_of(sizes: Namespace) -> tuple[np.ndarray, np.ndarray]:
    """(tokens, labels), each of shape (batch x sequence, 1)."""
    tokens = np.random.default_rng(0).integers(0, sizes.vocabulary, (sizes.batch, sizes.sequence + 1))
    return tokens[:, :-1].reshape(-1, 1), tokens[:, 1:].reshape(-1, 1).copy()


class Ours:
    """A function that makes a step of pmm3d, and returns the loss."""

    def __init__(self, name: str, sizes: Namespace, comm: MPI.Intracomm, weights: dict[str, np.ndarray]):
        import torch

        shape, activations = OURS[name]
        self.grid = Grid(comm, shape, library="torch")
        self._net = network(self.grid, sizes, activations, "torch")
        for path, parameter in self._net.named_parameters().items():
            whole = torch.from_numpy(weights[path])
            parameter.assign(DistMatrix.from_global(self.grid, whole, layout=parameter.layout))
        self._optimizer = optim.SGD(self._net.parameters(), lr=LEARNING_RATE)
        layout = Layout(("data", "z"), units=(sizes.sequence, 1))
        self._batch = tuple(
            DistMatrix.from_global(self.grid, torch.from_numpy(each), layout=layout) for each in batch_of(sizes)
        )

    def __call__(self) -> float:
        return train_step(self._net, self._optimizer, nn.cross_entropy, [self._batch])[0]


def torch_gpt(torch: Any, sizes: Namespace, weights: dict[str, np.ndarray]) -> Any:
    """The same network of torch modules. Queries, keys and values are stored head by head, as in pmm3d."""

    class Block(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            h = sizes.hidden
            self.norm1, self.norm2 = torch.nn.LayerNorm(h), torch.nn.LayerNorm(h)
            self.qkv, self.out = torch.nn.Linear(h, 3 * h), torch.nn.Linear(h, h)
            self.up, self.down = torch.nn.Linear(h, 4 * h), torch.nn.Linear(4 * h, h)

        def forward(self, x: Any) -> Any:
            size = sizes.hidden // sizes.heads
            qkv = self.qkv(self.norm1(x))
            q, k, v = (each.transpose(1, 2) for each in qkv.unflatten(2, (-1, 3, size)).unbind(3))
            found = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.out(found.transpose(1, 2).flatten(2))
            return x + self.down(torch.nn.functional.gelu(self.up(self.norm2(x)), approximate="tanh"))

    class Network(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens = torch.nn.Embedding(sizes.vocabulary, sizes.hidden)
            self.positions = torch.nn.Embedding(sizes.sequence, sizes.hidden)
            self.blocks = torch.nn.ModuleList(Block() for _ in range(sizes.layers))
            self.norm = torch.nn.LayerNorm(sizes.hidden)
            self.head = torch.nn.Linear(sizes.hidden, sizes.vocabulary, bias=False)

        def forward(self, tokens: Any) -> Any:
            x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1]))
            for block in self.blocks:
                x = block(x)
            return self.head(self.norm(x))

    net, names = Network(), {"tokens.weight": "0.table", "positions.weight": "0.positions"}
    last = sizes.layers + 1
    names |= {
        "norm.weight": f"{last}.norm.gain",
        "norm.bias": f"{last}.norm.bias",
        "head.weight": f"{last}.linear.weight",
    }
    for index in range(sizes.layers):
        for part, own in (
            ("norm1", "norm1"),
            ("norm2", "norm2"),
            ("qkv", "attention.qkv"),
            ("out", "attention.out"),
            ("up", "mlp.up"),
            ("down", "mlp.down"),
        ):
            weight = "gain" if "norm" in part else "weight"
            names[f"blocks.{index}.{part}.weight"] = f"{index + 1}.{own}.{weight}"
            names[f"blocks.{index}.{part}.bias"] = f"{index + 1}.{own}.bias"
    for name, parameter in net.named_parameters():
        value = torch.from_numpy(weights[names[name]])
        parameter.data.copy_(value.T.reshape(parameter.shape))  # in pmm3d, weights are (inputs, outputs)
    return net


class Torch:
    """A function that makes a step of torch, and returns the loss."""

    def __init__(self, name: str, sizes: Namespace, comm: MPI.Intracomm, weights: dict[str, np.ndarray]):
        import torch

        self._torch, self._comm, self._alone, self._split = torch, comm, "threads" in name, "FSDP" in name
        self._net, self._parallel_loss = torch_gpt(torch, sizes, weights), "TP" in name
        self._tokens, self._labels = (torch.from_numpy(each).reshape(sizes.batch, -1) for each in batch_of(sizes))
        if self._alone and comm.rank:
            return
        if "TP" in name:
            _tensor_parallel(torch, self._net, comm.size, "SP" in name)
        if self._split:
            from torch.distributed.fsdp import fully_shard

            mesh = torch.distributed.init_device_mesh("cpu", (comm.size,))
            for part in (*self._net.blocks, self._net):
                fully_shard(part, mesh=mesh)
            self._tokens, self._labels = (each.chunk(comm.size)[comm.rank] for each in (self._tokens, self._labels))
        fastest = {"fused": self._alone, "foreach": self._split}  # neither accepts DTensors together with tensors
        self._optimizer = torch.optim.SGD(self._net.parameters(), lr=LEARNING_RATE, **fastest)

    def __call__(self) -> float:
        if self._alone:
            return self._on_rank_0()
        loss = self._step()
        return sum(self._comm.allgather(loss)) / self._comm.size if self._split else loss

    def _on_rank_0(self) -> float:
        loss = 0.0
        if not self._comm.rank:
            os.sched_setaffinity(0, range(os.cpu_count() or 1))
            self._torch.set_num_threads(2)
            loss = self._step()
            self._torch.set_num_threads(1)
            keep_to_cores(0, 1)
        ended = self._comm.Ibarrier()
        while not ended.Test():
            time.sleep(0.001)
        return loss

    def _step(self) -> float:
        from torch.distributed.tensor.parallel import loss_parallel

        self._optimizer.zero_grad()
        logits = self._net(self._tokens)
        entropy = self._torch.nn.functional.cross_entropy
        if self._parallel_loss:
            with loss_parallel():
                loss = entropy(logits.flatten(0, 1), self._labels.flatten())
                loss.backward()
            found = loss.full_tensor() if hasattr(loss, "full_tensor") else loss
        else:
            found = loss = entropy(logits.flatten(0, 1), self._labels.flatten())
            loss.backward()
        self._optimizer.step()
        return found.item()


def _tensor_parallel(torch: Any, net: Any, ranks: int, sharded: bool) -> None:
    """Megatron's plan: columns and rows for each pair of layers. sharded: the sequence is split between the pairs."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

    mesh = torch.distributed.init_device_mesh("cpu", (ranks,))
    between = Shard(1) if sharded else Replicate()
    columns, rows = ColwiseParallel(input_layouts=between), RowwiseParallel(output_layouts=between)
    plan: dict[str, Any] = {
        "tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=between),
        "head": ColwiseParallel(input_layouts=between, output_layouts=Shard(-1), use_local_output=False),
    }
    if sharded:
        plan |= {
            "positions": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(0)),
            "norm": SequenceParallel(),
        }
    parallelize_module(net, mesh, plan)
    for block in net.blocks:
        norms = {"norm1": SequenceParallel(), "norm2": SequenceParallel()} if sharded else {}
        parallelize_module(block, mesh, {"qkv": columns, "up": columns, "out": rows, "down": rows, **norms})


class Limit:
    """Only the GEMMs and the flash kernel of one rank of TP."""

    def __init__(self, name: str, sizes: Namespace, comm: MPI.Intracomm, weights: dict[str, np.ndarray]):
        import torch

        self._torch, self._layers = torch, sizes.layers
        m, h, heads = sizes.batch * sizes.sequence, sizes.hidden, sizes.heads // comm.size
        size = h // sizes.heads
        inner = 4 * h // comm.size
        self._shapes = [(m, h, 3 * heads * size), (m, heads * size, h), (m, h, inner), (m, inner, h)]
        self._arrays = {shape: self._of(shape) for shape in {*self._shapes, (m, h, sizes.vocabulary // comm.size)}}
        self._head = m, h, sizes.vocabulary // comm.size
        self._heads = [torch.rand(sizes.batch, sizes.sequence, heads, size).transpose(1, 2) for _ in range(4)]

    def _of(self, shape: tuple[int, int, int]) -> list[Any]:
        """I, W, O and their gradients."""
        (m, k, n), rand = shape, self._torch.rand
        return [rand(m, k), rand(k, n), rand(m, n), rand(m, k), rand(k, n), rand(m, n)]

    def __call__(self) -> float:
        aten, (q, k, v, slope) = self._torch.ops.aten, self._heads
        kept = []
        for _ in range(self._layers):
            for shape in self._shapes:
                i, w, o, *_ = self._arrays[shape]
                self._torch.mm(i, w, out=o)
            kept.append(aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True))
        self._torch.mm(*self._arrays[self._head][:2], out=self._arrays[self._head][2])
        self._backward(self._head)
        while kept:
            for shape in self._shapes:
                self._backward(shape)
            aten._scaled_dot_product_flash_attention_for_cpu_backward(slope, q, k, v, *kept.pop(), 0.0, True)
        return 0.0

    def _backward(self, shape: tuple[int, int, int]) -> None:
        i, w, _, di, dw, do = self._arrays[shape]
        self._torch.mm(do, w.T, out=di)
        self._torch.mm(i.T, do, out=dw)


class Alone:
    """Attention alone, forward and backward, on a grid of one rank, with half of the heads, as in TP."""

    def __init__(self, name: str, sizes: Namespace, comm: MPI.Intracomm, weights: dict[str, np.ndarray]):
        import torch

        self._torch, self._sizes, self.grid = torch, sizes, Grid(MPI.COMM_SELF, (1, 1, 1), library="torch")
        self._ours, self._size = "pmm3d" in name, sizes.hidden // sizes.heads
        shape = sizes.batch * sizes.sequence, sizes.hidden // comm.size
        self._arrays = [torch.rand(shape) for _ in range(4)]
        layout = Layout("data", units=(sizes.sequence, 1))
        self._matrices = [DistMatrix(self.grid, each, shape, layout) for each in self._arrays]

    def __call__(self) -> float:
        if self._ours:
            tensors = [nn.Tensor(each, requires_grad=True) for each in self._matrices[:3]]
            attention(*tensors, size=self._size).backward(self._matrices[3])
        else:
            leaves = [each.detach().requires_grad_() for each in self._arrays[:3]]
            shape = self._sizes.batch, self._sizes.sequence, -1, self._size
            q, k, v = (each.view(shape).transpose(1, 2) for each in leaves)
            found = self._torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            found.transpose(1, 2).flatten(2).flatten(0, 1).backward(self._arrays[3])
        return 0.0


def contestant(name: str) -> Callable[..., Callable[[], float]]:
    return {LIMIT: Limit, **dict.fromkeys(OURS, Ours), **dict.fromkeys(ALONE, Alone)}.get(name, Torch)


def measured(options: Namespace) -> dict[str, Any]:
    """On every rank: run the rounds of all contestants. Return name -> {"rounds": seconds of each step, "losses"}."""
    import torch

    comm = MPI.COMM_WORLD
    torch.set_num_threads(1)
    keep_to_cores(comm.rank, 1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    losses: dict[str, list[float]] = {name: [] for name in options.only}
    with tempfile.TemporaryDirectory() as folder:
        torch.distributed.init_process_group(
            "gloo", init_method=f"file://{comm.bcast(folder)}/gloo", rank=comm.rank, world_size=comm.size
        )
        weights = weights_of(options, comm)
        everyone = {name: contestant(name)(name, options, comm, weights) for name in options.only}

        def round_of(name: str) -> list[float]:
            seconds = []
            for _ in range(options.steps):
                comm.Barrier()
                begun = time.perf_counter()
                losses[name].append(everyone[name]())
                seconds.append(max(comm.allgather(time.perf_counter() - begun)))
            return seconds

        found = all_rounds(everyone, round_of, options.rounds)
        for each in everyone.values():
            if hasattr(each, "grid"):
                each.grid.close()
        torch.distributed.destroy_process_group()
        comm.Barrier()
    return {name: {"rounds": rounds, "losses": losses[name]} for name, rounds in found.items()}


def rows_of(passes: list[dict[str, Any]], names: list[str], beside: str) -> list[list[str]]:
    """Name, milliseconds and their range, and the time of `beside` / the own time within a round, for each
    contestant."""
    rows = []
    for name in names:
        rounds = [median(turn) for one in passes for turn in one[name]["rounds"]]
        others = [median(turn) for one in passes for turn in one.get(beside, {"rounds": []})["rounds"]]
        ratio = f"{median(other / own for own, other in zip(rounds, others)):.3f}" if others else ""
        rows.append([name, f"{1e3 * median(rounds):.1f} ({1e3 * min(rounds):.1f} to {1e3 * max(rounds):.1f})", ratio])
    return rows


def main() -> int:
    everyone = [*OURS, *RIVALS, LIMIT, *ALONE]
    made = parser(__doc__)
    made.add_argument("--only", nargs="+", choices=everyone, default=everyone, metavar="NAME", help="contestants (all)")
    made.add_argument("--passes", type=int, default=2, help="jobs, one after the other (2)")
    made.add_argument("--rounds", type=int, default=3, help="rounds over all contestants in a pass (3)")
    made.add_argument("--steps", type=int, default=1, help="timed steps of each contestant in a round (1)")
    made.add_argument("--layers", type=int, default=8, help="blocks (8)")
    made.add_argument("--hidden", type=int, default=512, help="features (512)")
    made.add_argument("--heads", type=int, default=8, help="heads of attention (8)")
    made.add_argument("--sequence", type=int, default=512, help="tokens of a sequence (512)")
    made.add_argument("--batch", type=int, default=4, help="sequences (4)")
    made.add_argument("--vocabulary", type=int, default=1024, help="tokens (1024)")
    made.add_argument("--here", action="store_true", help="internal, on every rank: one pass, as JSON")
    options = made.parse_args()
    if options.here:
        found = measured(options)
        if MPI.COMM_WORLD.rank == 0:
            print(json.dumps(found), flush=True)
        return 0
    if options.quick:
        vars(options).update(QUICK)
    words = [word for name in SIZES for word in (f"--{name}", str(getattr(options, name)))]
    environ = one_thread()
    passes: list[dict[str, Any]] = []
    for turn in range(options.passes):
        command = [__file__, "--here", *words, "--only", *options.only]
        passes.append(json.loads(on_ranks(2, command, environ).splitlines()[-1]))
        print(f"pass {turn + 1} of {options.passes}", file=sys.stderr, flush=True)
    steps, alone = ([name for name in options.only if (name in ALONE) == of_alone] for of_alone in (False, True))
    sizes = (
        f"{options.layers} blocks, hidden {options.hidden}, {options.heads} heads, {options.batch} sequences of "
        f"{options.sequence}, vocabulary {options.vocabulary}, float32, one thread a rank; {options.passes} "
        f"passes of {options.rounds} rounds of {options.steps} steps"
    )
    tables = [(f"A step on 2 ranks: {sizes}", [["", "ms", "of GEMMs and kernel"], *rows_of(passes, steps, LIMIT)])]
    if alone:
        tables.append(
            (
                f"Attention alone, forward and backward, half of the heads: {sizes}",
                [["", "ms", "torch's time / its own"], *rows_of(passes, alone, ALONE[1])],
            )
        )
    report(options, *tables)
    first = {name: passes[0][name]["losses"] for name in steps if name != LIMIT}
    wanted = next(iter(first.values()), [])
    different = [
        f"{name}: {losses}"
        for name, losses in first.items()
        if any(abs(one - other) > TOLERANCE * abs(other) for one, other in zip(losses, wanted))
    ]
    if different:
        print(f"the losses differ from {wanted}: {'; '.join(different)}", file=sys.stderr)
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
