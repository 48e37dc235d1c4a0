"""The command line of `pmm3d`: all commands, and the commands train, report and export."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from functools import partial
from inspect import cleandoc
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from .. import __version__
from ..errors import Pmm3dError
from ..text import shell_command
from .bench.command import bench_command
from .convert import table_command, text_command
from .doctor.command import doctor_command
from .matmul import matmul_command
from .output import bar, check_writable
from .plan.gpt import gpt_command
from .plan.pipeline import pipeline_command
from .plan.product import product_command
from .plan.train import train_command as plan_train_command
from .predict import NoEma, evaluate_command, generate_command, predict_command
from .ranks import Accept, all_ranks, on_first, one_process
from .terminal import check_surroundings, say
from .tune.blas.command import blas_command
from .tune.command import machine_command
from .tune.scalapack.command import scalapack_command

STYLE: dict[str, Any] = {"no_args_is_help": True, "rich_markup_mode": "rich", "pretty_exceptions_enable": False}
app = typer.Typer(
    help="Distributed matrix products by the 3D algorithm, and networks trained with them. Run under "
    "mpiexec or srun: python -m pmm3d.launcher -n 8 -m pmm3d bench",
    **STYLE,
)
WRONG_USE: Any = typer.BadParameter.__mro__[1]
"""UsageError of click, or of the copy of click in newer versions of typer."""
NOT_FINISHED = 75
"""Exit code of a run that a signal ended: EX_TEMPFAIL of sysexits.h."""

ENDED = (
    f"this command ends with exit code {NOT_FINISHED} (not finished). A launcher may report that as a process "
    "with non-zero status: Open MPI does so in a box. It is no failure."
)


def _print_version(asked: bool) -> None:
    if asked:
        say(f"pmm3d {__version__}")
        raise typer.Exit


@app.callback()
def _pmm3d(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Check the surroundings of each command. Restore sys.stdout at its end: `reserve_stdout` may replace it."""
    check_surroundings("pmm3d")
    context.call_on_close(partial(setattr, sys, "stdout", sys.stdout))


def train_command(
    config: Annotated[Path, typer.Argument(help="TOML file. --show prints it with every key and its meaning.")],
    resume: Annotated[
        str,
        typer.Option(
            help="auto: continue from the newest undamaged checkpoint in training.folder, "
            "or start if there is none. never: start; an error if there is a "
            "checkpoint. Path of a checkpoint: continue from it, and rename later "
            "checkpoints to retired-*."
        ),
    ] = "never",
    accept: Accept = None,
    show: Annotated[
        bool,
        typer.Option(
            "--show",
            help="Print the configuration as TOML, with the meaning and the allowed values of each key. Do not train. "
            "CONFIG may then be a pipe, as of the shell's <(...).",
        ),
    ] = False,
    trace: Annotated[Path | None, typer.Option(help="Write a Chrome trace of the run (ui.perfetto.dev).")] = None,
) -> None:
    """Train a network on data in files, or on a data set of your own, from a configuration file.

    The command writes metrics.jsonl, run.json and checkpoints/ into training.folder. The folder is locked
    until the job ends. `pmm3d report` makes a page of the run. Batches and initial weights do not depend on the
    grid. Trained weights on two grids are equal to rounding. A checkpoint loads on any grid, so you can resume a run on
    another number of ranks.

    A resumed run takes the weights, the optimizer's state and the position in the data from the checkpoint, and all
    other settings from the configuration. Differences are printed. After SIGUSR1 the run writes a checkpoint and
    continues. After SIGTERM or Ctrl-C it writes a checkpoint and ends.

    [bold]Exit codes[/]

    0: trained to the end; 75: ended by a signal after writing a checkpoint, so
    continue with --resume auto; 2: wrong input or configuration, explained in one line; 1: unexpected error, with its
    traceback; 70: ranks hung, with the position of each rank.

    [bold]Examples[/]

    python -m pmm3d.launcher -n 8 -m pmm3d train apps/digits.toml

    srun -n 64 pmm3d train surrogate.toml --resume auto

    pmm3d train x.toml --show > every_key.toml
    """
    with all_ranks() as comm:
        from ..nn.training import config as configuration
        from ..nn.training.described import as_toml
        from ..nn.training.job import train_job

        def first() -> configuration.Config:
            check_writable(trace)
            found = configuration.load(config, open_pipe=show)
            if accept and resume == "never" and not (found.training.weights or found.data.validation_source):
                raise Pmm3dError(
                    "--accept has no effect without --resume, training.weights, data.validation_file or "
                    "data.validation_build: leave it out, or add --resume auto"
                )
            return found

        loaded = on_first(comm, first)
        if show:
            if comm.rank == 0:
                say(as_toml(loaded))
            return
        again = shell_command("pmm3d", "train", config, "--resume", "auto")
        finished = train_job(loaded, comm, resume, trace, frozenset(accept or ()), again, bar("train", comm.rank == 0))
        if not finished and comm.rank == 0:
            say(ENDED)
    if not finished:
        raise typer.Exit(NOT_FINISHED)


