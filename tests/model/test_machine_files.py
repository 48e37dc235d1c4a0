"""pmm3d.model.machines.reading: files of machines are read and written, and errors in them are reported."""

import os
import re
from dataclasses import fields, replace
from itertools import product
from pathlib import Path

import pytest
from loops import looped

from pmm3d import Pmm3dError
from pmm3d.layout import MATRIX_DTYPES
from pmm3d.model.machines import Machine, as_toml, assumed_machines, load, machine_from
from pmm3d.model.machines.figures import FORMS, GemmLaw, GemmPoints, Gemms, InSteps, Measured, Pass
from pmm3d.model.machines.laws import OPERATIONS, Law
from pmm3d.model.machines.reading import SECTIONS

TEXT = """\
name = "made up"
ranks_per_node = 4
memory = 4e9
noise = 0.02
overhead = 1e-6

[key]
host = "Xeon"

[sources]
gemm = "a clock"

[peak]
float64 = 5e10

[hidden]
inside = 0.5

[gemm.float32]
rate = 1e11
overhead = 0

[gemm.float64.nn]
m = [64, 128]
n = [64, 64]
k = [32, 32]
flops = [1e10, 2e10]

[passes.default]
overhead = 1e-6
rate = 1e10

[passes."relu backward"]
overhead = 1e-6
rate = 2e10

[[collectives]]
operation = "all_gather"
inside = 4
nodes = 1
bytes = [1024, 65536]
seconds = [1e-5, 1e-4]

[laws.default]
start = 1e-5
message_inside = 1e-6
message_across = 2e-6
byte_inside = 1e-10
byte_across = 2e-10

[axonn.1]
2 = 76.0
"8+" = 80.0

[in_steps]
action = 1e-5
inside = -2e-5
across = 3e-4
"""

MADE = Machine(
    "made up", 4, 4_000_000_000, {"float64": 5e10}, {"gemm": "a clock"}, {"inside": 0.5}, 0.02, 1e-6, {"host": "Xeon"},
    {"float32": Gemms(GemmLaw(1e11, 0.0)),
     "float64": Gemms(None, {"nn": GemmPoints((64, 128), (64, 64), (32, 32), (1e10, 2e10))})},
    {"default": Pass(1e-6, 1e10), "relu backward": Pass(1e-6, 2e10)},
    (Measured("all_gather", 4, 1, (1024, 65536), (1e-5, 1e-4)),),
    {"default": Law(1e-5, 1e-6, 2e-6, 1e-10, 2e-10)}, {"1": {"2": 76.0, "8+": 80.0}},
    InSteps(1e-5, -2e-5, 3e-4),
)  # fmt: skip


def test_every_figure_of_a_file_is_read():
    assert machine_from(TEXT, "here.toml") == MADE
    assert all(getattr(MADE, field.name) for field in fields(Machine)), "each field of MADE differs from its default"


ODD = "quote \" ' \\ # [x] = \u00e9 \U0001f600"
ROWS = [Measured(operation, 3, 2, (1, 2**60), (5e-324, 1e300), 3) for operation in OPERATIONS]
POINTS = GemmPoints(*zip(*product((1, 2**60), (5, 7), (9,))), (1e-300, 0.1, 1e300, 3.0))


@looped(
    "changes",
    [
        {},
        {"name": ODD, "key": {ODD: ODD, "two words": "a"}, "sources": dict.fromkeys(SECTIONS, ODD)},
        {"memory": 0, "noise": 0.0, "overhead": 1e300, "hidden": {}, "key": {}, "sources": {}, "axonn": {}},
        {"collectives": tuple(ROWS), "ranks_per_node": 2**60, "in_steps": InSteps(0.0, -1e300, 5e-324)},
        {"gemms": dict.fromkeys(MATRIX_DTYPES, Gemms(None, dict.fromkeys(FORMS, POINTS)))},
        {"passes": {"default": Pass(0.0, 1e-300), ODD: Pass(0.1, 1e300)}, "peak": dict.fromkeys(MATRIX_DTYPES, 0.1)},
        {"laws": dict.fromkeys(("default", *OPERATIONS), Law(0.0, 0.1, 1e-300, 1e300, 5e-324, 0.25))},
    ],
)
def test_a_machine_that_is_written_and_read_is_the_same(changes):
    machine = replace(MADE, **changes)
    assert machine_from(as_toml(machine), "here.toml") == machine


