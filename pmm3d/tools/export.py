"""The command `pmm3d export`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .output import check_writable
from .ranks import all_ranks, on_first
from .terminal import say


def export_command(
    checkpoint: Annotated[Path, typer.Argument(help="Folder of a checkpoint, or of a run, whose newest good checkpoint "
                                                    "is taken.")],
    target: Annotated[Path, typer.Argument(help="The .safetensors file to write.")],
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace TARGET if it exists.")] = False,
    names: Annotated[str, typer.Option(help="Names of the tensors: torch; gpt2 for a gpt; llama for a "
                                            "llama.")] = "torch",
) -> None:
    """Write the weights of a checkpoint as a torch state dict.

    Names and shapes are those of the same layers in a torch.nn.Sequential without Dropout. Load the file by
    network.load_state_dict(safetensors.torch.load_file(TARGET)). The metadata "pmm3d" of the file contains the
    configuration of the run. TARGET appears when it is complete. With --names gpt2 or llama, names and shapes are those
    of the transformers package.

    [bold]Examples[/]

    pmm3d export runs/digits digits.safetensors

    pmm3d export runs/digits/checkpoints/step-00000300 d.safetensors --overwrite

    pmm3d export runs/gpt gpt.safetensors --names gpt2
    """
    with all_ranks() as comm:
        from ..nn.training.export import check_target, export_checkpoint

        def first() -> None:
            check_target(target, overwrite)
            check_writable(target)

        on_first(comm, first)
        path = export_checkpoint(comm, checkpoint, target, names)
        if comm.rank == 0:
            say(f"wrote {target}, the weights of {path}")
