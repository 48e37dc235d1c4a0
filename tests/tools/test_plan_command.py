"""pmm3d plan product and plan gpt: output, pictures, files, and errors."""

import re
from dataclasses import replace

import pytest
from loops import looped
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from planned import figures_of, invoked, planned, refused

from pmm3d.comm import machine_cache
from pmm3d.layout import GridShape
from pmm3d.model.axonn import rank_by_axonn
from pmm3d.model.candidates import Candidate, Ranking
from pmm3d.model.gpt import GPT
from pmm3d.model.machines.reading import as_toml, load
from pmm3d.model.product_costs import ProductCosts
from pmm3d.model.schedule import all_reduce
from pmm3d.nn.training.dry_step import DrySteps
from pmm3d.tools import output
from pmm3d.tools.plan.curves import AS_IT_IS, Curve, Point, draw_curves
from pmm3d.tools.plan.options import chosen_machine
from pmm3d.tools.plan.ranking import _memory, _times, choice, draw, hidden_lines, shown_of
from pmm3d.tools.plots import draw_schedules
from pmm3d.tools.terminal import JOINT

pytestmark = pytest.mark.usefixtures("nothing_measured")
SMALL = tuple("gpt --layers 2 --hidden 64 --sequence 32 --batch 32 --heads 4 --vocabulary 128".split())
CUBE = ("product", "--m", 8, "--n", 8, "--k", 8)
OF_ISSUE = (
    "gpt --layers 42 --hidden 12288 --sequence 2048 --batch 256 --ranks 1024 --min-tensor 64 --machine "
    "perlmutter --terms axonn --order y,x,z,data --powers-of-two"
).split()


def counts_of(said):
    """The number of grids that are shown, and the numbers of the others by reason."""
    [shown] = re.findall(r"^Shown: ([\d,]+) of", said, re.M)
    others = re.findall(r"^  ([\d,]+): ", said[said.index("Shown: ") :], re.M)
    return [int(each.replace(",", "")) for each in (shown, *others)]


@pytest.fixture
def drawn(monkeypatch):
    """The figures that are saved."""
    figures = []
    monkeypatch.setattr(Figure, "savefig", lambda self, *names, **options: figures.append(self))
    return figures


def test_no_title_of_a_picture_is_cut(tmp_path, drawn):
    long_name = "a step of " + "a long name " * 10 + "on a machine"
    one = Candidate(GridShape(2, 2, 2), 1.0, {"gemm": 1.0})
    draw(Ranking(long_name, 8, [one], [], 1.0, "float32", 1), 3, "frontier", tmp_path / "plan.png")
    draw_curves([Curve("strong", [])], long_name, tmp_path / "curves.png")
    assert len(drawn) == 2
    for figure in drawn:
        FigureCanvasAgg(figure).draw()
        titles = [axes.title for axes in figure.axes] + [figure._suptitle] * bool(figure._suptitle)
        assert any(title.get_text() for title in titles)
        for box in (title.get_window_extent() for title in titles):
            assert box.x0 >= 0 and box.x1 <= figure.bbox.width and box.y1 <= figure.bbox.height


def test_lines_are_drawn_between_nodes_only(tmp_path, drawn):
    tables, line_of_each_rank = [all_reduce(64, 8, rank, per_node=4) for rank in range(8)], 8
    for per_node, between in ((0, 0), (4, 1), (2, 3)):
        draw_schedules(tables, tmp_path / "nodes.svg", per_node)
        [panel] = drawn.pop().axes
        across = [line for line in panel.lines if list(line.get_xdata()) == [0, 1]]
        assert len(across) == line_of_each_rank + between


def test_lines_that_coincide_are_drawn_as_one_and_named_after_all(tmp_path, drawn):
    seconds = {AS_IT_IS: 1.0, "no oar": 1.0, "no ors": 2.0, "no oag": 4.0, "no buckets": 1.004, "none": 4.0}
    draw_curves([Curve("strong", [Point(1, 8, GridShape(1, 1, 1), seconds)])], "a step", tmp_path / "curves.png")
    [panel] = drawn[0].axes
    assert [(line.get_label(), list(line.get_ydata())) for line in panel.lines] == [
        ("as configured = no oar = no buckets", [100.0]),
        ("no ors", [50.0]),
        ("no oag = none", [25.0]),
    ]


