"""The commands of `pmm3d convert`."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Annotated

import typer

from ..errors import DataError
from ..io.conversion import INPUTS, TARGETS, Converted, convert
from ..io.table import is_parquet
from ..io.text import convert_text
from ..text import counted, names_in_words
from .output import bar, check_writable
from .ranks import one_process
from .terminal import say

MOST_NAMES = 8


@one_process
def table_command(
    source: Annotated[Path, typer.Argument(help="A table (CSV, or .parquet), or a .npz file of arrays.")],
    target: Annotated[Path, typer.Argument(help="The HDF5 file to write.")],
    inputs: Annotated[
        str | None,
        typer.Option(
            help="Columns of a table that are inputs: names or indices, as in pressure,speed. Default: all columns "
            "that are neither targets nor the group. For a .npz file: name of the array of samples. Default: x."
        ),
    ] = None,
    targets: Annotated[
        str | None,
        typer.Option(
            help="Columns of a table that are targets: names or indices, as in 'heat flux,yield'. Default: the last "
            "column. For a .npz file: name of the array of targets. Default: y."
        ),
    ] = None,
    no_targets: Annotated[
        bool,
        typer.Option(
            "--no-targets", help="There are no targets, as in new samples for pmm3d predict. All columns are inputs."
        ),
    ] = False,
    classes: Annotated[bool, typer.Option("--classes", help="The targets are class labels: numbers or text.")] = False,
    class_names: Annotated[
        str | None,
        typer.Option(
            help="Class names in the order of their numbers, as in cat,dog. "
            "Gives a second file the numbers of the first. Implies "
            "--classes."
        ),
    ] = None,
    group_column: Annotated[
        str | None,
        typer.Option(
            help="Column of a table with the group of each row, such as a "
            "patient. It becomes the data set groups, for the key "
            "data.groups."
        ),
    ] = None,
    categories: Annotated[
        str | None,
        typer.Option(help="Inputs of a table that are texts, as in site,batch. Each text becomes a column of 0 and 1."),
    ] = None,
    missing: Annotated[
        str,
        typer.Option(
            help="Missing values of a table (an empty cell, NA, NaN): refuse; drop: leave the row out; mean: a "
            "missing input becomes the mean of its column, and lines without a target are left out."
        ),
    ] = "refuse",
    header: Annotated[
        bool | None,
        typer.Option(
            "--header/--no-header",
            help="Whether the first line of a CSV file names the columns. Default: detected from the first two lines.",
        ),
    ] = None,
    delimiter: Annotated[
        str | None, typer.Option(help="Delimiter of a CSV file. Default: detected from the first line.")
    ] = None,
    encoding: Annotated[
        str | None, typer.Option(help="Encoding of a CSV file, such as latin-1 or utf-16. Default: utf-8.")
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="Type of the numbers of a table: float32 or float64. Default: float32.")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace TARGET if it exists.")] = False,
) -> None:
    """Convert samples from CSV, Parquet or .npz to the HDF5 file that training reads.

    The last line of the output shows the result: header, inputs, targets, classes. The samples must fit into memory.
    The file has a temporary name until it is complete. Only rank 0 converts.

    [bold]Examples[/]

    pmm3d convert lab.csv lab.h5 --targets "heat flux,yield"

    pmm3d convert lab.csv lab.h5 --categories site --missing mean

    pmm3d convert lab.parquet lab.h5 --targets flux

    pmm3d convert iris.csv iris.h5 --classes     species as text become 0, 1, 2

    pmm3d convert new.csv new.h5 --no-targets     for pmm3d predict

    pmm3d convert digits.npz digits.h5 --inputs images --targets labels
    """
    arrays = source.suffix.lower() == ".npz"
    if no_targets and targets is not None:
        raise DataError("--targets and --no-targets do not go together: leave one of them out")
    check_writable(target)
    names = None if class_names is None else _listed(class_names)
    with bar("convert"):
        done = convert(
            source,
            target,
            inputs=inputs if arrays else _columns(inputs),
            targets=False if no_targets else targets if arrays else _columns(targets),
            classes=classes if names is None else names,
            group_column=group_column,
            categories=_columns(categories),
            missing=missing,
            header=header,
            delimiter=delimiter,
            encoding=encoding,
            dtype=dtype,
            overwrite=overwrite,
        )
    contents = _in_words(
        done, inputs if arrays and inputs else INPUTS, targets if arrays and targets else TARGETS, is_parquet(source)
    )
    sampled = done.columns is None and not arrays
    say(f"wrote {target}: {contents}{'; no header: the first line is a sample' if sampled else ''}")


@one_process
def text_command(
    sources: Annotated[list[Path], typer.Argument(help="Text files. Their texts are joined in this order.")],
    target: Annotated[Path, typer.Argument(help="The HDF5 file to write.")],
    tokenizer: Annotated[
        Path | None,
        typer.Option(
            help="A tokenizer.json of the package tokenizers, for example of "
            "GPT-2 or Llama. Default: each byte is a token."
        ),
    ] = None,
    between: Annotated[
        str,
        typer.Option(show_default=False, help="Text between two files, such as <|endoftext|>. Default: a line end."),
    ] = "\n",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace TARGET if it exists.")] = False,
) -> None:
    """Convert text to the tokens in HDF5 that GPT and Llama train on.

    The text must fit into memory. The file has a temporary name until it is complete. Only rank 0 converts.

    [bold]Examples[/]

    pmm3d convert text book.txt book.h5

    pmm3d convert text a.txt b.txt both.h5 --tokenizer tokenizer.json
    """
    check_writable(target)
    with bar("convert text"):
        done = convert_text(sources, target, tokenizer=tokenizer, between=between, overwrite=overwrite)
    say(
        f"wrote {target}: {counted(done.tokens, 'token')} of a vocabulary of {done.vocabulary:,}, "
        f"{counted(done.bytes, 'byte')} of text"
    )


def _listed(text: str) -> list[str]:
    """Return the names in a comma-separated list. A name that contains a comma is quoted."""
    return [name.strip() for name in next(csv.reader([text], skipinitialspace=True), [""])]


def _columns(text: str | None) -> list[str] | None:
    """Return the columns in a comma-separated list; None if there is no list."""
    return None if text is None else _listed(text) if text else []


def _in_words(done: Converted, inputs: str, targets: str, parquet: bool) -> str:
    """Return shapes, columns, classes and header in words."""
    words = [f"{inputs} {' x '.join(map(str, done.inputs))}{_of(done.columns)}"]
    if done.targets is None:
        words.append("no targets")
    else:
        words.append(f"{targets} {' x '.join(map(str, done.targets))}{_of(done.target_columns)}")
    if done.classes is not None:
        sizes = [f"{name} ({count})" for name, count in done.classes.items()]
        words.append(f"{counted(len(sizes), 'class')}: {names_in_words(sizes, MOST_NAMES)}")
    if done.columns is not None:
        words += [] if parquet else ["the first line is a header"]
    if done.dropped:
        words.append(f"{counted(done.dropped, 'row' if parquet else 'line')} with missing values left out")
    if done.filled:
        words.append(f"{counted(done.filled, 'missing value')} replaced by the mean of the column")
    if done.columns and "" in done.columns:
        words.append(
            "note: an input has no name, as the row numbers that pandas writes; leave them out with to_csv(index=False)"
        )
    return "; ".join(words)


def _of(columns: list[str] | None) -> str:
    return f" ({names_in_words(map(repr, columns), MOST_NAMES)})" if columns else ""
