"""torch modules on every grid learn the same as the plain modules."""

import numpy as np
import pytest
import torch
from networks import ALL_GRIDS, MANY_GRIDS, alone, on_each_grid
from seeded import Block, differences, made, whole_gradients
from torch import nn

from pmm3d import LayoutError
from pmm3d.nn import Overlap, no_sync
from pmm3d.torch import (
    Split,
    clip_grad_norm_,
    full_state_dict,
    gather_output,
    input_rows,
    load_full_state_dict,
    mean,
    parallelize,
)

torch.set_num_threads(1)
pytestmark = pytest.mark.deadline(300)
MSE = nn.functional.mse_loss


def mlp(dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(7, 16),
        nn.ReLU(inplace=True),
        nn.LayerNorm(16),
        nn.Sequential(nn.Linear(16, 12), nn.GELU(), nn.Linear(12, 9, bias=False)),
        nn.Tanh(),
        nn.Linear(9, 5),
    ).to(dtype)


def batch(step, rows=23, features=7, outputs=5, dtype=torch.float32):
    random = torch.Generator().manual_seed(step)
    return (
        torch.randn(rows, features, generator=random, dtype=dtype),
        torch.randn(rows, outputs, generator=random, dtype=dtype),
    )


def losses_of(net, steps, clip=None, grid=None):
    """Losses, and norms if gradients are clipped, of steps of AdamW. grid: None for a plain module."""
    optimizer, losses = torch.optim.AdamW(net.parameters(), lr=1e-2), []
    for step in range(steps):
        x, y = (input_rows(grid, part) if grid else part for part in batch(step))
        each = MSE(net(x), y, reduction="none")
        losses.append(mean(grid, each) if grid else each.mean())
        losses[-1].backward()
        if clip:
            losses.append((clip_grad_norm_ if grid else nn.utils.clip_grad_norm_)(net.parameters(), clip))
        optimizer.step()
        optimizer.zero_grad()
    return np.array([loss.item() for loss in losses])


@pytest.mark.parallel([4], thorough=[1, 2, 8])
def test_an_mlp_learns_as_the_plain_one_does_on_every_grid(comm):
    """10 steps of AdamW in float32, with clipped gradients, and with features and rows that no axis divides."""
    plain = mlp()
    expected, found = losses_of(plain, 10, clip=0.2), {}
    assert expected[1] > 0.2 and abs(expected[-2] - expected[0]) > 1e-2

    def check(grid):
        net = parallelize(mlp(), grid)
        error = np.abs(losses_of(net, 10, 0.2, grid) - expected).max()
        found[repr(grid.shape)] = max(error, differences(full_state_dict(net), plain.state_dict()))

    on_each_grid(comm, check, ALL_GRIDS[comm.size])
    assert max(found.values()) < 1e-6, found


HEADS = Block.HEAD
PLAN = {
    "[qkv]": Split("column", unit=HEADS),
    "out": Split("row", unit=HEADS, gather=True),
    "up": "column",
    "down": Split("row", gather=True),
}


@pytest.mark.parallel([2], thorough=[1])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_model_of_low_precision_has_gradients_of_its_type(comm, dtype):
    """As torch requires. They are close to the gradients in float32."""
    exact = mlp()
    x, y = batch(0, 24)
    MSE(exact(x), y).backward()
    expected = {name: tensor.grad for name, tensor in exact.named_parameters()}

    def check(grid):
        net = parallelize(mlp(dtype), grid)
        own_x, own_y = (input_rows(grid, part.to(dtype)) for part in (x, y))
        mean(grid, MSE(net(own_x), own_y, reduction="none")).backward()
        assert {tensor.grad.dtype for tensor in net.parameters()} == {dtype}
        for name, gradient in whole_gradients(grid, net, expected).items():
            assert (gradient.float() - expected[name]).norm() < 3e-2 * (1 + expected[name].norm())

    on_each_grid(comm, check, MANY_GRIDS[comm.size])


