"""Count bytes, memory and operations of a training step on one rank of any grid, by a dry run, without MPI.

    python apps/dry_run.py --grid 32x32x32 --data 1 --rank 20000 --hosts 4096 --width 8192 --layers 8 --batch 65536

The program prints the bytes of a step by axis and phase, the memory by kind, the operations by kind (GEMMs,
collectives, passes over memory), and the time of the dry step: milliseconds. --actions lists all operations in order.
For a network of your own, replace nn.MLP.
"""

import argparse
import time
from collections import Counter
from statistics import median

from pmm3d import Grid, nn
from pmm3d.layout import batch_layout
from pmm3d.nn import optim
from pmm3d.nn.dry import Facts, bytes_a_parameter, memory

REPEATS = 5


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--grid", default="2x2x2", help="GxxGyxGz (2x2x2)")
    for name, default, meaning in (
        ("data", 1, "ranks along the data axis"),
        ("rank", 0, "rank whose step is counted"),
        ("hosts", 1, "number of nodes"),
        ("layers", 8, "linear layers"),
        ("width", 4096, "columns of each"),
        ("batch", 4096, "rows over all ranks"),
    ):
        parser.add_argument(f"--{name}", type=int, default=default, help=f"{meaning} ({default})")
    parser.add_argument("--activation", default="gelu", help="(gelu)")
    parser.add_argument("--activations", choices=["replicated", "sharded"], default="replicated")
    parser.add_argument("--precision", default="float32", help="float32, bfloat16, float16, float64 (float32)")
    for name in ("norm", "recompute", "shard-over-data", "keep-weights", "actions"):
        parser.add_argument(f"--{name}", action="store_true")
    return parser.parse_args()


def main() -> None:
    options = arguments()
    sizes = [options.width] * (options.layers + 1)
    with Grid.dry(options.grid, options.data, options.rank, hosts=options.hosts) as grid:
        nn.Tape.of(grid).parallel.overlap = nn.Overlap(reshard_after_forward=not options.keep_weights)
        net = nn.MLP(
            grid,
            sizes,
            getattr(nn, options.activation),
            norm=options.norm,
            recompute=options.recompute,
            activations=options.activations,
            precision=options.precision,
            library="torch",
        )
        optimizer = optim.AdamW(net.parameters(), shard_over_data=options.shard_over_data)
        shape = options.batch, options.width
        batches = "float64" if options.precision == "float64" else "float32"
        x, y = (Facts(shape, layout, batches, "torch").on(grid) for layout in (batch_layout("y"), net.output_layout))
        seconds = []
        for _ in range(1 + REPEATS):  # the order of the weights, which OAG needs, is known after the first step
            grid.ledger.reset()
            grid.dry_run.actions.clear()
            begun = time.perf_counter()
            nn.mse(net(x), y).backward()
            optimizer.step()
            seconds.append(time.perf_counter() - begun)
        report(grid, net, options, 1e3 * median(seconds[1:]))


def report(grid: Grid, net: nn.Module, options: argparse.Namespace, milliseconds: float) -> None:
    print(f"{grid}, on {grid.hosts} hosts: a step of {options.layers} layers of {options.width}\n")
    print(f"| {'axis':4} | {'phase':14} | {'operation':14} | calls | {'sent':>14} | {'received':>14} |")
    for key, entry in grid.ledger.entries.items():
        if entry.sent or entry.received:
            print(
                f"| {key.axis:4} | {key.phase:14} | {key.operation:14} | {entry.calls:5} | {entry.sent:14,} | "
                f"{entry.received:14,} |"
            )
    print("\npeak memory: " + ", ".join(f"{kind} {in_bytes(size)}" for kind, size in grid.dry_run.peak.items()))
    print(
        "including the buffers that the workspace keeps: "
        + ", ".join(f"{kind} {in_bytes(size)}" for kind, size in memory(grid).items())
    )
    each = bytes_a_parameter(grid, net)
    print(
        "bytes per parameter of this rank: "
        + ", ".join(f"{kind} {size:g}" for kind, size in each.items())
        + f"; total {sum(each.values()):g}"
    )
    print("\nby kind: " + "; ".join(kinds(grid.dry_run.actions)))
    if options.actions:
        print("\n".join(map(str, ["", *grid.dry_run.actions])))
    print(f"\n{len(grid.dry_run.actions)} actions; the dry step took {milliseconds:.1f} ms (median of {REPEATS})")


def in_bytes(size: float) -> str:
    """Bytes in the largest unit of which there is at least one."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024 or unit == "GiB":
            return f"{size:.4g} {unit}"
        size /= 1024


def kinds(actions: list) -> list[str]:
    """Totals of the actions: GEMMs, collectives, and passes by name, the most bytes first."""
    gemms = [action for action in actions if action.what == "gemm"]
    messages = [action for action in actions if action.what == "begin"]
    passes = Counter[str]()
    for action in actions:
        if action.what == "pass":
            passes[action.operation] += action.nbytes
    flop, received = sum(2 * each.m * each.n * each.k for each in gemms), sum(each.received for each in messages)
    return [
        f"{len(gemms)} GEMMs of {flop / 1e9:,.2f} Gflop",
        f"{len(messages)} collectives of {in_bytes(received)}",
        f"passes over {in_bytes(passes.total())}: "
        + ", ".join(f"{name} {in_bytes(size)}" for name, size in passes.most_common()),
    ]


if __name__ == "__main__":
    main()
