"""Plans with slices: closed forms, orders, text, what is carried, and what verify finds."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from mutate import broken, buffer_of, row, set_buffer, swap

import pipec
from pipec.ir import Kind, Lane, Plan
from pipec.schedules import REGISTRY, B, format_schedule, parse_schedule
from pipec.schedules import F as Forward


@pytest.mark.parametrize("k", [1, 2, 3, 4])
@pytest.mark.parametrize("P", [1, 2, 3, 4, 8])
def test_closed_forms_of_seq_1f1b(P: int, k: int) -> None:
    """Bubble (P-1)(F+B+W)/k, and (P-1+k)/k microbatches held at most, for any M."""
    durations = (1.0, 1.125, 0.875)
    for M in (1, 2, P, 2 * P + 1):
        line = pipec.compile(pipec.chain(P, carry=True), P, M, "seq-1f1b", slices=k, costs=pipec.Costs(*durations))
        line = line.simulate()
        assert line.bubble_time == pytest.approx((P - 1) * sum(durations) / k)
        assert max(line.peak_share) == pytest.approx(min(M, (P - 1 + k) / k))


def test_without_slices_it_is_1f1b() -> None:
    plans = [pipec.compile(pipec.chain(4), 4, 6, schedule) for schedule in ("1f1b", "seq-1f1b")]
    assert plans[0].table == plans[1].table


def test_the_lists_of_seq_1f1b() -> None:
    plan = pipec.compile(pipec.chain(2, carry=True), 2, 2, "seq-1f1b", slices=2)
    assert [" ".join(map(str, plan.compute(d))) for d in range(2)] == [
        "0F0 0F0.1 0F1 0B0.1 0F1.1 0B0 0B1.1 0B1",
        "1F0 1F0.1 1B0.1 1F1 1B0 1F1.1 1B1.1 1B1",
    ]


@pytest.mark.parametrize("schedule", REGISTRY)
def test_every_schedule_runs_slices_in_a_row(schedule: str) -> None:
    costs = pipec.Costs(update=2.0)
    whole, cut = (
        pipec.compile(pipec.chain(6, carry=True), 3, 4, schedule, slices=k, update="stage", costs=costs) for k in (1, 3)
    )
    assert cut.simulate().makespan <= whole.simulate().makespan + 1e-9  # the next device starts with the first slice
    assert max(cut.simulate().peak_share) <= max(whole.simulate().peak_share) + 1e-9
    for stage in range(6):
        for kind, step in ((Kind.FORWARD, 1), (Kind.BACKWARD, -1)):
            rows = (cut.table.stage == stage) & (cut.table.kind == kind) & (cut.table.microbatch == 2)
            if rows.any():
                assert cut.table.slice[rows].tolist() == [0, 1, 2][::step]


def test_a_schedule_of_slices_as_text_and_its_faults() -> None:
    text = "0F0 0F0.1 0B0.1 0B0"
    policy = parse_schedule(text.replace("0F0 ", "0F0.0 ").replace("0B0.1 0B0", "0B0.1 0B0.0"))
    plan = pipec.compile(pipec.chain(1, carry=True), 1, 1, policy, slices=2)
    assert " ".join(map(str, plan.compute(0))) == text
    assert parse_schedule(format_schedule(policy.rows)).rows == policy.rows

    def mine(problem: Any) -> Any:
        return [[Forward(0, 0, 0), Forward(0, 0, 2), Forward(0, 0), B(0, 0, 0), B(0, 0, 0)]]

    with pytest.raises(pipec.ScheduleError) as error:
        pipec.compile(pipec.chain(1, carry=True), 1, 1, mine, slices=2)
    assert str(error.value) == (
        "schedule 'mine': 2 problems\n  1. device 0: 0F0.2: there is no slice 2, only 0..1\n"
        "  2. device 0: (0, 0, 0) is no task; write F(chunk, microbatch, slice) or B, I, W"
    )
    wrong = [[Forward(0, 0, 1), Forward(0, 0, 0), B(0, 0, 1), B(0, 0, 0)]]
    with pytest.raises(pipec.PlanError, match=re.escape("stands at 0F0.1, which waits for 0F0 (device 0)")):
        pipec.compile(pipec.chain(1, carry=True), 1, 1, lambda problem: wrong, slices=2)
    pipec.compile(pipec.chain(1), 1, 1, lambda problem: wrong, slices=2)  # nothing is carried: any order will do


def carried() -> Plan:
    return pipec.compile(pipec.chain(2, carry=True), 2, 2, "seq-1f1b", slices=3, recompute={"s0": "always"})


def test_text_and_json(tmp_path: Path) -> None:
    plan = carried()
    assert "stage 0 s0 chunk=0 device=0 carry\n" in str(plan)
    assert re.search(r"0F0.1 +new v0\[0.1\] c0\[0.1\]", str(plan))
    assert re.search(r"0B0.2 .* new dc0\[0.1\] free c0\[0.1\]", str(plan))
    assert Plan.parse(str(plan)) == plan
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan
    assert 'label="1.2"' in plan.draw().dot
    assert "task-0F1.2" in plan.draw(graph="tasks").dot


@pytest.mark.parametrize(
    ("invariant", "mutate", "message"),
    [
        ("order", lambda p: swap(p, 1, Lane.COMPUTE, row(p, "1F0.1"), row(p, "1F0.2")),
         r"1F0.2 \(.*\) does not come after 1F0.1 \(.*\), which carries on to it from the slice before"),
        ("order", lambda p: swap(p, 1, Lane.COMPUTE, row(p, "1B0.1"), row(p, "1B0")),
         r"1B0 \(.*\) does not come after 1B0.1 \(.*\), which carries on to it from the slice after it"),
        ("lifetimes", lambda p: set_buffer(p, "free", buffer_of(p, "c0[0]", 0), row(p, "0F0.1")),
         r"0F0.1 \(.*\) frees c0 on device 0 but does not wait for its reader 0B0.1"),
        ("lifetimes", lambda p: set_buffer(p, "free", buffer_of(p, "dc1[0]", 1), row(p, "1B0.1")),
         r"frees dc1 on device 1 but does not wait for its reader 1B0 "),
        ("lifetimes", lambda p: set_buffer(p, "writer", buffer_of(p, "c1[0]", 1), row(p, "1F0.1")),
         r"c1\[0\] \(carried on by stage 's1'\) on device 1 begins its life in 1F0.1"),
        ("lifetimes", lambda p: set_buffer(p, "slice", buffer_of(p, "c1[0]", 1), 2), r"holds c1\[0.2\]|no buffer"),
    ],
)
def test_mutations_of_what_is_carried_are_found(invariant: str, mutate: Any, message: str) -> None:
    plan = carried()
    assert broken(plan) == {}
    found = broken(mutate(plan))
    assert invariant in found, found
    assert re.search(message, "\n".join(found[invariant])), found


def test_what_is_carried_is_charged() -> None:
    costs = pipec.Costs(stages={"s0": {"activation_bytes": 30, "output_bytes": 3, "carry_bytes": 300},
                                "s1": {"activation_bytes": 30, "output_bytes": 3}})
    plan = pipec.compile(pipec.chain(2, carry=True), 1, 1, "gpipe", slices=3, costs=costs)
    assert plan.simulate().peak_bytes is None
    with pytest.raises(pipec.ScheduleError, match=r"what stage 's1' carries on \(carry_bytes\)"):
        plan.verify(memory_limit=10_000)
    costs = costs.with_stages({"s1": pipec.StageCosts(activation_bytes=30, carry_bytes=0)})
    # In 0B0.2, after 1B0.2: 3 + 2 activations, 2 values, the gradient of one, 2 carried parts and a gradient of one.
    assert plan.simulate(costs).peak_bytes == [5 * 10 + 2 + 1 + 3 * 100]


def test_asynchronous_schedules_have_no_slices() -> None:
    with pytest.raises(pipec.ScheduleError) as error:
        pipec.compile(pipec.chain(2), 2, 2, "pipedream", update="stage", slices=2)
    assert str(error.value) == (
        "schedule 'pipedream' updates weights between microbatches, so it cannot cut them into 2 slices; use a "
        "synchronous schedule, 'seq-1f1b' say"
    )
