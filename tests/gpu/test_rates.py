"""Rates: the product compared with torch.matmul, staged messages with pinned copies, a training step with torch's."""

from __future__ import annotations

from importlib import import_module

import pytest

from gpu.cases import LIBRARIES, ON_HOST, SIZES, TORCHS, cases, common, gpu, on_device, ranks
from gpu.test_networks import INPUT
from gpu.timing import Clock, pinned_copies, torch_gemm, torch_step
from pmm3d import DistMatrix, Grid, Layout, nn
from pmm3d.arrays import library_named
from pmm3d.nn import optim

pytestmark = [pytest.mark.deadline(120), *gpu]
LEARNING_RATE = 1e-3
OF_GEMM, OF_COPIES, OF_LIMIT, OF_TORCH = SIZES.wanted
COUNTED = {
    "launches": ("LaunchKernel",),
    "copies": ("Memcpy",),
    "fills": ("Memset",),
    "synchronizations": ("StreamSynchronize", "DeviceSynchronize", "EventSynchronize"),
}
"""Calls of CUDA's runtime and driver, by a part of their names."""


def wanted(name, share, least):
    """Assert a share of the named rate, if one is wanted."""
    assert least is None or share >= least, f"{share:.3f} of {name}; wanted: at least {least:g}"


@cases(
    "library,precision",
    lambda library: common(library) if on_device(library) else ("float32",),
    of=TORCHS if ON_HOST else LIBRARIES,
)
@ranks(1)
def test_rate(comm, library, precision, result):
    """`pmm3d bench --reference`: a product compared with torch.matmul, or without torch with the library's own
    matmul."""
    from pmm3d.tools.bench import measure
    from pmm3d.tools.bench.result import Case

    reference = TORCHS[0] if TORCHS else library
    product = Case.named(
        SIZES.gemm,
        SIZES.gemm,
        SIZES.gemm,
        precision,
        library,
        repeat=SIZES.rounds,
        verification="freivalds",
        reference=reference,
    )
    measured = measure.run(product, comm)
    assert measured.verified, measured.verification
    ours, beside = measured.gflops / 1e3, measured.reference
    result(
        f"{ours:.4g} TFLOP/s, {beside.share:.3f} of {beside.name}'s {beside.gflops / 1e3:.4g}",
        **{"TFLOP/s": ours, "TFLOP/s of the reference": beside.gflops / 1e3, "share": beside.share},
    )
    wanted(f"{beside.name}'s rate", beside.share, OF_GEMM if TORCHS else None)


