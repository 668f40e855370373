"""Settle: as many minibatches of an asynchronous schedule as show its prologue, three steady steps and epilogue.

A plan of k minibatches is one of more without the tasks of the later ones: policies order them in a pattern that
repeats.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from attrs import evolve

from pipec.errors import ScheduleError
from pipec.ir import Kind
from pipec.passes.draft import Draft
from pipec.periods import first_steady, last_reader
from pipec.rules.base import update_every
from pipec.schedules.base import Problem

STEADY = 3  # steps of the steady period in a plan
TRIES = 4


def settle(problem: Problem, make: Callable[[Problem], Draft], longest: int = 0) -> Draft:
    """The draft that ``make`` gives for enough minibatches, cut after its third steady step.

    Args:
        problem: of one minibatch.
        longest: over how many updates the weight rule reads back: so long the first minibatches differ, and so long
            versions that a steady step replaces are read.

    Raises:
        ScheduleError: no step repeats the one before, in however many minibatches.
    """
    count = -(-2 * len(problem.chunks) // problem.microbatches) + STEADY + 2 + 2 * longest
    for _ in range(TRIES):
        draft = make(evolve(problem, microbatches=problem.microbatches * count, minibatches=count))
        if draft.step is None:  # no weight rule: nothing settles
            break
        # the last minibatch has no successor, which shows in its step
        first = first_steady(draft.table, draft.step, problem.microbatches, count - 1)
        minibatches = first + max(STEADY, last_reader(draft.table, draft.step, problem.microbatches) + 1)
        if minibatches < count:
            return cut(draft, minibatches)
        count *= 2
    raise ScheduleError(
        f"schedule {draft.schedule!r} is asynchronous, but after {count // 2} minibatches no step repeats the one "
        "before; order every minibatch like the one before it"
    )


def cut(draft: Draft, minibatches: int) -> Draft:
    """The draft without the tasks of later minibatches; what earlier ones leave to later steps is its epilogue."""
    table, step = draft.table, draft.step
    every = update_every(table, draft.microbatches)
    last = np.where(table.kind == Kind.UPDATE, (table.microbatch + 1) * every - 1, table.microbatch)
    kept = np.flatnonzero(last < minibatches * draft.minibatch)
    assert step is not None
    return evolve(draft, table=table.take(kept), step=np.minimum(step[kept], minibatches), minibatches=minibatches,
                  microbatches=minibatches * draft.minibatch)
