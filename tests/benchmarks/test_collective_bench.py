"""benchmarks/collectives.py: the algorithms compared with the textbook, the table, bus bandwidth, the program."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest

TESTS = Path(__file__).parent.parent
sys.path.append(str(TESTS / "comm"))

from collective_ways import Buffers, way_of  # noqa: E402
from collectives import HEADING, Row, table  # noqa: E402
from fake_link import run  # noqa: E402
from loops import given  # noqa: E402
from textbook import BY_NODES, OPERATIONS, cost, radices, ways  # noqa: E402
from timing import ProgramError, on_ranks  # noqa: E402

from pmm3d.model.machines import Group  # noqa: E402

PROGRAM = TESTS.parent / "benchmarks/collectives.py"
SIZES = (2, 3, 4, 6, 8, 9, 12, 16, 24, 32, 48, 64)
NODES = [(2, 2), (2, 4), (4, 2), (3, 3), (4, 4), (8, 8), (16, 4)]


def result(operation, way, size, inside=1, elements=1):
    """(results of the ranks, their arguments, their links) for parts with this number of elements."""
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
    return {
        "all_gather": lambda: np.concatenate([part[other] for other, part in enumerate(parts)]),
        "reduce_scatter": lambda: sum(parts)[rank],
        "all_reduce": lambda: sum(passed),
        "all_to_all": lambda: np.concatenate([part[rank] for part in parts]),
    }[operation]()


def check_ways(operation, sizes):
    for size in sizes:
        for way in ways(operation):
            with given(size=size, way=way):
                outs, passed, links = result(operation, way, size, elements=2)
                assert all(np.array_equal(out, expected(operation, passed, rank)) for rank, out in enumerate(outs))
                known = cost(operation, way, size, 16 * size)
                assert max(link.record.received for link in links) == known.received
                assert max(link.steps for link in links) == known.steps


@pytest.mark.parametrize("operation", OPERATIONS)
def test_each_way_takes_the_steps_and_bytes_of_the_textbook(operation):
    check_ways(operation, SIZES[:8])


@pytest.mark.thorough("textbook algorithms on many ranks")
@pytest.mark.parametrize("operation", OPERATIONS)
def test_each_way_on_many_ranks(operation):
    check_ways(operation, SIZES[8:])


def check_by_nodes(groups):
    for operation in ("all_gather", "reduce_scatter", "all_reduce"):
        for nodes, each in groups:
            with given(operation=operation, nodes=nodes, each=each):
                size, elements = nodes * each, 2**14 // (nodes * each) * nodes
                outs, passed, links = result(operation, BY_NODES, size, each, elements)
                assert all(np.array_equal(out, expected(operation, passed, rank)) for rank, out in enumerate(outs))
                known = cost(operation, BY_NODES, size, 8 * elements * size, each)
                assert {link.record.received for link in links} == {known.received}
                assert {link.record.across for link in links} == {known.across}
                if operation == "all_reduce":
                    assert {link.steps for link in links} == {known.steps}


def test_by_nodes_takes_the_bytes_of_the_textbook():
    check_by_nodes(NODES[:5])


@pytest.mark.thorough("collectives by nodes on 64 ranks")
def test_by_nodes_on_many_ranks():
    check_by_nodes(NODES[5:])


def test_the_smallest_stages():
    assert all(np.prod(radices(size)) == size for size in range(2, 200))


def test_bus_bandwidth_is_that_of_nccl_tests():
    """https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md"""
    for operation, factor in (
        ("all_reduce", 2 * 3 / 4),
        ("all_gather", 3 / 4),
        ("reduce_scatter", 3 / 4),
        ("all_to_all", 3 / 4),
    ):
        row = Row(operation, "direct", Group(4, 4, 1, 1), 10**9, [0.5, 1.0, 2.0], 0, True)
        assert row.busbw == pytest.approx(factor)


def test_the_table_marks_the_fastest_and_the_way_of_the_library():
    group = Group(4, 4, 1, 1)
    rows = [
        Row("all_reduce", way, group, size, [seconds], 0, way == "direct")
        for size in (64, 2**20)
        for way, seconds in (("direct", 2e-6 * size), ("MPI", 3e-6 * size))
    ]
    found = table(rows, (1e-6, 1e-9, 1e-10))
    assert found[0] == HEADING and found[1][:2] == ["64 B", "direct"] and found[1][2].startswith("**128**")
    assert [row[4] for row in found[1:]] == ["*", "", "*", ""] and found[2][6] == "" != found[1][6]


@pytest.mark.thorough("benchmarks run once in small size")
def test_every_way_of_every_collective_in_small_size(tmp_path):
    on_ranks(4, [str(PROGRAM), "--quick", "--nodes", "2", "--json", str(tmp_path / "c.json")])
    record = json.loads((tmp_path / "c.json").read_text())
    tables = {table["title"]: table["rows"] for table in record["tables"]}
    assert record["machine"]["cpu"] and record["machine"]["mpi"] and len(tables) == 8
    for operation in OPERATIONS:
        rows = tables[f"{operation}, 4 ranks, 2 on each of 2 nodes"][1:]
        inside = 2 if operation != "all_to_all" else 1
        assert {row[1] for row in rows} == {*ways(operation, inside), "MPI", "MPI nonblocking"}
        assert {row[0] for row in rows} == {"64 B", "16 KiB"} and all(float(row[3]) > 0 for row in rows)
        assert {row[1] for row in rows if row[4]} == {"gather and add" if operation == "all_reduce" else "direct"}


@pytest.mark.thorough("what the benchmark of the collectives refuses")
def test_what_makes_no_sense_is_refused():
    for ranks, words, text in (
        (1, (), "a collective needs several ranks"),
        (2, ("--ranks", "3"), "--ranks 3: 2 ranks form groups of 2"),
        (2, ("--sizes", "1MiB,2XB"), "'2XB' is no size from 4 bytes to 2GiB"),
        (2, ("--operation", "shift"), "invalid choice: 'shift'"),
    ):
        with given(words=words), pytest.raises(ProgramError, match=text):
            on_ranks(ranks, [str(PROGRAM), "--quick", *words])
