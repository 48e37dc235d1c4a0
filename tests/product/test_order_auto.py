"""order="auto": new shards lie as `pmm3d tune blas` found fastest here, alike on all ranks; else by rows, which is
noted. matmul(order=): the order of a new C."""

import logging

import numpy as np
import pytest
from loops import looped
from samples import integers

from pmm3d import DisagreementError, DistMatrix, Grid, Layout, LayoutError, MatmulPlan, matmul
from pmm3d.arrays import library_named
from pmm3d.arrays.blas_library import chosen
from pmm3d.comm.blas_choice import recalled_times, remember_times
from pmm3d.comm.words import blas_in_words
from pmm3d.model.machine import blas_of
from pmm3d.model.orders import ORDERS, Timed, best_orders, nearest
from pmm3d.product.multiply import plan_for
from pmm3d.tools.bench.measure import Limit, run
from pmm3d.tools.bench.result import Case

pytestmark = pytest.mark.parallel([1, 2, 4])
M, N, K = 24, 12, 16
LAYOUTS = {"A": ((M, K), Layout.A), "B": ((K, N), Layout.B), "C": ((M, N), Layout.C)}
GATHERED = {"A": "x", "B": "z", "C": "y"}


def blas_here():
    chosen()
    blas = blas_of(library_named("numpy"))
    return blas_in_words(f"{blas.name} {blas.version}".strip(), blas.kernel, blas.threads), blas.threads


