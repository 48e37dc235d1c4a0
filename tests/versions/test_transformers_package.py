"""Networks of the transformers package, with random weights: both libraries give the same logits, in both directions,
on each grid. `make test-versions` installs the package."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from loops import given
from networks import spread
from on_disk import on_rank_0
from samples import to_numpy
from torch_reference import by_rank_0
from training_runs import run_here

from pmm3d import Grid, nn
from pmm3d.layout import Layout
from pmm3d.nn.exchange import export_torch

pytestmark = [pytest.mark.parallel([4]), pytest.mark.deadline(600)]

PROGRAM = Path(__file__).with_name("published.py")
NETWORKS = {
    **dict.fromkeys(("gpt2", "gpt2-untied"), nn.GPT),
    **dict.fromkeys(("llama", "llama-tied", "llama-linear", "llama-dynamic", "llama-yarn", "llama-3"), nn.Llama),
    **dict.fromkeys(("mistral", "qwen2", "qwen2-tied", "qwen3", "qwen3-tied"), nn.Llama),
    **dict.fromkeys(("mixtral", "qwen2-moe", "qwen3-moe", "olmoe"), nn.Llama),
}
GRIDS = {
    1: [((1, 1, 1), 1, {})],
    2: [((2, 1, 1), 1, {})],
    4: [
        ((1, 1, 1), 4, {}),
        ((4, 1, 1), 1, {}),
        ((1, 2, 2), 1, {}),
        ((2, 1, 1), 1, {"seq": 2}),
        ((2, 1, 1), 1, {"pipe": 2}),
    ],
}


def run(comm, word, folder):
    """Run the program, on rank 0. The folder of the tests has another module with the name of the package."""
    path = os.pathsep.join(folder for folder in sys.path if folder and Path(folder) not in PROGRAM.parents)
    by_rank_0(
        comm,
        lambda: (
            subprocess.run(
                [sys.executable, PROGRAM, word, folder],
                check=True,
                timeout=200,
                env={**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": path},
            )
            and None
        ),
    )


def logits_of(net, tokens):
    rows, grid = tokens.shape[1], net.grid
    axes = tuple(axis for axis in ("data", "z", "seq") if axis in grid.shape.names)
    with net.evaluating():
        out = net(spread(grid, tokens.reshape(-1, 1), Layout(axes, units=(rows, 1))))
    return to_numpy(out.gather()).reshape(*tokens.shape, -1)


@pytest.mark.parallel([1, 2, 4])
def test_logits_and_generated_tokens_are_those_of_the_package(comm, shared_path):
    there, back = shared_path / "there", shared_path / "back"
    for folder in (there, back):
        folder.mkdir(exist_ok=True)
    run(comm, "make", there)
    tokens = np.load(there / "tokens.npy")
    for (name, kind), (number, (shape, data, axes)) in (
        (one, two) for one in NETWORKS.items() for two in enumerate(GRIDS[comm.size])
    ):
        with given(network=name, grid=shape, data=data, axes=axes), Grid(comm, shape, data, **axes) as grid:
            net = kind.load(grid, there / name)
            assert np.abs(logits_of(net, tokens) - np.load(there / f"{name}.npy")).max() < 1e-5
            generated = nn.generate(net, tokens, 6, temperature=0)
            assert np.array_equal(generated, np.load(there / f"{name}.generated.npy"))
            export_torch(net, back / f"{name}.{number}", names=kind.kind)
    if comm.rank == 0:
        shutil.copy(there / "tokens.npy", back)
    run(comm, "read", back)
    for name in NETWORKS:
        for number in range(len(GRIDS[comm.size])):
            found = np.load(back / f"{name}.{number}.npy")
            assert np.abs(found - np.load(there / f"{name}.npy")).max() < 1e-5, (name, number)


RUN = """
data = {{file = "text.h5", sequence = 32, batch_size = 4}}
network = {{kind = "{kind}", layers = 1, hidden = 32}}
optimizer.lr = 0.02
training = {{folder = "{kind}", steps = 80}}
"""
PROMPT = "zwölf cats 's "


def test_the_folder_of_an_exported_run_continues_a_prompt(comm, shared_path, monkeypatch):
    """By the network and the tokenizer in it, as `pmm3d generate` does."""
    monkeypatch.chdir(shared_path)
    folder, kinds = Path("published"), ("gpt", "llama")

    def write():
        folder.mkdir()
        (folder / "prompt.txt").write_text(PROMPT)
        Path("text.txt").write_text(f"{PROMPT}sat on a mat. " * 60)
        for kind in kinds:
            Path(f"{kind}.toml").write_text(RUN.format(kind=kind))

    on_rank_0(comm, write)
    commands = [("convert", "text", "text.txt", "text.h5")]
    for kind in kinds:
        generate = (
            "generate",
            kind,
            "--prompt",
            PROMPT,
            "--length",
            "12",
            "--temperature",
            "0",
            "--out",
            kind + ".txt",
        )
        commands += [("train", f"{kind}.toml"), ("export", kind, f"{folder}/{kind}"), generate]
    for words in commands:
        done = run_here(comm, *words)
        assert done.returncode == 0, done.stderr
    run(comm, "text", folder.absolute())
    for kind in kinds:
        assert (folder / f"{kind}.txt").read_text() == PROMPT + Path(f"{kind}.txt").read_text()
