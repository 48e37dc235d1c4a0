"""apps/newton_schulz.py: its factors beside scipy's, and what it refuses."""

import re
from pathlib import Path

import h5py
import numpy as np
import pytest
from scipy.linalg import polar

APPS = Path(__file__).parents[2] / "apps"


@pytest.fixture
def run(monkeypatch):
    """run(ranks, *options): what it prints."""
    monkeypatch.syspath_prepend(str(APPS))
    from measuring import on_ranks

    return lambda ranks, *options: on_ranks(ranks, [str(APPS / "newton_schulz.py"), *map(str, options)])


@pytest.mark.parametrize("ranks, grid", [(1, "1x1x1"), (4, "1x2x2"), (8, "2x2x2")])
@pytest.mark.parametrize("shape", [(31, 20), (17, 29)], ids=str)
def test_the_polar_factors_of_a_matrix_from_a_file(run, tmp_path, ranks, grid, shape):
    a = np.random.default_rng(2).standard_normal(shape)
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["A"] = a
    text = run(ranks, "--file", tmp_path / "a.h5", "A", "--grid", grid, "--check", "--out", tmp_path / "u.h5")
    with h5py.File(tmp_path / "u.h5") as file:
        u, h, steps = file["U"][()], file["H"][()], file.attrs["iterations"]
    expected = polar(a)
    assert abs(u - expected[0]).max() < 1e-12 and abs(h - expected[1]).max() < 1e-12 and np.array_equal(h, h.T)
    assert text.endswith("right: True\n") and f"{steps} iterations" in text
    errors = [float(error) for error in re.findall(r"^ +\d+  (?:cubic)? +(\S+)$", text, re.M)]
    assert len(errors) == steps + 1 and errors[-1] < 1e-13 and errors == sorted(errors, reverse=True)


def test_the_sign_of_a_matrix_from_a_file(run, tmp_path):
    random = np.random.default_rng(4)
    vectors = np.linalg.qr(random.standard_normal((23, 23)))[0]
    values = np.concatenate([random.uniform(-5, -0.1, 9), random.uniform(0.2, 3, 14)])
    a = vectors * values @ vectors.T
    np.save(tmp_path / "a.npy", (a + a.T) / 2)
    text = run(4, "--sign", "--file", tmp_path / "a.npy", "--check", "--out", tmp_path / "s.h5")
    with h5py.File(tmp_path / "s.h5") as file:
        assert abs(file["S"][()] - vectors * np.sign(values) @ vectors.T).max() < 1e-12
    assert "14 of 23" in text and text.endswith("right: True\n")


def test_muons_coefficients_save_steps(run):
    steps = []
    for quintic in (0, 8):
        text = run(2, "--rows", 40, "--condition", 1e5, "--quintic", quintic, "--check")
        assert text.endswith("right: True\n")
        steps.append(int(re.search(r"^(\d+) iterations", text, re.M).group(1)))
    assert steps[1] < steps[0] - 5


@pytest.mark.parametrize("options, said", [
    (["--sign", "--cols", 3], "--sign is of square matrices"), (["--condition", 0.1], "--condition is at least 1"),
    (["--file", "zeros.npy"], "polar: |X^2 - I|_F is 4.47 after 120 steps: A is singular, or nearly so"),
    (["--file", "upper.npy", "--sign"], "--sign is of symmetric (Hermitian) matrices")])
def test_what_it_cannot_do_it_says(run, options, said, tmp_path, monkeypatch):
    from measuring import ProgramError

    monkeypatch.chdir(tmp_path)
    np.save("zeros.npy", np.zeros((20, 20)))
    np.save("upper.npy", np.triu(np.ones((20, 20))))
    with pytest.raises(ProgramError, match=re.escape(said)):
        run(2, "--rows", 20, *options)
