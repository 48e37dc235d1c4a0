"""pmm3d plan train --memory-picture, and the settings with which a step fits; the picture in pmm3d report."""

import json
import subprocess
import sys
from xml.etree import ElementTree

import h5py
import numpy as np
import planned as plans
import pytest

from pmm3d.layout import GridShape
from pmm3d.model.machines import load
from pmm3d.nn.training.config import load as load_config
from pmm3d.nn.training.samples import SampleSizes
from pmm3d.text import in_bytes
from pmm3d.tools.memory_picture import COLOURS
from pmm3d.tools.page.inputs import read_source
from pmm3d.tools.page.run_page import run_page
from pmm3d.tools.plan.memory import OTHER
from pmm3d.tools.plan.step import FirstRank, Training

pytest.importorskip("matplotlib")
pytestmark = pytest.mark.usefixtures("nothing_measured")
TOKENS = """
[data]
file = "nowhere.h5"
sequence = 32
batch_size = 8
[network]
kind = "gpt"
layers = 2
hidden = 64
heads = 4
"""


def texts_of(path):
    return [each.text for each in ElementTree.parse(path).getroot().iter("{http://www.w3.org/2000/svg}text")]


@pytest.fixture
def config(tmp_path):
    (tmp_path / "gpt.toml").write_text(TOKENS)
    return tmp_path / "gpt.toml"


OPTIONS = ("--ranks", 2, "--machine", "nominal", "--vocabulary", 512)


def test_the_memory_of_a_step_is_drawn_and_told(config, tmp_path):
    path, figures = tmp_path / "memory.svg", tmp_path / "plan.json"
    said = plans.planned("train", config, *OPTIONS, "--grid", "fsdp", "--memory-picture", path, "--json", figures)
    assert "Peak " in said and "cross_entropy.logits of layer 3.linear" in said and f"wrote {path}" in said
    memory = json.loads(figures.read_text())["memory"]
    totals = [sum(column) for column in zip(*memory["held"].values())]
    planned = sum(json.loads(figures.read_text())["grids"][0]["memory"].values())
    assert f"The plan counts {in_bytes(planned)}: also {OTHER}" in " ".join(said.split())
    assert (
        max(totals) == memory["peak"] == planned
        and path.stat().st_size < 50_000
        and memory["at"] == sorted(memory["at"])
    )
    drawn = texts_of(path)
    kinds = {"weights", "gradients", "state", "gathered weights", "activations"}
    assert kinds <= {*memory["held"]} & {*drawn} and {*memory["held"]} <= {*COLOURS, OTHER}
    assert "time in ms" in drawn and any(text.startswith("predicted: peak ") for text in drawn)


def test_a_pipeline_is_drawn_over_its_actions(config, tmp_path):
    config.write_text(TOKENS + "[grid]\npipe = 2\nmicro_batches = 4\n")
    said = plans.planned("train", config, *OPTIONS, "--grid", "1x1x1", "--memory-picture", tmp_path / "m.svg")
    assert "Peak " in said and "actions" in texts_of(tmp_path / "m.svg")


def test_a_plan_says_which_settings_fit(config, tmp_path):
    figures = tmp_path / "plan.json"
    plain, options = ("train", config, *OPTIONS, "--grid", "ddp"), ("--json", figures)
    held = sum(plans.figures_of(figures, *plain)["grids"][0]["memory"].values())
    said = plans.planned(*plain, *options, "--memory", held - 1000)
    assert "1x1x1 (data 2) fits with: " in said and "than without, which needs" in said
    written = json.loads(figures.read_text())
    found, first = written["grids"][0], written["first_rank"]
    step = Training.of(load_config(config), load("nominal"), held - 1000, SampleSizes(1, 512, True))
    of_settings = FirstRank.of(step, GridShape(1, 1, 1, 2), found["settings"]).as_json()
    assert first == json.loads(json.dumps(of_settings)) != FirstRank.of(step, GridShape(1, 1, 1, 2)).as_json()
    assert found["settings"] and sum(found["memory"].values()) < held
    assert all("." in key for key in found["settings"])
    assert "fits with" not in plans.planned(*plain, "--memory", "1 GiB")
    assert "is not a number of bytes of at least 1" in plans.invoked(*plain, "--memory", "1 GB").output


def test_a_picture_of_memory_is_refused_before_the_work(config, tmp_path):
    said = plans.refused("train", config, *OPTIONS, "--memory-picture", tmp_path / "memory.txt")
    assert "the name of a picture ends in one of" in said


def test_the_report_of_a_run_shows_the_recorded_step(tmp_path):
    """Predicted beside measured."""
    series = {"at": [0.0, 1.0], "held": {"weights": [5, 5], "activations": [1, 9]}, "peak": 14, "text": "Peak 14 B"}
    step = {"step": 3, "measured": {**series, "unit": "time in ms"}, "predicted": {**series, "unit": "actions"}}
    one = {"seconds": [1.0], "saving": [0.0], "peak_memory": [100], "waited": [0.0], "computed": {}, "off_core": [0.0]}
    memory = {name: [1] for name in ("weights", "gradients", "state", "work")}
    document = {"format": 1, "ranks": one, "moved": [], "memory": memory, "memory_step": step}
    (tmp_path / "run.json").write_text(json.dumps(document))
    page = run_page(read_source(tmp_path))
    [section] = [each for each in page.sections if each.title == "Memory of each rank"]
    assert section.text == "Peak 14 B"
    [figure] = section.figures
    for text in (
        "predicted: peak 14 B",
        "measured: peak 14 B",
        "share of the step's actions",
        "share of the step's time",
        "activations",
    ):
        assert f">{text}<" in figure.drawing


def test_a_run_records_the_memory_of_a_step_and_its_prediction(tmp_path):
    """Of one rank: equal to the byte. The other steps are not traced. A resumed run keeps the record, and says that
    the run ended before the step to trace."""
    with h5py.File(tmp_path / "data.h5", "w") as file:
        file["x"], file["y"] = np.ones((256, 32), "float32"), np.arange(256) % 3
    (tmp_path / "run.toml").write_text(
        '[data]\nfile = "data.h5"\nbatch_size = 128\n[network]\nhidden = [64, 64]\n'
        '[training]\nsteps = 4\ntrace_memory = 3\nfolder = "run"\n'
    )

    def trained(*options):
        command = [sys.executable, "-m", "pmm3d", "train", "run.toml", *options]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stderr
        return json.loads((tmp_path / "run" / "run.json").read_text())["memory_step"], done.stdout + done.stderr

    step, _ = trained()
    assert step["step"] == 3 and step["measured"]["peak"] == step["predicted"]["peak"] > 0
    assert step["measured"]["text"] == step["predicted"]["text"]
    text = (tmp_path / "run.toml").read_text()
    (tmp_path / "run.toml").write_text(text.replace("steps = 4\ntrace_memory = 3", "steps = 5\ntrace_memory = 9"))
    again, said = trained("--resume", "auto")
    assert again == step and "the memory of step 9 was not traced" in said
