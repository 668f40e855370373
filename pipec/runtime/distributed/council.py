"""Exchanges between ranks: tables with a row per rank, and what is said when one is missing from them.

Every row begins with which call it belongs to and whether the rank failed. So ranks that are not at the same call, or
of which one failed, find out at the next exchange instead of waiting for each other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch.distributed as dist

from pipec.errors import PipecError, RankError, RunError
from pipec.ir import Plan
from pipec.runtime.distributed.backend import UNDONE, other
from pipec.runtime.distributed.group import Groups, LostError, exchange, gather_objects
from pipec.runtime.distributed.notes import ALL
from pipec.runtime.distributed.records import RecordLines
from pipec.runtime.distributed.watch import Found, Watch
from pipec.runtime.failure import describe, told
from pipec.runtime.program import Op

BEGIN, SETTLE, FINISH, ANYWHERE, NORM, SAVE, LOAD, SWITCH, TRACE = range(9)
CALLS = ("the start of step(), evaluate(), forward() or flush()", "the end of its tasks", "the end of its step",
         "the end of what comes before its updates", "clip_grad_norm_", "save() or load()", "the end of load()",
         "switch()", "trace()")
UPDATED = "the parameters of this rank may have been updated already: go on from a checkpoint"
AFTER = dict.fromkeys(range(9), UNDONE) | {  # what a failure of another rank leaves of this one
    SAVE: "this rank is as before",
    LOAD: "this rank has loaded its part, so the ranks may differ now: load another checkpoint",
    SWITCH: "this rank goes on with the plan that it has",
}
FIXED = 10  # numbers of a row before those per loss


class Council:
    """All ranks of a pipeline and its replicas.

    Attributes:
        at: the plan that runs.
        lines: between all of them, if there are any.
        settled: nothing is left to be told in this call: it ended, or a failure is known to all.
        broken: a rank is gone; nothing can be exchanged any more.
        closed: this rank has left.
    """

    def __init__(self, groups: Groups, watch: Watch, plan: Plan, width: int, timeout: float) -> None:
        """``width``: numbers in every row."""
        place = groups.place
        self._groups, self._ranks, self._devices = groups, place.everyone, place.ranks[place.replica]
        self._waits = watch.waiting(0)
        self._me = self._ranks.index(dist.get_rank())
        self._watch, self._width, self._timeout = watch, width, timeout
        self.lines: RecordLines | None = None
        self.at, self.settled, self.broken, self.closed = plan, True, False, False

    def ready(self) -> None:
        """Raise RankError when the ranks cannot work together any more, RunError when this one has left."""
        if self.closed:
            raise RunError("this runner was closed, and has left the other ranks; call this inside the with block")
        if self.broken:
            raise RankError("the ranks have lost each other in an earlier call; start the processes again")

    def table(
        self, call: int, values: Sequence[float], failure: BaseException | None, width: int = 0
    ) -> list[list[float]]:
        """Everybody's row of one exchange, ``width`` numbers where that is more than usual.

        Raises:
            RankError: a rank is at another call, or another one failed.
        """
        self.ready()
        if self._watch.alarmed and failure is None:
            self.broken = True
            raise self._missing(-1, CALLS[call], RankError("a rank is gone"))
        row = [float(call), float(failure is not None), *values]
        row += [0.0] * (max(self._width, width) - len(row))
        size = len(self._ranks)
        try:
            if self.lines is not None and self.lines.fits(len(row)):
                table = self.lines.exchange(row, self._timeout)
            else:
                table = exchange(self._groups.everyone, row, size, self._me, self._timeout, self._waits.begins)
                self._waits.ends()
        except RankError as error:
            self.broken = True
            if failure is not None and call not in (SAVE, LOAD):  # there it says no more than that something is lost
                raise failure from None
            at = self._ranks[error.rank] if error.rank >= 0 else -1
            raise self._missing(at, CALLS[call], error) from failure or error
        except BaseException as error:  # an interrupt: the others may have this rank's row, and go on
            self.leave(error)
            raise
        if any(own[1] for own in table):
            self.settled = True
            story = None if failure is None or isinstance(failure, RankError) else self._story(failure)
            stories = self.gather(self._groups.everyone, story, "what went wrong on another rank")
            first = next((one for one in stories if one is not None), None)
            if failure is None:
                raise other(first, UPDATED if call == FINISH and self.at.update is not None else AFTER[call])
            return table
        odd = next((n for n, own in enumerate(table) if own[0] != call), None)
        if odd is not None:
            self.broken = True
            rank = self._ranks[odd]
            raise RankError(
                f"rank {dist.get_rank()} is at {CALLS[call]}, rank {rank} at {CALLS[int(table[odd][0])]}; all ranks "
                "make the same calls", rank,
            )
        return table

    def leave(self, error: BaseException) -> None:
        """``error`` ends a call of this rank that the others have not ended; all are told, and cannot go on."""
        if not isinstance(error, PipecError):  # such are raised by all
            self.broken = True
            self._watch.tell(self._story(error))

    def _story(self, failure: BaseException) -> tuple[int, str]:
        where = "; ".join(str(text).removeprefix("pipec: ") for text in getattr(failure, "__notes__", []))
        rank = dist.get_rank()
        return rank, f"rank {rank} failed: {told(failure)}" + (f" ({where})" if where else "")

    def gather(self, group: Any, value: Any, what: str) -> list[Any]:
        """Everybody's object, of the ranks of ``group``.

        Raises:
            RankError: a rank has ended or does not answer.
        """
        self.ready()
        with self.waiting(what):
            return gather_objects(group, value, group.size())

    @contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """Around an exchange in which this rank waits for all others.

        Raises:
            RankError: a rank has ended or does not answer, in place of the LostError inside.
        """
        self._waits.begins(-1)
        try:
            yield
        except LostError as error:
            self.broken = True
            raise self._missing(-1, what, error) from error
        self._waits.ends()

    def lost(self, device: int, what: str, error: BaseException) -> RankError:
        """The error about a device of this replica that has ended or does not answer."""
        return self._missing(self._devices[device], what, error)

    def gone(self, what: str) -> RankError | None:
        """The error about the rank that is gone, if one is known to be."""
        return self._missing(-1, what, RankError("a rank is gone")) if self._watch.alarmed else None

    def _missing(self, rank: int, what: str, error: BaseException) -> RankError:
        """The error about who holds up this rank, which waits for ``rank``, -1: for all. Everybody else is told."""
        late = "imed out" in str(error)
        first = self._ranks.index(rank) if rank in self._ranks else ALL
        self._waits.begins(first)
        return self._blamed(self._watch.found(first, late), what, late)

    def _blamed(self, found: Found, what: str, late: bool) -> RankError:
        story = found.story
        if story is None:
            path = [self._ranks[place] for place in found.path]
            story = self._watch.tell((path[-1] if len(path) > 1 else -1, self._told(path, what, found, late)))
        return RankError(story[1], story[0])

    def _told(self, path: Sequence[int], what: str, found: Found, late: bool) -> str:
        who = f"rank {path[-1]}" if len(path) > 1 else "a rank"
        if found.left:
            verb = "has closed its runner"
        elif late:
            verb = f"has not answered for {self._timeout:g} s" + ", its process stands still" * found.still
        else:
            verb = "has ended" if len(path) > 1 else "has ended or does not answer"
        lines = [f"{who} {verb}; rank {path[0]} waits for {what}"]
        if len(path) > 2:
            pairs = [f"rank {one} for rank {other}" for one, other in pairwise(path)]
            lines[0] += f" ({', '.join(pairs)})"
        for number, one in enumerate(self._ranks):
            if late or one == path[-1] != path[0]:
                lines.append(f"  rank {one} stands at {self._stand(number)}")
        return "\n".join(lines)

    def standing(self, device: str) -> RankError:
        """The error about a device of this rank whose tasks do not end: that of a rank that is gone or does not answer.
        Where all are there, it says up to where each has queued its tasks."""
        late, me = not self._watch.alarmed, dist.get_rank()
        found = self._watch.found(ALL, late)
        if found.story is not None or len(found.path) > 1:
            return self._blamed(found, f"{device} to end its tasks", late)
        lines = [f"{device} of rank {me} has not ended its tasks within {self._timeout:g} s after they were queued"]
        lines += [f"  the host of rank {rank} stands at {self._stand(number)}"
                  for number, rank in enumerate(self._ranks)]
        rank, text = self._watch.tell((me, "\n".join(lines)))
        return RankError(text, rank)

    def _stand(self, number: int) -> str:
        note = self._watch.where(number)
        if note is None:
            return "an unknown task"
        call, task, microbatches = note[:3]
        plan = self.at
        if task < 0 or task >= len(plan) or plan.microbatches != abs(microbatches):
            return f"no task (call {call})"
        row = plan.table.task(task)
        op = Op(task, row.kind, row.stage, row.microbatch, row.device, row.slice, plan.slices)
        return f"{describe(plan.graph, op)} (call {call})"
