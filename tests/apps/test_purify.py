"""apps/purify.py: its density matrix beside eigh's, the numbers that it prints, and what it refuses."""

import re
from pathlib import Path

import h5py
import numpy as np
import pytest
from scipy.linalg import eigh

APPS = Path(__file__).parents[2] / "apps"


@pytest.fixture
def run(monkeypatch):
    """run(ranks, *options): what it prints."""
    monkeypatch.syspath_prepend(str(APPS))
    from measuring import on_ranks

    return lambda ranks, *options: on_ranks(ranks, [str(APPS / "purify.py"), *map(str, options)])


def projector(h, electrons):
    vectors = eigh(h)[1][:, :electrons]
    return vectors @ vectors.T


def printed(text, name) -> float:
    """The number beside it."""
    (found,) = re.findall(rf"^{re.escape(name)} +(\S+)", text, re.M)
    return float(found)


@pytest.mark.parametrize("ranks, grid", [(1, "1x1x1"), (2, "1x2x1"), (4, "2x1x2"), (8, "2x2x2")])
@pytest.mark.parametrize("method", [("sp2", "gershgorin"), ("mcweeny", "lanczos")], ids=lambda method: method[0])
def test_a_hamiltonian_from_a_file(run, tmp_path, ranks, grid, method):
    random = np.random.default_rng(3)
    vectors = np.linalg.qr(random.standard_normal((37, 37)))[0]
    levels = np.concatenate([random.uniform(-3, -1, 11), random.uniform(1, 4, 26)])
    h = vectors * levels @ vectors.T
    with h5py.File(tmp_path / "h.h5", "w") as file:
        file["some/H"] = (h + h.T) / 2
    text = run(ranks, "--file", tmp_path / "h.h5", "some/H", "--electrons", 11, "--method", method[0], "--bounds",
               method[1], "--grid", grid, "--check", "--out", tmp_path / "p.h5")
    with h5py.File(tmp_path / "p.h5") as file:
        p, facts = file["P"][()], dict(file.attrs)
    assert abs(p - projector(h, 11)).max() < 1e-10
    assert np.linalg.norm(p @ p - p) < 1e-10 and abs(np.trace(p) - 11) < 1e-9
    assert facts["electrons"] == 11 and facts["energy"] == pytest.approx(levels[:11].sum(), abs=1e-9)
    assert printed(text, "energy tr(P H)") == pytest.approx(levels[:11].sum(), abs=1e-8)
    for name, limit in (("|P^2 - P|_F", 1e-10), ("|tr P - 11|", 1e-9), ("max |P - P_exact|", 1e-9),
                        ("|H P - P H|_F / |H|_F", 1e-10)):
        assert printed(text, name) <= limit
    assert f"on grid {grid}: H 37 x 37" in text and text.endswith("right: True\n")
    assert printed(text, "products") > 0


@pytest.mark.parametrize("options, electrons", [
    (["--size", 90], 45), (["--size", 64, "--cubic", "--method", "mcweeny", "--mu", 0], 32),
    (["--size", 49, "--method", "mcweeny"], 25)])
def test_a_lattice_has_its_gap(run, options, electrons):
    text = run(2, *options, "--check")
    assert printed(text, f"|tr P - {electrons}|") <= 1e-9 and printed(text, "max |P - P_exact|") <= 1e-9


@pytest.mark.parametrize("options, said", [
    (["--size", 32, "--electrons", 0], "0 electrons in 32 states: at least 1"),
    (["--mu", 0], "--mu is for --method mcweeny"),
    (["--size", 16, "--delta", 0, "--disorder", 0, "--electrons", 8], "H has no gap at 8 electrons"),
    (["--size", 8, "--grid", "4x4x4"], "needs 64 ranks; the communicator has 2"),
])
def test_what_it_cannot_do_it_says(run, options, said):
    """The third is a lattice with 4 states at one energy, in the middle of the band."""
    from measuring import ProgramError

    with pytest.raises(ProgramError, match=re.escape(said)):
        run(2, *options)
