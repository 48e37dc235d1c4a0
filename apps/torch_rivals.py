"""One training step of PyTorch on two cores: data parallel, fully sharded, tensor parallel, and threads.

    python apps/torch_rivals.py                     (or: --rivals ddp fsdp2 --layers 8 --width 2048 --batch 1024)

A perceptron of --layers linear layers, each --width wide, ReLU between them, float32, plain SGD on the mean squared
error. A step is forward, backward and update of one batch. The rivals do the same mathematics:

    ddp       two processes with half of the batch each; gradients summed          (DistributedDataParallel)
    fsdp2     the same, and each keeps half of the weights                         (fully_shard)
    tp        two processes with half of each layer; columns and rows in turn      (parallelize_module)
    threads   one process, two threads

Each process has one thread and one core of its own, and talks through gloo. Weights and batch come from numpy, so that
other libraries can start from the same numbers (`weights`, `batch_of`), and all must come to the same loss.
One JSON line per rival on standard output, a table on standard error. torch's GEMM on one core is measured too. Linux.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import numpy as np

RIVALS = ("ddp", "fsdp2", "tp", "threads")
# Large, since the gradient of a mean over batch x width elements is small; yet three times as much, and one ReLU that
# rounding turns from 0 to 1e-8 changes the loss by more than 1e-6 within five steps.
LEARNING_RATE = 10.0
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
    return tuple(source.standard_normal((batch, width), np.float32) for _ in range(2))


def measure(rival: str, layers: int, width: int, batch: int, steps: int, warm_up: int, seed: int) -> list[float]:
    """Seconds of each of the steps after the warm-up, of the slower process."""
    return run(rival, layers, width, batch, steps, warm_up, seed)["seconds"]


def run(rival: str, layers: int, width: int, batch: int, steps: int, warm_up: int, seed: int, *, bias: bool = False,
        lr: float = LEARNING_RATE) -> dict:
    """{"rival", "seconds", "final_loss"}: final_loss is that of the last step, before its update.

    Raises RivalError with the last lines of the process that failed.
    """
    task = {"rival": rival, "layers": layers, "width": width, "batch": batch, "steps": steps, "warm_up": warm_up,
            "seed": seed, "bias": bias, "lr": lr}
    return {"rival": rival, **_in_processes(task, 1 if rival == "threads" else 2, 2 if rival == "threads" else 1)}


def gemm_gflops() -> float:
    """Median rate of torch's float32 GEMM of 2048 cubed on one core."""
    return _in_processes({"rival": "gemm"}, 1, 1)["gflops"]


def _in_processes(task: dict, processes: int, threads: int) -> dict:
    """What rank 0 answers. Every process has cores of its own, where there are enough."""
    cores = sorted(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory() as folder:
        started = []
        for rank in range(processes):
            mine = [cores[(rank * threads + thread) % len(cores)] for thread in range(threads)]
            place = {"rank": rank, "processes": processes, "cores": mine, "threads": threads, "folder": folder}
            environment = os.environ | {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads),
                                        "GLOO_SOCKET_IFNAME": "lo"}
            with open(Path(folder) / f"said-{rank}", "w") as said:
                started.append(subprocess.Popen([sys.executable, __file__, "--worker", json.dumps(task | place)],
                                                env=environment, stdout=said, stderr=subprocess.STDOUT))
        try:
            _wait(started)
            answer = Path(folder) / "answer.json"
            if any(process.returncode for process in started) or not answer.exists():
                raise RivalError(_last_words(folder, started))
            return json.loads(answer.read_text())
        finally:
            for process in started:
                process.kill()
                process.wait()


def _wait(started) -> None:
    """Until all have ended well, one has failed, or it takes too long."""
    until = time.monotonic() + PATIENCE
    while any(process.poll() is None for process in started):
        if any(process.returncode for process in started) or time.monotonic() > until:
            return
        time.sleep(0.05)


def _last_words(folder: str, started) -> str:
    failed = [rank for rank, process in enumerate(started) if process.returncode]
    if not failed:
        return f"not done after {PATIENCE} s"
    lines = (Path(folder) / f"said-{failed[0]}").read_text().strip().splitlines()
    return f"process {failed[0]}: " + " | ".join(lines[-2:])


def work(place: dict) -> dict:
    """In a process of its own: build the rival and time its steps."""
    os.sched_setaffinity(0, place["cores"])
    import torch

    torch.set_num_threads(place["threads"])
    if place["rival"] == "gemm":
        return {"gflops": _gemm(torch)}
    if place["processes"] > 1:
        torch.distributed.init_process_group("gloo", init_method=f"file://{place['folder']}/rendezvous",
                                             rank=place["rank"], world_size=place["processes"])
    model, x, y = prepare(torch, place)
    seconds, loss = _steps(torch, place, model, x, y)
    if place["processes"] > 1:
        if place["rival"] != "tp":
            torch.distributed.all_reduce(loss)
            loss /= place["processes"]
        slowest = torch.tensor(seconds, dtype=torch.float64)
        torch.distributed.all_reduce(slowest, torch.distributed.ReduceOp.MAX)
        seconds = slowest.tolist()
        torch.distributed.barrier()
    return {"seconds": seconds, "final_loss": loss.item()}


