"""Tables of pipelines: the actions of each rank in order. This module needs no MPI and no arrays."""

from __future__ import annotations

import csv
import io
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from ...errors import Pmm3dError

KINDS = {
    "F": "forward",
    "I": "backward for the input",
    "W": "backward for the weights",
    "B": "whole backward",
    "SEND_F": "send of an output",
    "RECV_F": "receive of an input",
    "SEND_B": "send of an input's gradient",
    "RECV_B": "receive of an output's gradient",
}
TOGETHER = "OVERLAP_F_B"
COMPUTING = "F", "I", "W", "B", TOGETHER
"""Kinds of actions that compute."""
_ONE = re.compile(r"(\d+)(SEND_F|RECV_F|SEND_B|RECV_B|F|I|W|B)(\d+)")
_PAIR = re.compile(rf"\((.+);(.+)\){TOGETHER}")
SHOWN = 4
"""Number of actions that an error message shows before and after the wrong action."""


class PipelineError(Pmm3dError):
    """A table cannot be executed, is not a training step, or does not fit the grid or the network."""


class PipelineAction(NamedTuple):
    """Action of a stage, in PyTorch's notation: `2F0` is the forward pass of micro-batch 0 on stage 2.

    Parameters
    ----------
    kind : str
        "F": forward. "I": backward for the input. "W": backward for the weights. "B": whole backward. "SEND_F",
        "RECV_F", "SEND_B", "RECV_B": messages of outputs and of their gradients. "OVERLAP_F_B": `parts` at once.
    stage, micro : int
        Numbers of the stage and of the micro-batch, from 0.
    parts : tuple
        The two actions of an OVERLAP_F_B, otherwise empty.

    Examples
    --------
    >>> from pmm3d.nn.pipeline import PipelineAction
    >>> str(PipelineAction("F", 2, 0)), str(PipelineAction.read("(0F7;7B3)OVERLAP_F_B").parts[1])
    ('2F0', '7B3')
    """

    kind: str
    stage: int
    micro: int
    parts: tuple[PipelineAction, ...] = ()

    @property
    def each(self) -> tuple[PipelineAction, ...]:
        """Parts of the action, or the action itself."""
        return self.parts or (self,)

    @classmethod
    def both(cls, forward: PipelineAction, backward: PipelineAction) -> PipelineAction:
        """Pair of a forward and a backward pass."""
        return cls(TOGETHER, forward.stage, forward.micro, (forward, backward))

    @classmethod
    def read(cls, text: str) -> PipelineAction:
        """Action of a text such as "2F0" or "(0F7;7B3)OVERLAP_F_B". Raises PipelineError for other texts."""
        if match := _PAIR.fullmatch(text):
            return cls.both(*map(cls.read, match.groups()))
        if match := _ONE.fullmatch(text):
            return cls(match[2], int(match[1]), int(match[3]))
        raise PipelineError(
            f"{text!r} is not an action. Write stage, kind and micro-batch, such as 2F0, 2I0, 2W0, 2B0 "
            f"or (0F7;7B3){TOGETHER}"
        )

    @property
    def in_words(self) -> str:
        """Description for error messages.

        >>> PipelineAction("I", 1, 2).in_words
        '1I2 (backward for the input of micro-batch 2 on stage 1)'
        """
        return f"{self} ({KINDS.get(self.kind, 'both')} of micro-batch {self.micro} on stage {self.stage})"

    def __str__(self) -> str:
        return f"({';'.join(map(str, self.parts))}){TOGETHER}" if self.parts else f"{self.stage}{self.kind}{self.micro}"


def check_sizes(**sizes: int) -> None:
    """Raises PipelineError if a number, such as ranks= or micro_batches=, is below 1."""
    for name, size in sizes.items():
        if size < 1:
            raise PipelineError(f"{name} must be at least 1, got {size}")


Key = tuple[str, int, int]
"""(kind, stage, micro-batch) of an action. A whole backward pass has the kind "I"."""


