"""Gradients by torch's backward passes: passes that differ between ranks, partial gradients, recomputation, hooks."""

from types import SimpleNamespace

import pytest
import torch
from networks import on_each_grid
from seeded import differences, made, whole_gradients
from torch import nn
from torch.utils.checkpoint import checkpoint

from pmm3d import DisagreementError, Grid, Pmm3dError
from pmm3d.nn import Overlap, defer_weights
from pmm3d.torch import Dropout3D, Linear3D, Split, input_rows, mean, parallelize

torch.set_num_threads(1)
pytestmark = pytest.mark.deadline(200)


class Heads(nn.Module):
    """A trunk and two heads."""

    def __init__(self, last=4):
        super().__init__()
        self.trunk, self.a, self.b = (nn.Linear(4, outputs) for outputs in (4, 4, last))

    def forward(self, x):
        x = self.trunk(x)
        return self.a(x), self.b(x)


class Mixed(nn.Module):
    """Layers on the grid, and replicated parameters."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 3)
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x):
        return self.last(self.norm(self.first(x * self.scale)))


class Gated(nn.Module):
    """The layer that is made last takes the input: this rank's columns, whose number is the width of the other
    layer."""

    def __init__(self):
        super().__init__()
        self.gate, self.main = nn.Linear(4, 4), nn.Linear(8, 4)

    def forward(self, x):
        return self.gate(self.main(x))


MIXED = {"first": "column", "norm": "x", "last": Split("row", gather=True)}


@pytest.mark.parallel([2])
def test_ranks_that_go_back_through_other_layers_are_told(comm, fails):
    """Both heads had the same number of uses, so only the pass differs. Then the passes of two models."""
    with Grid(comm, (1, 1, 1), data=2) as grid:
        net, other = (made(Heads, grid, {"*": "column"}) for _ in range(2))
        text = fails(DisagreementError, "backward", lambda: net(torch.ones(2, 4))[grid.rank].sum().backward())
        assert "a.weight" in text or "b.weight" in text
        assert all(tensor.grad is None for tensor in net.parameters())
        outs = [each(torch.ones(2, 4))[0].sum() for each in (net, other)]
        fails(DisagreementError, "backward", lambda: outs[grid.rank].backward())
        sum(net(torch.ones(2, 4))).sum().backward()
        assert net.a.weight.grad is not None
    with Grid(comm, "fsdp") as grid:  # with a sum of weight gradients during the pass
        net = made(lambda: Heads(20000), grid, {"*": "column"})
        fails(DisagreementError, "use different parameters", lambda: net(torch.ones(2, 4))[grid.rank].sum().backward())


@pytest.mark.parallel([2], thorough=[1])
def test_only_what_a_pass_is_for_gets_a_gradient(comm, fails):
    """autograd.grad by an activation; backward(inputs=) for an activation, a shard, and a replicated parameter."""

    def check(grid):
        net = made(Mixed, grid, MIXED)
        x = torch.arange(8.0).reshape(2, 4).requires_grad_()
        names = lambda: [name for name, tensor in net.named_parameters() if tensor.grad is not None]
        loss = lambda: net(x).square().sum()
        [dx] = torch.autograd.grad(loss(), [x])
        assert names() == [] and x.grad is None
        loss().backward(inputs=[x])
        assert names() == [] and torch.equal(x.grad, dx)
        loss().backward(inputs=[net.last.weight])
        assert names() == ["last.weight"]
        of_last = net.last.weight.grad.clone()
        loss().backward(inputs=[net.scale])
        assert names() == ["scale", "last.weight"] and torch.equal(net.last.weight.grad, of_last)
        net.zero_grad()
        loss().backward()
        assert names() == [name for name, _ in net.named_parameters()] and torch.equal(net.last.weight.grad, of_last)
        if grid.shape.data * grid.shape.z > 1:
            fails(
                Pmm3dError,
                "scale: torch.autograd.grad would bring this rank's part",
                lambda: torch.autograd.grad(loss(), [net.scale]),
            )

    on_each_grid(comm, check)


@pytest.mark.parallel([2])
def test_gradients_of_weights_are_not_left_for_later(comm, fails):
    """torch would otherwise show arbitrary numbers in .grad."""
    with Grid(comm, (2, 1, 1)) as grid:
        net = made(lambda: nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 3)), grid)
        with defer_weights(grid):
            loss = net(torch.ones(8, 4)).square().sum()
            fails(Pmm3dError, "call backward.* outside of this context", loss.backward)
        assert all(each.grad is None for each in net.parameters())
        net(torch.ones(8, 4)).square().sum().backward()
        assert all(each.grad is not None for each in net.parameters())


@pytest.mark.parallel([2])
def test_a_frozen_layer_in_the_middle_keeps_nothing_and_gets_no_gradient(comm):
    """Frozen before the forward pass, or between it and the backward pass; a layer on the grid, and a replicated
    one."""
    parts = lambda: (nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 6), nn.LayerNorm(6), nn.Linear(6, 3))
    plan = {"0": "column", "1": "x", "2": "row", "4": Split("column", gather=True)}
    for shape in ((2, 1, 1), (1, 1, 2)):
        with Grid(comm, shape) as grid:
            net, kept = made(lambda: nn.Sequential(*parts()), grid, plan), []
            x = input_rows(grid, torch.arange(32.0).reshape(8, 4))

            def forward():
                kept.clear()
                with torch.autograd.graph.saved_tensors_hooks(lambda each: (kept.append(each.nbytes), each)[1], id):
                    net(x)
                net.zero_grad()
                return net(x).square().sum()

            forward().backward()
            every, whole = {name: each.grad.clone() for name, each in net.named_parameters()}, sum(kept)
            loss = forward()
            net[1:4].requires_grad_(False)
            for _ in range(2):  # in the second pass, the layer is frozen from the forward pass on
                loss.backward()
                found = {name: each.grad for name, each in net.named_parameters() if each.grad is not None}
                assert found.keys() == {name for name in every if name[0] in "04"}
                assert all(torch.equal(found[name], every[name]) for name in found)
                loss = forward()
            assert sum(kept) < whole
            net.requires_grad_(True)
            net[0].requires_grad_(False)
            (loss + net(x).square().sum()).backward()  # learns again, in the second of two forward passes
            assert net[2].weight.grad is not None and torch.equal(net[2].weight.grad, every["2.weight"])


@pytest.mark.parallel([1])
def test_torchs_fast_path_does_not_read_the_shards(comm):
    """In eval mode without gradients, TransformerEncoderLayer reads the weights of its layers and computes by
    itself."""
    plan = {"0.linear1": "column", "0.linear2": Split("row", gather=True), "0.dropout": "x", "0.dropout[12]": "off"}
    make = lambda: (torch.manual_seed(0), nn.Sequential(nn.TransformerEncoderLayer(8, 2, 8, batch_first=True)).eval())[
        1
    ]
    plain, x = make(), torch.randn(4, 3, 8, generator=torch.Generator().manual_seed(0))

    def check(grid):
        net = parallelize(make(), grid, plan)
        with torch.no_grad():
            assert torch.allclose(net(input_rows(grid, x)), input_rows(grid, plain(x)), atol=1e-6)

    on_each_grid(comm, check)


@pytest.mark.parallel([2])
def test_a_prelu_off_the_grid_learns_as_the_plain_one(comm):
    make = lambda: (torch.manual_seed(0), nn.Sequential(nn.Linear(4, 4), nn.PReLU(), nn.Linear(4, 4)))[1]
    with Grid(comm, (2, 1, 1)) as grid:
        net = made(make, grid, {"0": Split("column", gather=True), "1": "off", "2": Split("row", gather=True)})
        plain = make()
        for each in (net, plain):
            each(-torch.ones(2, 4)).sum().backward()
        assert torch.allclose(net[1].weight.grad, plain[1].weight.grad)


class Silent(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        return x * 1

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


@pytest.mark.parallel([2])
def test_a_parameter_that_gets_no_gradient_has_none(comm):
    """Also if a rank has used a frozen module, which is no use in a pass."""

    class Net(Mixed):
        def forward(self, x):
            return self.last(self.norm(self.first(Silent.apply(x, self.scale))))

    with Grid(comm, (1, 1, 1), data=2) as grid:
        net, frozen = made(Net, grid, MIXED), made(lambda: nn.Linear(4, 4), grid).requires_grad_(False)
        if grid.rank == 0:
            frozen(torch.ones(2, 4))
        net(torch.ones(2, 4)).sum().backward()
        assert net.scale.grad is None and net.first.weight.grad is not None


@pytest.mark.parallel([1])
def test_dropout_keeps_a_byte_an_element(comm):
    kept = []
    with Grid(comm) as grid, torch.autograd.graph.saved_tensors_hooks(lambda x: (kept.append(x.nbytes), x)[1], id):
        Dropout3D(grid, 0.5)(torch.ones(8, 4, requires_grad=True))
    assert 0 < sum(kept) <= 32


@pytest.mark.parallel([2])
def test_one_feature_on_an_axis_of_several(comm):
    """On the first rank of the axis, the whole column and this rank's part have the same width."""
    make = lambda: (torch.manual_seed(0), nn.Sequential(nn.Linear(1, 4), nn.Linear(4, 1), nn.Linear(1, 3)).double())[1]
    plain, x = make(), torch.arange(4.0, dtype=torch.float64)[:, None].requires_grad_()
    plain(x).square().mean().backward()
    of_x, x.grad, expected = x.grad, None, {name: each.grad for name, each in plain.named_parameters()}

    def check(grid):
        net = parallelize(make(), grid)
        net(input_rows(grid, x)).square().mean().backward()
        assert torch.allclose(x.grad, of_x)
        x.grad = None
        assert differences(whole_gradients(grid, net, expected), expected) < 1e-12

    on_each_grid(comm, check)


