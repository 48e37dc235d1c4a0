"""Modules that cannot be put on a grid, state dicts, and the cost of the import."""

import copy
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from loops import looped
from networks import GRIDS, on_each_grid, over_grids
from seeded import made
from torch import nn

from pmm3d import CheckpointError, DisagreementError, DTypeError, Grid, LayoutError, Pmm3dError
from pmm3d.nn import Store, no_sync, offload
from pmm3d.torch import (
    Dropout3D,
    LayerNorm3D,
    Linear3D,
    Split,
    clip_grad_norm_,
    full_state_dict,
    input_rows,
    load_full_state_dict,
    parallelize,
)

torch.set_num_threads(1)
pytestmark = pytest.mark.deadline(200)
ROOT = Path(__file__).parents[2]


def mlp():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 12), nn.GELU(), nn.LayerNorm(12), nn.Linear(12, 6), nn.ReLU(), nn.Linear(6, 4))


class Two(nn.Module):
    """Two layers whose order only `forward` determines."""

    def __init__(self):
        super().__init__()
        self.embed, self.head, self.attend = nn.Embedding(8, 8), nn.Linear(8, 8), nn.MultiheadAttention(8, 2)


def tied():
    net = Two()
    net.head.weight = net.embed.weight
    return net


def hooked():
    net = nn.Linear(4, 4)
    net.register_forward_hook(lambda *_: None)
    return net


def prelu():
    return nn.Sequential(nn.Linear(4, 4), nn.PReLU(), nn.Linear(4, 4))


AROUND = {"0": "column", "2": Split("row", gather=True)}
ACT = nn.ReLU()
SAME = nn.Linear(4, 4)
REFUSED = [
    (lambda: 3, None, Pmm3dError, "a torch.nn.Module; got a int"),
    (Two, None, LayoutError, "the operations of a Two between its layers are not known.* layers: head"),
    (Two, ["column", "row"], LayoutError, "the plan is a dict that maps names of modules to roles; got a list"),
    (Two, {"haed": "row"}, LayoutError, "'haed' names no Linear, LayerNorm, Dropout or PReLU, but nothing.*: head"),
    (Two, {"embed": "row"}, LayoutError, r"but embed \(a Embedding\)"),
    (Two, {"attend*": "row"}, LayoutError, r"attend.out_proj \(a NonDynamicallyQuantizableLinear\)"),
    (Two, {"head": "x"}, LayoutError, "head is a Linear, which can be 'column', 'row' or 'off'; the plan has 'x'"),
    (tied, {"head": "row"}, LayoutError, "embed and head have one weight in common"),
    (hooked, None, LayoutError, "has hooks"),
    (lambda: nn.Sequential(nn.Linear(4, 4), nn.Softmax(1), nn.Linear(4, 4)), None, LayoutError, "1, a Softmax, comes"),
    (prelu, None, LayoutError, "1, a PReLU, comes"),
    (lambda: nn.Sequential(nn.Linear(4, 4), nn.AlphaDropout()), None, LayoutError, "1, a AlphaDropout, .*nn.Dropout"),
    (lambda: nn.Sequential(SAME, ACT, SAME), None, LayoutError, "0 and 2 are one Linear"),
    (lambda: nn.Sequential(nn.LayerNorm((2, 4)), nn.Linear(4, 4)), {"0": "y"}, LayoutError, "a LayerNorm over 2 dims"),
    (lambda: nn.Linear(4, 4, dtype=torch.complex64), None, DTypeError, "parameters of torch.complex64"),
    (lambda: nn.Linear(4, 4, device="meta"), None, Pmm3dError, "the parameters are on meta; they must be on one"),
    (lambda: nn.Sequential(nn.Linear(4, 4), nn.Dropout()), {"0": "column"}, LayoutError, "does not name 1, a Dropout"),
    (lambda: nn.Sequential(nn.LayerNorm(4)), {"0": Split("y", gather=True)}, LayoutError, "gather are for a Linear"),
    (prelu, AROUND, LayoutError, "does not name 1, a PReLU"),
    (prelu, AROUND | {"1": "x"}, LayoutError, "1 is a PReLU, which can be 'off'"),
    (lambda: nn.Linear(6, 9), {"": Split("column", unit=3)}, LayoutError, "9 columns over x are heads of 3"),
    (lambda: nn.Linear(6, 9), {"": Split("column", unit=2)}, LayoutError, "9 columns over x are heads of 2"),
]


