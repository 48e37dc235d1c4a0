"""The answer of `pmm3d plan`: a ranking by the one of its three sources that was asked for, and what is said beside."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ...errors import Pmm3dError
from ...model.axonn import ORDER, parse_order
from ...model.candidates import Ranking
from ...model.gpt_ranking import Search, rank_by_axonn
from ...model.interval import HOUR, advice
from ...model.machines import Machine
from .asked import Asked
from .machines import bandwidths_of

NODE_WRITES = 1e9
"""Bytes/s that a node is taken to write, where nobody measured a checkpoint."""


@dataclass(frozen=True)
class Answer:
    """A ranking.

    peak      flop/s of a rank that the share is of; 0 where seconds are not those of a whole step
    product   m, n, k, of a product
    unit      what the seconds are of
    notes     what is to be known of the seconds
    advice    how often to write a checkpoint
    """

    ranking: Ranking
    peak: float
    unit: str
    product: tuple[int, int, int] | None = None
    notes: tuple[str, ...] = ()
    advice: tuple[str, ...] = ()

    def as_json(self) -> list[dict[str, Any]]:
        """The ranked grids, the best first."""
        return [{"grid": candidate.grid._asdict(), "seconds": candidate.seconds, "terms": dict(candidate.terms),
                 "memory": dict(candidate.memory), "bytes": candidate.bytes, "preset": candidate.preset,
                 "schedule": candidate.schedule, "settings": dict(candidate.settings)}
                for candidate in self.ranking.candidates]


def answered(asked: Asked, machine: Machine, top: int) -> Answer:
    """Raises Pmm3dError where there is no answer, with the remedy."""
    if asked.axonn:
        return _by_axonn(asked, machine)
    limit = asked["memory"] or machine.memory or None
    if asked.source != "product":
        ranking, product, unit = _training(asked, machine, limit, top), None, "a step"
    else:
        from ...model.ranking import rank_products

        product, unit = (asked["m"], asked["n"], asked["k"]), "a product"
        ranking = rank_products(product, asked.ranks, asked["dtype"] or "float64", machine, limit=limit, top=top)
    peak = machine.peak.get(ranking.dtype, machine.peak.get(machine.stands_for(ranking.dtype), 0.0))
    return Answer(ranking, peak, unit, product, advice=_how_often(asked, machine, ranking))


def _by_axonn(asked: Asked, machine: Machine) -> Answer:
    order = ORDER if asked["order"] is None else parse_order(asked["order"])
    search = Search(asked["powers_of_two"], asked["min_tensor"] or 1, asked["memory"])
    ranking = rank_by_axonn(asked.model(), asked.ranks, bandwidths_of(machine), search, order)
    memory = "" if asked["memory"] else " Memory is shown, and drops nothing without --memory."
    return Answer(ranking, 0.0, "of collectives in a step", notes=(
        f"Five terms of AxoNN's authors, ranks along {', '.join(order)}: collectives of the fully connected layers "
        f"alone, without computation, latency, overlap.{memory}",))


def _training(asked: Asked, machine: Machine, limit: int | None, top: int) -> Ranking:
    from ...nn.training import config as configuration
    from ...nn.training.planning import pipes_of, rank_training, seqs_of
    from ...nn.training.samples import SampleSizes

    last, sizes, chosen = asked["classes"] or asked["outputs"], None, dict[str, Any]()
    if asked.config is None:
        config = configuration.checked(asked.settings())
        sizes = SampleSizes(1, asked.model().vocabulary, True)
        chosen = {"activations": ("replicated", "sharded"), "recompute": ("none", "full")}
    else:
        config = configuration.load(asked.config)
        tokens = config.data.sequence is not None
        if (asked["features"] if tokens else asked["vocabulary"]) is not None:
            raise Pmm3dError(
                "the data are tokens (data.sequence): give --vocabulary in place of --features" if tokens else
                "--vocabulary is of tokens, and the configuration has no data.sequence: leave it out")
        if last or asked["vocabulary"]:
            sizes = SampleSizes(asked["features"] or 1, last or asked["vocabulary"], not asked["outputs"])
    return rank_training(config, asked.ranks, machine, limit=limit, samples=sizes, top=top,
                         pipes=pipes_of(config, asked.ranks), seqs=seqs_of(config, asked.ranks), **chosen)


def _how_often(asked: Asked, machine: Machine, ranking: Ranking) -> tuple[str, ...]:
    """In a sentence, for the first candidate."""
    if asked["mtbf"] is None:
        return ()
    best = ranking.candidates[0]
    seconds = asked["write_seconds"]
    if seconds is None:
        seconds = ranking.seconds_to_save(best, machine.ranks_per_node, NODE_WRITES)
    how = (f"A checkpoint is taken to be written in {seconds:.3g} s, at 1 GB/s a node: --write-seconds says it better",)
    found = advice(seconds, asked["mtbf"] * HOUR, best.seconds)
    return (found.sentence, *(how if asked["write_seconds"] is None else ()))