class Message(NamedTuple):
    """A message between ranks. number: number of earlier messages from `source` to `target`. receive: its action."""

    source: int
    target: int
    number: int
    receive: PipelineAction

    def __str__(self) -> str:
        kind, stage, micro, _ = self.receive
        return f"{kind} of micro-batch {micro} on stage {stage} from stage {stage + (1 if kind == 'RECV_B' else -1)}"


@dataclass(frozen=True)
class PipelineSchedule:
    """The actions of each rank of a pipeline, in the order of execution.

    Parameters
    ----------
    actions : tuple
        The actions of each rank.
    name : str
        Name of the schedule or of the file. Default: "a table".

    Attributes
    ----------
    ranks, micro_batches : int
        Numbers of ranks and of micro-batches.
    stages : dict
        Stage -> rank.
    chains : tuple of range
        Stages that a micro-batch passes through. DualPipe has two chains. All other schedules have one chain.

    Examples
    --------
    >>> from pmm3d.nn.pipeline import PipelineSchedule
    >>> table = PipelineSchedule.read("0F0,0B0\\n1F0,1B0")
    >>> table.stages, table.micro_batches, list(table.chains)
    ({0: 0, 1: 1}, 1, [range(0, 2)])
    """

    actions: tuple[tuple[PipelineAction, ...], ...]
    name: str = "a table"

    @classmethod
    def of(cls, name: str, actions: Iterable[Iterable[PipelineAction]]) -> PipelineSchedule:
        """Table of the actions of each rank. Raises PipelineError if there are no actions."""
        table = cls(tuple(map(tuple, actions)), name)
        if not any(table.actions):
            raise PipelineError(f"{name}: there are no actions")
        return table

    @classmethod
    def read(cls, text: str, name: str = "a table") -> PipelineSchedule:
        """Table of a CSV text: a line for each rank, with an action or nothing in each cell.

        As in older tables of PyTorch, a B is read as I if the same stage and micro-batch has a W. Raises PipelineError,
        with line and cell, if a cell is not an action.
        """
        ranks = list[list[PipelineAction]]()
        for rank, line in enumerate(csv.reader(io.StringIO(text.strip("\n")))):
            ranks.append([])
            for cell, word in enumerate(map(str.strip, line)):
                try:
                    ranks[rank] += [PipelineAction.read(word)] if word else []
                except PipelineError as error:
                    raise PipelineError(f"{name}, rank {rank} (line {rank + 1}), cell {cell + 1}: {error}") from None
        late = {(action.stage, action.micro) for actions in ranks for action in actions if action.kind == "W"}
        return cls.of(
            name,
            (
                [
                    action._replace(kind="I") if action.kind == "B" and action[1:3] in late else action
                    for action in actions
                ]
                for actions in ranks
            ),
        )

    def __str__(self) -> str:
        """CSV text of the table."""
        return "\n".join(",".join(map(str, actions)) for actions in self.actions) + "\n"

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return len(self.actions)

    @property
    def without_messages(self) -> PipelineSchedule:
        """Copy of the table without sends and receives."""
        return self.of(
            self.name, ([action for action in actions if action.kind in COMPUTING] for actions in self.actions)
        )

    def each(self) -> Iterator[tuple[int, int, PipelineAction]]:
        """Yield (rank, place in the rank's list, action). Overlapped passes are yielded one after the other."""
        for rank, actions in enumerate(self.actions):
            for place, action in enumerate(actions):
                for part in action.each:
                    yield rank, place, part

    @cached_property
    def stages(self) -> dict[int, int]:
        """Stage -> rank."""
        return dict(sorted({action.stage: rank for rank, _, action in self.each()}.items()))

    @cached_property
    def micro_batches(self) -> int:
        """Number of micro-batches."""
        return 1 + max((action.micro for _, _, action in self.each()), default=-1)

    @cached_property
    def _chain_of(self) -> dict[int, range]:
        """Micro-batch -> stages that the micro-batch passes through."""
        passed = defaultdict[int, set[int]](set)
        for _, _, action in self.each():
            if action.kind == "F":
                passed[action.micro].add(action.stage)
        return {micro: range(min(stages), max(stages) + 1) for micro, stages in sorted(passed.items())}

    @property
    def chains(self) -> tuple[range, ...]:
        """Stages that a micro-batch passes through, for each copy of the network."""
        return tuple(dict.fromkeys(self._chain_of.values()))

    @cached_property
    def _messages(self) -> dict[PipelineAction, Message]:
        """Send or receive -> message."""
        messages, numbers = dict[PipelineAction, Message](), Counter[tuple[int, int]]()
        for source, _, action in self.each():
            if action.kind.startswith("SEND"):
                other = action.stage + (1 if action.kind == "SEND_F" else -1)
                receive, target = PipelineAction(f"RECV_{action.kind[-1]}", other, action.micro), self.stages[other]
                messages[action] = messages[receive] = Message(source, target, numbers[source, target], receive)
                numbers[source, target] += 1
        return messages

    def _needed(self, action: PipelineAction) -> list[Key]:
        """Keys of the actions, on any rank, whose results an action needs."""
        kind, stage, micro = action[:3]
        chain = self._chain_of.get(micro, range(stage, stage + 1))
        if kind == "F":
            return [("F", stage - 1, micro)] if stage > chain.start else []
        if kind == "W":
            return [("I", stage, micro)]
        return [("F", stage, micro)] + [("I", stage + 1, micro)] * (stage < chain.stop - 1)

    def _complain(self, rank: int, place: int, why: str) -> PipelineError:
        """Error that shows the place of an action."""
        actions, first = self.actions[rank], max(0, place - SHOWN)
        words = [
            f">> {action} <<" if number == place else str(action)
            for number, action in enumerate(actions[first : place + SHOWN + 1], first)
        ]
        return PipelineError(
            f"{self.name}: {why}. Rank {rank}, action {place + 1} of {len(actions)}: "
            f"{'... ' * (first > 0)}{', '.join(words)}{' ...' * (place + SHOWN + 1 < len(actions))}"
        )


