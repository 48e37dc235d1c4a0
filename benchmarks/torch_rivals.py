"""The rivals of training.py: one training step of PyTorch on two cores.

A perceptron with layers of one width, ReLU between them, no bias, float32, plain SGD on the mean squared error. A step
is forward, backward and update of one batch. The rivals compute the same step:

    ddp       two processes with half of the batch each; gradients are summed      (DistributedDataParallel)
    fsdp2     the same, and each stores half of the weights                        (fully_shard)
    tp        two processes with half of each layer; columns and rows in turns     (parallelize_module)
    threads   one process, two threads
    plain     one process, one thread

Each process has one thread and its own core, and sends messages by gloo. Weights and batch are made by numpy, so that
pmm3d starts from the same numbers. All must have the same loss. Only on Linux.
"""

import json
import os
import sys
import time
import timeit
from statistics import median
from typing import Any

import numpy as np
from timing import ProgramError, output_of

RIVALS = ("ddp", "fsdp2", "tp", "threads")
GEMM = 2048
PATIENCE = 600
"""Seconds after which training processes count as hanging."""
COMPARED = 5
"""Number of the step whose loss is compared. Rounding in a ReLU changes the losses of later steps."""


def weights(layer: int, width: int) -> np.ndarray:
    """Weight (inputs, outputs) of a layer: normal numbers / sqrt(width)."""
    return np.random.default_rng([0, layer]).standard_normal((width, width), np.float32) / np.float32(np.sqrt(width))


def batch_of(batch: int, width: int) -> tuple[np.ndarray, np.ndarray]:
    """Inputs and targets, (batch, width) each: normal numbers."""
    source = np.random.default_rng([0, 2**20])
    return source.standard_normal((batch, width), np.float32), source.standard_normal((batch, width), np.float32)


def run(rival: str, sizes: dict[str, Any]) -> dict[str, Any]:
    """Figures of a rival: {"seconds": of each step after the warm-up, on the slower process, "loss": loss of
    step `COMPARED`, before its update}. sizes: layers, width, batch, steps, warm_up, lr. Raises ProgramError with the
    error of a failed process."""
    processes, threads = {"threads": (1, 2), "plain": (1, 1)}.get(rival, (2, 1))
    if rival in ("ddp", "fsdp2") and sizes["batch"] % processes:
        raise ProgramError(f"a batch of {sizes['batch']} has no equal parts for {processes} processes")
    return _in_processes({"rival": rival, "threads": threads, **sizes}, processes)


def gemm_gflops() -> float:
    """Median rate of torch's float32 GEMM of 2048 x 2048 x 2048 on one core."""
    return _in_processes({"rival": "gemm", "threads": 1}, 1)["gflops"]


def _in_processes(task: dict[str, Any], processes: int) -> dict[str, Any]:
    """The answer of rank 0."""
    threads = str(task["threads"])
    environ = os.environ | {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads, "GLOO_SOCKET_IFNAME": "lo"}
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    return json.loads(output_of([*torchrun, __file__, json.dumps(task)], environ, PATIENCE).splitlines()[-1])


def keep_to_cores(rank: int, threads: int) -> None:
    """Bind this process to cores of its own, one per thread, if there are enough."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, [cores[(rank * threads + thread) % len(cores)] for thread in range(threads)])


def work(task: dict[str, Any]) -> dict[str, Any]:
    """In a separate process: build the rival and time its steps."""
    rank, processes, threads = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), task["threads"]
    keep_to_cores(rank, threads)
    import torch

    torch.set_num_threads(threads)
    if task["rival"] == "gemm":
        return {"gflops": _gemm(torch)}
    torch.distributed.init_process_group("gloo")
    seconds, loss = _steps(torch, task, *_prepared(torch, task, rank, processes))
    if task["rival"] != "tp":
        torch.distributed.all_reduce(loss)
        loss /= processes
    slower = torch.tensor(seconds, dtype=torch.float64)
    torch.distributed.all_reduce(slower, torch.distributed.ReduceOp.MAX)
    torch.distributed.barrier()
    return {"seconds": slower.tolist(), "loss": loss.item()}


def _prepared(torch: Any, task: dict[str, Any], rank: int, processes: int) -> tuple[Any, Any, Any]:
    """(model, inputs, targets) of this process."""
    rival = task["rival"]
    layers = [torch.nn.Linear(task["width"], task["width"], bias=False) for _ in range(task["layers"])]
    for index, layer in enumerate(layers):
        layer.weight.data.copy_(torch.from_numpy(weights(index, task["width"])).T)
    model = torch.nn.Sequential(*[part for layer in layers for part in (layer, torch.nn.ReLU())][:-1])
    x, y = map(torch.from_numpy, batch_of(task["batch"], task["width"]))
    if rival in ("ddp", "fsdp2"):
        x, y = (part.chunk(processes)[rank].clone() for part in (x, y))
    if rival == "ddp":
        model = torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    elif rival == "fsdp2":
        from torch.distributed.fsdp import fully_shard

        mesh = torch.distributed.init_device_mesh("cpu", (processes,))
        for part in (*layers, model):
            fully_shard(part, mesh=mesh)
    elif rival == "tp":
        from torch.distributed.tensor import Replicate
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

        plan = {str(2 * index): RowwiseParallel() if index % 2 else ColwiseParallel() for index in range(len(layers))}
        if len(layers) % 2:
            plan[str(2 * len(layers) - 2)] = ColwiseParallel(output_layouts=Replicate())
        parallelize_module(model, torch.distributed.init_device_mesh("cpu", (processes,)), plan)
    return model, x, y


def _steps(torch: Any, task: dict[str, Any], model: Any, x: Any, y: Any) -> tuple[list[float], Any]:
    sharded = any(hasattr(weight, "placements") for weight in model.parameters())  # DTensor supports only foreach
    fastest = {"foreach": True} if sharded else {"fused": True}
    optimizer = torch.optim.SGD(model.parameters(), lr=task["lr"], **fastest)
    seconds, losses = [], []
    for _ in range(task["warm_up"] + task["steps"]):
        torch.distributed.barrier()
        begun = time.perf_counter()
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        seconds.append(time.perf_counter() - begun)
        losses.append(loss.detach())
    return seconds[task["warm_up"] :], losses[:COMPARED][-1].clone()


def _gemm(torch: Any) -> float:
    a, b, c = (torch.rand(GEMM, GEMM) for _ in range(3))
    times = timeit.repeat(lambda: torch.mm(a, b, out=c), repeat=6, number=1)
    return 2 * GEMM**3 / median(times[1:]) / 1e9


if __name__ == "__main__":
    answer = work(json.loads(sys.argv[1]))
    if os.environ["RANK"] == "0":
        print(json.dumps(answer), flush=True)
    os._exit(0)  # without the destructors of gloo, which sometimes abort
