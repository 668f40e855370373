"""Invariants about the compute tasks: all there, in order, updates after gradients."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from pipec.ir import BACKWARDS, Buffer, Kind, Lane, Table
from pipec.segments import first_stages
from pipec.verify.facts import Facts, Need, NotChecked, Rows, some
from pipec.verify.weights import update_needs, updates_present

UNRUNNABLE = NotChecked("the plan does not run to its end")
HALF = "is missing, the other half of its backward is there"
COUNTED = (Kind.FORWARD, Kind.RECOMPUTE, *BACKWARDS)
ASCENDING = (
    "{after} stands before {before}; stages whose buffers change run their forwards in ascending order of "
    "the microbatches"
)


def tasks(facts: Facts) -> list[str]:
    """Every stage and microbatch has one FORWARD and, where a loss depends on it, one backward, whole or in
    halves, on the stage's device; UPDATE tasks are those the plan declares, after the gradients they use."""
    table, stages, items = facts.table, len(facts.graph.stages), facts.items
    own = np.flatnonzero(np.isin(table.kind, COUNTED))
    key = (table.kind[own].astype(np.int64) * stages + table.stage[own]) * items + facts.item_of(table)[own]
    count = np.bincount(key, minlength=len(Kind) * stages * items).reshape(len(Kind), stages, items)
    wanted = np.asarray([stage.backward and facts.training for stage in facts.graph.stages], bool)[:, None]
    whole, first, second = (count[kind] > 0 for kind in BACKWARDS)
    any_ = whole | first | second
    segmented = bool(first_stages(facts.plan.recompute))
    found: list[str] = []
    for kind, wrong, text in (
        *((kind, count[kind] > 1, "stands more than once") for kind in COUNTED),
        (Kind.FORWARD, count[Kind.FORWARD] == 0, "is missing"),
        (Kind.BACKWARD, wanted & ~any_, "is missing"),
        (Kind.BACKWARD, whole & (first | second), "stands whole and in halves"),
        (Kind.BACKWARD_INPUT, ~whole & ~first & second, HALF),
        (Kind.BACKWARD_WEIGHT, ~whole & first & ~second, HALF),
        (Kind.BACKWARD, ~wanted & any_, "is there, but no loss depends on the stage"),
        (Kind.RECOMPUTE, (count[Kind.RECOMPUTE] > 0) & ~any_, "is there without a backward to recompute for"),
        (Kind.RECOMPUTE, segmented & wanted & (count[Kind.RECOMPUTE] == 0), "is missing from its segment"),
    ):
        rows = np.flatnonzero(wrong)
        found += some(rows, (f"{facts.token(kind, *divmod(at, items))} {text}" for at in rows.tolist()))
    placed = own if facts.plan.update is None else np.append(own, np.flatnonzero(_staged(table)))
    stray = placed[facts.home[table.stage[placed]] != table.device[placed]]
    found += some(stray, (
        f"{table.task(i)} stands on device {table.device[i]}, but its stage {facts.stage(table.stage[i])} is "
        f"on device {facts.home[table.stage[i]]}"
        for i in stray.tolist()
    ))
    if facts.plan.asynchronous:
        return found + updates_present(facts) + facts.unproved(update_needs(facts))
    return found + _updates_present(facts) + facts.unproved(_update_needs(facts))


def _staged(table: Table) -> npt.NDArray[np.bool_]:
    """The UPDATE tasks of single stages."""
    return np.asarray((table.kind == Kind.UPDATE) & (table.stage >= 0))


