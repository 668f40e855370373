"""The invariant about REDUCE tasks."""

from __future__ import annotations

import numpy as np

from pipec.ir import Kind
from pipec.passes.reduce import partners, reducing
from pipec.verify.facts import Facts, Need, some

ADDS = "{after} does not wait for {before}, whose gradient it adds"
COMPLETES = "{after} does not wait for {before}, which completes its gradient"


def reduces(facts: Facts) -> list[str]:
    """Every stage whose gradients are added up over processes or devices has one REDUCE, after its last gradient and
    those of the stages it shares parameters with, and before the UPDATE that uses them; other stages have none."""
    table, graph, devices = facts.table, facts.graph, facts.home.tolist()
    ids = np.flatnonzero(table.kind == Kind.REDUCE)
    synchronous = facts.training and not facts.plan.asynchronous
    wanted = reducing(graph, devices, facts.plan.data_parallel) if synchronous else []
    stages = table.stage[ids].tolist()
    found = [
        f"the REDUCE of stage {facts.stage(s)} "
        + ("is missing" if s not in stages else f"stands {stages.count(s)} times")
        for s in wanted if stages.count(s) != 1
    ]
    extra = ids[~np.isin(table.stage[ids], wanted)]
    found += some(extra, (
        f"{facts.task(i)} is there, but its stage's gradients are complete without it" for i in extra.tolist()
    ))
    stray = ids[facts.home[table.stage[ids]] != table.device[ids]]
    found += some(stray, (f"{facts.task(i)} stands on a device that has not its stage" for i in stray.tolist()))
    needs = []
    updates = np.flatnonzero(table.kind == Kind.UPDATE)
    for task in np.setdiff1d(ids, extra).tolist():
        stage = int(table.stage[task])
        for other in (stage, *partners(graph, devices, stage)):
            last = facts.index.last_backward(other)
            last = last[last >= 0]
            needs.append(Need(last, np.full(len(last), task), ADDS))
        mine = updates[(table.stage[updates] == stage) | (table.stage[updates] < 0)]
        needs.append(Need(np.full(len(mine), task), mine, COMPLETES))
    return found + facts.unproved(needs)
