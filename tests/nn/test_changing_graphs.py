"""Graphs that change between steps are right. Graphs that differ between ranks are refused on all ranks."""

import json
import re
from itertools import count

import pytest
from loops import given, looped
from mpi_runner.plugin import all_tests
from networks import GRIDS, alone, inner, largest_difference, on_each_grid, on_grid, spread, weights_of
from samples import integers
from torch_reference import by_rank_0

from pmm3d import DisagreementError, DistMatrix, Grid, MatmulPlan, Pmm3dError, nn
from pmm3d.nn import optim

pytestmark = pytest.mark.deadline(240)
ROWS, SIZE = 11, 7
SWITCHES = [
    nn.Overlap(),
    nn.Overlap(bucket_bytes=1),
    nn.Overlap(bucket_bytes=1, reshard_after_forward=True),
    nn.Overlap.none(),
]
PATHS = {
    "used twice, once, not at all, twice": [(0, 1, 1), (0, 1), (0,), (1, 0, 1), (2, 2, 2), (0, 1, 1)],
    "stochastic depth": [(0, 1, 3), (3,), (0, 1, 2, 3), (1,), (0, 2), (1, 2)],
}
RATE = 0.125


class Paths(nn.Module):
    """h + tanh(h W + b) for each layer on the path."""

    def __init__(self, grid):
        self.grid = grid
        self.steps = [
            nn.Residual(nn.Sequential(grid, nn.Linear(grid, SIZE, SIZE, seed=seed, dtype="float64"), nn.tanh))
            for seed in range(4)
        ]

    def along(self, x, path):
        for index in path:
            x = self.steps[index](x)
        return x


def paths_of(paths, step):
    """The paths of the first and of the second batch of a step."""
    return paths[step], paths[step - 1]


def batches(step, count):
    return [0.25 * integers((2, ROWS, SIZE), seed=10 * step + index) for index in range(count)]


@pytest.mark.parallel([4], thorough=[1, 2, 8])
@looped("number, paths", enumerate(PATHS.values()))
def test_a_graph_may_change_from_step_to_step(comm, number, paths):
    """With and without overlap, with small buckets, with a state split over data, and with two batches per step on
    different paths. An error in a step changes the weights, which are compared after the last step. Without --all, half
    of the switches are tested on one grid, and the other half on the next."""
    turn = count(number)
    expected = by_rank_0(comm, lambda: [of_torch("SGD", paths, parts) for parts in (1, 2)])

    def check(grid):
        tried = [*enumerate(SWITCHES)]
        for index, overlap in tried if all_tests else tried[next(turn) % 2 :: 2]:
            nn.Tape.of(grid).parallel.overlap, parts = overlap, 1 + index // 2 % 2
            net = Paths(grid)
            optimizer = optim.SGD(net.parameters(), RATE, shard_over_data=index in (1, 2))
            for step in range(len(paths)):
                for part, (path, (x, v)) in enumerate(zip(paths_of(paths, step), batches(step, parts))):
                    with nn.Tape.of(grid).set(syncing=part == parts - 1):
                        inner(net.along(nn.Tensor(spread(grid, x)), path), v).backward()
                optimizer.step()
            assert largest_difference(weights_of(net), expected[parts - 1]) < 1e-12, (grid, overlap)

    on_each_grid(comm, check, GRIDS[comm.size][2:4] if comm.size == 8 else None)


def of_torch(kind, paths, parts=1):
    """Name -> weight after steps on these paths. A layer that is not used has no gradient. parts: batches of a step."""
    import torch

    torch.set_num_threads(1)
    with alone() as grid:
        weights = {name: torch.tensor(value, requires_grad=True) for name, value in weights_of(Paths(grid)).items()}
    optimizer = getattr(torch.optim, kind)(weights.values(), RATE)
    for step in range(len(paths)):
        optimizer.zero_grad()
        for path, (x, v) in zip(paths_of(paths, step), batches(step, parts)):
            out = torch.from_numpy(x)
            for index in path:
                weight, bias = (weights[f"steps.{index}.module.0.{name}"] for name in ("weight", "bias"))
                out = out + torch.tanh(out @ weight + bias)
            (out * torch.from_numpy(v)).sum().backward()
        optimizer.step()
    return {name: weight.detach().numpy() for name, weight in weights.items()}


@pytest.mark.parallel([4], thorough=[1, 2, 8])
def test_adam_counts_the_steps_of_each_parameter(comm):
    """As in torch, for a layer that is not used in each step. A loaded state continues the count."""
    paths = PATHS["stochastic depth"]
    expected = by_rank_0(comm, lambda: of_torch("Adam", paths))

    def check(grid):
        net, halves = Paths(grid), []
        for half in (paths[:3], paths[3:]):
            optimizer = optim.Adam(net.parameters(), RATE, shard_over_data=True)
            if halves:
                optimizer.load_state(json.loads(json.dumps(halves[0].state())))
                assert optimizer.steps_without_grad == halves[0].steps_without_grad
                for name, value in optimizer.matrices().items():
                    value.local[...] = halves[0].matrices()[name].local
            for path in half:
                ((x, v),) = batches(optimizer.steps, 1)
                inner(net.along(nn.Tensor(spread(grid, x)), path), v).backward()
                optimizer.step()
            halves.append(optimizer)
        assert optimizer.state()["missed"]["steps.3.module.0.weight"] == 3
        assert largest_difference(weights_of(net), expected) < 1e-12

    on_each_grid(comm, check, GRIDS[comm.size][:2])


