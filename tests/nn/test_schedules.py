"""Linear, inverse square root and warm-up-stable-decay rates, in Python and in a configuration."""

from math import sqrt

import pytest
from loops import looped

from pmm3d import Grid, Pmm3dError, nn
from pmm3d.nn import optim
from pmm3d.nn.training.config import checked
from pmm3d.nn.training.network import make_schedule

STEPS = 20


def optimizer_of(grid):
    first, last = nn.Linear(grid, 3, 2), nn.Linear(grid, 3, 2)
    return optim.SGD([{"params": first.parameters()}, {"params": last.parameters(), "lr": 3.0}], lr=1.0)


def decayed(step):
    """1 - sqrt in the last quarter of the steps, above a floor of 0.1."""
    return 0.1 + 0.9 * (1 - sqrt(max(0, step - 15) / 5))


CASES = [
    ({"kind": "linear", "floor": 0.2, "warm_up": 4}, lambda step: 1 - 0.8 * (step - 4) / 16),
    ({"kind": "linear"}, lambda step: 1 - step / 20),
    ({"kind": "inverse_sqrt", "warm_up": 4}, lambda step: sqrt(4 / step)),
    ({"kind": "inverse_sqrt"}, lambda step: sqrt(10_000 / (10_000 + step))),
    ({"kind": "inverse_sqrt", "warm_up": 2, "timescale": 8}, lambda step: sqrt(8 / (6 + step))),
    ({"kind": "wsd", "decay": 0.25, "floor": 0.1, "warm_up": 4}, decayed),
    ({"kind": "wsd"}, lambda step: 1 - sqrt(max(0, step - 16) / 4)),
    ({"kind": "wsd", "decay": 0.01}, lambda step: 1.0),
    ({"kind": "wsd", "decay": 1.0, "warm_up": 4}, lambda step: 1 - sqrt((step - 4) / 16)),
]


@looped("section, factor", CASES)
def test_rates_of_a_configuration_are_those_of_the_formula_also_from_a_checkpoint(section, factor):
    """Of each group. The state of a schedule is the number of steps."""
    config, warm_up = checked({"data": {"file": "x.h5"}, "schedule": section}), section.get("warm_up", 0)
    wanted = [(step + 1) / warm_up if step < warm_up else factor(step) for step in range(STEPS)]
    with Grid.dry((1, 1, 1)) as grid:
        schedule = make_schedule(config, optimizer_of(grid), STEPS)
        for step in range(STEPS):
            if step == 12:
                state, schedule = schedule.state(), make_schedule(config, optimizer_of(grid), STEPS)
                schedule.load_state(state)
            assert [group["lr"] for group in schedule.optimizer.groups] == pytest.approx(
                [wanted[step], 3 * wanted[step]], rel=1e-12
            )
            schedule.step()


@looped("kind, before, after", [("linear", 0.25, 0.625), ("wsd", 1 - sqrt(0.25), 1.0), ("inverse_sqrt", 1.0, 1.0)])
def test_an_end_that_moves_changes_the_rate_of_schedules_with_an_end(kind, before, after):
    options = {"decay": 1 / 3} if kind == "wsd" else {}
    config = checked({"data": {"file": "x.h5"}, "schedule": {"kind": kind, **options}})
    with Grid.dry((1, 1, 1)) as grid:
        schedule = make_schedule(config, optimizer_of(grid), 12)
        for _ in range(9):
            schedule.step()
        assert schedule.optimizer.lr == pytest.approx(before, abs=1e-3)
        schedule.end_at(24)
        assert schedule.optimizer.lr == pytest.approx(after, abs=1e-3)


def test_values_out_of_range_are_refused():
    with Grid.dry((1, 1, 1)) as grid:
        optimizer = optimizer_of(grid)
        for text, make in (
            ("LinearDecay: steps is a number of steps, at least 1", lambda: optim.LinearDecay(optimizer, 0)),
            ("LinearDecay: floor is a share of the rate", lambda: optim.LinearDecay(optimizer, 9, floor=2.0)),
            ("WarmUpStableDecay: floor is a share", lambda: optim.WarmUpStableDecay(optimizer, 9, floor=float("nan"))),
            ("decay is a share of the steps, above 0", lambda: optim.WarmUpStableDecay(optimizer, 9, decay=0)),
            ("timescale is a number of steps", lambda: optim.InverseSquareRoot(optimizer, timescale=0)),
            ("InverseSquareRoot: warm_up is a number", lambda: optim.InverseSquareRoot(optimizer, -1)),
        ):
            with pytest.raises(Pmm3dError, match=text):
                make()
    for section, text in (
        ({"kind": "linear", "decay": 0.5}, 'kind = "linear" has no key decay, which is for wsd'),
        ({"kind": "wsd", "decay": 0}, "schedule.decay = 0: needed is a number above 0 and up to 1"),
        ({"kind": "wsd", "timescale": 9}, "which is for inverse_sqrt"),
        ({"kind": "sqrt"}, '"inverse_sqrt", "wsd"'),
    ):
        with pytest.raises(Pmm3dError) as caught:
            checked({"data": {"file": "x.h5"}, "schedule": section})
        assert text in str(caught.value)
