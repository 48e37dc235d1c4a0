"""ScaLAPACK's level 3 on block-cyclic matrices: results as numpy's, unchanged elements, operations, refusals."""

import itertools

import numpy as np
import pytest
from loops import given
from samples import TESTED, UP_TO_4, integers, to_library, to_numpy
from tiles import held

from pmm3d import BlacsContext, DTypeError, Grid, GridError, LayoutError
from pmm3d.comm import Link
from pmm3d.linalg import phemm, pher2k, pherk, psymm, psyr2k, psyrk, ptrmm, stationary, triangle, window

pytestmark = pytest.mark.parallel([2, 4], thorough=[1, 6])
DTYPES = "float32", "float64", "complex64", "complex128"
BASE = 5
FORMS = {"N": lambda array: array, "T": lambda array: array.T, "C": lambda array: array.conj().T}
HALVES = {"L": np.tril, "U": np.triu}
OTHER = {"L": "U", "U": "L"}


class Part:
    """A random block-cyclic matrix with a part of this shape. marked: triangle of the part that is NaN."""

    def __init__(self, context, random, shape, dtype, marked="", unit=False, library=TESTED):
        number = lambda low, high: int(random.integers(low, high))
        self.context, self.shape, self.library = context, shape, library
        self.i, self.j = number(1, 6), number(1, 6)
        whole = shape[0] + self.i - 1 + number(0, 4), shape[1] + self.j - 1 + number(0, 4)
        self.whole = integers(whole, dtype, seed=number(0, 1000))
        if marked:
            self.part[HALVES[marked](np.ones(shape, bool), 0 if unit else 1 if marked == "U" else -1)] = np.nan
        blocks, first = [number(1, 9) for _ in range(2)], [number(0, size) for size in context.shape]
        self.descriptor = context.descriptor(*whole, *blocks, *first)
        self.load()

    def load(self):
        """Make the array of this rank from the whole matrix."""
        self.local = to_library(self.arrays().T, self.library).T

    @property
    def part(self):
        return self.whole[self.i - 1 :, self.j - 1 :][: self.shape[0], : self.shape[1]]

    @property
    def passed(self):
        return self.local, self.i, self.j, self.descriptor

    def arrays(self):
        arrays = held(self.descriptor.cyclic, self.context.grid.rank, self.whole, more=1)
        return arrays[0] if arrays else np.empty((1, 0), self.whole.dtype, order="F")

    def check(self, result):
        """Whether the part has become `result`, and no other element has changed, NaN included."""
        self.part[...] = result
        assert np.array_equal(to_numpy(self.local), self.arrays(), equal_nan=True)


def mirrored(part, uplo, hermitian):
    """The matrix that one triangle of a part means."""
    strict = HALVES[uplo](part, -1 if uplo == "L" else 1)
    diagonal = np.diag(np.diagonal(part).real if hermitian else np.diagonal(part))
    return strict + (strict.conj().T if hermitian else strict.T) + diagonal


def in_one_triangle(part, uplo, result):
    return np.where(HALVES[uplo](np.ones(part.shape, bool)), result, part)


