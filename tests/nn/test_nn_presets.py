"""The families of parallel training are grids. The ledger contains their known collectives and volumes: bytes that a
rank receives in a step. An all-reduce of n bytes over G ranks is 2 (G-1)/G n."""

import pytest
from loops import looped
from networks import Case, adamw, batch_of, network_of, on_grid, over_grids, spread

from pmm3d import nn
from pmm3d.layout import AXES, batch_layout, part_sizes

pytestmark = [pytest.mark.parallel([4], thorough=[2, 8]), pytest.mark.deadline(240)]

CASE = Case((48, 96, 64, 80, 32), 256, "relu", False)
"""Two pairs of layers. All sizes divide, and all-reduced arrays are large enough for two stages."""
LAYERS = list(zip(CASE.sizes, CASE.sizes[1:]))
MATRICES = [8 * inputs * outputs for inputs, outputs in LAYERS]
VECTORS = [8 * outputs for _, outputs in LAYERS]


def recorded(grid, bias, overlap=None, shard=False, wanted=False):
    """(axis, phase, operation) -> (calls, bytes received) of the third step, for axes of several ranks."""
    nn.Tape.of(grid).parallel.overlap = overlap or nn.Overlap(reshard_after_forward=True)
    net = network_of(grid, CASE, bias=bias)
    optimizer = adamw(net.parameters(), shard_over_data=shard)
    for step in range(3):
        x, y = batch_of(CASE, step)
        x, y = nn.Tensor(spread(grid, x), requires_grad=wanted), spread(grid, y, batch_layout(None))
        grid.ledger.reset()
        loss = nn.cross_entropy(net(x), y)
        loss.backward()
        loss.item()
        optimizer.step()
    assert grid.ledger.total(phase="redistribute").calls == 0
    entries = grid.ledger.entries
    assert all(key.axis != "all" or key.operation.startswith("agreement") for key in entries)
    return {
        tuple(key): (entry.calls, entry.received)
        for key, entry in entries.items()
        if key.axis in AXES and grid.axis(key.axis).size > 1
    }


