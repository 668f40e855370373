"""Invariants about memory: what lives from when to when, and that it fits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from attrs import frozen

from pipec.columns import OF_STAGES
from pipec.costs import Activations, Costs
from pipec.errors import ScheduleError
from pipec.ir import FROM_HOST, TO_HOST, Buffer, Kind
from pipec.passes.draft import grouped, pairs
from pipec.simulate import value_bytes
from pipec.timeline import show_bytes
from pipec.verify.facts import Facts, Need, NotChecked, Rows, some
from pipec.verify.tasks import UNRUNNABLE
from pipec.verify.weights import kept_versions


@frozen(eq=False)
class Wanted:
    """A buffer that every microbatch, or weight version, needs: which tasks may write it first, and which read it."""

    kind: Buffer
    ref: int
    device: int
    source: int  # the device a gradient comes from, else -1
    writers: Sequence[Rows]
    readers: Sequence[Rows]


def wanted_buffers(facts: Facts) -> list[Wanted]:
    """The buffers that the graph asks for, worked out from it and not from the plan's own table."""
    index, made = facts.index, []
    for stage, info in enumerate(facts.graph.stages):
        if info.backward and facts.training:
            again = index.of(Kind.RECOMPUTE, stage)
            writer = np.where(again >= 0, again, index.of(Kind.FORWARD, stage))
            readers = [index.input_backward(stage), index.of(Kind.BACKWARD_WEIGHT, stage)]
            made.append(Wanted(Buffer.ACTIVATION, stage, int(facts.home[stage]), -1, [writer], readers))
        if info.carry and facts.plan.slices > 1:
            made += _carried(facts, stage)
    for value, about in enumerate(facts.graph.values):
        home = int(facts.home[about.producer])
        reading = facts.readers_on(value)
        sent = {d: facts.copy(value, 0, home, d) for d in reading if d != home}
        local = [rows for r in reading.get(home, []) for rows in _uses(facts, r, value)]
        forward = index.of(Kind.FORWARD, about.producer)
        hosted = facts.hosted_on(value)
        back = {d: facts.copy(value, FROM_HOST, home, d) for d in hosted}
        away = [facts.copy(value, TO_HOST, home, home)] if hosted else []
        made.append(Wanted(Buffer.VALUE, value, home, -1, [forward], [*local, *sent.values(), *away]))
        if hosted:
            made.append(Wanted(Buffer.HOST, value, home, -1, away, list(back.values())))
        for device, rows in back.items():
            uses = [use for r in hosted[device] for use in _uses(facts, r, value)]
            made.append(Wanted(Buffer.FETCHED, value, device, -1, [rows], uses))
        for device, rows in sent.items():
            uses = [use for r in reading[device] for use in _uses(facts, r, value)]
            made.append(Wanted(Buffer.VALUE, value, device, -1, [rows], uses))
        made += _recomputed(facts, value, home)
        backward = index.input_backward(about.producer)
        for device, stages in facts.gradients_on(value).items():
            writers = [index.input_backward(r) for r in stages]
            if device == home:
                made.append(Wanted(Buffer.GRADIENT, value, home, home, writers, [backward]))
            else:
                copy = facts.copy(value, 1, device, home)
                made.append(Wanted(Buffer.GRADIENT, value, device, device, writers, [copy]))
                made.append(Wanted(Buffer.GRADIENT, value, home, device, [copy], [backward]))
    if facts.plan.asynchronous:
        made += [Wanted(Buffer.WEIGHT, stage, int(facts.home[stage]), -1, [update], [last])
                 for stage, update, last in kept_versions(facts)]
    return made


def _recomputed(facts: Facts, value: int, home: int) -> list[Wanted]:
    """The buffers of a value that its segment computes anew."""
    index, readers = facts.index, facts.again_on(value)
    if not readers:
        return []
    sent = {d: facts.copy(value, 2, home, d) for d in readers if d != home}
    uses = {d: [index.of(kind, r) for r in own for kind in (Kind.RECOMPUTE, Kind.BACKWARD, Kind.BACKWARD_INPUT)]
            for d, own in readers.items()}
    anew = index.of(Kind.RECOMPUTE, facts.graph.values[value].producer)
    return [
        Wanted(Buffer.RECOMPUTED, value, home, -1, [anew], [*uses.pop(home, []), *sent.values()]),
        *(Wanted(Buffer.RECOMPUTED, value, d, -1, [sent[d]], own) for d, own in uses.items()),
    ]


