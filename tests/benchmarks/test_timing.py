"""benchmarks/timing.py: rounds in turns, ratios within a round, failing programs."""

import sys

import pytest
import timing


def test_rounds_are_interleaved_and_ratios_are_taken_within_a_round(capsys):
    order, clock = [], {"turn": 0}

    def contestant(name, factor):
        def run():
            order.append(name)
            if name == "broken":
                raise timing.ProgramError("it is broken")
            return {"seconds": [factor * (1 + 9 * (clock["turn"] == 1))] * 3}  # the second round is slow

        return run

    def after(runs):
        clock["turn"] += 1

    everyone = {name: contestant(name, factor) for name, factor in (("ours", 1), ("broken", 0), ("rival", 3))}
    runs, failed = timing.interleaved(everyone, 3, after)
    assert order == ["ours", "broken", "rival", "rival", "ours", "ours", "rival"]
    assert failed == {"broken": "it is broken"} and [*runs] == ["ours", "rival"] and clock["turn"] == 3
    assert timing.beside("ours", runs, ["rival"]) == ["1000.0 (1000.0 to 10000.0)", "3.000"]
    assert timing.beside("rival", runs, ["rival"]) == ["3000.0 (3000.0 to 30000.0)", ""]
    said = capsys.readouterr().err.splitlines()
    assert said[1] == "broken could not run: it is broken" and said[0].endswith("ms; 1 minute left")
    assert timing.in_minutes(61) == "2 minutes"


def test_a_program_that_fails_is_told_of_by_its_own_words():
    program = "import sys; sys.exit('pmm3d: LayoutError: too wide\\n' + 'the launcher: it ended\\n' * 9)"
    with pytest.raises(timing.ProgramError, match="ended with status 1: pmm3d: LayoutError: too wide$"):
        timing.output_of([sys.executable, "-c", program])


def test_rounds_begin_with_another_kind_and_the_first_one_does_not_count():
    order = []

    def measure(kind):
        order.append(kind)
        return {"seconds": float(len(order))}

    assert timing.all_rounds("ab", measure, 2) == {
        "a": [{"seconds": 4.0}, {"seconds": 5.0}],
        "b": [{"seconds": 3.0}, {"seconds": 6.0}],
    }
    assert order == ["a", "b", "b", "a", "a", "b"]
    order.clear()
    assert timing.in_turns("ab", measure, 2) == {"a": {"seconds": 4.5}, "b": {"seconds": 4.5}}