@pytest.mark.parallel([1])
def test_a_state_of_before_steps_were_counted_for_each_parameter(comm):
    with Grid(comm) as grid:
        optimizer = optim.Adam(Paths(grid).parameters())
        optimizer.load_state({"kind": "Adam", "steps": 4, "lr": 0.5})
        assert (optimizer.steps, optimizer.lr, dict(optimizer.steps_without_grad)) == (4, 1e-3, {})


def different(grid, layers, bucket_bytes, when, uses, others):
    """Four steps. In step `when`, rank 1 and the other ranks use the middle layer different numbers of times. Returns
    the step and the error."""
    nn.Tape.of(grid).parallel.overlap = nn.Overlap(bucket_bytes=bucket_bytes)
    pair = lambda seed: nn.Sequential(
        grid, nn.Linear(grid, 6, 8, seed=seed), nn.tanh, nn.Linear(grid, 8, 6, seed=seed, cols="x")
    )
    net = nn.Sequential(grid, *[pair(index) for index in range(layers)])
    optimizer = optim.SGD(net.parameters(), 0.1)
    for step in range(4):
        x = nn.Tensor(target := DistMatrix.random(grid, (8, 6), seed=step, dtype="float32"))
        for index, part in enumerate(net.layers):
            special = index == layers // 2 and step == when
            for _ in range((uses if grid.rank == 1 else others) if special else 1):
                x = part(x)
        try:
            nn.mse(x, target).backward()
            optimizer.step()
        except Pmm3dError as error:
            return step, str(error)


DIFFERENCES = {
    2: [(2, 2**24, 0, 1, 0), (2, 1, 2, 0, 1), (24, 1, 0, 2, 1), (24, 1, 2, 1, 0), (24, 2000, 2, 0, 1)],
    4: [(2, 1, 0, 1, 0), (24, 2000, 2, 2, 1)],
}
"""By number of ranks: layers, bytes of a bucket, the step that differs, uses on rank 1, uses on the others."""


@pytest.mark.parallel([2], thorough=[4])
def test_a_rank_that_uses_a_layer_otherwise_is_named(comm):
    """In the first step or a later one, with one bucket or many. No rank hangs, and all raise the same text."""
    for layers, bucket_bytes, when, uses, others in DIFFERENCES[comm.size]:
        with given(layers=layers, bucket_bytes=bucket_bytes, when=when, uses=uses):
            with Grid(comm, "ddp", timeout=20) as grid:
                said = comm.allgather(different(grid, layers, bucket_bytes, when, uses, others))
            assert len(set(said)) == 1 and said[0][0] == when, said
            difference = r"On rank 1 (\d+)\.[02]\.(weight|bias) \(\d x \d\) is used (\d) times, on rank 0 (\d) times"
            found = re.search(difference, said[0][1])
            assert found is not None, said
            assert (int(found[1]), int(found[3]), int(found[4])) == (layers // 2, uses, others), said


@pytest.mark.parallel([2])
def test_ranks_on_different_paths_are_told_before_a_rule_sends_anything(comm, fails):
    """Paths whose rules have messages: a layer norm, a softmax, a gather of dO, and of the input."""
    x = integers((4, 6))
    with Grid(comm, (2, 1, 1)) as grid:
        norm = nn.LayerNorm(grid, 6, dtype="float64")
        linears = [nn.Linear(grid, 6, 6, dtype="float64", activations="sharded", cols=cols) for cols in "xy"]
        parameters = nn.Sequential(grid, norm, *linears).parameters()
        for paths in ((0, 1), (1, 0), (0, 2), (3, 1), (2, 3)):
            given = nn.Tensor(spread(grid, x, nn.tensor.Layout((), "x")), requires_grad=True)
            ends = [norm(given), nn.softmax(norm.gain * 1 + 0 * norm.bias), *(linear(given) for linear in linears)]
            losses = [nn.mse(end, end.value) for end in ends]
            fails(DisagreementError, "use different parameters", losses[paths[grid.rank]].backward)
            for parameter in parameters:
                parameter.grad = None


@pytest.mark.parallel([2])
@on_grid((2, 1, 1))
def test_a_rule_with_a_plan_of_its_own_sends_nothing_before_the_ranks_agree(grid, fails):
    a, b = (spread(grid, integers((8, 8)), layout) for layout in (nn.tensor.Layout.A, nn.tensor.Layout.B))
    plan, layers = MatmulPlan(a, b), [nn.Linear(grid, 8, 8, dtype="float64") for _ in range(2)]
    plan(), plan(), nn.Sequential(grid, *layers).named_parameters()
    x = spread(grid, integers((4, 8)))
    out = layers[grid.rank](x)
    if grid.rank == 0:
        out = out.made(out.shard, (out,), lambda gradient: (plan(), [gradient])[1])
    fails(DisagreementError, "use different parameters", nn.mse(out, out.value).backward)
