"""Stale weights: linear least squares in stages, compared with the recurrences in numpy."""

from itertools import product
from time import monotonic, sleep

import numpy as np
import pytest
from loops import given, looped
from networks import spread
from samples import bits_of, to_numpy

from pmm3d import Grid, nn
from pmm3d.layout import batch_layout
from pmm3d.nn import optim
from pmm3d.nn.pipeline import PipelineError, PipelineSchedule
from pmm3d.nn.pipeline.network import Pipeline
from pmm3d.nn.training import stale
from pmm3d.nn.training.stale import DoubleBuffered, HetPipe, PipeDream, train_stale
from pmm3d.nn.training.step import train_step

pytestmark = pytest.mark.deadline(240)
WIDTH, ROWS, LR = 5, 6, 0.3


def layers(stages):
    return lambda grid: nn.Sequential(
        grid, *(nn.Linear(grid, WIDTH, WIDTH, bias=False, seed=number, dtype="float64") for number in range(stages))
    )


def data(number, seed):
    random = np.random.default_rng(seed)
    return [(random.standard_normal((ROWS, WIDTH)), random.standard_normal((ROWS, WIDTH))) for _ in range(number)]


def network(grid, stages, make=None, schedule="1f1b"):
    net = Pipeline(grid, make or layers(stages), schedule=schedule)
    return net, optim.SGD(net.parameters(), lr=LR)


def batches(net, arrays):
    return [tuple(spread(net.grid, each, batch_layout()) for each in pair) for pair in arrays]


def weights(net, comm):
    """Weights of all stages."""
    found = dict(comm.allgather((net.index, *(to_numpy(each.gather()) for each in net.parameters()))))
    return [found[stage] for stage in sorted(found)]


def gradients(matrices, x, y):
    """Gradients of the mean square of x W_0 W_1 ... - y, by each matrix."""
    inputs = [x]
    for matrix in matrices:
        inputs.append(inputs[-1] @ matrix)
    slope, found = 2 * (inputs.pop() - y) / y.size, []
    for before, matrix in zip(inputs[::-1], matrices[::-1]):
        found.append(before.T @ slope)
        slope = slope @ matrix.T
    return found[::-1]


def recurrence(begin, arrays, every, version):
    """Weights after each change. version(t, s) returns the number of changes in the weights of stage s that micro-batch
    t uses."""
    found = [begin]
    for first in range(0, len(arrays), every):
        parts = [
            gradients([found[version(t, s)][s] for s in range(len(begin))], *arrays[t])
            for t in range(first, first + every)
        ]
        found.append([weight - LR * sum(part[s] for part in parts) / every for s, weight in enumerate(found[-1])])
    return found


