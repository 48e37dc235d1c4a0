"""Routers: experts, gates, losses and their gradients as of torch, the same choice on every grid, and training."""

import gc

import numpy as np
import pytest
from loops import given
from networks import ALL_GRIDS, alone, gradients_of, over_grids, spread
from samples import bits_of, to_numpy
from torch_reference import by_rank_0

from pmm3d import DistMatrix, DTypeError, Grid, LayoutError, Pmm3dError, nn
from pmm3d.arrays import NumpyLibrary, random
from pmm3d.layout import Layout
from pmm3d.nn import optim
from pmm3d.nn.experts.choice import Choice, best_experts
from pmm3d.nn.experts.routing import Load, Router, with_penalty
from pmm3d.nn.facts import facts_of
from pmm3d.nn.seeds import derived
from pmm3d.nn.training.step import train_step
from pmm3d.nn.transformer import token_layout

pytestmark = pytest.mark.deadline(240)
TOKENS, HIDDEN, EXPERTS = 23, 6, 5
CASES = {
    "mixtral": {"top_k": 2, "balance": 0.3, "jitter": 0.1},
    "switch": {"top_k": 1, "balance": 0.1, "z_loss": 0.2, "capacity": 1.25},
    "olmoe": {"top_k": 3, "normalize": False, "z_loss": 0.4},
    "deepseek": {"top_k": 2, "scores": "sigmoid", "scale": 2.5, "bias_rate": 0.01, "balance": 0.2, "capacity": 0.9},
    "expert choice": {"top_k": 2, "choice": "experts", "z_loss": 0.1},
    "all experts": {"top_k": EXPERTS, "capacity": 0.5},
}
BIAS = np.array([[0.3, -0.2, 0.1, 0.0, -0.4]])


def drawn(*shape, seed=0):
    return np.random.default_rng([seed, *shape]).standard_normal(shape)


def rows_of(grid, k, length=None, order="plain"):
    """Layout of tokens whose rows are also cut by x or y."""
    n = "x" if k == "y" else "y"
    if length is not None:
        return token_layout(grid, length, k, order=order)
    return Layout(("data", "z", n), k)


def gathered(routed):
    """The assignments that are carried out, of all ranks."""
    gates = routed.gates
    local = gates.library.from_numpy(routed.chosen, "float64")
    return to_numpy(DistMatrix(gates.grid, local, gates.shape, gates.layout).gather()) > 0


def within(chosen, capacity):
    return chosen if capacity is None else chosen & (chosen.cumsum(0) <= capacity)


def choice_of(ranked, gates, top_k=2, choice="tokens", capacity=None, **_):
    """(chosen, accepted) by numpy. ranked: numbers by which tokens choose; gates: numbers by which experts do."""
    count = len(ranked)
    size = max(1, int((capacity or 1) * top_k * count / EXPERTS))
    if choice == "experts":
        taken = np.argsort(-gates, axis=0, kind="stable")[: min(size, count)]
        chosen = np.zeros(gates.shape, bool)
        np.put_along_axis(chosen, taken, True, 0)
        return chosen, chosen
    chosen = best_experts(ranked, top_k)
    return chosen, within(chosen, capacity and size)


def of_torch(name, x, weight, slope):
    """[gates, gradients by x and weight of <gates, slope> + the penalty, penalty, counts, accepted]."""
    import torch

    settings = CASES[name]
    x, weight = (torch.tensor(each, requires_grad=True) for each in (x, weight))
    logits = x @ weight
    sigmoid, top_k = settings.get("scores") == "sigmoid", settings["top_k"]
    scores = torch.sigmoid(logits) if sigmoid else torch.softmax(logits, 1)
    ranked = scores.detach().numpy() + (BIAS if "bias_rate" in settings else 0)
    chosen, accepted = choice_of(ranked, scores.detach().numpy(), **settings)
    gates = scores * torch.from_numpy(chosen) * settings.get("scale", 1.0)
    if settings.get("normalize", top_k > 1 and "choice" not in settings):
        gates = gates / (scores * torch.from_numpy(chosen)).sum(1, keepdim=True)
    gates = gates * torch.from_numpy(accepted)
    counts, probabilities = chosen.sum(0), scores / scores.sum(1, keepdim=True)
    balance = EXPERTS / (top_k * len(x)) * (torch.from_numpy(counts) * probabilities.mean(0)).sum()
    z_loss = (torch.logsumexp(logits, 1) ** 2).mean()
    penalty = settings.get("balance", 0) * balance + settings.get("z_loss", 0) * z_loss
    ((gates * torch.from_numpy(slope)).sum() + penalty).backward()
    return [gates.detach().numpy(), x.grad.numpy(), weight.grad.numpy(), penalty.item(), counts, accepted]