@pytest.mark.parallel([4], thorough=[1])
def test_a_transformer_block_has_the_gradients_of_the_plain_one(comm):
    """Columns are cut between heads. Gradients of modules outside the plan are summed over rows. Inputs have 3 dims,
    and gradients accumulate twice."""
    make = lambda: (torch.manual_seed(0), Block().double())[1]
    plain, tokens = make(), torch.randint(11, (6, 5), generator=torch.Generator().manual_seed(1))
    for _times in range(2):
        nn.functional.cross_entropy(plain(tokens).flatten(0, 1), tokens.flatten()).backward()
    expected = {name: tensor.grad for name, tensor in plain.named_parameters()}

    def check(grid):
        net = parallelize(make(), grid, PLAN)
        mine = input_rows(grid, tokens)
        for _times in range(2):
            each = nn.functional.cross_entropy(net(mine).flatten(0, 1), mine.flatten(), reduction="none")
            mean(grid, each).backward()
        assert net.embed.weight.grad.shape == (11, 16)
        assert differences(whole_gradients(grid, net, list(expected)), expected) < 1e-12
        assert clip_grad_norm_(net.parameters(), 1e9).item() == pytest.approx(
            torch.stack([each.norm() for each in expected.values()]).norm().item()
        )

    on_each_grid(comm, check)


@pytest.mark.nightly
@pytest.mark.parallel([4])
def test_overlaps_and_checkpoints_change_no_bit(comm):
    """Without the overlaps; with weights that are gathered again in the backward pass; with one copy of them; with
    torch.utils.checkpoint."""
    from torch.utils.checkpoint import checkpoint

    def trained(grid, overlap, again=False):
        net = parallelize(mlp(), grid, overlap=overlap)
        forward = net.forward
        if again:
            net.forward = lambda x: checkpoint(forward, x, use_reentrant=False)
        losses = losses_of(net, 3, grid=grid)
        return losses.tobytes(), {name: each.numpy().tobytes() for name, each in full_state_dict(net).items()}

    def check(grid):
        once, shared = Overlap(), Overlap(shared_weights=True)
        kinds = [once, Overlap.none(), Overlap(reshard_after_forward=True), shared]
        found = [trained(grid, each) for each in kinds] + [trained(grid, each, again=True) for each in (once, shared)]
        assert all(each == found[0] for each in found)

    on_each_grid(comm, check)


@pytest.mark.parallel([4])
def test_a_step_sends_what_the_network_of_pmm3d_sends(comm):
    from pmm3d import DistMatrix
    from pmm3d import nn as own
    from pmm3d.layout import batch_layout

    def sent(grid, step):
        step()
        grid.ledger.reset()
        step()
        return {
            (axis, phase): grid.ledger.total(axis=axis, phase=phase).received
            for axis in ("x", "y", "z", "data")
            for phase in ("gather W", "reduce O", "reduce dI", "reduce dW", "reduce vectors", "reduce data")
        }

    def check(grid):
        net = made(lambda: nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)), grid)
        x = input_rows(grid, torch.ones(16, 8))
        other = own.MLP(grid, [8, 16, 8], library="torch")
        rows = DistMatrix.from_global(grid, torch.ones(16, 8), layout=batch_layout("y"))
        mine = sent(grid, lambda: net(x).sum().backward())

        def step():
            own.sum(own.sum(other(rows), 0), 1).backward()
            assert all(parameter.grad is not None for parameter in other.parameters())  # waits for the sums

        assert mine == sent(grid, step)

    on_each_grid(comm, check)


@pytest.mark.parallel([4])
def test_gradients_are_those_of_the_mean_of_the_losses(comm):
    """Plain means over equal numbers of rows, a loss of all rows, and the mean of the whole batch; also the gradient of
    the input."""

    def gradients(grid, loss_of):
        net = parallelize(mlp(torch.float64), grid)
        x, y = batch(0, 24, dtype=torch.float64)
        x.requires_grad_()
        loss_of(net(input_rows(grid, x)), y).backward()
        names = [name for name, _ in net.named_parameters()]
        return {**whole_gradients(grid, net, names), "x": x.grad}

    plain, (x, y) = mlp(torch.float64), batch(0, 24, dtype=torch.float64)
    MSE(plain(x.requires_grad_()), y).backward()
    expected = {**{name: tensor.grad for name, tensor in plain.named_parameters()}, "x": x.grad}

    def check(grid):
        rows = lambda y: input_rows(grid, y)
        for loss in (
            lambda out, y: MSE(out, rows(y)),
            lambda out, y: MSE(gather_output(grid, out), y),
            lambda out, y: mean(grid, MSE(out, rows(y), reduction="none")),
        ):
            assert differences(gradients(grid, loss), expected) < 1e-14

    on_each_grid(comm, check)


