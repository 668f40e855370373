"""Invariants about weights: every task reads the version its rule declares, updates use whole gradients."""

from __future__ import annotations

from typing import Any

import numpy as np

from pipec.errors import PlanError
from pipec.ir import BACKWARDS, Buffer, Kind, Lane
from pipec.passes.draft import pairs
from pipec.passes.settle import STEADY
from pipec.periods import last_reader
from pipec.periods import periods as steps_of_plan
from pipec.rules import declared_versions, rule_of
from pipec.rules.base import READERS
from pipec.verify.facts import Facts, Need, NotChecked, Rows, some


def updates_before(facts: Facts) -> Rows:
    """Per task the UPDATEs of its stage that stand before it on its device's compute lane."""
    table = facts.table
    made = np.zeros(len(table), np.int64)
    for lanes in facts.plan.lanes:
        lane = lanes[Lane.COMPUTE]
        is_update = table.kind[lane] == Kind.UPDATE
        if not is_update.any():
            continue
        everything = is_update & (table.stage[lane] < 0)
        for stage in np.unique(table.stage[lane][~everything]).tolist():
            own = table.stage[lane] == stage
            counts = np.cumsum(is_update & (own | everything))
            made[lane[own]] = (counts - is_update)[own]
    return made


def declared(facts: Facts, newest: Rows) -> Rows:
    """Per task the version that the plan's rule lets it read; the newest without a rule."""
    plan = facts.plan
    rule = rule_of(plan)
    if rule is None:
        return newest
    return declared_versions(rule, facts.table, newest, len(facts.graph.stages), plan.microbatches)


def versions(facts: Facts) -> list[str]:
    """Every task reads the weight version that the plan's rule declares, and one that is still kept."""
    plan, table, made = facts.plan, facts.table, updates_before(facts)
    try:
        wanted = declared(facts, made)
    except PlanError as error:
        return [str(error)]
    reading = np.isin(table.kind, READERS)
    stale, old = made - table.version, made - wanted
    early = reading & (stale < 0)
    gone = reading & (stale > 0) & ~_held(facts)
    other = reading & (stale != old) & ~early & ~gone
    replaces = (table.kind == Kind.UPDATE) & plan.asynchronous & (table.version != made)
    return [
        *_told(early, lambda i: (
            f"{facts.task(i)} reads weight version {table.version[i]}, but {_updates(made[i])} of its stage "
            "stand before it"
        )),
        *_told(gone, lambda i: (
            f"{facts.task(i)} reads weight version {table.version[i]} after {_updates(made[i])} of its stage, "
            "but no copy of it is kept"
        )),
        *_told(other, lambda i: (
            f"{facts.task(i)} reads weights {_updates(stale[i])} old; "
            + (f"the weight rule {plan.weights!r}" if plan.asynchronous else "a synchronous plan")
            + f" declares {old[i]}"
        )),
        *_told(replaces, lambda i: (
            f"{facts.task(i)} replaces weight version {table.version[i]}, but {_updates(made[i])} of its stage stand "
            "before it"
        )),
    ]


def _told(wrong: Any, tell: Any) -> list[str]:
    rows = np.flatnonzero(wrong)
    return some(rows, (tell(i) for i in rows.tolist()))


def _held(facts: Facts) -> Any:
    """Per task whether the plan keeps a copy of the version it reads."""
    buffers, table = facts.plan.buffers, facts.table
    own = buffers.kind == Buffer.WEIGHT
    beyond = max(int(table.version.max(initial=0)), int(buffers.microbatch.max(initial=0))) + 1
    held = buffers.ref[own].astype(np.int64) * beyond + buffers.microbatch[own]
    return np.isin(table.stage.astype(np.int64) * beyond + table.version, held)


def _updates(count: Any) -> str:
    return "1 update" if count == 1 else f"{count or 'no'} updates"