@pytest.mark.parallel([1, 2, 4])
def test_gates_losses_and_gradients_are_those_of_torch(comm):
    """The columns of the input over y and over x. Few tokens: some ranks have none. The sums over ranks are part of the
    gradient (NeMo Automodel PR 2995)."""
    cases = [(name, count) for name in CASES for count in (TOKENS, 3)]
    drawn_of = lambda count: (drawn(count, HIDDEN), drawn(HIDDEN, EXPERTS, seed=1), drawn(count, EXPERTS, seed=2))
    still = {name: {key: value for key, value in CASES[name].items() if key != "jitter"} for name in CASES}
    wanted = by_rank_0(comm, lambda: [of_torch(name, *drawn_of(count)) for name, count in cases])

    @over_grids(ALL_GRIDS)
    def compared(grid):
        for (name, count), (gates, dx, dw, penalty, counts, accepted) in zip(cases, wanted):
            x, weight, slope = drawn_of(count)
            for k in ("y", "x"):
                with given(name=name, count=count, k=k):
                    router = Router(grid, HIDDEN, EXPERTS, **still[name], seed=7, dtype="float64", cols=k)
                    if router.bias is not None:
                        router.bias.assign(spread(grid, BIAS, Layout()))
                    router.weight.assign(spread(grid, weight, Layout()))
                    tokens = nn.Tensor(spread(grid, x, rows_of(grid, k)), requires_grad=True)
                    routed = router.route(tokens)
                    with_penalty(inner_product(routed.gates, slope), routed.penalty).backward()
                    assert np.array_equal(gathered(routed), accepted)
                    assert np.array_equal(routed.counts, counts)
                    assert routed.dropped == counts.sum() - accepted.sum() == router.last.dropped
                    found = 0.0 if routed.penalty is None else routed.penalty.item()
                    assert found == pytest.approx(penalty, abs=1e-12)
                    for one, other in ((routed.gates, gates), (tokens.grad, dx), (router.weight.grad, dw)):
                        assert np.abs(to_numpy(one.gather()) - other).max(initial=0) < 1e-12

    compared(comm=comm)


def inner_product(x, weights):
    return nn.sum(x * spread(x.grid, weights, x.layout))