@pytest.mark.parallel([2])
def test_gradients_come_and_go_as_torchs_do(comm):
    """Set to zero in both ways, kept or replaced by the caller; no_sync; frozen weights; another type."""

    def check(grid):
        net = parallelize(mlp(), grid)
        x, y = (input_rows(grid, part) for part in batch(0, 24))
        layer = net[0].weight

        def gradient():
            MSE(net(x), y).backward()
            return layer.grad

        first = gradient()
        values = first.clone()
        net.zero_grad()
        assert layer.grad is None and torch.equal(gradient(), values) and torch.equal(first, values)
        net.zero_grad(set_to_none=False)
        assert torch.equal(gradient(), values)
        layer.grad = torch.ones_like(layer)
        assert torch.allclose(gradient(), values + 1)
        net.zero_grad()
        with no_sync(grid):
            gradient()
        assert torch.allclose(gradient(), 2 * values)
        net.zero_grad()
        net[0].requires_grad_(False)
        assert gradient() is None and net[0].bias.grad is None and net[5].weight.grad is not None
        net[0].requires_grad_(True)
        net.zero_grad()
        net.double()
        x, y = x.double(), y.double()
        assert gradient().dtype == torch.float64 and torch.allclose(gradient() / 2, values.double())

    on_each_grid(comm, check)


@pytest.mark.parallel([4])
def test_dropout_is_the_same_on_every_grid(comm):
    def losses(grid):
        torch.manual_seed(0)
        first, second, third = nn.Linear(8, 16), nn.Linear(16, 8), nn.Linear(8, 8)
        layers = nn.Dropout(0.2), first, nn.ReLU(), nn.Dropout(0.5), second, nn.Dropout(0.3), third
        net = parallelize(nn.Sequential(*layers).double(), grid)
        x = input_rows(grid, batch(0, 24, 8, dtype=torch.float64)[0])
        found = [mean(grid, net(x).square()).item() for _ in range(3)]
        net.eval()
        return [*found, mean(grid, net(x).square()).item()]

    with alone() as grid:
        expected = losses(grid)
    assert len(set(expected)) == 4
    on_each_grid(comm, lambda grid: np.testing.assert_allclose(losses(grid), expected, rtol=1e-12))


@pytest.mark.parallel([2])
def test_without_gradients_nothing_is_noted(comm):
    """With no_grad and inference_mode. Computations of pmm3d.nn on torch arrays are not in torch's graph."""
    from pmm3d import DistMatrix
    from pmm3d import nn as own

    def check(grid):
        net, (x, _) = parallelize(mlp(), grid), batch(0, 24)
        rows = input_rows(grid, x)
        expected = gather_output(grid, net(rows).detach())
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                out = net(rows)
            assert not out.requires_grad and torch.equal(gather_output(grid, out.clone()), expected)
        MSE(net(rows), net(rows).detach() + 1).backward()
        weight = own.Linear(grid, 7, 3, library="torch")
        out = weight(DistMatrix.from_global(grid, x.clone().requires_grad_(), layout=own.tensor.Layout(("data", "z"))))
        assert out.local.grad_fn is None and not out.local.requires_grad
        assert not weight.weight.local.requires_grad

    on_each_grid(comm, check)


@pytest.mark.parallel([2])
def test_a_backward_pass_that_fails_leaves_no_half_gradients(comm):
    def broken(gradient):
        raise RuntimeError("a hook")

    def check(grid):
        net, (x, _) = parallelize(mlp(), grid), batch(0, 24)
        rows, first, last = input_rows(grid, x), net[0].weight, net[5].weight
        net(rows).sum().backward()
        expected, of_last = first.grad.clone(), last.grad.clone()
        handle = net[0].register_forward_hook(lambda module, args, out: out.register_hook(broken) and None)
        with pytest.raises(RuntimeError, match="a hook"):
            net(rows).sum().backward()
        handle.remove()
        assert last.grad is None and torch.equal(first.grad, expected)
        net(rows).sum().backward()
        assert torch.equal(last.grad, of_last) and torch.allclose(first.grad, 2 * expected)

    on_each_grid(comm, check)


@pytest.mark.parallel([2])
def test_what_autograd_cannot_do_is_refused(comm):
    """A second derivative, an input that was changed before its backward pass, and a graph that is used twice."""

    def check(grid):
        net, (x, _) = parallelize(mlp(), grid), batch(0, 24)
        rows = input_rows(grid, x).requires_grad_()
        [dx] = torch.autograd.grad(net(rows).square().sum(), [rows], create_graph=True)
        with pytest.raises(RuntimeError, match="once_differentiable"):
            dx.sum().backward()
        own = (rows * 1)[:, : [7, 4 - grid.y.index][grid.y.size - 1]].contiguous()
        out = net(own)
        own.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()
        loss = net(rows).sum()
        loss.backward()
        with pytest.raises(RuntimeError, match="a second time"):
            loss.backward()

    on_each_grid(comm, check)


