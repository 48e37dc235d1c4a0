"""Frozen parameters: nothing is computed, sent or kept for their gradients. Other gradients do not change."""

import pytest
from loops import given
from mpi_runner.plugin import all_tests
from networks import CLASSES, GRIDS, adamw, batch_of, bits, loss_of, network_of, on_each_grid, weights_of

from pmm3d import DisagreementError, DistMatrix, Grid, nn
from pmm3d.io import Checkpoints
from pmm3d.nn import optim
from pmm3d.nn.exchange import load_weights
from pmm3d.nn.training import TrainState

pytestmark = pytest.mark.deadline(240)

OPTIONS = ({}, {"recompute": True}, {"activations": "sharded"})


def grads(net):
    return {
        name: parameter.grad.gather()
        for name, parameter in net.named_parameters().items()
        if parameter.grad is not None
    }


@pytest.mark.parallel([4], thorough=[1])
def test_the_other_gradients_are_the_same(comm):
    """For frozen vectors, a frozen layer in the middle, and all layers but the last frozen."""
    for options in OPTIONS:
        with given(options=options):

            def check(grid):
                net = network_of(grid, CLASSES, **options)
                loss_of(net, CLASSES, *batch_of(CLASSES, 0)).backward()
                every = grads(net)
                for frozen in ([name for name in every if "bias" in name], ["3.weight", "3.bias"], list(every)[:-2]):
                    for parameter in net.parameters():
                        parameter.grad = None
                    named = net.named_parameters()
                    for name in frozen:
                        named[name].requires_grad = False
                    loss_of(net, CLASSES, *batch_of(CLASSES, 0)).backward()
                    found = grads(net)
                    assert found.keys() == every.keys() - frozen
                    assert bits(found) == bits({name: every[name] for name in found})
                    assert all(named[name].grad_buffer.array is None for name in frozen)
                    assert net.requires_grad_() is net and all(each.requires_grad for each in net.parameters())

            on_each_grid(comm, check, GRIDS[comm.size][: 4 if all_tests else 2])


@pytest.mark.parallel([4])
def test_a_frozen_trunk_costs_no_backward_pass(comm):
    """No gradient of its weights or its activations is summed, and its inputs are not kept."""

    def check(grid):
        net = network_of(grid, CLASSES, norm=False)
        costs = []
        for frozen in ([], net.layers[:-1], net.layers[2:3]):
            for layer in frozen:
                if isinstance(layer, nn.Module):
                    layer.requires_grad_(False)
            loss = loss_of(net, CLASSES, *batch_of(CLASSES, 0))
            kept = sum(array.nbytes for array in loss.kept())
            grid.ledger.reset()
            loss.backward()
            assert all(each.grad is None or each.requires_grad for each in net.parameters())  # waits for the sums
            sums = [grid.ledger.total(phase=phase).calls for phase in ("reduce dI", "reduce dW")]
            costs.append((kept, *sums))
            net.requires_grad_()
        (kept, of_input, of_weight), trunk, middle = costs
        assert trunk[0] < middle[0] < kept and trunk[1] == 0
        assert (trunk[2], middle[1]) == (min(1, of_weight), of_input) and middle[2] in (0, 2)

    on_each_grid(comm, check, [("fsdp", 1), ("megatron", 2)])


@pytest.mark.parallel([2], thorough=[1])
def test_an_optimizer_leaves_them_and_a_checkpoint_has_no_state_of_them(comm, shared_path):
    with Grid(comm, "fsdp") as grid:
        made = []
        for _ in range(2):
            net = network_of(grid, CLASSES)
            net.named_parameters()
            nn.Sequential(grid, *net.layers[:3]).requires_grad_(False)
            made.append(TrainState(net, adamw(net.parameters())))
        state, again = made
        names = list(state.network.named_parameters())
        for step in range(2):
            before = weights_of(state.network)
            loss_of(state.network, CLASSES, *batch_of(CLASSES, step)).backward()
            state.optimizer.step()
            after = weights_of(state.network)
            changed = {name for name in names if (before[name] != after[name]).any()}
            assert changed == {name for name in names if name[0] not in "012"}
            keeper = Checkpoints(grid, shared_path)
            state.save(keeper)
        assert again.resume(keeper) is not None and bits(weights_of(again.network)) == bits(after)
        states = state.optimizer.matrices()
        assert len(states) == 2 * len(changed) and not any("/0." in name for name in states)
        assert bits({name: matrix.gather() for name, matrix in states.items()}) == bits(
            {name: matrix.gather() for name, matrix in again.optimizer.matrices().items()}
        )


