"""Grid("auto"): the machine that it uses, its messages, and that its prices are the prices of a replayed dry run."""

import logging
import re
import sys
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from loops import given

from pmm3d import BlacsContext, DistMatrix, Grid, GridError, GridShape, Layout, matmul, pgemm
from pmm3d.comm import machine_cache
from pmm3d.comm.nodes import Process, Processes, row
from pmm3d.model import choose_grid, ranking
from pmm3d.model.choose_grid import chosen_shape, fills_nodes
from pmm3d.model.machines import as_toml, groups_of, load
from pmm3d.model.product_costs import ProductCosts
from pmm3d.model.ranking import best_grid, memory
from pmm3d.model.simulation import simulate
from pmm3d.model.simulation.replay import tasks

NOMINAL = load("nominal")


def on_hosts(hosts):
    """Largest number of ranks on a node, and number of consecutive ranks that share a node."""
    rows = np.concatenate([row(Process(host, 1), False) for host in hosts])
    processes = Processes(rows, list(dict.fromkeys(hosts)))
    return processes.per_node(), processes.run()


def replayed(shape, size, dtype, machine, data=1, overlap="none"):
    """(seconds, bytes received along x, y and z) of the first rank, from the actions of a dry run."""
    hosts = -(-GridShape(*shape, data).size // machine.ranks_per_node)
    with Grid.dry(shape, data, hosts=hosts) as grid:
        m, n, k = size
        a, b = (
            DistMatrix.random(grid, shape, dtype=dtype, layout=layout)
            for shape, layout in (((m, k), Layout.A), ((k, n), Layout.B))
        )
        before = len(grid.dry_run.actions)
        matmul(a, b, overlap=overlap)
        done = grid.dry_run.actions[before:]
    groups = groups_of(grid.shape, machine.ranks_per_node)
    return simulate(tasks(done, machine, groups)).seconds, sum(action.received for action in done)


PRODUCTS = [
    ((1024, 1024, 1024), (2, 2, 2), "float64"),
    ((1024, 2048, 512), (8, 2, 2), "float64"),
    ((4096, 513, 1000), (4, 1, 2), "float32"),
    ((1000, 4096, 2048), (4, 4, 4), "complex128"),
    ((2048, 2048, 4096), (1, 16, 2), "float64"),
    ((8192, 512, 512), (1, 1, 16), "float32"),
    ((512, 8192, 512), (16, 1, 1), "float64"),
    ((4096, 4096, 4096), (8, 4, 4), "float64"),
]


def assert_price_is_replayed(costs, size, shape, dtype, overlap):
    """Return the bytes of the price and of the replayed dry run."""
    candidate = costs.priced(shape)
    seconds, received = replayed(shape, size, dtype, costs.machine, overlap=overlap)
    assert candidate.seconds - candidate.terms.get("all", 0) == pytest.approx(seconds)
    return candidate.bytes, received


def test_a_price_is_that_of_the_replayed_dry_run():
    for hidden, (size, shape, dtype) in product([0.0, 0.7, 1.0], PRODUCTS):
        ranks = GridShape(*shape).size
        with given(hidden=hidden, size=size, shape=shape, dtype=dtype):
            for name in ("nominal", "perlmutter"):
                machine = replace(load(name), hidden={"inside": hidden, "across": hidden})
                costs = ProductCosts(size, ranks, dtype, machine, "none")
                nbytes, received = assert_price_is_replayed(costs, size, shape, dtype, "none")
                assert nbytes >= received
                assert nbytes == received or any(extent % ranks for extent in size)
            costs = ProductCosts(size, ranks, dtype, replace(NOMINAL, hidden={"across": hidden}))
            if costs.plan(shape).decomposed:
                assert_price_is_replayed(costs, size, shape, dtype, "decomposed")


BESIDE = [
    ((2, 3, 1), 4, 4),
    ((2, 1, 1), 4, 4),
    ((1, 1, 3), 4, 4),
    ((2, 2, 2), 2, 8),
    ((4, 2, 2), 3, 8),
    ((1, 6, 1), 4, 8),
]


def test_axes_lie_where_those_beside_them_put_them():
    """Copies of the grid share nodes or their links, or cover parts of several nodes."""
    for shape, data, per_node in BESIDE:
        with given(shape=shape, data=data, per_node=per_node):
            machine = load("perlmutter").with_ranks_per_node(per_node)
            costs = ProductCosts((4096, 4096, 4096), GridShape(*shape).size, "float64", machine, "none", beside=data)
            candidate, groups = costs.priced(shape), groups_of(GridShape(*shape, data), per_node)
            assert all(costs.groups(shape)[axis] == groups[axis] for axis in "xyz")
            seconds, _ = replayed(shape, (4096, 4096, 4096), "float64", machine, data)
            assert candidate.seconds - candidate.terms["all"] == pytest.approx(seconds)


RANKS_ON_HOSTS = [
    ("aaaa", 4, 4),
    ("aabb", 2, 2),
    ("aaaabbbbcc", 4, 4),
    ("aabbbbcc", 4, 2),
    ("aaabbbbc", 4, 1),
    ("abcabc", 2, 1),
    ("aabbaabb", 4, 2),
]


def test_where_ranks_run_says_what_stays_inside():
    """Each aligned group of `run` ranks is on one node."""
    for hosts, per_node, run in RANKS_ON_HOSTS:
        with given(hosts=hosts, per_node=per_node, run=run):
            assert on_hosts(hosts) == (per_node, run)
            for first in range(0, len(hosts), run):
                assert len(set(hosts[first : first + run])) == 1


def auto(ranks, size=None, memory=None, data=1, **axes):
    return chosen_shape("auto", data, axes, ranks, size, "float64", memory)


def test_the_same_ranks_in_another_order_are_given_another_grid():
    """If ranks fill nodes of 4 in order, an axis of 4 is inside a node; if they are assigned in turns, it is not."""
    asked = auto(16, (16384, 16384, 16384))
    in_order, in_turn = (
        asked.chosen(NOMINAL, 16, *on_hosts(hosts), False) for hosts in ("aaaabbbbccccdddd", "abcd" * 4)
    )
    assert groups_of(in_order, 4)["x"].nodes == 1 and in_order.size == in_turn.size == 16


def test_a_measured_machine_decides():
    """If its network is slow, the grid with the fewest bytes between nodes is chosen."""
    asked, hosts = auto(16, (4096, 4096, 4096)), on_hosts("aaaabbbbccccdddd")
    law = NOMINAL.laws["default"]
    slow = replace(NOMINAL, ranks_per_node=4, laws={"default": law._replace(byte_across=20 * law.byte_across)})
    fast = replace(NOMINAL, ranks_per_node=4, laws={"default": law._replace(byte_across=0.0, message_across=0.0)})
    assert asked.chosen(slow, 16, *hosts, False)[:3] in ((4, 2, 2), (2, 4, 2))
    assert asked.chosen(slow, 16, *hosts, False) != asked.chosen(fast, 16, *hosts, False)


def test_the_ranks_beside_a_grid_are_on_the_machine_too():
    """With 12 ranks on nodes of 4 and data=4, a product has 3 consecutive ranks; the second three are on two nodes."""
    slow = replace(NOMINAL, laws={"default": NOMINAL.laws["default"]._replace(byte_across=1e-7)})
    chosen = auto(12, (4096, 4096, 4096), data=4).chosen(slow, 16, *on_hosts("aaaabbbbcccc"), False)
    groups = groups_of(chosen, 4)
    assert chosen.data == 4 and all(groups[axis].nodes == 1 for axis in "xyz")


def test_of_grids_that_are_as_good_one_that_fills_nodes_is_taken():
    """On 25 nodes of 8 ranks, although 5x5x8 is 1.3% faster."""
    law = NOMINAL.laws["default"]
    machine = replace(NOMINAL, overhead=0.0, laws={"default": law._replace(byte_across=0.1 * law.byte_across)})
    chosen = auto(200, (4096,) * 3).chosen(machine, 16, *on_hosts([f"{rank // 8}" for rank in range(200)]), False)
    fastest = best_grid((4096,) * 3, 200, machine=machine)
    assert chosen.size == 200 and fills_nodes(chosen, 8) and not fills_nodes(fastest, 8), (chosen, fastest)


def test_one_rank_has_no_choice():
    assert auto(1).no_choice and auto(4, data=4).no_choice and not auto(2).no_choice
    assert auto(4, data=4).alone() == GridShape(1, 1, 1, 4)
    with pytest.raises(GridError, match="no grid of 1 rank keeps"):
        auto(1, memory=1000).chosen(None, 16, *on_hosts("a"), False)


def test_both_times_of_the_note_count_the_cores(caplog):
    """Otherwise the price of the runner-up would assume a core for each rank, and would be lower."""
    with caplog.at_level(logging.INFO, "pmm3d.comm"):
        auto(8, (1024, 1024, 1024)).chosen(None, 2, *on_hosts("a" * 8), True)
        auto(8, (4096, 4096, 4096)).chosen(None, 2, *on_hosts("a" * 8), True)
    notes = [record.getMessage() for record in caplog.records]
    few, all_ranks = (
        re.fullmatch(
            r"auto: (\S+) on 8 ranks, (\S+) ms by the model of .*; next (\S+), (\S+) ms; "
            "both on 2 cores a node",
            note,
        )
        for note in notes
    )
    assert few[1] == "1x1x2" and GridShape(*map(int, all_ranks[1].split("x"))).size == 8
    assert all(float(found[2]) < 1.1 * float(found[4]) for found in (few, all_ranks)), notes


@pytest.mark.parallel([2, 4])
def test_the_choice_and_the_runner_up_are_noted_once(comm, caplog):
    with caplog.at_level(logging.INFO, "pmm3d.comm"), Grid(comm, product=(512, 512, 512)) as grid:
        notes = [record.getMessage() for record in caplog.records if record.getMessage().startswith("auto: ")]
        assert len(notes) == (comm.rank == 0)
        for note in notes:
            assert note.startswith(f"auto: {grid.shape} on {comm.size} ranks")
            assert "ms by the model of the nominal machine (pmm3d tune " in note
    assert len(set(comm.allgather(tuple(grid.shape)))) == 1


@pytest.mark.parallel([4])
def test_idle_ranks_are_told_of_once(comm, caplog):
    """Once for each Grid of the program, and not for the grids of a BlacsContext."""
    for asked, warned in (
        (lambda: Grid(comm, "auto", product=(8, 8, 8)), True),
        (lambda: Grid(comm, (1, 1, 4)), False),
        (lambda: BlacsContext(comm, (1, 1)), False),
    ):
        caplog.clear()
        with asked() as made:
            if isinstance(made, BlacsContext):
                desc = made.descriptor(8, 8, 8, 8)
                part = desc.empty(), 1, 1, desc
                pgemm("N", "N", 8, 8, 8, 1.0, *part, *part, 0.0, desc.empty(), 1, 1, desc)
        told = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
        assert len(told) == (warned and comm.rank == 0)
        assert all("auto chose 1x1x1, which has 1 of the 4 ranks. The other 3" in line for line in told)


def test_a_name_that_is_almost_one_is_told():
    for name, near in (("dpp", "ddp"), ("FSPD", "fsdp"), ("megatorn", "megatron"), ("atuo", "auto")):
        with pytest.raises(GridError, match=rf"or has a name; got '{name}' \(did you mean {near}\?\)$"):
            chosen_shape(name, 1, {}, 4, None, "float64", None)
    with pytest.raises(GridError, match=r"got '2x2' \(known there: auto, ddp, fsdp, hsdp, megatron\)$"):
        chosen_shape("2x2", 1, {}, 4, None, "float64", None)


@pytest.mark.parallel([3])
def test_auto_goes_by_what_rank_0_knows_of_this_machine(comm, monkeypatch, tmp_path):
    """In its cache gathers are expensive; in the caches of the other ranks, sums."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / str(comm.rank)))
    monkeypatch.delenv("PMM3D_MACHINE", raising=False)
    law, key, size = NOMINAL.laws["default"], machine_cache.key_of(3, 1), (600, 600, 600)
    dear = law._replace(byte_inside=1e4 * law.byte_inside)
    known, other = (
        replace(NOMINAL, key=key, ranks_per_node=3, laws={"default": law, operation: dear})
        for operation in ("all_gather", "reduce_scatter")
    )
    wanted, *others = (auto(3, size).chosen(machine, 16, *on_hosts("aaa"), False) for machine in (known, other, None))
    assert wanted not in others
    machine_cache.remember_machine(key, as_toml(other if comm.rank else known))
    with Grid(comm, product=size) as grid:
        assert grid.shape == wanted


def test_how_many_ranks_a_product_is_given():
    """A product of 64 x 64 x 64 takes microseconds, less than a message. Ranks that take turns on a core are left idle
    by a product of milliseconds. With a data axis, all ranks are used, because there are several products."""
    hosts = on_hosts("a" * 8)
    for extent, cores, ranks in ((64, 8, 1), (512, 8, 8), (2048, 8, 8), (512, 2, 2), (4096, 2, 8)):
        with given(extent=extent, cores=cores):
            assert auto(8, (extent,) * 3).chosen(None, cores, *hosts, False).size == ranks
    assert auto(8, (64, 64, 64), data=2).chosen(None, 8, *hosts, False).size > 4
    chosen = auto(16, data=2, seq=2).chosen(None, 16, *on_hosts("a" * 16), False)
    assert (chosen.data, chosen.seq) == (2, 2) and chosen.size <= 16 and chosen[0] * chosen[1] * chosen[2] > 2


def test_few_ranks_keep_the_memory():
    """One rank alone would exceed the memory limit."""
    hosts, limit = on_hosts("a" * 8), 64 * 64 * 8 * 2
    chosen = auto(8, (64, 64, 64), memory=limit).chosen(None, 8, *hosts, False)
    assert chosen.size > 1 and memory((64, 64, 64), chosen, "float64") <= limit


def test_a_choice_takes_few_calls_of_python():
    """Of a new size 2,900 to 3,400 calls; it took 8,900 to 11,600. The choice for the same size is not made again."""

    def calls(*size):
        made = []
        sys.setprofile(lambda frame, event, given: made.append(event == "call"))
        auto(4, size).chosen(None, 4, *hosts, False)
        sys.setprofile(None)
        return sum(made)

    hosts = on_hosts("a" * 4)
    calls(1000, 1000, 1000)
    assert max(calls(1001, 1001, 1001), calls(70, 71, 72), calls(3000, 20, 500)) < 4000
    assert calls(1000, 1000, 1000) < 100


@pytest.mark.parametrize("machine", [NOMINAL, replace(NOMINAL, key={"cpu": "this one"})])
def test_few_ranks_that_are_not_priced_are_not_the_fastest(machine, monkeypatch):
    """Their shortest GEMM alone takes longer than the best grid."""
    drawn = np.random.default_rng(5)
    cases = [(int(drawn.choice([4, 6, 8, 12])), *map(int, 2 ** drawn.uniform(2, 12, 3)), int(2 ** drawn.integers(4)))
             for _ in range(40)]  # fmt: skip

    def choices():
        choose_grid._chosen.cache_clear()
        return [
            chosen_shape("auto", 1, {}, ranks, size, dtype, None).chosen(machine, cores, ranks, ranks, False)
            for ranks, *size, cores in cases
            for dtype in ("float64", "float16")
        ]

    numbers, timed = list[int](), ranking.timed_grids
    monkeypatch.setattr(ranking, "timed_grids", lambda *given, **how: numbers.append(given[1]) or timed(*given, **how))
    found, few = choices(), len(numbers)
    monkeypatch.setattr(ranking, "_gemm_on_cores", lambda *_: 0.0)
    assert choices() == found and few < len(numbers) - few