def _carried(facts: Facts, stage: int) -> list[Wanted]:
    """What a stage hands on from a slice to the next, and the gradient that comes back."""
    index, home = facts.index, int(facts.home[stage])
    last = index.of_next(np.arange(facts.items)) < 0  # nothing is handed on from the last slice
    forward, again, backward = (
        index.of(Kind.FORWARD, stage), index.of(Kind.RECOMPUTE, stage), index.input_backward(stage)
    )
    readers = [index.of_next(rows) for rows in (forward, again, backward)]
    return [
        Wanted(Buffer.CARRY, stage, home, -1, [np.where(last, -1, forward)], readers),
        Wanted(Buffer.CARRY_GRADIENT, stage, home, -1, [index.of_next(backward)], [np.where(last, -1, backward)]),
    ]


def _uses(facts: Facts, stage: int, value: int) -> list[Rows]:
    """The tasks of a stage that read ``value`` as its first forward made it."""
    index = facts.index
    if stage in facts.again.get(value, ()):
        return [index.of(Kind.FORWARD, stage)]
    return [index.of(Kind.FORWARD, stage), index.of(Kind.RECOMPUTE, stage), index.input_backward(stage)]


def lifetimes(facts: Facts) -> list[str] | NotChecked:
    """Every activation, value, gradient and weight version that is still read has one buffer on each device that
    needs it, freed once, by a task that comes after all its readers on all lanes."""
    if facts.reach.order is None:
        return UNRUNNABLE
    held, twice = _held(facts)
    found: list[str] = []
    needs: list[Need] = []
    buffers = facts.plan.buffers
    writers, frees = (np.append(column, -1) for column in (buffers.writer, buffers.free))  # row -1: no buffer
    for want in wanted_buffers(facts):
        rows = held.pop((want.kind, want.ref, want.device, want.source), None)
        first = np.full(facts.items, -1, np.int64) if rows is None else rows
        exists = np.maximum.reduce(list(want.writers)) >= 0
        lacking = np.flatnonzero(exists & (first < 0))
        found += some(lacking, (
            f"{_name(facts, want, m)} has no buffer on device {want.device}" for m in lacking.tolist()
        ))
        writer, free = writers[first], frees[first]
        right = np.logical_or.reduce([writer == candidate for candidate in want.writers])
        wrong = np.flatnonzero((first >= 0) & ~right)
        found += some(wrong, (
            f"{_name(facts, want, m)} on device {want.device} begins its life in "
            f"{facts.task(int(writer[m]))}, which does not write it"
            for m in wrong.tolist()
        ))
        for candidate in want.writers:
            other = np.where(candidate != writer, candidate, -1)
            why = "{after} adds to a buffer that begins its life in {before}, which does not come first"
            needs.append(Need(*pairs(np.where(right, writer, -1), other), why))
        what = f"{want.kind.letter}{want.ref} on device {want.device}"
        for reader in want.readers:
            other = np.where(reader != free, reader, -1)
            why = "{after} frees " + what + " but does not wait for its reader {before}"
            needs.append(Need(*pairs(other, free), why))
    for rows in held.values():
        extra = rows[rows >= 0]
        found += some(extra, (
            f"device {buffers.device[i]} holds {buffers.token(i)}, which nothing there needs"
            for i in extra.tolist()
        ))
    found += some(twice, (
        f"{buffers.token(i)} lives more than once on device {buffers.device[i]}" for i in twice.tolist()
    ))
    return found + _places(facts) + facts.unproved(needs)


def _name(facts: Facts, want: Wanted, item: int) -> str:
    what = f"{want.kind.letter}{want.ref}[{facts.item(item)}]"
    if want.kind is Buffer.WEIGHT:
        return f"{what} (version {item} of the weights of stage {facts.stage(want.ref)})"
    if want.kind in OF_STAGES:
        told = {Buffer.ACTIVATION: "activations of", Buffer.CARRY: "carried on by"}
        return f"{what} ({told.get(want.kind, 'gradient of what is carried on by')} stage {facts.stage(want.ref)})"
    which = {Buffer.GRADIENT: "gradient of ", Buffer.RECOMPUTED: "recomputed "}.get(want.kind, "")
    return f"{what} ({which}value {facts.value(want.ref)})"


