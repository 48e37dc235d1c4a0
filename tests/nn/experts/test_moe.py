"""The mixture of experts beside a dense reference by torch, in which all experts compute all tokens."""

import numpy as np
import pytest
from loops import given, looped
from networks import alone, assert_replicas_agree, bits, gradients_of, inner, spread, weights_of
from samples import to_numpy
from torch_reference import by_rank_0
from transformer_reference import EXPERT_GRIDS, fill, mixture_of_torch

from pmm3d import DistMatrix, Grid, GridError, LayoutError, Pmm3dError, nn
from pmm3d.layout import Layout
from pmm3d.nn import optim

pytestmark = [pytest.mark.parallel([2], thorough=[4]), pytest.mark.deadline(240)]

HIDDEN, INNER, ROWS = 6, 10, 13
CASES = {
    "two of four": {"experts": 4},
    "switch": {"experts": 4, "top_k": 1, "z_loss": 0.1},
    "gated, capacity": {"experts": 4, "top_k": 3, "gated": True, "capacity": 0.8, "normalize": False},
    "shared": {"experts": 8, "shared": 7, "gated": True, "balance": 0.5},
    "shared with a gate": {"experts": 4, "shared": 5, "shared_gate": True, "balance": 0.0},
}
OF_ROUTER = "balance", "z_loss", "capacity", "normalize"
TOKENS = Layout(("data", "z"), "y", units=(1, 1))


def make(grid, case, **options):
    given = {name: value for name, value in case.items() if name not in OF_ROUTER}
    router = {"balance": 0.01, **{name: case[name] for name in OF_ROUTER if name in case}}
    activation = "silu" if case.get("gated") else "gelu_tanh"
    options = {"dtype": "float64", "seed": 5, "activation": activation, **options}
    return nn.MoE(grid, HIDDEN, INNER, router=router, **given, **options)


def samples(rows=ROWS):
    random = np.random.default_rng(3)
    return random.standard_normal((rows, HIDDEN)), random.standard_normal((rows, HIDDEN))


def of_torch(case, weights, rows=ROWS):
    """(result, gradient by x, gradients) of sum(result * slope) + the losses of the router."""
    import torch

    torch.set_num_threads(1)
    x, slope = (torch.tensor(each, requires_grad=True) for each in samples(rows))
    leaves = {name: torch.tensor(each, requires_grad=True) for name, each in weights.items()}
    out, penalty = mixture_of_torch(torch, case, leaves, "", x, case.get("gated", False))
    ((out * slope).sum() + penalty).backward()
    zero = lambda each: np.zeros(each.shape) if each.grad is None else each.grad.numpy()
    return out.detach().numpy(), x.grad.numpy(), {name: zero(each) for name, each in leaves.items()}


def run(grid, net, layout=TOKENS, rows=ROWS):
    """(result, gradient by x, gradients) on a grid, as whole arrays."""
    x, slope = samples(rows)
    x = nn.Tensor(spread(grid, x, layout), requires_grad=True)
    out = net(x)
    assert out.layout == x.layout
    inner(out, slope).backward()
    assert_replicas_agree(grid, {name: each.grad for name, each in net.named_parameters().items()})
    return to_numpy(out.gather()), to_numpy(x.grad.gather()), gradients_of(net)


def assert_near(found, wanted, text=""):
    for number, (one, other) in enumerate(zip(found[:2], wanted[:2])):
        assert np.abs(one - other).max() <= 1e-12 * max(1, np.abs(other).max()), (text, number)
    assert found[2].keys() == wanted[2].keys()
    for name, one in found[2].items():
        assert np.abs(one - wanted[2][name]).max() <= 1e-12 * max(1, np.abs(wanted[2][name]).max()), (text, name)


