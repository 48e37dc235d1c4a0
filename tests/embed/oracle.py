"""Compare random calls of pmm3d's routines on block-cyclic matrices with the machine's ScaLAPACK. It runs under mpirun:

    mpirun -n 6 .venv-embed/bin/python tests/embed/oracle.py 2000 1

computes 2,000 cases with the seed 1. Names of routines, such as gemm trsm, limit the cases to these.

Each case has a random routine, type, process grids, block sizes, first processes, leading dimensions, sub-matrices,
letters and factors, equal on all ranks. pmm3d's matrices contain NaN in all elements that the routine must not read.
The program prints the number of equal results, and each case with a difference. Then its exit status is 1.
"""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import dataclass
from importlib import import_module
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

import pmm3d
from pmm3d import BlacsContext, Descriptor
from pmm3d.layout.distribution import Distribution1D
from pmm3d.tools.tune.scalapack.library import Blacs, Scalapack

DTYPES = "float32", "float64", "complex64", "complex128"
LARGEST = 60
SMALLER = {
    "triangle": {"BASE": 8},
    "stationary": {"STRIP": 5},
    "panels": {"PANEL": 7},
    "positive_definite": {"LEAF": 4},
}
"""Numbers of rows in the blocked algorithms of pmm3d.linalg, in place of hundreds: small matrices are divided too."""
ROUNDINGS = 8
"""Largest difference in units of rounding."""
MOVED, RANK_K, RANK_2K = "m n alpha A beta C", "uplo trans n k alpha A beta C", "uplo trans n k alpha A B beta C"
SIDED, TRIANGULAR = "side uplo m n alpha A B beta C", "side uplo transa diag m n alpha A B"
FORMS = {
    "gemm": "transa transb m n k alpha A B beta C",
    "gemr2d": "m n A B",
    "tran": MOVED,
    "tranu": MOVED,
    "tranc": MOVED,
    "geadd": "trans m n alpha A beta C",
    "syrk": RANK_K,
    "herk": RANK_K,
    "syr2k": RANK_2K,
    "her2k": RANK_2K,
    "symm": SIDED,
    "hemm": SIDED,
    "trmm": TRIANGULAR,
    "trsm": TRIANGULAR,
    "potrf": "uplo n A",
    "potrs": "uplo n nrhs A B",
    "trtri": "uplo diag n A",
}
"""Arguments of each routine in order. A capital is a matrix. The last matrix is written."""
IN_THEIRS = {
    "float": {"tranu": "tran", "tranc": "tran", "herk": "syrk", "her2k": "syr2k", "hemm": "symm"},
    "complex": {"tran": "tranu"},
}
"""Routines that pmm3d has also for the other kind of types."""
WITH_INFO = "potrf", "potrs", "trtri"
"""Routines that ScaLAPACK has for aligned square blocks only. It computes them on copies."""
LETTERS = {"uplo": "LU", "side": "LR", "diag": "NU"}
REAL_FACTORS = ("herk", "alpha"), ("herk", "beta"), ("her2k", "beta")


@dataclass
class Drawn:
    """A random matrix and a part of it, with the descriptors of both libraries.

    whole           all elements
    read, written   which elements the routine may read, and writes
    """

    whole: np.ndarray
    i: int
    j: int
    rows: int
    cols: int
    ours: Descriptor
    theirs: np.ndarray

    def __post_init__(self) -> None:
        self.read, self.written = (np.zeros(self.whole.shape, bool) for _ in range(2))

    def window(self, of: np.ndarray) -> np.ndarray:
        return of[self.i - 1 : self.i - 1 + self.rows, self.j - 1 : self.j - 1 + self.cols]

    def own(self, whole: np.ndarray, empty: complex = -77) -> np.ndarray:
        """Array of this rank. empty: value of places without an element."""
        local = np.full((self.ours.lld, self.ours.local_cols), empty, whole.dtype, "F")
        cyclic = self.ours.cyclic
        for tile in cyclic.tiles(self.ours.context.grid.rank):
            rows, cols = indices(cyclic.rows, tile.row), indices(cyclic.cols, tile.col)
            local[: len(rows), : len(cols)] = whole[np.ix_(rows, cols)]
        return local


def indices(dealt: Distribution1D, part: int) -> list[int]:
    return [index for run in dealt.runs(part) for index in range(run.start, run.stop)]


