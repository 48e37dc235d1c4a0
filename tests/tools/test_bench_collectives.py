"""`pmm3d bench collectives`: the ways beside the textbook, what is measured and shown, the command."""

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.append(str(Path(__file__).parent.parent / "comm"))
from fake_link import run

from pmm3d.model.textbook import BY_NODES, OPERATIONS, cost, radices, ways
from pmm3d.tools.bench.collectives.ways import Buffers, way_of

SIZES = (2, 3, 4, 6, 8, 9, 12, 16, 24, 32, 48, 64)
NODES = [(2, 2), (2, 4), (4, 2), (3, 3), (4, 4), (8, 8), (16, 4)]


def result(operation, way, size, inside=1, elements=1):
    """(what the ranks get, what they passed, their links) of parts of so many elements."""
    n = elements * size
    passed = [np.arange(n) * 1.0 + 1000 * rank for rank in range(size)]
    spare = lambda: np.zeros(n)

    def collective(link):
        landing = np.zeros((size, n))
        return way_of(operation, way, inside)(link, Buffers(passed[link.rank].copy(), spare(), landing))

    outs, links = run(size, collective, each=inside if inside > 1 else None)
    return outs, passed, links


def expected(operation, passed, rank):
    parts = [array.reshape(len(passed), -1) for array in passed]
    return {"all_gather": lambda: np.concatenate([part[other] for other, part in enumerate(parts)]),
            "reduce_scatter": lambda: sum(parts)[rank], "all_reduce": lambda: sum(passed),
            "all_to_all": lambda: np.concatenate([part[rank] for part in parts])}[operation]()


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("size", SIZES)
def test_each_way_takes_the_steps_and_bytes_of_the_textbook(operation, size):
    for way in ways(operation):
        outs, passed, links = result(operation, way, size, elements=2)
        assert all(np.array_equal(out, expected(operation, passed, rank)) for rank, out in enumerate(outs)), way
        known = cost(operation, way, size, 16 * size)
        assert max(link.record.received for link in links) == known.received, way
        assert max(link.steps for link in links) == known.steps, way


@pytest.mark.parametrize("operation", ["all_gather", "reduce_scatter", "all_reduce"])
@pytest.mark.parametrize("nodes, each", NODES)
def test_by_nodes_takes_the_bytes_of_the_textbook(operation, nodes, each):
    size, elements = nodes * each, 2**14 // (nodes * each) * nodes
    outs, passed, links = result(operation, BY_NODES, size, each, elements)
    assert all(np.array_equal(out, expected(operation, passed, rank)) for rank, out in enumerate(outs))
    known = cost(operation, BY_NODES, size, 8 * elements * size, each)
    assert {link.record.received for link in links} == {known.received}
    assert {link.record.across for link in links} == {known.across}
    if operation == "all_reduce":
        assert {link.steps for link in links} == {known.steps}


def test_the_smallest_stages():
    assert all(np.prod(radices(size)) == size for size in range(2, 200))