@pytest.mark.parallel([1, 2, 4])
def test_results_and_gradients_are_those_of_the_dense_reference(comm):
    """In each layout of the tokens that a network has: replicated, and with sharded activations."""
    with alone() as grid:
        weights = {name: weights_of(fill(make(grid, case))) for name, case in CASES.items()}
    wanted = by_rank_0(comm, lambda: {name: of_torch(case, weights[name]) for name, case in CASES.items()})
    sharded = Layout(("data", "z", "x"), "y")
    for number, (shape, data, expert) in enumerate(EXPERT_GRIDS[comm.size]):
        with given(grid=shape, data=data, expert=expert), Grid(comm, shape, data, expert=expert) as grid:
            for turn, (name, case) in enumerate(CASES.items()):
                layout = (TOKENS, sharded)[(number + turn) % 2]
                assert_near(run(grid, fill(make(grid, case)), layout), wanted[name], name)


SAME = {
    2: [((1, 1, 1), 2, (1, 2)), ((1, 1, 2), 1, (1, 2))],
    4: [((1, 1, 1), 4, (1, 2, 4)), ((1, 1, 2), 2, (1, 2, 4)), ((2, 1, 1), 2, (1, 2)), ((1, 2, 2), 1, (1, 2))],
}
"""Number of ranks -> grids (shape, data) with numbers of ranks along "expert"."""


def test_bits_do_not_depend_on_the_ranks_that_share_the_experts(comm):
    for shape, data, numbers in SAME[comm.size]:
        found = []
        for expert in numbers:
            with Grid(comm, shape, data, expert=expert) as grid:
                out, slope, gradients = run(grid, make(grid, CASES["shared"]))
                found.append(bits({"out": out, "slope": slope, **gradients}))
        with given(grid=shape, data=data):
            assert all(each == found[0] for each in found)


def test_all_experts_with_equal_weights_are_the_mean_of_dense_layers(comm):
    with Grid(comm, data=comm.size, expert=comm.size) as grid:
        case = {"experts": 4, "top_k": 4}
        net = fill(make(grid, case))
        net.router.weight.assign(spread(grid, np.zeros((HIDDEN, 4)), net.router.weight.layout))
        x = samples()[0]
        out = to_numpy(net(spread(grid, x, TOKENS)).gather())
        weights = weights_of(net)
        mean = 0
        for expert in range(4):
            dense = nn.FeedForward(grid, HIDDEN, INNER, bias=False, dtype="float64")
            dense.load_state_dict(
                {f"{name}.weight": weights[f"experts.{expert}.{name}.weight"] for name in ("up", "down")}
            )
            mean = mean + to_numpy(dense(spread(grid, x, TOKENS)).gather()) / 4
        assert np.abs(out - mean).max() < 1e-13


def test_an_expert_without_tokens_has_a_zero_gradient(comm):
    """And a rank without tokens takes part. So weight decay changes all experts, on all ranks that share them (NeMo
    Automodel PR 2995)."""
    with Grid(comm, (1, 1, comm.size), expert=comm.size) as grid:
        case = {"experts": 4, "top_k": 1, "balance": 0.0}
        for rows in (1, 0):
            net = make(grid, case)
            x, slope = samples(rows)
            out = net(nn.Tensor(spread(grid, x, TOKENS), requires_grad=True))
            inner(out, slope).backward()
            gradients = gradients_of(net)
            used = [name for name, each in gradients.items() if each.any()]
            assert set(gradients) == set(net.named_parameters())
            assert len([name for name in used if name.startswith("experts")]) == 2 * rows
    with Grid(comm, data=comm.size) as grid:  # all ranks share each expert
        net = make(grid, case)
        before, optimizer = weights_of(net), optim.AdamW(net.parameters(), lr=0.5, weight_decay=0.5)
        x, slope = samples(1)
        inner(net(nn.Tensor(spread(grid, x, TOKENS))), slope).backward()
        idle = [name for name, each in gradients_of(net).items() if not each.any()]
        optimizer.step()
        assert len(idle) == 6
        assert_replicas_agree(grid, {name: each.value for name, each in net.named_parameters().items()})
        after = weights_of(net)
        assert all(np.abs(after[name] - 0.75 * before[name]).max() < 1e-15 for name in idle)


