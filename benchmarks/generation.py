"""Greedy generation with a cache: pmm3d compared with the transformers package, in one process, in turns.

    python benchmarks/generation.py                                  (1 and 8 sequences, two passes)
    python benchmarks/generation.py --networks gpt2 --sequences 1 --layers 12 --hidden 768 --heads 12

All continue the same prompts by the same network, which the transformers package makes with random weights, float32.
The tokens must be equal. transformers is no dependency of pmm3d: `pip install transformers`, which needs torch.

pmm3d          `nn.generate(temperature=0)` with arrays of each library, on one rank
transformers   `generate(do_sample=False)` of the package, with its cache

tokens/s       generated tokens of all sequences a second, with the pass over the prompt. In each round every contestant
               generates once, and the order changes. A pass is a separate process. Figures are medians over the rounds
               of all passes
ratio          tokens a second / those of transformers, medians of ratios within a round
Python calls   calls of Python functions for a further token of all sequences
"""

from __future__ import annotations

import json
import sys
import tempfile
from argparse import Namespace
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from mpi4py import MPI
from records import parser, report
from timing import all_rounds, on_ranks, one_thread, python_calls, slowest
from torch_rivals import keep_to_cores

from pmm3d import Grid, nn
from pmm3d.model import machine
from pmm3d.text import counted

NETWORKS, LIBRARIES, RIVAL = {"gpt2": nn.GPT, "llama": nn.Llama}, ("torch", "numpy"), "transformers"
SIZES = ("layers", "hidden", "heads", "vocabulary", "prompt", "tokens")
QUICK = {
    "sequences": [1, 2],
    "layers": 1,
    "hidden": 16,
    "heads": 2,
    "vocabulary": 32,
    "prompt": 3,
    "tokens": 8,
    "passes": 1,
    "rounds": 1,
}
Contestant = Callable[[int], np.ndarray]
"""contestant(n) returns the prompts and n tokens after each of them."""
Result = dict[str, Any]


