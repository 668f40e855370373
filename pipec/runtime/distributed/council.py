"""Exchanges between ranks: tables with a row per rank, and what is said when one is missing from them.

Every row begins with which call it belongs to and whether the rank failed. So ranks that are not at the same call, or
of which one failed, find out at the next exchange instead of waiting for each other.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist

from pipec.errors import RankError, RunError
from pipec.ir import Plan
from pipec.runtime.distributed.backend import UNDONE, other
from pipec.runtime.distributed.group import Groups, exchange, gather_objects
from pipec.runtime.distributed.records import RecordLines
from pipec.runtime.distributed.watch import Watch
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
        settled: nothing is left to be told in this call: it ended, or a failure is known to all.
        broken: a rank is gone; nothing can be exchanged any more.
        closed: this rank has left.
    """

    def __init__(
        self, groups: Groups, watch: Watch, plan: Plan, width: int, timeout: float, lines: RecordLines | None
    ) -> None:
        """``width``: numbers in every row; ``lines``: between all of them, if there are any."""
        place = groups.place
        self._group, self._ranks, self._devices = groups.everyone, place.everyone, place.ranks[place.replica]
        self._me = self._ranks.index(dist.get_rank())
        self._watch, self._width, self._timeout, self._lines = watch, width, timeout, lines
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
        row = [float(call), float(failure is not None), *values]
        row += [0.0] * (max(self._width, width) - len(row))
        size = len(self._ranks)
        try:
            if self._lines is not None and self._lines.fits(len(row)):
                table = self._lines.exchange(row, self._timeout)
            else:
                table = exchange(self._group, row, size, self._me, self._timeout)
        except RankError as error:
            self.broken = True
            if failure is not None:
                raise failure from None
            at = self._ranks[error.rank] if error.rank >= 0 else -1
            raise self._missing(at, CALLS[call], error) from error
        if any(own[1] for own in table):
            self.settled = True
            story = None if failure is None or isinstance(failure, RankError) else self._story(failure)
            stories = gather_objects(self._group, story, size)
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

    def _story(self, failure: BaseException) -> tuple[int, str]:
        where = "; ".join(str(text).removeprefix("pipec: ") for text in getattr(failure, "__notes__", []))
        rank = dist.get_rank()
        return rank, f"rank {rank} failed: {told(failure)}" + (f" ({where})" if where else "")

    def lost(self, device: int, what: str, error: BaseException) -> RankError:
        """The error about a device of this replica that has ended or does not answer."""
        return self._missing(self._devices[device], f"{what}", error)

    def _missing(self, rank: int, what: str, error: BaseException) -> RankError:
        everyone = self._ranks
        late = "imed out" in str(error)
        if rank in everyone and not late:
            place = self._watch.first_missed(everyone.index(rank))
            self._watch.misses(place)
            rank = everyone[place]

        def tell() -> str:
            verb = f"has not answered for {self._timeout:g} s" if late else "has ended"
            lines = [f"rank {rank} {verb}" if rank >= 0 else "a rank has ended or does not answer"]
            lines[0] += f"; this rank waits for {what}"
            for number, one in enumerate(everyone):
                if late or one == rank:
                    lines.append(f"  rank {one} stands at {self._stand(number)}")
            return "\n".join(lines)

        first, text = self._watch.culprit(rank, tell)
        return RankError(text, first)

    def standing(self, what: str, gone: int | None) -> RankError:
        """The error about a device that waits for ever: ``gone`` is the place of a rank that has ended, None: all live,
        and have queued all tasks up to where they stand."""
        everyone = self._ranks
        late = f"within {self._timeout:g} s after they were queued"
        lines = [f"{what} {late if gone is None else f'and rank {everyone[gone]} is gone'}"]
        lines += [f"  the host of rank {rank} stands at {self._stand(number)}" for number, rank in enumerate(everyone)
                  if gone in (None, number)]
        return RankError("\n".join(lines), dist.get_rank() if gone is None else everyone[gone])

    def _stand(self, number: int) -> str:
        note = self._watch.where(number)
        if note is None:
            return "an unknown task"
        call, task, microbatches = note
        plan = self.at
        if task < 0 or task >= len(plan) or plan.microbatches != abs(microbatches):
            return f"no task (call {call})"
        row = plan.table.task(task)
        op = Op(task, row.kind, row.stage, row.microbatch, row.device, row.slice, plan.slices)
        return f"{describe(plan.graph, op)} (call {call})"
