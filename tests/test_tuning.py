"""The fastest plan: schedule="auto", pipec.tune, and the command."""

from __future__ import annotations

import json
from typing import Any

import pytest
from attrs import evolve
from commands import run, script
from hypothesis import given, settings
from hypothesis import strategies as st
from plans import pipelines

import pipec
from pipec.schedules import SCHEDULES, find_schedule, is_asynchronous
from pipec.tuning import costs_of

__all__ = ["script"]

SYNCHRONOUS = [name for name in SCHEDULES if not is_asynchronous(find_schedule(name))]
COSTS = pipec.Costs(forward=1.0, backward_input=1.5, backward_weight=0.5, latency=0.1)


def times(devices: int, microbatches: int, **options: Any) -> dict[str, float]:
    """Every synchronous schedule's makespan, where it serves."""
    found = {}
    for name in SYNCHRONOUS:
        try:
            found[name] = pipec.compile(pipec.chain(4), devices, microbatches, name, **options).simulate().makespan
        except (pipec.PlanError, pipec.ScheduleError):
            continue
    return found


@pytest.mark.parametrize("options", [
    {}, {"costs": COSTS}, {"memory_limit": pipec.activations(2)}, {"placement": "v"}, {"recompute": "always"},
    {"update": "stage"}, {"forward_only": True},
])
def test_auto_takes_the_fastest_schedule(options: dict[str, Any]) -> None:
    plan = pipec.compile(pipec.chain(4), 2, 4, "auto", **options)
    every = times(2, 4, **options)
    assert plan.simulate().makespan == pytest.approx(min(every.values()))
    assert every[plan.schedule] == pytest.approx(min(every.values()))
    assert plan == pipec.compile(pipec.chain(4), 2, 4, plan.schedule, **options)


def test_auto_weighs_whole_backwards_against_halves_that_take_longer() -> None:
    halves = pipec.Costs(forward=1.0, backward_input=1.4, backward_weight=1.4)
    assert find_schedule(pipec.compile(pipec.chain(4), 2, 4, "auto", costs=halves).schedule).split  # type: ignore[union-attr]
    plan = pipec.compile(pipec.chain(4), 2, 4, "auto", costs=evolve(halves, backward=2.0))
    assert plan.schedule == "interleaved-1f1b"


def test_of_plans_that_take_as_long_the_one_with_the_least_memory_is_taken() -> None:
    plan = pipec.compile(pipec.chain(3), 1, 4, "auto")
    assert max(plan.simulate().peak_share) == 1  # gpipe would hold four


def test_auto_where_nothing_serves() -> None:
    with pytest.raises(pipec.PlanError, match="no schedule serves") as caught:
        pipec.compile(pipec.chain(4), 2, 4, "auto", memory_limit=pipec.activations(0.1))
    assert all(f"\n  {name}: memory: " in str(caught.value) for name in ("gpipe", "1f1b"))
    with pytest.raises(pipec.ScheduleError, match="devices= is needed"):
        pipec.compile(pipec.chain(4), schedule="auto")


@given(pipelines(least=2, most=5), st.integers(1, 3), st.integers(1, 5))
@settings(max_examples=15, deadline=None)
def test_auto_serves_any_pipeline(net: pipec.Pipeline, devices: int, microbatches: int) -> None:
    plan = pipec.compile(net, devices, microbatches, "auto")
    plan.verify()
    assert plan.simulate().makespan <= pipec.compile(net, devices, microbatches, "1f1b").simulate().makespan + 1e-9


def test_a_plan_of_auto_runs_and_takes_a_last_batch(capsys: pytest.CaptureFixture[str]) -> None:
    from models import chain, data, gradients

    net = chain(3)
    plan = pipec.compile(net, 2, 4, "auto")
    with pipec.Runner(net, plan) as run_:
        for rows in (8, 3):
            run_.step(**data(rows, 0))
    assert all(gradient is not None for gradient in gradients(net))


# -- several numbers of microbatches -----------------------------------------------------------------------------------


def test_costs_belong_to_one_number_of_microbatches() -> None:
    costs = pipec.Costs(
        forward=2.0, backward_input=2.0, backward_weight=2.0, latency=0.5, update=3.0, values={"s0": 100},
        stages={"s1": {"forward": 4.0, "activation_bytes": 80, "weight_bytes": 7}},
    )
    half = costs_of(costs, 0.5, overhead=0.2)
    assert half is not None
    assert (half.forward, half.backward_input, half.backward_weight) == pytest.approx((1.2, 1.2, 1.2))
    assert half.backward == pytest.approx(2.2)  # a whole backward is one task
    assert costs_of(evolve(costs, backward=3.0), 0.5) == evolve(costs_of(costs, 0.5), backward=1.5)
    assert (half.latency, half.update, half.values) == (0.5, 3.0, {"s0": 50})
    own = half.stages["s1"]
    assert (own.forward, own.backward, own.activation_bytes, own.weight_bytes) == (2.2, None, 40, 7)
    assert costs_of(None, 1.0) is None


