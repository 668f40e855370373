"""Updates: UPDATE tasks, and the weight version that every task reads.

An asynchronous policy orders its updates itself; here its weight rule says which version each task reads.
"""

from __future__ import annotations

import numpy as np
from attrs import evolve

from pipec.errors import ScheduleError
from pipec.ir import Kind, concat_tables, make_table
from pipec.passes.draft import Draft, index_of
from pipec.passes.reduce import last_backwards
from pipec.rules.base import Rule, declared_versions, newest_by_row

UPDATES = (None, "stage", "all")


def updates(draft: Draft, update: str | None = None, early: bool = False) -> Draft:
    """Append the UPDATE tasks of a synchronous plan, whose tasks all read version 0; name the versions that those of
    an asynchronous plan read.

    Args:
        update: None (the script steps its own optimizer), "stage" (one UPDATE a stage), "all" (one for everything,
            on device 0).
        early: in a synchronous plan a stage updates right after its own last backward instead of after all of the step.

    Raises:
        ScheduleError: an unknown value, ``early`` without ``update="stage"``, or an asynchronous draft without it.
    """
    if update not in UPDATES:
        raise ScheduleError(f"update must be None, 'stage' or 'all', got {update!r}")
    if early and update != "stage":
        raise ScheduleError(f"update_early=True needs update='stage', got update={update!r}")
    if draft.rule is not None:
        return _asynchronous(draft, draft.rule, update, early)
    index, size = index_of(draft), len(draft.table)
    last = np.maximum(last_backwards(draft), index.rows[Kind.REDUCE, :, 0])
    stages = np.flatnonzero(last >= 0)
    if update is None or not len(stages):
        return draft
    if update == "all":
        table, keys = make_table(1, kind=Kind.UPDATE, stage=-1, device=0), np.asarray([size])
    else:
        devices = draft.stage_devices[stages]
        table = make_table(len(stages), kind=Kind.UPDATE, stage=stages, device=devices)
        keys = last[stages] if early else np.full(len(stages), size)
    order = np.argsort(np.concatenate([np.arange(size), keys]), kind="stable")
    return evolve(draft, table=concat_tables([draft.table, table]).take(order), update=update, update_early=early)


def _asynchronous(draft: Draft, rule: Rule, update: str | None, early: bool) -> Draft:
    if update != "stage" or early:
        given = "update_early=True" if early else f"update={update!r}"
        raise ScheduleError(
            f"schedule {draft.schedule!r} is asynchronous: every stage updates on its own while others still work on "
            f"older minibatches, so compile it with update='stage' and give the Runner a callable that makes one "
            f"optimizer per stage; got {given}"
        )
    table = draft.table
    versions = declared_versions(rule, table, newest_by_row(table), len(draft.graph.stages), draft.microbatches)
    return evolve(draft, table=evolve(table, version=versions), update=update)
