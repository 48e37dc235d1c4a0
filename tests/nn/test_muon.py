"""Muon on every grid and in every precision, compared with torch; dry runs and configurations of it."""

from functools import partial

import numpy as np
import pytest
from loops import looped
from mpi_runner.plugin import all_tests
from networks import (
    ALL_GRIDS,
    CLASSES,
    GRIDS,
    INPUT,
    VECTORS,
    alone,
    assert_replicas_agree,
    batch_of,
    bits,
    largest_difference,
    loss_of,
    network_of,
    on_each_grid,
    on_grid,
    over_grids,
    train,
    weights_of,
)
from samples import to_library, to_numpy
from test_nn_torch import torch_network
from torch_reference import by_rank_0, torch_loss

from pmm3d import DistMatrix, DTypeError, Grid, Layout, Pmm3dError, nn
from pmm3d.io import Checkpoints
from pmm3d.nn import Precision, optim
from pmm3d.nn.dry import dry_grid
from pmm3d.nn.training import TrainState
from pmm3d.nn.training.config import checked
from pmm3d.nn.training.network import Own, make_optimizer

pytestmark = pytest.mark.deadline(240)
STEPS = 3
OPTIONS = {
    "original": {"lr": 0.02, "weight_decay": 0.1},
    "match_rms_adamw": {"lr": 0.01, "adjust_lr_fn": "match_rms_adamw", "momentum": 0.8, "weight_decay": 0.0},
    "without nesterov": {"lr": 0.02, "nesterov": False, "ns_steps": 3, "ns_coefficients": (1.5, -0.5, 0.1)},
}


def torch_weights(case, options, steps=STEPS):
    """Name -> weight: torch.optim.Muon trains the matrices and AdamW the vectors, in float64, because torch would round
    to bfloat16."""
    import torch
    from mpi4py import MPI

    torch.set_num_threads(1)
    with Grid(MPI.COMM_SELF, (1, 1, 1)) as grid, pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "bfloat16", lambda self: self.clone())
        start = weights_of(network_of(grid, case))
        net = torch_network(torch, case, start)
        parameters = list(net.parameters())
        optimizers = [
            torch.optim.Muon([each for each in parameters if each.ndim == 2], **options),
            torch.optim.AdamW(
                [each for each in parameters if each.ndim == 1],
                lr=options["lr"],
                weight_decay=options.get("weight_decay", 0.1),
            ),
        ]
        for step in range(steps):
            x, y = map(torch.from_numpy, batch_of(case, step))
            net.zero_grad()
            torch_loss(torch, case, net(x), y).backward()
            for optimizer in optimizers:
                optimizer.step()
        values = [value.detach().numpy() for value in parameters]
        return dict(zip(start, (value.T if value.ndim == 2 else value[None] for value in values), strict=True))


@pytest.mark.parallel([4], thorough=[1, 8])
@pytest.mark.parametrize(
    "name, case", [("original", CLASSES), ("match_rms_adamw", VECTORS), ("without nesterov", CLASSES)], ids=OPTIONS
)
def test_it_takes_the_steps_of_torch(comm, name, case):
    expected = by_rank_0(comm, lambda: torch_weights(case, OPTIONS[name]))

    def check(grid):
        for shard in (False, True)[: grid.data.size]:
            found = weights_of(train(grid, case, STEPS, partial(optim.Muon, shard_over_data=shard, **OPTIONS[name]))[1])
            assert [value.shape for value in found.values()] == [value.shape for value in expected.values()]
            assert largest_difference(found, expected) < 1e-8

    every = all_tests or name == "original"  # the effect of the options does not depend on the grid
    on_each_grid(comm, check, GRIDS[comm.size][: 6 if comm.size < 8 else 3 : 1 if every else 3])


PRECISIONS = [
    ("float64", "numpy", 1e-12),
    ("float32", "numpy", 2e-5),
    ("float16", "numpy", 2e-5),
    ("bfloat16", "torch", 2e-5),
    ("float32", "standin", 2e-5),
]


