"""What `pmm3d plan` is asked for: options that belong together, checked before anything is planned."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...errors import Pmm3dError
from ...model.gpt import GPT

GPT_OPTIONS = ("layers", "hidden", "sequence", "batch", "heads", "micro_batches", "min_tensor", "powers_of_two")
GPT_NEEDS = ("layers", "hidden", "sequence", "batch")
PRODUCT_OPTIONS = ("m", "n", "k", "dtype")
TRAINING_OPTIONS = ("features", "outputs", "classes")
HEAD = 64
"""Columns of a head, if --heads is left out."""
WITH_AXONN = ("order", "min_tensor", "powers_of_two")
"""Options of the five terms alone."""
WITH_FULL = {"micro_batches": "which counts no passes",
             "ranks_per_node": "which knows the order of the ranks, no nodes",
             "mtbf": "which counts collectives alone", "write_seconds": "which counts collectives alone"}
"""Options that the five terms cannot heed."""
MTBF_NEEDS_STEPS = "a product has no checkpoints: plan a training (CONFIG) or --gpt"


@dataclass(frozen=True)
class Asked:
    """The options as they were given; None, or False, for those that were not."""

    ranks: int
    config: Path | None
    gpt: bool
    axonn: bool
    options: Mapping[str, Any]

    def __getitem__(self, name: str) -> Any:
        return self.options.get(name)

    @property
    def source(self) -> str:
        """"gpt", "training" or "product"."""
        return "gpt" if self.gpt else "training" if self.config else "product"

    def check(self) -> None:
        """Raises Pmm3dError for options that do not go together, or have no effect, with the remedy."""
        given = [name for name, value in self.options.items() if value is not None and value is not False]
        if self.gpt and self.config:
            raise Pmm3dError("a GPT has no configuration: leave out CONFIG, or --gpt and what belongs to it")
        own = {"gpt": GPT_OPTIONS, "training": TRAINING_OPTIONS, "product": PRODUCT_OPTIONS}
        if self.source == "product" and not any(self[name] is not None for name in "mnk"):
            raise Pmm3dError("what is to be planned: a product (--m --n --k), a training (the path of its TOML file), "
                             "or a GPT (--gpt)?" + self._belongs(given))
        for source, names in own.items():
            if source != self.source and (others := [name for name in given if name in names]):
                raise Pmm3dError(f"{option(others[0])} has no effect {_WITH[self.source]}: it is of {_OF[source]}. "
                                 "Leave it out")
        needs = {"gpt": GPT_NEEDS, "training": (), "product": ("m", "n", "k")}[self.source]
        if missing := [name for name in needs if self[name] is None]:
            raise Pmm3dError(f"{_OF[self.source]} needs {', '.join(map(option, missing))} too")
        if self["vocabulary"] is not None and self.source == "product":
            raise Pmm3dError("--vocabulary has no effect on a product: it is of a GPT (--gpt), or of a training on "
                             "tokens. Leave it out")
        given_sizes = [self[name] is not None for name in TRAINING_OPTIONS]
        if any(given_sizes) and (not given_sizes[0] or sum(given_sizes) != 2):
            raise Pmm3dError("samples are given by --features together with either --outputs or --classes")
        self._check_terms()

    def _belongs(self, given: list[str]) -> str:
        found = [name for name in given if name in GPT_OPTIONS]
        return f" {option(found[0])} belongs to --gpt" if found else ""

    def _check_terms(self) -> None:
        if self.axonn:
            if self.source != "gpt":
                raise Pmm3dError("--terms axonn is of the layers of a GPT: add --gpt, or take --terms full")
            for name, reason in WITH_FULL.items():
                if self[name] is not None:
                    raise Pmm3dError(f"{option(name)} has no effect with --terms axonn, {reason}: leave it out, or "
                                     "take --terms full")
        elif others := [name for name in WITH_AXONN if self[name]]:
            raise Pmm3dError(f"{option(others[0])} has no effect with --terms full, which plans all grids that the "
                             "library can train on, with its order of the ranks. Leave it out, or take --terms axonn")
        elif self["vocabulary"] == 0:
            raise Pmm3dError("--vocabulary 0 leaves out embedding and logits, which a network cannot: give the number "
                             "of tokens, or take --terms axonn")
        if self["write_seconds"] is not None and self["mtbf"] is None:
            raise Pmm3dError("--write-seconds has no effect without --mtbf: say how often the job fails")
        if self["mtbf"] is not None and self.source == "product":
            raise Pmm3dError(f"--mtbf has no effect here: {MTBF_NEEDS_STEPS}")

    def model(self) -> GPT:
        """The GPT of the five terms."""
        return GPT(**{name: self[name] for name in (*GPT_NEEDS, "heads", "vocabulary") if self[name] is not None})

    def settings(self) -> dict[str, dict[str, Any]]:
        """The configuration of a training of the GPT, in bfloat16 with AdamW."""
        gpt, micro_batches = self.model(), self["micro_batches"] or 1
        if gpt.batch % micro_batches:
            raise Pmm3dError(f"batch = {gpt.batch} must be a multiple of --micro-batches; got {micro_batches}")
        if gpt.heads is None and gpt.hidden % HEAD:
            raise Pmm3dError(f"give --heads: hidden = {gpt.hidden} is no multiple of {HEAD}, the columns of a head if "
                             "--heads is left out")
        return {"data": {"file": "none", "sequence": gpt.sequence, "batch_size": gpt.batch},
                "network": {"kind": "gpt", "layers": gpt.layers, "hidden": gpt.hidden, "library": "torch",
                            "heads": gpt.heads or gpt.hidden // HEAD},
                "training": {"precision": "bfloat16", "checkpoint_in_background": False},
                "grid": {"micro_batches": micro_batches}}


_OF = {"gpt": "a GPT (--gpt)", "training": "a training (CONFIG)", "product": "a product"}
_WITH = {"gpt": "with --gpt", "training": "with a CONFIG", "product": "on a product"}


def option(name: str) -> str:
    """As it is written.

        >>> option("min_tensor")
        '--min-tensor'
    """
    return "--" + name.replace("_", "-")