def test_names_and_initial_values_do_not_depend_on_the_grid(comm):
    """A rank stores its own experts only."""
    case = CASES["shared with a gate"]
    with alone() as grid:
        expected = bits(weights_of(make(grid, case)))
    for shape, data, expert in EXPERT_GRIDS[comm.size]:
        with given(grid=shape, data=data, expert=expert), Grid(comm, shape, data, expert=expert) as grid:
            net = make(grid, case)
            assert bits(weights_of(net)) == expected
            held = [number for number, each in enumerate(net.experts) if each.up.weight.box.size]
            assert {*held} <= {*range(grid.coords.expert, 4, expert)}
            assert comm.allreduce(sum(each.up.weight.box.size for each in net.experts)) == (
                comm.size // grid.shape.along(("x", "y", "expert", "expert_z")) * 4 * HIDDEN * INNER
            )


def test_the_layer_follows_the_columns_of_its_input(comm):
    """Behind a layer whose results are over x, also in other units. No input is relaid out."""
    x = samples()[0]

    def result(grid):
        layers = [nn.Linear(grid, HIDDEN, HIDDEN, seed=seed, dtype="float64") for seed in (1, 2)]
        net = nn.Sequential(grid, layers[0], make(grid, CASES["shared"]), layers[1])
        return net, to_numpy(net(spread(grid, x, TOKENS)).gather())

    with alone() as grid:
        wanted = result(grid)[1]
    for shape in ((comm.size, 1, 1), (1, comm.size, 1), (1, 1, comm.size)):
        with given(grid=shape), Grid(comm, shape, expert=shape[2]) as grid:
            net, found = result(grid)
            assert net.layers[1].router.weight.layout.rows == ("x",) and not nn.Tape.of(grid).has_warned
            assert np.abs(found - wanted).max() < 1e-13
            net, other = (make(grid, CASES["shared"]) for _ in range(2))
            net._assign_layout(Layout((), "x", units=(1, 2)), set())
            layouts = Layout(("data", "z"), "x", units=(1, 2)), TOKENS
            assert_near(*(run(grid, each, layout) for each, layout in zip((net, other), layouts)))


def test_arguments_that_cannot_be(comm, all_fail):
    with Grid(comm, data=comm.size, expert=comm.size) as grid:
        all_fail(
            (GridError, "3 experts", lambda: make(grid, {"experts": 3})),
            (LayoutError, "experts.*0", lambda: make(grid, {"experts": 0})),
            (Pmm3dError, "top_k.*5", lambda: make(grid, {"experts": 4, "top_k": 5})),
            (
                Pmm3dError,
                "shared_gate is for the shared expert",
                lambda: make(grid, {"experts": 4, "shared_gate": True}),
            ),
            (LayoutError, "gated is true or false; got 'no'", lambda: nn.MoE(grid, HIDDEN, INNER, 4, gated="no")),
            (LayoutError, "shared_gate is true or false", lambda: make(grid, {"experts": 4, "shared_gate": "no"})),
            (Pmm3dError, "activations are", lambda: nn.MoE(grid, HIDDEN, INNER, 4, activations="split")),
            (LayoutError, "shared.*-1", lambda: make(grid, {"experts": 4, "shared": -1})),
            (LayoutError, "columns", lambda: make(grid, {"experts": 4})(spread(grid, np.ones((4, 5)), TOKENS))),
            *(
                (Pmm3dError, text, lambda router=router: nn.MoE(grid, HIDDEN, INNER, 4, router=router))
                for router, text in (
                    ({"bias_rates": 1}, "no argument 'bias_rates' .did you mean bias_rate"),
                    ({"top_k": 3}, "Pass top_k to MoE itself"),
                    ({"dtype": "float64"}, "Pass dtype to MoE itself"),
                    ({"cols": "x"}, "Leave cols out"),
                    (3, "router is a mapping of arguments of `Router`.*got 3"),
                )
            ),
        )