def test_the_command_of_the_paper(tmp_path):
    path = tmp_path / "plan.json"
    written = figures_of(path, *OF_ISSUE)
    ranking = rank_by_axonn(
        GPT(42, 12288, 2048, 256), 1024, load("perlmutter").axonn, powers_of_two=True, min_tensor=64
    )
    assert [(each["grid"], each["seconds"]) for each in written] == [
        (candidate.grid._asdict(), candidate.seconds) for candidate in ranking.candidates
    ]
    assert len(written) == 215 and list(written[0]["grid"]) == ["x", "y", "z", "data"]
    assert written == sorted(written, key=lambda each: each["seconds"])
    assert list(written[0]) == ["grid", "seconds", "terms", "preset", "schedule", "settings"], "no memory is predicted"
    said = planned(*OF_ISSUE)
    assert "Machine perlmutter (asked for; figures assumed, not measured)" in said and "AxoNN's authors" in said
    assert "of 286 grids" in said and "ddp: x y z = 1 is less than min-tensor = 64" in said
    assert sum(counts_of(said)) == 286
    assert "Choice: 2x8x64, 3.28 s of collectives in a step" in said
    assert figures_of(path, *OF_ISSUE, "--order", "data,z,x,y")[0]["seconds"] != written[0]["seconds"]


def test_a_gpt_by_simulation(tmp_path):
    path, picture = tmp_path / "plan.json", tmp_path / "plan.png"
    options = ("--ranks", 8, "--machine", "frontier", "--top", 3)
    written = figures_of(path, *SMALL, *options, "--plot", picture)
    assert len(written) >= 3 and picture.read_bytes().startswith(b"\x89PNG")
    for each in written:
        assert sum(each["terms"].values()) == pytest.approx(each["seconds"])
        assert sum(each["memory"].values()) < 64e9 and each["bytes"] > 0
    said = planned(*SMALL, *options)
    for row in (r"ddp\b", r"fsdp\b", r"hsdp\b", r"megatron\b", r"sharded +megatron\+sp\b"):
        assert re.search(rf"^ .*\b{row}", said, re.M)
    assert sum(counts_of(said)) == 20


def test_a_mixture_of_experts(tmp_path):
    path = tmp_path / "plan.json"
    options = ("--experts", 4, "--top-k", 1, "--expert-mlp", 64, "--ranks", 4, "--machine", "frontier", "--top", 5)
    written = figures_of(path, *SMALL, *options)
    assert {each["grid"].get("expert", 1) for each in written} == {1, 2, 4}
    assert all(each["memory"]["experts"] > 0 for each in written)
    said = planned(*SMALL, *options)
    assert "(data 4, expert 4)" in said and "Routing is assumed to be even: each of 4 experts" in said
    assert sum(counts_of(said)) == int(re.findall(r"of ([\d,]+) grids", said)[0])
    assert "Routing" not in planned(*SMALL, "--ranks", 4, "--machine", "frontier")


def test_a_product_with_its_bytes_over_the_bound():
    sides = ("--m", 4096, "--n", 4096, "--k", 4096)
    said = planned("product", *sides, "--ranks", 64, "--dtype", "float32", "--machine", "perlmutter")
    assert re.search(r"4x4x4 .* 1\.00 ", said) and "4096 x 4096 x 4096 float32" in said and "Choice: 4x4x4" in said


def test_a_machine_that_was_measured_here_is_the_first_choice(monkeypatch):
    own = replace(load("frontier"), name="own")
    one = replace(own, key={**machine_cache.key_of(8, 1), "threads": "1"})
    machine_cache.remember_machine(one.key, as_toml(one))
    chosen = chosen_machine(None, 8, None)
    assert (chosen.machine.name, chosen.why) == ("own", "measured here")
    chosen = chosen_machine(None, 16, None)
    assert chosen.machine.name == "nominal" and "the measured machine is one node with 8 ranks" in chosen.why
    several = replace(own, name="several", key=machine_cache.key_of(8, 2))
    machine_cache.remember_machine(several.key, as_toml(several))
    assert chosen_machine(None, 16, None).machine.name == "several"
    assert chosen_machine(None, 16, 4).machine.name == "nominal"
    assert chosen_machine("frontier", 16, 4).machine.ranks_per_node == 4
    monkeypatch.setenv("PMM3D_MACHINE", "alps")
    assert chosen_machine(None, 16, None)[:2] == (load("alps"), "named by PMM3D_MACHINE; figures assumed, not measured")


