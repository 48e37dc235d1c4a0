"""Elementwise functions of torch arrays on the host: kernels of torch compared with the expressions of the library.

    python benchmarks/kernels.py

On one core. Each figure is the CPU time of the thread for 1024 x 2048 elements in slices, the shortest of several
calls. The last column is the time of the expression / that of the kernel.
"""

import time
from collections.abc import Callable
from functools import partial
from typing import Any

from records import parser, report

from pmm3d import DistMatrix, Grid
from pmm3d.nn.compute import TensorSpec
from pmm3d.nn.elementwise import GELU, RELU, SIGMOID, SILU, TANH, TIMES, Elementwise, map_elementwise

DTYPES = ("float32", "bfloat16")


def milliseconds(call: Callable[[], Any], calls: int) -> float:
    """Seconds of the fastest call."""
    found = []
    for _ in range(calls):
        begun = time.thread_time()
        call()
        found.append(time.thread_time() - begun)
    return 1e3 * min(found)


def main() -> None:
    options = parser(__doc__).parse_args()
    import torch

    torch.set_num_threads(1)
    shape, calls = ((64, 64), 2) if options.quick else ((1024, 2048), 15)
    rows = [["", *(f"{dtype}, {what}" for dtype in DTYPES for what in ("kernel, ms", "expression, ms", "ratio"))]]
    functions = [(each.name + " backward", each.slope, 2) for each in (RELU, TANH, SIGMOID, SILU, GELU)]
    functions += [(each.name, each.value, 1) for each in (TANH, SIGMOID, SILU, GELU)]
    with Grid(shape="ddp") as grid:
        for name, function, number in [*functions, ("scale", TIMES, 1)]:
            row = [name]
            for dtype in DTYPES:
                matrices = [DistMatrix.random(grid, shape, dtype=dtype, seed=seed, library="torch") for seed in (1, 2)]
                spec, operands = TensorSpec.of(matrices[0]), [each.local for each in matrices[:number]]
                operands += [0.3] if function is TIMES else []
                kernel, expression = (
                    milliseconds(partial(map_elementwise, spec, None, each, *operands), calls)
                    for each in (function, Elementwise(function.expression))
                )
                row += [f"{kernel:.2f}", f"{expression:.2f}", f"{expression / kernel:.2f}"]
            rows.append(row)
    report(options, (f"{shape[0]} x {shape[1]} elements", rows))


if __name__ == "__main__":
    main()