@one_process
def report_command(
    run: Annotated[Path, typer.Argument(help="Folder of a training run, or a file of pmm3d bench --json.")],
    out: Annotated[
        Path | None,
        typer.Option(help="HTML file to write. Default: report.html in the folder; for a file, its name with .html."),
    ] = None,
) -> None:
    """Make a page of a run: curves, time and memory of each rank, bytes of each collective, the grid.

    The page is one HTML file that loads nothing from the network. You can make it during the run. No MPI is used.

    [bold]Example[/]

    pmm3d report runs/digits
    """
    from .page import write_page

    check_writable(out)
    with bar("report"):
        written = write_page(run, out)
    say(f"wrote {written}")


def export_command(
    checkpoint: Annotated[
        Path, typer.Argument(help="Folder of a checkpoint, or of a run (its newest undamaged checkpoint).")
    ],
    target: Annotated[
        Path, typer.Argument(help="The .safetensors file to write; or, for network.kind gpt and llama, a folder.")
    ],
    overwrite: Annotated[
        bool,
        typer.Option("--overwrite", help="Replace TARGET if it exists, or the files of the same names in a folder."),
    ] = False,
    names: Annotated[
        str | None,
        typer.Option(
            help="Names of the tensors: torch; gpt2, for network.kind gpt; llama, "
            "for network.kind llama. Default: gpt2 or llama if the network has "
            "these names, else torch."
        ),
    ] = None,
    no_ema: NoEma = False,
) -> None:
    """Write the weights of a checkpoint as a torch state dict, or as a folder of the transformers package.

    Names and shapes are those of the same layers in a torch.nn.Sequential without Dropout. Load the file with
    network.load_state_dict(safetensors.torch.load_file(TARGET)). If samples were standardised, the scales are part of
    the weights of the first and the last layer: the exported network takes and returns the units of the data. The names
    gpt2 and llama are names and shapes of the transformers package. The metadata "pmm3d" of the file contains the
    configuration of the run. The file has a temporary name until it is complete.

    If TARGET does not end in .safetensors, it is a folder for AutoModelForCausalLM.from_pretrained. It contains
    model.safetensors, config.json, and the tokenizer of the run for AutoTokenizer.from_pretrained. A network.kind llama
    is written as a Llama; with window as a Mistral, with qkv_bias as a Qwen 2, and with qk_norm as a Qwen 3. With
    experts it is written as a Mixtral, a Qwen2-MoE, a Qwen3-MoE or an OLMoE.

    [bold]Examples[/]

    pmm3d export runs/digits digits.safetensors

    pmm3d export runs/digits/checkpoints/step-00000300 d.safetensors --overwrite

    pmm3d export runs/gpt gpt

    pmm3d export runs/gpt gpt.safetensors --names torch
    """
    with all_ranks() as comm:
        from ..nn.training.export import check_target, export_checkpoint

        def first() -> None:
            check_writable(check_target(target, overwrite))

        on_first(comm, first)
        with bar("export", comm.rank == 0):
            path, about = export_checkpoint(comm, checkpoint, target, names, not no_ema)
        if comm.rank == 0:
            say(f"wrote {target}, the weights of {path}{about}")


class _FirstIsDefault(TyperGroup):
    """A group in which the name of the first command may be left out: `pmm3d convert x.csv x.h5`.

    A file may have the name of a command, as in `pmm3d convert text x.h5`. Then the first word is the name of the
    command only if the other words are all that this command needs.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        named = {*args[:1]} <= {*self.commands, "--help"}
        if named and args and Path(args[0]).is_file():
            named = "--help" in args or self._has_all(type(ctx), *args)
        return super().parse_args(ctx, args if named else [*list(self.commands)[:1], *args])

    def _has_all(self, context: Any, name: str, *words: str) -> bool:
        """Return whether the words contain all arguments of a command."""
        command = self.commands[name]
        try:
            given = command.make_parser(context(command)).parse_args([*words])[0]
        except WRONG_USE:
            return False
        return all(given.get(each.name) for each in command.params if each.param_type_name == "argument")


def _add(group: typer.Typer, **commands: Callable[..., None]) -> None:
    """Register commands. The lines of a paragraph of a docstring are joined, so that the help wraps at the terminal."""
    for name, command in commands.items():
        paragraphs = re.sub(r"(?<!\n)\n(?!\n)", " ", cleandoc(command.__doc__ or ""))
        group.command(name, help=paragraphs)(command)


def _group(name: str, help_text: str, cls: type[TyperGroup] = TyperGroup, **commands: Callable[..., None]) -> None:
    group = typer.Typer(cls=cls, add_completion=False, help=help_text, **STYLE)
    _add(group, **commands)
    app.add_typer(group, name=name)


_add(
    app,
    bench=bench_command,
    matmul=matmul_command,
    train=train_command,
    predict=predict_command,
    evaluate=evaluate_command,
    generate=generate_command,
    doctor=doctor_command,
    report=report_command,
    export=export_command,
)
_group(
    "convert",
    "Make the HDF5 files that training reads. pmm3d convert x.csv x.h5 is short for convert table.",
    _FirstIsDefault,
    table=table_command,
    text=text_command,
)
_group(
    "plan",
    "Choose the grid and the number of ranks: predict time and memory.",
    product=product_command,
    train=plan_train_command,
    gpt=gpt_command,
    pipeline=pipeline_command,
)
_group(
    "tune",
    "Measure this machine, its BLASes and its ScaLAPACK, for the planner, for products and for the drop-in.",
    machine=machine_command,
    blas=blas_command,
    scalapack=scalapack_command,
)
