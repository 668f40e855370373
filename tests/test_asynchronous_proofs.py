"""What verify proves of asynchronous plans, on random ones: nothing that matters can be taken away unnoticed."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from mutate import broken, drop, edges_of, repeat, set_buffer, set_column, without_wait
from plans import ancestors, asynchronous_plans, needs

from pipec.ir import Buffer, Kind, Plan
from pipec.rules.base import READERS
from pipec.segments import first_stages


@given(asynchronous_plans(most=4), st.randoms(use_true_random=False))
@settings(max_examples=25, deadline=None)
def test_any_removed_wait_is_found_when_it_matters(plan: Plan, rng: Any) -> None:
    edges = edges_of(plan)
    for task, need in rng.sample(edges, min(len(edges), 4)):
        mutant = without_wait(plan, task, need)
        matters = need not in ancestors(needs(mutant), task)
        found = broken(mutant)
        assert set(found) <= {"waits", "lifetimes", "tasks", "order", "periods"}
        assert bool(set(found) - {"periods"}) == matters


@given(asynchronous_plans(most=4), st.randoms(use_true_random=False))
@settings(max_examples=25, deadline=None)
def test_any_dropped_or_repeated_task_is_found(plan: Plan, rng: Any) -> None:
    for task in rng.sample(range(len(plan)), min(4, len(plan))):
        assert broken(repeat(plan, task))
        spared = plan.table.kind[task] == Kind.RECOMPUTE and not first_stages(plan.recompute)
        found = broken(drop(plan, task))
        assert set(found) - {"periods"} or spared


@given(asynchronous_plans(most=4), st.randoms(use_true_random=False))
@settings(max_examples=25, deadline=None)
def test_any_buffer_freed_before_its_last_reader_is_found(plan: Plan, rng: Any) -> None:
    weights = np.flatnonzero(plan.buffers.kind == Buffer.WEIGHT).tolist()
    for buffer in [*rng.sample(range(len(plan.buffers)), 3), *rng.sample(weights, min(2, len(weights)))]:
        assert "lifetimes" in broken(set_buffer(plan, "free", buffer, int(plan.buffers.writer[buffer])))


@given(asynchronous_plans(most=4), st.randoms(use_true_random=False), st.sampled_from([-1, 1]))
@settings(max_examples=25, deadline=None)
def test_any_other_version_is_found(plan: Plan, rng: Any, change: int) -> None:
    table = plan.table
    rows = np.flatnonzero(np.isin(table.kind, (*READERS, Kind.UPDATE)) & (table.version + change >= 0)).tolist()
    for task in rng.sample(rows, min(3, len(rows))):
        assert "versions" in broken(set_column(plan, "version", task, int(table.version[task]) + change))


@given(asynchronous_plans(most=5))
@settings(max_examples=40, deadline=None)
def test_every_compiled_plan_holds_and_reads_the_same(plan: Plan) -> None:
    held = {f.invariant for f in plan.verify().findings if f.unchecked is None}
    assert held >= {"form", "tasks", "order", "progress", "waits", "lifetimes", "copies", "versions", "periods"}
    assert Plan.parse(str(plan)) == plan