def key_of(action: PipelineAction) -> Key:
    return "I" if action.kind == "B" else action.kind, action.stage, action.micro


def check(table: PipelineSchedule) -> None:
    """Check that a table is a training step that can be executed.

    Parameters
    ----------
    table : PipelineSchedule
        The table. Sends and receives are ignored.

    Raises
    ------
    PipelineError
        If the table breaks a rule. The error names the place.

    Notes
    -----
    Each micro-batch passes through all stages of a chain, in one forward and one backward pass. The backward pass is
    whole or consists of I and W. A stage is on one rank. No rank waits forever. The weight gradients of a stage are in
    ascending order of micro-batches, so that their sum has the same bits in all schedules.
    """
    table = table.without_messages
    _check_stages(table)
    done, latest = dict[Key, tuple[int, int]](), dict[int, int]()
    for rank, place, action in table.each():
        for key in (key_of(action), *([("W", action.stage, action.micro)] if action.kind == "B" else [])):
            if key in done:
                raise table._complain(rank, place, f"{action} repeats action {done[key][1] + 1}")
            done[key] = rank, place
        for needed in table._needed(action):
            if table.stages.get(needed[1]) == rank and needed not in done:
                raise table._complain(rank, place, f"{action} comes before {_in_words(needed)}")
        if action.kind in ("B", "W"):
            if action.micro < latest.get(action.stage, 0):
                raise table._complain(
                    rank,
                    place,
                    f"the weight gradient of micro-batch {action.micro} comes after the "
                    f"gradient of micro-batch {latest[action.stage]}. Ascending order is needed, so "
                    "that sums have the same bits as in other schedules",
                )
            latest[action.stage] = action.micro
    for micro, chain in table._chain_of.items():
        for stage in chain:
            for kind in "FIW":
                if (kind, stage, micro) not in done:
                    raise PipelineError(
                        f"{table.name}: {KINDS[kind]} of micro-batch {micro} on stage {stage}, on rank "
                        f"{table.stages[stage]}, is missing ({stage}{kind}{micro})"
                    )
    places = Counter(rank for rank, _ in in_order(table))
    for rank, actions in enumerate(table.actions):
        if places[rank] < len(actions):
            waiting = actions[places[rank]]
            needed = [key for part in waiting.each for key in table._needed(part)][-1]
            raise table._complain(rank, places[rank], f"deadlock: {waiting} waits for {_in_words(needed)}")