@pytest.mark.parallel([2])
@pytest.mark.filterwarnings("ignore:Initializing zero-element")
def test_what_does_not_fit_is_refused_by_name(comm, fails):
    with Grid(comm, (2, 1, 1)) as grid:
        for make, plan, kind, text in [*REFUSED, (lambda: nn.Linear(0, 4), None, LayoutError, "0 in_features")]:
            torch.manual_seed(0)
            module = make()
            fails(kind, text, lambda: parallelize(module, grid, plan))
        fails(LayoutError, 'the role is "column" or "row"', lambda: Linear3D(grid, 2, 2, role="x"))
        fails(LayoutError, "p is a probability", lambda: Dropout3D(grid, 1.5))
        torch.manual_seed(grid.rank)
        net = nn.Linear(4, 4)
        fails(DisagreementError, "torch.manual_seed", lambda: parallelize(net, grid))


@pytest.mark.parallel([2])
def test_an_error_about_shapes_has_a_note_about_the_plan(comm):
    """The plan of this network lacks the LayerNorm. Other errors have no note."""
    torch.manual_seed(0)
    with Grid(comm, (2, 1, 1)) as grid:
        made = parallelize(nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8)), grid, {"0": "column"})
        with pytest.raises(RuntimeError, match="normalized_shape") as raised:
            made(torch.ones(3, 4))
        [note] = raised.value.__notes__
        assert "(not on the grid: 1)" in note and 'Split("column", gather=True)' in note
        with pytest.raises(LayoutError) as raised:
            made(torch.ones(3, 5))
        assert not hasattr(raised.value, "__notes__")
        fails = lambda *arguments: 1 / 0 if arguments is None else torch.linalg.cholesky(-torch.eye(2))
        made[1].register_forward_pre_hook(fails)
        with pytest.raises(RuntimeError, match="positive-definite") as raised:
            made(torch.ones(3, 4))
        assert not hasattr(raised.value, "__notes__")


@pytest.mark.parallel([2])
def test_an_embedding_that_looks_at_all_tokens_is_refused(comm, fails):
    """If each rank has its own rows. Otherwise it learns as in plain torch."""
    makes = [
        lambda kind=kind, options=options: kind(8, 4, **options)
        for kind in (nn.Embedding, nn.EmbeddingBag)
        for options in ({"max_norm": 1.0}, {"scale_grad_by_freq": True})
    ]
    for shape, data in (((1, 1, 1), 2), ((1, 1, 2), 1), ((2, 1, 1), 1)):
        with Grid(comm, shape, data) as grid:
            for make in makes:
                torch.manual_seed(0)
                net = nn.Sequential(make(), nn.Linear(4, 4))
                if shape == (2, 1, 1):
                    parallelize(net, grid)
                else:
                    fails(LayoutError, "0, a Embedding.* Make it without them", lambda: parallelize(net, grid))


@pytest.mark.parallel([2])
def test_a_weight_of_two_modules_is_refused_in_the_second(comm, fails):
    """Unless the first copy is gone, or the module is the same one."""
    with Grid(comm, (1, 1, 1), data=2) as grid:
        torch.manual_seed(0)
        one, other = (nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)) for _ in range(2))
        other[1].bias = one[0].bias
        nets = [parallelize(one, grid), parallelize(one, grid)]
        fails(LayoutError, "1.bias .*ModuleList.*deepcopy", lambda: parallelize(other, grid))
        fails(LayoutError, "weight .*ModuleList.*deepcopy", lambda: parallelize(one[0], grid))
        nets.append(parallelize(copy.deepcopy(other), grid))
        nets.clear()
        parallelize(nn.ModuleList([one, other]), grid, {})