def all_reduced(nbytes, ranks, index):
    """Bytes that rank `index` receives in an all-reduce of float64."""
    if ranks * nbytes <= 2**16:
        return (ranks - 1) * nbytes
    counts = part_sizes(nbytes // 8, ranks)
    return 8 * ((ranks - 1) * counts[index] + sum(counts) - counts[index])


def loss_along(axis):
    """Key and volume of the sum of the loss, which is one number."""
    return {(axis.name, "loss", "all_reduce"): (1, 8 * (axis.size - 1))}


def along_data(axis, nbytes):
    """One all-reduce of gradients, and the loss."""
    moved = all_reduced(nbytes, axis.size, axis.index)
    return {("data", "reduce data", "all_reduce"): (1, moved), **loss_along(axis)}


def gathered_and_scattered(axis, gathers, bias):
    """Volumes if z shards all matrices, and of the all-reduce of the vectors, which are replicated over z. The backward
    pass does not need the first layer's weight, because the batch needs no gradient."""
    lost, first = (sum(sizes) * (axis.size - 1) // axis.size for sizes in (MATRICES, MATRICES[:1]))
    again = gathers - 1
    moved = {
        ("z", "gather W", "all_gather"): (len(MATRICES) + again * (len(MATRICES) - 1), lost + again * (lost - first)),
        ("z", "reduce dW", "reduce_scatter"): (len(MATRICES), lost),
        **loss_along(axis),
    }
    if bias:
        moved["z", "reduce vectors", "all_reduce"] = (1, all_reduced(sum(VECTORS), axis.size, axis.index))
    return moved


biased = looped("bias", [False, True])


@biased
@on_grid("ddp")
def test_ddp_is_one_all_reduce_of_all_gradients(grid, bias):
    axis, total, found = grid.data, sum(MATRICES) + bias * sum(VECTORS), recorded(grid, bias)
    assert found == along_data(axis, total)
    assert found["data", "reduce data", "all_reduce"] == (1, 2 * total * (axis.size - 1) // axis.size)


@looped("bucket_bytes, buckets", [(1, MATRICES[::-1]), (60_000, [sum(MATRICES[2:]), sum(MATRICES[:2])])])
@on_grid("ddp")
def test_buckets_of_ddp_move_the_same_bytes(grid, bucket_bytes, buckets):
    """From the last layer to the first, in buckets of the requested size."""
    moved = recorded(grid, False, nn.Overlap(bucket_bytes=bucket_bytes))
    volume = sum(all_reduced(nbytes, grid.data.size, grid.data.index) for nbytes in buckets)
    assert moved["data", "reduce data", "all_reduce"] == (len(buckets), volume)


@biased
@on_grid("ddp")
def test_zero_1_is_a_reduce_scatter_and_a_gather_of_the_same_volume(grid, bias):
    axis, total = grid.data, sum(MATRICES) + bias * sum(VECTORS)
    own = sum(8 * outputs * part_sizes(inputs, axis.size)[axis.index] for inputs, outputs in LAYERS)
    own += bias * sum(8 * part_sizes(outputs, axis.size)[axis.index] for _, outputs in LAYERS)
    assert recorded(grid, bias, shard=True) == {
        ("data", "reduce data", "reduce_scatter"): (1, (axis.size - 1) * own),
        ("data", "optimizer", "all_gather"): (len(LAYERS) * (1 + bias), total - own),
        **loss_along(axis),
    }
    assert (axis.size - 1) * own + total - own == 2 * total * (axis.size - 1) // axis.size


GATHERS = [({"reshard_after_forward": True}, 2), ({"reshard_after_forward": False}, 1), ({}, 1), ({"keep_bytes": 0}, 2)]
"""Options of Overlap, and how often each weight is gathered."""


@biased
@looped("make", [nn.Overlap, nn.Overlap.none])
@looped("options, gathers", GATHERS)
@on_grid("fsdp")
def test_fsdp_gathers_twice_and_scatters_once(grid, bias, make, options, gathers):
    """3 (G-1)/G of the parameters. If gathered weights are kept from the forward to the backward pass: 2 (G-1)/G."""
    assert recorded(grid, bias, make(**options)) == gathered_and_scattered(grid.z, gathers, bias)


@pytest.mark.parallel([4], thorough=[8])
@biased
@over_grids(lambda ranks: [("hsdp", size) for size in (2, 4) if ranks > size])
def test_hsdp_is_fsdp_along_z_and_an_all_reduce_of_the_shards_along_data(grid, bias):
    expected = along_data(grid.data, sum(MATRICES) // grid.z.size + bias * sum(VECTORS))
    if grid.z.size > 1:
        expected |= gathered_and_scattered(grid.z, 2, bias)
    assert recorded(grid, bias) == expected


@biased
@looped("wanted", [False, True])
@on_grid("megatron")
def test_megatron_reduces_once_forward_and_once_backward_for_a_pair_of_layers(grid, bias, wanted):
    """Forward, the output of the second layer of a pair. Backward, the gradient of the input of the first, except that
    of the batch if it is not needed. Weights are not sent."""
    outputs, inputs = ([8 * CASE.batch * size for size in sizes] for sizes in ((64, 32), (48, 64)))
    volume = lambda arrays: (len(arrays), 2 * sum(arrays) * (grid.x.size - 1) // grid.x.size)
    assert recorded(grid, bias, wanted=wanted) == {
        ("x", "reduce O", "all_reduce"): volume(outputs),
        ("x", "reduce dI", "all_reduce"): volume(inputs if wanted else inputs[1:]),
    }


@biased
@on_grid("megatron", 2)
def test_megatron_with_data_adds_the_all_reduce_of_each_ranks_weights(grid, bias):
    parts = grid.x.size
    vectors = sum(size // parts if index % 2 == 0 else size for index, size in enumerate(VECTORS))
    moved = {key: value for key, value in recorded(grid, bias).items() if key[0] == "data"}
    assert moved == along_data(grid.data, sum(MATRICES) // parts + bias * vectors)
