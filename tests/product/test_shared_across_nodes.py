"""Operands in shared memory along axes that cover several nodes evenly: each node stores a block once, a link carries
each byte once, and bits are those of messages."""

import pytest
from loops import looped
from samples import bits_of, operands, shared

from pmm3d import DistMatrix, Grid, GridError, matmul
from pmm3d.comm import communicator
from pmm3d.layout import itemsize
from pmm3d.product.multiply import plan_for

pytestmark = pytest.mark.parallel([4, 8])
SIZE = (23, 17, 40)


def from_other_nodes(matrix):
    """Bytes of the matrix that nodes must receive: each node needs all elements that its ranks multiply."""
    node_map, size = matrix.grid._node_map_of(matrix.window.axis), getattr(matrix.grid.shape, matrix.window.axis)
    nodes = size // node_map.per_node if node_map.per_node > 1 else 1
    return matrix.shape[0] * matrix.shape[1] * itemsize(matrix.dtype) * (nodes - 1)


@pytest.mark.deadline(240)
@looped(
    "case, dtype",
    [
        ("as they are", "float16"),
        *((case, "complex128") for case in ("as they are", "transposed", "conjugated", "panels", "order")),
    ],
)
def test_a_node_has_a_block_once_and_links_carry_each_byte_once(comm, two_nodes, monkeypatch, dtype, case):
    monkeypatch.setenv("PMM3D_OVERLAP", "none")
    options = {"panels": {"panels": 3}, "order": {"order": "F"}}.get(case, {})
    for shape in {4: [(4, 1, 1), (1, 1, 4)], 8: [(8, 1, 1), (1, 1, 8), (2, 1, 4), (1, 2, 4)]}[comm.size]:
        with Grid(comm, shape) as grid:
            a, b = operands(grid, SIZE, dtype)
            one, other = shared(a), shared(b)
            if case in ("transposed", "conjugated"):
                a, b, one, other = ((each.T if case == "transposed" else each.H) for each in (b, a, other, one))
            for turn in range(3):
                if turn:
                    for matrix in (a, b, one, other):
                        matrix.local[...] *= 2
                wanted = matmul(a, b, **options)
                grid.ledger.reset()
                found = matmul(one, other, **options)
                assert bits_of(found.local) == bits_of(wanted.local)
                plan = plan_for(one, other, found, options.get("panels"), None).on_rank(grid.coords)
                for axis in "xyz":
                    total = grid.ledger.total(axis=axis)
                    assert (total.received, total.sent) == (plan.bytes_received[axis], plan.bytes_sent[axis])
                turned = (other, one) if case == "order" else (one, other)
                parts = [(part, matrix) for part, matrix in zip((plan.a, plan.b), turned) if part.in_place]
                assert parts or case != "as they are"
                for part, matrix in parts:
                    moved = grid.ledger.total(phase="gather A" if part is plan.a else "gather B")
                    assert moved.received == moved.across
                    assert grid.comm.allreduce(moved.received) == from_other_nodes(matrix)


@pytest.mark.parallel([4])
def test_each_node_has_its_own_copy_of_the_block(comm, two_nodes):
    with Grid(comm, (4, 1, 1)) as grid:
        a, b = operands(grid, SIZE)
        one = shared(a)
        matmul(one, b)
        grid.comm.Barrier()
        if grid.x.index % 2 == 0:
            one.window.block[...] = grid.x.index
        grid.comm.Barrier()
        assert (one.window.block == grid.x.index // 2 * 2).all()


@pytest.mark.parallel([4])
def test_nodes_with_more_ranks_than_others_are_refused(comm, fails, monkeypatch):
    monkeypatch.setattr(communicator.MPI, "Get_processor_name", lambda: "one" if comm.rank < 3 else "two")
    with Grid(comm, (4, 1, 1)) as grid:
        fails(GridError, "not as many on each", lambda: DistMatrix.empty(grid, (8, 8), shared=True))


@pytest.mark.parallel([4], thorough=[8])
@looped("overlap", [None, "auto"])
def test_what_is_left_open_does_not_make_panels_of_what_is_read_in_place(comm, two_nodes, monkeypatch, overlap):
    """Panels along k would gather B again by messages. They are used if they are requested."""
    monkeypatch.delenv("PMM3D_OVERLAP", raising=False)
    with Grid(comm, (1, 1, comm.size)) as grid:
        a, b = operands(grid, SIZE)
        one = shared(b)
        for limit in (None, 2**20):
            found = matmul(a, one, overlap=overlap, max_workspace=limit)
            plan = plan_for(a, one, found, None, limit, overlap)
            assert plan.on_rank(grid.coords).b.in_place and (plan.panels, plan.overlap) == (1, "none")
            assert bits_of(found.local) == bits_of(matmul(a, b, overlap="none").local)
        assert not plan_for(a, one, found, 4, None).on_rank(grid.coords).b.in_place
