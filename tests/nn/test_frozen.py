"""Frozen parameters: nothing is computed, sent or kept for their gradients. Other gradients do not change."""

import pytest
from loops import looped
from mpi_runner.plugin import all_tests
from networks import CLASSES, GRIDS, INPUT, adamw, batch_of, bits, loss_of, network_of, on_grid, over_grids, weights_of

from pmm3d import DisagreementError, DistMatrix, Grid, nn
from pmm3d.io import Checkpoints
from pmm3d.nn.exchange import load_weights
from pmm3d.nn.training import TrainState

pytestmark = pytest.mark.deadline(240)

OPTIONS = ({}, {"recompute": True}, {"activations": "sharded"})


def grads(net):
    return {name: each.grad.gather() for name, each in net.named_parameters().items() if each.grad is not None}


@pytest.mark.parallel([4], thorough=[1])
@over_grids(lambda ranks: GRIDS[ranks][: 4 if all_tests else 2])
@looped("options", OPTIONS)
def test_the_other_gradients_are_the_same(grid, options):
    """For frozen vectors, a frozen layer in the middle, and all layers but the last frozen."""
    net = network_of(grid, CLASSES, **options)
    loss_of(net, CLASSES, *batch_of(CLASSES, 0)).backward()
    every, named = grads(net), net.named_parameters()
    for frozen in ([name for name in every if "bias" in name], ["3.weight", "3.bias"], list(every)[:-2]):
        for name, parameter in named.items():
            parameter.grad = None
            parameter.requires_grad = name not in frozen
        loss_of(net, CLASSES, *batch_of(CLASSES, 0)).backward()
        found = grads(net)
        assert bits(found) == bits({name: each for name, each in every.items() if name not in frozen})
        assert all(named[name].grad_buffer.array is None for name in frozen)
        assert net.requires_grad_() is net and all(each.requires_grad for each in net.parameters())


@pytest.mark.parallel([4])
@over_grids(lambda ranks: [("fsdp", 1), ("megatron", 2)])
def test_a_frozen_trunk_costs_no_backward_pass(grid):
    """No gradient of its weights or its activations is summed, and its inputs are not kept."""
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


@pytest.mark.parallel([2], thorough=[1])
def test_an_optimizer_leaves_them_and_a_checkpoint_has_no_state_of_them(comm, shared_path):
    def made(grid):
        net = network_of(grid, CLASSES)
        net.named_parameters()
        nn.Sequential(grid, *net.layers[:3]).requires_grad_(False)
        return TrainState(net, adamw(net.parameters()))

    with Grid(comm, "fsdp") as grid:
        state, again, keeper = made(grid), made(grid), Checkpoints(grid, shared_path)
        for step in range(2):
            before = weights_of(state.network)
            loss_of(state.network, CLASSES, *batch_of(CLASSES, step)).backward()
            state.optimizer.step()
            after = weights_of(state.network)
            changed = {name for name, weight in after.items() if (before[name] != weight).any()}
            assert changed == {name for name in after if name[0] not in "012"}
        state.save(keeper)
        assert again.resume(keeper) is not None and bits(weights_of(again.network)) == bits(after)
        states, others = (
            {name: matrix.gather() for name, matrix in each.optimizer.matrices().items()} for each in (state, again)
        )
        assert len(states) == 2 * len(changed) and not any("/0." in name for name in states)
        assert bits(states) == bits(others)


def trained(grid, steps, first, state=None, **options):
    """(training state, losses). Layer 0 and others like it learn only in the first steps."""
    if state is None:
        net = nn.MLP(grid, [6, 7, 5], seed=1, **options)
        state = TrainState(net, adamw(net.parameters(), shard_over_data=True))
    losses, library = [], state.network.parameters()[0].library
    for step in steps:
        state.network.layers[0].requires_grad_(step < first)
        x, y = (
            DistMatrix.random(grid, (8, cols), seed=step, dtype="float32", layout=INPUT, library=library)
            for cols in (6, 5)
        )
        loss = nn.mse(state.network(x), y)
        loss.backward()
        state.optimizer.step()
        losses.append(loss.item())
    return state, losses


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
@on_grid("ddp")
def test_one_rank_that_freezes_alone_is_found(grid, fails):
    net = network_of(grid, CLASSES)
    fails(DisagreementError, "requires_grad_", lambda: net.requires_grad_(grid.rank == 0))
    assert all(each.requires_grad for each in net.parameters())
    net.layers[0].weight._learn(grid.rank == 0)
    loss = loss_of(net, CLASSES, *batch_of(CLASSES, 0))
    fails(DisagreementError, "the ranks use different parameters", loss.backward)


@pytest.mark.parallel([2])
@on_grid("fsdp")
def test_what_was_frozen_in_the_forward_pass_gets_no_gradient_when_it_is_computed_again(grid):
    net = network_of(grid, CLASSES, recompute=True)
    frozen = net.layers[0].module.layers[0].requires_grad_(False)
    loss = loss_of(net, CLASSES, *batch_of(CLASSES, 0))
    frozen.requires_grad_()
    loss.backward()
    assert frozen.weight.grad is None and frozen.weight.requires_grad and "0.bias" not in grads(net)