def contexts(comm):
    """Contexts on all ranks and on some, numbered by rows and by columns."""
    size = comm.size
    for shape, order, ranks in (
        ((2, size // 2) if size % 2 == 0 else (1, size), "R", None),
        ((1, max(1, size // 2)), "R", None),
        ((size, 1), "C", tuple(range(size))[::-1]),
    ):
        with BlacsContext(comm, shape, order, ranks=ranks) as context:
            yield context


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Blocks on the diagonal of at most five rows, so that small matrices have several."""
    monkeypatch.setattr(triangle, "BASE", BASE)
    monkeypatch.setattr(stationary, "STRIP", BASE)


@pytest.fixture
def in_halves(monkeypatch):
    """Products of which C does not stay in place."""
    monkeypatch.setattr(stationary, "SMALL", -1)
    monkeypatch.setattr(stationary, "MOST_RECEIVED", 0)


def factors(random, dtype, real=False):
    """alpha and beta; of complex matrices complex ones."""
    alpha, beta = (int(random.choice([0, 1, 2, -3], p=[0.1, 0.3, 0.3, 0.3])) for _ in range(2))
    return (alpha, beta) if real or not dtype.startswith("complex") else (alpha * (1 + 1j), beta * (1 - 2j))


def rank_k_case(context, random, dtype, **how):
    """A random case of psyrk, pherk, psyr2k or pher2k."""
    routine, uplo = [psyrk, pherk, psyr2k, pher2k][random.integers(4)], "LU"[random.integers(2)]
    hermitian, two = routine in (pherk, pher2k), routine in (psyr2k, pher2k)
    trans = str(random.choice([*("NTC" if dtype.startswith("float") else "NC" if hermitian else "NT")]))
    n, k = map(int, random.integers(0, [24, 9]))
    alpha, beta = factors(random, dtype, real=hermitian)
    if routine is pher2k and dtype.startswith("complex"):
        alpha = alpha * (2 + 1j)
    shape = (n, k) if trans == "N" else (k, n)
    a, b = (Part(context, random, shape, dtype, **how) for _ in range(2))
    c = Part(context, random, (n, n), dtype, OTHER[uplo], **how)
    if alpha == 0:
        a.local[...] = b.local[...] = float("nan")
    if hermitian and dtype.startswith("complex"):
        c.part.imag[np.diag_indices(n)] = np.nan
        c.load()
    if beta == 0:
        c.part[HALVES[uplo](np.ones((n, n), bool))] = np.nan
        c.load()
    routine(uplo, trans.lower(), n, k, alpha, *a.passed, *(b.passed if two else ()), beta, *c.passed)
    if hermitian and beta == 1 and (alpha == 0 or k == 0):
        return c.check(c.part)
    turned = FORMS["C" if hermitian else "T"]
    x, y = (each.part if trans == "N" else turned(each.part) for each in (a, b))
    conjugate = np.conj(alpha) if hermitian else alpha
    product = alpha * (x @ turned(y)) + conjugate * (y @ turned(x)) if two else alpha * (x @ turned(x))
    old = mirrored(np.where(HALVES[uplo](np.ones((n, n), bool)), c.part, 0), uplo, hermitian) if beta else 0
    c.check(in_one_triangle(c.part, uplo, product + beta * old))


def symmetric_case(context, random, dtype, **how):
    """A random case of psymm or phemm."""
    hermitian, side, uplo = random.integers(2) == 1, "LR"[random.integers(2)], "LU"[random.integers(2)]
    (m, n), (alpha, beta) = map(int, random.integers(0, 20, 2)), factors(random, dtype)
    order = m if side == "L" else n
    a = Part(context, random, (order, order), dtype, OTHER[uplo], **how)
    if hermitian and dtype.startswith("complex"):
        a.part.imag[np.diag_indices(order)] = np.nan
        a.load()
    b, c = (Part(context, random, (m, n), dtype, **how) for _ in range(2))
    if alpha == 0:
        a.local[...] = b.local[...] = float("nan")
    if beta == 0:
        c.part[...] = np.nan
        c.load()
    (phemm if hermitian else psymm)(side.lower(), uplo.lower(), m, n, alpha, *a.passed, *b.passed, beta, *c.passed)
    full = mirrored(np.where(HALVES[uplo](np.ones((order, order), bool)), a.part, 0), uplo, hermitian)
    product = full @ b.part if side == "L" else b.part @ full
    c.check(alpha * product + (beta * c.part if beta else 0))


def triangular_case(context, random, dtype, **how):
    """A random case of ptrmm."""
    side, uplo, trans, diag = ("LR"[random.integers(2)], "LU"[random.integers(2)], "NTC"[random.integers(3)],
                               "NU"[random.integers(2)])  # fmt: skip
    (m, n), alpha = map(int, random.integers(0, 20, 2)), factors(random, dtype)[0]
    order = m if side == "L" else n
    a = Part(context, random, (order, order), dtype, OTHER[uplo], diag == "U", **how)
    b = Part(context, random, (m, n), dtype, **how)
    if alpha == 0:
        a.local[...] = float("nan")
        b.part[...] = np.nan
        b.load()
    ptrmm(side, uplo, trans, diag, m, n, alpha, *a.passed, *b.passed)
    half = np.where(HALVES[uplo](np.ones((order, order), bool)), a.part, 0)
    if diag == "U":
        np.fill_diagonal(half, 1)
    full = FORMS[trans](half)
    b.check(alpha * (full @ b.part if side == "L" else b.part @ full) if alpha else 0)


CASES = rank_k_case, symmetric_case, triangular_case


@pytest.mark.deadline(180)
def test_random_cases(comm):
    """Of all types, sides, triangles, operations, offsets, blocks, first processes, and idle ranks. What is not to be
    read is NaN."""
    random = np.random.default_rng(comm.size)
    for context in contexts(comm):
        for number, case, dtype in itertools.product(range(5), CASES, DTYPES):
            with given(number=number, case=case.__name__, dtype=dtype, shape=context.shape):
                case(context, random, dtype)


@pytest.mark.parallel([2], thorough=[1, 4, 6])
@pytest.mark.deadline(180)
def test_random_cases_in_halves(comm, in_halves):
    random = np.random.default_rng(comm.size)
    for number, context in enumerate(contexts(comm)):
        for case, dtype in itertools.product(CASES, DTYPES[number::3]):
            with given(case=case.__name__, dtype=dtype, shape=context.shape):
                case(context, random, dtype)


@pytest.mark.parallel([2], thorough=UP_TO_4)
@pytest.mark.deadline(180)
def test_arrays_of_torch(comm):
    random = np.random.default_rng(5)
    with BlacsContext(comm, (1, comm.size)) as context:
        for number, case, dtype in itertools.product(range(3), CASES, DTYPES[::3]):
            with given(number=number, case=case.__name__, dtype=dtype):
                case(context, random, dtype, library="torch")


def operations(context, n, k, monkeypatch):
    """Number of multiplications of psyrk, psyr2k and ptrmm on this rank, in place or of all pgemm."""
    counted = []
    multiply = lambda grid, a, b, c, *others, **how: counted.append(a.shape[0] * a.shape[1] * b.shape[1])
    monkeypatch.setattr(stationary, "_multiply", multiply)
    monkeypatch.setattr(window, "pgemm", lambda transa, transb, m, n, k, *others: counted.append(m * n * k))
    square, tall = context.descriptor(n, n, BASE, BASE), context.descriptor(n, k, BASE, BASE)
    a, b, c = tall.empty(), tall.empty(), square.empty()
    a[...] = b[...] = c[...] = 1
    passed = [(each, 1, 1, of) for each, of in ((a, tall), (b, tall), (c, square))]
    for call in (
        lambda: psyrk("L", "N", n, k, 1, *passed[0], 0, *passed[2]),
        lambda: psyr2k("U", "N", n, k, 1, *passed[0], *passed[1], 0, *passed[2]),
        lambda: ptrmm("L", "U", "T", "N", n, k, 1, *passed[2], *passed[0]),
    ):
        counted.clear()
        call()
        yield sum(counted)


@pytest.mark.parallel([1])
@pytest.mark.parametrize("how", ["in place", "in halves"])
def test_operations(comm, how, request, monkeypatch):
    """The order is the base length times a power of 2."""
    if how == "in halves":
        request.getfixturevalue("in_halves")
    n, k = 8 * BASE, 7
    with BlacsContext(comm, (1, 1)) as context:
        half = (n * n + n * BASE) // 2 * k
        assert [*operations(context, n, k, monkeypatch)] == [half, 2 * half, half]


@pytest.mark.parallel([4], thorough=[2, 6])
def test_each_rank_has_its_share_of_the_operations_and_one_message_from_each_other(comm, monkeypatch):
    """Both factors of a product are sent in one message. psyr2k is two products."""
    n, k, posted, post = 40 * BASE, 4 * BASE, [], Link.post_all

    def counted(link, library, sends, receives):
        posted.extend(peer for peer, _ in sends)
        return post(link, library, sends, receives)

    monkeypatch.setattr(Link, "post_all", counted)
    with BlacsContext(comm, (2, comm.size // 2)) as context:
        for times, found in zip((1, 2, 1), operations(context, n, k, monkeypatch)):
            assert found <= 1.15 * times * n * n * k / 2 / comm.size
            assert 1 <= max(map(posted.count, posted)) <= times
            posted.clear()


@pytest.mark.parallel([2], thorough=[1, 4, 6])
def test_what_is_refused(comm, all_fail):
    with Grid(comm) as grid, BlacsContext(grid, (1, comm.size)) as context, BlacsContext(grid, (1, 1)) as other:
        square, small = context.descriptor(6, 6, 2, 2), context.descriptor(3, 6, 2, 2)
        make = lambda of, dtype: (of.empty(dtype), 1, 1, of)
        real, whole, few = make(square, "float64"), make(square, "complex128"), make(small, "complex128")
        there = make(other.descriptor(6, 6, 2, 2), "complex128")
        third = make(square, "complex128")
        all_fail(
            (LayoutError, 'psyrk: uplo is one of "L", "U"; got', lambda: psyrk("X", "N", 6, 6, 1, *whole, 0, *third)),
            (LayoutError, 'psyrk: trans is one of "N", "T"', lambda: psyrk("L", "C", 6, 6, 1, *whole, 0, *third)),
            (LayoutError, 'pherk: trans is one of "N", "C"', lambda: pherk("L", "T", 6, 6, 1, *whole, 0, *third)),
            (LayoutError, "psyrk: trans is one of", lambda: psyrk("L", 3, 6, 6, 1, *whole, 0, *third)),
            (DTypeError, "pherk: alpha is 1j; it must be real", lambda: pherk("L", "N", 6, 6, 1j, *whole, 0, *third)),
            (
                DTypeError,
                "pher2k: beta is 1j; it must be real",
                lambda: pher2k("L", "N", 6, 6, 1j, *whole, *whole, 1j, *third),
            ),
            (DTypeError, "psyrk: alpha is 'x'", lambda: psyrk("L", "N", 6, 6, "x", *whole, 0, *third)),
            (LayoutError, "rows 1 to 6 and columns 1 to 6", lambda: psyrk("L", "N", 6, 6, 1, *few, 0, *third)),
            (LayoutError, "psyrk: sizes are whole numbers", lambda: psyrk("L", "N", -1, 6, 1, *whole, 0, *third)),
            (DTypeError, "psyrk: C", lambda: psyrk("L", "N", 6, 6, 1, *real, 0, *third)),
            (LayoutError, "psyrk: C", lambda: psyrk("L", "N", 6, 6, 1, *whole, 0, *whole)),
            (GridError, "several contexts", lambda: psymm("L", "L", 6, 6, 1, *whole, *there, 0, *third)),
            (
                LayoutError,
                'phemm: side is one of "L", "R"',
                lambda: phemm("M", "L", 6, 6, 1, *whole, *whole, 0, *third),
            ),
            (LayoutError, 'ptrmm: diag is one of "N", "U"', lambda: ptrmm("L", "L", "N", "X", 6, 6, 1, *whole, *third)),
            (
                LayoutError,
                'ptrmm: transa is one of "N", "T", "C"',
                lambda: ptrmm("L", "L", "X", "N", 6, 6, 1, *whole, *third),
            ),
            (LayoutError, "ptrmm: B", lambda: ptrmm("L", "L", "N", "N", 6, 6, 1, *whole, *whole)),
        )
