"""Every function that takes an array of the caller (a door) x every kind of array: the values are right, or every rank
raises. Each cell runs on small arrays, which collectives send with the comparison of the calls, and on large ones."""

import warnings

import numpy as np
import pytest
from loops import given
from samples import to_numpy

from pmm3d import (
    BlacsContext,
    BlockCyclic,
    Blocks,
    DistMatrix,
    DTypeError,
    Grid,
    Layout,
    LayoutError,
    MatmulPlan,
    Redistribution,
    matmul,
    pgemm,
    pgemr2d,
)
from pmm3d.arrays import library_of
from pmm3d.product.relayout import relayout

pytestmark = pytest.mark.parallel([2])
SIZES = (4, 6), (300, 64)


def of_numpy(make):
    return lambda values: make(values.copy())


def field(values):
    """A field of packed records: strides are no multiple of the element size."""
    records = np.zeros(values.shape, [("tag", "i4"), ("x", values.dtype)])
    records["x"] = values
    return records["x"]


def unaligned(values):
    room = np.zeros(values.nbytes + 1, np.uint8)[1:].view(values.dtype).reshape(values.shape)
    room[...] = values
    return room


def spaced(values):
    room = np.zeros((*values.shape[:-1], 2 * values.shape[-1]), values.dtype)
    room[..., ::2] = values
    return room[..., ::2]


def fixed(values):
    values.flags.writeable = False
    return values


def tensor(values, change=lambda made: made):
    import torch

    return change(torch.from_numpy(values.copy()))


def lazy_negative(values):
    import torch

    return torch.complex(torch.zeros(values.shape, dtype=torch.float64), torch.from_numpy(-values)).conj().imag


KINDS = {
    "plain": of_numpy(lambda x: x),
    "big-endian": of_numpy(lambda x: x.astype(x.dtype.newbyteorder(">"))),
    "packed records": of_numpy(field),
    "unaligned": of_numpy(unaligned),
    "gaps": of_numpy(spaced),
    "reversed": of_numpy(lambda x: x[::-1].copy()[::-1]),
    "columns": of_numpy(np.asfortranarray),
    "read-only": of_numpy(fixed),
    "torch": lambda x: tensor(x),
    "torch lazy conjugate": lambda x: tensor(x.conj(), lambda made: made.conj()),
    "torch lazy negative": lazy_negative,
    "torch columns": lambda x: tensor(x.T, lambda made: made.T),
    "torch gradient": lambda x: tensor(x, lambda made: made.requires_grad_()),
}
REFUSED = {
    "masked": lambda x: np.ma.masked_equal(x, x.flat[0]),
    "np.matrix": np.matrix,
    "objects": lambda x: x.astype(object),
    "torch sparse": lambda x: tensor(x, lambda made: made.to_sparse()),
    "torch meta": lambda x: tensor(x, lambda made: made.to("meta")),
    "list": np.ndarray.tolist,
}
COMPLEX = "torch lazy conjugate"
NOT_WRITTEN = {"big-endian", "packed records", "read-only", COMPLEX, "torch lazy negative", "torch gradient"}


class Case:
    """A door's grid, the whole matrix, this rank's half of its rows, and that half as an array of a kind."""

    def __init__(self, grid, shape, kind, make):
        self.grid, self.shape, self.kind, self.make = grid, shape, kind, make
        self.whole = np.arange(1.0, 1 + shape[0] * shape[1]).reshape(shape) * (1 + 2j if kind == COMPLEX else 1)
        self.rows = shape[0] // 2
        self.own = self.half(grid.rank)
        self.dtype = self.whole.dtype.name

    def half(self, rank):
        return self.whole[rank * self.rows : (rank + 1) * self.rows]

    @property
    def array(self):
        return self.make(self.own)

    def zeros(self, shape):
        return DistMatrix.zeros(self.grid, shape, dtype=self.dtype, layout=Layout("z"))

    def to(self, array):
        """The values in the library of the kind, as a plain array."""
        return tensor(array) if self.kind.startswith("torch") else array.copy()

    @property
    def blocks(self):
        return Blocks.rows_of([self.rows, self.rows], self.shape[1])

    @property
    def slabs(self):
        """Slabs of unequal rows, so that elements move."""
        return Blocks.rows_of([self.rows + 1, self.rows - 1], self.shape[1])

    @property
    def cyclic(self):
        return BlockCyclic(self.shape, (self.rows, self.shape[1]), (2, 1))


# Doors that read: each returns (found, wanted).


def set_local(case):
    matrix = case.zeros(case.shape)
    matrix.local = case.array
    return matrix.gather(), case.whole