@looped("name", assumed_machines())
def test_assumed_machines_name_the_source_of_each_section(name):
    machine = load(name)
    assert machine.name == name and machine_from(as_toml(machine), "copy") == machine
    held = {"peak", "gemm", "passes", "laws"}
    held |= {
        section
        for section in ("collectives", "hidden", "axonn", "memory", "noise", "overhead")
        if getattr(machine, section)
    }
    assert set(machine.sources) == held
    assert load(name) is machine


def test_assumed_machines():
    assert assumed_machines() == ("alps", "frontier", "nominal", "perlmutter")
    assert load("nominal").memory == 0
    assert [load(name).ranks_per_node for name in ("alps", "frontier", "perlmutter")] == [4, 8, 4]
    assert [load(name).peak["bfloat16"] for name in ("alps", "frontier", "perlmutter")] == [989e12, 191.5e12, 312e12]
    assert load("perlmutter").axonn["1"] == {"2": 76, "4": 225, "8+": 80}
    assert load("frontier").axonn["4"] == {"2": 36, "4+": 10}


def test_collectives_in_a_node_follow_from_the_table_of_axonn():
    found = {(row.operation, row.inside, row.stride): row for row in load("frontier").collectives}
    assert len(found) == 18 and {row.nodes for row in found.values()} == {1}
    assert found["all_reduce", 4, 2].seconds == (3.356e-05, 0.01391)  # 20 us, and 72 GiB/s
    assert load("frontier").with_ranks_per_node(4).collectives == ()


def test_a_file_is_read_by_its_path_and_a_file_of_a_known_name_is_not_that_machine(tmp_path, monkeypatch):
    for name in ("mine.toml", "nominal"):
        (tmp_path / name).write_text(TEXT)
        assert load(tmp_path / name) == load(str(tmp_path / name)) == MADE
    monkeypatch.chdir(tmp_path)
    assert load("nominal").name == "nominal" and load("./nominal") == MADE


@looped(
    "name, words", [("none.toml", "No such file"), ("", "Is a directory"), ("pipe", "named pipe"), ("x", "not TOML")]
)
def test_files_that_cannot_be_read_are_refused(tmp_path, name, words):
    if not (tmp_path / "pipe").exists():
        os.mkfifo(tmp_path / "pipe")
    (tmp_path / "x").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(Pmm3dError, match=f"{name}.*{words}"):
        load(tmp_path / name)


def test_a_name_that_is_not_known_lists_those_that_are():
    with pytest.raises(Pmm3dError, match="no machine is named 'permutter': assumed machines are alps, f"):
        load("permutter")


def changed(old, new):
    assert TEXT.count(old) == 1
    return TEXT.replace(old, new)