def test_a_machine_of_a_file(tmp_path):
    path = tmp_path / "own.toml"
    path.write_text(as_toml(load("frontier")).replace('name = "frontier"', 'name = "own"'))
    assert "Machine own (asked for)" in planned(*SMALL, "--ranks", 8, "--machine", path)
    path.write_text(path.read_text().replace("ranks_per_node = 8", "ranks_per_node = -8"))
    assert "ranks_per_node" in refused(*SMALL, "--ranks", 8, "--machine", path)


UNANSWERABLE = [
    ((*SMALL, "--order", "y,x,z,data"), "--order has no effect with --terms full: leave it out, or take --terms axonn"),
    ((*SMALL, "--min-tensor", 2), "--min-tensor has no effect with --terms full"),
    ((*SMALL, "--powers-of-two"), "--powers-of-two has no effect with --terms full"),
    ((*SMALL, "--top-k", 2), "--top-k is for a mixture of experts: give --experts too"),
    ((*SMALL, "--terms", "axonn", "--experts", 4), "--experts has no effect with --terms axonn"),
    ((*SMALL, "--experts", 4, "--top-k", 5), "top_k"),
    ((*SMALL, "--vocabulary", 0), "--vocabulary 0 leaves out embedding and logits"),
    (("gpt", "--layers", 2, "--hidden", 48, "--sequence", 8, "--batch", 8), "give --heads: the default, hidden /"),
    ((*SMALL, "--terms", "axonn", "--micro-batches", 2), "--micro-batches has no effect with --terms axonn"),
    ((*SMALL, "--terms", "axonn", "--order", "y,x", "--machine", "frontier"), "name each axis once"),
    ((*SMALL, "--terms", "axonn", "--memory", 9, "--machine", "frontier"), "--memory has no effect with --terms axonn"),
    ((*SMALL, "--terms", "axonn", "--machine", "alps"), "machine alps has no table [axonn]"),
    ((*SMALL, "--machine", "summit"), "no machine is named 'summit': assumed machines are alps, f"),
    ((*SMALL, "--machine", "frontier", "--memory", 10**6), "ranks are enough, as"),
    ((*SMALL, "--machine", "frontier", "--batch", 65, "--micro-batches", 2), "batch = 65 must be a multiple"),
    ((*CUBE, "--memory", 10), "ranks keeps m, n, k = (8, 8, 8)"),
    ((*SMALL, "--tokens", "nan"), "--tokens must be at least 1, got nan"),
    ((*SMALL, "--terms", "axonn", "--tokens", "1e9"), "--tokens has no effect with --terms axonn"),
    ((*SMALL, "--json", "none/x.json"), "cannot write none/x.json"),
    ((*CUBE, "--plot", "x.mp3"), "the name of a picture ends in one of"),
]


@looped("arguments, words", UNANSWERABLE)
def test_what_cannot_be_answered_is_said_in_a_line(arguments, words):
    assert words in refused(*arguments, "--ranks", 4)


TOO_LARGE = [
    (("product", "--m", 10, "--n", 5, "--k", 5, "--ranks", 99_999_999_999), "1048576"),
    (("product", "--m", 2**41, "--n", 5, "--k", 5, "--ranks", 4), str(2**40)),
    ((*SMALL, "--ranks", 2**21), "1048576"),
    (("gpt", "--layers", 2**41, "--hidden", 64, "--sequence", 8, "--batch", 8, "--ranks", 4), str(2**40)),
    (("train", "x.toml", "--ranks", 2**21), "1048576"),
    (("pipeline", "--ranks", 2**21, "--micro-batches", 4), "1048576"),
    (("pipeline", "--ranks", 1024, "--micro-batches", 1024), "262,144"),
]


@looped("arguments, limit", TOO_LARGE)
def test_sizes_have_limits(arguments, limit):
    done = invoked(*arguments)
    assert done.exit_code == 2 and limit in done.output and "Traceback" not in done.output, done.output
    assert not isinstance(done.exception, MemoryError)


def test_progress_counts_the_grids(monkeypatch):
    monkeypatch.setattr(output, "QUIET_SECONDS", 0.01)
    monkeypatch.setattr(output, "LINE_SECONDS", 0.01)
    done = invoked(*SMALL, "--ranks", 4, "--machine", "frontier")
    assert done.exit_code == 0 and re.search(r"^pmm3d plan gpt: [0-9]+ of [0-9]+ grids, ", done.stderr, re.M)
    assert "pmm3d plan" not in done.stdout


