"""pmm3d plan train --picture, and plan gpt: the simulated step as an SVG."""

from itertools import pairwise
from xml.etree import ElementTree

import planned as plans
import pytest

from pmm3d.layout import GridShape
from pmm3d.model.candidates import Candidate
from pmm3d.model.machines import load
from pmm3d.nn.training.config import checked
from pmm3d.nn.training.samples import SampleSizes
from pmm3d.tools.plan.schedules import COLOURS, REST
from pmm3d.tools.plan.step import FirstRank, Training
from pmm3d.tools.plan.step_picture import OF_PHASES, WAITS, _merged, draw_step
from pmm3d.tools.plan.trace import Span, spans_of

pytest.importorskip("matplotlib")
pytestmark = pytest.mark.usefixtures("nothing_measured")
SAMPLES = ("--features", "512", "--outputs", "256")


def training(**sections):
    data = {"file": "nowhere.h5", "batch_size": 1024}
    config = checked({"data": data, "network": {"hidden": [512, 256, 512]}, **sections})
    return Training.of(config, load("nominal"), samples=SampleSizes(512, 256))


def drawn(path):
    """(texts, fill colours) of an SVG."""
    root = ElementTree.parse(path).getroot()
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    styles = [each.get("style", "") for each in root.iter()]
    texts = [each.text for each in root.iter("{http://www.w3.org/2000/svg}text")]
    return texts, {style.split("fill: ")[1][:7] for style in styles if "fill: #" in style}


def test_the_step_has_a_lane_for_each_axis_and_colours_of_its_phases(tmp_path):
    grid, path = GridShape(2, 1, 2, 2), tmp_path / "step.svg"
    draw_step(training(), Candidate(grid, 1.0), path)
    texts, colours = drawn(path)
    lanes = ["compute", "axis x", "axis z", "axis data", "axis all"]
    assert [text for text in texts if text in lanes or text.startswith("axis ")] == lanes
    assert {"forward", "backward", REST, WAITS} <= {*texts} and "time in ms" in texts
    assert {OF_PHASES[name] for name in ("forward", "backward", REST, WAITS)} <= colours
    seconds = FirstRank.of(training(), grid).timeline.seconds
    assert f"First rank of grid 2x1x2 (data 2): a step of {1e3 * seconds:,.4g} ms on nominal" in texts
    assert "gemm" in texts and any("reduce" in text or "gather" in text for text in texts)


def test_phases_of_a_step_are_in_order():
    """Forward, backward, and the rest, in the time line of the first rank."""
    timeline = FirstRank.of(training(), GridShape(2, 1, 2, 2)).timeline
    phases = [span.phase for span in spans_of(timeline) if span.track == "compute"]
    assert [*dict.fromkeys(phases)] == ["forward", "backward", REST]
    assert all(phases.index(one) < phases.index(other) for one, other in pairwise(dict.fromkeys(phases)))


def test_short_spans_are_drawn_together():
    """Long ones keep their names, and nothing is left out."""
    spans = [Span(f"{number}", "compute", number, number + 1, "forward") for number in range(4000)]
    spans += [Span("long", "compute", 4000, 8000, "forward"), Span("last", "compute", 8000, 8001, "backward")]
    merged = _merged(spans, 8001)
    assert [(each.name, each.begun, each.ended) for each in merged] == [
        ("", 0, 4000),
        ("long", 4000, 8000),
        ("last", 8000, 8001),
    ]


def test_a_pipeline_has_a_lane_for_each_stage(tmp_path):
    path = tmp_path / "step.svg"
    grid = GridShape(1, 1, 1, 1, pipe=2)
    draw_step(training(grid={"micro_batches": 4}), Candidate(grid, 1.0, schedule="zb-h1"), path)
    texts, colours = drawn(path)
    assert [text for text in texts if text.startswith("rank ")] == ["rank 0", "rank 1"]
    assert {"forward", "backward: input", "backward: weights", REST} <= {*texts} and "time, in seconds" in texts
    assert COLOURS["forward"] in colours and "zb-h1" in "".join(texts)


def test_the_commands_draw_their_first_choice(tmp_path):
    config, path = tmp_path / "net.toml", tmp_path / "step.svg"
    config.write_text('[data]\nfile = "nowhere.h5"\nbatch_size = 64\n[network]\nhidden = [64, 64]\n')
    said = plans.planned("train", config, "--ranks", 2, *SAMPLES, "--machine", "nominal", "--picture", path)
    assert f"wrote {path}" in said and any(text.startswith("First rank of grid") for text in drawn(path)[0])
    model = ("--layers", 1, "--hidden", 64, "--sequence", 8, "--batch", 4, "--vocabulary", 32, "--ranks", 2)
    path.unlink()
    said = plans.planned("gpt", *model, "--machine", "nominal", "--picture", path)
    assert f"wrote {path}" in said and any(text.startswith("First rank of grid") for text in drawn(path)[0])


def test_a_picture_that_cannot_be_drawn_is_refused(tmp_path):
    config = tmp_path / "net.toml"
    config.write_text('[data]\nfile = "nowhere.h5"\n')
    said = plans.refused("train", config, "--ranks", 2, *SAMPLES, "--picture", tmp_path / "x.txt")
    assert "the name of a picture ends in one of" in said
    model = ("--layers", 1, "--hidden", 64, "--sequence", 8, "--batch", 4, "--ranks", 2)
    said = plans.refused("gpt", *model, "--terms", "axonn", "--picture", tmp_path / "x.svg")
    assert "--picture has no effect with --terms axonn" in said
