"""Buffers of stages (the statistics of batch norm, say) as they were before what a failure throws away.

A stage moves its buffers in every FORWARD, long before the UPDATE that uses the microbatch's gradient. So that weights
and buffers can be left with the same microbatches behind them, a stage's buffers are marked where the forwards of an
update begin, and put back to the mark of the oldest update that did not come.
"""

from __future__ import annotations

from collections.abc import Iterable

from pipec.runtime.buffers import Mark
from pipec.runtime.stages import Stage


class Statistics:
    """Marks of the buffers of stages, by the update whose forwards begin there. Stages without buffers have none."""

    def __init__(self, stages: Iterable[Stage], every: int) -> None:
        """``every``: microbatches per update."""
        self._stages = {stage.index: stage for stage in stages if stage.buffers}
        self._every = every
        self.marks: dict[int, dict[int, list[Mark]]] = {index: {} for index in self._stages}

    def mark(self, stage: int, microbatch: int) -> None:
        """Before the FORWARD of a stage that has buffers."""
        if microbatch % self._every == 0:
            self.marks[stage][microbatch // self._every] = self._stages[stage].buffers.mark()

    def updated(self, stage: int, update: int) -> None:
        """After an UPDATE: what was before it is not asked for again."""
        if stage in self.marks:
            self.marks[stage].pop(update, None)

    def shift(self, by: int) -> None:
        """Count updates from ``by`` updates later on."""
        self.marks = {
            stage: {update - by: mark for update, mark in own.items()} for stage, own in self.marks.items()
        }

    def put_back(self) -> None:
        """Let every stage have the buffers that belong to its last UPDATE."""
        for index, own in self.marks.items():
            if own:
                self._stages[index].buffers.go_back(own[min(own)])
        self.marks = {index: {} for index in self._stages}
