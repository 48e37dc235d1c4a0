"""The commands `pmm3d predict`, `pmm3d evaluate` and `pmm3d generate`."""

from __future__ import annotations

import csv
import logging
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from ..errors import DataError
from ..io.conversion import ENDINGS, check_ending
from ..io.disk import check_replaceable, sync
from ..text import counted, names_in_words
from .output import bar, check_writable
from .ranks import Accept, all_ranks, on_first, size
from .terminal import say

CONVERTED = (".csv", ".tsv", ".txt", ".parquet", ".npz")
LINES_AT_ONCE = 2**14


Run = Annotated[Path, typer.Argument(help="Folder of a checkpoint, or of a run (its newest undamaged checkpoint).")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace OUT if it exists.")]
NoEma = Annotated[
    bool,
    typer.Option("--no-ema", help="Use the weights of the last step, also if the run averages them (training.ema)."),
]


def predict_command(
    run: Run,
    file: Annotated[
        Path,
        typer.Argument(help="File of the samples: HDF5, .npz, .parquet, .csv, .tsv or .txt. It may contain targets."),
    ],
    out: Annotated[Path, typer.Option(help="File to write: .h5 (HDF5) or .csv.")],
    inputs: Annotated[
        str | None,
        typer.Option(
            help="Name of the data set of samples, or of their array in a .npz "
            "file. Default: data.inputs of the run; for .npz, x."
        ),
    ] = None,
    batch_size: Annotated[
        int | None,
        size(1, "Samples of a forward pass, on all ranks together. Default: rows of a micro-batch of the run."),
    ] = None,
    overwrite: Overwrite = False,
    no_ema: NoEma = False,
    accept: Accept = None,
) -> None:
    """Compute the outputs of a trained network for samples. `pmm3d generate` is for a network of tokens.

    The network is made from the configuration in the checkpoint. An HDF5 file OUT contains a data set `outputs` with a
    row for each sample, in the units of the targets. For classes it also contains `probabilities`, and `classes` with
    the number of the most probable class; the attribute class_names of `classes` contains the names. For the loss
    binary_cross_entropy_with_logits it also contains `probabilities`. A CSV file OUT contains a line for each sample:
    the outputs, or the probabilities, for classes after the most probable class. If the run's data was a table, the
    columns of another table are found by their names, and categories and missing values are converted as in the
    training data. OUT has a temporary name until it is complete. You can use any number of ranks. With the run's number
    of ranks, the grid is that of the run.

    [bold]Examples[/]

    pmm3d predict runs/digits new.h5 --out predicted.h5

    pmm3d predict runs/flowers new.csv --out predicted.csv

    pmm3d predict runs/digits new.h5 --out p.h5 --inputs images --batch-size 4096

    srun -n 64 pmm3d predict runs/flow/checkpoints/step-00000300 x.h5 --out y.h5
    """
    with all_ranks() as comm:
        from ..nn.training.predict import Asked, check_files, predict

        with ExitStack() as temporary:

            def first() -> Asked:
                check_ending(out, (*ENDINGS, ".csv"))
                to_csv = out.suffix.lower() == ".csv"
                asked = Asked(run, file, out, inputs, batch_size, overwrite, accept=accept or (), ema=not no_ema)
                check_files(asked)
                check_writable(out)
                if file.suffix.lower() in CONVERTED:
                    asked = replace(asked, source=_beside(out, "samples", temporary), origin=file)
                return replace(asked, target=_beside(out, "outputs", temporary)) if to_csv else asked

            with bar("predict", comm.rank == 0) as tell:
                asked = on_first(comm, first)
                done = predict(comm, asked, tell)
            if asked.target != out:
                columns = on_first(comm, lambda: _write_csv(asked.target, out))
                written = f"{counted(done.shapes['outputs'][0], 'line')} of {names_in_words(columns)}"
            else:
                written = ", ".join(f"{name} {' x '.join(map(str, shape))}" for name, shape in done.shapes.items())
        if comm.rank == 0:
            say(f"wrote {out}: {written}; {_by(done)}")


def evaluate_command(
    run: Run,
    file: Annotated[
        Path, typer.Argument(help="File of samples and their targets: HDF5, .npz, .parquet, .csv, .tsv or .txt.")
    ],
    inputs: Annotated[
        str | None,
        typer.Option(
            help="Name of the data set of samples, or of their array in a .npz file. Default: data.inputs of the run; "
            "for .npz, x."
        ),
    ] = None,
    targets: Annotated[
        str | None,
        typer.Option(
            help="Name of the data set of targets, or of their array in a .npz file. Default: data.targets of the run."
        ),
    ] = None,
    batch_size: Annotated[
        int | None,
        size(1, "Samples of a forward pass, on all ranks together. Default: rows of a micro-batch of the run."),
    ] = None,
    no_ema: NoEma = False,
    accept: Accept = None,
) -> None:
    """Print the loss and the scores of a trained network for samples with targets.

    For classes the score is the accuracy; for targets of 0 and 1, it is the share that is predicted rightly. For values
    it is r2, the coefficient of determination, and for each target r2 and rmse, the root of the mean squared error in
    the units of the target. Files are read as by `pmm3d predict`. A temporary HDF5 file of a table is written to the
    current folder.

    [bold]Examples[/]

    pmm3d evaluate runs/lab new.csv

    srun -n 64 pmm3d evaluate runs/flow test.h5
    """
    with all_ranks() as comm:
        from ..nn.training.predict import Asked, evaluate_run

        with ExitStack() as temporary:

            def first() -> Asked:
                asked = Asked(run, file, file, inputs, batch_size, accept=accept or (), ema=not no_ema)
                if file.suffix.lower() in CONVERTED:
                    check_writable(Path(file.name))
                    asked = replace(asked, source=_beside(Path(file.name), "samples", temporary), origin=file)
                return asked

            with bar("evaluate", comm.rank == 0):
                done = evaluate_run(comm, on_first(comm, first), targets)
        if comm.rank == 0:
            say(f"{counted(done.rows, 'row')} of {file}, {_by(done)}")
            loss = f"{done.loss} of standardised targets" if done.scaled else done.loss
            lines = [f"{name} {value:.4g}{f' ({loss})' * (name == 'loss')}" for name, value in done.figures.items()]
            say("\n".join(lines + [f"{name}: r2 {score:.4f}, rmse {root:.4g}" for name, score, root in done.targets]))


def generate_command(
    run: Run,
    prompt: Annotated[str, typer.Option(help="Text that the network continues.")],
    length: Annotated[
        int, size(0, "Most tokens to generate after the prompt. They may exceed the positions of the network.")
    ] = 200,
    temperature: Annotated[
        float,
        typer.Option(
            min=0,
            help="Divisor of the logits before a token is drawn. 0: take the most probable token, without a draw.",
        ),
    ] = 1.0,
    top_k: Annotated[int | None, size(1, "Number of most probable tokens to draw from. Default: all.")] = None,
    top_p: Annotated[
        float | None,
        typer.Option(
            help="Draw from the most probable tokens that together have at least this probability, above 0 and at most "
            "1. Default: all."
        ),
    ] = None,
    end: Annotated[
        list[str] | None,
        typer.Option(
            help="Text of a token that ends the text, and is not printed. Repeatable. Default: the end tokens of the "
            "tokenizer, such as <|endoftext|>, if it has them."
        ),
    ] = None,
    no_end: Annotated[bool, typer.Option("--no-end", help="Continue after the end tokens of the tokenizer.")] = False,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the draws.")] = 0,
    tokenizer: Annotated[
        Path | None,
        typer.Option(
            help="The tokenizer of the run: a file of pmm3d convert text, or a tokenizer.json. Default: the data file "
            "of the run, if it is HDF5."
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Also write the generated text to this file.")] = None,
    overwrite: Overwrite = False,
    no_ema: NoEma = False,
    accept: Accept = None,
) -> None:
    """Continue a text by a trained network of tokens.

    The network is made from the configuration in the checkpoint. The prompt and the generated text are printed, each
    character as soon as it is known. A token depends on all earlier tokens. If these are more than network.positions,
    it depends on that number of last tokens, and takes longer to generate. The text is the same on any number of ranks,
    unless rounding changes the choice of a token. OUT has a temporary name until it is complete. With the run's number
    of ranks, the grid is that of the run.

    [bold]Examples[/]

    pmm3d generate runs/gpt --prompt "The list" --length 300 --top-k 40

    pmm3d generate runs/gpt --prompt "The list" --top-p 0.9 --end "<|endoftext|>"

    pmm3d generate runs/gpt --prompt "The list" --temperature 0 --out text.txt
    """
    with all_ranks() as comm, ExitStack() as progress:
        from ..nn.training.continuation import continue_text

        def tell(text: str) -> None:
            progress.close()
            print(text, end="", flush=True)
            progress.push(lambda kind, *_: kind and print(flush=True))  # an error begins a line

        logging.getLogger("pmm3d.nn").setLevel(logging.WARNING)  # no line inside the text
        on_first(comm, lambda: _check_text(out, overwrite))
        progress.enter_context(bar("generate", comm.rank == 0))
        done = continue_text(
            comm,
            run,
            prompt,
            length,
            tell,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            end=end or (() if no_end else None),
            seed=seed,
            tokenizer=tokenizer,
            accept=accept or (),
            ema=not no_ema,
        )
        if out is not None:
            on_first(comm, lambda: _write_text(out, done.text))
        if comm.rank == 0:
            say(
                f"\n{counted(done.length, 'token')} {_by(done)}"
                + (f", written to {out}" if out else "")
                + (
                    f". The text is longer than the {done.exceeded} positions of the network: later tokens depend on "
                    f"the last {done.exceeded} tokens only"
                    if done.exceeded
                    else ""
                )
            )


def _by(done: Any) -> str:
    """Return words about the weights and the grid of a result."""
    from ..nn.training.log import AVERAGED

    return f"by {done.checkpoint}{AVERAGED * done.averaged} on grid {done.grid}"


def _check_text(out: Path | None, overwrite: bool) -> None:
    """Raise DataError if OUT may not be written."""
    if out is not None:
        check_replaceable(out, overwrite)
        check_writable(out)
    elif overwrite:
        raise DataError("--overwrite has no effect without --out: leave it out, or name the file with --out")


def _write_text(out: Path, text: str) -> None:
    with _replacing(out) as partial:
        partial.write_text(text, encoding="utf-8")


@contextmanager
def _replacing(out: Path) -> Iterator[Path]:
    """As a context: the path of a temporary file that replaces OUT at the end. Raises DataError if this fails."""
    partial = out.with_name(f".{out.name}.{os.getpid()}.partial")
    try:
        yield partial
        sync(partial)
        os.replace(partial, out)
    except OSError as error:
        raise DataError(f"cannot write {out}: {error.strerror or error}") from None
    finally:
        with suppress(OSError):
            partial.unlink()


def _beside(out: Path, what: str, temporary: ExitStack) -> Path:
    """Return the path of a temporary HDF5 file in the folder of OUT, which is removed at the end."""
    path = out.with_name(f".{out.name}.{os.getpid()}.{what}.h5")
    temporary.callback(path.unlink, missing_ok=True)
    return path


def _write_csv(source: Path, out: Path) -> list[str]:
    """Write predictions in HDF5 as CSV: outputs, or probabilities, for classes after the most probable class. Return
    the names of the columns."""
    import h5py
    import numpy as np

    from ..io.dataset import columns_of, text_of

    with (
        _replacing(out) as partial,
        h5py.File(source) as file,
        open(partial, "w", newline="", encoding="utf-8") as written,
    ):
        lines, outputs, classes = csv.writer(written), file["outputs"], file.get("classes")
        names = columns_of(outputs) or [f"output {column}" for column in range(outputs.shape[1])]
        if classes is not None:
            names = list(map(text_of, classes.attrs.get("class_names", range(outputs.shape[1]))))
        header = names if classes is None else ["class", *names]
        lines.writerow(header)
        values = file.get("probabilities", outputs)
        for start in range(0, len(values), LINES_AT_ONCE):
            rows = slice(start, start + LINES_AT_ONCE)
            texts = np.asarray(values[rows]).astype(str).tolist()
            chosen = None if classes is None else classes[rows].tolist()
            lines.writerows(texts if chosen is None else ([names[at], *line] for at, line in zip(chosen, texts)))
        return header
