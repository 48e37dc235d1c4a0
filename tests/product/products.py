"""Shapes of grids for products, and what their ledgers count."""

SHAPES = {
    1: [(1, 1, 1)],
    2: [(2, 1, 1), (1, 2, 1), (1, 1, 2)],
    4: [(2, 2, 1), (4, 1, 1), (1, 4, 1), (2, 1, 2)],
    8: [(2, 2, 2), (1, 4, 2), (8, 1, 1), (2, 1, 4)],
}


def moved(ledger):
    """key -> (calls, bytes sent, bytes received), without agreements."""
    return {
        key: (entry.calls, entry.sent, entry.received)
        for key, entry in ledger.entries.items()
        if not key.operation.startswith("agreement")
    }
