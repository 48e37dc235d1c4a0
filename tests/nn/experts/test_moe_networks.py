"""GPT and Llama with mixtures of experts: beside torch, on any number of ranks that share the experts, and with
checkpoints, ZeRO, recomputation, pipelines, generation and runs of `pmm3d train`."""

from functools import partial

import numpy as np
import pytest
from loops import given, looped
from networks import alike, alone, assert_replicas_agree, bits, weights_of
from on_disk import on_rank_0
from samples import TESTED, bits_of, to_numpy
from torch_reference import by_rank_0
from transformer_reference import EXPERT_GRIDS, IGNORED, Case, batch_on, fill, of_torch, steps_of_torch

from pmm3d import Grid, LayoutError, Pmm3dError, nn
from pmm3d.io import Checkpoints
from pmm3d.nn import optim
from pmm3d.nn.training import TrainState
from pmm3d.nn.training.step import step_agreement, train_step

pytestmark = [pytest.mark.parallel([2], thorough=[4]), pytest.mark.deadline(300)]

LOSS = partial(nn.cross_entropy, ignore_index=IGNORED)
CASES = {
    "gpt": Case(mixture={"experts": 4, "expert_mlp": 7, "z_loss": 0.05}, batch=4),
    "llama": Case(
        "Llama", hidden=16, heads=4, kv_heads=2, mlp=12, tied=False, batch=5,
        mixture={"experts": 4, "every": 2, "shared": 9, "shared_gate": True, "normalize": False, "capacity": 0.9},
    ),
}  # fmt: skip
LLAMA_ALL = CASES["llama"]._replace(qk_norm="all", mixture={"experts": 8, "top_k": 3, "balance": 0.3})


def passed(grid, case, **options):
    """(network, loss, logits, name -> gradient, bytes that the choices of routers received)."""
    net = fill(case.make(grid, **options))
    tokens, labels = batch_on(grid, case)
    grid.ledger.reset()
    out = net(tokens)
    loss = LOSS(out, labels)
    loss.backward()
    slopes = {name: each.grad for name, each in net.named_parameters().items()}
    return net, loss.item(), to_numpy(out.gather()), slopes, grid.ledger.total(phase="router").received


def near(found, wanted):
    return np.abs(to_numpy(found) - wanted).max(initial=0) <= 1e-12 * max(1, np.abs(wanted).max(initial=0))


@pytest.mark.parallel([1, 2, 4])
def test_losses_and_gradients_are_those_of_torch(comm):
    """In turns with replicated and with sharded activations, and with recomputation."""
    cases = {**CASES, "norm of all heads": LLAMA_ALL}
    expected = by_rank_0(comm, lambda: {name: of_torch(case) for name, case in cases.items()})
    for number, (shape, data, expert) in enumerate(EXPERT_GRIDS[comm.size]):
        for turn, (name, case) in enumerate(cases.items()):
            options = {"activations": ("replicated", "sharded")[(number + turn) % 2]}
            options["recompute"] = ("none", "full", 1)[(number + turn) % 3]
            with (
                given(grid=shape, data=data, expert=expert, case=name, **options),
                Grid(comm, shape, data, expert=expert) as grid,
            ):
                loss, logits, gradients = expected[name]
                _, found, out, slopes, _ = passed(grid, case, **options)
                assert abs(found - loss) < 1e-12 * max(1, abs(loss)) and near(out, logits)
                assert slopes.keys() == gradients.keys()
                for each, slope in slopes.items():
                    assert near(slope.gather(), gradients[each]), each
                assert_replicas_agree(grid, slopes)


