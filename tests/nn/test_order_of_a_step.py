"""The order of the GEMMs and collectives of a training step."""

from pmm3d import DistMatrix, Grid, nn
from pmm3d.layout import batch_layout
from pmm3d.nn import optim

# OAG: the second weight is gathered during the first GEMM. OAR: dI is summed during the GEMM of dW. ORS: the optimizer
# waits for the sums of dW, also over data. A wait is listed where the rank needs the result.
STEP = """
begin 1: gather W, all_gather of 4096 bytes along z
wait for 1
begin 2: gather W, all_gather of 4096 bytes along z
GEMM 64 x 64 x 32
begin 3: reduce O, all_reduce of 16384 bytes along y
wait for 3
wait for 2
GEMM 64 x 32 x 64
begin 4: reduce O, all_reduce of 8192 bytes along x
wait for 4
begin 5: loss, all_reduce of 4 bytes along data
begin 6: loss, all_reduce of 4 bytes along z
begin 7: loss, all_reduce of 4 bytes along y
begin 8: gather W, all_gather of 4096 bytes along z
wait for 8
GEMM 64 x 64 x 32
begin 9: reduce dI, all_reduce of 16384 bytes along y
GEMM 64 x 32 x 64
begin 10: reduce dW, reduce_scatter of 4096 bytes along z
GEMM 1 x 32 x 64
wait for 9
GEMM 32 x 64 x 64
begin 11: reduce dW, reduce_scatter of 4096 bytes along z
GEMM 1 x 64 x 64
begin 12: reduce vectors, all_reduce of 384 bytes along z
begin 13: reduce data, reduce_scatter of 4288 bytes along data
wait for 13
begin 14: optimizer, all_gather of 2048 bytes along data
begin 15: optimizer, all_gather of 128 bytes along data
begin 16: optimizer, all_gather of 2048 bytes along data
begin 17: optimizer, all_gather of 64 bytes along data
wait for 14
wait for 15
wait for 16
wait for 17
"""


def test_the_order_of_a_step():
    """The second step of two layers on one rank of sixteen."""
    with Grid.dry((2, 2, 2), data=2) as grid:
        net = nn.MLP(grid, [64, 128, 64], nn.relu)
        opt = optim.AdamW(net.parameters(), shard_over_data=True)
        x, y = (DistMatrix.empty(grid, (256, 64), dtype="float32", layout=batch_layout("y")) for _ in "xy")
        nn.Tape.of(grid).parallel.overlap = nn.Overlap(reshard_after_forward=True)
        for _ in range(2):
            first = len(grid.dry_run.actions)
            nn.mse(net(x), y).backward()
            opt.step()
        actions = grid.dry_run.actions[first:]
    numbers, found = {}, []
    for action in actions:
        if action.what == "gemm":
            found.append(f"GEMM {action.m} x {action.n} x {action.k}")
        elif action.what == "begin":
            number = numbers.setdefault(action.number, len(numbers) + 1)
            collective = f"{action.operation} of {action.received} bytes along {action.axis}"
            found.append(f"begin {number}: {action.phase}, {collective}")
        elif action.number in numbers:
            found.append(f"wait for {numbers[action.number]}")
    assert found == STEP.strip().splitlines()