def make(kind: str, sizes: Namespace, folder: str) -> Any:
    """A network of the transformers package, which is also written to a folder."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    longest, ids = sizes.prompt + sizes.tokens, {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
    model: Any
    if kind == "gpt2":
        shape = {"n_embd": sizes.hidden, "n_layer": sizes.layers, "n_head": sizes.heads}
        model = GPT2LMHeadModel(GPT2Config(vocab_size=sizes.vocabulary, n_positions=longest, **shape, **ids))
    else:
        config = LlamaConfig(
            vocab_size=sizes.vocabulary,
            hidden_size=sizes.hidden,
            intermediate_size=3 * sizes.hidden,
            num_hidden_layers=sizes.layers,
            num_attention_heads=sizes.heads,
            num_key_value_heads=sizes.heads // 2,
            max_position_embeddings=longest,
            **ids,
        )
        model = LlamaForCausalLM(config)
    model.save_pretrained(folder)
    return model.eval()


def of_package(model: Any, prompt: np.ndarray) -> Contestant:
    import torch

    given = torch.from_numpy(prompt)
    asked = {"attention_mask": torch.ones_like(given), "do_sample": False}
    return lambda count: model.generate(given, max_new_tokens=count, min_new_tokens=count, **asked).numpy()


def of_pmm3d(net: nn.Module, prompt: np.ndarray) -> Contestant:
    return lambda count: nn.generate(net, prompt, count, temperature=0)


def measured(options: Namespace) -> list[Result]:
    """Run the rounds of all contestants. Return {"case", "tokens", "seconds", "calls"} of each."""
    import torch

    torch.set_num_threads(1)
    keep_to_cores(0, 1)
    comm, found = MPI.COMM_WORLD, list[Result]()
    with ExitStack() as stack:
        grids = {library: stack.enter_context(Grid(comm, (1, 1, 1), library=library)) for library in LIBRARIES}
        for kind in options.networks:
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            model = make(kind, options, folder)
            nets = {f"pmm3d, {name} arrays": NETWORKS[kind].load(grid, Path(folder)) for name, grid in grids.items()}
            for sequences in options.sequences:
                prompt = np.random.default_rng(1).integers(0, options.vocabulary, (sequences, options.prompt))
                everyone = {name: of_pmm3d(net, prompt) for name, net in nets.items()}
                everyone[RIVAL] = of_package(model, prompt)
                times = all_rounds(
                    everyone, lambda name: slowest(comm, lambda: everyone[name](options.tokens)), options.rounds
                )
                for name, contestant in everyone.items():
                    few, many = (
                        python_calls(lambda count=count: contestant(count)).work
                        for count in (options.tokens // 2, options.tokens)
                    )
                    found.append(
                        {
                            "case": [kind, str(sequences), name],
                            "tokens": contestant(options.tokens).tolist(),
                            "seconds": times[name],
                            "calls": (many - few) / (options.tokens - options.tokens // 2),
                        }
                    )
    return found


def rows_of(passes: list[list[Result]], tokens: int) -> list[list[str]]:
    """For each contestant: tokens a second and the ratio, with the medians of the passes, and the calls."""
    seconds = [{tuple(each["case"]): each["seconds"] for each in found} for found in passes]
    rows = []
    for each in passes[0]:
        kind, sequences, _ = case = tuple(each["case"])
        ratios = [[rival / own for own, rival in zip(found[case], found[kind, sequences, RIVAL])] for found in seconds]
        rates = [[int(sequences) * tokens / second for second in found[case]] for found in seconds]
        of_passes = lambda figures, digits: ", ".join(f"{median(one):,.{digits}f}" for one in figures)
        rows.append(
            [
                *case,
                f"{median(sum(rates, [])):,.0f} ({of_passes(rates, 0)})",
                f"{median(sum(ratios, [])):.2f} ({of_passes(ratios, 2)})",
                f"{each['calls']:,.0f}",
            ]
        )
    return rows


def differing(passes: list[list[Result]]) -> list[str]:
    """Contestants whose tokens are not those of the package."""
    expected = {tuple(each["case"][:2]): each["tokens"] for each in passes[0] if each["case"][2] == RIVAL}
    return [
        " ".join(each["case"])
        for found in passes
        for each in found
        if each["tokens"] != expected[tuple(each["case"][:2])]
    ]


def main() -> int:
    made = parser(__doc__)
    made.add_argument("--networks", nargs="+", choices=[*NETWORKS], default=[*NETWORKS], help="networks (gpt2 llama)")
    made.add_argument("--sequences", nargs="+", type=int, default=[1, 8], metavar="N", help="numbers of prompts (1 8)")
    for name, default, text in (
        ("layers", 4, "blocks of the networks"),
        ("hidden", 256, "columns of their features"),
        ("heads", 4, "heads, an even number"),
        ("vocabulary", 8192, "different tokens"),
        ("prompt", 16, "tokens of a prompt"),
        ("tokens", 64, "tokens to generate after each prompt"),
        ("passes", 2, "processes, one after the other"),
        ("rounds", 7, "rounds over all contestants in a pass"),
    ):
        made.add_argument(f"--{name}", type=int, default=default, metavar="N", help=f"{text} ({default})")
    made.add_argument("--here", action="store_true", help="internal, on the rank: one pass, as JSON")
    options = made.parse_args()
    if options.here:
        print(json.dumps(measured(options)), flush=True)
        return 0
    if options.quick:
        vars(options).update(QUICK)
    command = [__file__, "--here", "--networks", *options.networks, "--sequences", *map(str, options.sequences)]
    for name in (*SIZES, "rounds"):
        command += [f"--{name}", str(getattr(options, name))]
    environ = one_thread()
    environ["HF_HUB_OFFLINE"] = "1"
    machine.set_blas_environment(environ)
    passes = []
    for turn in range(options.passes):
        passes.append(json.loads(on_ranks(1, command, environ).splitlines()[-1]))
        print(f"pass {turn + 1} of {options.passes}", file=sys.stderr, flush=True)
    heading = ["network", "sequences", "contestant", "tokens/s (of each pass)", "ratio (of each pass)", "Python calls"]
    report(
        options,
        (
            f"{counted(options.layers, 'layer')} of {options.hidden} columns and {options.heads} heads, vocabulary "
            f"{options.vocabulary}, {options.tokens} tokens after {options.prompt}, float32, one thread; medians of "
            f"{counted(options.passes, 'pass')} of {counted(options.rounds, 'round')}",
            [heading, *rows_of(passes, options.tokens)],
        ),
    )
    if different := differing(passes):
        print(f"tokens differ from those of transformers: {', '.join(different)}", file=sys.stderr)
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