def test_other_ranks_are_silent():
    assert planned(*SMALL, "--ranks", 8, OMPI_COMM_WORLD_RANK="3", OMPI_COMM_WORLD_SIZE="4") == ""


def test_presets_are_shown_wherever_they_stand():
    def candidate(x, data, seconds, preset=""):
        return Candidate(GridShape(x, 1, 1, data), seconds, preset=preset)

    best = [
        candidate(2, 4, 1.0),
        candidate(4, 2, 1.2, "megatron"),
        candidate(8, 1, 3.0, "megatron"),
        candidate(1, 8, 3.5, "ddp"),
    ]
    why_not = [Candidate(GridShape(1, 1, 4), 0.0, preset="fsdp", why_not="idle")] + [
        Candidate(GridShape(1, 1, 8), 0.0, memory={"work": nbytes}, preset="fsdp", why_not=reason)
        for nbytes, reason in ((9, "larger"), (8, "too large"))
    ]
    ranking = Ranking("it", 8, best, why_not, 1.0, "float32", 5)
    shown = shown_of(ranking, 1)
    assert shown.best == best[:1] and shown.presets == [best[3], best[1]]
    assert shown_of(ranking, 2).presets == [best[3]]
    assert choice(ranking, "a step", 4) == (
        "Choice: 2x1x1 (data 4), 1 s a step; the runner-up, 4x1x1 (data 2), takes 20% longer"
    )


def test_each_grid_that_is_not_shown_is_counted_under_a_reason():
    """The example of a reason is the grid of least memory of a preset that has no candidate."""
    grids = [GridShape(2, 1, 1, 4), GridShape(4, 1, 1, 2), GridShape(8, 1, 1)]
    ranked = [Candidate(grid, 1.0, preset="megatron") for grid in grids]
    twice = Candidate(grids[2], 0.0, memory={"work": 99}, preset="megatron+sp", why_not="holds 99 bytes")
    dropped = [
        Candidate(GridShape(1, 1, 8), 0.0, preset="fsdp", why_not="4 rows are fewer than z = 8"),
        Candidate(GridShape(1, 1, 4, 2), 0.0, preset="hsdp", why_not="2 rows are fewer than z = 4"),
        Candidate(GridShape(1, 1, 1, 8), 0.0, memory={"work": 9}, preset="ddp", why_not="holds 9 bytes"),
    ]
    ranking = Ranking("it", 8, ranked, [twice, *dropped], 1.0, "float32", 20, {"too far": 3})
    assert [*hidden_lines(ranking, shown_of(ranking, 2))] == [
        "Shown: 2 of 20 grids. The others:",
        "  1: ranked lower (--top 3 shows them)",
        "  2: rows are fewer than z",
        "    1x1x8 fsdp: 4 rows are fewer than z = 8",
        "    1x1x4 (data 2) hsdp: 2 rows are fewer than z = 4",
        "  1: too much memory",
        "    1x1x1 (data 8) ddp: holds 9 bytes",
        "  3: too far",
        "  11: slower by a rough estimate, not priced",
        "  no megatron+sp is left: 8x1x1: holds 99 bytes",
    ]
    for dropped, said in (([], []), ([twice], ["  no megatron+sp is left: 8x1x1: holds 99 bytes"])):
        every = Ranking("it", 8, ranked, dropped, 1.0, "float32", 3)
        assert [*hidden_lines(every, shown_of(every, 3))] == said


@looped("sizes", [(16, 1, 128, 1), (16, 1, 128, 16), (8, 1, 32, 8)])
def test_a_table_of_long_names_is_one_table_on_80_columns(sizes):
    chosen = {"network.activations": "sharded", "network.recompute": "full"}
    grid = GridShape(*sizes, ulysses=2, seq=4, pipe=16) if sizes[3] == 16 else GridShape(*sizes, pipe=16)
    one = Candidate(grid, 1.0, {"gemm": 0.5, "x": 0.5}, {"work": 5}, 0, "megatron+sp", "", "interleaved-2", chosen)
    table = _times(ranking := Ranking("It", 8, [one], [], 1.0, "float32", 1), shown_of(ranking, 1), 1e12, None)
    found = table.table(False, 80)
    assert found.fits(80) and found.names[-1] == "rest" and "peak %" not in found.names
    assert "peak %" in _times(ranking, shown_of(ranking, 1), 1e12, None).table(True, 80).names
    [memory] = _memory(2, ", limit 2 x 954 MiB", ranking, shown_of(ranking, 1))
    assert f"954{JOINT}MiB" in memory.title, "no line ends between the number and the unit"


