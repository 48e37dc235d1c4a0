"""The pages: their programs run, links and file names exist, and the reference is complete."""

import contextlib
import io
import re
import tomllib
from dataclasses import fields
from importlib import import_module
from pathlib import Path
from types import FunctionType as Function
from urllib.parse import urlsplit

import h5py
import numpy as np
import pytest
from loops import looped
from networks import INPUT, spread
from training_runs import run_here
from typer.main import get_command

from pmm3d import Grid, nn
from pmm3d.model.environment import Settings
from pmm3d.nn.training.config import checked
from pmm3d.tools.commands import app

ROOT = Path(__file__).resolve().parent.parent.parent
DOCS = ROOT / "docs"
PAGES = sorted([*ROOT.glob("*.md"), *DOCS.rglob("*.md")])
LINK = re.compile(r"\]\(([^()\s]+)\)")
PROGRAM = re.compile(r"^```python\n(.*?)^```$", re.M | re.S)
FENCED = re.compile(r"^```.*?^```$", re.M | re.S)
BLOCK = re.compile(r"^```([\w{}-]*)[^\n]*\n(.*?)^```$|(?<=\n\n)((?:    [^\n]*\n)+)", re.M | re.S)
WIDTH = 88
"""Columns of code on the site. Blocks of the language text, the output of programs, are wrapped."""
OWN_FILE = re.compile(r"(?<![\w./-])(?:apps|benchmarks|docs|jobs|tests)/[\w./-]*\w")
COMMAND = re.compile(r"(?<![\w-])pmm3d ((?:tune |bench |plan |convert )?[a-z]+)([^`\n#]*)")
OPTION = re.compile(r"(?<!\S)--[a-z][a-z-]*")

four = pytest.mark.parallel([4])


def programs(page):
    """The complete programs on a page: Python that imports all names that it uses."""
    return [text for text in PROGRAM.findall((ROOT / page).read_text()) if "import" in text]


