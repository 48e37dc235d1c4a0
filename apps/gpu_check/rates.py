"""How fast: the product beside torch.matmul, staged messages beside pinned copies, a training step beside torch's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mpi4py import MPI

from pmm3d import DistMatrix, Grid, Layout, nn
from pmm3d.arrays import library_named
from pmm3d.nn import optim

from . import torch_step
from .clock import Clock
from .copies import pinned_copies
from .outcome import Absent, Case, Wrong, judged
from .training import INPUT

LEARNING_RATE = 1e-3
COUNTED = {"launches": ("LaunchKernel",), "copies": ("Memcpy",), "fills": ("Memset",),
           "synchronisations": ("StreamSynchronize", "DeviceSynchronize", "EventSynchronize")}
"""Calls of CUDA's runtime and driver, by a part of their names."""


def bench(comm: MPI.Intracomm, case: Case) -> tuple[str, dict[str, Any]]:
    """`pmm3d bench --reference`: a cube's rate beside another library's own matmul, in turns."""
    from pmm3d.tools.bench import measure
    from pmm3d.tools.bench.result import Case as Product

    options, size = case.options, case.options["size"]
    product = Product.named(size, size, size, options["precision"], case.library, repeat=options["rounds"],
                            verification="freivalds", reference=options["reference"])
    result = measure.run(product, comm)
    if not result.check.verified:
        raise Wrong(f"the product is wrong: {result.check.verification}")
    ours, beside = result.speed.gflops / 1e3, result.reference
    assert beside is not None
    said = f"{ours:.4g} TFLOP/s, {beside.share:.3f} of {beside.name}'s {beside.gflops / 1e3:.4g}"
    figures = {"TFLOP/s": ours, "TFLOP/s of the reference": beside.gflops / 1e3, "share": beside.share}
    return judged(beside.share, options["wanted"], said), figures