STAGED = (*SMALL, "--ranks", 16, "--micro-batches", 4, "--machine", "frontier")


def test_a_plan_of_many_columns_has_two_tables_on_80_columns():
    """The terms without a column are added up, so that the rows still add up to the time."""
    said = planned(*STAGED, columns=80)
    assert len(re.findall("^ ─+$", said, re.M)) == 2 and "continued" not in said and "--wide prints all" in said
    heads = next(line for line in said.splitlines() if line.split()[:1] == ["grid"]).split()
    first = next(line for line in said.splitlines() if line.startswith(" 1 "))
    parts = [float(cell.replace(",", "")) for cell in re.split(" +", first)[-len(heads) + heads.index("%") + 1 :]]
    whole = float(re.split(" +", first)[-len(heads) + heads.index("%") - 2 + 1].replace(",", ""))
    assert heads[-1] == "rest" and sum(parts) == pytest.approx(whole, abs=len(parts))
    wide = invoked(*STAGED, "--wide", columns=80).stdout
    assert len(re.findall("^ ─+$", wide, re.M)) == 2 and "continued" not in wide
    for name in ("schedule", "activations", "recompute", "gemm", "pipe", "all", "batches"):
        assert re.search(rf"^ .* {name}\b", wide, re.M), name


def test_a_plan_of_a_gpt_says_how_long_a_training_takes(tmp_path):
    options = ("--ranks", 8, "--machine", "frontier")
    [first, *_] = figures_of(tmp_path / "plan.json", *SMALL, *options)
    rate = 32 * 32 / first["seconds"]
    said = planned(*SMALL, *options, "--tokens", "1e12")
    found = re.search(r"^([\d,]+) tokens a second: 1,000,000,000,000 tokens take ([\d.,]+) days$", said, re.M)
    assert int(found[1].replace(",", "")) == round(rate)
    assert float(found[2].replace(",", "")) == pytest.approx(1e12 / rate / 86400, rel=0.01)


def test_a_plan_says_what_a_rank_and_a_node_have():
    words = lambda *options: " ".join(planned(*SMALL, "--ranks", 8, "--ranks-per-node", 2, *options).split())
    said = words("--machine", "alps")
    assert "--ranks-per-node 2: the file of alps has 4. The rates and the memory of a rank do not change" in said
    assert "a rank: at most 989 TFLOP/s in bfloat16; 89.4 GiB of memory" in said
    assert "on a node of 2 such ranks, which has 358 GiB" in said, "all 4 modules of a node"
    said = words("--machine", "alps", "--memory", 10**9)
    assert said.count("a node of 2 such ranks, limit 2 x 954 MiB") == 2
    said = words("--machine", "nominal")
    assert "a rank: at most 100 GFLOP/s in bfloat16, as a CPU core; memory without a known limit" in said
    assert "the file of" not in said and "on a node of 2 such ranks;" in said


GPT_96 = "gpt --layers 96 --hidden 16384 --heads 128 --sequence 2048 --batch 8192".split()
CUBE_64K = "product --m 65536 --n 65536 --k 65536".split()


@pytest.mark.nightly
@pytest.mark.parametrize(
    "arguments, owner, name, least, most",
    [
        pytest.param(GPT_96, DrySteps, "each_of", 20, 250, marks=pytest.mark.thorough("some dry runs")),
        (CUBE_64K, ProductCosts, "timed", 50, 60),
    ],
)
def test_of_32768_ranks_few_grids_are_priced(monkeypatch, arguments, owner, name, least, most):
    """The time of a plan is bounded by their number."""
    calls, priced = [], getattr(owner, name)
    monkeypatch.setattr(owner, name, lambda *some, **options: (calls.append(1), priced(*some, **options))[1])
    assert "Choice: " in planned(*arguments, "--ranks", 32768, "--machine", "frontier")
    assert least <= len(calls) <= most