@pytest.mark.parallel([2, 3, 4])
def test_weights_are_those_of_the_recurrence(comm):
    grids = [((1, 1, 1), 1, comm.size), *[((1, 1, 2), 1, 2), ((1, 1, 1), 2, 2)] * (comm.size == 4)]
    for (shape, copies, p), name in product(grids, ("PipeDream", "2BW")):
        rule, every, version = {
            "PipeDream": (PipeDream(), 1, lambda t, s, p=p: max(0, t - (p - 1 - s))),
            "2BW": (DoubleBuffered(4), 4, lambda t, s: max(0, t // 4 - 1)),
        }[name]
        with given(name=name, shape=shape, data=copies), Grid(comm, shape, copies, axes={"pipe": p}) as grid:
            net, optimizer = network(grid, p)
            begin, arrays = weights(net, comm), data(12, seed=7)
            losses = train_stale(net, optimizer, nn.mse, batches(net, arrays), rule)
            expected = recurrence(begin, arrays, every, version)[-1]
            fresh = recurrence(begin, arrays, every, lambda t, s: t // every)[-1]
            assert len(losses) == 12 // every and optimizer.steps == 12 // every
            assert np.abs(np.array(weights(net, comm)) - expected).max() <= 1e-12
            assert np.abs(np.array(expected) - fresh).max() > 1e-4  # as gradients are stale


def mixtures(grid, bias_rate=0.0, balance=0.5):
    of = lambda stage: nn.MoE(
        stage, WIDTH, 6, 4, seed=2, dtype="float64", router={"balance": balance, "bias_rate": bias_rate}
    )
    make = lambda stage: nn.Sequential(stage, of(stage), of(stage), of(stage), of(stage))
    net = Pipeline(grid, make, schedule="1f1b")
    return net, optim.SGD(net.parameters(), lr=LR)


@pytest.mark.parallel([2])
def test_losses_of_routers_and_their_biases_in_a_batch(comm):
    """The first batch uses fresh weights, so its change is that of `train_step`, also of the biases of routers. Losses
    of routers have the micro-batch's share of the batch, not of the call."""
    arrays = [tuple(each[: 3 + 3 * (number % 2)] for each in pair) for number, pair in enumerate(data(4, seed=3))]
    with Grid(comm, (1, 1, 1), pipe=2) as grid:
        for rate in (0.0, 0.1):
            found = []
            for stale_ in (True, False):
                net, optimizer = mixtures(grid, rate)
                before = optimizer.steps
                if stale_:
                    held, change = [], stale._StaleExecutor._change

                    def after_first(executor, micros, change=change, held=held, net=net):
                        change(executor, micros)
                        held.append({name: to_numpy(each.gather()) for name, each in net.named_parameters().items()})

                    with pytest.MonkeyPatch.context() as patch:
                        patch.setattr(stale._StaleExecutor, "_change", after_first)
                        train_stale(net, optimizer, nn.mse, batches(net, arrays), DoubleBuffered(2))
                    assert len(held) == 2 and optimizer.steps == before + 2
                    found.append(held[0])
                else:
                    train_step(net, optimizer, nn.mse, batches(net, arrays[:2]))
                    found.append({name: to_numpy(each.gather()) for name, each in net.named_parameters().items()})
            for name, weight in found[0].items():
                with given(rate=rate, name=name):
                    if name.endswith("router.bias"):
                        assert np.abs(weight).max() == rate
                    else:
                        assert np.abs(weight - found[1][name]).max() < 1e-12


@pytest.fixture
def workers(comm):
    """(number of this virtual worker, grid of its two stages, grid of the ranks of all workers with the same stage)."""
    worker, place = divmod(comm.rank, 2)
    own, across = comm.Split(worker), comm.Split(place)
    with Grid(own, (1, 1, 1), axes={"pipe": 2}) as grid, Grid(across, shape="ddp") as same:
        yield worker, grid, same
    own.Free()
    across.Free()


@pytest.mark.parallel([4])
@looped("distance", [0, 1, 3])
def test_virtual_workers_have_the_weights_of_the_recurrence(workers, distance):
    worker, grid, same = workers
    net, optimizer = network(grid, 2)
    begin, arrays = weights(net, grid.comm), [data(8, seed=seed) for seed in (1, 2)]
    train_stale(net, optimizer, nn.mse, batches(net, arrays[worker]), HetPipe(same, distance))
    assert np.abs(np.array(weights(net, grid.comm)) - waves(begin, arrays, distance)).max() <= 1e-12


@pytest.mark.parallel([4])
def test_virtual_workers_refuse_biases_of_routers(workers):
    _worker, grid, same = workers
    net, optimizer = mixtures(grid, 0.1, 0.0)
    with pytest.raises(PipelineError, match="Use balance in place of bias_rate"):
        train_stale(net, optimizer, nn.mse, batches(net, data(2, seed=1)), HetPipe(same))


def waves(begin, arrays, distance, size=2):
    """Weights after the last wave, for two workers with these micro-batches."""
    begin = np.array(begin)
    versions, changes = [[begin] for _ in arrays], [[] for _ in arrays]
    for t in range(len(arrays[0])):
        for worker, own in enumerate(arrays):
            used = versions[worker][max(0, t - size + 1)]
            changes[worker].append(-LR * np.array(gradients(list(used), *own[t])))
            versions[worker].append(versions[worker][-1] + changes[worker][-1])
        came = (t + 1) // size - 1 - distance
        if (t + 1) % size == 0 and came >= 0:
            for worker, other in ((0, 1), (1, 0)):
                versions[worker][-1] = versions[worker][-1] + sum(changes[other][came * size : (came + 1) * size])
    return begin + sum(map(sum, changes))


@pytest.mark.parallel([4])
@looped("distance", [0, 2])
def test_clocks_of_workers_differ_by_at_most_the_distance_and_one(workers, monkeypatch, distance):
    (worker, grid, same), events, end = workers, [], stale._Waves.end
    monkeypatch.setattr(
        stale._Waves, "end", lambda waves, last: (events.append((monotonic(), worker)), end(waves, last))
    )

    def slow(x):
        sleep(0.02 * worker)
        return x

    net, optimizer = network(grid, 2, lambda grid: nn.Sequential(grid, slow, *layers(2)(grid).layers))
    train_stale(net, optimizer, nn.mse, batches(net, data(16, seed=3)), HetPipe(same, distance))
    clocks, apart = [0, 0], []
    for _, which in sorted(event for found in same.comm.allgather(events) for event in found):
        clocks[which] += 1
        apart.append(abs(clocks[0] - clocks[1]))
    assert clocks == [8, 8] and distance <= max(apart) <= distance + 1


@pytest.mark.parallel([2])
def test_what_cannot_be_trained_is_refused_on_every_rank(comm):
    three = PipelineSchedule.read("0F0,1F0,1B0,0B0\n2F0,2B0")
    with Grid(comm, (1, 1, 1), axes={"pipe": 2}) as grid:
        for schedule, number, rule, message in [
            ("gpipe", 4, PipeDream(), "PipeDream needs weights after 1 changes, and 0 are done"),
            ("1f1b", 6, DoubleBuffered(4), "must be a multiple of 4"),
            ("1f1b", 4, DoubleBuffered(0), "a batch has at least 1 micro-batch"),
            ("1f1b", 4, HetPipe(grid, -1), "a distance is at least 0"),
            ("1f1b", 4, HetPipe(grid), "the grid of the workers has 1 of 2 ranks along data: make it with"),
            ("zb-h1", 8, DoubleBuffered(4), "changes its weights here, while weight gradients of"),
            ("interleaved", 4, PipeDream(), "4 stages on 2 ranks"),
            (three, 1, PipeDream(), "3 stages on 2 ranks"),
        ]:
            net, optimizer = network(grid, 4, schedule=schedule)
            with given(schedule=schedule, number=number), pytest.raises(PipelineError, match=message):
                train_stale(net, optimizer, nn.mse, batches(net, data(number, seed=0)), rule)


@pytest.mark.parallel([1])
@looped("dtype", ["float32", "float16"])
def test_one_stage_trains_as_without_a_pipeline(comm, dtype):
    """No gradient is stale with one stage: equal bits, also of master weights and of the state of AdamW."""
    linear = lambda grid, seed: nn.Linear(grid, WIDTH, WIDTH, seed=seed, dtype=dtype)
    arrays, found = [(x.astype(dtype), y.astype(dtype)) for x, y in data(5, seed=2)], []
    for train in (
        lambda net, optimizer, taken: train_stale(net, optimizer, nn.mse, taken, PipeDream()),
        lambda net, optimizer, taken: [train_step(net, optimizer, nn.mse, [batch])[0] for batch in taken],
    ):
        with Grid(comm, (1, 1, 1)) as grid:
            net = Pipeline(grid, lambda grid: nn.Sequential(grid, linear(grid, 1), nn.relu, linear(grid, 2)))
            losses = train(net, optim.AdamW(net.parameters(), lr=0.01), batches(net, arrays))
            found.append((losses, *(bits_of(each._in_checkpoint.gather()) for each in net.parameters())))
    assert found[0] == found[1]