def stepped(grid, dtype, library, start, *gradients):
    """The weight, or its master, after a step with each gradient."""
    made = lambda values: DistMatrix.from_global(
        grid, to_library(values.astype("float32"), library, dtype), layout=Layout(("y", "z"), "x")
    )
    weight = nn.Parameter(made(start), Precision.named(dtype))
    optimizer = optim.Muon([weight], lr=0.02)
    for gradient in gradients:
        (nn.Tensor(made(gradient)) * weight).backward(made(np.ones_like(start)))
        optimizer.step(factor=0.5)
    _, *master = [to_numpy(each.gather(), library) for each in optimizer.matrices().values()]
    return master[0] if master else to_numpy(weight.gather(), library)


@pytest.mark.nightly
@pytest.mark.parallel([4], thorough=[1])
@looped("dtype, library, error", PRECISIONS)
def test_a_weight_of_each_precision(grid, dtype, library, error):
    """As in float64 on one rank. A gradient with the accuracy of float32 is orthogonal to about 500 times this
    accuracy, because small singular values grow by this factor."""
    shapes = [(9, 7), (5, 12), (8, 8), (1, 3), (6, 1)]
    most = len(shapes) if grid.size == 1 else 3 if all_tests or dtype == "float64" else 1
    for shape in shapes[:most]:
        drawn = np.random.default_rng([*shape])
        values = [drawn.standard_normal(shape).astype("float32") for _ in range(3)]
        values = [to_numpy(to_library(each, library, dtype), library).astype("float64") for each in values]
        with alone() as single:
            expected = stepped(single, "float64", "numpy", *values)
        assert np.abs(stepped(grid, dtype, library, *values) - expected).max() < error


@pytest.mark.parallel([4], thorough=[2, 8])
@over_grids(lambda ranks: ALL_GRIDS[ranks][1 :: 2 if ranks < 8 else 5])
def test_bits_are_the_same_each_time_on_all_replicas_and_with_the_state_split(grid):
    found = set()
    for shard in (False, False, True):
        losses, net = train(grid, CLASSES, 2, partial(optim.Muon, lr=0.02, shard_over_data=shard))
        found.add((losses.tobytes(), *bits(weights_of(net)).values()))
        assert_replicas_agree(grid, {name: value.value for name, value in net.named_parameters().items()})
    assert len(found) == 1


@pytest.mark.parallel([4], thorough=[1])
@over_grids(lambda ranks: GRIDS[ranks][:2])
def test_a_group_without_it_is_changed_by_adamw(grid):
    one, other = (
        bits(weights_of(train(grid, CLASSES, 3, make)[1]))
        for make in (
            partial(optim.AdamW, lr=0.01, weight_decay=0.1),
            lambda given: optim.Muon([{"params": list(given), "use_muon": False}], lr=0.01),
        )
    )
    assert one == other
    net = network_of(grid, CLASSES)
    *body, last = (each for each in net.parameters() if not each.is_vector)
    vectors = [each for each in net.parameters() if each.is_vector]
    optimizer = optim.Muon([{"params": body, "lr": 0.02}, {"params": [last, *vectors], "use_muon": False}])
    loss_of(net, CLASSES, *batch_of(CLASSES, 0)).backward()
    optimizer.step()
    assert {name.split("/")[-1] for name in optimizer.matrices() if last.name in name} == {"mean", "square"}
    assert {name.split("/")[-1] for name in optimizer.matrices() if body[0].name in name} == {"momentum"}


@pytest.mark.parallel([4], thorough=[1])
def test_a_run_goes_on_from_its_checkpoint(comm, shared_path):
    """To the same bits on the same grid, and close to them on another one."""
    shapes, found = GRIDS[comm.size][:3], []
    for shape, data in (shapes[0], *shapes):
        with Grid(comm, shape, data) as grid:
            net, keeper = network_of(grid, CLASSES), Checkpoints(grid, shared_path)
            net.settle(CLASSES.sizes[0], dtype="float64")
            state = TrainState(net, optim.Muon(net.parameters(), lr=0.02))
            if found:
                assert state.resume(keeper)["optimizer"]["kind"] == "Muon"
            for step in range(3 if found else 0, 5):
                if step == 3 and not found:
                    state.save(keeper)
                loss_of(net, CLASSES, *batch_of(CLASSES, step)).backward()
                state.optimizer.step()
            found.append(weights_of(net))
    assert bits(found[0]) == bits(found[1])
    assert all(largest_difference(each, found[0]) < 1e-9 for each in found[2:])