@pytest.mark.parallel([1, 2])
def test_layers_of_different_roles_cannot_share_a_weight(comm, fails):
    """Layers of one role can."""
    with Grid(comm, (comm.size, 1, 1)) as grid:
        one, same, other = (Linear3D(grid, 6, 6, role=role, gather=True) for role in ("column", "column", "row"))
        x = torch.arange(12.0).reshape(2, 6)
        same.weight = other.weight = one.weight
        one(x)
        said = r"weight is also Linear3D \d+.weight, with the layout .* Give one role to layers that share a weight"
        fails(LayoutError, said, lambda: other(x))
        same.bias = one.bias
        assert torch.equal(one(x), same(x))


@pytest.mark.parallel([1, 2, 4])
@over_grids()
def test_a_transposed_weight_is_used(grid):
    """It has the address and the type of the weight before."""
    one, two = (Linear3D(grid, 6, 6, seed=1, gather=True, dtype=torch.float64) for _ in range(2))
    x, rows = torch.arange(12.0, dtype=torch.float64).reshape(2, 6), one.weight.shape[0]
    one(x).sum().backward()
    one.weight.grad = one.bias.grad = None
    one.weight.data = one.weight.data.t()
    if rows != one.weight.shape[0]:
        with pytest.raises(LayoutError, match=r"weight has the shape \(\d, \d\); this rank's part of it is"):
            one(x)
        return
    two.weight.data = two.weight.data.t().contiguous()
    for each in (one, two):
        each(x).square().sum().backward()
    assert torch.allclose(one.weight.grad, two.weight.grad) and torch.allclose(one(x), two(x))


@pytest.mark.parallel([2])
def test_what_a_module_on_a_grid_refuses(comm, fails):
    with Grid(comm, (2, 1, 1)) as grid:
        net = parallelize(mlp(), grid)
        fails(
            LayoutError,
            r"input of shape \(3, 7\); its columns are this rank's 8, or all 8",
            lambda: net(torch.ones(3, 7)),
        )
        fails(DTypeError, "the input is torch.float64 on cpu", lambda: net(torch.ones(3, 8).double()))
        with tempfile.TemporaryDirectory() as folder:
            offload(grid, Store(grid, folder))
            fails(Pmm3dError, "torch keeps the arrays", lambda: net(torch.ones(2, 8)))
            offload(grid, None)
        with torch.autocast("cpu", torch.bfloat16):
            fails(DTypeError, "autocast does not reach in here", lambda: net(torch.ones(2, 8)))
        fails(Pmm3dError, "neither copied nor pickled", lambda: copy.deepcopy(net))
        fails(Pmm3dError, "does not belong to a module", lambda: clip_grad_norm_(filled(nn.Linear(2, 2)), 1.0))
        fails(Pmm3dError, "this Linear is not on a grid", lambda: full_state_dict(nn.Linear(2, 2), root=0))
    with Grid(comm, (1, 1, 1), data=2) as grid:
        net = made(lambda: nn.Sequential(nn.Embedding(4, 8, sparse=True), *mlp()), grid)
        fails(DTypeError, "0.weight: its gradient is sparse", lambda: net(torch.ones(2, dtype=int)).sum().backward())
        net = parallelize(mlp(), grid)
        with no_sync(grid):
            net(torch.ones(2, 8)).sum().backward()
        fails(Pmm3dError, "not summed over the ranks", lambda: clip_grad_norm_(net.parameters(), 1.0))
        net.zero_grad()
        net(torch.full((2, 8), torch.nan)).sum().backward()
        fails(Pmm3dError, "the norm of the gradients is nan", lambda: clip_grad_norm_(net.parameters(), 1.0, True))
        net = made(lambda: nn.Sequential(nn.Dropout(0.5), nn.Linear(4, 4)), grid)
        torch.manual_seed(grid.rank)
        fails(DisagreementError, "torch.manual_seed", lambda: net(torch.ones(2, 4)))