def set_local_by_columns(case):
    matrix = DistMatrix.zeros(case.grid, case.shape, dtype=case.dtype, layout=Layout("z"), order="F")
    matrix.local = case.array
    return (matrix @ DistMatrix.identity(case.grid, case.shape[1], dtype=case.dtype)).gather(), case.whole


def from_local(case):
    return DistMatrix.from_local(case.grid, case.array, case.shape, layout=Layout("z")).gather(), case.whole


def from_local_by_columns(case):
    made = DistMatrix.from_local(case.grid, case.array, case.shape, layout=Layout("z"), order="F")
    return made.gather(), case.whole


def from_global(case):
    return DistMatrix.from_global(case.grid, case.make(case.whole)).gather(), case.whole


def from_root(case):
    array = case.make(case.whole) if case.grid.rank == 1 else None
    return DistMatrix.from_global(case.grid, array, root=1).gather(), case.whole


def from_blocks(case):
    return DistMatrix.from_blocks(case.grid, case.array, case.blocks, layout=Layout(cols="z")).gather(), case.whole


def from_block_cyclic(case):
    return DistMatrix.from_block_cyclic(case.grid, case.array, case.cyclic, layout=Layout("z")).gather(), case.whole


def diag(case):
    return DistMatrix.diag(case.grid, case.make(case.whole[:, 1])).gather(), np.diag(case.whole[:, 1])


def relay(case):
    return relayout(case.grid, case.array, case.shape, Layout("z"), Layout()).wait(), case.whole


def all_gather(case):
    return case.grid.everyone.all_gather(case.array).wait(), case.whole


