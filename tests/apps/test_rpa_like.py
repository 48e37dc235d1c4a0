"""apps/rpa_like.py: its energy beside diagonalisation, the same on every number of ranks, and what it refuses."""

import re
from pathlib import Path

import pytest

APPS = Path(__file__).parents[2] / "apps"


@pytest.fixture
def run(monkeypatch):
    """run(ranks, *options): what it prints."""
    monkeypatch.syspath_prepend(str(APPS))
    from measuring import on_ranks

    return lambda ranks, *options: on_ranks(ranks, [str(APPS / "rpa_like.py"), *map(str, options)])


def test_the_energy_is_that_of_diagonalisation_on_any_ranks(run):
    energies = []
    for ranks in (1, 4, 6):
        text = run(ranks, "--aux", 23, "--pairs", 301, "--block", 5, "--check")
        assert text.endswith("right: True\n") and "NOT" not in text
        [(energy, coarse)] = re.findall(r"^E (\S+), with half of the frequencies (\S+)$", text, re.M)
        energies.append(float(energy))
        assert float(coarse) == pytest.approx(float(energy), rel=1e-3) and energy != coarse
    assert energies == pytest.approx(energies[:1] * 3, rel=1e-11) and energies[0] < -0.1


def test_too_few_frequencies_do_not_pass_for_right(run):
    from measuring import ProgramError

    with pytest.raises(ProgramError, match="status 1"):
        run(2, "--aux", 20, "--pairs", 200, "--points", 2, "--check")


@pytest.mark.parametrize("options, text", [(("--aux", 0), "are at least 1"), (("--grid", "1x1x2"), "chosen by pgemm")])
def test_what_it_refuses(run, options, text):
    from measuring import ProgramError

    with pytest.raises(ProgramError, match=f"status 2: .*{text}"):
        run(2, *options)