def trained(grid, steps, first, state=None, **options):
    """(training state, losses). Layer 0 and others like it learn only in the first steps."""
    if state is None:
        net = nn.MLP(grid, [6, 7, 5], seed=1, **options)
        state = TrainState(net, adamw(net.parameters(), shard_over_data=True))
    losses = []
    for step in steps:
        state.network.layers[0].requires_grad_(step < first)
        loss = nn.mse(state.network(of_rows(grid, 6, step, state)), of_rows(grid, 5, step, state))
        loss.backward()
        state.optimizer.step()
        losses.append(loss.item())
    return state, losses


def of_rows(grid, cols, step, state):
    library = state.network.parameters()[0].library
    return DistMatrix.random(grid, (8, cols), seed=step, dtype="float32", layout=nn_batch(), library=library)


@pytest.mark.parallel([2])
@pytest.mark.parametrize("precision, first", [("float32", 2), ("bfloat16", 2), ("bfloat16", 0)])
def test_a_run_goes_on_whether_it_freezes_before_or_after_it_is_loaded(comm, shared_path, precision, first):
    """Layers freeze after some steps, or from the start, and learn again later; with ZeRO-1. Another precision loads
    the weights."""
    options = {"precision": precision, "library": "torch"}
    with Grid(comm, "ddp", data=2) as grid:
        state, _ = trained(grid, range(4), first, **options)
        keeper = Checkpoints(grid, shared_path)
        path, saved = state.save(keeper), state.network.layers[0].weight.gather().float()
        _, wanted = trained(grid, range(4, 7), 9, state)
        for frozen in (True, False):
            again, _ = trained(grid, (), 0, **options)
            again.network.layers[0].requires_grad_(not frozen)
            again.resume(keeper, path)
            assert trained(grid, range(4, 7), 9, again)[1] == wanted
            assert again.optimizer.steps_without_grad == {
                each: 4 - first for each in again.network.layers[0].parameters()
            }
        full, _ = trained(grid, (), 0, library="torch")
        load_weights(full.network, path)
        assert abs(full.network.layers[0].weight.gather() - saved).max() <= 2**-8 * bool(first)
        assert full.resume(keeper, path)["step"] == 4


@pytest.mark.parallel([2])
def test_one_rank_that_freezes_alone_is_found(comm, fails):
    with Grid(comm, "ddp") as grid:
        net = network_of(grid, CLASSES)
        fails(DisagreementError, "requires_grad_", lambda: net.requires_grad_(grid.rank == 0))
        assert all(each.requires_grad for each in net.parameters())
        net.layers[0].weight._learn(grid.rank == 0)
        loss = loss_of(net, CLASSES, *batch_of(CLASSES, 0))
        fails(DisagreementError, "the ranks use different parameters", loss.backward)


@pytest.mark.parallel([2])
def test_what_was_frozen_in_the_forward_pass_gets_no_gradient_when_it_is_computed_again(comm):
    with Grid(comm, "fsdp") as grid:
        net = network_of(grid, CLASSES, recompute=True)
        frozen = net.layers[0].module.layers[0].requires_grad_(False)
        loss = loss_of(net, CLASSES, *batch_of(CLASSES, 0))
        frozen.requires_grad_()
        loss.backward()
        assert frozen.weight.grad is None and frozen.weight.requires_grad and "0.bias" not in grads(net)


@pytest.mark.parallel([1])
def test_only_what_learns_is_in_the_memory_of_a_dry_run(comm):
    from pmm3d.nn.dry import dry_grid, memory

    with Grid(comm) as grid, dry_grid(grid) as dry:
        net = nn.MLP(dry, [64, 64, 8])
        net.layers[0].requires_grad_(False)
        opt = optim.AdamW(net.parameters())
        x, y = (DistMatrix.empty(dry, (4, cols), dtype="float32", layout=nn_batch()) for cols in (64, 8))
        nn.mse(net(x), y).backward()
        opt.step()
        head = 4 * (64 * 8 + 8)
        assert (memory(dry)["gradients"], memory(dry)["state"]) == (head, 2 * head)


def nn_batch():
    from pmm3d.layout import batch_layout

    return batch_layout("y")
