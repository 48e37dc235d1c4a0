"""pmm3d.model.machines.reading: files of machines are read and written, and errors in them are reported."""

import os
import re
from dataclasses import fields
from itertools import product
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
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

ABOVE = ": must be a finite number above 0"
LEAST = ": must be a finite number of at least 0"
LIST = ": must be a list of finite numbers above 0"
WHOLES = ": must be a list of whole numbers above 0"

positive = st.floats(1e-300, 1e300)
not_negative = st.floats(0, 1e300)
whole = st.integers(1, 2**60)
texts = st.text(st.characters(codec="utf-8", exclude_categories=["Cc", "Cs"]), min_size=1).filter(str.strip)
laws = st.builds(Law, *[not_negative] * 6)


@st.composite
def points(draw):
    sizes = [*product(*(draw(st.lists(whole, min_size=1, max_size=2, unique=True)) for _ in "mnk"))]
    flops = draw(st.lists(positive, min_size=len(sizes), max_size=len(sizes)))
    return GemmPoints(*zip(*sizes), tuple(flops))


@st.composite
def rows(draw):
    kinds = draw(st.lists(st.tuples(st.sampled_from(OPERATIONS), st.integers(1, 4), st.integers(2, 9)), unique=True))
    found = []
    for kind in kinds:
        nbytes = sorted(draw(st.lists(whole, min_size=1, max_size=4, unique=True)))
        seconds = draw(st.lists(positive, min_size=len(nbytes), max_size=len(nbytes)))
        found.append(Measured(*kind, tuple(nbytes), tuple(seconds), draw(st.integers(0, 3))))
    return tuple(found)


def some(keys, values, **options):
    return st.dictionaries(st.sampled_from(keys), values, **options)


gemms = st.one_of(
    st.builds(Gemms, st.builds(GemmLaw, positive, not_negative)),
    st.builds(Gemms, st.none(), some(FORMS, points(), min_size=1)),
)
ranks = st.sampled_from(["1", "2", "8+"])
machines = st.builds(
    Machine, texts, st.integers(4, 2**60), st.integers(0, 2**60), some(MATRIX_DTYPES, positive),
    some(SECTIONS, texts), some(["inside", "across"], st.floats(0, 1)), not_negative, not_negative,
    st.dictionaries(texts, texts), some(MATRIX_DTYPES, gemms, min_size=1),
    st.builds(lambda default, others: {"default": default} | others, st.builds(Pass, not_negative, positive),
              st.dictionaries(texts, st.builds(Pass, not_negative, positive))),
    rows(), st.builds(lambda default, others: {"default": default} | others, laws, some(OPERATIONS, laws)),
    st.dictionaries(ranks, st.dictionaries(ranks, positive, min_size=1)),
    st.builds(InSteps, not_negative, *[st.floats(-1e300, 1e300)] * 2),
)  # fmt: skip


def refused(text):
    with pytest.raises(Pmm3dError) as info:
        machine_from(text, "here.toml")
    said = str(info.value)
    assert said.startswith("here.toml: ") and "\n" not in said
    return said.removeprefix("here.toml: ")


def changed(old, new):
    assert TEXT.count(old) == 1
    return TEXT.replace(old, new)


def test_every_figure_of_a_file_is_read():
    assert machine_from(TEXT, "here.toml") == MADE
    defaults = {field.name for field in fields(Machine) if getattr(MADE, field.name) in ({}, (), 0, 0.0, "")}
    assert not defaults


@settings(max_examples=30)
@given(machines)
def test_a_machine_that_is_written_and_read_is_the_same(machine):
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
    assert assumed_machines() == ["alps", "frontier", "nominal", "perlmutter"]
    assert load("nominal").memory == 0
    assert [load(name).ranks_per_node for name in ("alps", "frontier", "perlmutter")] == [4, 8, 4]
    assert [load(name).peak["bfloat16"] for name in ("alps", "frontier", "perlmutter")] == [989e12, 191.5e12, 312e12]