def filled(net):
    net(torch.ones(1, 2)).sum().backward()
    return net.parameters()


@pytest.mark.parallel([2])
def test_initial_values_of_a_layer_have_the_range_of_torch(comm):
    """Uniform up to 1 / sqrt(in_features), also for the bias."""
    with Grid(comm, (2, 1, 1)) as grid:
        for inputs, outputs, role in ((16, 400, "column"), (400, 300, "row")):
            for name, value in full_state_dict(Linear3D(grid, inputs, outputs, role=role, seed=0)).items():
                assert 0.9 < value.max() * inputs**0.5 <= 1, (role, name)
                assert -1 <= value.min() * inputs**0.5 < -0.9, (role, name)


@pytest.mark.parallel([2])
def test_ranks_that_use_other_parameters_are_told(comm, fails):
    class Either(nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4), nn.LayerNorm(4), nn.LayerNorm(4)])

        def forward(self, x, linear, norm):
            return self.parts[norm](self.parts[linear](x))

    with Grid(comm, (1, 1, 1), data=2) as grid:
        net = made(Either, grid, {"parts.[01]": "column"})
        for parts in ((grid.rank, 2), (0, 2 + grid.rank)):
            fails(DisagreementError, "backward", lambda parts=parts: net(torch.ones(2, 4), *parts).sum().backward())
            net.zero_grad()
        net(torch.ones(2, 4), 0, 3).sum().backward()
        assert net.parts[0].weight.grad is not None and net.parts[2].weight.grad is None


@pytest.mark.parallel([4], thorough=[1])
def test_a_module_is_left_as_it_was_and_its_copy_has_its_names(comm):
    def check(grid):
        plain = mlp().eval()
        plain[3].requires_grad_(False)
        before = {name: value.clone() for name, value in plain.state_dict().items()}
        net, norm = parallelize(plain, grid), LayerNorm3D if grid.x.size > 1 else nn.LayerNorm
        assert [*map(type, net)] == [Linear3D, nn.GELU, norm, Linear3D, nn.ReLU, Linear3D] and type(
            net
        ) is nn.Sequential
        assert not net[3].training and not net[3].weight.requires_grad and net[5].weight.requires_grad
        assert [name for name, _ in net.named_parameters()] == [name for name, _ in plain.named_parameters()]
        net[0].weight.data.fill_(7)
        assert all(torch.equal(plain.state_dict()[name], value) for name, value in before.items())
        assert type(plain[0]) is nn.Linear and not plain._forward_hooks and not hasattr(plain[0].weight, "_pmm3d")

    on_each_grid(comm, check)


@pytest.mark.parallel([4])
def test_state_dicts_go_to_the_plain_module_and_come_back(comm, fails):
    def check(grid):
        make = lambda: (torch.manual_seed(0), nn.Sequential(nn.Embedding(5, 8), *mlp()))[1]
        plain, net = make(), parallelize(make(), grid)
        torch.manual_seed(1)
        for each in plain.parameters():
            nn.init.normal_(each)
        state = plain.state_dict()
        load_full_state_dict(net, state)
        found = full_state_dict(net)
        assert list(found) == list(state) and all(torch.equal(found[name], state[name]) for name in state)
        assert (list(full_state_dict(net, root=1)) == list(state)) == (grid.rank == 1)
        rows = input_rows(grid, torch.arange(8) % 5)
        assert torch.allclose(net(rows), plain(rows), atol=1e-5)
        shards = {name: copy.copy(value) for name, value in net.state_dict().items()}
        again = parallelize(make(), grid)
        again.load_state_dict(shards)
        assert torch.equal(again(rows), net(rows))
        fails(
            CheckpointError,
            "missing, too many.*: 1.bias, 1.weight",
            lambda: load_full_state_dict(net, {name: value for name, value in state.items() if name[0] != "1"}),
        )
        return shards

    [first, *others] = GRIDS[4]
    shards = []
    on_each_grid(comm, lambda grid: shards.append(check(grid)), [("2x1x2", 1)])
    with Grid(comm, (1, 2, 2)) as grid:
        net = made(lambda: nn.Sequential(nn.Embedding(5, 8), *mlp()), grid)
        with pytest.raises(CheckpointError, match="another rank or another grid"):
            net.load_state_dict(shards[0])
    on_each_grid(comm, check, [first, *others[1:3]])


