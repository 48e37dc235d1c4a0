"""apps/measuring: what the benchmarks that compare in turns share."""

import os
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def measuring(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "apps"))
    import measuring

    return measuring


def test_rounds_are_interleaved_and_ratios_are_taken_within_a_round(measuring, capsys):
    order, clock = [], {"turn": 0}

    def contestant(name, factor):
        def run():
            order.append(name)
            if name == "broken":
                raise measuring.ProgramError("it is broken")
            return {"seconds": [factor * (1 + 9 * (clock["turn"] == 1))] * 3}  # the second round is slow for everyone

        return run

    def after(runs):
        clock["turn"] += 1

    everyone = {name: contestant(name, factor) for name, factor in (("ours", 1), ("broken", 0), ("rival", 3))}
    runs, failed = measuring.interleaved(everyone, 3, after)
    assert order == ["ours", "broken", "rival", "rival", "ours", "ours", "rival"]
    assert failed == {"broken": "it is broken"} and [*runs] == ["ours", "rival"] and clock["turn"] == 3
    assert measuring.beside("ours", runs, ["rival"]) == ["1000.0 (1000.0 to 10000.0)", "3.000"]
    assert measuring.beside("rival", runs, ["rival"]) == ["3000.0 (3000.0 to 30000.0)", ""]
    said = capsys.readouterr().err.splitlines()
    assert said[1] == "broken could not run: it is broken" and said[0].endswith("ms; 1 minute left")
    assert measuring.in_minutes(61) == "2 minutes"


def test_a_program_that_fails_is_told_of_by_its_own_words(measuring):
    program = "import sys; sys.exit('pmm3d: LayoutError: too wide\\n' + 'the launcher: it ended\\n' * 9)"
    with pytest.raises(measuring.ProgramError, match="ended with status 1: pmm3d: LayoutError: too wide$"):
        measuring.output_of([sys.executable, "-c", program], os.environ)
