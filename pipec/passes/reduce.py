"""Reduce: a REDUCE per stage whose gradients are added up over processes or devices, right after the last of them.

Gradients are added over replicas of the whole pipeline (``data_parallel``), and over stages on different devices that
share a parameter. A REDUCE stands in the copy-out lane, so that other stages' backwards go on meanwhile.
"""

from __future__ import annotations

import numpy as np
from attrs import evolve

from pipec.errors import ScheduleError
from pipec.ir import Kind, concat_tables, make_table
from pipec.passes.draft import Draft, Pairs, index_of, last_of_groups
from pipec.spec import Graph


def reduce(draft: Draft, data_parallel: int = 1) -> Draft:
    """Insert the REDUCE tasks of a synchronous plan.

    Raises:
        ScheduleError: replicas of an asynchronous pipeline.
    """
    if draft.rule is not None:
        if data_parallel > 1:
            raise ScheduleError(
                f"schedule {draft.schedule!r} is asynchronous: its stages update while others still work, so its "
                "replicas cannot add up their gradients; compile with data_parallel=1"
            )
        return draft
    ends = last_backwards(draft)
    stages = [s for s in reducing(draft.graph, draft.stage_devices.tolist(), data_parallel) if ends[s] >= 0]
    if not stages:
        return draft
    size, devices = len(draft.table), draft.stage_devices
    keys = [max(int(ends[other]) for other in (stage, *partners(draft.graph, devices.tolist(), stage)))
            for stage in stages]
    table = make_table(len(stages), kind=Kind.REDUCE, stage=np.asarray(stages), device=devices[stages])
    order = np.argsort(np.concatenate([np.arange(size), keys]), kind="stable")
    return evolve(draft, table=concat_tables([draft.table, table]).take(order))


def partners(graph: Graph, devices: list[int], stage: int) -> tuple[int, ...]:
    """The stages on other devices that share a trained parameter with ``stage``."""
    return tuple(
        other for other in graph.stages[stage].tied if devices[other] != devices[stage] and graph.stages[other].backward
    )


def reducing(graph: Graph, devices: list[int], data_parallel: int) -> list[int]:
    """The stages with a REDUCE."""
    return [
        number for number, stage in enumerate(graph.stages)
        if stage.backward and (data_parallel > 1 or partners(graph, devices, number))
    ]


def last_backwards(draft: Draft) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Per stage the row after which its gradients are complete, shape (stages,); -1 without any."""
    index, group_end = index_of(draft), last_of_groups(draft.table)
    return np.asarray([
        group_end[own].max() if len(own := rows[rows >= 0]) else -1
        for rows in (index.last_backward(s) for s in range(len(draft.graph.stages)))
    ])


def reduce_waits(draft: Draft) -> list[Pairs]:
    """A REDUCE waits for the last gradients of its stage and of those it shares parameters with."""
    table = draft.table
    ids = np.flatnonzero(table.kind == Kind.REDUCE)
    if not len(ids):
        return []
    ends, devices = last_backwards(draft), draft.stage_devices.tolist()
    pairs = [
        (task, int(ends[other])) for task in ids.tolist()
        for other in (int(table.stage[task]), *partners(draft.graph, devices, int(table.stage[task])))
    ]
    return [(np.asarray([a for a, _ in pairs]), np.asarray([b for _, b in pairs]))]