@cases("library")
@ranks(2)
def test_message(comm, library, result):
    """A shift through pinned host memory. Each rank sends and receives."""
    nbytes, clock = SIZES.message, Clock(comm, library, SIZES.sample)
    after, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    with Grid(comm, (comm.size, 1, 1), device_transport="staged" if on_device(library) else "auto") as grid:
        sent = DistMatrix.random(
            grid, (comm.size, nbytes // 4), dtype="float32", layout=Layout("x"), library=library
        ).local
        received = grid.x.shift(sent).wait()
        copies = pinned_copies(library, nbytes)
        seconds = clock.in_turns(
            {
                "message": lambda: grid.x.shift(sent, out=received, agreed=True).wait(),
                "copies": copies.both_ways,
                "host message": lambda: comm.Sendrecv(copies.hosts[0], after, recvbuf=copies.hosts[1], source=before),
            },
            SIZES.rounds,
        )
        why = grid.transport.why
    rates = {name: nbytes / time / 1e9 for name, time in seconds.items()}
    share = rates["message"] / rates["copies"]
    of_slowest = rates["message"] / min(rates["copies"], rates["host message"])
    result(
        f"{rates['message']:.4g} GB/s per direction, {share:.3f} of the pinned copies' {rates['copies']:.4g}; "
        f"{of_slowest:.3f} of the slower of these and MPI's {rates['host message']:.4g} on the host; {why}",
        share=share,
        **{f"{name} GB/s": rate for name, rate in rates.items()},
    )
    wanted("the pinned copies' rate", share, OF_COPIES)


@cases("library,precision", (SIZES.step,), of=TORCHS)
@ranks(1)
def test_step(comm, library, precision, result):
    """A training step of a perceptron without biases, compared with plain torch and with the rate of its GEMMs."""
    layers, width = SIZES.layers, SIZES.width
    clock = Clock(comm, library, SIZES.sample)
    with Grid(comm) as grid:
        ours, memory = _with_memory(library, lambda: our_step(grid, library, precision))
        beside, torchs_memory = _with_memory(
            library, lambda: torch_step(library, precision, layers, width, LEARNING_RATE)
        )
        works = {"ours": ours, "torch": beside, "gemm": torch_gemm(library, precision, width)}
        seconds = clock.in_turns(works, SIZES.rounds)
    products = 3 * layers - 1
    share, ratio = products * seconds["gemm"] / seconds["ours"], seconds["torch"] / seconds["ours"]
    result(
        f"{1e3 * seconds['ours']:.4g} ms, {share:.3f} of the GEMM limit ({products} products of "
        f"{1e3 * seconds['gemm']:.4g} ms); torch {1e3 * seconds['torch']:.4g} ms, so {ratio:.3f} of its rate; "
        f"peak memory {memory}, torch {torchs_memory}",
        **{f"{name} ms": 1e3 * time for name, time in seconds.items()},
        of_limit=share,
        of_torch=ratio,
    )
    wanted("the GEMM limit", share, OF_LIMIT)
    wanted("the rate of torch's step", ratio, OF_TORCH)


def our_step(grid, library, precision):
    """A training step that never waits for the device."""
    chosen = {"dtype": precision} if precision in ("float32", "float64") else {"precision": precision}
    net = nn.MLP(grid, [SIZES.width] * (SIZES.layers + 1), nn.relu, bias=False, seed=1, library=library, **chosen)
    opt = optim.SGD(net.parameters(), lr=LEARNING_RATE)
    x, y = (
        DistMatrix.random(grid, (SIZES.width, SIZES.width), seed=seed, dtype=precision, layout=layout, library=library)
        for seed, layout in ((2, INPUT), (3, net.output_layout))
    )

    def one():
        nn.mse(net(x), y).backward()
        opt.step()

    return one


def _with_memory(library, make):
    """Make a step, and measure its peak memory by torch's allocator."""
    if library != "torch:cuda":
        return make(), "not measured"
    cuda = import_module("torch").cuda
    before = cuda.memory_allocated()
    work = make()
    work()
    cuda.synchronize()
    cuda.reset_peak_memory_stats()
    work()
    cuda.synchronize()
    return work, f"{(cuda.max_memory_allocated() - before) / 2**30:.2f} GiB"


@cases("library,precision", (SIZES.step,), of=TORCHS)
@ranks(1)
def test_launches(comm, library, precision, result):
    """Kernels, copies and synchronizations of a training step, as counted by torch's profiler."""
    torch, arrays = import_module("torch"), library_named(library)
    with Grid(comm) as grid:
        work = our_step(grid, library, precision)
        for _ in range(3):
            work()
        arrays.synchronize()
        with torch.profiler.profile() as profile:
            work()
            arrays.synchronize()
    counts = {event.key: event.count for event in profile.key_averages()}
    if arrays.on_host:
        return result(f"{sum(counts.values())} operations of torch, no device", operations=sum(counts.values()))
    found = {
        kind: sum(
            count for name, count in counts.items() if name.startswith("cu") and any(word in name for word in words)
        )
        for kind, words in COUNTED.items()
    }
    if not found["launches"]:
        pytest.skip("the profiler of this torch counted no kernel (it needs CUPTI)")
    result(
        ", ".join(f"{count} {kind}" for kind, count in found.items())
        + f" in a step of {SIZES.layers} layers, with the wait at its end",
        **found,
    )
