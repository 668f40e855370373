"""Costs: defaults, overrides, and names that are not there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import pipec
from pipec.ir import Kind


def test_costs_print_as_a_table() -> None:
    costs = pipec.Costs(forward=1.5, bandwidth=1e6, unit="ms", stages={
        "enc": {"forward": 2, "output_bytes": 4096}, "decoder": {"output_bytes": 12},
    })
    assert str(costs).splitlines() == [
        "costs: forward 1.5 ms, backward_input 1 ms, backward_weight 1 ms, update 0 ms, latency 0 ms",
        "bandwidth 1e+06 bytes per ms",
        "stage    forward  output_bytes",
        "enc            2         4,096",
        "decoder        -            12",
    ]
    assert repr(costs).startswith("Costs(forward=1.5, ")
    assert str(pipec.Costs()).count("\n") == 0


def test_durations() -> None:
    costs = pipec.Costs(2, 3, 4, update=7, stages={"a": {"forward": 5, "backward_weight": 0}})
    table = {kind: (costs.duration(kind, "a"), costs.duration(kind, "b")) for kind in Kind}
    assert table == {
        Kind.FORWARD: (5, 2),
        Kind.RECOMPUTE: (5, 2),
        Kind.BACKWARD: (3, 7),
        Kind.BACKWARD_INPUT: (3, 3),
        Kind.BACKWARD_WEIGHT: (0, 4),
        Kind.COPY: (0, 0),
        Kind.REDUCE: (0, 0),
        Kind.UPDATE: (7, 7),
    }


def test_a_whole_backward_may_take_less_than_its_halves() -> None:
    costs = pipec.Costs(2, 3, 4, backward=6, stages={"a": {"backward": 5}, "b": {"backward_weight": 1}})
    assert [costs.duration(Kind.BACKWARD, stage) for stage in ("a", "b", "c")] == [5, 4, 6]
    assert costs.duration(Kind.BACKWARD_INPUT, "a") + costs.duration(Kind.BACKWARD_WEIGHT, "a") == 7
    assert "backward 6," in str(costs)


def test_costs_saved_without_a_whole_backward_are_read(tmp_path: Path) -> None:
    plan = pipec.compile(pipec.chain(2), 2, 2, costs=pipec.Costs(backward_weight=2.0, stages={"s0": {"forward": 3.0}}))
    plan.save(tmp_path / "plan.json")
    saved = json.loads((tmp_path / "plan.json").read_text())
    del saved["costs"]["backward"], saved["costs"]["stages"]["s0"]["backward"]
    (tmp_path / "old.json").write_text(json.dumps(saved))
    assert pipec.Plan.load(tmp_path / "old.json") == plan


def test_recompute_costs_a_forward_unless_said() -> None:
    assert pipec.Costs(2).duration(Kind.RECOMPUTE, "a") == 2
    assert pipec.Costs(2, recompute=1).duration(Kind.RECOMPUTE, "a") == 1
    costs = pipec.Costs(2, recompute=1, stages={"a": pipec.StageCosts(recompute=9)})
    assert (costs.duration(Kind.RECOMPUTE, "a"), costs.duration(Kind.RECOMPUTE, "b")) == (9, 1)


def test_value_bytes() -> None:
    costs = pipec.Costs(stages={"a": {"output_bytes": 8}}, values={"a[1]": 3})
    assert [costs.value_bytes(v, "a") for v in ("a[0]", "a[1]")] == [8, 3]
    assert costs.value_bytes("b", "b") is None


def test_with_stages_keeps_the_others() -> None:
    costs = pipec.Costs(stages={"a": {"forward": 2}, "b": {"forward": 3}}).with_stages(
        {"b": pipec.StageCosts(4)}
    )
    assert [costs.duration(Kind.FORWARD, s) for s in "ab"] == [2, 4]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: pipec.Costs(forward=-1), "costs: forward must not be negative, got -1"),
        (lambda: pipec.Costs(latency=float("nan")), "costs: latency must be a number, got nan"),
        (lambda: pipec.Costs(bandwidth=0), "costs: bandwidth must be positive, got 0"),
        (
            lambda: pipec.Costs(stages={"a": {"forwards": 1}}),
            "costs of stage 'a': unknown forwards; known are forward, backward_input, backward_weight, "
            "recompute, update, "
            "activation_bytes, output_bytes, weight_bytes, weight_activation_bytes, carry_bytes, reduce, "
            "backward",
        ),
        (
            lambda: pipec.Costs(stages={"a": {"forward": -2}}),
            "costs of stage 'a': forward must not be negative, got -2",
        ),
        (lambda: pipec.Costs(values={"a": -2}), "costs of value 'a': bytes must not be negative, got -2"),
        (lambda: pipec.Costs(stages={"a": 3}), "costs of stage 'a': expected a mapping or StageCosts, got 3"),
        (lambda: pipec.activations(0), "activations: the limit must be positive, got 0"),
    ],
)
def test_mistakes(make: Any, message: str) -> None:
    with pytest.raises(pipec.SpecError) as error:
        make()
    assert str(error.value) == message


def test_names_that_are_not_there() -> None:
    costs = pipec.Costs(stages={"s1": {"forward": 2}, "enc": {"forward": 2}}, values={"dec": 3})
    with pytest.raises(pipec.SpecError) as error:
        pipec.compile(pipec.chain(2), 2, 2, costs=costs)
    assert str(error.value) == (
        "costs name what pipeline 'chain' has not: stage 'enc', value 'dec'; its stages are s0, s1"
    )
    with pytest.raises(pipec.SpecError):
        pipec.compile(pipec.chain(2), 2, 2).simulate(costs)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: pipec.Costs(forward="a"), "forward must be a number, got 'a'"),  # type: ignore[arg-type]
        (lambda: pipec.Costs(forward=float("inf")), "forward must be finite"),
        (lambda: pipec.Costs(forward=None), "forward must be a number, got None"),  # type: ignore[arg-type]
        (lambda: pipec.Costs(bandwidth="x"), "bandwidth must be positive, got 'x'"),  # type: ignore[arg-type]
        (lambda: pipec.Costs(stages=3), "stages must be a mapping"),  # type: ignore[arg-type]
        (lambda: pipec.Costs(values=3), "a mapping from value names, got 3"),  # type: ignore[arg-type]
        (lambda: pipec.activations(None), "must be positive, got None"),  # type: ignore[arg-type]
        (lambda: pipec.compile(pipec.chain(2), 2, costs={}), "costs must be pipec.Costs"),  # type: ignore[arg-type]
        (lambda: pipec.compile(pipec.chain(2), 2, costs=pipec.Costs(gradients={"zz": 1})), "value 'zz'"),
        (lambda: pipec.compile(pipec.chain(2), 2, costs=pipec.Costs(saved_values={"zz": 1})), "value 'zz'"),
    ],
)
def test_costs_of_another_type_say_so(make: Any, message: str) -> None:
    with pytest.raises(pipec.SpecError, match=message):
        make()


@pytest.mark.parametrize(("wrong", "told"), [
    ({"forward": 1e308}, r"costs: forward must be at most 9\.0072e\+15, got 1e\+308; use a larger unit"),
    ({"forward": 10**400}, r"costs: forward must be at most 9\.0072e\+15, got a number of 401 digits"),
    ({"stages": {"s0": {"backward_input": 10**400}}}, "costs of stage 's0': backward_input must be at most"),
    ({"stages": {"s0": {"activation_bytes": 10**400}}}, "costs of stage 's0': activation_bytes must be at most"),
    ({"values": {"s0": 10**400}}, "costs of value 's0': bytes must be at most"),
    ({"forward": float("nan")}, "costs: forward must be a number, got nan"),
    ({"bandwidth": 10**400}, r"costs: bandwidth must be between 1\.11022e-16 and .*got a number of 401 digits"),
    ({"bandwidth": 1e-320}, "costs: bandwidth must be between"),
])
def test_numbers_that_no_sum_can_hold_are_refused(wrong: dict[str, Any], told: str) -> None:
    with pytest.raises(pipec.SpecError, match=told):
        pipec.Costs(**wrong)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-v", "zb-1p", "dualpipe-v", "v-min", "interleaved-zero-bubble"])
@pytest.mark.parametrize("costs", [
    {"forward": 1e15}, {"forward": 1e15, "backward_input": 1e-15}, {"forward": 5e-324},
    {"forward": 0, "backward_input": 1e15, "latency": 1e15}, {"stages": {"s3": {"forward": 1e15}}},
])
def test_the_largest_and_smallest_costs_go_with_every_schedule(schedule: str, costs: dict[str, Any]) -> None:
    timeline = pipec.compile(pipec.chain(4), 2, 2, schedule, costs=pipec.Costs(**costs)).simulate()
    assert 0 < timeline.makespan < 1e18
