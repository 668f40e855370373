"""What a weight rule is: which version of its stage's weights every task of an asynchronous plan reads.

A rule has two halves. This one, at compile time, is a pure function of how many UPDATEs stand before each task; the
other, at run time, makes the weights that no version holds (corrected, predicted).
"""

from __future__ import annotations

from math import nan
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
from attrs import fields, frozen, has

from pipec.ir import Kind, Table

Counts = npt.NDArray[np.int64]
READERS = (Kind.FORWARD, Kind.RECOMPUTE, Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)


@frozen(eq=False)
class Reads:
    """What a rule is told of each task, column by column, shape (tasks,).

    Attributes:
        kind, stage: as in the table.
        update: the number of the update that the gradient of the task's microbatch goes into.
        newest: how many UPDATEs of its stage stand before the task.
        at_forward: ``newest`` of the FORWARD of the same stage and microbatch.
        at_first: ``newest`` of the microbatch's FORWARD at the stage that had the fewest UPDATEs: the first one.
    """

    kind: npt.NDArray[Any]
    stage: npt.NDArray[Any]
    update: Counts
    newest: Counts
    at_forward: Counts
    at_first: Counts


class Rule:
    """A weight rule: frozen options, a name, and the version that each task reads.

    ``buffers``: what it keeps of its own beside weight versions, in copies of the weights' size. ``longest``: over how
    many updates a task may read back, for a rule that says so and not the order of tasks.
    """

    name: ClassVar[str]
    buffers: ClassVar[int] = 0
    longest: ClassVar[int] = 0

    def versions(self, reads: Reads) -> Counts:
        """Per task the version that it reads, shape (tasks,); rows of other tasks do not matter."""
        raise NotImplementedError(f"the weight rule {self.name!r} does not say which versions its tasks read")

    @property
    def text(self) -> str:
        """The rule as a plan names it: ``stash vertical_sync``, ``corrected decay=0.135``."""
        words = [self.name]
        options: Any = type(self)
        for option in fields(options) if has(options) else ():
            value = getattr(self, option.name)
            if value is True:
                words.append(option.name)
            elif value is not False and value is not None:
                words.append(f"{option.name}={value}")
        return " ".join(words)


def number_of(value: Any) -> float:
    """An option that is a number, or one in the text of a plan; nan for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return nan
    try:
        return float(value)
    except ValueError:
        return nan


def update_every(table: Table, microbatches: int) -> int:
    """How many backwards of a stage go into one of its updates: all microbatches over the updates of a stage."""
    count = int(table.microbatch[table.kind == Kind.UPDATE].max(initial=0)) + 1
    return max(1, microbatches // count)


def newest_by_row(table: Table) -> Counts:
    """Per task the UPDATEs of its stage in earlier rows, for rows that keep every lane's order."""
    order = np.argsort(table.stage, kind="stable")
    update = (table.kind[order] == Kind.UPDATE).astype(np.int64)
    before = np.cumsum(update) - update
    first = np.flatnonzero(np.diff(table.stage[order], prepend=-2))
    before -= np.repeat(before[first], np.diff(np.append(first, len(order))))
    made = np.empty(len(order), np.int64)
    made[order] = before
    return made


def declared_versions(rule: Rule, table: Table, newest: Counts, stages: int, microbatches: int) -> Counts:
    """Per task the weight version that ``rule`` lets it read, shape (tasks,); 0 for stages that are never updated.

    An UPDATE has the version that it replaces, a COPY none.
    """
    forward = np.flatnonzero(table.kind == Kind.FORWARD)
    at_forward = np.zeros((stages + 1, microbatches), np.int64)
    at_forward[table.stage[forward], table.microbatch[forward]] = newest[forward]
    update = table.kind == Kind.UPDATE
    trained = np.zeros(stages + 1, bool)
    trained[table.stage[update]] = True
    first = np.zeros(microbatches, np.int64)
    if trained.any():
        first = at_forward[trained].min(axis=0)
    microbatch = np.where(update, 0, table.microbatch)
    reads = Reads(table.kind, table.stage, table.microbatch.astype(np.int64) // update_every(table, microbatches),
                  newest, at_forward[table.stage, microbatch], first[microbatch])
    made = np.where(np.isin(table.kind, READERS) & trained[table.stage], rule.versions(reads), 0)
    return np.where(update, newest, made)