def staged(comm: MPI.Intracomm, case: Case) -> tuple[str, dict[str, Any]]:
    """A shift of so many bytes through pinned host memory: each rank sends them and receives as many."""
    nbytes, clock = case.options["nbytes"], Clock(comm, case.library, case.options["sample"])
    after, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    with Grid(comm, (comm.size, 1, 1), device_transport=case.options["transport"]) as grid:
        sent = DistMatrix.random(grid, (comm.size, nbytes // 4), dtype="float32", layout=Layout("x"),
                                 library=case.library).local
        received = grid.x.shift(sent).wait()
        copies = pinned_copies(case.library, nbytes)
        seconds = clock.in_turns({
            "message": lambda: grid.x.shift(sent, out=received, agreed=True).wait(), "copies": copies.both_ways,
            "host message": lambda: comm.Sendrecv(copies.hosts[0], after, recvbuf=copies.hosts[1], source=before),
        }, case.options["rounds"])
        why = grid.transport.why
    rates = {name: nbytes / time / 1e9 for name, time in seconds.items()}
    share = rates["message"] / rates["copies"]
    of_slowest = rates["message"] / min(rates["copies"], rates["host message"])
    said = (f"{rates['message']:.4g} GB/s out and as much in, {share:.3f} of the pinned copies' {rates['copies']:.4g}; "
            f"{of_slowest:.3f} of the slower of these and MPI's {rates['host message']:.4g} on the host; {why}")
    return judged(share, case.options["wanted"], said), {f"{name} GB/s": rate for name, rate in rates.items()} | {
        "share": share, "share of the slowest part": of_slowest}


def step(comm: MPI.Intracomm, case: Case) -> tuple[str, dict[str, Any]]:
    """A training step of a perceptron without biases, SGD on the mean squared error, beside plain torch's and the
    GEMM's rate."""
    options = case.options
    sizes = options["layers"], options["width"], options["batch"]
    clock = Clock(comm, case.library, options["sample"])
    with Grid(comm) as grid:
        ours, memory = _with_memory(case.library, lambda: our_step(grid, case))
        beside, torchs_memory = _with_memory(case.library, lambda: torch_step.training_step(
            case.library, options["precision"], *sizes, LEARNING_RATE))
        gemm = torch_step.gemm(case.library, options["precision"], options["batch"], options["width"])
        seconds = clock.in_turns({"ours": ours, "torch": beside, "gemm": gemm}, options["rounds"])
    products = 3 * options["layers"] - 1
    share, ratio = products * seconds["gemm"] / seconds["ours"], seconds["torch"] / seconds["ours"]
    said = (f"{1e3 * seconds['ours']:.4g} ms, {share:.3f} of the GEMM limit ({products} products of "
            f"{1e3 * seconds['gemm']:.4g} ms); torch {1e3 * seconds['torch']:.4g} ms, so {ratio:.3f} of its rate; "
            f"memory at the peak {memory}, torch {torchs_memory}")
    figures = {f"{name} ms": 1e3 * time for name, time in seconds.items()} | {
        "of the limit": share, "of torch": ratio, "peak memory": memory, "peak memory of torch": torchs_memory}
    return judged(ratio, options["of_torch"], judged(share, options["of_limit"], said)), figures


def our_step(grid: Grid, case: Case) -> Callable[[], None]:
    """A function that does one step and waits for nothing."""
    options, precision = case.options, case.options["precision"]
    chosen = {"dtype": precision} if precision in ("float32", "float64") else {"precision": precision}
    net = nn.MLP(grid, [options["width"]] * (options["layers"] + 1), nn.relu, bias=False, seed=1, library=case.library,
                 **chosen)
    opt = optim.SGD(net.parameters(), lr=LEARNING_RATE)
    x, y = (DistMatrix.random(grid, (options["batch"], options["width"]), seed=seed, dtype=precision, layout=layout,
                              library=case.library) for seed, layout in ((2, INPUT), (3, net.output_layout)))

    def one() -> None:
        nn.mse(net(x), y).backward()
        opt.step()

    return one


def without_torch(comm: MPI.Intracomm, case: Case) -> tuple[str, dict[str, Any]]:
    """What is measured beside torch, where no torch sees a device, or none was asked for."""
    raise Absent("torch is not among the libraries: the step is held against torch's, and its profiler counts launches")


def _with_memory(library: str, make: Callable[[], Callable[[], None]]) -> tuple[Callable[[], None], str]:
    """What is made, and the memory that it has at most in a step, by torch's allocator where that has the arrays."""
    if not library.startswith("torch:cuda"):
        return make(), "not told"
    cuda = torch_step.torch().cuda
    before = cuda.memory_allocated()
    work = make()
    work()
    cuda.synchronize()
    cuda.reset_peak_memory_stats()
    work()
    cuda.synchronize()
    return work, f"{(cuda.max_memory_allocated() - before) / 2**30:.2f} GiB"


def launches(comm: MPI.Intracomm, case: Case) -> tuple[str, dict[str, Any]]:
    """Kernels that a training step launches, and how often it waits for the device, as torch's profiler counts."""
    torch, library = torch_step.torch(), library_named(case.library)
    with Grid(comm) as grid:
        work = our_step(grid, case)
        for _ in range(3):
            work()
        library.synchronize()
        with torch.profiler.profile() as profile:
            work()
            library.synchronize()
    counts = {event.key: event.count for event in profile.key_averages()}
    if library.on_host:
        return f"{sum(counts.values())} operations of torch, no device", {"operations": sum(counts.values())}
    found = {kind: sum(count for name, count in counts.items()
                       if name.startswith("cu") and any(word in name for word in words))
             for kind, words in COUNTED.items()}
    if not found["launches"]:
        raise Absent("the profiler of this torch saw no launch of a kernel (it needs CUPTI)")
    said = ", ".join(f"{count} {kind}" for kind, count in found.items())
    return f"{said} in a step of {case.options['layers']} layers, the wait at its end included", found