@pytest.mark.parallel([2])
@pytest.mark.parametrize("ends_in_relu", [False, True])
def test_sums_over_data_are_begun_under_a_pass_that_computes_again(comm, ends_in_relu):
    """torch.utils.checkpoint repeats parts of the forward pass in the backward pass. These are no new uses."""
    with Grid(comm, (1, 1, 1), data=2) as grid:
        net = made(lambda: nn.Sequential(*[nn.Linear(4, 4) for _ in range(4)]), grid, overlap=Overlap(bucket_bytes=1))
        halves = [nn.Sequential(net[0], net[1]), nn.Sequential(net[2], net[3], *[nn.ReLU()] * ends_in_relu)]
        seen, x = [], torch.ones(2, 4, requires_grad=True)
        for _ in range(2):
            for half in halves:
                x = checkpoint(half, x, use_reentrant=False)
            x.register_hook(lambda _: grid.ledger.reset())
            x.sum().backward()
            x = torch.ones(2, 4, requires_grad=True)
            x.register_hook(lambda _: seen.append(grid.ledger.total(phase="reduce data").received))
        assert seen[-1] > 0


def test_tf32_is_torchs_own_setting():
    """Only for float32 on a device."""
    from pmm3d.arrays.torch_rounding import ON_DEVICE
    from pmm3d.torch.grid_parameter import precision_of

    of = lambda **facts: precision_of(SimpleNamespace(**{"dtype": torch.float32, "is_cuda": True} | facts)).tf32
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    assert not of()
    try:
        matmul.fp32_precision = "tf32"
        assert of() and not of(is_cuda=False) and not of(dtype=torch.bfloat16)
        ON_DEVICE.hold(matmul, "ieee")  # as another thread does for its GEMM
        assert of()
        ON_DEVICE.release(matmul)
    finally:
        matmul.fp32_precision = before