class Contexts(NamedTuple):
    """A process grid, as a context of each library."""

    ours: BlacsContext
    theirs: Blacs

    @classmethod
    def drawn(cls, scalapack: Scalapack, comm: MPI.Intracomm, rng: np.random.Generator) -> Contexts:
        rows = int(rng.integers(1, comm.size + 1))
        shape, order = (rows, int(rng.integers(1, comm.size // rows + 1))), "RC"[rng.integers(2)]
        ours = BlacsContext(comm, shape, order, relabel=bool(rng.integers(2)))
        return cls(ours, scalapack.context(comm, shape, order))

    def matrix(self, rng: np.random.Generator, rows: int, cols: int, dtype: str) -> Drawn:
        """A random matrix with a part of this number of rows and columns."""
        i, j = (int(number) for number in rng.integers(1, 8, 2))
        m, n = rows + i - 1 + int(rng.integers(0, 6)), cols + j - 1 + int(rng.integers(0, 6))
        m, n = max(m, 1), max(n, 1)
        blocks, lead = [int(number) for number in rng.integers(1, 12, 2)], int(rng.integers(0, 4))
        first = [int(rng.integers(size)) for size in self.ours.shape]
        whole = rng.standard_normal((m, n)) + (1j * rng.standard_normal((m, n)) if "complex" in dtype else 0)
        lld = max(1, self.ours.descriptor(m, n, *blocks, *first).local_rows) + lead
        ours = self.ours.descriptor(m, n, *blocks, *first, lld=lld)
        return Drawn(whole.astype(dtype), i, j, rows, cols, ours, self.theirs.descriptor(m, n, *blocks, *first, lld))

    def close(self) -> None:
        self.theirs.close()
        self.ours.close()


class Case:
    """A random call of a routine.

    values     letters, sizes and factors by name
    matrices   A, B and C
    info       INFO that a routine must return; 0 for the others
    infos      INFO of pmm3d and of ScaLAPACK
    """

    def __init__(self, name: str, rng: np.random.Generator, on: Contexts, other: Contexts):
        self.name, self.rng, self.on, self.dtype = name, rng, on, str(rng.choice(DTYPES))
        self.complex, self.info, self.infos = self.dtype.startswith("complex"), 0, list[int]()
        self.values: dict[str, Any] = {word: self.drawn(word) for word in FORMS[name].split() if not word.isupper()}
        self.matrices = {
            word: (other if (name, word) == ("gemr2d", "B") else on).matrix(rng, *self.shape(word), self.dtype)
            for word in FORMS[name].split()
            if word.isupper()
        }
        self.prepare()

    def __str__(self) -> str:
        shapes = [
            f"{word} {drawn.whole.shape} at {drawn.i}, {drawn.j}: {drawn.theirs[4:8]} on {drawn.ours.context.shape}"
            for word, drawn in self.matrices.items()
        ]
        return f"{self.name} {self.dtype} {self.values}; {'; '.join(shapes)}; INFO {self.info}, got {self.infos}"

    def drawn(self, word: str) -> Any:
        """A random letter, size or factor."""
        rng, real = self.rng, not self.complex
        if word in ("alpha", "beta"):
            imaginary = [] if real or (self.name, word) in REAL_FACTORS else [0.5 + 0.25j, -1j]
            return rng.choice([0, 1, -1, 0.5, 1, 0.5, *imaginary]).item()
        if word in ("m", "n", "k", "nrhs"):
            return int(rng.integers(0, LARGEST))
        of_rank_k = "NTC" if real else "NC" if self.name.startswith("her") else "NT"
        allowed = LETTERS.get(word) or (of_rank_k if self.name in ("syrk", "herk", "syr2k", "her2k") else "NTC")
        found = str(rng.choice(list(allowed)))
        return found if rng.integers(2) else found.lower()

    def letter(self, word: str) -> str:
        return self.values.get(word, "N").upper()

    def shape(self, word: str) -> tuple[int, int]:
        """Rows and columns of a matrix."""
        sizes = {"m": 0, "k": 0, "nrhs": 0} | self.values
        m, n, k = sizes["m"], sizes["n"], sizes["k"]
        match FORMS[self.name].split()[0], word:
            case _ if self.name == "gemm":
                found = {"A": (m, k), "B": (k, n), "C": (m, n)}[word]
                return found if word == "C" or self.letter(f"trans{word.lower()}") == "N" else found[::-1]
            case "side", "A":
                return (m, m) if self.letter("side") == "L" else (n, n)
            case "uplo", "A" | "B" if k or "k" in self.values:
                return (n, k) if self.letter("trans") == "N" else (k, n)
            case "uplo", _:
                return (n, sizes["nrhs"]) if word == "B" else (n, n)
            case "trans", "A":
                return (m, n) if self.letter("trans") == "N" else (n, m)
            case "m", "A" if self.name != "gemr2d":
                return n, m
        return m, n

    def prepare(self) -> None:
        """Make matrices that the routine can use, and determine which elements it may read and writes."""
        *_, last = self.matrices
        for word, drawn in self.matrices.items():
            part, alone = drawn.window(drawn.whole), word == last
            triangle = self.triangle(word, part.shape)
            read = {"C": self.values.get("beta", 0) != 0, "B": self.name != "gemr2d"}.get(word, True)
            if word != "C" and "alpha" in self.values and self.values["alpha"] == 0:
                read = False
            drawn.window(drawn.read)[...] = triangle & read
            if alone:
                drawn.window(drawn.written)[...] = triangle
            if self.name in ("herk", "her2k", "hemm") and part.shape[0] == part.shape[1]:
                np.fill_diagonal(part, part.diagonal().real)
            if word == "A" and self.name in ("trmm", "trsm", "trtri", "potrs"):
                part /= max(1, len(part))
                np.fill_diagonal(part, 1 + np.abs(part.diagonal()))
            if self.name == "potrf":
                part[...] = (part @ part.conj().T) / max(1, len(part)) + np.eye(len(part))
        self.fail()

    def fail(self) -> None:
        """Make every fifth matrix one that is not positive definite, or singular."""
        part, n = self.matrices["A"].window(self.matrices["A"].whole), self.values["n"]
        fails = self.name == "potrf" or (self.name == "trtri" and self.letter("diag") == "N")
        if fails and n and not self.rng.integers(5):
            self.info = int(self.rng.integers(1, n + 1))
            part[self.info - 1, self.info - 1] = -1 if self.name == "potrf" else 0

    def triangle(self, word: str, shape: tuple[int, int]) -> np.ndarray:
        """Elements of a part that the routine may read or writes."""
        of_triangle = "C" if "k" in self.values else "A"
        if "uplo" not in self.values or word != of_triangle:
            return np.ones(shape, bool)
        found = np.tri(*shape, 0 if self.letter("diag") == "N" else -1, bool)
        return found if self.letter("uplo") == "L" else found.T

    def ours(self) -> dict[str, np.ndarray]:
        """Call pmm3d. Return the arrays of this rank."""
        arrays = {word: each.own(np.where(each.read, each.whole, np.nan)) for word, each in self.matrices.items()}
        given: list[Any] = []
        for word in FORMS[self.name].split():
            if word.isupper():
                given += [arrays[word], self.matrices[word].i, self.matrices[word].j, self.matrices[word].ours]
            else:
                given.append(self.values[word])
        self.infos.append(getattr(pmm3d, f"p{self.name}")(*given) or 0)
        return arrays

    def theirs(self, scalapack: Scalapack, everyone: Blacs) -> dict[str, np.ndarray]:
        """Call ScaLAPACK. Return the arrays of this rank."""
        arrays = {word: each.own(each.whole) for word, each in self.matrices.items()}
        if self.name == "gemr2d":
            given = [self.values["m"], self.values["n"], *self.passed("A", arrays), *self.passed("B", arrays)]
            scalapack.run("gemr2d", self.dtype, *given, everyone.number)
        elif self.on.theirs.number >= 0:
            copies = {word: self.copied(scalapack, word, arrays) for word in arrays} if self.name in WITH_INFO else {}
            given = []
            for word in FORMS[self.name].split():
                if word in copies:
                    given += copies[word]
                elif word.isupper():
                    given += self.passed(word, arrays)
                else:
                    given.append(self.factor(word) if word in ("alpha", "beta") else self.values[word])
            name = IN_THEIRS["complex" if self.complex else "float"].get(self.name, self.name)
            self.infos.append(scalapack.run(name, self.dtype, *given))
            for word, copy in copies.items():
                sizes = self.matrices[word].rows, self.matrices[word].cols
                back = *copy, *self.passed(word, arrays), self.on.theirs.number
                scalapack.run("gemr2d", self.dtype, *sizes, *back)
        return arrays

    def passed(self, word: str, arrays: dict[str, np.ndarray]) -> list[Any]:
        return [arrays[word], self.matrices[word].i, self.matrices[word].j, self.matrices[word].theirs]

    def factor(self, word: str) -> np.ndarray:
        real = (self.name, word) in REAL_FACTORS
        return np.array([self.values[word]], np.finfo(self.dtype).dtype if real else self.dtype)

    def copied(self, scalapack: Scalapack, word: str, arrays: dict[str, np.ndarray]) -> list[Any]:
        """A copy of a part in square blocks that begin on process (0, 0)."""
        drawn, blacs = self.matrices[word], self.on.theirs
        size = max(1, drawn.rows), max(1, drawn.cols)
        made = self.on.ours.descriptor(*size, 5, 5)
        array = np.zeros((max(1, made.local_rows), max(1, made.local_cols)), self.dtype, "F")
        descriptor = blacs.descriptor(*size, 5, 5, 0, 0, len(array))
        copy = [array, 1, 1, descriptor]
        scalapack.run("gemr2d", self.dtype, drawn.rows, drawn.cols, *self.passed(word, arrays), *copy, blacs.number)
        return copy

    def error(self, ours: dict[str, np.ndarray], theirs: dict[str, np.ndarray]) -> float:
        """The largest difference in units of rounding; infinity if an element was changed that must not be written, or
        is no number."""
        alpha, beta = (abs(self.values.get(name, 1)) for name in ("alpha", "beta"))
        terms = (2 if self.name in ("syr2k", "her2k") else 1) * (2 if self.complex else 1)
        sums = 0 if self.name == "gemr2d" else max(1, *self.shape("A")) * terms
        unit, worst = float(np.finfo(self.dtype).eps) * (alpha * sums + beta + 1), 0.0
        for word, drawn in self.matrices.items():
            before, written = drawn.own(np.where(drawn.read, drawn.whole, np.nan)), drawn.own(drawn.written, 0)
            kept = ours[word][~written].tobytes() == before[~written].tobytes()
            apart = np.abs(ours[word] - theirs[word])[written].max(initial=0) if not self.info else 0
            worst = max(worst, float(apart) / unit if kept and np.isfinite(apart) else np.inf)
        return worst if {*self.infos} <= {self.info} and (worst == 0 or sums) else np.inf


def divide_small_matrices() -> None:
    for name, constants in SMALLER.items():
        module = import_module(f"pmm3d.linalg.{name}")
        for constant, value in constants.items():
            assert hasattr(module, constant), f"{name} has no {constant}"
            setattr(module, constant, value)


def main() -> int:
    comm, scalapack = MPI.COMM_WORLD, Scalapack()
    cases, rng, names = int(sys.argv[1]), np.random.default_rng(int(sys.argv[2])), sys.argv[3:] or [*FORMS]
    divide_small_matrices()
    in_place: Any = import_module("pmm3d.linalg.stationary")
    small = in_place.SMALL
    everyone = scalapack.context(comm, (1, comm.size))
    contexts = [Contexts.drawn(scalapack, comm, rng) for _ in range(6)]
    worst, wrong, calls = 0.0, list[str](), Counter[str]()
    for _ in range(cases):
        one, other = (contexts[number] for number in rng.integers(0, len(contexts), 2))
        in_place.SMALL = small * int(rng.integers(2))  # 0: some small products are divided and moved
        case = Case(str(rng.choice(names)), rng, one, other)
        error = case.error(case.ours(), case.theirs(scalapack, everyone))
        calls[case.name] += 1
        worst = max(worst, error)
        if not error <= ROUNDINGS:
            wrong.append(f"{error:.3g} roundings: {case}")
    found = comm.gather((worst, wrong))
    if comm.rank == 0:
        print(", ".join(f"{name} {number}" for name, number in sorted(calls.items())))
        for rank, (_, texts) in enumerate(found):
            for text in texts[:5]:
                print(f"rank {rank}: {text}")
        bad = sum(len(texts) for _, texts in found)
        print(f"{bad} are wrong" if bad else f"{cases} cases agree to {max(each for each, _ in found):.2g} roundings")
    all_wrong = comm.allreduce(len(wrong))
    for each in contexts:
        each.close()
    everyone.close()
    return int(all_wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