def _keys(facts: Facts) -> Rows:
    """Per buffer one number for (kind, ref, device, source)."""
    buffers, table, devices = facts.plan.buffers, facts.table, facts.plan.devices
    refs = max(len(facts.graph.stages), len(facts.graph.values), 1)
    source = np.where(buffers.kind == Buffer.GRADIENT, table.device[buffers.writer], -1)
    key = (buffers.kind.astype(np.int64) * refs + buffers.ref) * devices + buffers.device
    return np.asarray(key * (devices + 1) + source + 1)


def _held(facts: Facts) -> tuple[dict[tuple[int, int, int, int], Rows], Rows]:
    """Rows of the buffers by (kind, ref, device, source) and item, -1 where there is none; and the rows of buffers
    that another one holds already."""
    devices, refs = facts.plan.devices, max(len(facts.graph.stages), len(facts.graph.values), 1)
    item = facts.item_of(facts.plan.buffers)
    made, twice = {}, [np.empty(0, np.int64)]
    for key, own in grouped(_keys(facts)):
        rows = np.full(facts.items, -1, np.int64)
        rows[item[own[::-1]]] = own[::-1]  # of several the first
        twice.append(own[rows[item[own]] != own])
        key, source = divmod(key, devices + 1)
        key, device = divmod(key, devices)
        made[key // refs, key % refs, device, source - 1] = rows
    return made, np.sort(np.concatenate(twice))


def _places(facts: Facts) -> list[str]:
    """Writers and free points stand on a lane of the buffer's own device."""
    buffers, table = facts.plan.buffers, facts.table
    found: list[str] = []
    for word, column in (("written", buffers.writer), ("freed", buffers.free)):
        here = (table.device[column] == buffers.device) | (table.peer[column] == buffers.device)
        wrong = np.flatnonzero(~here)
        found += some(wrong, (
            f"{buffers.token(i)} lives on device {buffers.device[i]} but is {word} by "
            f"{facts.task(int(column[i]))}" for i in wrong.tolist()
        ))
    return found


def memory(facts: Facts) -> list[str] | NotChecked:
    """The simulated peak of activations, values and gradients stays within the limit on every device."""
    limit, plan = facts.memory_limit, facts.plan
    if limit is None:
        return NotChecked("no memory limit is given")
    check_limit(limit)
    if facts.reach.order is None:
        return UNRUNNABLE
    timeline = plan.simulate()
    if isinstance(limit, Activations):
        return [
            f"device {device} holds {peak:g} activations at its peak; the limit is {limit.shares:g}"
            for device, peak in enumerate(timeline.peak_share) if peak > limit.shares * (1 + 1e-9)
        ]
    if timeline.peak_bytes is None:
        raise ScheduleError(
            f"memory_limit={limit!r} is in bytes, but bytes are unknown for {_unknown(facts)}; give them as "
            "costs=pipec.Costs(stages={name: {'activation_bytes': ..., 'output_bytes': ...}}), profile the "
            "modules, or limit shares with pipec.activations(n)"
        )
    return [
        f"device {device} holds {show_bytes(peak)} at its peak; the limit is {show_bytes(limit)}"
        for device, peak in enumerate(timeline.peak_bytes) if peak > limit
    ]


def check_limit(limit: Any) -> None:
    """Raise ScheduleError unless ``limit`` is a positive number of bytes or :func:`pipec.activations`."""
    number = isinstance(limit, int | float) and not isinstance(limit, bool)
    if not isinstance(limit, Activations) and not (number and limit > 0):
        raise ScheduleError(
            f"memory_limit must be a positive number of bytes or pipec.activations(n), got {limit!r}"
        )


def _unknown(facts: Facts) -> str:
    costs, plan = facts.plan.costs or Costs(), facts.plan
    stages = sorted(set(plan.buffers.ref[plan.buffers.kind == Buffer.ACTIVATION].tolist()))
    names = [f"the activations of stage {facts.stage(s)}" for s in stages
             if costs.activation_bytes(facts.graph.stages[s].name) is None]
    if plan.slices > 1:
        names += [f"what stage {facts.stage(s)} carries on (carry_bytes)" for s, info in enumerate(facts.graph.stages)
                  if info.carry and costs.carry_bytes(info.name) is None]
    stashed = sorted(set(plan.buffers.ref[plan.buffers.kind == Buffer.WEIGHT].tolist()))
    names += [f"the weights of stage {facts.stage(s)}" for s in stashed
              if costs.weight_bytes(facts.graph.stages[s].name) is None]
    sizes = value_bytes(plan, costs)
    names += [f"value {facts.value(v)}" for v, size in enumerate(sizes) if size is None]
    return ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")