@pytest.mark.parallel([2])
def test_ranks_that_share_rows_get_the_same_batch_or_an_error(comm, fails):
    """Along x both ranks hold all rows. Along data each rank has a different batch. Columns differ between ranks."""
    own = lambda: torch.full((2, 4), float(comm.rank))
    with Grid(comm, (2, 1, 1)) as grid:
        net = made(Mixed, grid, MIXED)
        fails(DisagreementError, "the model's input: ranks 0 and 1 .*DataLoader", lambda: net(own()))
        assert comm.rank or input_rows(grid, own()).shape == (2, 4)
        fails(DisagreementError, "mean: ranks 0 and 1 .*labels", lambda: mean(grid, own()))
        with torch.no_grad():
            fails(DisagreementError, "mean: ranks 0 and 1 .*labels", lambda: mean(grid, own()))
        net.eval()
        fails(DisagreementError, "the model's input", lambda: net(own()))
        net(own())
        rows = made(lambda: nn.Linear(4, 4), grid, {"": "row"})
        rows(own()[:, : 4 // 2])
        made(Gated, grid, {"main": "row", "gate": "column"})(own())
        net = made(lambda: nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4)), grid)
        fails(DisagreementError, "the model's input", lambda: net(own()))
    for debug in (False, True):
        with Grid(comm, (1, 1, 1), data=2, debug=debug) as grid:
            net = made(Mixed, grid, MIXED)
            mean(grid, net(own())).backward()
    with Grid(comm, (2, 1, 1), debug=True) as grid:
        net = made(Mixed, grid, MIXED)
        net(torch.ones(2, 4)).sum().backward()
        fails(DisagreementError, "the model's input", lambda: net(own()))
        fails(DisagreementError, "input_rows: ranks 0 and 1 .*DataLoader", lambda: input_rows(grid, own()))
        layer = Linear3D(grid, 4, 4, gather=True)
        layer(torch.ones(2, 4)).sum().backward()
        fails(DisagreementError, "a layer's input: ranks 0 and 1", lambda: layer(own()))


