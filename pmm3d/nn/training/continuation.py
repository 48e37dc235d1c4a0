"""Text after a prompt, by the network of a run."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from mpi4py import MPI

from ...arrays import take_device
from ...errors import DataError
from ...io import Checkpoints
from ...io.text import BYTES, Tokenizer
from ...text import shell_command
from ..facts import compare
from ..from_checkpoint import fill_weights
from ..transformer.generate import generate, longest_of
from .network import network_of
from .predict import recalled_run
from .samples import Recalled, tokenizer_file

Tell = Callable[[str], None]
INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
"""Text of bytes that are no character, or only a part of it."""


class Continued(NamedTuple):
    """Result of `continue_text`: the text after the prompt, its number of tokens without an end token, the checkpoint,
    the grid, the number of positions that the tokens exceed (0: they do not), and whether weights were averaged."""

    text: str
    length: int
    checkpoint: Path
    grid: str
    exceeded: int
    averaged: bool


def continue_text(
    comm: MPI.Intracomm,
    run: Path,
    prompt: str,
    length: int,
    tell: Tell,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    end: Collection[str] | None = None,
    seed: int = 0,
    tokenizer: Path | None = None,
    accept: Collection[str] = (),
    ema: bool = True,
) -> Continued:
    """Generate a text after a prompt by the network of a run; see `nn.generate`. Collective over comm.

    run: folder of a run or of a checkpoint; length: most tokens to generate; tell: function that rank 0 calls with the
    text of the prompt, and with each part of the text as soon as its characters are complete; end: texts of tokens that
    end the text and do not belong to it, default the end tokens of the tokenizer; tokenizer: HDF5 file of `pmm3d
    convert text`, default the run's data file, or bytes if it is missing and the vocabulary is that of bytes; accept:
    facts that may differ; ema: as in `predict.Asked`. The grid is that of `predict`. Raises Pmm3dError, on every rank,
    for a run without tokens, another tokenizer, an end that is no token, and an empty prompt.
    """
    with recalled_run(comm, run) as (grid, known, checkpoint, keeper):
        file, asked = tokenizer or tokenizer_file(known.config.data), None
        with grid.collective_call("generate", str(run), prompt, always=True):
            if known.config.data.sequence is None:
                raise DataError(
                    f"the network of {run} takes samples, not tokens: use "
                    + shell_command("pmm3d", "predict", run, "FILE")
                    + " --out OUT"
                )
            take_device(known.config.network.library, grid.local_rank)
        with grid.collective_call("generate: tokenizer", str(file), always=True):
            if grid.rank == 0:
                coder = _tokenizer(file, known, tokenizer is not None)
                compare(known.facts, {"tokenizer": coder.digest}, accept, str(file), rank=0, error=DataError)
                ends = coder.ends if end is None else [coder.token(each) for each in end]
                asked = coder.encode(prompt).tolist(), ends, coder.vocabulary
                if not asked[0]:
                    raise DataError("the prompt has no tokens: begin with a word, or a line break")
        network = network_of(known.config, grid, known.samples)
        averaged = fill_weights(network, checkpoint, Checkpoints(grid, keeper.folder), accept=accept, ema=ema)
        tokens, ends, vocabulary = grid.comm.bcast(asked)
        stream = TextStream(coder, tokens, tell) if grid.rank == 0 else None

        def on_token(_: int, token: int) -> None:
            if stream is not None and token not in ends:
                stream.add(token)

        made = generate(
            network,
            np.array(tokens),
            length,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            end=ends,
            seed=seed,
            vocabulary=vocabulary,
            on_token=on_token,
        ).tolist()
        generated = len(made) - len(tokens)
        with grid.collective_call("generate: text", always=True):
            text = "" if stream is None else stream.finish()
        positions = longest_of(network) or 0
        # no token depends on the last one
        exceeded = positions if generated and len(made) - 1 > positions else 0
        generated -= bool(generated and made[-1] in ends)
        return Continued(grid.comm.bcast(text), generated, checkpoint.path, str(grid.shape), exceeded, averaged)


class TextStream:
    """The text of tokens as they come. `tell` gets the text of the prompt, and the parts of the text after it.

    A token may end inside a character. Its text then comes with that of a later token. If the prompt ends inside a
    character, the character is in the text after it.
    """

    def __init__(self, coder: Tokenizer, prompt: Sequence[int], tell: Tell):
        self._coder, self._tell, self._tokens, self._text = coder, tell, [*prompt], ""
        self._told = len(prompt)  # the text of the first `_told` tokens is known to `tell`
        while self._is_incomplete(self._told):
            self._told -= 1
        self._prompt = coder.decode(prompt[: self._told])

    def add(self, token: int) -> None:
        """Add a token, and tell the text that it completes."""
        self._tokens.append(token)
        if not self._is_incomplete(len(self._tokens)):
            self.finish()

    def finish(self) -> str:
        """Tell the text of the last tokens, also of incomplete characters. Return the whole text after the prompt."""
        new = self._tokens[self._told :]
        before, text = map(self._coder.decode, (self._tokens[: self._told], self._tokens))
        # decoded together for the blank of the first token; alone if a broken character changes the text before it
        part = text[len(before) :] if text.startswith(before) else self._coder.decode(new)
        self._tell(self._prompt + part)
        self._prompt, self._text = "", self._text + part
        if new:  # the text of later tokens depends on no earlier ones
            self._tokens, self._told = new, len(new)
        return self._text

    def _is_incomplete(self, count: int) -> bool:
        return self._coder.decode(self._tokens[:count]).endswith(INCOMPLETE)


def _tokenizer(file: Path | None, known: Recalled, named: bool) -> Tokenizer:
    """Return the tokenizer. Raises DataError if it cannot be read, or has more tokens than the vocabulary."""
    vocabulary = known.samples.outputs
    remedy = (
        "--tokenizer names the tokenizer.json of the run's tokenizer, or a file that pmm3d convert text wrote with it"
    )
    if file is None:
        raise DataError(f"No tokenizer is in the data of the run ({known.config.data.source}). {remedy}")
    if not named and not file.exists():
        if vocabulary != BYTES:
            raise DataError(f"{file}, the data file of the run with its tokenizer, is missing. {remedy}")
        return Tokenizer()
    tokenizer = Tokenizer.of(file)
    if tokenizer.vocabulary > vocabulary:
        raise DataError(
            f"the tokenizer in {file} has {tokenizer.vocabulary} tokens, the network {vocabulary}. {remedy}"
        )
    return tokenizer
