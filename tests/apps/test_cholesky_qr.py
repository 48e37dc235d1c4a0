"""apps/cholesky_qr.py: its Q and R beside numpy's, well and ill conditioned, and what it refuses."""

import re
from pathlib import Path

import h5py
import numpy as np
import pytest

APPS = Path(__file__).parents[2] / "apps"


@pytest.fixture
def run(monkeypatch):
    """run(ranks, *options): what it prints."""
    monkeypatch.syspath_prepend(str(APPS))
    from measuring import on_ranks

    return lambda ranks, *options: on_ranks(ranks, [str(APPS / "cholesky_qr.py"), *map(str, options)])


def of_condition(rows, cols, condition, dtype):
    random = np.random.default_rng(1)
    drawn = lambda *shape: random.standard_normal(shape) + 1j * random.standard_normal(shape) * (dtype == "complex128")
    left, right = (np.linalg.qr(drawn(size, cols))[0] for size in (rows, cols))
    a = (left * np.geomspace(1, 1 / condition, cols)) @ right.conj().T
    return a if dtype == "complex128" else a.real.copy()


@pytest.mark.parametrize("ranks", [1, 2, 8])
@pytest.mark.parametrize("condition, dtype, how", [
    (10, "float64", "cholesky-qr2"), (1e12, "float64", r"shifted-cholesky-qr\d"), (1e11, "complex128",
                                                                                   r"shifted-cholesky-qr\d")])
def test_a_matrix_from_a_file(run, tmp_path, ranks, condition, dtype, how):
    a = of_condition(403, 17, condition, dtype)
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["A"] = a
    text = run(ranks, "--file", tmp_path / "a.h5", "A", "--check", "--out", tmp_path / "qr.h5")
    with h5py.File(tmp_path / "qr.h5") as file:
        q, r = file["Q"][()], file["R"][()]
    assert re.match(f"{how} on {ranks} ranks: A 403 x 17 {dtype}\n", text), text
    assert np.linalg.norm(q.conj().T @ q - np.eye(17)) < 1e-14 * np.sqrt(17)
    assert np.linalg.norm(a - q @ r) < 1e-14 * np.linalg.norm(a)
    assert np.array_equal(r, np.triu(r)) and (np.diag(r).real > 0).all()
    assert np.linalg.norm(abs(r) - abs(np.linalg.qr(a)[1])) < 1e-12
    (found,) = re.findall(r"^condition of A, that of R +(\S+)", text, re.M)
    assert float(found) == pytest.approx(condition, rel=0.05)
    assert text.endswith("right: True\n")


@pytest.mark.parametrize("options", [["--dtype", "float32"], ["--condition", 1e10, "--dtype", "complex128"],
                                     ["--cols", 1, "--method", "shifted-cholesky-qr3"]])
def test_random_matrices(run, options):
    assert run(4, "--rows", 300, "--cols", 20, "--check", *options).endswith("right: True\n")


@pytest.mark.parametrize("options, said", [
    (["--condition", 1e12, "--method", "cholesky-qr2"], "A^H A is not positive definite in float64 after 0 shifted"),
    (["--rows", 10], "A is 10 x 12; it must have at least as many rows as columns"),
    (["--grid", "2x1x1"], "leave --grid out"), (["--condition", 0.5], "--condition is at least 1"),
])
def test_what_it_cannot_do_it_says(run, options, said):
    from measuring import ProgramError

    with pytest.raises(ProgramError, match=re.escape(said)):
        run(2, "--rows", 200, "--cols", 12, *options)
