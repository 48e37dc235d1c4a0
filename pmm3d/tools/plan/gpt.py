"""The command `pmm3d plan gpt`."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ...errors import Pmm3dError
from ...model.axonn import ORDER, parse_order, rank_by_axonn
from ...model.gpt import GPT
from ..output import bar, say_written
from ..ranks import one_process, size
from . import options

if TYPE_CHECKING:
    from ...nn.training.config import Config

HEAD = 64
"""Columns of a head if --heads is not given."""


class Terms(Enum):
    """Values of --terms."""

    FULL = "full"
    AXONN = "axonn"


@one_process
def gpt_command(
    layers: Annotated[int, size(1, "Number of blocks.")],
    hidden: Annotated[int, size(1, "Features of a token.")],
    sequence: Annotated[int, size(1, "Tokens of a sequence.")],
    batch: Annotated[int, size(1, "Sequences of a step.")],
    ranks: options.Ranks,
    heads: Annotated[
        int | None, size(1, "Number of heads. Default: hidden / 64; with --terms axonn, any number.")
    ] = None,
    vocabulary: Annotated[
        int, size(0, "Number of different tokens. 0, for --terms axonn: without embedding and logits.")
    ] = 51200,
    experts: Annotated[
        int | None,
        size(1, "Experts of each block, in place of its MLP. Grids whose ranks share experts are ranked too."),
    ] = None,
    top_k: Annotated[int | None, size(1, "Experts of a token, with --experts. Default: 2.")] = None,
    expert_mlp: Annotated[
        int | None, size(1, "Columns between the layers of an expert, with --experts. Default: 4 hidden.")
    ] = None,
    micro_batches: Annotated[
        int | None, size(1, "Micro-batches of a step. With several, grids with pipelines are ranked too. Default: 1.")
    ] = None,
    machine: options.MachineName = None,
    ranks_per_node: options.RanksPerNode = None,
    terms: Annotated[
        Terms,
        typer.Option(
            help="full: a simulated training step. axonn: only the collectives, by "
            "AxoNN's published model of five terms."
        ),
    ] = Terms.FULL,
    order: Annotated[
        str | None,
        typer.Option(
            help="For --terms axonn: axes in the order of the rank numbers, the innermost first. Default: y,x,z,data."
        ),
    ] = None,
    powers_of_two: Annotated[
        bool, typer.Option("--powers-of-two", help="For --terms axonn: only grids whose sizes are powers of two.")
    ] = False,
    min_tensor: Annotated[int | None, size(1, "For --terms axonn: smallest x times y times z. Default: 1.")] = None,
    memory: options.Memory = None,
    tokens: Annotated[
        float | None, typer.Option(help="Tokens of the whole training, as in 1e12: the time that it takes is printed.")
    ] = None,
    top: options.Top = 10,
    wide: options.Wide = False,
    json: options.Json = None,
    plot: options.Plot = None,
    picture: options.Picture = None,
) -> None:
    """Rank the grids for training a GPT in bfloat16 with AdamW, before a configuration exists.

    Sharded activations and recomputation are chosen together with the grid. Grids that are not shown are counted by
    reason. Tokens a second are those of the first choice. --terms axonn predicts no memory. No MPI is used.

    [bold]Examples[/]

    pmm3d plan gpt --layers 24 --hidden 1024 --sequence 512 --batch 64 --ranks 8

    More options: --machine frontier; --micro-batches 8 for pipelines; --experts 8 --top-k 2 for a mixture of experts
    with even routing; --tokens 3e11 for the time of a training; --terms axonn --powers-of-two for the published model.
    """
    from .ranking import check_outputs, print_plan, tell, write_plan

    check_outputs(json, plot, picture=picture)
    options.check_amount("--tokens", tokens)
    axonn = terms is Terms.AXONN
    _check_terms(
        axonn,
        {
            "--micro-batches": micro_batches,
            "--ranks-per-node": ranks_per_node,
            "--memory": memory,
            "--tokens": tokens,
            "--picture": picture,
            "--experts": experts,
        },
        {"--order": order, "--powers-of-two": powers_of_two, "--min-tensor": min_tensor},
    )
    mixture = {"experts": experts, "top_k": top_k, "expert_mlp": expert_mlp}
    if experts is None and (given := [name for name, value in mixture.items() if value]):
        raise Pmm3dError(
            f"--{given[0].replace('_', '-')} is for a mixture of experts: give --experts too, or leave it out"
        )
    model = GPT(layers, hidden, sequence, batch, heads, vocabulary)
    chosen = options.chosen_machine(machine, ranks, ranks_per_node)
    if axonn:
        axes = ORDER if order is None else parse_order(order)
        if not chosen.machine.axonn:
            raise Pmm3dError(
                f"machine {chosen.machine.name} has no table [axonn] of bandwidths, which --terms "
                "axonn needs: take --machine perlmutter or frontier, or leave out --terms"
            )
        ranking = rank_by_axonn(
            model, ranks, chosen.machine.axonn, powers_of_two=powers_of_two, min_tensor=min_tensor or 1, order=axes
        )
        print_plan(chosen, ranking, top, "of collectives in a step", wide=wide, sections=("axonn",), whole=False)
        tell(
            f"The five terms of AxoNN's authors, ranks along {', '.join(axes)}: collectives of the fully "
            "connected layers alone, without computation, latency and overlap"
        )
    else:
        from ...nn.training.planning import TOP
        from ...nn.training.samples import SampleSizes
        from .step import Training
        from .step_picture import draw_step

        samples = SampleSizes(1, vocabulary, True)
        with bar("plan gpt") as told:
            training = Training.of(_config(model, micro_batches or 1, mixture), chosen.machine, memory, samples)
            with training.pool(ranks) as pool:
                ranking = training.ranking(
                    ranks,
                    top=max(top, TOP),
                    activations=("replicated", "sharded"),
                    recompute=("none", "full"),
                    tell=told,
                    pool=pool,
                )
        print_plan(chosen, ranking, top, "a step", memory=memory, wide=wide)
        tell(*training.in_words(ranking.candidates[0], tokens))
        if picture:
            draw_step(training, ranking.candidates[0], picture)
            say_written(picture)
    write_plan(chosen, ranking, top, json, plot)


def _check_terms(axonn: bool, of_full: dict[str, Any], of_axonn: dict[str, Any]) -> None:
    """Raise Pmm3dError for an option that has no effect with these terms."""
    used, unused = ("axonn", of_full) if axonn else ("full", of_axonn)
    if given := [name for name, value in unused.items() if value]:
        raise Pmm3dError(
            f"{given[0]} has no effect with --terms {used}: leave it out, or take --terms "
            f"{'full' if axonn else 'axonn'}"
        )


def _config(gpt: GPT, micro_batches: int, mixture: Mapping[str, int | None]) -> Config:
    """Return the configuration of a training of the GPT. mixture: keys of [network] for experts."""
    from ...nn.training.config import checked

    if not gpt.vocabulary:
        raise Pmm3dError(
            "--vocabulary 0 leaves out embedding and logits, and needs --terms axonn: give the number of "
            "different tokens"
        )
    if gpt.batch % micro_batches:
        raise Pmm3dError(f"batch = {gpt.batch} must be a multiple of --micro-batches; got {micro_batches}")
    if gpt.heads is None and gpt.hidden % HEAD:
        raise Pmm3dError(
            f"give --heads: the default, hidden / {HEAD}, needs a multiple of {HEAD}, but hidden = {gpt.hidden}"
        )
    return checked(
        {
            "data": {"file": "none", "sequence": gpt.sequence, "batch_size": gpt.batch},
            "network": {
                "kind": "gpt",
                "layers": gpt.layers,
                "hidden": gpt.hidden,
                "library": "torch",
                "heads": gpt.heads or gpt.hidden // HEAD,
                **{name: value for name, value in mixture.items() if value is not None},
            },
            "training": {"precision": "bfloat16", "checkpoint_in_background": False},
            "grid": {"micro_batches": micro_batches},
        }
    )