def anchors(page):
    """The anchors of a page: its headings, in the form of GitHub and of the site."""
    headings = re.findall(r"^#+ (.*)$", FENCED.sub("", page.read_text()), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def directives():
    """The directives of autodoc in the reference: (kind, path, options)."""
    text = "\n".join(page.read_text() for page in sorted((DOCS / "reference").glob("*.md")))
    return [
        (kind, path, dict(re.findall(r"^   :([\w-]+): ?(.*)$", options, re.M)))
        for kind, path, options in re.findall(r"^\.\. auto(\w+):: ([\w.]+)\n((?:   :.*\n)*)", text, re.M)
    ]


def qualified(thing):
    return f"{thing.__module__}.{thing.__qualname__}"


def wrong(pattern, is_right):
    """Every wrong match of `pattern` on a page, with the page."""
    return [
        f"{page.relative_to(ROOT)}: {text}"
        for page in PAGES
        for text in sorted(set(pattern.findall(page.read_text())))
        if not is_right(page, text)
    ]


def printed(comm, text):
    """Output of a program on this rank. comm takes the place of MPI.COMM_WORLD."""
    assert "import" in text
    with contextlib.redirect_stdout(io.StringIO()) as out:
        exec(text.replace("MPI.COMM_WORLD", "comm"), {"comm": comm})
    return out.getvalue()


@four
def test_a_program_of_transformers_learns(comm, shared_path):
    folder = Path(shared_path) / "exported"
    said = printed(comm, programs("docs/transformers.md")[0] + f'    net.export("{folder}", names="gpt2")\n')
    assert comm.rank or float(said.split()[1]) < 3, said
    assert (folder / "config.json").exists()


@four
@looped("number, text", enumerate(programs("docs/embedding.md")))
def test_programs_of_embedding_are_right(comm, number, text):
    assert "MPI.COMM_WORLD" in text
    said = printed(comm, text)
    told = sum(comm.allgather(said.startswith("right:")))
    assert told in (3, 4) and "False" not in said, said


@four
def test_the_ten_lines_of_the_readme_run(comm):
    [text] = programs("README.md")
    assert programs("docs/index.md") == [text]
    assert "Box(" in printed(comm, text)


def test_the_configuration_of_the_readme_is_one():
    [text] = re.findall(r"^```toml\n(.*?)^```$", (ROOT / "README.md").read_text(), re.M | re.S)
    config = checked(tomllib.loads(text)).grid
    assert (config.shape, config.data) == ("2x1x1", 2)


def test_the_page_of_every_key_is_what_the_configuration_says(monkeypatch):
    monkeypatch.syspath_prepend(DOCS)
    made = import_module("configuration")
    assert made.PAGE.read_text() == made.page(), "python docs/configuration.py writes it anew"


@pytest.mark.parallel([8])
def test_the_loop_of_the_page_on_networks_runs(comm, shared_path):
    if comm.rank == 0:
        with h5py.File(shared_path / "digits.h5", "w") as file:
            file["x"] = np.random.default_rng(1).random((600, 64), np.float32)
            file["y"] = np.arange(600) % 10
    comm.barrier()
    text = programs("docs/networks.md")[0].replace('"digits.h5"', repr(str(shared_path / "digits.h5")))
    assert printed(comm, text + "    print('loss', loss.item() < 3, opt.steps)\n").endswith("loss True 3\n")


@pytest.mark.parallel([2])
def test_the_network_and_the_optimizer_of_ones_own_are_trained_by_the_command(comm, shared_path):
    (_, optimizer, loss, _), (model, _, callbacks, _) = map(programs, ("docs/networks.md", "docs/training.md"))
    if comm.rank == 0:
        (shared_path / "own.py").write_text(loss)
        (shared_path / "callbacks.py").write_text(callbacks)
        (shared_path / "model.py").write_text(model)
        (shared_path / "lion.py").write_text(optimizer)
        random = np.random.default_rng(1)
        with h5py.File(shared_path / "data.h5", "w") as file:
            file["x"], file["y"] = random.random((64, 5), np.float32), random.random((64, 2), np.float32)
        (shared_path / "x.toml").write_text(
            f'network = "{shared_path}/model.py:build"\noptimizer = "{shared_path}/lion.py:Lion"\n'
            f'[data]\nfile = "{shared_path}/data.h5"\nbatch_size = 32\n'
            f'[training]\nfolder = "{shared_path}/run"\nsteps = 3\nlog_every = 1\n'
            f'loss = "{shared_path}/own.py:asymmetric"\nmetrics = ["{shared_path}/own.py:absolute"]\n'
            f'callbacks = ["{shared_path}/callbacks.py:Plateau"]\n'
        )
    comm.barrier()
    done = run_here(comm, "train", str(shared_path / "x.toml"))
    assert done.returncode == 0 and "3 steps" in done.stdout, done.stdout + done.stderr


@four
def test_the_losses_of_the_page_are_those_of_torch(comm):
    """Values and gradients. The page adds 1e-12 to squares of norms, and so does the reference."""
    import torch
    from torch.nn import functional

    made, (one, other) = {}, np.random.default_rng(1).standard_normal((2, 6, 5))
    exec(programs("docs/networks.md")[-1], made)
    normed = lambda x: x / (x.square().sum(1, keepdim=True) + 1e-12).sqrt()
    cases = [
        ("weighted", other, lambda x, y: ((x - y).square() * (1 + y.max(1, keepdim=True)[0].relu())).mean()),
        (
            "contrastive",
            other,
            lambda x, y: functional.cross_entropy(normed(x) @ normed(y).T / 0.1, torch.arange(len(x))),
        ),
    ]
    with Grid(comm, (2, 1, 1), 2) as grid:
        for name, target, expected in cases:
            x, right = nn.Tensor(spread(grid, one, INPUT, "numpy"), requires_grad=True), torch.tensor(one)
            value = expected(right.requires_grad_(), torch.tensor(target))
            loss = made[name](x, nn.Tensor(spread(grid, target, INPUT, "numpy")))
            loss.backward()
            value.backward()
            assert abs(loss.item() - value.item()) < 1e-12, name
            assert np.abs(x.grad.gather() - right.grad.numpy()).max() < 1e-12, name


@four
def test_the_losses_of_the_page_are_finite(comm):
    """Also for a zero row, and a low temperature."""
    made, (one, other) = {}, np.random.default_rng(1).standard_normal((2, 6, 5))
    exec(programs("docs/networks.md")[-1], made)
    one[2] = 0
    with Grid(comm, (2, 1, 1), 2) as grid:
        x, y = (nn.Tensor(spread(grid, each, INPUT, "numpy"), requires_grad=True) for each in (one, other))
        for loss, of in ((made["contrastive"](x, y), x), (made["contrastive"](y, y, 1e-4), y)):
            loss.backward()
            assert np.isfinite(loss.item()) and np.isfinite(of.grad.gather()).all()


@four
def test_the_operation_of_ones_own_has_the_right_gradient(comm):
    [rule] = [text for text in PROGRAM.findall((DOCS / "networks.md").read_text()) if "def rule" in text]
    said = printed(
        comm,
        f"""
from pmm3d import DistMatrix, Grid, Layout, nn
from pmm3d.nn import map_elementwise
from pmm3d.nn.layers import parameter
{rule}
with Grid(comm, (2, 1, 2)) as grid:
    weight = parameter(grid, (6, 4), Layout.B, seed=1, bound=1.0, dtype="float64")
    x = DistMatrix.from_function(grid, (8, 6), lambda i, j: (i + 2 * j) % 3.0, layout=Layout(("z",), ("y",)))
    target = DistMatrix.from_function(grid, (8, 4), lambda i, j: 0 * i + j, layout=Layout(("z",), ("x",)))
    nn.mse(square(nn.linear(nn.Tensor(x), weight)), target).backward()
    whole_x, whole_w, whole_t, got = x.gather(), weight.gather(), target.gather(), weight.grad.gather()
    out = whole_x @ whole_w
    right = whole_x.T @ (2 * (out**2 - whole_t) / out.size * 2 * out)
    print("right:", abs(got - right).max() < 1e-12)
""",
    )
    assert said == "right: True\n"


@four
def test_the_heads_of_the_page_on_networks_learn(comm):
    [heads] = [text for text in PROGRAM.findall((DOCS / "networks.md").read_text()) if "class Heads" in text]
    said = printed(
        comm,
        f"""
from pmm3d import DistMatrix, Grid, nn
{heads}
with Grid(comm, (2, 1, 2)) as grid:
    net = Heads(grid, 6, 3, 2)
    net.settle(6)
    x = DistMatrix.random(grid, (5, 6), dtype="float32")
    nn.mse(net(x), x).backward()
    print("gradients:", all(parameter.grad is not None for parameter in net.parameters()), net.back.weight.layout.units)
""",
    )
    assert said == "gradients: True (2, 1)\n"


def test_code_fits_the_page():
    wide = [
        f"{page.relative_to(ROOT)}: {line}"
        for page in PAGES
        for language, fenced, indented in BLOCK.findall(page.read_text())
        for line in (fenced * (language != "text") + re.sub("^    ", "", indented, flags=re.M)).splitlines()
        if len(line) > WIDTH
    ]
    assert not wide, "\n".join(wide)


def test_every_variable_of_the_environment_is_in_the_reference():
    page = (DOCS / "reference" / "settings.md").read_text()
    assert {each.metadata["variable"] for each in fields(Settings)} <= {*re.findall(r"^\| `(\w+)` \|", page, re.M)}


def test_every_link_leads_somewhere():
    def leads(page, link):
        if "://" in link:
            parts = urlsplit(link)
            return parts.scheme == "https" and "." in parts.netloc
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        return target.exists() and (not anchor or anchor in anchors(target))

    assert not wrong(LINK, leads)


def test_every_file_that_a_page_names_exists():
    assert not wrong(OWN_FILE, lambda page, path: (ROOT / path).exists() or (page.parent / path).exists())


def test_every_file_that_the_walks_through_the_code_name_exists():
    rooms = "tools|embedding|torch|nn|io|linalg|product|comm|model|arrays|layout"
    named = {*re.findall(rf"(?<![\w/])(?:{rooms})/[\w/]+\.py", (DOCS / "rooms.md").read_text())}
    assert len(named) > 30 and not [name for name in named if not (ROOT / "pmm3d" / name).exists()]


def test_every_option_of_a_command_that_a_page_names_exists():
    def exists(page, found):
        words, rest = found
        command = get_command(app)
        for word in [*words.split(), *["table"] * words.startswith("convert")]:  # the word "table" is optional
            command = getattr(command, "commands", {}).get(word, command)
        known = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
        return page.name == "CHANGES.md" or {*OPTION.findall(rest)} <= known | {"--help"}

    assert not wrong(COMMAND, exists)


def test_the_reference_has_every_public_name():
    shown = set()
    for kind, path, options in directives():
        if kind == "module":
            module, listed = import_module(path), options.get("members")
            names = listed.split(", ") if listed else getattr(module, "__all__", vars(module))
            own = path if not hasattr(module, "__all__") else "pmm3d"
            found = [getattr(module, name) for name in names if "no-members" not in options]
            shown |= {qualified(each) for each in found if getattr(each, "__module__", "").startswith(own)}
        else:
            shown.add(path)
    inner = ("nn", "nn.optim", "nn.pipeline", "nn.training", "nn.transformer", "io", "torch")
    rooms = map(import_module, ("pmm3d", *(f"pmm3d.{name}" for name in inner)))
    public = {qualified(getattr(room, name)) for room in rooms for name in room.__all__ if not name.startswith("__")}
    assert not public - shown
    for kind, path, options in directives():
        if kind == "class" and (listed := options.get("members")):
            room, _, name = path.rpartition(".")
            own = [each for each in vars(getattr(import_module(room), name)).items() if each[0][0] != "_"]
            methods = {each for each, what in own if isinstance(what, (Function, classmethod)) and what.__doc__}
            assert methods <= {*listed.split(", ")}, path
