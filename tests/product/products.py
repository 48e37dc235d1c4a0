"""Grids for products, and what their ledgers count."""

from functools import partial

from each_grid import each_grid

SHAPES = {
    1: [(1, 1, 1)],
    2: [(2, 1, 1), (1, 2, 1), (1, 1, 2)],
    4: [(2, 2, 1), (4, 1, 1), (1, 4, 1), (1, 1, 4), (2, 1, 2)],
    8: [(2, 2, 2), (1, 4, 2), (8, 1, 1), (2, 1, 4)],
}
each_shape = partial(each_grid, shapes=SHAPES)
"""Decorator: run the test on the grids of SHAPES, also on those whose ranks are all along one axis."""


def moved(ledger):
    """key -> (calls, bytes sent, bytes received), without agreements."""
    return {
        key: (entry.calls, entry.sent, entry.received)
        for key, entry in ledger.entries.items()
        if not key.operation.startswith("agreement")
    }