def _check_stages(table: PipelineSchedule) -> None:
    ranks = dict[int, int]()
    for rank, place, action in table.each():
        if ranks.setdefault(action.stage, rank) != rank:
            raise table._complain(
                rank,
                place,
                f"stage {action.stage} is on rank {ranks[action.stage]} and on rank {rank}. Put each stage on one rank",
            )
    stages = [stage for chain in table.chains for stage in chain]
    if sorted(stages) != list(range(len(ranks))):
        missing = sorted({*range(max(ranks) + 1)} - set(ranks))
        passed = ", ".join(f"{chain.start} to {chain.stop - 1}" for chain in table.chains)
        raise PipelineError(
            f"{table.name}: the stages are {sorted(ranks)}"
            + (
                f"; {missing} are on no rank"
                if missing
                else f", and micro-batches pass through {passed}, which overlap"
            )
        )
    if missing := sorted({*range(table.micro_batches)} - set(table._chain_of)):
        raise PipelineError(f"{table.name}: micro-batch {missing[0]} has no forward pass")


def in_order(table: PipelineSchedule) -> list[tuple[int, PipelineAction]]:
    """(rank, action) in an order in which the actions can be executed. Actions that would wait forever are left out."""
    ordered, done, places, waiting = (
        list[tuple[int, PipelineAction]](),
        set[Key](),
        [0] * table.ranks,
        {*range(table.ranks)},
    )
    while waiting:
        rank = waiting.pop()
        for action in table.actions[rank][places[rank] :]:
            if any(key not in done for part in action.each for key in table._needed(part)):
                break
            ordered.append((rank, action))
            places[rank] += 1
            for part in action.each:
                done.add(key_of(part))
                waiting |= {table.stages.get(part.stage + step, rank) for step in (-1, 1)} - {rank}
    return ordered


def _in_words(key: Key) -> str:
    kind, stage, micro = key
    return f"the {KINDS[kind]} of micro-batch {micro} on stage {stage}"


def with_messages(table: PipelineSchedule) -> PipelineSchedule:
    """Table with sends and receives.

    Parameters
    ----------
    table : PipelineSchedule
        A checked table.

    Returns
    -------
    PipelineSchedule
        Each receive is before the action that needs the message. Each send is after the action that computes the
        message. Stages on the same rank exchange no messages.

    Examples
    --------
    >>> from pmm3d.nn.pipeline import PipelineSchedule, with_messages
    >>> print(with_messages(PipelineSchedule.read("0F0,0B0\\n1F0,1B0")), end="")
    0F0,0SEND_F0,0RECV_B0,0B0
    1RECV_F0,1F0,1B0,1SEND_B0
    """

    def messages(action: PipelineAction, rank: int) -> tuple[list[PipelineAction], list[PipelineAction]]:
        kind, stage, micro = action[:3]
        chain, letter = table._chain_of[micro], "F" if kind == "F" else "B"
        if kind == "W":
            return [], []
        source, target = (stage - 1, stage + 1) if kind == "F" else (stage + 1, stage - 1)
        received, sent = (other in chain and table.stages[other] != rank for other in (source, target))
        return (
            [PipelineAction(f"RECV_{letter}", stage, micro)] * received,
            [PipelineAction(f"SEND_{letter}", stage, micro)] * sent,
        )

    table, ranks = table.without_messages, list[list[PipelineAction]]()
    for rank, actions in enumerate(table.actions):
        ranks.append([])
        for action in actions:
            sides = [messages(part, rank) for part in action.each]
            ranks[rank] += [
                *(one for before, _ in sides for one in before),
                action,
                *(one for _, after in sides for one in after),
            ]
    return PipelineSchedule.of(table.name, ranks)