@pytest.mark.parallel([4], thorough=[1, 2, 8])
def test_the_choice_is_the_same_on_every_grid_and_in_every_order(comm):
    """Dropped tokens, the tokens of expert choice, and experts of equal scores. The logits are small integers, so each
    expert has many equal ones. Rows in the order of storage, on ranks that share sequences too."""
    length, count = 8, 32
    logits = np.random.default_rng(3).integers(0, 3, (count, EXPERTS)).astype(float)
    settings = [
        {"top_k": top_k, "capacity": capacity, "choice": choice, "normalize": False}
        for top_k in (1, 2)
        for capacity, choice in ((None, "tokens"), (0.1, "tokens"), (0.7, "tokens"), (0.4, "experts"), (9, "experts"))
    ]

    def check(grid, layout):
        x = nn.Tensor(spread(grid, np.pad(logits, ((0, 0), (0, 1))), layout))
        for each in settings:
            with given(layout=layout, **each):
                router = Router(grid, HIDDEN, EXPERTS, **each, dtype="float64")
                router.weight.assign(spread(grid, np.eye(HIDDEN, EXPERTS), Layout()))
                routed, size = router.route(x), int((each["capacity"] or 1) * each["top_k"] * count / EXPERTS)
                found = gathered(routed)
                if each["choice"] == "experts":
                    assert np.array_equal(found.sum(0), np.full(EXPERTS, min(size, count)))
                    assert np.array_equal(found, chosen_by_experts.setdefault(str(each), found))
                else:
                    assert np.array_equal(found, choice_of(logits, logits, **each)[1])
                    assert routed.dropped == routed.counts.sum() - found.sum()
                    assert (routed.dropped > 0) == (each["capacity"] is not None)

    chosen_by_experts = {}

    @over_grids(ALL_GRIDS)
    def on_grids(grid):
        check(grid, rows_of(grid, "y"))
        check(grid, Layout(("y", "data"), "x"))

    on_grids(comm=comm)
    for shape, data in (((1, 1, 1), comm.size // min(2, comm.size)), ((min(2, comm.size), 1, 1), 1)):
        left = comm.size // (np.prod(shape) * data)
        for order in ("plain", "zigzag", "striped"):
            with given(shape=shape, order=order), Grid(comm, shape, data, seq=int(left)) as grid:
                check(grid, token_layout(grid, length, "y", order=order))


def test_equal_scores_choose_the_expert_with_the_lowest_number():
    """Also of infinite scores, and of NaN: each token has `top_k` experts."""
    ranked = np.array([[1, 2, 2, 2], [0, 0, 0, 0], [-1, 3, -1, 3], [-np.inf] * 4, [-np.inf, 1, *[-np.inf] * 2]])
    wanted = [[0, 1, 1, 0], [1, 1, 0, 0], [0, 1, 0, 1], [1, 1, 0, 0], [1, 1, 0, 0]]
    assert best_experts(ranked, 2).tolist() == wanted
    assert best_experts(np.full((1, 4), np.nan), 3).sum() == 3 and best_experts(ranked[:0], 2).shape == (0, 4)


@pytest.mark.parallel([2], thorough=[1, 4])
def test_the_balance_loss_is_least_for_equal_experts(comm):
    """1 for equal probabilities, E / k if all tokens choose the same experts (hyper-parallel 752: it is not
    constant)."""
    with Grid(comm, "ddp") as grid:
        for experts, top_k in ((4, 1), (8, 2)):
            router = Router(grid, experts, experts, top_k, balance=1, dtype="float64", deviation=0)
            even = np.tile(np.eye(experts), (2, 1))
            assert router.route(nn.Tensor(spread(grid, even))).penalty.item() == pytest.approx(1, abs=1e-12)
            router.weight.assign(spread(grid, 50 * np.eye(experts), Layout()))
            one = np.zeros((12, experts))
            one[:, :top_k] = 1
            worst = router.route(nn.Tensor(spread(grid, one))).penalty.item()
            assert worst == pytest.approx(experts / top_k, abs=1e-12)


class Gated(nn.Module):
    """x times the sum of its gates, with the penalty. It needs the router in the forward and in the backward pass."""

    def __init__(self, grid, **options):
        self.grid, self.linear = grid, nn.Linear(grid, HIDDEN, HIDDEN, seed=1, dtype=options.get("dtype", "float32"))
        self.router = Router(grid, HIDDEN, EXPERTS, **{"normalize": False, "seed": 3, **options})

    def forward(self, x):
        routed = self.router.route(x)
        gate = nn.cast(nn.sum(routed.gates, 1), x.dtype)
        return with_penalty(self.linear(x) * gate, routed.penalty)


def take_step(net, x, parts, scale=None):
    """A step of these micro-batches, which changes no weight."""
    batches = [(spread(net.grid, x[part]), spread(net.grid, 0 * x[part])) for part in parts]
    train_step(net, optim.SGD(net.parameters(), lr=0.0), nn.mse, batches, scale=scale, keep_gradients=True)


@pytest.mark.parallel([4], thorough=[1, 2])
def test_the_weight_of_the_penalty_does_not_depend_on_micro_batches_and_stages(comm):
    """Uneven micro-batches, an empty one, a loss scale, and stages of a pipeline."""
    x = drawn(12, HIDDEN)
    options = {"z_loss": 0.5, "dtype": "float64"}
    with alone() as grid:
        layers = nn.Sequential(grid, *(Gated(grid, **options) for _ in range(2)))
        take_step(layers, x, [slice(None)])
        wanted = gradients_of(layers)
    cuts = [slice(None)], [slice(0, 6), slice(6, 12)], [slice(0, 3), slice(3, 4), slice(4, 4), slice(4, 12)]
    for pipe in {1, min(2, comm.size)}:
        for parts, scale in ((cuts[0], None), (cuts[1], 8.0), (cuts[2], None), (cuts[2], 1024.0)):
            with given(pipe=pipe, parts=parts), Grid(comm, (1, 1, 1), comm.size // pipe, pipe=pipe) as grid:
                make = lambda stage: nn.Sequential(stage, *(Gated(stage, **options) for _ in range(2)))
                net = make(grid) if pipe == 1 else nn.Pipeline(grid, make)
                take_step(net, x, parts, None if scale is None else optim.LossScale(scale))
                for name, each in gradients_of(net).items():
                    assert np.abs(each - wanted[name]).max() < 1e-12, name


@pytest.mark.parallel([2], thorough=[4])
def test_the_balance_loss_in_a_pipeline_is_that_of_one_stage(comm):
    """It is computed for each micro-batch. Steps of one micro-batch each, weighted by their rows, add up to the step,
    for any number of stages (megablocks #85)."""
    x, parts = drawn(12, HIDDEN), [slice(0, 3), slice(3, 8), slice(8, 12)]

    def gradients(grid, balance, parts=parts):
        make = lambda stage: nn.Sequential(stage, *(Gated(stage, balance=balance, dtype="float64") for _ in range(2)))
        net = make(grid) if grid.shape.stages == 1 else nn.Pipeline(grid, make)
        take_step(net, x, parts)
        return gradients_of(net)

    with alone() as grid:
        of_parts = [(len(x[part]) / len(x), gradients(grid, 0.5, [part])) for part in parts]
        wanted = {name: sum(share * each[name] for share, each in of_parts) for name in of_parts[0][1]}
        assert np.abs(wanted["1.router.weight"] - gradients(grid, 0.0)["1.router.weight"]).max() > 1e-3
    with Grid(comm, (1, 1, 1), comm.size // 2, pipe=2) as grid:
        for name, each in gradients(grid, 0.5).items():
            assert np.abs(each - wanted[name]).max() < 1e-12, name


@pytest.mark.parallel([2])
def test_a_loop_of_your_own_weighs_the_losses_of_a_router_by_the_share(comm):
    """As `train_step` does. A factor of the loss alone does not change the losses of the router."""
    x, parts = drawn(12, HIDDEN), [slice(0, 5), slice(5, 12)]
    with Grid(comm, "ddp") as grid:
        of = lambda: Gated(grid, balance=0.5, z_loss=0.25, dtype="float64")
        net = of()
        take_step(net, x, parts)
        wanted = gradients_of(net)
        net, other = of(), of()
        for part in parts:
            share = len(x[part]) / len(x)
            with nn.Tape.of(grid).set(share=share):
                (nn.mse(net(spread(grid, x[part])), spread(grid, 0 * x[part])) * share).backward()
            (nn.mse(other(spread(grid, x[part])), spread(grid, 0 * x[part])) * share).backward()
        assert all(np.abs(each - wanted[name]).max() < 1e-14 for name, each in gradients_of(net).items())
        assert np.abs(gradients_of(other)["router.weight"] - wanted["router.weight"]).max() > 1e-3


@pytest.mark.parallel([2], thorough=[1, 4])
def test_the_bias_changes_once_a_step_by_the_counts_of_all_micro_batches(comm):
    """Not by a forward pass, by an evaluation, by a skipped step, or twice by a recomputed block. A checkpoint contains
    it, and optimizers leave it."""
    x, rate = drawn(12, HIDDEN), 0.25
    with Grid(comm, "ddp") as grid:
        for wrap in (lambda net: net, nn.Recompute):
            net = Gated(grid, scores="sigmoid", bias_rate=rate, dtype="float64")
            router, whole = net.router, wrap(net)
            assert "router.bias" in net.matrices() and not router.bias.requires_grad
            with whole.evaluating():
                whole(spread(grid, 100 * x))
            parts = [slice(0, 5), slice(5, 12)]
            counts = sum(router.route(nn.Tensor(spread(grid, x[part]))).counts for part in parts)
            router.after_step(False)
            assert not to_numpy(router.bias.gather()).any()
            take_step(whole, x, parts)
            wanted = rate * np.sign(counts.mean() - counts)[None]
            assert np.array_equal(to_numpy(router.bias.gather()), wanted)
            take_step(whole, np.full_like(x, np.inf), parts, optim.LossScale())
            assert np.array_equal(to_numpy(router.bias.gather()), wanted) and not router._in_step
            assert router.last.counts.sum() == 2 * 12
            optimizer = optim.AdamW(net.parameters(), lr=0.1, weight_decay=0.9)
            train_step(whole, optimizer, nn.mse, [(spread(grid, x), spread(grid, 0 * x))])
            change = to_numpy(router.bias.gather()) - wanted
            assert np.array_equal(change, rate * np.sign(router.last.counts.mean() - router.last.counts)[None])


@pytest.mark.parallel([2], thorough=[1, 4])
def test_jitter_is_the_same_on_every_grid_and_only_in_training(comm):
    x, found = drawn(9, HIDDEN), {}
    shapes = (1, 1, comm.size), (1, comm.size, 1)
    for make in (alone, *(lambda shape=shape: Grid(comm, shape) for shape in shapes)):
        with make() as grid:
            router = Router(grid, HIDDEN, EXPERTS, jitter=0.5, normalize=False, dtype="float64", seed=2)
            plain = Router(grid, HIDDEN, EXPERTS, normalize=False, dtype="float64", seed=2)
            tokens = nn.Tensor(spread(grid, x))
            gates = lambda router, tokens=tokens: to_numpy(router.route(tokens).gates.gather())
            for name, each in (("first", gates(router)), ("second", gates(router)), ("plain", gates(plain))):
                assert np.abs(found.setdefault(name, each) - each).max() < 1e-12
            assert np.array_equal(gates(router.eval()), gates(plain))
    assert all(
        np.abs(found[one] - found[other]).max() > 1e-3 for one, other in (("first", "second"), ("first", "plain"))
    )


@pytest.mark.parallel([2], thorough=[1, 4])
def test_jitter_multiplies_each_element_by_its_number(comm):
    """Numbers by the row and column in the matrix and the number of the call, in each order of storage."""
    count, jitter, seed = 16, 0.5, 2
    index = np.arange(count * HIDDEN, dtype="uint64").reshape(count, HIDDEN)
    for axes, orders in (({"data": comm.size}, ("plain",)), ({"seq": comm.size}, ("plain", "zigzag", "striped"))):
        for order in orders:
            with given(axes=axes, order=order), Grid(comm, (1, 1, 1), **axes) as grid:
                options = {"scores": "sigmoid", "normalize": False, "dtype": "float64", "seed": seed}
                router = Router(grid, HIDDEN, HIDDEN, HIDDEN, jitter=jitter, **options)
                router.weight.assign(spread(grid, np.eye(HIDDEN), Layout()))
                tokens = nn.Tensor(spread(grid, np.ones((count, HIDDEN)), token_layout(grid, 8, "y", order=order)))
                for call in (1, 2):
                    gates = to_numpy(router.route(tokens).gates.gather())
                    noise = 2 * random.uniform(NumpyLibrary(), index, derived(seed, 1), call) - 1
                    assert np.abs(gates - 1 / (1 + np.exp(-1 - jitter * noise))).max() < 1e-14
                    assert np.ptp(noise) > 1.9 and np.abs(noise.mean()) < 0.2


@pytest.mark.parallel([2], thorough=[1, 4])
def test_recomputation_chooses_nothing_again(comm):
    """The same bits with jitter and capacity, and no message of the choice in the second pass; also in a Recompute in a
    Recompute."""
    x = drawn(16, HIDDEN)
    with Grid(comm, (1, 1, comm.size)) as grid:
        found = []
        for wrap in (lambda net: net, nn.Recompute, lambda net: nn.Recompute(nn.Recompute(net))):
            net = Gated(grid, balance=0.1, z_loss=0.2, jitter=0.3, capacity=0.7)
            whole = wrap(net)
            for _ in range(2):
                grid.ledger.reset()
                tokens = nn.Tensor(spread(grid, x, dtype="float32"), requires_grad=True)
                out = whole(tokens)
                sent = grid.ledger.total(phase="router").received
                nn.mse(out, out.value * 0).backward()
                assert grid.ledger.total(phase="router").received == sent > 0 or comm.size == 1
            assert net.router.calls == 2
            arrays = tokens.grad, *(each.grad for each in net.parameters())
            found.append([bits_of(each.gather()) for each in arrays])
        assert found[0] == found[1] == found[2]


@pytest.mark.parallel([1])
def test_choices_are_kept_as_long_as_their_tensors(comm):
    """Passes that are not repeated leave no choices."""
    with Grid(comm) as grid:
        net = nn.Recompute(nn.Recompute(Gated(grid)))
        outs = [net(nn.Tensor(spread(grid, drawn(4, HIDDEN), dtype="float32"), requires_grad=True)) for _ in range(3)]
        assert choices_in_memory() == 3
        nn.sum(outs.pop()).backward()
        assert choices_in_memory() == 2
        outs.clear()
        assert choices_in_memory() == 0


def choices_in_memory():
    gc.collect()
    return sum(isinstance(each, Choice) for each in gc.get_objects())


@pytest.mark.parallel([2], thorough=[1, 4])
def test_a_16_bit_network_routes_in_float32(comm):
    with Grid(comm, (1, comm.size, 1)) as grid:
        router, other = (Router(grid, HIDDEN, EXPERTS, seed=3, precision=kind) for kind in ("float16", "float32"))
        x = drawn(8, HIDDEN).astype("float16")
        tokens = nn.Tensor(spread(grid, x, dtype="float16"), requires_grad=True)
        routed = router.route(tokens)
        wide = nn.Tensor(spread(grid, x.astype("float32"), dtype="float32"), requires_grad=True)
        wanted = other.route(wide)
        for each in (routed, wanted):
            inner_product(each.gates, drawn(8, EXPERTS).astype("float32")).backward()
        assert router.weight.dtype == routed.gates.dtype == "float32" and tokens.grad.dtype == "float16"
        assert bits_of(routed.gates.gather()) == bits_of(wanted.gates.gather())
        assert bits_of(router.weight.grad.gather()) == bits_of(other.weight.grad.gather())
        assert np.array_equal(to_numpy(tokens.grad.gather()), to_numpy(wide.grad.gather()).astype("float16"))


@pytest.mark.parallel([4], thorough=[2])
def test_bytes_of_a_pass_and_of_a_pass_without_data(comm):
    """Logits are summed over the axis of the columns. A dry run routes evenly, and counts the same bytes."""
    shape, count = (1, 2, comm.size // 2), 20
    for name in CASES:
        received = []
        for make in (lambda: Grid(comm, shape), lambda: Grid.dry(shape, rank=comm.rank)):
            with given(name=name), make() as grid:
                router = Router(grid, HIDDEN, EXPERTS, **CASES[name], seed=7)
                matrix = DistMatrix.empty(grid, (count, HIDDEN), dtype="float32", layout=rows_of(grid, "y"))
                if grid.dry_run is None:
                    matrix.local[...] = 0.5
                x = nn.Tensor(matrix, requires_grad=True)
                routed = router.route(x)
                if grid.dry_run is not None:
                    even = count * router.top_k // EXPERTS
                    left = even if router.capacity is None else min(even, int(router.capacity * even))
                    assert routed.counts.tolist() == [even] * EXPERTS
                    assert routed.dropped == (even - left) * EXPERTS
                received.append(grid.ledger.total(axis="y").received)
                loss = with_penalty(nn.sum(routed.gates), routed.penalty)
                loss.backward()
                assert loss.value is not None and router.weight.grad is not None  # wait for the sums
                received.append(grid.ledger.total().received)
        assert received[:2] == received[2:]
        rows = rows_of(grid, "y").box((count, 1), grid.shape, grid.coords).shape[0]
        assert received[0] == 2 * 0.5 * 4 * rows * EXPERTS


@pytest.mark.parallel([2], thorough=[4])
def test_invalid_routers_are_refused(comm, all_fail):
    with Grid(comm, "ddp") as grid:
        of = lambda **options: lambda: Router(grid, HIDDEN, EXPERTS, **options)
        all_fail(
            (Pmm3dError, "top_k is a number from 1 to 5 experts; got 6", of(top_k=6)),
            (Pmm3dError, "did you mean softmax", of(scores="soft_max")),
            (Pmm3dError, "choice is 'tokens' or 'experts'", of(choice="token")),
            (Pmm3dError, "capacity is a number above 0; got 0", of(capacity=0)),
            (Pmm3dError, "balance is a number of at least 0", of(balance=-0.1)),
            (Pmm3dError, "jitter is a number of at least 0 and below 1", of(jitter=1.0)),
            (LayoutError, "normalize is true or false; got 'no'", of(normalize="no")),
            (Pmm3dError, "nothing to balance", of(choice="experts", balance=0.1)),
            (LayoutError, "experts is a whole number", lambda: Router(grid, HIDDEN, 0, 1)),
        )
        router, ones = of()(), lambda width, dtype: nn.Tensor(spread(grid, np.ones((4, width)), dtype=dtype))
        ragged = nn.ragged(grid, ones(HIDDEN, "float32").local, HIDDEN, Layout(("data", "z"), "y"))
        all_fail(
            (LayoutError, "the input has 7 columns", lambda: router.route(ones(7, "float32"))),
            (LayoutError, "the rows are ragged", lambda: router.route(ragged)),
            (DTypeError, 'make it with dtype="float64"', lambda: router.route(ones(HIDDEN, "float64"))),
        )


@pytest.mark.parallel([2])
def test_nothing_is_dropped_outside_of_training(comm):
    """So a token's gates do not depend on the other tokens. Expert choice keeps its number of tokens."""
    x = drawn(TOKENS, HIDDEN)
    with Grid(comm, "ddp") as grid:
        router = Router(grid, HIDDEN, EXPERTS, capacity=0.5, seed=3, dtype="float64")
        tokens = lambda rows: nn.Tensor(spread(grid, rows, rows_of(grid, "y")))
        assert router.route(tokens(x)).dropped > 0
        with router.evaluating():
            whole, part = router.route(tokens(x)), router.route(tokens(x[7:]))
            assert whole.dropped == 0 and gathered(whole).sum() == 2 * TOKENS
            assert np.array_equal(to_numpy(whole.gates.gather())[7:], to_numpy(part.gates.gather()))
            by_experts = Router(grid, HIDDEN, EXPERTS, capacity=0.5, choice="experts", seed=3, dtype="float64")
            assert (by_experts.route(tokens(x)).counts == int(0.5 * 2 * TOKENS / EXPERTS)).all()


@pytest.mark.parallel([2])
def test_the_load_is_that_of_all_micro_batches_of_a_step(comm):
    """Numbers of tokens are added, and penalties have the mean by the rows. Evaluations and passes without gradients do
    not count. The next step begins anew."""
    x, parts = drawn(12, HIDDEN), [slice(0, 5), slice(5, 12)]
    with Grid(comm, "ddp") as grid:
        net = Gated(grid, capacity=0.5, balance=0.1, z_loss=0.1, dtype="float64")
        router = net.router
        with nn.no_grad(grid):
            each = [router.route(nn.Tensor(spread(grid, x[part]))) for part in parts]
        assert router.last is None
        penalty = (5 * each[0].penalty.item() + 7 * each[1].penalty.item()) / 12
        for _ in range(2):
            optimizer = optim.SGD(net.parameters(), lr=0.0)
            batches = [(spread(grid, x[part]), spread(grid, 0 * x[part])) for part in parts]
            train_step(net, optimizer, nn.mse, batches)
            with net.evaluating():
                net(spread(grid, 100 * x))
            counts, dropped, found, rows = router.last
            assert np.array_equal(counts, sum(one.counts for one in each)) and rows == 12
            assert dropped == sum(one.dropped for one in each) > 0
            assert found == pytest.approx(penalty, rel=1e-12)


@pytest.mark.parallel([1])
def test_routing_is_a_fact_of_a_network(comm):
    with Grid(comm) as grid:
        facts = facts_of(Gated(grid, top_k=3, capacity=1.5))
        settings = {"top_k": 3, "scores": "softmax", "normalize": False, "scale": 1.0, "choice": "tokens"}
        assert facts == {f"network.{name}": value for name, value in settings.items()}
        net = Gated(grid)
        assert net.router.last is None
        net(spread(grid, drawn(4, HIDDEN), dtype="float32"))
        assert isinstance(net.router.last, Load) and net.router.last.counts.sum() == 8
