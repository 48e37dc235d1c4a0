"""Seconds of work on a device; pinned copies and training steps by the array libraries themselves."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from statistics import median
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from pmm3d.arrays import library_named
from pmm3d.tools.timing import in_a_row

WARM_UP = 5
"""Timings before the first that counts: clocks rise, kernels are chosen, memory is allocated."""
MOST = 200
"""Largest number of repetitions in one timing."""
LOW = ("bfloat16", "float16")
Work = Callable[[], Any]


class Clock:
    """Timer of asynchronous work on a device. Collective over comm.

    sample  seconds of one timing. It has no synchronization inside, so the host may run ahead as in a long run
    """

    def __init__(self, comm: MPI.Intracomm, library: str, sample: float):
        self.comm, self.library, self.sample = comm, library_named(library), sample

    def once(self, work: Work, times: int = 1) -> float:
        """Seconds of one repetition on the slowest rank, of several in a row."""
        self.library.synchronize()
        self.comm.Barrier()
        return self.comm.allreduce(in_a_row(work, self.library, times), MPI.MAX)

    def in_turns(self, works: Mapping[str, Work], rounds: int) -> dict[str, float]:
        """Median seconds of each work. Every round times all of them, and starts with another one."""
        times = {name: self._warmed(work) for name, work in works.items()}
        names, found = [*works], {name: list[float]() for name in works}
        for turn in range(rounds):
            first = turn % len(names)
            for name in names[first:] + names[:first]:
                found[name].append(self.once(works[name], times[name]))
        return {name: median(seconds) for name, seconds in found.items()}

    def _warmed(self, work: Work) -> int:
        """Warm up. Return the number of repetitions of a timing."""
        self.once(work)
        seconds = self.once(work, min(MOST, 1 + int(WARM_UP * self.sample / self.once(work))))
        return max(1, min(MOST, round(self.sample / seconds)))


class Copies(NamedTuple):
    """both_ways copies all bytes to the host and as many to the device, in two streams, and waits. hosts: the two
    pinned arrays."""

    both_ways: Callable[[], None]
    hosts: tuple[np.ndarray, np.ndarray]


def pinned_copies(library: str, nbytes: int) -> Copies:
    """Copies between pinned host memory and the device of a library."""
    if library == "cupy":
        return _of_cupy(nbytes)
    return _of_torch(nbytes) if library == "torch:cuda" else _of_numpy(nbytes)


def _of_torch(nbytes: int) -> Copies:
    torch = import_module("torch")
    coming, leaving = (torch.zeros(nbytes, dtype=torch.uint8, pin_memory=True) for _ in range(2))
    source, target = (torch.zeros(nbytes, dtype=torch.uint8, device="cuda") for _ in range(2))
    down, up = torch.cuda.Stream(), torch.cuda.Stream()
    torch.cuda.synchronize()

    def both_ways() -> None:
        with torch.cuda.stream(down):
            coming.copy_(source, non_blocking=True)
        with torch.cuda.stream(up):
            target.copy_(leaving, non_blocking=True)
        down.synchronize()
        up.synchronize()

    return Copies(both_ways, (coming.numpy(), leaving.numpy()))


def _of_cupy(nbytes: int) -> Copies:
    cupy, cupyx = import_module("cupy"), import_module("cupyx")
    coming, leaving = (cupyx.zeros_pinned(nbytes, np.uint8) for _ in range(2))
    source, target = (cupy.zeros(nbytes, np.uint8) for _ in range(2))
    down, up = (cupy.cuda.Stream(non_blocking=True) for _ in range(2))
    cupy.cuda.Device().synchronize()

    def both_ways() -> None:
        source.get(stream=down, out=coming, blocking=False)
        target.set(leaving, stream=up)
        down.synchronize()
        up.synchronize()

    return Copies(both_ways, (coming, leaving))


def _of_numpy(nbytes: int) -> Copies:
    """Without a device: copies of host memory."""
    coming, leaving, source, target = (np.zeros(nbytes, np.uint8) for _ in range(4))

    def both_ways() -> None:
        coming[...] = source
        target[...] = leaving

    return Copies(both_ways, (coming, leaving))


def torch_step(library: str, precision: str, layers: int, width: int, lr: float) -> Work:
    """A training step in plain torch: linear layers with ReLU, mean squared error, SGD.

    In 2-byte precisions weights and activations have that type. The optimizer updates float32 master weights, as in
    pmm3d.
    """
    torch = import_module("torch")
    dtype, device = getattr(torch, precision), "cuda" if library == "torch:cuda" else "cpu"
    linear = [torch.nn.Linear(width, width, bias=False, device=device, dtype=dtype) for _ in range(layers)]
    model = torch.nn.Sequential(*[part for layer in linear for part in (layer, torch.nn.ReLU())][:-1])
    weights = [*model.parameters()]
    masters = [weight.detach().float() for weight in weights] if precision in LOW else weights
    optimizer = torch.optim.SGD(masters, lr=lr, foreach=True)
    x, y = (2 * torch.rand(width, width, device=device, dtype=dtype) - 1 for _ in range(2))

    def one() -> None:
        torch.nn.functional.mse_loss(model(x), y).backward()
        if masters is not weights:
            for master, weight in zip(masters, weights):
                master.grad, weight.grad = weight.grad.float(), None
        optimizer.step()
        optimizer.zero_grad()
        if masters is not weights:
            with torch.no_grad():
                torch._foreach_copy_(weights, masters)

    return one


def torch_gemm(library: str, precision: str, width: int) -> Work:
    """One of the products of the step by torch.matmul."""
    torch = import_module("torch")
    dtype, device = getattr(torch, precision), "cuda" if library == "torch:cuda" else "cpu"
    a, b = (2 * torch.rand(width, width, device=device, dtype=dtype) - 1 for _ in range(2))
    c = torch.empty(width, width, device=device, dtype=dtype)
    return lambda: torch.matmul(a, b, out=c)
