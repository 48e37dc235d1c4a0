"""Tools of the tests: the faults of planted_faults.toml fit the package, and all process grids are listed."""

import ast
import tomllib
from pathlib import Path

from grids import process_grids
from loops import looped
from planted_faults import ROOT, essential, places_of, replaced

FAULTS = tomllib.loads((ROOT / "tests/planted_faults.toml").read_text())["fault"]


@looped("fault", FAULTS)
def test_each_fault_has_one_place_and_changes_it_to_valid_python(fault):
    text = (ROOT / fault["file"]).read_text()
    (place,) = places_of(fault["old"], text)
    changed = replaced(text, place, fault["new"])
    assert ast.dump(ast.parse(changed)) != ast.dump(ast.parse(text))


@looped("fault", FAULTS)
def test_named_tests_exist(fault):
    for test in fault["tests"]:
        name, _, function = test.partition("::")
        path = Path(ROOT / name)
        assert path.exists() and (not function or f"def {function.partition('[')[0]}(" in path.read_text()), test


def test_a_place_is_found_however_it_is_formatted():
    text = "if ready:\n    made = f(\n        'a',\n        (b + c),\n    )\n"
    assert places_of('f("a", (b + c))', text) == [(text.index("f("), len(text) - 1)]
    assert places_of("f", "off") == [(1, 2), (2, 3)] and places_of("f(b)", "f(b, c)") == []
    assert essential("(a, ),") == ("(a),", [0, 1, 4, 5])
    assert replaced("    one\n    two\n", (4, 7), "\nif x:\n    pass\n") == "    if x:\n        pass\n    two\n"


@looped("n", (1, 2, 6, 8, 12))
def test_process_grids_are_complete(n):
    cube = range(1, n + 1)
    assert process_grids(n) == [(x, y, z) for x in cube for y in cube for z in cube if x * y * z == n]
