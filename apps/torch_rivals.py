"""The rivals of step_bench.py: one training step of PyTorch on two cores.

A perceptron of layers of one width, ReLU between them, no bias, float32, plain SGD on the mean squared error. A step is
forward, backward and update of one batch. The rivals do the same mathematics:

    ddp       two processes with half of the batch each; gradients summed          (DistributedDataParallel)
    fsdp2     the same, and each keeps half of the weights                         (fully_shard)
    tp        two processes with half of each layer; columns and rows in turn      (parallelize_module)
    threads   one process, two threads

Each process has one thread and one core of its own, and talks through gloo. Weights and batch come from numpy, so that
pmm3d starts from the same numbers, and all must come to the same loss. Linux.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

RIVALS = ("ddp", "fsdp2", "tp", "threads")
GEMM = 2048
PATIENCE = 600


class RivalError(Exception):
    """A rival could not run; the text says why."""


def weights(layer: int, width: int, seed: int) -> np.ndarray:
    """Weight (inputs, outputs) of a layer: normal numbers / sqrt(width)."""
    made = np.random.default_rng([seed, layer]).standard_normal((width, width), np.float32)
    return made / np.float32(np.sqrt(width))


def batch_of(batch: int, width: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Inputs and targets, (batch, width) each: normal numbers."""
    source = np.random.default_rng([seed, 2**20])
    return source.standard_normal((batch, width), np.float32), source.standard_normal((batch, width), np.float32)


def run(rival: str, sizes: dict[str, Any]) -> dict[str, Any]:
    """{"seconds": of each step after the warm-up, of the slower process, "final_loss": of the last, before its update}.

    sizes   layers, width, batch, steps, warm_up, seed, lr

    Raises RivalError with the last lines of the process that failed.
    """
    processes, threads = (1, 2) if rival == "threads" else (2, 1)
    return _in_processes({"rival": rival, **sizes}, processes, threads)


def gemm_gflops() -> float:
    """Median rate of torch's float32 GEMM of 2048 cubed on one core."""
    return _in_processes({"rival": "gemm"}, 1, 1)["gflops"]


def _in_processes(task: dict[str, Any], processes: int, threads: int) -> dict[str, Any]:
    """What rank 0 answers. Every process has cores of its own, where there are enough."""
    cores = sorted(os.sched_getaffinity(0))
    environment = os.environ | {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads),
                                "GLOO_SOCKET_IFNAME": "lo"}
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "answer.json"
        started = []
        for rank in range(processes):
            own_cores = [cores[(rank * threads + thread) % len(cores)] for thread in range(threads)]
            part = task | {"rank": rank, "processes": processes, "threads": threads, "cores": own_cores,
                           "folder": folder}
            with open(Path(folder) / f"output-{rank}", "w") as output:
                started.append(subprocess.Popen([sys.executable, __file__, json.dumps(part)], env=environment,
                                                stdout=output, stderr=subprocess.STDOUT))
        try:
            until = time.monotonic() + PATIENCE
            while None in (codes := [process.poll() for process in started]):
                if any(codes) or time.monotonic() > until:
                    break
                time.sleep(0.05)
            for rank, code in enumerate(codes):
                if code:
                    lines = (Path(folder) / f"output-{rank}").read_text().strip().splitlines()
                    raise RivalError(f"process {rank}: " + " | ".join(lines[-2:]))
            if not answer.exists():
                raise RivalError(f"not done after {PATIENCE} s")
            return json.loads(answer.read_text())
        finally:
            for process in started:
                process.kill()
                process.wait()


def work(task: dict[str, Any]) -> dict[str, Any]:
    """In a process of its own: build the rival and time its steps."""
    os.sched_setaffinity(0, task["cores"])
    import torch

    torch.set_num_threads(task["threads"])
    if task["rival"] == "gemm":
        return {"gflops": _gemm(torch)}
    together = task["processes"] > 1
    if together:
        torch.distributed.init_process_group("gloo", init_method=f"file://{task['folder']}/rendezvous",
                                             rank=task["rank"], world_size=task["processes"])
    seconds, loss = _steps(torch, task, *_prepared(torch, task))
    if together:
        if task["rival"] != "tp":
            torch.distributed.all_reduce(loss)
            loss /= task["processes"]
        slowest = torch.tensor(seconds, dtype=torch.float64)
        torch.distributed.all_reduce(slowest, torch.distributed.ReduceOp.MAX)
        seconds = slowest.tolist()
        torch.distributed.barrier()
    return {"seconds": seconds, "final_loss": loss.item()}


def _prepared(torch: Any, task: dict[str, Any]) -> tuple[Any, Any, Any]:
    """(model, inputs, targets) of this process."""
    rival, processes = task["rival"], task["processes"]
    layers = [torch.nn.Linear(task["width"], task["width"], bias=False) for _ in range(task["layers"])]
    for index, layer in enumerate(layers):
        layer.weight.data.copy_(torch.from_numpy(weights(index, task["width"], task["seed"])).T)
    model = torch.nn.Sequential(*[part for layer in layers for part in (layer, torch.nn.ReLU())][:-1])
    x, y = map(torch.from_numpy, batch_of(task["batch"], task["width"], task["seed"]))
    if rival in ("ddp", "fsdp2"):
        if task["batch"] % processes:
            raise RivalError(f"a batch of {task['batch']} has no equal parts for {processes} processes")
        x, y = (part.chunk(processes)[task["rank"]].clone() for part in (x, y))
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
    optimizer = torch.optim.SGD(model.parameters(), lr=task["lr"])
    seconds = []
    for _ in range(task["warm_up"] + task["steps"]):
        if task["processes"] > 1:
            torch.distributed.barrier()
        begun = time.perf_counter()
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        seconds.append(time.perf_counter() - begun)
    return seconds[task["warm_up"] :], loss.detach().clone()


def _gemm(torch: Any) -> float:
    a, b, c = (torch.rand(GEMM, GEMM) for _ in range(3))
    times = []
    for _ in range(6):
        begun = time.perf_counter()
        torch.mm(a, b, out=c)
        times.append(time.perf_counter() - begun)
    return 2 * GEMM**3 / median(times[1:]) / 1e9


if __name__ == "__main__":
    task = json.loads(sys.argv[1])
    answer = work(task)
    if task["rank"] == 0:
        (Path(task["folder"]) / "answer.json").write_text(json.dumps(answer))
    os._exit(0)  # not through the destructors of gloo, which now and then abort
