"""`pmm3d bench collectives`: the ways beside the textbook, what is measured and shown, the command."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.append(str(Path(__file__).parent.parent / "comm"))
from fake_link import run

from pmm3d.model.textbook import BY_NODES, OPERATIONS, cost, radices, ways
from pmm3d.tools.bench.collectives.measure import Found, Row
from pmm3d.tools.bench.collectives.tables import crossings, times
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


PROGRAM = """
    import sys
    from pmm3d.tools.cli import main
    sys.argv[0] = "pmm3d"
    main()
"""
TINY = "bench", "collectives", "--sizes", "64,16KiB", "--repeat", "1"


def test_the_command_from_end_to_end(job, tmp_path):
    done = job(4, PROGRAM, *TINY, "--nodes", "2", "--json", tmp_path / "c.json", "--plot", tmp_path / "c.png",
               timeout=100)
    assert done.returncode == 0, done.stderr
    said = done.stdout
    assert "4 ranks, 2 on each of 2 nodes" in said and "Fastest from which size on" in said
    assert "By alpha, beta and gamma" in said and "looked at as if on 2 nodes" in said
    found = json.loads((tmp_path / "c.json").read_text())
    assert found["cpu"] and found["mpi"] and found["ranks"] == 4 and found["as_if"] == 2
    for operation in OPERATIONS:
        rows = [row for row in found["rows"] if row["operation"] == operation and row["ranks"] == 4]
        inside = 2 if operation != "all_to_all" else 1
        assert {row["way"] for row in rows} == {*ways(operation, inside), "MPI", "MPI nonblocking"}
        assert {row["nbytes"] for row in rows} == {64, 2**14}
        assert all(row["seconds"] == [row["median"]] and row["median"] > 0 for row in rows)
        assert {row["way"] for row in rows if row["chosen"]} == {
            "gather and add" if operation == "all_reduce" else "direct"}
    assert (tmp_path / "c.png").read_bytes()[:4] == b"\x89PNG"


def test_some_groups_of_one_collective(job):
    done = job(4, PROGRAM, *TINY, "--operation", "all_reduce", "--ranks", "2", timeout=100)
    assert done.returncode == 0, done.stderr
    assert "all_reduce, 2 ranks on a node" in done.stdout and "4 ranks on a node" not in done.stdout
    assert "all_gather" not in done.stdout and "by nodes" not in done.stdout


@pytest.mark.parametrize("nranks, arguments, text", [
    (1, (), "a collective takes several ranks"),
    (2, ("--ranks", "3"), "--ranks 3: 2 ranks form groups of 2"),
    (2, ("--plot", "x.xyz"), "cannot draw x.xyz"),
    (2, ("--json", "none/x"), "cannot write none/x: there is no folder"),
    (2, ("--sizes", "1MiB,2XB"), "'2XB' is no size from 4 bytes to 2GiB"),
    (2, ("--operation", "shift"), "'shift' is none of all_gather, reduce_scatter"),
])
def test_what_makes_no_sense_is_refused(job, nranks, arguments, text):
    done = job(nranks, PROGRAM, *TINY, *arguments, timeout=60)
    assert done.returncode == 2 and text in " ".join(done.stderr.replace("\u2502", " ").split())
    assert done.stderr.count(text.split(":")[0]) == 1


def test_the_way_that_is_left_out_where_memory_is_short():
    """A table has a place for it, and no crossover goes by it."""
    group = (4, 4, 1)
    rows = [Row("all_reduce", "gather and add", *group, 64, (1e-6,), 0, True),
            *[Row("all_reduce", way, *group, size, (seconds,), 0, way == "direct" and size > 64)
              for size in (64, 2**20) for way, seconds in (("direct", 2e-6 * size), ("MPI", 3e-6 * size))]]
    found = Found(rows, "a CPU", "an MPI", 4, 1, 0, 1e-6, 1e-9, 1e-10)
    assert times(found, "all_reduce", group).rows[0][0][2] == "-"
    assert [cells[1] for cells, _, _ in crossings(found).rows] == ["[bold]4 ranks on a node[/]", "gather and add", "direct"]