@looped("order", ["plain", "zigzag"])
def test_ranks_that_share_sequences_drop_the_tokens_of_torch(comm, order):
    """Capacity counts tokens in the order of the matrix, also if they are stored in zigzag order."""
    case = CASES["llama"]._replace(sequence=8, batch=3)
    loss, logits, gradients = by_rank_0(comm, lambda: of_torch(case))
    with Grid(comm, data=comm.size // 2, seq=2, expert=comm.size // 2) as grid:
        _, found, out, slopes, _ = passed(grid, case, order=order)
        assert abs(found - loss) < 1e-12 and near(out, logits)
        assert all(near(slope.gather(), gradients[name]) for name, slope in slopes.items())


CLIPPED, SEVERAL = {"clip": 0.5}, {"micro": 2}
SHARING = {
    2: [((1, 1, 1), 2, (1, 2), CLIPPED), ((1, 1, 2), 1, (1, 2), SEVERAL)],
    4: [
        ((1, 1, 1), 4, (1, 2, 4), CLIPPED),
        ((1, 1, 2), 2, (1, 2), SEVERAL),
        ((1, 1, 2), 2, (1, 2, 4), {"shard_over_data": "gradients"}),
        ((1, 1, 4), 1, (1, 2, 4), SEVERAL),
        ((2, 1, 1), 2, (1, 2), CLIPPED),
        ((1, 1, 1), 2, (1, 2), {"seq": 2}),
    ],
}
"""Number of ranks -> grids (shape, data) with numbers of ranks along "expert" whose steps have equal bits, and
arguments of the grid (seq) and of the steps. Gradients are clipped with one rank along z only. If there are several
micro-batches, "expert" joins ranks along z only."""


def trained(grid, case, steps=3, micro=1, clip=None, **options):
    """(losses, and norms if gradients are clipped; bits of all weights) after steps of AdamW, each of some
    micro-batches."""
    net = case.make(grid)
    optimizer, found = optim.AdamW(net.parameters(), lr=0.01, **options), []
    for step in range(steps):
        parts = [slice(part * case.batch // micro, (part + 1) * case.batch // micro) for part in range(micro)]
        batches = [tuple(batch_on(grid, case, step, part=part)) for part in parts]
        found.append(train_step(net, optimizer, LOSS, batches, clip=clip)[: 1 if clip is None else 2])
    return found, weights_of(net)


@pytest.mark.parallel([4], thorough=[2])
def test_bits_of_steps_do_not_depend_on_the_ranks_that_share_the_experts(comm):
    """Losses, norms for clipping, and all weights, under the conditions of docs/experts.md."""
    for number, (shape, data, shares, options) in enumerate(SHARING[comm.size]):
        case, found, options = list(CASES.values())[number % 2], [], {**options}
        seq = options.pop("seq", 1)
        for expert in shares:
            with given(grid=shape, data=data, expert=expert), Grid(comm, shape, data, expert=expert, seq=seq) as grid:
                found.append(trained(grid, case, **options))
                assert alike(found[-1][1].values(), found[0][1].values())
                assert found[-1][0] == found[0][0] if TESTED == "numpy" else np.allclose(found[-1][0], found[0][0])


def test_zero_shards_over_the_ranks_that_share_an_expert(comm):
    """With the bits of the same steps without ZeRO."""
    case, half = CASES["gpt"], comm.size // 2
    for expert in dict.fromkeys((1, half, comm.size)):
        with given(expert=expert), Grid(comm, data=comm.size, expert=expert) as grid:
            plain, *sharded = (trained(grid, case, 2, shard_over_data=how)[1] for how in (False, "states", "gradients"))
            assert all(bits(each) == bits(plain) for each in sharded)
            net = case.make(grid)
            optimizer = optim.AdamW(net.parameters(), lr=0.01, shard_over_data="gradients")
            train_step(net, optimizer, LOSS, [tuple(batch_on(grid, case))])
            state = optimizer.matrices(net.named_parameters())["optimizer/1.mlp.experts.0.up.weight/mean"]
            assert ("expert_data" in state.layout.rows) == (expert < comm.size)


def test_steps_of_adamw_are_those_of_torch(comm):
    case, options = CASES["gpt"], {"lr": 0.01, "weight_decay": 0.1}
    losses, weights = by_rank_0(comm, lambda: steps_of_torch(case, 3, **options))
    with Grid(comm, data=comm.size, expert=comm.size) as grid:
        net = case.make(grid)
        optimizer = optim.AdamW(net.parameters(), **options)
        found = [train_step(net, optimizer, LOSS, [tuple(batch_on(grid, case, step))])[0] for step in range(3)]
        assert np.abs(np.subtract(found, losses)).max() < 1e-12
        for name, value in weights_of(net).items():
            assert np.abs(value - weights[name]).max() < 1e-10, name


def test_a_checkpoint_continues_with_other_ranks_along_expert(comm, shared_path):
    """And back: experts, their moments, and the biases of routers move. Bits are those of an unbroken run."""
    case = CASES["gpt"]._replace(mixture={"experts": 4, "bias_rate": 0.01})

    def state_on(grid):
        net = case.make(grid, seed=1)
        return TrainState(net, optim.AdamW(net.parameters(), lr=0.01, shard_over_data=True))

    def steps(state, first, last):
        grid = state.network.grid
        for step in range(first, last):
            train_step(state.network, state.optimizer, LOSS, [tuple(batch_on(grid, case, step))])

    with Grid(comm, data=comm.size) as grid:
        state = state_on(grid)
        steps(state, 0, 3)
        expected = weights_of(state.network)
        assert any(name.endswith("router.bias") for name in expected)
    for step, expert in enumerate((comm.size, 1, comm.size)):
        with Grid(comm, data=comm.size, expert=expert) as grid:
            state, checkpoints = state_on(grid), Checkpoints(grid, shared_path / "checkpoints")
            assert (state.resume(checkpoints) is None) == (step == 0)
            steps(state, step, step + 1)
            state.save(checkpoints)
            found = weights_of(state.network)
    assert found.keys() == expected.keys() and alike(found.values(), expected.values())


def test_generated_tokens_do_not_depend_on_the_grid(comm):
    prompt = np.array([[1, 2, 3], [4, 5, 6], [7, 8, 9]])
    for name, case in CASES.items():
        case = case._replace(positions=12)
        with alone() as grid:
            expected = nn.generate(fill(case.make(grid)), prompt, 5, seed=3)
        for shape, data, expert in (((1, 1, 1), comm.size, comm.size), ((1, 1, comm.size), 1, comm.size)):
            with given(case=name, grid=shape), Grid(comm, shape, data, expert=expert) as grid:
                assert np.array_equal(nn.generate(fill(case.make(grid)), prompt, 5, seed=3), expected)


def test_recomputation_has_the_same_bits_and_routes_once(comm):
    case = CASES["llama"]
    for expert in (1, comm.size):
        with given(expert=expert), Grid(comm, data=comm.size, expert=expert) as grid:
            plain, again = (passed(grid, case, recompute=recompute) for recompute in ("none", "full"))
            assert plain[1] == again[1] and plain[4] == again[4] > 0
            one, other = ({name: bits_of(each.local) for name, each in found[3].items()} for found in (plain, again))
            assert one == other


@pytest.mark.parallel([4], thorough=[2])
def test_a_pipeline_has_the_gradients_of_torch(comm):
    """Also with weight gradients that are computed later. Losses of routers are weighted by the share of the rows."""
    case = CASES["gpt"]._replace(batch=4, mixture={"experts": 4, "balance": 0.0, "z_loss": 0.2})
    loss, _, gradients = by_rank_0(comm, lambda: of_torch(case))
    for schedule in ("1f1b", "zb-h1"):
        with given(schedule=schedule), Grid(comm, (1, 1, 1), comm.size // 2, pipe=2, expert=comm.size // 2) as grid:
            net, slopes = fill(nn.Pipeline(grid, case.make, schedule=schedule)), {}
            batches = [tuple(batch_on(net.grid, case, part=part)) for part in (slice(0, 1), slice(1, 4))]

            def agree(part, square):
                slopes.update({name: each.grad for name, each in net.named_parameters().items()})
                return step_agreement(net.grid, part, square, parent=grid)

            found, _ = train_step(net, optim.SGD(net.parameters(), lr=0.0), LOSS, batches, agree=agree)
            assert abs(found - loss) < 1e-12
            assert set().union(*comm.allgather(set(slopes))) == set(gradients)
            for name, slope in slopes.items():
                assert near(slope.gather(), gradients[name]), name


def test_the_weight_of_router_losses_does_not_depend_on_axes_and_ignored_labels(comm):
    """Megatron-LM PR 3768: the loss is a mean over the labels that count, the losses of routers over all tokens. Uneven
    micro-batches, also on ranks that share columns, or sequences."""
    case = CASES["llama"]._replace(batch=4, mixture={"experts": 4, "balance": 0.0, "z_loss": 0.2})
    loss, _, gradients = by_rank_0(comm, lambda: of_torch(case))
    for axes in ({"data": 2, "expert": 2}, {"shape": (2, 1, 1)}, {"shape": (1, 2, 1)}, {"seq": 2}):
        axes = {"data": comm.size // 2, **axes} if "data" not in axes else axes | {"data": comm.size}
        with given(axes=axes), Grid(comm, **{"shape": (1, 1, 1), **axes}) as grid:
            net = fill(case.make(grid))
            batches = [tuple(batch_on(grid, case, part=part)) for part in (slice(0, 1), slice(1, 4))]
            optimizer = optim.SGD(net.parameters(), lr=0.0)
            found, _ = train_step(net, optimizer, LOSS, batches, keep_gradients=True)
            assert abs(found - loss) < 1e-12
            for name, parameter in net.named_parameters().items():
                assert near(parameter.grad.gather(), gradients[name]), name


@looped("precision", ["bfloat16", "float16"])
def test_16_bit_networks_have_the_same_bits_for_each_number_of_ranks(comm, precision):
    """If gradients are sent in float32. With master weights, and for float16 a scaled loss."""
    case, found, types = CASES["llama"], [], nn.Precision(precision, communication="float32")
    for expert in (1, comm.size):
        with given(expert=expert), Grid(comm, data=comm.size, expert=expert) as grid:
            net = case.make(grid, dtype="float32", precision=types, library="torch")
            assert net.layers[2].mlp.router.weight.dtype == "float32"
            optimizer = optim.AdamW(net.parameters(), lr=0.01)
            scale = optim.LossScale() if precision == "float16" else None
            steps = []
            for step in range(2):
                batch = tuple(batch_on(grid, case, step, library="torch"))
                steps.append(train_step(net, optimizer, LOSS, [batch], clip=1.0, scale=scale))
            assert np.isfinite(steps).all()
            weights = {name: to_numpy(each.gather()) for name, each in net.matrices().items()}
            found.append((steps, bits(weights)))
    assert found[0] == found[1]


def test_arguments_of_networks_that_cannot_be(comm, all_fail):
    sizes = {"vocabulary": 5, "positions": 4, "layers": 1, "hidden": 8, "heads": 2}
    with Grid(comm, data=comm.size, expert=comm.size) as grid:
        all_fail(
            *(
                (LayoutError, f"{name} .*no experts", lambda given=given: nn.GPT(grid, **sizes, **given))
                for name, given in (
                    ("top_k", {"top_k": 2}),
                    ("shared", {"shared": 8}),
                    ("every", {"every": 2}),
                    ("capacity", {"capacity": 1.5}),
                    ("balance", {"balance": 0.1}),
                    ("balance", {"balance": 0.0}),
                    ("capacity", {"capacity": 0}),
                    ("z_loss", {"z_loss": 0.1}),
                )
            ),
            (LayoutError, "top_k is 3, more than experts = 2", lambda: nn.GPT(grid, **sizes, experts=2, top_k=3)),
            (LayoutError, "every is 2, but .* 1 blocks", lambda: nn.GPT(grid, **sizes, experts=2, every=2)),
            (LayoutError, "shared_gate is .* set shared", lambda: nn.GPT(grid, **sizes, experts=2, shared_gate=True)),
            *(
                (error, text, lambda given=given: nn.TransformerBlock(grid, 8, 2, **given))
                for error, text, given in (
                    (Pmm3dError, "experts is a mapping with the key experts.*got 4", {"experts": 4}),
                    (Pmm3dError, "experts is a mapping .*got {}", {"experts": {}}),
                    (Pmm3dError, "no key 'capacity'.*key router", {"experts": {"experts": 4, "capacity": 1.0}}),
                    (LayoutError, "shared_gate is true or", {"experts": {"experts": 4, "shared_gate": "no"}}),
                    (LayoutError, "gated is true or false; got 'no'", {"gated": "no"}),
                )
            ),
            (LayoutError, "experts is a whole number, at least 0", lambda: nn.GPT(grid, **sizes, experts=-1)),
            (LayoutError, "every is a whole number, at least 1", lambda: nn.GPT(grid, **sizes, experts=2, every=0)),
        )


# Runs of pmm3d train


NETWORK = """
kind = "gpt"
hidden = 16
layers = 2
experts = 4
top_k = 2
expert_mlp = 8
capacity = 1.0
"""


def config_of(here, name, expert, steps=4, **others):
    sections = {"grid": f'shape = "1x1x1"\ndata = {here.comm.size}\nexpert = {expert}', **others}
    path = str(here.folder / "tokens.h5")
    text = f'[data]\nfile = "{path}"\nsequence = 8\nbatch_size = 4\n[network]\n{NETWORK}'
    text += f'[training]\nfolder = "{here.folder}/{name}"\nlog_every = 1\nsteps = {steps}\ncheckpoint_every = 2\n'
    text += "\n".join(f"[{section}]\n{lines}" for section, lines in sections.items())
    file = here.folder / f"{name}.toml"
    on_rank_0(here.comm, lambda: file.write_text(text))
    return str(file)


def write_tokens(path):
    import h5py

    with h5py.File(path, "w") as file:
        file["tokens"] = np.random.default_rng(0).integers(0, 11, 400).astype("uint16")
        file["tokens"].attrs["vocabulary"] = 11


def test_a_run_writes_the_load_of_its_experts_and_resumes_on_other_ranks(here, comm):
    """The figures show an imbalance, which makes steps slow (verl #4103)."""
    on_rank_0(comm, lambda: write_tokens(here.folder / "tokens.h5"))
    constant = {"schedule": 'kind = "constant"\nwarm_up = 0'}
    whole = config_of(here, "whole", comm.size, **constant)
    done = here.train(whole)
    assert done.returncode == 0, done.stderr
    steps = [line for line in here.metrics("whole") if "loss" in line]
    assert len(steps) == 4 and all(line["imbalance"] >= 1 and 0 <= line["dropped"] < 1 for line in steps)
    assert any(line["dropped"] > 0 for line in steps) and all(line["router_loss"] > 0.01 for line in steps)
    for name, load in steps[-1]["experts"].items():
        assert name.endswith("mlp.router") and len(load) == 4 and sum(load) == 2 * 4 * 8
    assert here.train(config_of(here, "part", comm.size, 2, **constant)).returncode == 0
    again = config_of(here, "part", 1, 4, **constant)
    done = here.train(again, "--resume", "auto")
    assert done.returncode == 0, done.stderr
    here.assert_same_weights("whole", "part")
