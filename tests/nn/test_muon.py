"""Muon on every grid, in every precision, compared with torch and a plain version; dry runs and plans of it."""

from functools import partial
from math import sqrt

import numpy as np
import pytest
from loops import given
from mpi_runner.plugin import all_tests
from networks import (
    ALL_GRIDS,
    CLASSES,
    GRIDS,
    INPUT,
    VECTORS,
    assert_replicas_agree,
    batch_of,
    bits,
    largest_difference,
    loss_of,
    network_of,
    on_each_grid,
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
COEFFICIENTS = 3.4445, -4.7750, 2.0315


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
            make = partial(optim.Muon, shard_over_data=shard, **OPTIONS[name])
            _, net = train(grid, case, STEPS, make)
            found = weights_of(net)
            assert {name: value.shape for name, value in found.items()} == {
                name: value.shape for name, value in expected.items()
            }
            assert largest_difference(found, expected) < 1e-8

    every = all_tests or name == "original"  # the effect of the options does not depend on the grid
    on_each_grid(comm, check, GRIDS[comm.size][: 6 if comm.size < 8 else 3 : 1 if every else 3])


def orthogonalised(matrix, steps=5):
    x = matrix / max(np.linalg.norm(matrix), 1e-7)
    x = x.T if x.shape[0] < x.shape[1] else x
    for _ in range(steps):
        p, q, r = COEFFICIENTS
        gram = x.T @ x
        x = x @ (p * np.eye(len(gram)) + q * gram + r * gram @ gram)
    return x.T if matrix.shape[0] < matrix.shape[1] else x


def plainly(weight, gradients, lr=0.02, momentum=0.95, decay=0.1):
    """The steps of Muon, by numpy in float64."""
    kept = np.zeros_like(weight)
    for gradient in gradients:
        kept = momentum * kept + (1 - momentum) * gradient
        direction = (1 - momentum) * gradient + momentum * kept
        scale = sqrt(max(1, weight.shape[1] / weight.shape[0]))
        weight = weight * (1 - lr * decay) - lr * scale * orthogonalised(direction)
    return weight


PRECISIONS = [
    ("float64", "numpy", 1e-12),
    ("float32", "numpy", 2e-5),
    ("float16", "numpy", 2e-5),
    ("bfloat16", "torch", 2e-5),
    ("float32", "standin", 2e-5),
]


@pytest.mark.parallel([4], thorough=[1])
def test_a_weight_of_each_precision(grid):
    """A gradient with the accuracy of float32 is orthogonal to about 500 times this accuracy, because small singular
    values grow by this factor."""
    for dtype, library, error in PRECISIONS:
        with given(dtype=dtype, library=library, error=error):
            shapes = [(9, 7), (5, 12), (8, 8), (1, 3), (6, 1)]
            most = len(shapes) if grid.size == 1 else 3 if all_tests or dtype == "float64" else 1
            for shape in shapes[:most]:
                drawn = np.random.default_rng([*shape])
                rounded = lambda values: to_numpy(to_library(values, library, dtype), library).astype("float64")
                start, *gradients = (rounded(drawn.standard_normal(shape).astype("float32")) for _ in range(3))
                spread = lambda values: DistMatrix.from_global(
                    grid, to_library(values.astype("float32"), library, dtype), layout=Layout(("y", "z"), "x")
                )
                weight = nn.Parameter(spread(start), Precision.named(dtype))
                optimizer = optim.Muon([weight], lr=0.02)
                for gradient in gradients:
                    (nn.Tensor(spread(gradient)) * weight).backward(spread(np.ones(shape)))
                    optimizer.step(factor=0.5)
                kept = [to_numpy(each.gather(), library) for each in optimizer.matrices().values()]
                found = kept[1] if len(kept) == 2 else to_numpy(weight.gather(), library)
                assert np.abs(found - plainly(start, [0.5 * gradient for gradient in gradients])).max() < error


@pytest.mark.parallel([4], thorough=[2, 8])
def test_bits_are_the_same_each_time_on_all_replicas_and_with_the_state_split(comm):
    def check(grid):
        (losses, net), (again, other), (split, third) = (
            train(grid, CLASSES, 2, partial(optim.Muon, lr=0.02, shard_over_data=shard))
            for shard in (False, False, True)
        )
        assert losses.tobytes() == again.tobytes() == split.tobytes()
        assert bits(weights_of(net)) == bits(weights_of(other)) == bits(weights_of(third))
        for each in (net, third):
            assert_replicas_agree(grid, {name: value.value for name, value in each.named_parameters().items()})

    on_each_grid(comm, check, ALL_GRIDS[comm.size][1 :: 2 if comm.size < 8 else 5])


@pytest.mark.parallel([4], thorough=[1])
def test_a_group_without_it_is_changed_by_adamw(comm):
    def check(grid):
        found = []
        for make in (
            partial(optim.AdamW, lr=0.01, weight_decay=0.1),
            lambda given: optim.Muon([{"params": list(given), "use_muon": False}], lr=0.01),
        ):
            _, net = train(grid, CLASSES, 3, make)
            found.append(bits(weights_of(net)))
        assert found[0] == found[1]
        net = network_of(grid, CLASSES)
        *body, last = (each for each in net.parameters() if not each.is_vector)
        vectors = [each for each in net.parameters() if each.is_vector]
        optimizer = optim.Muon([{"params": body, "lr": 0.02}, {"params": [last, *vectors], "use_muon": False}])
        loss_of(net, CLASSES, *batch_of(CLASSES, 0)).backward()
        optimizer.step()
        assert {name.split("/")[-1] for name in optimizer.matrices() if last.name in name} == {"mean", "square"}
        assert {name.split("/")[-1] for name in optimizer.matrices() if body[0].name in name} == {"momentum"}

    on_each_grid(comm, check, GRIDS[comm.size][:2])


@pytest.mark.parallel([4], thorough=[1])
def test_a_run_goes_on_from_its_checkpoint(comm, shared_path):
    """To the same bits on the same grid, and close to them on another one."""

    def loop(state, steps):
        for step in steps:
            loss_of(state.network, CLASSES, *batch_of(CLASSES, step)).backward()
            state.optimizer.step()

    def begun(grid):
        net = network_of(grid, CLASSES)
        net.settle(CLASSES.sizes[0], dtype="float64")
        return TrainState(net, optim.Muon(net.parameters(), lr=0.02))

    shapes = GRIDS[comm.size][:3]
    with Grid(comm, *shapes[0]) as grid:
        state = begun(grid)
        loop(state, range(3))
        state.save(Checkpoints(grid, shared_path / "runs"))
        loop(state, range(3, 5))
        expected = weights_of(state.network)
    for shape, data in shapes:
        with Grid(comm, shape, data) as grid:
            state = begun(grid)
            assert state.resume(Checkpoints(grid, shared_path / "runs"))["optimizer"]["kind"] == "Muon"
            loop(state, range(3, 5))
            found = weights_of(state.network)
            assert largest_difference(found, expected) < 1e-9
            assert bits(found) == bits(expected) or (shape, data) != shapes[0]


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
def test_options_that_make_no_sense_are_refused(some_grid, fails):
    for options, text in NONSENSE:
        with given(options=options, text=text):
            fails(Pmm3dError, text, lambda: optim.Muon(network_of(some_grid, CLASSES).parameters(), **options))


@pytest.mark.parallel([2], thorough=[1])
def test_complex_matrices_are_refused(some_grid, fails):
    weight = nn.Parameter(DistMatrix.random(some_grid, (4, 4), dtype="complex64"))
    fails(
        DTypeError,
        "Muon needs real matrices: put it in a group of its own with use_muon=False",
        lambda: optim.Muon([weight]),
    )
    optimizer = optim.Muon([{"params": [weight], "use_muon": False}])
    optimizer.groups[0]["use_muon"] = True
    fails(Pmm3dError, "use_muon of a group has changed since the optimizer was made", optimizer.step)


@pytest.mark.parallel([4], thorough=[1, 8])
def test_a_dry_run_does_what_a_step_does(comm):
    """The same bytes in the same phases, and the number of operations of the formula."""
    for shard in [False, True]:
        with given(shard=shard):

            def check(grid):
                net = nn.MLP(grid, [16, 32, 24], bias=False)
                optimizer = optim.Muon(net.parameters(), shard_over_data=shard)
                x, y = (
                    DistMatrix.random(grid, (8, columns), dtype="float32", layout=layout)
                    for columns, layout in ((16, INPUT), (24, net.output_layout))
                )
                nn.mse(net(x), y).backward()
                optimizer.step()
                with dry_grid(grid) as dry:
                    other = nn.MLP(dry, [16, 32, 24], bias=False)
                    copies = other, optim.Muon(other.parameters(), shard_over_data=shard)
                    entries = []
                    for where, (network, its) in ((grid, (net, optimizer)), (dry, copies)):
                        inputs = [
                            each
                            if where is grid
                            else DistMatrix.empty(where, each.shape, dtype="float32", layout=each.layout)
                            for each in (x, y)
                        ]
                        for _ in range(2):
                            nn.mse(network(inputs[0]), inputs[1]).backward()
                            assert all(parameter.grad is not None for parameter in network.parameters())  # waits
                            where.ledger.reset()
                            if where is dry:
                                dry.dry_run.actions.clear()
                            its.step()
                        entries.append(
                            {
                                key: (entry.calls, entry.sent, entry.received)
                                for key, entry in where.ledger.entries.items()
                                if key.axis and not key.operation.startswith("agreement on")
                            }
                        )
                    assert entries[0] == entries[1]
                    flop = sum(2 * each.m * each.n * each.k for each in dry.dry_run.actions if each.what == "gemm")
                    wanted = sum(5 * 2 * small * small * (2 * large + small) for small, large in ((16, 32), (24, 32)))
                    assert abs(flop * grid.size / grid.data.size - wanted) < 0.3 * wanted

            few = comm.size == 4 and not all_tests  # one with a data axis, and without the split state another
            on_each_grid(comm, check, GRIDS[4][1:2] if few and shard else GRIDS[4][::3] if few else None)


@pytest.mark.parallel([2], thorough=[1])
def test_a_configuration_asks_for_it(comm):
    settings = {"data": {"file": "nowhere.h5"}, "optimizer": {"kind": "muon", "lr": 0.003}}
    with Grid(comm, "ddp") as grid:
        net = nn.MLP(grid, [4, 8, 2])
        make = lambda: make_optimizer(checked(settings), net, Own.of(checked(settings), grid))
        made = make()
        assert type(made) is optim.Muon and made.lr == 0.003
        named = lambda *names: tuple(made.groups[0][name] for name in names)
        assert named("momentum", "ns_steps", "adjust_lr_fn", "weight_decay") == (0.95, 5, "match_rms_adamw", 0.0)
        assert named("decay_vectors") == (False,)  # as in most recipes; in Python True, as in torch
        settings["optimizer"] |= {"momentum": 0.5, "ns_steps": 3, "adjust_lr_fn": "original", "weight_decay": 0.2}
        settings["optimizer"]["decay_vectors"] = True
        made = make()
        assert named("momentum", "ns_steps", "adjust_lr_fn", "weight_decay") == (0.5, 3, "original", 0.2)
        assert named("decay_vectors") == (True,) and optim.AdamW(net.parameters()).groups[0]["decay_vectors"]


@pytest.mark.parallel([2])
def test_a_configuration_spares_embeddings_positions_the_last_layer_and_vectors(comm):
    """Also if the head is tied to the embedding, and in a pipeline, where a stage has some of them."""
    settings = {"data": {"file": "x.h5"}, "optimizer": {"kind": "muon"}}
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
            config, named = checked(settings), net.named_parameters()
            made = make_optimizer(config, net, Own.of(config, net.whole))
            options = made._options()
            assert {name for name, each in named.items() if options[each]["use_muon"]} == wanted & {*named}


@pytest.mark.parallel([2])
def test_ranks_compare_a_step_once_if_it_is_like_the_one_before(comm, monkeypatch, fails):
    """In addition, the norm of each matrix and its range are agreed on. A changed option is compared again."""
    with Grid(comm, (1, 1, 2)) as grid:
        net, counts = nn.MLP(grid, [6, 8, 4], seed=1), []
        opt, agreement = optim.Muon(net.parameters(), lr=0.02), grid._agreement
        monkeypatch.setattr(grid, "_agreement", lambda *passed: (counts.append(passed[0]), agreement(*passed))[1])
        x, y = (DistMatrix.random(grid, (8, columns), dtype="float32", seed=columns) for columns in (6, 4))
        found = []
        for ns_steps in (5, 5, 4, 4):
            opt.groups[0]["ns_steps"] = ns_steps
            nn.mse(net(x), y).backward()
            del counts[:]
            opt.step()
            found.append(len(counts))
        assert found[1] == found[3] == 1 + 2 * 2 and found[0] > found[2] > found[1]
        nn.mse(net(x), y).backward()
        opt.groups[0]["lr"] += comm.rank
        fails(Pmm3dError, "Muon.step: the ranks passed different arguments", opt.step)


@pytest.mark.parallel([2])
def test_a_gradient_that_one_rank_lacks_is_refused_by_all(comm, fails):
    """Also after steps whose products compared nothing, with a different learning rate in each."""
    with Grid(comm, (1, 1, 2)) as grid:
        net = nn.MLP(grid, [6, 8, 4], seed=1)
        opt = optim.Muon(net.parameters(), lr=0.02)
        x, y = (DistMatrix.random(grid, (8, columns), dtype="float32", seed=columns) for columns in (6, 4))
        for step in range(3):
            nn.mse(net(x), y).backward()
            opt.groups[0]["lr"] = 0.02 / (1 + step)
            opt.step()
        nn.mse(net(x), y).backward()
        before, parameters = net.gather("2.weight"), net.named_parameters()
        assert parameters["2.bias"].grad is not None
        if comm.rank:
            parameters["2.weight"].grad = None
        text = fails(Pmm3dError, "Muon.step: the ranks passed different arguments", opt.step)
        assert "2.weight (parameter 2)" in text
        assert opt.steps == 3 and np.array_equal(net.gather("2.weight"), before)
        opt.zero_grad()
        nn.mse(net(x), y).backward()
        opt.step()
