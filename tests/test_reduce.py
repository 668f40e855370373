"""REDUCE tasks: where the pass puts them, what verify proves of them, what they cost, how they are written."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st
from models import WIDTH, of_modules
from mutate import broken, drop, repeat, row, set_column, without_wait
from plans import pipelines
from torch import nn

import pipec
from pipec.ir import Kind, Lane, Plan


def tied() -> pipec.Pipeline:
    """The first and the last of three stages are one module."""
    layer = nn.Linear(WIDTH, WIDTH)
    return of_modules(layer, nn.Linear(WIDTH, WIDTH), layer)


def test_plans_with_reduce_tasks_as_text(golden: Callable[[str, str], None]) -> None:
    shared = pipec.compile(tied(), 2, 2, update="stage")
    replicas = pipec.compile(pipec.chain(2), 2, 2, "zb-h1", data_parallel=2)
    golden("reduce.txt", f"{shared}\n{replicas}")


@pytest.mark.parametrize("make", [
    lambda: pipec.compile(tied(), 2, 2, update="stage"), lambda: pipec.compile(pipec.chain(3), 3, 4, data_parallel=4),
])
def test_plans_with_reduce_tasks_are_written_and_read(make: Callable[[], Plan], tmp_path: Path) -> None:
    plan = make()
    assert Plan.parse(str(plan)) == plan
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan
    plan.draw(tmp_path / "plan.svg")
    plan.simulate(pipec.Costs(reduce=1.0)).to_chrome_trace(tmp_path / "plan.trace")
    assert pipec.compiler.with_microbatches(plan, 2).data_parallel == plan.data_parallel


def test_only_what_is_added_up_over_processes_has_a_reduce() -> None:
    def reduces(plan: Plan) -> list[str]:
        return [str(task) for tasks in plan.tasks for task in tasks if task.kind is Kind.REDUCE]

    assert reduces(pipec.compile(tied(), 1, 2)) == []
    assert reduces(pipec.compile(tied(), 2, 2)) == ["0G0", "2G0"]
    assert reduces(pipec.compile(tied(), 2, 2, placement={"a": 0, "b": 1, "c": 0})) == []
    assert reduces(pipec.compile(tied(), 2, 2, data_parallel=2)) == ["1G0", "0G0", "2G0"]
    assert reduces(pipec.compile(tied(), 2, 2, forward_only=True, data_parallel=2)) == []


@given(pipelines(least=2), st.integers(1, 3), st.sampled_from(["gpipe", "1f1b", "zb-h1"]), st.booleans())
@settings(max_examples=25)
def test_every_stage_that_trains_has_one_with_replicas(
    net: pipec.Pipeline, microbatches: int, schedule: str, early: bool
) -> None:
    how: dict[str, Any] = {"update": "stage", "update_early": True} if early else {}
    plan = pipec.compile(net, 2, microbatches, schedule, data_parallel=2, **how)
    found = sorted(int(plan.table.stage[i]) for d in range(2) for i in plan.lanes[d][Lane.OUT]
                   if plan.table.kind[i] == Kind.REDUCE)
    assert found == [s for s, info in enumerate(plan.graph.stages) if info.backward]
    assert plan.verify()["reduces"].unchecked is None


MUTATIONS: list[tuple[str, dict[str, Any], Callable[[Plan], Plan], str]] = [
    ("dropped", {}, lambda p: drop(p, row(p, "0G0")), r"the REDUCE of stage 's0' is missing"),
    ("twice", {}, lambda p: repeat(p, row(p, "1G0")), r"the REDUCE of stage 's1' stands 2 times"),
    ("too early", {}, lambda p: without_wait(p, row(p, "0G0"), row(p, "0B1")),
     r"0G0 .* does not wait for 0B1 .*, whose gradient it adds"),
    ("update does not wait", {"update": "stage"}, lambda p: without_wait(p, row(p, "0U0"), row(p, "0G0")),
     r"0U0 .* does not wait for 0G0 .*, which completes its gradient"),
    ("of another stage", {}, lambda p: set_column(p, "stage", row(p, "1G0"), 0),
     r"the REDUCE of stage 's1' is missing"),
]


@pytest.mark.parametrize(("how", "mutate", "text"), [m[1:] for m in MUTATIONS], ids=[m[0] for m in MUTATIONS])
def test_mutations_are_found(how: dict[str, Any], mutate: Callable[[Plan], Plan], text: str) -> None:
    plan = pipec.compile(pipec.chain(2), 2, 2, data_parallel=2, **how)
    assert broken(plan) == {}
    found = "\n".join(broken(mutate(plan))["reduces"])
    assert re.search(text, found), found


def test_a_reduce_nobody_needs_is_found() -> None:
    plan = evolve(pipec.compile(pipec.chain(2), 2, 2, data_parallel=2), data_parallel=1)
    assert "its stage's gradients are complete without it" in "\n".join(broken(plan)["reduces"])


def test_a_shared_parameter_waits_for_both_stages() -> None:
    plan = pipec.compile(tied(), 2, 2)
    mutant = without_wait(plan, row(plan, "2G0"), row(plan, "0B1"))
    assert "2G0 (stage 'c', device 1) does not wait for 0B1" in "\n".join(broken(mutant)["reduces"])


def test_a_reduce_overlaps_the_drain() -> None:
    """The last stage is done first: its REDUCE runs beside the backwards of the others."""
    net = pipec.chain(4)
    plan = pipec.compile(net, 4, 4, data_parallel=2)
    free = plan.simulate(pipec.Costs()).makespan
    late = plan.simulate(pipec.Costs(stages={"s3": {"reduce": 5.0}}))
    assert late.makespan == free
    assert plan.simulate(pipec.Costs(reduce=5.0)).makespan == free + 5.0


def test_a_reduce_costs_what_a_ring_moves() -> None:
    stages = {f"s{n}": {"weight_bytes": 400, "output_bytes": 0} for n in range(2)}
    for replicas, share in ((2, 1.0), (4, 1.5)):
        plan = pipec.compile(pipec.chain(2), 2, 1, data_parallel=replicas)
        timeline = plan.simulate(pipec.Costs(bandwidth=100.0, stages=stages))
        task = row(plan, "1G0")
        assert timeline.end[task] - timeline.start[task] == pytest.approx(4.0 * share)


def test_a_device_is_not_busy_with_a_reduce_that_runs_beside_its_tasks() -> None:
    plan = pipec.compile(pipec.chain(4), 2, 4, data_parallel=2)
    for reduce in (0.0, 2.0, 50.0):
        timeline = plan.simulate(pipec.Costs(reduce=reduce))
        assert timeline.busy == pytest.approx([own / timeline.makespan for own in timeline.useful])