def test_the_authors_table_is_that_of_their_model():
    assert load("perlmutter").axonn["1"] == {"2": 76, "4": 225, "8+": 80}
    assert load("frontier").axonn["4"] == {"2": 36, "4+": 10}


def test_collectives_in_a_node_follow_from_the_table_of_axonn():
    found = {(row.operation, row.inside, row.stride): row for row in load("frontier").collectives}
    assert len(found) == 18 and {row.nodes for row in found.values()} == {1}
    assert found["all_reduce", 4, 2].seconds == (3.356e-05, 0.01391)  # 20 us, and 72 GiB/s
    assert load("frontier").with_ranks_per_node(4).collectives == ()


def test_a_file_is_read_by_its_path(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(TEXT)
    assert load(path) == load(str(path)) == MADE
    (tmp_path / "no suffix").write_text(TEXT)
    assert load(tmp_path / "no suffix") == MADE


@looped(
    "old, new, said",
    [
        ('name = "made up"\n', "", "name is missing"),
        ('name = "made up"', 'name = " "', "name = ' ': must be a text"),
        ("ranks_per_node = 4", "ranks_per_node = 4.5", "ranks_per_node = 4.5: must be a whole number of at least 1"),
        ("memory = 4e9", "memory = inf", "memory = inf: must be a whole number of at least 0"),
        ("noise = 0.02", "nosie = 0.02", "unknown key nosie (did you mean noise?)"),
        ("action = 1e-5", "action = -1e-5", "in_steps.action = -1e-05" + LEAST),
        ('gemm = "a clock"', 'gem = "a clock"', "unknown key sources.gem (did you mean gemm?)"),
        ("[peak]\nfloat64 = 5e10", "", "the section [peak] is missing"),
        ("inside = 0.5", "inside = 1.5", "hidden.inside = 1.5: must be a number from 0 to 1"),
        ("rate = 1e11", f"rate = 1{'0' * 400}", f"gemm.float32.rate = 1{'0' * 59}..." + ABOVE),
        (
            "rate = 1e11\noverhead",
            "rate = 1e11\noverhed",
            "gemm.float32.overhead is missing; unknown key gemm.float32.overhed (did you mean overhead?)",
        ),
        ("[gemm.float64.nn]", "[gemm.float64]\nrate = 1\n[gemm.float64.nn]", "unknown key gemm.float64.rate"),
        (
            "m = [64, 128]",
            "m = [64, 128, 256]",
            "[gemm.float64.nn] m, n, k, flops have 3, 2, 2, 2 entries; their numbers must be equal",
        ),
        ("m = [64, 128]", "m = [64, 64]", "[gemm.float64.nn] m, n, k: each m must occur once with each n and each k"),
        ("n = [64, 64]", "n = [64, 128]", "[gemm.float64.nn] m, n, k: each m must occur once with each n and each k"),
        ("m = [64, 128]", "m = []", "gemm.float64.nn.m = []" + WHOLES),
        ("flops = [1e10, 2e10]", "flops = [nan, 1]", "gemm.float64.nn.flops[0] = nan" + LIST),
        ('operation = "all_gather"', 'operation = "allgather"', "operation = 'allgather': must be one"),
        ("inside = 4", "inside = 1", "[collectives[0]] inside = 1, nodes = 1 is one rank, which sends nothing"),
        ("inside = 4", "inside = 5", "[collectives[0]] inside = 5 is more than ranks_per_node = 4"),
        (
            "bytes = [1024, 65536]",
            "bytes = [1024]",
            "[collectives[0]] bytes, seconds have 1, 2 entries; their numbers must be equal",
        ),
        ("bytes = [1024, 65536]", "bytes = [1024, 1024]", "[collectives[0]] bytes must ascend, each once"),
        ("[[collectives]]", "[collectives]", "must be sections, [[collectives]], or 'axonn'"),
        ("[laws.default]", "[laws.all_gather]", "the section [laws.default] is missing"),
        ('"8+"', '"8-"', "unknown key axonn.1.8- (known there: 4, 8+ for 8 and more)"),
        ("[axonn.1]\n2", "[axonn]\n2", "axonn.2 = 76.0: must be a section, [axonn.2]"),
    ],
)
def test_a_figure_that_is_wrong_is_named(old, new, said):
    assert said in refused(changed(old, new))


def test_all_that_is_wrong_is_said_at_once():
    said = refused(changed("memory = 4e9", "memory = -1").replace("float64 = 5e10", "float64 = inf"))
    assert said == f"memory = -1: must be a whole number of at least 0; peak.float64 = inf{ABOVE}"


def test_an_empty_file_names_all_that_is_needed():
    keys = [f"{key} is missing" for key in ("name", "ranks_per_node", "memory")]
    assert refused("").split("; ") == keys + [
        f"the section [{key}] is missing" for key in ("peak", "gemm", "passes", "laws")
    ]


def test_an_empty_section_names_what_it_needs():
    said = refused(TEXT[: TEXT.index("[gemm")] + "[gemm]\n[passes]\n[laws]\n")
    assert said == "the section [passes.default] is missing; the section [laws.default] is missing"
    assert refused(
        TEXT.replace("[gemm.float32]\nrate = 1e11\noverhead = 0\n", "[gemm]").replace(
            TEXT[TEXT.index("[gemm.float64.nn]") : TEXT.index("[passes.default]")], ""
        )
    ).startswith("[gemm] has no dtype")


@looped("key", ["peak", "gemm", "passes", "laws", "hidden", "axonn", "key", "sources"])
def test_a_value_where_a_section_belongs(key):
    assert f"{key} = 3: must be a section, [{key}]" in refused(f"{key} = 3")


def test_a_row_that_is_there_twice():
    start, end = TEXT.index("[[collectives]]"), TEXT.index("[laws.default]")
    assert "[collectives[1]] all_gather, inside = 4, nodes = 1 occurs twice" in refused(
        TEXT[:end] + TEXT[start:end] + TEXT[end:]
    )
    far = TEXT[start:end].replace("inside = 4", "stride = 2\ninside = 4")
    assert "[collectives[2]] all_gather, inside = 4, nodes = 1, stride = 2 occurs twice" in refused(
        TEXT[:end] + far + far + TEXT[end:]
    )


@looped("text", ["name = ", "[[[", "name = 'a'\nname = 'b'", f"memory = {'9' * 5000}", "[" * 5000])
def test_what_is_no_toml(text):
    with pytest.raises(Pmm3dError, match="^here.toml is not TOML: "):
        machine_from(text, "here.toml")


def test_a_name_that_is_not_known_lists_those_that_are():
    with pytest.raises(Pmm3dError, match="no machine is named 'permutter': assumed machines are alps, f"):
        load("permutter")


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(Pmm3dError, match=r"cannot read the machine .*none.toml: No such file"):
        load(tmp_path / "none.toml")
    with pytest.raises(Pmm3dError, match=r"cannot read the machine .*: Is a directory"):
        load(tmp_path)
    os.mkfifo(tmp_path / "pipe.toml")
    with pytest.raises(Pmm3dError, match="cannot read the machine .*: it is a named pipe"):
        load(tmp_path / "pipe.toml")
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(Pmm3dError, match="binary.toml is not TOML: "):
        load(tmp_path / "binary.toml")


def test_a_file_of_a_known_name_in_the_working_folder_is_not_taken_for_the_machine(tmp_path, monkeypatch):
    (tmp_path / "nominal").write_text(TEXT)
    monkeypatch.chdir(tmp_path)
    assert load("nominal").name == "nominal" and load("./nominal") == MADE


def test_the_file_of_the_page_is_read():
    page = (Path(__file__).parents[2] / "docs" / "machines.md").read_text()
    [text] = re.findall(r"^```toml\n(.*?)^```$", page, re.M | re.S)
    small = machine_from(text, "docs/machines.md")
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