class Keeping:
    """torch's engine, with references to its callbacks, as from a traceback or from another thread of the engine."""

    def __init__(self, engine):
        self.kept, self._engine, self.run_backward = [], engine, engine.run_backward

    def queue_callback(self, callback):
        self.kept.append(callback)
        self._engine.queue_callback(callback)


@pytest.mark.parallel([2])
@pytest.mark.parametrize("forward_first", [False, True])
def test_a_pass_that_failed_is_over_on_all_ranks_whoever_keeps_what_is_left_of_it(comm, monkeypatch, forward_first):
    """The error and torch's callback still exist on one rank. The next pass has an earlier graph, or a new one."""

    def broken(gradient):
        raise RuntimeError("a hook")

    Variable = torch.autograd.Variable
    if comm.rank == 0:
        monkeypatch.setattr(Variable, "_execution_engine", Keeping(Variable._execution_engine))
    with Grid(comm, "fsdp") as grid:
        net, x, errors = made(Mixed, grid, MIXED), torch.ones(2, 4), []
        net(x).sum().backward()
        expected = [tensor.grad.clone() for tensor in net.parameters()]
        net.zero_grad()
        handle = net.first.register_forward_hook(lambda module, args, out: out.register_hook(broken) and None)
        failing = net(x).sum()
        handle.remove()
        other = net(x).sum()
        with pytest.raises(RuntimeError, match="a hook") as caught:
            failing.backward()
        errors += [caught] * (grid.rank == 0)
        del caught
        assert all(tensor.grad is None for tensor in net.parameters())
        (net(x).sum() if forward_first else other).backward()
        assert all(torch.equal(tensor.grad, found) for tensor, found in zip(net.parameters(), expected))


@pytest.mark.parallel([2])
def test_a_pass_inside_of_another_is_refused(comm, fails):
    with Grid(comm, "fsdp") as grid:
        net, x = made(Mixed, grid, MIXED), torch.ones(2, 4, requires_grad=True)
        for first in (True, False):
            within = lambda layer, x, inside: checkpoint(layer, x, use_reentrant=True) if inside else layer(x)
            out = net.norm(within(net.last, within(net.first, x, first), not first).repeat(1, 2)).square()
            fails(Pmm3dError, "Pass use_reentrant=False", lambda: out.sum().backward())
        net(x).sum().backward()
        assert net.first.weight.grad is not None
