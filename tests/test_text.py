"""The printed form of a plan and back, JSON files, and texts that are no plan."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st
from plans import pipelines, plans, unet

import pipec
from pipec.files import from_dict, to_dict
from pipec.ir import Plan
from pipec.spec import Graph
from pipec.text import quote

NAMES = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12)


def renamed(plan: Plan, names: list[str]) -> Plan:
    """The plan with other names for its pipeline, schedule, stages, values and inputs."""
    take = iter(names)
    graph = Graph(
        next(take),
        tuple(evolve(s, name=next(take)) for s in plan.graph.stages),
        tuple(evolve(v, name=next(take)) for v in plan.graph.values),
        tuple(evolve(i, name=next(take)) for i in plan.graph.inputs),
    )
    return evolve(plan, graph=graph, schedule=next(take), recompute=next(take))


@given(plans())
@settings(max_examples=80)
def test_text_round_trip(plan: Plan) -> None:
    again = Plan.parse(str(plan))
    assert again == plan
    assert str(again) == str(plan)
    again.verify()


@given(plans(most=4), st.lists(NAMES, min_size=25, max_size=25))
@settings(max_examples=80)
def test_names_of_any_characters_round_trip(plan: Plan, names: list[str]) -> None:
    plan = renamed(plan, names)
    assert Plan.parse(str(plan)) == plan
    assert from_dict(json.loads(json.dumps(to_dict(plan)))) == plan


@pytest.mark.parametrize(
    "name",
    [
        'say "hi"',
        "two\nlines",
        "tab\tbed",
        "a b",
        "1",
        "none",
        "loss",
        "device 0",
        "stage 1 x",
        "%1",
        "x -> y",
        "\\n",
        "é→日本🙂",
        "\u2028",
        "\x85",
        "\r",
        "\x1c",
        "a=b",
        "=",
        '"',
        "skip 3",
        ":",
        "v0",
        "",
    ],
)
def test_awkward_names_round_trip(name: str) -> None:
    plan = renamed(pipec.compile(pipec.chain(2), 2, 2), [name] * 25)
    assert Plan.parse(str(plan)) == plan


def test_quote_leaves_plain_names_alone() -> None:
    assert [quote(n) for n in ("enc1", "enc1[0]", "a.b-c", "1", "a b")] == [
        "enc1",
        "enc1[0]",
        "a.b-c",
        '"1"',
        '"a b"',
    ]


@given(
    plans(costs=pipec.Costs(2, 3, stages={"s0": {"forward": 4, "output_bytes": 7}}, latency=0.5, unit="ms"))
)
@settings(max_examples=40)
def test_json_round_trip_with_costs(plan: Plan) -> None:
    again = from_dict(json.loads(json.dumps(to_dict(plan))))
    assert again == plan
    assert again.costs == plan.costs
    assert again.simulate().makespan == plan.simulate().makespan


def test_save_and_load(tmp_path: Path) -> None:
    plan = pipec.compile(unet(), 2, 3, recompute={"mid": "always"}, update="stage", update_early=True)
    plan.save(tmp_path / "plan.json")
    again = Plan.load(tmp_path / "plan.json")
    assert again == plan
    assert again.update_early
    assert str(again.verify()) == str(plan.verify())


def test_versions_groups_slices_and_replicas_round_trip() -> None:
    """What later schedules use: the text and the file carry it already."""
    plan = pipec.compile(pipec.chain(2), 2, 2)
    table = evolve(plan.table, version=plan.table.microbatch, group=plan.table.stage + 1)
    plan = evolve(plan, table=table)
    assert Plan.parse(str(plan)) == plan
    doubled = evolve(
        plan,
        slices=2,
        replicas=3,
        table=evolve(table, slice=plan.table.microbatch % 2, replica=plan.table.microbatch),
    )
    buffers = evolve(plan.buffers, slice=plan.buffers.microbatch % 2, replica=plan.buffers.microbatch)
    doubled = evolve(doubled, buffers=buffers)
    text = str(doubled)
    assert "0F1.1~1" in text
    assert Plan.parse(text) == doubled


def damaged(old: str, new: str) -> str:
    text = str(pipec.compile(pipec.chain(2), 2, 2))
    assert old in text
    return text.replace(old, new)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "a plan's text begins with a line 'plan NAME schedule=...'"),
        ("hello\n", "a plan's text begins with a line 'plan NAME schedule=...'"),
        (damaged(" devices=2", ""), "the plan's text lacks 'devices'"),
        (
            damaged("devices=2", "devices=two"),
            "cannot read the plan's first line: invalid literal for int() with base 10: 'two'",
        ),
        (
            damaged("stage 0 s0", "stages 0 s0"),
            "cannot read the plan's line 'stages 0 s0 chunk=0 device=0': it is neither a stage, an input, a "
            "value, a device nor "
            "a task",
        ),
        (damaged("%0  0F0", "%0  0X0"), "0X0"),
        (damaged("out wait %0", "out await %0"), "'await' is not understood"),
        (damaged("wait %0 ", "wait %99 "), "the plan waits for %99, which it does not hold"),
        (damaged("wait %0 ", "wait zero "), "'zero'"),
        (damaged("%0  ", "%99 "), "the plan's tasks are not numbered %0, %1, ... without gaps"),
        (damaged("%2  0F1", "%0  0F1"), "the task %0 stands twice on a lane"),
        (damaged("new a0[0]", "new q0[0]"), "cannot read the buffer 'q0[0]' of the plan"),
        (damaged("free a0[0]", "free a0[1]"), "the buffer 'a0[0]' on device 0 is never freed"),
        (damaged("v0 s0: 0 -> 1", ""), "no value v0 is declared"),
        (damaged("device 0\n", ""), "it stands before any 'device' line"),
        (damaged("devices=2", "devices=1"), "device 1 of the plan's text is not one of 0..0"),
        (damaged("devices=2", "devices=3"), "the plan's text has lists for 2 devices, but devices=3"),
        (damaged("devices=2", "devices=99999999999"), "but devices=99999999999"),
        (damaged("microbatches=2", "microbatches=0"), "microbatches=0"),
        (damaged("device 1\n", "device 0\n"), "the device has a list already"),
        (damaged("stage 1 s1 chunk=1", "stage 2 s1 chunk=1"), "stage 2 stands where stage 1 belongs"),
    ],
)
def test_texts_that_are_no_plan(text: str, message: str) -> None:
    with pytest.raises(pipec.PlanError) as error:
        Plan.parse(text)
    assert message in str(error.value)


@given(plans(most=3), st.data())
@settings(max_examples=150)
def test_a_damaged_text_is_read_or_refused_but_never_crashes(plan: Plan, data: st.DataObject) -> None:
    """Lines dropped, repeated or with a number changed give a plan, or PlanError; so does verifying that plan."""
    lines = str(plan).splitlines()
    at = data.draw(st.integers(0, len(lines) - 1))
    what = data.draw(st.sampled_from(["drop", "repeat", "number", "cut"]))
    if what == "drop":
        del lines[at]
    elif what == "repeat":
        lines.insert(at, lines[at])
    elif what == "cut":
        lines[at] = lines[at][: data.draw(st.integers(0, len(lines[at])))]
    else:
        digits = [i for i, c in enumerate(lines[at]) if c.isdigit()]
        if digits:
            i = data.draw(st.sampled_from(digits))
            lines[at] = lines[at][:i] + data.draw(st.sampled_from("0123456789")) + lines[at][i + 1 :]
    with contextlib.suppress(pipec.PlanError):
        Plan.parse("\n".join(lines)).verify()


def test_files_that_are_no_plan(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text("not json")
    with pytest.raises(pipec.PlanError, match="is no JSON"):
        Plan.load(path)
    for given_value in ([], {}, {"format": 0}, "plan"):
        path.write_text(json.dumps(given_value))
        with pytest.raises(pipec.PlanError, match="this is no plan of format 1"):
            Plan.load(path)


@given(pipelines(), st.data())
@settings(max_examples=60)
def test_a_damaged_file_is_read_or_refused_but_never_crashes(
    net: pipec.Pipeline, data: st.DataObject
) -> None:
    saved: dict[str, Any] = json.loads(json.dumps(to_dict(pipec.compile(net, 1, 2))))
    at: Any = saved
    while True:
        keys = list(at) if isinstance(at, dict) else list(range(len(at)))
        key = data.draw(st.sampled_from(keys))
        if not isinstance(at[key], dict | list) or not at[key] or data.draw(st.booleans()):
            break
        at = at[key]
    at[key] = data.draw(st.sampled_from([None, -1, 7, "x", [], {}, 10**12]))
    with contextlib.suppress(pipec.PlanError):
        from_dict(saved).verify()