@pytest.mark.parallel([1])
@looped("shape, data, expert", [((2, 1, 2), 2, 4), ((2, 2, 2), 1, 2), ((1, 2, 4), 2, 2), ((4, 1, 1), 4, 2)])
def test_bytes_are_those_of_the_table(comm, shape, data, expert):
    """In the notes of `MoE`, for all phases. Small arrays are summed by a gather. Ranks along x that hold the same
    tokens do not send them twice (Megatron-DeepSpeed #63)."""
    whole, hidden, columns, experts, top_k = 64, 8, 256, 8, 2
    n, k, z = shape
    for gated, sharded in ((False, False), (True, True)):
        layout = Layout(("data", "z", "x") if sharded else ("data", "z"), "y")
        with Grid.dry(shape, data, expert=expert) as grid:
            net = nn.MoE(grid, hidden, columns, experts, gated=gated, dtype="float64", seed=1)
            x = nn.Tensor(DistMatrix.random(grid, (whole, hidden), layout=layout), requires_grad=True)
            grid.ledger.reset()
            out = net(x)
            out.backward(out)
            assert all(each.grad is not None for each in net.parameters())  # wait for the sums
            found = {phase: grid.ledger.total(phase=phase).received / 8 for phase in grid.ledger.phases()}
        tokens, h, f = whole // (data * z), hidden // k, columns // n
        rows, part = top_k * tokens, lambda ranks: (ranks - 1) / ranks
        logits = 2 * part(k) * tokens / n * experts
        of_experts, over_z = experts // expert * h * f * (2 + gated), grid.shape.expert_z
        wanted = {
            "router": logits + sum((ranks - 1) * experts for ranks in (n, z, data)),
            "expert counts": part(expert) * experts + (n - 1) * experts,
            **dict.fromkeys(
                ("dispatch", "combine", "combine backward", "dispatch backward"), part(expert) * rows / n * h
            ),
            **dict.fromkeys(("gather I", "gather dO"), part(n) * rows * h),
            "reduce O": part(n) * rows * h + 2 * part(k) * rows * f * (1 + gated),
            "reduce dI": part(n) * rows * h + 2 * part(k) * rows * f,
            "relayout": logits + (not sharded) * 2 * part(n) * tokens * h,
            **dict.fromkeys(("gather W", "reduce dW"), part(over_z) * of_experts),
            "reduce vectors": sum((ranks - 1) * h * experts for ranks in (n, z)),
            "reduce data": (data - 1) * h * experts + 2 * part(grid.shape.expert_data) * of_experts / over_z,
        }
        pairs = {phase: (found.get(phase, 0), wanted.get(phase, 0)) for phase in {*found, *wanted}}
        assert not {phase: pair for phase, pair in pairs.items() if pair[0] != pair[1]}


@looped(
    "library, precision, close", [("numpy", "float32", 1e-5), ("torch", "float32", 1e-5), ("torch", "bfloat16", 0.1)]
)
def test_other_libraries_and_types_are_near(comm, library, precision, close):
    """The router computes in float32 for 16-bit networks."""
    case = CASES["shared"]
    with Grid(comm, data=comm.size, expert=comm.size) as grid:
        wanted = run(grid, fill(make(grid, case)))[0]
        net = fill(make(grid, case, dtype="float32", precision=precision, library=library), library)
        assert net.router.weight.dtype == "float32"
        x = nn.Tensor(spread(grid, samples()[0], TOKENS, library, "float32"))
        out = net(x)
        assert out.dtype == precision
        nn.sum(out).backward()
        assert np.abs(np.asarray(to_numpy(out.gather()), "float64") - wanted).max() < close * np.abs(wanted).max()
        assert all(np.isfinite(np.asarray(to_numpy(each.grad.gather()), "float64")).all() for each in net.parameters())