def test_more_microbatches_pay_until_what_a_task_takes_anyway_is_more() -> None:
    def best(overhead: float) -> int:
        found = pipec.tune(pipec.chain(4), 4, (4, 8, 16, 32), schedules=["1f1b"], recompute=["never"],
                           overhead=overhead)
        assert [trial.time for trial in found.trials] == sorted(trial.time for trial in found.trials)
        return found.best.microbatches

    assert (best(0.0), best(0.1), best(5.0)) == (32, 16, 4)


def test_a_limit_in_activations_is_of_the_same_rows_whatever_their_number() -> None:
    found = pipec.tune(pipec.chain(2), 2, (2, 4), schedules=["gpipe"], recompute=["never"],
                       memory_limit=pipec.activations(2))
    assert [trial.microbatches for trial in found.trials if trial.plan is not None] == [4, 2]
    found = pipec.tune(pipec.chain(2), 2, (2, 4), schedules=["gpipe"], recompute=["never"],
                       memory_limit=pipec.activations(1.9))
    assert [trial.reason.split(":")[0] for trial in found.trials] == ["memory", "memory"]


def test_recompute_is_tried_where_memory_is_short() -> None:
    costs = pipec.Costs(stages={f"s{n}": {"activation_bytes": 1000, "output_bytes": 10} for n in range(4)})
    wide = pipec.tune(pipec.chain(4), 2, 4, schedules=["gpipe", "1f1b"], costs=costs)
    assert wide.trials[0].recompute == "never"
    tight = pipec.tune(pipec.chain(4), 2, 4, schedules=["gpipe"], costs=costs, memory_limit=4000)
    assert tight.trials[0].recompute == "except_last"
    assert "1 of 3 combinations cannot be compiled with these options" in str(tight)
    assert max(tight.best.simulate().peak_bytes or []) <= 4000


def test_asynchronous_schedules_take_part_where_they_are_named() -> None:
    found = pipec.tune(pipec.chain(2), 2, 4, recompute=["never"])
    assert not any(trial.plan is not None and trial.plan.asynchronous for trial in found.trials)
    found = pipec.tune(pipec.chain(2), 2, 4, schedules=["1f1b", "pipedream"], recompute=["never"])
    assert (found.best.schedule, found.trials[0].time) == ("pipedream", 12.0)
    with pytest.raises(pipec.ScheduleError, match="unknown schedule 'gpip'"):
        pipec.tune(pipec.chain(2), 2, 4, schedules=["gpip"])
    with pytest.raises(pipec.ScheduleError, match="whole numbers of at least 1, got 0"):
        pipec.tune(pipec.chain(2), 2, 0)


# -- the command -------------------------------------------------------------------------------------------------------


def test_the_command_prints_the_fastest(capsys: pytest.CaptureFixture[str]) -> None:
    given = ("tune", "--stages", "4", "--devices", "2", "--try-microbatches", "2,4", "--schedule", "gpipe,1f1b")
    code, out, err = run(capsys, *given)
    assert (code, err) == (0, "")
    assert out.splitlines()[1].split()[:3] == ["1f1b", "4", "never"]
    assert out.endswith("\n\nthe fastest: --schedule 1f1b --microbatches 4 --recompute never\n")
    rows = json.loads(run(capsys, *given, "--json")[1])
    assert len(rows) == 2 * 2 * 3
    assert (rows[0]["schedule"], rows[0]["time"]) == ("1f1b", rows[0]["makespan"])
    code, out, err = run(capsys, *given, "--memory-limit", "0.1a")
    assert code == 1
    assert "no schedule serves" in err
    assert run(capsys, "plan", "--stages", "4", "--devices", "2", "--schedule", "auto")[0] == 0


def test_the_command_takes_a_pipeline(capsys: pytest.CaptureFixture[str], tmp_path: Any) -> None:
    pipec.compile(pipec.chain(2), 2, 4).save(tmp_path / "plan.json")
    assert run(capsys, "tune", str(tmp_path / "plan.json"))[0] == 2
