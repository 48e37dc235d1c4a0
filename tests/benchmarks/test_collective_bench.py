"""benchmarks/collectives.py: the table, bus bandwidth, the program."""

import json
from pathlib import Path

import pytest
from collectives import HEADING, OF_MPI, Row, table
from loops import given
from timing import ProgramError, on_ranks

from pmm3d.model.machines import Group

PROGRAM = Path(__file__).parents[2] / "benchmarks/collectives.py"


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
    found = table(rows)
    assert found[0] == HEADING and found[1][:2] == ["64 B", "direct"] and found[1][2].startswith("**128**")
    assert [row[4] for row in found[1:]] == ["*", "", "*", ""]


@pytest.mark.thorough("benchmarks run once in small size")
def test_every_way_of_every_collective_in_small_size(tmp_path):
    on_ranks(4, [str(PROGRAM), "--quick", "--nodes", "2", "--json", str(tmp_path / "c.json")])
    record = json.loads((tmp_path / "c.json").read_text())
    tables = {table["title"]: table["rows"] for table in record["tables"]}
    assert record["machine"]["cpu"] and record["machine"]["mpi"] and len(tables) == 8
    for operation in OF_MPI:
        rows = tables[f"{operation}, 4 ranks, 2 on each of 2 nodes"][1:]
        ways = {"direct", "MPI", "MPI nonblocking"} | ({"by nodes"} if operation != "all_to_all" else set())
        assert {row[1] for row in rows} == ways
        assert {row[0] for row in rows} == {"64 B", "16 KiB"} and all(float(row[3]) > 0 for row in rows)
        assert {row[1] for row in rows if row[4]} == {"direct"}


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
