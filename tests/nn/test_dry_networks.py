"""Networks on a grid without data: the actions of a step in order, and copies of networks."""

from collections import Counter

import h5py
import numpy as np
import pytest

from pmm3d import Grid, nn
from pmm3d.io import DataSet
from pmm3d.layout import batch_layout
from pmm3d.nn import optim
from pmm3d.nn.dry import Facts
from pmm3d.nn.training import Recipe, Trainer, TrainState
from pmm3d.nn.training.step import train_step


def step_of(grid, sizes, rows, **options):
    """A step of an MLP, and its network."""
    net = nn.MLP(grid, sizes, nn.relu, **options)
    optimizer = optim.SGD(net.parameters(), lr=0.1)
    x, y = (
        Facts((rows, columns), layout, "float32", "numpy").on(grid)
        for columns, layout in ((sizes[0], batch_layout("y")), (sizes[-1], net.output_layout))
    )

    def step():
        grid.dry_run.actions.clear()
        grid.ledger.reset()
        train_step(net, optimizer, nn.mse, [(x, y)])
        return grid.dry_run.actions

    return step, net


def said(actions) -> list[str]:
    """Text of each action except passes: "gemm m n k", "begin phase bytes", "wait phase"."""
    phases = {action.number: action.phase for action in actions if action.what == "begin"}
    return [
        f"gemm {action.m} {action.n} {action.k}"
        if action.what == "gemm"
        else f"begin {action.phase} {action.received}"
        if action.what == "begin"
        else f"wait {phases.get(action.number, 'for one of the step before')}"
        for action in actions
        if action.what != "pass"
    ]


def test_a_step_on_four_axes_in_order():
    """OAG: the second weight is gathered under the first GEMM. OAR: the sum of dI begins before the GEMM of dW, and is
    awaited after it. ORS: a sum of dW is awaited only by the optimizer."""
    with Grid.dry((2, 2, 2), 2) as grid:
        nn.Tape.of(grid).parallel.overlap = nn.Overlap(reshard_after_forward=True)
        step, _ = step_of(grid, (8, 16, 4), 32, bias=False)
        step()
        assert said(step()) == [
            "begin gather W 64",
            "wait gather W",
            "begin gather W 32",
            "gemm 8 8 4",
            "begin reduce O 256",
            "wait reduce O",
            "wait gather W",
            "gemm 8 2 8",
            "begin reduce O 64",
            "wait reduce O",
            "begin gather W 32",
            "wait gather W",
            "gemm 8 8 2",
            "begin reduce dI 256",
            "gemm 8 2 8",
            "begin reduce dW 32",
            "wait reduce dI",
            "gemm 4 8 8",
            "begin reduce dW 64",
            "begin reduce data 96",
            "wait reduce data",
            "begin agreement 840",
            "wait agreement",
        ]


@pytest.mark.parametrize("reshard", [True, False, None])
def test_the_next_weight_is_gathered_under_a_gemm_in_every_batch_of_a_step(reshard):
    """In a loop of the user without `unchanged`, gathered weights of the previous batch are not reused."""
    with Grid.dry((1, 1, 4)) as grid:
        nn.Tape.of(grid).parallel.overlap = nn.Overlap(reshard_after_forward=reshard)
        net = nn.MLP(grid, [8, 16, 16, 4], nn.relu, bias=False)
        x, y = (Facts((32, columns), batch_layout("y"), "float32", "numpy").on(grid) for columns in (8, 4))
        nn.mse(net(x), y).backward()
        for _ in range(2):
            grid.dry_run.actions.clear()
            loss = nn.mse(net(x), y)
            assert [word for word in said(grid.dry_run.actions) if "loss" not in word] == [
                "begin gather W 384",
                "wait gather W",
                "begin gather W 768",
                "gemm 8 16 8",
                "wait gather W",
                "begin gather W 192",
                "gemm 8 16 16",
                "wait gather W",
                "gemm 8 4 16",
            ]
            loss.backward()


def test_without_overlap_each_collective_is_awaited_at_once():
    with Grid.dry((2, 2, 2), 2, rank=5) as grid:
        nn.Tape.of(grid).parallel.overlap = nn.Overlap.none(reshard_after_forward=True)
        step, _ = step_of(grid, (8, 16, 4), 32)
        actions = [action for action in step() if action.phase != "loss" and action.what != "pass"]
        begun = {action.number: index for index, action in enumerate(actions) if action.what == "begin"}
        awaited = {action.number: index for index, action in enumerate(actions) if action.what == "wait"}
        assert begun and all(awaited[number] == index + 1 for number, index in begun.items())


@pytest.mark.parametrize("activations", nn.dense.ACTIVATIONS)
def test_a_step_on_32768_ranks(activations):
    """Eight layers on many hosts. Bytes are those of the layer's formulas."""
    with Grid.dry((32, 32, 32), rank=20000, hosts=4096) as grid:
        nn.Tape.of(grid).parallel.overlap = nn.Overlap(reshard_after_forward=True)
        step, net = step_of(grid, (8192,) * 9, 2**18, activations=activations, bias=False)
        step()
        actions = step()
        product = 2**13 * 2**8  # of one rank: rows / z x columns / x
        computed = sum(action.m * action.n * action.k for action in actions if action.what == "gemm")
        assert computed == (3 * 8 - 1) * product * 2**8
        gathered = grid.ledger.total(phase="gather W")
        assert gathered.received == 15 * 4 * 2**8 * (2**8 - 2**3)  # kept from the last layer's forward pass: one less
        moved = sum(grid.ledger.total(phase=phase).received for phase in ("reduce O", "gather I"))
        assert grid.dry_run.held["weights"] == net.size * 4 // grid.size
        if activations == "replicated":
            assert moved == 8 * 2 * 4 * product * 31 // 32


def test_a_trainer_runs_on_the_batches_of_a_dry_loader(tmp_path):
    """Uneven last batches and labels. The classes are read from the file, and the rows are not."""
    with h5py.File(tmp_path / "data.h5", "w") as file:
        file["x"], file["y"] = np.full((100, 12), np.nan), np.arange(100) % 3
    with Grid.dry((2, 1, 3), 2, rank=9) as grid, DataSet(grid, tmp_path / "data.h5") as data:
        net = nn.MLP(grid, [12, 8, data.classes])
        loader, validation = (data.loader(32, rows=rows, split_targets=None) for rows in ((0, 80), (80, 100)))
        assert [(x.shape, y.shape, y.dtype, x.local.shape) for x, y in validation] == [
            ((20, 12), (20, 1), "int64", (3, 12))
        ]
        state = TrainState(net, optim.AdamW(net.parameters()), loader=loader)
        run = Trainer(state, Recipe("cross_entropy", epochs=2, clip=1.0), validation)
        assert run.run() and run.step == 6 and set(run.figures) == {"loss", "accuracy"}
        assert run.counts == Counter(steps=6, evaluations=2)


def test_weights_are_kept_on_a_dry_grid_unless_a_budget_says_else():
    for budget, gathers in ((None, 2), (0, 3)):
        with Grid.dry((1, 1, 2)) as grid:
            nn.Tape.of(grid).parallel.weights.budget = budget
            step, _ = step_of(grid, (8, 16, 4), 32)
            step()
            step()
            assert grid.ledger.total(phase="gather W").calls == gathers