ROW = TEXT[TEXT.index("[[collectives]]") : TEXT.index("[laws.default]")]
SECTIONS_MISSING = [f"the section [{key}] is missing" for key in ("peak", "gemm", "passes", "laws")]
TYPOS = [
    ('name = "made up"\n', "", "name is missing"),
    ('name = "made up"', 'name = " "', "name = ' ': must be a text"),
    ("ranks_per_node = 4", "ranks_per_node = 4.5", "ranks_per_node = 4.5: must be a whole number"),
    ("memory = 4e9", "memory = inf", "memory = inf: must be a whole number"),
    ("noise = 0.02", "nosie = 0.02", "unknown key nosie (did you mean noise?)"),
    ("action = 1e-5", "action = -1e-5", "in_steps.action = -1e-05: must be a finite number of at least 0"),
    ('gemm = "a clock"', 'gem = "a clock"', "unknown key sources.gem (did you mean gemm?)"),
    ("[peak]\nfloat64 = 5e10", "", "the section [peak] is missing"),
    ("inside = 0.5", "inside = 1.5", "hidden.inside = 1.5: must be a number from 0 to 1"),
    ("rate = 1e11", f"rate = 1{'0' * 400}", f"gemm.float32.rate = 1{'0' * 59}...: must be a finite number above 0"),
    ("rate = 1e11\noverhead", "rate = 1e11\noverhed", "overhead is missing; unknown key gemm.float32.overhed"),
    ("[gemm.float64.nn]", "[gemm.float64]\nrate = 1\n[gemm.float64.nn]", "unknown key gemm.float64.rate"),
    ("m = [64, 128]", "m = [64, 128, 256]", "[gemm.float64.nn] m, n, k, flops have 3, 2, 2, 2 entries"),
    ("m = [64, 128]", "m = [64, 64]", "[gemm.float64.nn] m, n, k: each m must occur once with each n and each k"),
    ("n = [64, 64]", "n = [64, 128]", "[gemm.float64.nn] m, n, k: each m must occur once with each n and each k"),
    ("m = [64, 128]", "m = []", "gemm.float64.nn.m = []: must be a list of whole numbers above 0"),
    ("flops = [1e10, 2e10]", "flops = [nan, 1]", "gemm.float64.nn.flops[0] = nan: must be a list of finite numbers"),
    ('operation = "all_gather"', 'operation = "allgather"', "operation = 'allgather': must be one"),
    ("inside = 4", "inside = 1", "[collectives[0]] inside = 1, nodes = 1 is one rank"),
    ("inside = 4", "inside = 5", "[collectives[0]] inside = 5 is more than ranks_per_node = 4"),
    ("bytes = [1024, 65536]", "bytes = [1024]", "[collectives[0]] bytes, seconds have 1, 2 entries"),
    ("bytes = [1024, 65536]", "bytes = [1024, 1024]", "[collectives[0]] bytes must ascend"),
    ("[[collectives]]", "[collectives]", "must be sections, [[collectives]]"),
    ("[laws.default]", "[laws.all_gather]", "the section [laws.default] is missing"),
    ('"8+"', '"8-"', "unknown key axonn.1.8-"),
    ("[axonn.1]\n2", "[axonn]\n2", "axonn.2 = 76.0: must be a section, [axonn.2]"),
    ("[laws.default]", ROW + "[laws.default]", "[collectives[1]] all_gather, inside = 4, nodes = 1 occurs twice"),
    (
        "[laws.default]",
        2 * ROW.replace("inside", "stride = 2\ninside") + "[laws.default]",
        "[collectives[2]] all_gather, inside = 4, nodes = 1, stride = 2 occurs twice",
    ),
]
"""(old, new, words of the message) of a text with one fault."""
WRONG = [
    *((changed(old, new), words) for old, new, words in TYPOS),
    (
        changed("memory = 4e9", "memory = -1").replace("float64 = 5e10", "float64 = inf"),
        "memory = -1: must be a whole number of at least 0; peak.float64 = inf: must be a finite number above 0",
    ),
    ("", "; ".join(["name is missing", "ranks_per_node is missing", "memory is missing", *SECTIONS_MISSING])),
    (
        TEXT[: TEXT.index("[gemm")] + "[gemm]\n[passes]\n[laws]\n",
        "the section [passes.default] is missing; the section [laws.default] is missing",
    ),
    (TEXT[: TEXT.index("[gemm")] + "[gemm]\n" + TEXT[TEXT.index("[passes.default]") :], "[gemm] has no dtype"),
    *((f"{key} = 3", f"{key} = 3: must be a section, [{key}]") for key in ("peak", "gemm", "laws", "hidden", "key")),
    *((text, "is not TOML") for text in ("name = ", "[[[", "name = 'a'\nname = 'b'", f"m = {'9' * 5000}", "[" * 5000)),
]


@looped("text, words", WRONG)
def test_what_is_wrong_in_a_file_is_named(text, words):
    with pytest.raises(Pmm3dError, match=f"^here.toml.*{re.escape(words)}") as caught:
        machine_from(text, "here.toml")
    assert "\n" not in str(caught.value)


def test_the_file_of_the_page_is_read():
    docs = Path(__file__).parents[2] / "docs"
    page = (docs / "machines.md").read_text()
    [text] = re.findall(r"^```toml\n(.*?)^```$", (docs / "reference" / "machine-file.md").read_text(), re.M | re.S)
    small = machine_from(text, "machine-file.md")
    assert set(small.gemms) == {"float32", "float64"} and small.laws["default"].misfit == 0.1
    assert small.stands_for("complex64") == "float32" and len(small.collectives) == 1
    assert set(re.findall(r"^\| `(\w+)` \| [^|]+ \|$", page, re.M)) == set(assumed_machines())


def test_a_pass_that_the_library_does_not_have_is_named_once(caplog):
    text = TEXT.replace('[passes."relu backward"]', "[passes.rleu]")
    assert text != TEXT
    for _ in range(2):
        assert "rleu" in machine_from(text, "misspelt.toml").passes
    [said] = caplog.messages
    assert said.startswith("misspelt.toml: passes.rleu is not a pass of the library (did you mean relu?)")
    caplog.clear()
    machine_from(TEXT, "right.toml")
    assert not caplog.messages
