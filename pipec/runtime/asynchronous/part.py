"""A part of a plan as a plan of its own, for the timeline that one step of an asynchronous run measured."""

from __future__ import annotations

import numpy as np
from attrs import evolve

from pipec.columns import to_column
from pipec.ir import BUFFER_COLUMNS, Buffers, Lanes, Plan, Waits
from pipec.periods import Rows


def part(plan: Plan, rows: Rows) -> Plan:
    """The tasks ``rows`` (ascending) of ``plan`` with the waits among them, and the buffers that live inside.

    It has no steady period of its own, so it is a synchronous plan.
    """
    place = np.full(len(plan), -1, np.int64)
    place[rows] = np.arange(len(rows))
    waits = [place[plan.waits.of(row)] for row in rows.tolist()]
    waits = [own[own >= 0] for own in waits]
    start = np.concatenate([[0], np.cumsum([len(own) for own in waits])])
    ids = np.concatenate(waits) if waits else np.empty(0, np.int64)
    lanes: list[Lanes] = []
    for given in plan.lanes:
        compute, out, into = (to_column(place[own][place[own] >= 0]) for own in given)
        lanes.append((compute, out, into))
    columns = {name: getattr(plan.buffers, name) for name in BUFFER_COLUMNS}
    inside = (place[columns["writer"]] >= 0) & (place[columns["free"]] >= 0)
    kept = {name: column[inside] for name, column in columns.items()}
    kept["writer"], kept["free"] = place[kept["writer"]], place[kept["free"]]
    return evolve(
        plan, table=plan.table.take(rows), lanes=tuple(lanes), waits=Waits(start, ids), buffers=Buffers(**kept),
        recipe=None, minibatches=1, weights="", behind=(),
    )
