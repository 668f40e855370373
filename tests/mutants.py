"""Mutations of a good plan that break what its columns say: form, lifetimes, copies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from attrs import evolve
from mutate import (
    buffer_of,
    drop,
    repeat,
    row,
    set_buffer,
    set_column,
    swap,
    take_buffers,
    waits_of,
)

from pipec.ir import Lane, Plan

Mutation = Callable[[Plan], Plan]


def double_activation(plan: Plan) -> Plan:
    """A second recompute of 0,0, and its activations beside the first ones."""
    plan = repeat(plan, row(plan, "0R0"))
    rows = np.append(np.arange(len(plan.buffers)), buffer_of(plan, "a0[0]", 0))
    return take_buffers(plan, rows)


def move(plan: Plan, token: str, device: int) -> Plan:
    """A task on the end of another device's compute lane."""
    task, old = row(plan, token), int(plan.table.device[row(plan, token)])
    lanes = [list(lanes) for lanes in plan.lanes]
    lanes[old][0] = lanes[old][0][lanes[old][0] != task]
    lanes[device][0] = np.append(lanes[device][0], task).astype(np.int32)
    return set_column(evolve(plan, lanes=tuple(map(tuple, lanes))), "device", task, device)


MUTANTS: list[tuple[str, str, dict[str, Any], Mutation, str]] = [
    (
        "freed early",
        "lifetimes",
        {},
        lambda p: set_buffer(p, "free", buffer_of(p, "v1[0]", 1), row(p, "2F0")),
        r"2F0 .* frees v1 on device 1 but does not wait for its reader 2B0",
    ),
    (
        "activation freed by its forward",
        "lifetimes",
        {},
        lambda p: set_buffer(p, "free", buffer_of(p, "a0[1]", 0), row(p, "0F1")),
        r"0F1 .* frees a0 on device 0 but does not wait for its reader 0B1",
    ),
    (
        "freed before it is sent",
        "lifetimes",
        {},
        lambda p: set_buffer(p, "free", buffer_of(p, "v1[1]", 0), row(p, "1F1")),
        r"1F1 .* frees v1 on device 0 but does not wait for its reader v1\[1\]:0>1",
    ),
    (
        "freed elsewhere",
        "lifetimes",
        {},
        lambda p: set_buffer(p, "free", buffer_of(p, "v0[1]", 0), row(p, "3B2")),
        r"v0\[1\] lives on device 0 but is freed by 3B2",
    ),
    (
        "written by another",
        "lifetimes",
        {},
        lambda p: set_buffer(p, "writer", buffer_of(p, "a2[1]", 1), row(p, "2F0")),
        r"a2\[1\] \(activations of stage 's2'\) on device 1 begins its life in 2F0 .* which does not write it",
    ),
    (
        "buffer dropped",
        "lifetimes",
        {},
        lambda p: take_buffers(p, np.arange(1, len(p.buffers))),
        "has no buffer on",
    ),
    (
        "buffer twice",
        "lifetimes",
        {},
        lambda p: take_buffers(p, np.append(np.arange(len(p.buffers)), buffer_of(p, "v1[0]", 1))),
        r"v1\[0\] lives more than once on device 1",
    ),
    (
        "buffer of nothing",
        "lifetimes",
        {},
        lambda p: set_buffer(
            take_buffers(p, np.append(np.arange(len(p.buffers)), buffer_of(p, "v0[0]", 0))),
            "device",
            len(p.buffers),
            1,
        ),
        r"device 1 holds v0\[0\], which nothing there needs",
    ),
    (
        "copy dropped",
        "copies",
        {},
        lambda p: drop(p, row(p, "v1[2]:0>1")),
        r"the copy v1\[2\]:0>1 of value 's1' is missing",
    ),
    (
        "gradient copy dropped",
        "copies",
        {},
        lambda p: drop(p, row(p, "dv1[2]:1>0")),
        r"the copy dv1\[2\]:1>0 of the gradient of value 's1' is missing",
    ),
    (
        "copy twice",
        "copies",
        {},
        lambda p: repeat(p, row(p, "v1[2]:0>1")),
        r"v1\[2\]:0>1 .* stands more than once",
    ),
    (
        "copy of another value",
        "copies",
        {},
        lambda p: set_column(p, "value", row(p, "v1[2]:0>1"), 0),
        r"v0\[2\]:0>1 .* is there, but nothing on device 1 needs it",
    ),
    (
        "copy under another stage",
        "copies",
        {},
        lambda p: set_column(p, "stage", row(p, "v1[2]:0>1"), 0),
        r"v1\[2\]:0>1 .* is listed under stage 0, which does not make the value",
    ),
    (
        "sends in another order",
        "copies",
        {"schedule": "gpipe"},
        lambda p: swap(p, 1, Lane.IN, row(p, "v1[0]:0>1"), row(p, "v1[1]:0>1")),
        r"device 0 sends v1\[0\]:0>1 where device 1 receives v1\[1\]:0>1",
    ),
    ("unknown stage", "form", {}, lambda p: set_column(p, "stage", 0, 9), "has stage 9; it must lie in 0..3"),
    (
        "unknown device",
        "form",
        {},
        lambda p: set_column(p, "device", 0, 2),
        "has device 2; it must lie in 0..1",
    ),
    ("unknown kind", "form", {}, lambda p: set_column(p, "kind", 0, 11), "task %0 has the unknown kind 11"),
    (
        "copy to itself",
        "form",
        {},
        lambda p: set_column(p, "peer", row(p, "v1[0]:0>1"), 0),
        "copies from device 0 to itself",
    ),
    (
        "task in no lane",
        "form",
        {},
        lambda p: evolve(p, lanes=((p.lanes[0][0][1:], *p.lanes[0][1:]), p.lanes[1])),
        r"0F0 \(%0\) is missing from the compute lane of device 0",
    ),
    (
        "task twice in a lane",
        "form",
        {},
        lambda p: evolve(
            p, lanes=((np.append(p.lanes[0][0], 0).astype(np.int32), *p.lanes[0][1:]), p.lanes[1])
        ),
        r"0F0 \(%0\) stands twice in the compute lane of device 0",
    ),
    (
        "task in another's lane",
        "form",
        {},
        lambda p: evolve(
            p, lanes=(p.lanes[0], (np.append(p.lanes[1][0], 0).astype(np.int32), *p.lanes[1][1:]))
        ),
        r"0F0 \(%0\) does not belong in the compute lane of device 1",
    ),
    (
        "no such task in a lane",
        "form",
        {},
        lambda p: evolve(
            p, lanes=((np.append(p.lanes[0][0], 999).astype(np.int32), *p.lanes[0][1:]), p.lanes[1])
        ),
        "the compute lane of device 0 holds %999",
    ),
    (
        "lanes of another number of devices",
        "form",
        {},
        lambda p: evolve(p, lanes=p.lanes[:1]),
        "lanes for 1 devices",
    ),
    (
        "wait on nothing",
        "form",
        {},
        lambda p: evolve(p, waits=waits_of([(1, 999)], len(p))),
        "waits for %999",
    ),
    ("wait on itself", "form", {}, lambda p: evolve(p, waits=waits_of([(1, 1)], len(p))), "which is itself"),
    (
        "waits of another plan",
        "form",
        {},
        lambda p: evolve(p, waits=waits_of([], 3)),
        "does not fit the tasks",
    ),
    ("buffer of no task", "form", {}, lambda p: set_buffer(p, "free", 0, 999), "that is not there"),
    ("ragged table", "form", {}, lambda p: evolve(p, table=evolve(p.table, group=[0])), "differ in length"),
    (
        "ragged buffers",
        "form",
        {},
        lambda p: evolve(p, buffers=evolve(p.buffers, free=[0])),
        "differ in length",
    ),
    (
        "chunks lack a stage",
        "form",
        {},
        lambda p: evolve(p, chunks=p.chunks[:1]),
        "the chunks hold the stages 0, 1, but each of 0..3 belongs in one",
    ),
    (
        "chunk on no device",
        "form",
        {},
        lambda p: evolve(p, chunks=(p.chunks[0], evolve(p.chunks[1], device=7))),
        "chunk 1 is on device 7",
    ),
    (
        "value that runs backwards",
        "form",
        {},
        lambda p: evolve(
            p, graph=evolve(p.graph, values=(evolve(p.graph.values[0], readers=(0,)), *p.graph.values[1:]))
        ),
        "value v0 goes from stage 0 to 0",
    ),
]
