"""Every function that takes an array of the caller (a door) x every kind of array: the values are right, or every rank
raises. Each cell runs on small arrays, which collectives send with the comparison of the calls, and on large ones."""

import warnings
from itertools import product

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
    """A door's grid, the whole matrix, this rank's half of its rows, and that half as an array of a kind.

    other           the half of the other rank
    total, mixed    results of an all-reduce and of an all-to-all of the halves
    part_of_total   that of a reduce-scatter
    slab            the rows of this rank in `slabs`
    diagonal        a matrix with the second column as its diagonal
    """

    def __init__(self, grid, shape, kind, make):
        self.grid, self.shape, self.make = grid, shape, make
        self.library = "torch" if kind.startswith("torch") else "numpy"
        self.whole = np.arange(1.0, 1 + shape[0] * shape[1]).reshape(shape) * (1 + 2j if kind == COMPLEX else 1)
        self.dtype, self.rows = self.whole.dtype.name, shape[0] // 2
        halves = self.whole[: self.rows], self.whole[self.rows :]
        self.own, self.other, self.total = halves[grid.rank], halves[1 - grid.rank], halves[0] + halves[1]
        part = slice(self.rows // 2 * grid.rank, self.rows // 2 * (grid.rank + 1))
        self.part_of_total, self.mixed = self.total[part], np.concatenate([half[part] for half in halves])
        self.slab = self.whole[self.rows + 1 :] if grid.rank else self.whole[: self.rows + 1]
        self.diagonal = np.diag(self.whole[:, 1])
        self.blocks = Blocks.rows_of([self.rows, self.rows], shape[1])
        self.slabs = Blocks.rows_of([self.rows + 1, self.rows - 1], shape[1])  # unequal, so that elements move
        self.cyclic = BlockCyclic(shape, (self.rows, shape[1]), (2, 1))

    @property
    def array(self):
        return self.make(self.own)

    def to(self, array):
        """The values in the library of the kind, as a plain array."""
        return tensor(array) if self.library == "torch" else array.copy()

    def local(self, array, **options):
        """A matrix of these shards."""
        return DistMatrix.from_local(self.grid, array, self.shape, layout=Layout("z"), **options)

    def of_all(self, array, **options):
        """A matrix from this array on every rank."""
        return DistMatrix.from_global(self.grid, array, **options)


def set_local(case, **options):
    matrix = DistMatrix.zeros(case.grid, case.shape, dtype=case.dtype, layout=Layout("z"), **options)
    matrix.local = case.array
    return matrix


def send(case):
    sent = case.grid.everyone.send(case.array, 1 - case.grid.rank)
    found = case.grid.everyone.receive(case.to(0 * case.own), 1 - case.grid.rank).wait()
    sent.wait()
    return found


def receive(case, out):
    receiving = case.grid.everyone.receive(out, 1 - case.grid.rank)
    case.grid.everyone.send(case.to(case.own), 1 - case.grid.rank).wait()
    receiving.wait()


def redistribute(case, source, out):
    Redistribution(case.grid, case.blocks, case.slabs, dtype=case.dtype, library=case.library)(source, out)
    return out


def move(case, source, out):
    with BlacsContext(case.grid, (2, 1)) as context:
        held = context.descriptor(*case.shape, case.rows, case.shape[1])
        pgemr2d(*case.shape, source, 1, 1, held, out, 1, 1, held)
    return out


def multiply(case, source, out):
    """out = source I"""
    with BlacsContext(case.grid, (2, 1)) as context:
        m, k = case.shape
        held, eye = context.descriptor(m, k, case.rows, k), context.descriptor(k, k, k, k)
        one = case.to(np.eye(k, dtype=case.dtype)[: k if case.grid.rank == 0 else 0])
        pgemm("N", "N", m, k, k, 1, source, 1, 1, held, one, 1, 1, eye, 0, out, 1, 1, held)
    return out


def rebound(case):
    a = case.local(case.to(case.own))
    with MatmulPlan(a, DistMatrix.identity(case.grid, case.shape[1], dtype=case.dtype, library=a.library)) as plan:
        plan()
        a.local = case.array
        return plan().gather()


def collective(name):
    return lambda case: getattr(case.grid.everyone, name)(case.array).wait()


def collective_into(name):
    return lambda case, out: getattr(case.grid.everyone, name)(case.to(case.own), out=out).wait()


COLLECTIVES = {
    "all_gather": "whole",
    "reduce_scatter": "part_of_total",
    "all_reduce": "total",
    "all_to_all": "mixed",
    "shift": "other",
}
READING = {  # the array that the call makes, and the attribute of Case that it must equal
    "local=": (lambda case: set_local(case).gather(), "whole"),
    "local= by columns": (
        lambda case: (
            set_local(case, order="F") @ DistMatrix.identity(case.grid, case.shape[1], dtype=case.dtype)
        ).gather(),
        "whole",
    ),
    "from_local": (lambda case: case.local(case.array).gather(), "whole"),
    "from_local by columns": (lambda case: case.local(case.array, order="F").gather(), "whole"),
    "from_global": (lambda case: case.of_all(case.make(case.whole)).gather(), "whole"),
    "from_global root=": (
        lambda case: case.of_all(case.make(case.whole) if case.grid.rank else None, root=1).gather(),
        "whole",
    ),
    "from_blocks": (
        lambda case: DistMatrix.from_blocks(case.grid, case.array, case.blocks, layout=Layout(cols="z")).gather(),
        "whole",
    ),
    "from_block_cyclic": (
        lambda case: DistMatrix.from_block_cyclic(case.grid, case.array, case.cyclic, layout=Layout("z")).gather(),
        "whole",
    ),
    "diag": (lambda case: DistMatrix.diag(case.grid, case.make(case.whole[:, 1])).gather(), "diagonal"),
    "relayout": (lambda case: relayout(case.grid, case.array, case.shape, Layout("z"), Layout()).wait(), "whole"),
    **{name: (collective(name), wanted) for name, wanted in COLLECTIVES.items()},
    "send": (send, "other"),
    "Redistribution": (lambda case: redistribute(case, case.array, case.to(0 * case.slab)), "slab"),
    "pgemr2d": (lambda case: move(case, case.array, case.to(0 * case.own)), "own"),
    "pgemm": (lambda case: multiply(case, case.array, case.to(0 * case.own)), "own"),
    "local= of a plan": (rebound, "whole"),
}
WRITING = {  # the call, and the attribute of Case that it must write
    **{f"{name} out=": (collective_into(name), wanted) for name, wanted in COLLECTIVES.items()},
    "receive": (receive, "other"),
    "relayout out=": (
        lambda case, out: relayout(case.grid, case.to(case.own), case.shape, Layout("z"), Layout(), out=out).wait(),
        "whole",
    ),
    "Redistribution": (lambda case, out: redistribute(case, case.to(case.own), out), "slab"),
    "to_blocks": (lambda case, out: case.of_all(case.to(case.whole)).to_blocks(case.blocks, out), "own"),
    "to_block_cyclic": (lambda case, out: case.of_all(case.to(case.whole)).to_block_cyclic(case.cyclic, out), "own"),
    "pgemr2d": (lambda case, out: move(case, case.to(case.own), out), "own"),
    "pgemm": (lambda case, out: multiply(case, case.to(case.own), out), "own"),
}
STRIDED = {"reduce_scatter out=", "receive", "Redistribution", "to_blocks", "to_block_cyclic", "pgemr2d", "pgemm"}
"""Doors that write to arrays with gaps."""
ALONE = {"receive", "relayout out="}
"""Doors that raise on one rank only."""


def cases_of(comm, kinds):
    """(kind, case) of each kind and size. At the end, the grid of each kind can be used."""
    for kind, make in kinds.items():
        with Grid(comm, (1, 1, 2), library="torch" if kind.startswith("torch") else "numpy") as grid:
            for shape in SIZES:
                yield kind, Case(grid, shape, kind, make)
            assert grid.everyone.all_reduce(np.ones(1)).wait() == 2


@pytest.mark.parametrize("door", READING)
def test_arrays_that_are_read(comm, door):
    call, wanted = READING[door]
    for kind, case in cases_of(comm, KINDS | REFUSED):
        with given(kind=kind, shape=case.shape), warnings.catch_warnings(action="ignore"):
            if kind in KINDS:
                assert np.array_equal(to_numpy(call(case)), getattr(case, wanted))
            else:
                with pytest.raises((DTypeError, LayoutError)):
                    call(case)


@pytest.mark.parametrize("door", WRITING)
def test_arrays_that_are_written(comm, door):
    """An array that cannot be written to is refused by every rank, also if one rank has it."""
    call, wanted = WRITING[door]
    for kind, case in cases_of(comm, KINDS):
        wanted_values = getattr(case, wanted)
        right = kind not in NOT_WRITTEN and (door in STRIDED or kind in ("plain", "unaligned", "torch"))
        out = (case.make if case.grid.rank == 1 or door in ALONE else case.to)(0 * wanted_values)
        with given(kind=kind, shape=case.shape):
            if right:
                call(case, out)
                assert np.array_equal(to_numpy(out), wanted_values)
            else:
                with pytest.raises(LayoutError, match="Pass another array") as caught:
                    call(case, out)
                assert door in ALONE or caught.value.everywhere
                assert not to_numpy(out).any()


def test_elements_that_share_memory_are_not_written(comm):
    """A broadcast array is no target, also where arrays with gaps are."""
    import torch

    with Grid(comm, (1, 1, 2), library="torch") as grid:
        for make, write in product(
            (lambda: torch.zeros(1, 3).expand(4, 3), lambda: torch.zeros(6).as_strided((4, 3), (1, 1))),
            (
                lambda out: grid.everyone.receive(out, 1 - grid.rank),
                lambda out: grid.everyone.reduce_scatter(torch.ones(8, 3), out=out).wait(),
                lambda out: DistMatrix.ones(grid, (8, 3), dtype="float32").to_blocks(Blocks.rows_of([4, 4], 3), out),
            ),
        ):
            with pytest.raises(LayoutError, match="share memory"):
                write(make())
        assert grid.everyone.all_reduce(torch.ones(1).expand(600)).wait().sum() == 1200


def test_arrays_that_share_memory_with_what_is_read(comm):
    with Grid(comm, (1, 1, 2)) as grid:
        both, slabs, a = np.ones((400, 3)), Blocks.rows_of([200, 200], 3), DistMatrix.ones(grid, (40, 40))
        b, every = DistMatrix.from_local(grid, a.local, (40, 40)), slice(None)
        for call in (
            lambda: relayout(grid, both[:200], (400, 3), Layout("z"), Layout(), out=both),
            lambda: Redistribution(grid, slabs, slabs)(both[:200], both[100:300]),
            lambda: a.set_submatrix(every, every, b),
        ):
            with pytest.raises(LayoutError, match="shares memory"):
                call()


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
            a.local = own
            for call in (plan, lambda: matmul(a, b, out=c)):
                with pytest.raises(LayoutError, match="shares memory"):
                    call()
            a.local = first
            if library == "numpy":
                c.local = np.frombuffer(bytes(own.nbytes), own.dtype).reshape(own.shape)
            else:
                c.local.data = own.clone().conj()
            with pytest.raises(LayoutError, match="read-only" if library == "numpy" else "a lazy conjugate"):
                plan()
            assert library == "torch" or not c.local.any()
            c.local = own
            assert np.allclose(to_numpy(plan().gather()), to_numpy(a.gather()) @ to_numpy(b.gather()))


def test_from_local_without_a_copy(comm, all_fail):
    """C is written where the caller's array is, or every rank raises. By default a copy is made, if it must be."""
    with Grid(comm, (1, 1, 2)) as grid:
        a, b = (DistMatrix.ones(grid, (4, 4), layout=layout, library="numpy") for layout in (Layout.A, Layout.B))
        for order in "CF":
            mine = np.zeros((2, 4), order=order)
            out = DistMatrix.from_local(grid, mine, (4, 4), layout=Layout("z"), order=order, copy=False)
            matmul(a, b, out=out)
            assert np.all(mine == 4)
        in_place = lambda array: lambda: DistMatrix.from_local(grid, array, (4, 4), layout=Layout("z"), copy=False)
        wrong = np.zeros((2, 4), order="F") if grid.rank else np.zeros((2, 4))
        refused = {
            'Pass order="F"': wrong,
            "Convert it to plain elements": np.zeros((2, 4), ">f8"),
            "Pass an array without gaps": np.zeros((4, 8))[::2, ::2],
        }
        all_fail(*((LayoutError, f"copy=False, .*{remedy}", in_place(array)) for remedy, array in refused.items()))
        for copy in (0, np.False_):
            with pytest.raises(LayoutError, match="copy is True, False or None"):
                DistMatrix.from_local(grid, mine, (4, 4), layout=Layout("z"), order="F", copy=copy)
        for copy in (None, True):
            made = DistMatrix.from_local(grid, mine, (4, 4), layout=Layout("z"), order="F", copy=copy)
            assert np.shares_memory(made.local, mine) == (copy is None)


def test_the_capsule_of_a_conjugated_view_is_a_copy_or_an_error(comm):
    with Grid(comm, (1, 1, 2)) as grid:
        a = DistMatrix.ones(grid, (4, 4), dtype="complex128", library="numpy")
        with pytest.raises(BufferError, match="a conjugated view"):
            a.H.__dlpack__(copy=False)
        assert not np.shares_memory(np.from_dlpack(a.H), a.local) and np.shares_memory(np.from_dlpack(a.T), a.local)