def kept_versions(facts: Facts) -> list[tuple[int, Rows, Rows]]:
    """Per stage, by version: the UPDATE that replaces it and the last task on the lane that reads it after that; -1
    where nothing does. Worked out from lanes and versions, not from the plan's buffers."""
    table = facts.table
    place = facts.reach.place[0]
    made = []
    for stage in np.unique(table.stage[table.kind == Kind.UPDATE]).tolist():
        own = np.flatnonzero(table.stage == stage)
        own = own[(table.version[own] >= 0) & (table.version[own] < facts.items)]
        update = own[table.kind[own] == Kind.UPDATE]
        reading = own[np.isin(table.kind[own], READERS)]
        reading = reading[np.argsort(place[reading], kind="stable")]
        writer, last = np.full(facts.items, -1, np.int64), np.full(facts.items, -1, np.int64)
        writer[table.version[update]] = update
        last[table.version[reading]] = reading  # the last one stays
        needed = (writer >= 0) & (last >= 0) & (place[last] > place[writer])
        made.append((stage, np.where(needed, writer, -1), np.where(needed, last, -1)))
    return made


def updates_present(facts: Facts) -> list[str]:
    """An asynchronous plan has, for every stage that a loss depends on, its updates 0, 1, ... once each."""
    table, plan, every = facts.table, facts.plan, facts.plan.update_every
    if plan.update != "stage":
        return [f"the plan is asynchronous ({plan.weights!r}), but declares update={plan.update!r} and not 'stage'"]
    ids = np.flatnonzero(table.kind == Kind.UPDATE)
    count, trained = plan.microbatches // every, [s for s, stage in enumerate(facts.graph.stages) if stage.backward]
    times = np.zeros((len(facts.graph.stages) + 1, plan.microbatches), np.int64)
    inside = ids[table.microbatch[ids] < plan.microbatches]
    np.add.at(times, (table.stage[inside], table.microbatch[inside]), 1)
    wrong = [(s, u) for s in trained for u in range(count) if times[s, u] != 1]
    found = some(np.asarray(wrong), (
        f"the UPDATE {u} of stage {facts.stage(s)} "
        + ("is missing" if not times[s, u] else f"stands {times[s, u]} times") for s, u in wrong
    ))
    extra = ids[~np.isin(table.stage[ids], trained) | (table.microbatch[ids] >= count)]
    return found + some(extra, (f"{facts.task(i)} is there, but nothing needs it" for i in extra.tolist()))


def update_needs(facts: Facts) -> list[Need]:
    """Each UPDATE of an asynchronous plan comes after the last weight gradient of its own microbatches and before the
    first of later ones: a stage gathers the gradients of one update at a time."""
    table, index, every = facts.table, facts.index, facts.plan.update_every
    made = []
    number = np.arange(facts.items) % facts.plan.microbatches // every
    for stage in np.unique(table.stage[table.kind == Kind.UPDATE]).tolist():
        update = np.full(facts.plan.microbatches + 1, -1, np.int64)
        own = np.flatnonzero((table.kind == Kind.UPDATE) & (table.stage == stage))
        own = own[table.microbatch[own] < facts.plan.microbatches]
        update[table.microbatch[own]] = own
        gradients = [index.of(kind, stage) for kind in BACKWARDS if kind is not Kind.BACKWARD_INPUT]
        for rows in gradients:
            made += [
                Need(*pairs(rows, update[number]), "{after} does not wait for {before}, whose gradient it uses"),
                Need(*pairs(update[number - 1], rows), "{after} adds to gradients that {before} has not used yet"),
            ]
    return made


def periods(facts: Facts) -> list[str] | NotChecked:
    """The last three steps of an asynchronous plan before its epilogue are equal, up to a minibatch and its updates."""
    plan = facts.plan
    if not plan.asynchronous:
        return NotChecked("a synchronous plan has no steady period")
    if facts.reach.order is None:
        return NotChecked("the plan does not run to its end")
    found = steps_of_plan(plan)
    later = last_reader(facts.table, found.step, plan.minibatch)
    if found.steady <= plan.minibatches - STEADY:
        return [] if found.steady + later < plan.minibatches else [
            f"a weight version is read until {later} minibatches after the step that replaces it; the steady period "
            f"begins at step {found.steady}, but only {plan.minibatches} minibatches are laid out, so it does not "
            "show how long versions are kept"
        ]
    first = min(found.steady, plan.minibatches - 1)
    return [
        f"step {first} is not step {first - 1} one minibatch later, with as many tasks as a minibatch has; an "
        f"asynchronous plan shows {STEADY} steps that are equal before its epilogue, but only "
        f"{plan.minibatches - first} of {plan.minibatches} are"
    ]