def reduce_scatter(case):
    total = case.half(0) + case.half(1)
    half = slice(case.rows // 2 * case.grid.rank, case.rows // 2 * (case.grid.rank + 1))
    return case.grid.everyone.reduce_scatter(case.array).wait(), total[half]


def all_reduce(case):
    return case.grid.everyone.all_reduce(case.array).wait(), case.half(0) + case.half(1)


def all_to_all(case):
    half = slice(case.rows // 2 * case.grid.rank, case.rows // 2 * (case.grid.rank + 1))
    return case.grid.everyone.all_to_all(case.array).wait(), np.concatenate([case.half(0)[half], case.half(1)[half]])


def shift(case):
    return case.grid.everyone.shift(case.array).wait(), case.half(1 - case.grid.rank)


def send(case):
    sent = case.grid.everyone.send(case.array, 1 - case.grid.rank)
    found = case.grid.everyone.receive(case.to(0 * case.own), 1 - case.grid.rank).wait()
    sent.wait()
    return found, case.half(1 - case.grid.rank)


def redistribution(case):
    library, out = library_of(case.to(case.own)).kind, case.to(0 * case.whole[: case.rows + 1 - 2 * case.grid.rank])
    Redistribution(case.grid, case.blocks, case.slabs, dtype=case.dtype, library=library)(case.array, out)
    return out, case.whole[slice(case.rows + 1) if case.grid.rank == 0 else slice(case.rows + 1, None)]


def moved(case):
    with BlacsContext(case.grid, (2, 1)) as context:
        held = context.descriptor(*case.shape, case.rows, case.shape[1])
        out = case.to(0 * case.own)
        pgemr2d(*case.shape, case.array, 1, 1, held, out, 1, 1, held)
        return out, case.own


def multiplied(case):
    with BlacsContext(case.grid, (2, 1)) as context:
        m, k = case.shape
        held, eye = context.descriptor(m, k, case.rows, k), context.descriptor(k, k, k, k)
        out, one = case.to(0 * case.own), case.to(np.eye(k, dtype=case.dtype)[: k if case.grid.rank == 0 else 0])
        pgemm("N", "N", m, k, k, 1, case.array, 1, 1, held, one, 1, 1, eye, 0, out, 1, 1, held)
        return out, case.own


def rebound(case):
    a = DistMatrix.from_local(case.grid, case.to(case.own), case.shape, layout=Layout("z"))
    b = DistMatrix.identity(case.grid, case.shape[1], dtype=case.dtype, library=a.library)
    with MatmulPlan(a, b) as plan:
        plan()
        a.local = case.array
        return plan().gather(), case.whole


READING = (
    set_local,
    set_local_by_columns,
    from_local,
    from_local_by_columns,
    from_global,
    from_root,
    from_blocks,
    from_block_cyclic,
    diag,
    relay,
    all_gather,
    reduce_scatter,
    all_reduce,
    all_to_all,
    shift,
    send,
    redistribution,
    moved,
    multiplied,
    rebound,
)


@pytest.mark.parametrize("door", READING)
def test_arrays_that_are_read(comm, door):
    for kind, make in (KINDS | REFUSED).items():
        library = "torch" if kind.startswith("torch") else "numpy"
        with Grid(comm, (1, 1, 2), library=library) as grid:
            for shape in SIZES:
                case = Case(grid, shape, kind, make)
                with given(kind=kind, shape=shape), warnings.catch_warnings(action="ignore"):
                    if kind in KINDS:
                        found, wanted = door(case)
                        assert np.array_equal(to_numpy(found), wanted)
                    else:
                        with pytest.raises((DTypeError, LayoutError)):
                            door(case)
            assert grid.everyone.all_reduce(np.ones(1)).wait() == 2


# Doors that write: each takes the array to write to, calls, and returns the values that it must contain.


def out_of(name, result):
    def door(case, out):
        array = case.to(case.own)
        getattr(case.grid.everyone, name)(array, out=out(result(case))).wait()
        return result(case)

    door.__name__ = f"{name} out="
    return door


def receive(case, out):
    target = out(case.half(1 - case.grid.rank))
    receiving = case.grid.everyone.receive(target, 1 - case.grid.rank)
    case.grid.everyone.send(case.to(case.own), 1 - case.grid.rank).wait()
    receiving.wait()
    return case.half(1 - case.grid.rank)


def relayout_out(case, out):
    relayout(case.grid, case.to(case.own), case.shape, Layout("z"), Layout(), out=out(case.whole)).wait()
    return case.whole


def redistribution_target(case, out):
    wanted = case.whole[slice(case.rows + 1) if case.grid.rank == 0 else slice(case.rows + 1, None)]
    library = library_of(case.to(case.own)).kind
    Redistribution(case.grid, case.blocks, case.slabs, dtype=case.dtype, library=library)(
        case.to(case.own), out(wanted)
    )
    return wanted


def to_blocks(case, out):
    DistMatrix.from_global(case.grid, case.to(case.whole)).to_blocks(case.blocks, out(case.own))
    return case.own


def to_block_cyclic(case, out):
    DistMatrix.from_global(case.grid, case.to(case.whole)).to_block_cyclic(case.cyclic, out(case.own))
    return case.own


def moved_into(case, out):
    with BlacsContext(case.grid, (2, 1)) as context:
        held = context.descriptor(*case.shape, case.rows, case.shape[1])
        pgemr2d(*case.shape, case.to(case.own), 1, 1, held, out(case.own), 1, 1, held)
    return case.own


def multiplied_into(case, out):
    with BlacsContext(case.grid, (2, 1)) as context:
        m, k = case.shape
        held, eye = context.descriptor(m, k, case.rows, k), context.descriptor(k, k, k, k)
        one = case.to(np.eye(k, dtype=case.dtype)[: k if case.grid.rank == 0 else 0])
        pgemm("N", "N", m, k, k, 1, case.to(case.own), 1, 1, held, one, 1, 1, eye, 0, out(case.own), 1, 1, held)
    return case.own


def half_of_sum(case):
    return (case.half(0) + case.half(1))[case.rows // 2 * case.grid.rank : case.rows // 2 * (case.grid.rank + 1)]


def halves(case):
    half = slice(case.rows // 2 * case.grid.rank, case.rows // 2 * (case.grid.rank + 1))
    return np.concatenate([case.half(0)[half], case.half(1)[half]])


STRIDED = {
    "reduce_scatter out=",
    "receive",
    "redistribution_target",
    "to_blocks",
    "to_block_cyclic",
    "moved_into",
    "multiplied_into",
}
ALONE = {"receive", "relayout_out"}
WRITING = (
    out_of("all_gather", lambda case: case.whole),
    out_of("reduce_scatter", half_of_sum),
    out_of("all_reduce", lambda case: case.half(0) + case.half(1)),
    out_of("all_to_all", halves),
    out_of("shift", lambda case: case.half(1 - case.grid.rank)),
    receive,
    relayout_out,
    redistribution_target,
    to_blocks,
    to_block_cyclic,
    moved_into,
    multiplied_into,
)


@pytest.mark.parametrize("door", WRITING, ids=lambda door: door.__name__)
def test_arrays_that_are_written(comm, door):
    """An array that cannot be written to is refused by every rank, also if one rank has it."""
    made = []

    def out(values):
        own = make if case.grid.rank == 1 or door.__name__ in ALONE else case.to
        made[:] = [own(0 * values)]
        return made[0]

    for kind, make in KINDS.items():
        right = kind not in NOT_WRITTEN and (door.__name__ in STRIDED or kind in ("plain", "unaligned", "torch"))
        with Grid(comm, (1, 1, 2), library="torch" if kind.startswith("torch") else "numpy") as grid:
            for shape in SIZES:
                case = Case(grid, shape, kind, make)
                with given(kind=kind, shape=shape):
                    if right:
                        assert np.array_equal(door(case, out), to_numpy(made[0]))
                    else:
                        with pytest.raises(LayoutError, match="Pass another array") as caught:
                            door(case, out)
                        assert door.__name__ in ALONE or caught.value.everywhere
                        assert not to_numpy(made[0]).any()
            assert grid.everyone.all_reduce(np.ones(1)).wait() == 2


def test_elements_that_share_memory_are_not_written(comm):
    """A broadcast array is no target, also where arrays with gaps are."""
    import torch

    with Grid(comm, (1, 1, 2), library="torch") as grid:
        for make in (lambda: torch.zeros(1, 3).expand(4, 3), lambda: torch.zeros(6).as_strided((4, 3), (1, 1))):
            with pytest.raises(LayoutError, match="share memory"):
                grid.everyone.receive(make(), 1 - grid.rank)
            with pytest.raises(LayoutError, match="share memory"):
                grid.everyone.reduce_scatter(torch.ones(8, 3), out=make()).wait()
            with pytest.raises(LayoutError, match="share memory"):
                DistMatrix.ones(grid, (8, 3), dtype="float32").to_blocks(Blocks.rows_of([4, 4], 3), make())
        assert grid.everyone.all_reduce(torch.ones(1).expand(600)).wait().sum() == 1200


def test_arrays_that_share_memory_with_what_is_read(comm):
    with Grid(comm, (1, 1, 2)) as grid:
        both = np.ones((400, 3))
        with pytest.raises(LayoutError, match="shares memory"):
            relayout(grid, both[:200], (400, 3), Layout("z"), Layout(), out=both)
        source, slabs = both[:200], Blocks.rows_of([200, 200], 3)
        with pytest.raises(LayoutError, match="shares memory"):
            Redistribution(grid, slabs, slabs)(source, both[100:300])
        a = DistMatrix.ones(grid, (40, 40))
        b = DistMatrix.from_local(grid, a.local, (40, 40))
        with pytest.raises(LayoutError, match="shares memory"):
            a.set_submatrix(slice(None), slice(None), b)


@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_a_plan_refuses_a_new_shard_that_it_cannot_use(comm, library):
    """Each rank by itself: C that is read as A, C in read-only memory, and a lazy conjugate as torch's storage."""
    with Grid(comm, (1, 1, 2), library=library) as grid:
        a, b = (
            DistMatrix.random(grid, (300, 300), seed=seed, layout=layout, dtype="complex128")
            for seed, layout in ((1, Layout.A), (2, Layout.B))
        )
        with MatmulPlan(a, b) as plan:
            c = plan()
            first, own = a.local, c.local
            a.local = c.local
            for call in (plan, lambda: matmul(a, b, out=c)):
                with pytest.raises(LayoutError, match="shares memory"):
                    call()
            a.local = first
            if library == "numpy":
                frozen = bytes(own.nbytes)
                c.local = np.frombuffer(frozen, own.dtype).reshape(own.shape)
                with pytest.raises(LayoutError, match="read-only"):
                    plan()
                assert not any(frozen)
            else:
                c.local.data = own.clone().conj()
                with pytest.raises(LayoutError, match="a lazy conjugate"):
                    plan()
            c.local = own
            assert np.allclose(to_numpy(plan().gather()), to_numpy(a.gather()) @ to_numpy(b.gather()))


def test_from_local_without_a_copy(comm, fails):
    """C is written where the caller's array is, or every rank raises. By default a copy is made, if it must be."""
    with Grid(comm, (1, 1, 2)) as grid:
        a, b = (DistMatrix.ones(grid, (4, 4), layout=layout, library="numpy") for layout in (Layout.A, Layout.B))
        for order in "CF":
            mine = np.zeros((2, 4), order=order)
            out = DistMatrix.from_local(grid, mine, (4, 4), layout=Layout("z"), order=order, copy=False)
            matmul(a, b, out=out)
            assert np.all(mine == 4)
        options = {"layout": Layout("z"), "copy": False}
        wrong = np.zeros((2, 4), order="F") if grid.rank else np.zeros((2, 4))
        fails(LayoutError, "copy=False", lambda: DistMatrix.from_local(grid, wrong, (4, 4), **options))
        fails(
            LayoutError, "copy=False", lambda: DistMatrix.from_local(grid, np.zeros((2, 4), ">f8"), (4, 4), **options)
        )
        for copy in (None, True):
            made = DistMatrix.from_local(grid, mine, (4, 4), layout=Layout("z"), order="F", copy=copy)
            assert np.shares_memory(made.local, mine) == (copy is None)
