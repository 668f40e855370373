"""One mutation of a good plan after another: each is found under the name of the invariant it breaks."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from attrs import evolve
from mutate import (
    broken,
    buffer_of,
    drop,
    edges_of,
    repeat,
    row,
    set_buffer,
    set_column,
    swap,
    take_buffers,
    waits_of,
    without_wait,
)
from plans import any_order

import pipec
from pipec.ir import Kind, Lane, Plan
from pipec.verify import INVARIANTS

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


MUTATIONS: list[tuple[str, str, dict[str, Any], Mutation, str]] = [
    (
        "forward dropped",
        "tasks",
        {},
        lambda p: drop(p, row(p, "1F1")),
        r"1F1 \(stage 's1', device 0\) is missing",
    ),
    (
        "backward dropped",
        "tasks",
        {},
        lambda p: drop(p, row(p, "2B0")),
        r"2B0 \(stage 's2', device 1\) is missing",
    ),
    (
        "half dropped",
        "tasks",
        {"schedule": any_order(1, True)},
        lambda p: drop(p, int(np.flatnonzero(p.table.kind == Kind.BACKWARD_WEIGHT)[0])),
        "is missing, the other half",
    ),
    (
        "other half dropped",
        "tasks",
        {"schedule": any_order(1, True)},
        lambda p: drop(p, int(np.flatnonzero(p.table.kind == Kind.BACKWARD_INPUT)[0])),
        "is missing, the other half",
    ),
    ("forward twice", "tasks", {}, lambda p: repeat(p, row(p, "0F0")), "0F0 .* stands more than once"),
    (
        "whole and half",
        "tasks",
        {},
        lambda p: set_column(repeat(p, row(p, "0B0")), "kind", len(p), 4),
        "0B0 .* stands whole and in halves",
    ),
    (
        "task on another device",
        "tasks",
        {},
        lambda p: move(p, "0B2", 1),
        "0B2 stands on device 1, but its stage 's0' is on device 0",
    ),
    (
        "update dropped",
        "tasks",
        {"update": "stage"},
        lambda p: drop(p, row(p, "2U0")),
        "the UPDATE of stage 's2' is missing",
    ),
    (
        "update twice",
        "tasks",
        {"update": "all"},
        lambda p: repeat(p, row(p, "U0")),
        "the UPDATE of all stages stands 2 times",
    ),
    (
        "update undeclared",
        "tasks",
        {"update": "all"},
        lambda p: evolve(p, update=None),
        r"U0 \(all stages, device 0\) is there, but the plan declares no update",
    ),
    (
        "update of another kind",
        "tasks",
        {"update": "all"},
        lambda p: evolve(p, update="stage"),
        "U0 .* is there, but update='stage' has no use for it",
    ),
    ("update unknown", "tasks", {}, lambda p: evolve(p, update="often"), "declares update='often'"),
    (
        "update before its backward",
        "tasks",
        {"update": "stage", "update_early": True},
        lambda p: swap(p, 1, Lane.COMPUTE, row(p, "2U0"), row(p, "2B2")),
        "2U0 .* does not wait for 2B2",
    ),
    (
        "recompute without backward",
        "tasks",
        {"recompute": "always", "forward_only": True},
        lambda p: set_column(repeat(p, row(p, "0F0")), "kind", len(p), 1),
        "0R0 .* without a backward to recompute for",
    ),
    (
        "backward before forward",
        "order",
        {},
        lambda p: swap(p, 1, Lane.COMPUTE, row(p, "3F0"), row(p, "3B0")),
        "3B0 .* stands before its forward 3F0",
    ),
    (
        "recompute before forward",
        "order",
        {"recompute": "always"},
        lambda p: swap(p, 0, Lane.COMPUTE, row(p, "0F2"), row(p, "0R0")),
        "0F2|0R0",
    ),
    (
        "backward before recompute",
        "order",
        {"recompute": "always"},
        lambda p: swap(p, 1, Lane.COMPUTE, row(p, "2R0"), row(p, "2B0")),
        "2B0 .* stands before its recompute 2R0",
    ),
    (
        "weight half before input half",
        "order",
        {"schedule": any_order(1, True)},
        lambda p: swap(p, 1, Lane.COMPUTE, row(p, "3I1"), row(p, "3W1")),
        "3W1 .* stands before its input half 3I1",
    ),
    (
        "recompute twice",
        "order",
        {"recompute": "always"},
        double_activation,
        "the activations of stage 's0', microbatch 0, are held 2 times; one copy is enough",
    ),
    (
        "lanes cross",
        "progress",
        {},
        lambda p: swap(p, 1, Lane.COMPUTE, row(p, "3F0"), row(p, "3B0")),
        "device 1 compute stands at 3B0",
    ),
    (
        "receives cross sends",
        "progress",
        {"schedule": "gpipe"},
        lambda p: swap(p, 1, Lane.IN, row(p, "v1[0]:0>1"), row(p, "v1[1]:0>1")),
        r"device 1 copy-in stands at v1\[1\]:0>1, which waits for its turn on the other lane",
    ),
    (
        "wait on what comes later",
        "progress",
        {},
        lambda p: evolve(p, waits=waits_of([*edges_of(p), (row(p, "0F0"), row(p, "3B2"))], len(p))),
        r"device 0 compute stands at 0F0, which waits for 3B2 \(device 1\)",
    ),
    (
        "copy waits for nothing",
        "waits",
        {},
        lambda p: without_wait(p, row(p, "v1[0]:0>1"), row(p, "1F0")),
        r"v1\[0\]:0>1 .* does not wait for 1F0",
    ),
    (
        "gradient unawaited",
        "waits",
        {},
        lambda p: without_wait(p, row(p, "1B0"), row(p, "dv1[0]:1>0")),
        r"1B0 .* needs a gradient but does not wait for dv1\[0\]:1>0 \(gradient of value 's1'\)",
    ),
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
    (
        "version from the future",
        "versions",
        {},
        lambda p: set_column(p, "version", row(p, "2F1"), 1),
        "2F1 .* reads weight version 1, but no updates of its stage stand before it",
    ),
    (
        "version gone",
        "versions",
        {"update": "stage"},
        lambda p: swap(p, 1, Lane.COMPUTE, row(p, "3F0"), row(p, "3U0")),
        "reads weight version 0 after 1 update of its stage",
    ),
    (
        "update before others' gradients",
        "updates",
        {"update": "stage"},
        lambda p: without_wait(p, row(p, "2U0"), row(p, "0B2")),
        "2U0 .* does not wait for 0B2",
    ),
    (
        "one update before others' gradients",
        "updates",
        {"update": "all", "placement": [1, 1, 0, 0]},
        lambda p: without_wait(p, row(p, "U0"), row(p, "0B2")),
        "U0 .* does not wait for 0B2",
    ),
    (
        "early without saying so",
        "updates",
        {"update": "stage", "update_early": True},
        lambda p: evolve(p, update_early=False),
        "U0 .* does not wait for",
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


@pytest.mark.parametrize(
    ("invariant", "options", "mutate", "message"),
    [m[1:] for m in MUTATIONS],
    ids=[m[0].replace(" ", "-") for m in MUTATIONS],
)
def test_mutations_are_found(invariant: str, options: dict[str, Any], mutate: Mutation, message: str) -> None:
    plan = pipec.compile(pipec.chain(4), 2, 3, **options)
    assert broken(plan) == {}
    found = broken(mutate(plan))
    assert invariant in found, found
    assert re.search(message, "\n".join(found[invariant])), found


def test_every_invariant_is_broken_by_a_mutation() -> None:
    # test_memory, test_overlap, test_verify, test_asynchronous_mutations, test_reduce
    elsewhere = {"memory", "groups", "rendezvous", "periods", "reduces"}
    assert {m[1] for m in MUTATIONS} | elsewhere == {"form", *INVARIANTS}
