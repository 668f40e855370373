"""The steady period of an asynchronous plan under given durations: how long a step takes when all are alike.

The plan's last steady step is repeated until every task comes the same time after its predecessor, one step or a few
steps before, for as many steps as waits reach back: from there on it goes on so for ever.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from attrs import evolve, frozen

from pipec.costs import Costs
from pipec.ir import Kind, Plan, Table
from pipec.passes.draft import to_csr
from pipec.passes.lifetimes import lanes_of
from pipec.periods import settled

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

MOST = 400_000  # tasks simulated before the average of the later half has to do
CLOSE = 1e-9


@frozen(eq=False)
class Pattern:
    """One steady step: its tasks, and their waits as (task, task waited for, how many steps back)."""

    table: Table
    ids: Ints
    waits: tuple[Ints, Ints, Ints]


def pattern_of(plan: Plan) -> Pattern:
    """The last steady step of ``plan``.

    Raises:
        PlanError: there is none.
    """
    found = settled(plan)
    ids = found.ids(plan.minibatches - 1)
    part, each = plan.table.take(ids), plan.minibatch // plan.update_every

    def identity(table: Table) -> list[tuple[int, ...]]:
        cycle = np.where(table.kind == Kind.UPDATE, each, plan.minibatch)
        columns = (table.kind, table.stage, table.replica, table.slice, table.device, table.peer, table.value,
                   table.gradient, table.microbatch % cycle)
        return list(zip(*(column.tolist() for column in columns), strict=True))

    place = {name: at for at, name in enumerate(identity(part))}
    start = plan.waits.start
    task = np.repeat(np.arange(len(ids)), (start[ids + 1] - start[ids]))
    need = np.concatenate([plan.waits.of(int(i)) for i in ids]).astype(np.int64)
    at = np.asarray([place.get(name, -1) for name in identity(plan.table.take(need))], np.int64)
    cycle = np.where(part.kind[at] == Kind.UPDATE, each, plan.minibatch)
    back = (part.microbatch[at] - plan.table.microbatch[need]) // cycle
    known = at >= 0
    return Pattern(part, ids, (task[known], at[known], back[known]))


def repeated(plan: Plan, pattern: Pattern, count: int) -> Plan:
    """A plan of ``count`` steps of the pattern one after another, for the clock: what comes before has ended."""
    size, step = len(pattern.table), np.arange(count)
    table = pattern.table.take(np.tile(np.arange(size), count))
    group = np.where(table.group > 0, table.group + np.repeat(step, size) * (int(table.group.max(initial=0)) + 1), 0)
    task, need, back = pattern.waits
    later = (step[:, None] * size + task).ravel()
    earlier = ((step[:, None] - back) * size + need).ravel()
    waits = to_csr((later[earlier >= 0], earlier[earlier >= 0]), size * count)
    table = evolve(table, group=group)
    return evolve(plan, table=table, waits=evolve(plan.waits, start=waits[0], ids=waits[1]),
                  lanes=lanes_of(table, plan.devices), recipe=None)


def steady_period(plan: Plan, costs: Costs, duration: Floats) -> float:
    """How long a steady step takes.

    Args:
        duration: per task of ``plan``.

    Raises:
        PlanError: the plan has no steady step.
    """
    from pipec.simulate import run_clock

    pattern = pattern_of(plan)
    size, reach = len(pattern.ids), int(pattern.waits[2].max(initial=0)) + 1
    count = 4 * (reach + 1)
    while True:
        spans = np.tile(duration[pattern.ids], count)
        _, end, _ = run_clock(repeated(plan, pattern, count), spans, costs)
        ends = end.reshape(count, size)
        for cycle in range(1, count // 3):
            moved = (ends[cycle:] - ends[:-cycle])[-reach - cycle :]
            period = float(moved.mean())
            if np.allclose(moved, period, rtol=CLOSE, atol=CLOSE * max(1.0, abs(period))):
                return float(f"{period / cycle:.12g}")  # what is left of rounding would show as a bubble
        if 2 * count * size > MOST:
            half = count // 2
            return float((ends[-1].max() - ends[-1 - half].max()) / half)
        count *= 2


def step_time(plan: Plan, costs: Costs, duration: Floats) -> float:
    """How long a steady step takes when all devices begin it together and everything before has ended.

    Args:
        duration: per task of ``plan``.

    Raises:
        PlanError: the plan has no steady step.
    """
    from pipec.simulate import run_clock

    pattern = pattern_of(plan)
    _, end, _ = run_clock(repeated(plan, pattern, 1), duration[pattern.ids], costs)
    return float(end.max(initial=0.0))


def measured_period(plan: Plan, end: Floats) -> float:
    """The mean time between the ends of the steady steps of a measured run.

    Raises:
        PlanError: the plan has no steady step.
    """
    found = settled(plan)
    last = [float(end[found.ids(step)].max()) for step in range(found.steady, plan.minibatches)]
    return (last[-1] - last[0]) / (len(last) - 1)