def timed(best, shape=(1, 1, 1), dtype="float64", **others):
    x, y, z = shape
    seconds = dict.fromkeys(ORDERS, 2.0) | {best: 1.0} | others
    return Timed(-(-M // z), -(-N // x), -(-K // y), dtype, seconds)


@pytest.fixture
def tuned(comm, tmp_path, monkeypatch):
    """tuned(times): what was timed here. Only the first rank finds a file."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path) if comm.rank == 0 else "/nonexistent")

    def keep(*times):
        words, threads = blas_here()
        if comm.rank == 0:
            remember_times({words: times, "another BLAS": [timed("ttt")]}, threads)
        comm.Barrier()

    return keep


def shapes_for(size):
    return {1: [(1, 1, 1)], 2: [(2, 1, 1), (1, 2, 1), (1, 1, 2)], 4: [(2, 2, 1), (1, 1, 4)]}[size]


@pytest.mark.numpy_only("what is timed is the BLAS of the host, by name; torch may have its own")
def test_each_maker_takes_the_order_that_was_fastest_where_no_rank_gathers(comm, tuned):
    for shape in shapes_for(comm.size):
        tuned(timed("ttt", shape))
        with Grid(comm, shape) as grid:
            for role, (size, layout) in LAYOUTS.items():
                whole = integers(size)
                made = [DistMatrix.random(grid, size, layout=layout, order="auto"),
                        DistMatrix.empty(grid, size, layout=layout, order="auto"),
                        DistMatrix.from_global(grid, whole, layout=layout, order="auto"),
                        DistMatrix.from_global(grid, whole if grid.rank == 0 else None, layout=layout, root=0,
                                               order="auto"),
                        DistMatrix.from_function(grid, size, lambda i, j: i - j, layout=layout, order="auto")]
                open_here = getattr(grid.shape, GATHERED[role]) == 1
                free = all(getattr(grid.shape, axis) == 1 for axis in GATHERED.values())
                assert {matrix.order for matrix in made} == {"F" if free and open_here else "C"}
                assert np.array_equal(made[2].gather(), whole) and np.array_equal(made[3].gather(), whole)


@pytest.mark.numpy_only("what is timed is the BLAS of the host, by name; torch may have its own")
@pytest.mark.parallel([2])
@pytest.mark.parametrize(("shape", "best", "orders", "in_place"), [
    ((1, 1, 2), "tnt", "FCF", "B"), ((2, 1, 1), "ntt", "CFF", "A"), ((1, 2, 1), "ttn", "FFC", ""),
    ((1, 2, 1), "tnn", "FCC", "C")])
def test_the_benchmark_shares_what_lies_by_rows_and_says_what_was_read_in_place(comm, tuned, shape, best, orders,
                                                                                in_place):
    tuned(timed(best, shape))
    limit = Limit((M, N, K), 1.0, 1.0, M, 1.0)  # not measured: that takes seconds
    result = run(Case(M, N, K, repeat=1, order="auto", shared=True), comm, shape, limit=limit)
    assert result.check.verified and result.partition.orders == orders and result.partition.in_place == in_place


@pytest.mark.numpy_only("what is timed is the BLAS of the host, by name; torch may have its own")
@pytest.mark.parallel([2])
def test_of_orders_the_open_ones_are_compared(comm, tuned):
    """On z = 2 B is gathered by rows: of the others the fastest, not the part of an order that cannot be had."""
    tuned(timed("ttt", (1, 1, 2), tnn=1.5, nnt=1.2))
    with Grid(comm, (1, 1, 2)) as grid:
        made = {role: DistMatrix.random(grid, size, layout=layout, order="auto")
                for role, (size, layout) in LAYOUTS.items()}
        assert {role: matrix.order for role, matrix in made.items()} == {"A": "C", "B": "C", "C": "F"}
        assert matmul(made["A"], made["B"]).order == "C"
        c = matmul(made["A"], made["B"], order="auto")
        assert c.order == "F" and np.allclose(c.gather(), made["A"].gather() @ made["B"].gather())
        with MatmulPlan(made["A"], made["B"], order="auto") as product:
            assert product().order == "F" and np.array_equal(product().gather(), c.gather())
        turned = DistMatrix.random(grid, (M, K), order="F")
        assert matmul(turned, made["B"], order="auto").order == "C"  # tnn before tnt


@pytest.mark.parallel([2], thorough=[1, 4])
@pytest.mark.numpy_only("what is timed is the BLAS of the host, by name; torch may have its own")
def test_what_was_not_timed_lies_by_rows_and_is_noted_once(comm, tuned, caplog):
    tuned(timed("ttt")._replace(k=1000), timed("ttt", dtype="float32"))
    shape = shapes_for(comm.size)[0]
    with caplog.at_level(logging.INFO, "pmm3d.comm"), Grid(comm, shape) as grid:
        a, b = (DistMatrix.random(grid, size, layout=layout, order="auto")
                for size, layout in (LAYOUTS["A"], LAYOUTS["B"]))
        DistMatrix.random(grid, (M, K), seed=3, order="auto")
        assert (a.order, b.order, matmul(a, b, order="auto").order) == ("C", "C", "C")
        assert DistMatrix.random(grid, (M, K), layout=Layout(), order="auto").order == "C"
    said = [record.getMessage() for record in caplog.records if 'order="auto"' in record.getMessage()]
    asked = sum(size == 1 for size in shape)  # A is gathered along x, B along z, C summed along y
    assert len(said) == len(set(said)) == (asked if comm.rank == 0 else 0)
    assert all("no GEMM near float64" in line and "pmm3d tune blas" in line for line in said)


@pytest.mark.parallel([2, 4], thorough=[1])
@looped("size", [(24, 12, 16), (7, 9, 5), (1, 6, 3)])
def test_a_new_c_by_columns(comm, size):
    m, n, k = size
    for shape in shapes_for(comm.size):
        with Grid(comm, shape) as grid:
            a = DistMatrix.from_global(grid, integers((m, k), seed=1))
            b = DistMatrix.from_global(grid, integers((k, n), seed=2), layout=Layout.B)
            c = matmul(a, b, order="F")
            assert c.order == "F" and np.array_equal(c.gather(), a.gather() @ b.gather())
            assert c.layout.on(grid.shape) == Layout(rows=("z",), cols=("x", "y")).on(grid.shape)
            assert not plan_for(b.T, a.T, None, None, None).moves
            again = matmul(a, b, out=c, beta=1)
            assert again is c and np.array_equal(c.gather(), 2 * (a.gather() @ b.gather()))
            with MatmulPlan(a, b, order="F") as product:
                assert product().order == "F" and np.array_equal(product().gather(), a.gather() @ b.gather())


@pytest.mark.parallel([2], thorough=[1])
def test_what_makes_no_sense_is_refused(comm, fails):
    with Grid(comm, (comm.size, 1, 1)) as grid:
        a, b = DistMatrix.random(grid, (M, K)), DistMatrix.random(grid, (K, N), layout=Layout.B)
        out = matmul(a, b)
        fails(LayoutError, "out has an order already, and order='F' is of a new C: leave one of them out",
              lambda: matmul(a, b, out=out, order="F"))
        fails(LayoutError, "the order of a shard is", lambda: matmul(a, b, order="f"))
        fails(LayoutError, "the order of a shard is", lambda: MatmulPlan(a, b, order=0))
        fails(LayoutError, 'order="auto" chooses for shards that are made',
              lambda: DistMatrix.from_local(grid, a.local, (M, K), order="auto"))


@pytest.mark.numpy_only("memory that ranks share is numpy's")
@pytest.mark.parallel([2])
def test_shared_memory_lies_by_rows(comm, tuned):
    tuned(timed("ttt", (2, 1, 1)), timed("ttt"))
    with Grid(comm, (2, 1, 1)) as grid:
        whole = integers((M, K))
        for made in (DistMatrix.random(grid, (M, K), order="auto", shared=True),
                     DistMatrix.from_global(grid, whole, root=0, order="auto", shared=True)):
            assert made.order == "C" and made.shared


@pytest.mark.parallel([2])
def test_all_ranks_leave_it_open_or_none(comm, fails):
    with Grid(comm, (2, 1, 1)) as grid:
        fails(DisagreementError, "different", lambda: DistMatrix.random(grid, (4, 4), order=("auto", "C")[comm.rank]))
        a, b = DistMatrix.random(grid, (M, K)), DistMatrix.random(grid, (K, N), layout=Layout.B)
        fails(DisagreementError, "different", lambda: matmul(a, b, order=("auto", None)[comm.rank]))


@pytest.mark.parallel([1])
def test_a_dry_grid_goes_by_it_too(comm, tuned):
    tuned(timed("ttn"))
    with Grid.dry((1, 1, 1)) as grid:
        a, b = (DistMatrix.random(grid, size, layout=layout, order="auto")
                for size, layout in (LAYOUTS["A"], LAYOUTS["B"]))
        assert matmul(a, b, order="auto").shape == (M, N)


@pytest.mark.parallel([1])
def test_times_are_kept_beside_those_of_other_sizes(comm, tuned):
    words, threads = blas_here()
    tuned(timed("ttt"))
    tuned(timed("nnt"), timed("ttn", (1, 1, 2)))
    found = {gemm.m: best_orders(gemm) for gemm in recalled_times(words, threads)}
    assert found == {M: "nnt", M // 2: "ttn"} and len(recalled_times("another BLAS", threads)) == 1


@pytest.mark.parallel([1])
def test_the_nearest_of_the_type_within_a_factor_of_two(comm):
    gemms = [timed("ttt"), timed("nnt", (1, 1, 2)), timed("tnn", dtype="float32")]
    assert nearest(gemms, "float64", m=M, k=K) is gemms[0] and nearest(gemms, "float64", m=M // 2 + 1, k=K) is gemms[1]
    assert nearest(gemms, "float32", m=M, n=2 * N, k=K) is gemms[2]
    assert nearest(gemms, "float32", m=M, n=2 * N + 1, k=K) is None and nearest([], "float64", m=1) is None
    assert best_orders(timed("ttt", nnt=1.005)) == "nnt"
