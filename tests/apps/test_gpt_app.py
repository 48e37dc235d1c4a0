"""apps/gpt: its text, and the training of its GPT."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import h5py
import pytest

from pmm3d.nn.training.config import load

APP = Path(__file__).parents[2] / "apps" / "gpt"
MINUTES = 10


@pytest.fixture
def folder(tmp_path):
    """A folder with a copy of the app and its text."""
    shutil.copytree(APP, tmp_path / "gpt", ignore=shutil.ignore_patterns("__pycache__"))
    subprocess.run([sys.executable, "gpt/text.py"], cwd=tmp_path, check=True, timeout=100)
    return tmp_path


def test_the_text_has_no_paragraph_twice(folder):
    texts = [(folder / f"runs/gpt/{name}.txt").read_text().split("\n\n") for name in ("text", "held")]
    every = [paragraph for text in texts for paragraph in text]
    assert len(every) == len(set(every)) > 1000 and len(texts[1]) > 50
    with h5py.File(folder / "runs/gpt/held.h5") as file:
        assert file["tokens"][()].tobytes() == (folder / "runs/gpt/held.txt").read_bytes()
    assert load(folder / "gpt/gpt.toml").network.of_tokens


@pytest.mark.thorough("ten minutes of two cores")
@pytest.mark.deadline(MINUTES * 60 + 200)
def test_held_out_topics_take_less_than_2_4_bits_a_byte(folder):
    def run(*arguments, seconds):
        command = [sys.executable, "-m", "pmm3d.launcher", "-n", "4", "-m", "pmm3d", *arguments]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=seconds)
        assert done.returncode == 0, done.stderr
        return done

    done = run("train", "gpt/gpt.toml", seconds=MINUTES * 60)
    lines = [json.loads(line) for line in (folder / "runs/gpt/metrics.jsonl").read_text().splitlines()]
    figures = [line["validation"]["bits_per_byte"] for line in lines if "validation" in line]
    assert figures[-1] < 2.4 and f"validation bits_per_byte: {figures[-1]:.4f}" in done.stdout
    sample = run("generate", "runs/gpt", "--prompt", "The list", "--length", "100", seconds=100).stdout
    assert "The list" in sample and len(sample) >= 100, sample