class Penalized(nn.Module):
    """Weights on the grid with and without a split over z, replicated ones, and a tied one. `forward` returns a penalty
    on the weights too."""

    def __init__(self):
        super().__init__()
        self.scale, self.norm = nn.Parameter(torch.full((6,), 0.5)), nn.LayerNorm(8)
        self.up, self.down, self.first, self.last = (nn.Linear(*sizes) for sizes in ((6, 8), (8, 5), (5, 5), (5, 5)))
        self.last.weight = self.first.weight

    def forward(self, x):
        out = self.last(self.first(self.down(self.norm(torch.tanh(self.up(x * self.scale))))))
        return out, sum((p**4).sum() for p in self.parameters())


PENALIZED = {"up": "column", "norm": "x", "down": Split("row", gather=True)}
PENALTIES = {
    "L1": lambda net: 0.1 * sum(p.abs().sum() for p in net.parameters()),
    "both": lambda net: sum(0.1 * torch.linalg.vector_norm(p, 1) + (p * p).sum() for p in net.parameters()),
}


@pytest.mark.nightly
@pytest.mark.parallel([1, 4], thorough=[2, 8])
def test_a_penalty_on_weights_learns_as_in_plain_torch(comm):
    """In the loss, in a backward pass of its own, and returned by the model; with SGD, and with AdamW, whose gradients
    accumulate. Replicas stay the same."""

    def trained(net, penalty, kind, mean_of, rows):
        optimizer = kind(net.parameters(), lr=1e-2)
        for step in range(3):
            (out, own), y = net(rows(batch(step, 12, 6, dtype=torch.float64)[0])), rows(batch(step, 12)[1].double())
            loss = mean_of(MSE(out, y, reduction="none"))
            if kind is torch.optim.SGD:
                (loss + penalty(net) + 0.1 * own).backward()
            else:
                loss.backward()
                penalty(net).backward()
            optimizer.step()
            optimizer.zero_grad()

    make = lambda: (torch.manual_seed(0), Penalized().double())[1]

    def check(grid):
        for kind, penalty in ((torch.optim.SGD, "L1"), (torch.optim.AdamW, "both")):
            plain, net = make(), parallelize(make(), grid, PENALIZED)
            trained(plain, PENALTIES[penalty], kind, torch.mean, lambda x: x)
            trained(net, PENALTIES[penalty], kind, lambda losses: mean(grid, losses), lambda x: input_rows(grid, x))
            assert differences(full_state_dict(net), plain.state_dict()) < 1e-12, (kind, penalty)
            own = net.scale.detach().numpy().tobytes() + net.first.weight.detach().numpy().tobytes()
            assert len({*comm.allgather(own)}) == 1

    on_each_grid(comm, check, ALL_GRIDS[comm.size])


@pytest.mark.parallel([2])
def test_a_penalty_is_summed_over_data_once(comm):
    """From the second step on, the sum of a gradient over data waits for the penalty."""

    def check(grid):
        net, seen = made(lambda: nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)), grid), []
        for weight in (0, 1, 1):
            grid.ledger.reset()
            net.zero_grad()
            loss = net(torch.ones(2, 4)).sum()
            (loss + sum((p**2).sum() for p in net.parameters()) if weight else loss).backward()
            seen.append((grid.ledger.total(phase="reduce data").received, net[0].weight.grad.clone()))
        assert seen[2][0] == seen[0][0] > 0 and torch.equal(seen[1][1], seen[2][1])
        assert torch.allclose(seen[2][1] - seen[0][1], 2 * net[0].weight)

    on_each_grid(comm, check, [((1, 1, 1), 2)])


