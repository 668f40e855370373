"""One mutation of a good plan after another: each is found under the name of the invariant it breaks."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from attrs import evolve
from mutants import MUTANTS, Mutation, double_activation, move
from mutate import (
    broken,
    drop,
    edges_of,
    repeat,
    row,
    set_column,
    swap,
    waits_of,
    without_wait,
)
from plans import any_order

import pipec
from pipec.ir import Kind, Lane
from pipec.verify import INVARIANTS

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
        {"forward_only": True},
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
    *MUTANTS,
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