def prepare(torch, place: dict):
    """(model, inputs, targets) of this process."""
    model = perceptron(torch, place["layers"], place["width"], place["seed"], place["bias"])
    x, y = map(torch.from_numpy, batch_of(place["batch"], place["width"], place["seed"]))
    rival, processes = place["rival"], place["processes"]
    if rival in ("ddp", "fsdp2"):
        if place["batch"] % processes:
            raise RivalError(f"a batch of {place['batch']} has no equal parts for {processes} processes")
        x, y = (part.chunk(processes)[place["rank"]].clone() for part in (x, y))
    if rival == "ddp":
        model = torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    elif rival == "fsdp2":
        from torch.distributed.fsdp import fully_shard

        mesh = torch.distributed.init_device_mesh("cpu", (processes,))
        for layer in linear_layers(torch, model).values():
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    elif rival == "tp":
        tensor_parallel(torch, model, processes)
    return model, x, y


def tensor_parallel(torch, model, processes: int) -> None:
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    names = list(linear_layers(torch, model))
    plan = {name: RowwiseParallel() if index % 2 else ColwiseParallel() for index, name in enumerate(names)}
    if len(names) % 2:
        plan[names[-1]] = ColwiseParallel(output_layouts=Replicate())
    parallelize_module(model, torch.distributed.init_device_mesh("cpu", (processes,)), plan)


def perceptron(torch, layers: int, width: int, seed: int, bias: bool):
    parts = []
    for index in range(layers):
        layer = torch.nn.Linear(width, width, bias=bias)
        with torch.no_grad():
            layer.weight.copy_(torch.from_numpy(weights(index, width, seed)).T)
            if bias:
                layer.bias.zero_()
        parts += [layer, torch.nn.ReLU()]
    return torch.nn.Sequential(*parts[:-1])


def linear_layers(torch, model) -> dict:
    return {name: part for name, part in model.named_children() if isinstance(part, torch.nn.Linear)}


def _steps(torch, place: dict, model, x, y):
    optimizer = torch.optim.SGD(model.parameters(), lr=place["lr"])
    seconds = []
    for _ in range(place["warm_up"] + place["steps"]):
        if place["processes"] > 1:
            torch.distributed.barrier()
        begun = time.perf_counter()
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        seconds.append(time.perf_counter() - begun)
    return seconds[place["warm_up"]:], loss.detach().clone()


def _gemm(torch) -> float:
    a, b, c = (torch.rand(GEMM, GEMM) for _ in range(3))
    times = []
    for _ in range(6):
        begun = time.perf_counter()
        torch.mm(a, b, out=c)
        times.append(time.perf_counter() - begun)
    return 2 * GEMM**3 / median(times[1:]) / 1e9


def check_losses(losses: dict[str, float], tolerance: float = 1e-4) -> str | None:
    """What is wrong if the losses differ, relative to the first."""
    (first, right), *others = losses.items()
    wrong = [f"{name} {loss:.8g}" for name, loss in others if not abs(loss - right) <= tolerance * abs(right)]
    return f"losses differ: {first} {right:.8g}, {', '.join(wrong)}" if wrong else None


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rivals", nargs="+", choices=RIVALS, default=RIVALS, metavar="R", help=", ".join(RIVALS))
    parser.add_argument("--layers", type=int, default=8, help="linear layers (8)")
    parser.add_argument("--width", type=int, default=2048, help="inputs and outputs of each (2048)")
    parser.add_argument("--batch", type=int, default=1024, help="rows, over all processes (1024)")
    parser.add_argument("--bias", action="store_true", help="layers with bias")
    parser.add_argument("--steps", type=int, default=7, help="timed steps (7)")
    parser.add_argument("--warm-up", type=int, default=2, help="steps before them (2)")
    parser.add_argument("--lr", type=float, default=LEARNING_RATE, help=f"learning rate ({LEARNING_RATE:g})")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> int:
    options = parse()
    if options.worker:
        place = json.loads(options.worker)
        answer = work(place)
        if place["rank"] == 0:
            (Path(place["folder"]) / "answer.json").write_text(json.dumps(answer))
        os._exit(0)  # not through the destructors of gloo, which now and then abort
    losses, problem = {}, None
    print(f"{'rival':8} {'median':>9} {'min':>9} {'max':>9}  loss", file=sys.stderr)
    for rival in options.rivals:
        try:
            result = run(rival, options.layers, options.width, options.batch, options.steps, options.warm_up,
                         options.seed, bias=options.bias, lr=options.lr)
        except RivalError as reason:
            problem = f"{rival} could not run: {reason}"
            print(problem, file=sys.stderr)
            continue
        print(json.dumps(result), flush=True)
        times = [1e3 * seconds for seconds in result["seconds"]]
        losses[rival] = result["final_loss"]
        figures = "".join(f" {figure:6.1f} ms" for figure in (median(times), min(times), max(times)))
        print(f"{rival:8}{figures}  {result['final_loss']:.7f}", file=sys.stderr)
    if losses:
        print(f"GEMM of {GEMM} cubed on one core: {gemm_gflops():.1f} GFLOP/s", file=sys.stderr)
    problem = (check_losses(losses) if losses else None) or problem
    if problem:
        print(problem, file=sys.stderr)
    return 1 if problem else 0


if __name__ == "__main__":
    sys.exit(main())