@pytest.mark.parallel([2])
def test_a_part_of_a_model_called_by_itself_has_the_gradients_of_the_mean(comm):
    """Two modules with one weight, which are parallelized as one; and replicated parameters that are used outside."""
    make = lambda: (torch.manual_seed(0), nn.ModuleList([Penalized(), nn.Linear(5, 5)]).double())[1]

    def losses(net, x):
        net[1].weight = net[1].weight if hasattr(net[1].weight, "_pmm3d") else net[0].first.weight
        return (net[1](net[0](x)[0]) * net[0].scale[:5]).square().mean(1)

    plain, x = make(), batch(0, 12, 6, dtype=torch.float64)[0]
    losses(plain, x).mean().backward()
    expected = {name: tensor.grad for name, tensor in plain.named_parameters()}

    def check(grid):
        tied = make()
        tied[1].weight = tied[0].first.weight
        net = parallelize(tied, grid, {f"0.{name}": split for name, split in PENALIZED.items()})
        mean(grid, losses(net, input_rows(grid, x))).backward()
        assert differences(whole_gradients(grid, net, list(expected)), expected) < 1e-12

    on_each_grid(comm, check, [((1, 1, 1), 2), ((1, 1, 2), 1)])


CROSS = nn.functional.cross_entropy


@pytest.mark.parallel([2])
def test_a_mean_divides_by_what_torch_divides_by(comm, fails, caplog):
    """Ignored labels, weights of classes, more dims; all labels ignored. With a function of the losses, and without
    gradients, the weights must be given. A warning says so if no call had gradients."""
    torch.manual_seed(0)
    plain, x, y = nn.Linear(4, 3).double(), torch.randn(8, 4).double(), torch.randint(3, (8,))
    y[:6] = -100
    of_class = torch.tensor([1.0, 2.0, 5.0]).double()
    cases = {
        "ignored": {},
        "classes": {"weight": of_class},
        "one": {"ignore_index": 1},
        "all": {"ignore_index": int(y[6])},
        "smooth": {"label_smoothing": 0.1},
    }
    targets = {"one": y.clamp(0), "all": torch.full_like(y, int(y[6]))}

    def check(grid):
        rows, net = lambda each: input_rows(grid, each), parallelize(plain, grid)
        caplog.clear()
        with torch.no_grad():
            for _ in range(2):
                mean(grid, CROSS(net(rows(x)), rows(y), reduction="none"))
        assert [record.args for record in caplog.records if "mean(grid, losses, weights)" in record.message] == [()] * (
            grid.rank == 0
        )
        for other in (rows(x)[:, 0][:1], rows(x)[:, :1]):
            own, is_last = rows(x)[:, 0], grid.data.index == grid.data.size - 1
            fails(LayoutError, "another shape", lambda: mean(grid, own, other if is_last else own))
        for title, options in cases.items():
            labels = targets.get(title, y)
            counts = (labels != options.get("ignore_index", -100)).double()
            each = lambda net, part: CROSS(net(part(x)), part(labels), reduction="none", **options)
            plain.zero_grad()
            right = CROSS(plain(x), labels, **options)
            right.backward()
            expected = {name: tensor.grad for name, tensor in plain.named_parameters()}
            ways = {
                "itself": lambda: mean(grid, each(net, rows)),
                "a shape": lambda: mean(grid, each(net, rows).view(-1, 1)),
                "weights": lambda: mean(grid, each(net, rows), rows(counts)),
            }
            for way in ["weights"] if title == "smooth" else ["itself", "a shape"] if title == "classes" else ways:
                net.zero_grad()
                found = ways[way]()
                found.backward()
                assert torch.allclose(found, right, rtol=1e-12, equal_nan=True), (title, way)
                assert differences(whole_gradients(grid, net, list(expected)), expected) < 1e-12, (title, way)
                load_full_state_dict(net, plain.state_dict())
            if title in ("ignored", "smooth"):
                fails(LayoutError, r"mean\(grid, losses, weights\)", lambda: mean(grid, each(net, rows) * 0.5))
        deep = torch.randn(4, 3, 5).double().requires_grad_()
        labels = torch.tensor([[0, 1, -100, 2, -100]] * 4)
        found = mean(grid, CROSS(rows(deep), rows(labels), reduction="none"))
        assert torch.allclose(found, CROSS(deep, labels), rtol=1e-12)
        with torch.no_grad():
            losses = CROSS(net(rows(x)), rows(y), reduction="none")
            fails(LayoutError, r"mean\(grid, losses, weights\)", lambda: mean(grid, losses))
            assert torch.allclose(mean(grid, losses, rows(y != -100)), CROSS(plain(x), y), rtol=1e-12)
            assert mean(grid, losses, torch.ones_like(losses)).isfinite()

    on_each_grid(comm, check, [((1, 1, 1), 2), ((2, 1, 1), 1)])