NONSENSE = [
    ({"momentum": 1.0}, "Muon: momentum = 1.0: needed is "),
    ({"ns_steps": 0}, "Muon: ns_steps = 0: needed is a whole number of at least 1"),
    ({"ns_steps": 2.5}, "ns_steps = 2.5: needed is "),
    ({"ns_coefficients": (1.0, 2.0)}, r"ns_coefficients = \(1.0, 2.0\): needed is a list of 3 finite numbers"),
    ({"adjust_lr_fn": "mine"}, 'adjust_lr_fn = \'mine\': needed is "original" or "match_rms_adamw"'),
    ({"betas": (1.0, 0.0)}, r"Muon: betas = \(1.0, 0.0\): needed is "),
    ({"lr": -1}, "Muon: lr = -1: needed is a number of at least 0"),
]


@pytest.mark.parallel([2], thorough=[1, 4])
@looped("options, text", NONSENSE)
def test_options_that_make_no_sense_are_refused(some_grid, fails, options, text):
    fails(Pmm3dError, text, lambda: optim.Muon(network_of(some_grid, CLASSES).parameters(), **options))


@pytest.mark.parallel([2], thorough=[1])
def test_complex_matrices_are_refused(some_grid, fails):
    weight = nn.Parameter(DistMatrix.random(some_grid, (4, 4), dtype="complex64"))
    fails(DTypeError, "Muon needs real matrices.*use_muon=False", lambda: optim.Muon([weight]))
    optimizer = optim.Muon([{"params": [weight], "use_muon": False}])
    optimizer.groups[0]["use_muon"] = True
    fails(Pmm3dError, "use_muon of a group has changed since the optimizer was made", optimizer.step)


@pytest.mark.parallel([4], thorough=[1, 8])
@looped("shard", [False, True])
def test_a_dry_run_does_what_a_step_does(comm, shard):
    """The same bytes in the same phases, and the number of operations of the formula."""

    def moved(grid):
        net = nn.MLP(grid, [16, 32, 24], bias=False)
        optimizer = optim.Muon(net.parameters(), shard_over_data=shard)
        x, y = (
            DistMatrix.random(grid, (8, columns), dtype="float32", layout=layout)
            for columns, layout in ((16, INPUT), (24, net.output_layout))
        )
        for _ in range(2):
            nn.mse(net(x), y).backward()
            assert all(parameter.grad is not None for parameter in net.parameters())  # waits
            grid.ledger.reset()
            if grid.dry_run:
                grid.dry_run.actions.clear()
            optimizer.step()
        return {
            key: (entry.calls, entry.sent, entry.received)
            for key, entry in grid.ledger.entries.items()
            if key.axis and not key.operation.startswith("agreement on")
        }

    def check(grid):
        found = moved(grid)
        with dry_grid(grid) as dry:
            assert moved(dry) == found
            flop = sum(2 * each.m * each.n * each.k for each in dry.dry_run.actions if each.what == "gemm")
        wanted = sum(5 * 2 * small * small * (2 * large + small) for small, large in ((16, 32), (24, 32)))
        assert abs(flop * grid.size / grid.data.size - wanted) < 0.3 * wanted

    few = comm.size == 4 and not all_tests  # one with a data axis, and without the split state another
    on_each_grid(comm, check, GRIDS[4][1:2] if few and shard else GRIDS[4][::3] if few else None)