def _updates_present(facts: Facts) -> list[str]:
    table, update = facts.table, facts.plan.update
    ids = np.flatnonzero(table.kind == Kind.UPDATE)
    if update not in (None, "stage", "all"):
        return [f"the plan declares update={update!r}; known are None, 'stage' and 'all'"]
    if update is None:
        return some(ids, (f"{facts.task(i)} is there, but the plan declares no update" for i in ids.tolist()))
    trained = [s for s, stage in enumerate(facts.graph.stages) if stage.backward]
    wanted = trained if update == "stage" else [-1]
    stages = table.stage[ids].tolist()
    found = [
        f"the UPDATE of {f'stage {facts.stage(s)}' if s >= 0 else 'all stages'} "
        + ("is missing" if s not in stages else f"stands {stages.count(s)} times")
        for s in wanted if stages.count(s) != 1
    ]
    extra = ids[~np.isin(table.stage[ids], wanted)]
    return found + some(extra, (
        f"{facts.task(i)} is there, but update={update!r} has no use for it" for i in extra.tolist()
    ))


def _update_needs(facts: Facts) -> list[Need]:
    """Each UPDATE comes after all backwards of the stages it updates."""
    table = facts.table
    made: list[Need] = []
    backward = np.flatnonzero(np.isin(table.kind, BACKWARDS))
    why = "{after} does not wait for {before}, whose gradient it uses"
    for update in np.flatnonzero(table.kind == Kind.UPDATE).tolist():
        if table.stage[update] < 0:
            made.append(_each_after(facts, _last_of_devices(facts), update, why))
    of_stage = np.full(len(facts.graph.stages) + 1, -1, np.int64)
    staged = np.flatnonzero(_staged(table))
    of_stage[table.stage[staged]] = staged
    after = of_stage[table.stage[backward]]
    made.append(Need(backward[after >= 0], after[after >= 0], why))
    return made


def _last_of_devices(facts: Facts) -> Rows:
    """The last backward on every device's lane: all others end before it."""
    last = []
    for lanes in facts.plan.lanes:
        own = lanes[Lane.COMPUTE]
        own = own[np.isin(facts.table.kind[own], BACKWARDS)]
        last += own[-1:].tolist()
    return np.asarray(last, np.int64)


def _each_after(facts: Facts, before: Rows, after: int, why: str) -> Need:
    return Need(before, np.full(len(before), after, np.int64), why)


def order(facts: Facts) -> list[str]:
    """F before B before W; RECOMPUTE after F and before its B, with one live copy; stages whose buffers
    change run their forwards in ascending order."""
    found = facts.unproved(facts.own_needs)
    buffers = facts.plan.buffers
    saved = np.flatnonzero(buffers.kind == Buffer.ACTIVATION)
    key = buffers.ref[saved].astype(np.int64) * facts.items + facts.item_of(buffers)[saved]
    copies = np.bincount(key, minlength=1)
    twice = np.flatnonzero(copies > 1)
    found += some(twice, (
        f"the activations of stage {facts.stage(k // facts.items)}, microbatch "
        f"{facts.item(k % facts.items)}, are held {copies[k]} times; one copy is enough"
        for k in twice.tolist()
    ))
    for stage, info in enumerate(facts.graph.stages):
        if not info.ordered:
            continue
        for replica in range(facts.plan.replicas):
            rows = facts.index.of(Kind.FORWARD, stage)
            rows = rows.reshape(facts.plan.replicas, facts.plan.slices, facts.plan.microbatches)
            flat = rows[replica].T.ravel()  # microbatch by microbatch, its slices in order
            flat = flat[flat >= 0]
            found += facts.unproved([Need(flat[:-1], flat[1:], ASCENDING)])
    return found


def updates(facts: Facts) -> list[str] | NotChecked:
    """In a synchronous plan no UPDATE starts before every backward of every device has ended, so that
    clipping and checks for inf see all gradients; plans with ``update_early`` opt out."""
    plan = facts.plan
    if plan.update_early:
        return NotChecked("the plan updates each stage early, so nothing may need all gradients at once")
    if plan.asynchronous:
        return NotChecked("an asynchronous plan updates while other gradients are under way")
    if facts.reach.order is None:
        return UNRUNNABLE
    why = "{after} does not wait for {before}; without update_early it comes after every backward of the step"
    rows = np.flatnonzero(facts.table.kind == Kind.UPDATE)
    last = _last_of_devices(facts)
    return facts.unproved([_each_after(facts, last, update, why) for update in rows.tolist()])
