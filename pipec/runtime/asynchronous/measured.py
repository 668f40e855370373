"""What the clock said of the last step of an asynchronous run, or of the flush after it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from attrs import evolve, frozen

from pipec.columns import BUFFER_COLUMNS, Buffers, to_column
from pipec.excerpt import Excerpt
from pipec.ir import Kind, Plan
from pipec.periods import Rows
from pipec.runtime.alone import Alone
from pipec.runtime.asynchronous.part import part
from pipec.runtime.asynchronous.program import Segment, Steps
from pipec.runtime.stream_clock import StreamClock


@frozen(eq=False)
class Measured:
    """One step or flush.

    Attributes:
        step: that of the plan; for a flush the one that it took the place of.
        starts, ends: per task of the plan in nanoseconds, 0 for those that did not run here.
        clock: has the times of devices that are not on the host's clock.
        numbers: per minibatch of the plan the run's, -1 where none was fed.
        ahead: per stage here how many updates more the run counts than the plan.
    """

    segment: Segment
    step: int
    starts: list[int]
    ends: list[int]
    clock: StreamClock | None
    numbers: tuple[int, ...]
    ahead: Sequence[int]


def measured_part(
    plan: Plan, steps: Steps, found: Measured, party: Alone
) -> tuple[Plan, list[int], list[int], Excerpt]:
    """The tasks of a step as a plan, when each began and ended in nanoseconds, and what it is an excerpt of."""
    starts, ends = found.starts, found.ends
    if found.clock is not None:
        found.clock.write(starts, ends)
    rows = np.asarray(sorted(op.task for lane in found.segment.ops for op in lane), np.int64)
    computed = rows[plan.table.kind[rows] != Kind.COPY].tolist()
    here = {int(plan.table.stage[row]) for row in computed if starts[row]}
    # Each rank knows how far its own stages are, and tells it as lengths of intervals: clocks that differ keep these.
    stages = range(len(plan.graph.stages))
    begins = [1 if stage in here else 0 for stage in stages]
    lengths = [begin + found.ahead[stage] * begin for stage, begin in enumerate(begins)]
    starts, ends = party.gathered(starts + begins, ends + lengths)
    ahead = [end - start for start, end in zip(starts[len(plan):], ends[len(plan):], strict=True)]
    made, alive = part(plan, rows), _alive(plan, rows, steps.step_of, found.step)
    versions = np.where(made.table.kind == Kind.COPY, 0, np.asarray([*ahead, 0])[made.table.stage])
    made = evolve(made, table=evolve(made.table, version=made.table.version + versions),
                  buffers=_cut(plan, rows, alive), minibatches=plan.minibatches)
    excerpt = Excerpt(plan, found.numbers, to_column(alive), found.segment not in steps.segments)
    return made, [starts[row] for row in rows.tolist()], [ends[row] for row in rows.tolist()], excerpt


def _alive(plan: Plan, rows: Rows, steps: Rows, step: int) -> Rows:
    """The buffers of ``plan`` that are there at some time while ``rows`` run, ascending.

    Args:
        steps: per task the step that runs it.
        step: that of ``rows``, or for a flush the one that it took the place of.
    """
    writer, free = plan.buffers.writer, plan.buffers.free
    begun = np.isin(writer, rows) | (steps[writer] < step)
    return np.flatnonzero(begun & (steps[free] >= step))


def _cut(plan: Plan, rows: Rows, alive: Rows) -> Buffers:
    """These buffers, their tasks counted among ``rows``: -1 for one that runs before, or after."""
    place = np.full(len(plan), -1, np.int64)
    place[rows] = np.arange(len(rows))
    kept = {name: getattr(plan.buffers, name)[alive] for name in BUFFER_COLUMNS}
    kept["writer"], kept["free"] = place[kept["writer"]], place[kept["free"]]
    return Buffers(**kept)