class Counts(nn.Linear):
    """A module with an extra state, which is not a tensor, and with a buffer."""

    def __init__(self):
        super().__init__(4, 4)
        self.seen, self.inner = "nothing", nn.Linear(4, 4)

    def forward(self, x):
        return self.inner(super().forward(x))

    def get_extra_state(self):
        return {"seen": self.seen}

    def set_extra_state(self, state):
        self.seen = state["seen"]


@pytest.mark.parallel([2])
def test_the_extra_state_of_a_users_module_is_kept(comm):
    def check(grid):
        net = made(Counts, grid, {"inner": Split("column", gather=True)})
        net.seen = "ten"
        state = full_state_dict(net)
        assert list(state) == list(Counts().state_dict()) and state["_extra_state"] == {"seen": "ten"}
        net.seen = "more"
        load_full_state_dict(net, state)
        assert net.seen == "ten"

    on_each_grid(comm, check)


@pytest.mark.parallel([2])
def test_a_batch_norm_is_refused_only_where_ranks_hold_other_rows(comm, fails):
    make = lambda: (torch.manual_seed(0), nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))[1]
    with Grid(comm, (1, 1, 1), data=2) as grid:
        fails(LayoutError, "1, a BatchNorm1d, .*LayerNorm", lambda: parallelize(make(), grid))
    with Grid(comm, (2, 1, 1)) as grid:
        net, plain, x = parallelize(make(), grid), make(), torch.arange(12.0).reshape(3, 4)
        assert torch.allclose(net(x), plain(x), atol=1e-6)
        assert torch.allclose(net[1].running_mean, plain[1].running_mean, atol=1e-6)


@pytest.mark.parallel([2])
def test_shards_of_another_rank_are_refused(comm, fails):
    with Grid(comm, (2, 1, 1)) as grid:
        net = parallelize(mlp(), grid)
        state = comm.bcast({name: value for name, value in net.state_dict().items()})
        if grid.rank == 1:
            before = net[0].weight.clone()
            with pytest.raises(CheckpointError, match="the shards of another rank or another grid"):
                net.load_state_dict(state)
            assert torch.equal(net[0].weight, before)
        with pytest.raises(CheckpointError, match="or it is that of a plain module"):
            net.load_state_dict(mlp().state_dict(), strict=False)
        state = {name: value + grid.rank for name, value in full_state_dict(net).items()}
        fails(DisagreementError, "load_full_state_dict", lambda: load_full_state_dict(net, state))
        state = full_state_dict(net, root=0) or None
        fails(CheckpointError, "a state dict on every rank; got a NoneType", lambda: load_full_state_dict(net, state))


LOADED = "[each for each in sys.modules if each.startswith(('torch', 'pmm3d.torch'))]"


@looped(
    "program, folder, words",
    [
        (f"import sys, pmm3d, pmm3d.nn.layers; sys.exit(str({LOADED}))", "", "[]"),
        (
            "import sys; sys.modules['torch'] = None; import pmm3d.torch",
            "",
            'torch is missing. pip install "pmm3d[torch]"',
        ),
        ("import torch", "pmm3d", "runs inside the folder of pmm3d"),
    ],
)
def test_torch_is_not_imported_and_named_if_it_is_missing_or_hidden(program, folder, words):
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT / folder, capture_output=True, text=True)
    assert words in done.stderr