@pytest.mark.parallel([2], thorough=[1])
def test_a_configuration_asks_for_it(comm):
    """Vectors do not decay, as in most recipes. In Python they do, as in torch."""
    default = {"momentum": 0.95, "ns_steps": 5, "adjust_lr_fn": "match_rms_adamw", "weight_decay": 0.0}
    other = {"momentum": 0.5, "ns_steps": 3, "adjust_lr_fn": "original", "weight_decay": 0.2, "decay_vectors": True}
    with Grid(comm, "ddp") as grid:
        net = nn.MLP(grid, [4, 8, 2])
        for options, wanted in (({}, {**default, "decay_vectors": False}), (other, other)):
            config = checked({"data": {"file": "no.h5"}, "optimizer": {"kind": "muon", "lr": 0.003, **options}})
            made = make_optimizer(config, net, Own.of(config, grid))
            assert type(made) is optim.Muon and made.lr == 0.003
            assert {name: made.groups[0][name] for name in wanted} == wanted
        assert optim.AdamW(net.parameters()).groups[0]["decay_vectors"]


@pytest.mark.parallel([2])
def test_a_configuration_spares_embeddings_positions_the_last_layer_and_vectors(comm):
    """Also if the head is tied to the embedding, and in a pipeline, where a stage has some of them."""
    config = checked({"data": {"file": "x.h5"}, "optimizer": {"kind": "muon"}})
    sizes = {"vocabulary": 8, "layers": 2, "hidden": 8, "heads": 2}
    hidden = {"attention.qkv.weight", "attention.out.weight", "mlp.up.weight", "mlp.down.weight"}
    blocks = {f"{block}.{name}" for block in (1, 2) for name in hidden}
    with Grid(comm, "ddp") as grid, Grid(comm, (1, 1, 1), axes={"pipe": 2}) as pipe:
        make = partial(nn.GPT, positions=4, **sizes)
        for net, wanted in (
            (make(grid), blocks),
            (nn.Llama(grid, **sizes), blocks),
            (nn.Pipeline(pipe, make), blocks),
            (nn.MLP(grid, [4, 8, 8, 2]), {"0.weight", "2.weight"}),
        ):
            named, options = (
                net.named_parameters(),
                make_optimizer(config, net, Own.of(config, net.parent_grid))._options(),
            )
            assert {name for name, each in named.items() if options[each]["use_muon"]} == wanted & {*named}


def small(grid):
    """(network, optimizer, passed): passed() is a forward and backward pass."""
    net = nn.MLP(grid, [6, 8, 4], seed=1)
    x, y = (DistMatrix.random(grid, (8, columns), dtype="float32", seed=columns) for columns in (6, 4))
    return net, optim.Muon(net.parameters(), lr=0.02), lambda: nn.mse(net(x), y).backward()


@pytest.mark.parallel([2])
@on_grid((1, 1, 2))
def test_ranks_compare_a_step_once_if_it_is_like_the_one_before(grid, comm, monkeypatch, fails):
    """In addition, the norm of each matrix and its range are agreed on. A changed option is compared again."""
    _, opt, passed = small(grid)
    counts, found, agreement = [], [], grid._agreement
    monkeypatch.setattr(grid, "_agreement", lambda *given: (counts.append(given[0]), agreement(*given))[1])
    for ns_steps in (5, 5, 4, 4):
        opt.groups[0]["ns_steps"] = ns_steps
        passed()
        counts.clear()
        opt.step()
        found.append(len(counts))
    assert found[1] == found[3] == 1 + 2 * 2 and found[0] > found[2] > found[1]
    passed()
    opt.groups[0]["lr"] += comm.rank
    fails(Pmm3dError, "Muon.step: the ranks passed different arguments", opt.step)


@pytest.mark.parallel([2])
@on_grid((1, 1, 2))
def test_a_gradient_that_one_rank_lacks_is_refused_by_all(grid, comm, fails):
    """Also after steps whose products compared nothing, with a different learning rate in each."""
    net, opt, passed = small(grid)
    for step in range(3):
        passed()
        opt.groups[0]["lr"] = 0.02 / (1 + step)
        opt.step()
    passed()
    before, parameters = net.gather("2.weight"), net.named_parameters()
    assert parameters["2.bias"].grad is not None
    if comm.rank:
        parameters["2.weight"].grad = None
    fails(Pmm3dError, r"Muon.step: the ranks passed different arguments(.|\n)*2.weight \(parameter 2\)", opt.step)
    assert opt.steps == 3 and np.array_equal(net.gather("2.weight"), before)
    opt.zero_grad()
    passed()
    opt.step()
