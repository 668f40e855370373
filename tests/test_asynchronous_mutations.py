"""Asynchronous plans, broken one way at a time: each is found under the name of the invariant it breaks."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from attrs import evolve
from mutate import broken, buffer_of, drop, repeat, row, set_buffer, set_column, swap, take_buffers

import pipec
from pipec import LiveWeights, PipeMare
from pipec.ir import Lane, Plan


def order_swapped(plan: Plan, first: str, second: str, device: int = 0) -> Plan:
    return swap(plan, device, Lane.COMPUTE, row(plan, first), row(plan, second))


def without_buffer(plan: Plan, token: str) -> Plan:
    gone = buffer_of(plan, token, 0)
    return take_buffers(plan, np.flatnonzero(np.arange(len(plan.buffers)) != gone))


def freed_by(plan: Plan, token: str, task: str) -> Plan:
    return set_buffer(plan, "free", buffer_of(plan, token, 0), row(plan, task))


def written_by(plan: Plan, token: str, task: str) -> Plan:
    return set_buffer(plan, "writer", buffer_of(plan, token, 0), row(plan, task))


def version(plan: Plan, task: str, number: int) -> Plan:
    return set_column(plan, "version", row(plan, task), number)


STASH, LIVE, SEGMENTS = "pipedream", LiveWeights(1), PipeMare(segments=2)
MUTATIONS: list[tuple[str, str, Any, Callable[[Plan], Plan], str]] = [
    ("update dropped", "tasks", STASH, lambda p: drop(p, row(p, "0U1")), "the UPDATE 1 of stage 's0' is missing"),
    ("update twice", "tasks", STASH, lambda p: repeat(p, row(p, "2U3")), "the UPDATE 3 of stage 's2' stands 2 times"),
    ("update without use", "tasks", STASH, lambda p: set_column(repeat(p, row(p, "2U3")), "microbatch", len(p), 99),
     "2U99 .* is there, but nothing needs it"),
    ("update declared otherwise", "tasks", STASH, lambda p: evolve(p, update="all"), "and not 'stage'"),
    ("update before its last gradient", "tasks", STASH, lambda p: order_swapped(p, "0B3", "0U1"),
     "0U1 .* does not wait for 0B3"),
    ("update after another gradient", "tasks", STASH, lambda p: order_swapped(p, "0U0", "0B2"),
     "0B2 .* adds to gradients that 0U0 .* has not used yet"),
    ("small update after another gradient", "tasks", LIVE, lambda p: order_swapped(p, "1U2", "1B3", 1),
     "1B3 .* adds to gradients that 1U2 .* has not used yet"),
    ("newer weights than there are", "versions", STASH, lambda p: version(p, "0F4", 2),
     "0F4 .* reads weight version 2, but 1 update of its stage stand"),
    ("stale forward", "versions", STASH, lambda p: version(p, "0F4", 0),
     r"0F4 .* reads weights 1 update old; the weight rule 'stash' declares 0"),
    ("backward on newer weights than its forward", "versions", STASH, lambda p: version(p, "0B2", 1),
     "0B2 .* reads weights no updates old; the weight rule 'stash' declares 1"),
    ("weights that are gone", "versions", STASH, lambda p: without_buffer(p, "w0[0]"),
     "0B2 .* reads weight version 0 after 1 update of its stage, but no copy of it is kept"),
    ("version of an update", "versions", STASH, lambda p: version(p, "0U2", 1),
     "0U2 .* replaces weight version 1, but 2 updates of its stage stand before it"),
    ("stale live weights", "versions", LIVE, lambda p: version(p, "1B3", 1), "1B3 .* no copy of it is kept"),
    ("unknown rule", "versions", STASH, lambda p: evolve(p, weights="best", recipe=None), "unknown weight rule 'best'"),
    ("unknown option of a rule", "versions", STASH, lambda p: evolve(p, weights="stash now", recipe=None),
     "'stash now': unknown now; known are vertical_sync"),
    ("another rule", "versions", STASH, lambda p: evolve(p, weights="live", recipe=None), "the weight rule 'live'"),
    ("weights freed early", "lifetimes", STASH, lambda p: freed_by(p, "w0[0]", "0F4"),
     "0F4 .* frees w0 on device 0 but does not wait for its reader 0B3"),
    ("weights never copied", "lifetimes", STASH, lambda p: without_buffer(p, "w0[1]"),
     r"w0\[1\] \(version 1 of the weights of stage 's0'\) has no buffer on device 0"),
    ("weights copied too late", "lifetimes", STASH, lambda p: written_by(p, "w0[0]", "0F4"),
     "begins its life in 0F4 .*, which does not write it"),
    ("a step that differs", "periods", STASH, lambda p: order_swapped(p, "0B4", "0F7"),
     "step 4 is not step 3 one minibatch later|step 3 is not step 2 one minibatch later"),
    ("too few steps", "form", STASH, lambda p: evolve(p, minibatches=3), "10 microbatches in 3 minibatches"),
    ("minibatches without a rule", "form", STASH, lambda p: evolve(p, weights=""), "a plan without a weight rule has"),
    ("recompute dropped", "tasks", SEGMENTS, lambda p: drop(p, row(p, "1R4")), "1R4 .* is missing from its segment"),
    ("recomputed copy dropped", "copies", SEGMENTS, lambda p: drop(p, row(p, "rv0[4]:0>1")),
     r"the copy rv0\[4\]:0>1 of the recomputed value 's0' is missing"),
    ("recompute too early", "waits", SEGMENTS, lambda p: waitless(p, "1R4"),
     "1R4 .* reads a value but does not wait for rv0"),
    ("recomputed value freed early", "lifetimes", SEGMENTS,
     lambda p: set_buffer(p, "free", buffer_of(p, "rv0[4]", 1), row(p, "1R4")), "1R4 .* frees rv0 on device 1"),
    ("other segments", "copies", SEGMENTS, lambda p: evolve(p, recompute="segments 0,1"),
     "nothing on device 1 needs it"),
    ("segments beyond the stages", "form", SEGMENTS, lambda p: evolve(p, recompute="segments 0,9"),
     "segments begin at stage 0"),
]


def waitless(plan: Plan, task: str) -> Plan:
    from mutate import edges_of, waits_of

    own = row(plan, task)
    return evolve(plan, waits=waits_of([e for e in edges_of(plan) if e[0] != own], len(plan)))


@pytest.mark.parametrize(
    ("invariant", "schedule", "mutation", "words"), [m[1:] for m in MUTATIONS], ids=[m[0] for m in MUTATIONS]
)
def test_a_broken_plan_is_found(
    invariant: str, schedule: Any, mutation: Callable[[Plan], Plan], words: str
) -> None:
    plan = pipec.compile(pipec.chain(3), 3, 2, schedule, update="stage")
    plan.verify()
    found = broken(mutation(plan))
    assert any(re.search(words, text) for text in found.get(invariant, [])), found


def test_the_report_of_an_asynchronous_plan() -> None:
    report = pipec.compile(pipec.chain(3), 3, 2, "pipemare", update="stage").verify()
    assert {f.invariant: f.unchecked for f in report.findings if f.unchecked} == {
        "memory": "no memory limit is given",
        "updates": "an asynchronous plan updates while other gradients are under way",
    }
