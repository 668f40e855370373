"""The trace of an asynchronous step: numbers as its result counts them, true weight versions, memory, and its title."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from declared import chain
from test_asynchronous_runs import batches, momentum, stages
from test_render_timeline import Svg, label, tip

import pipec
from pipec.ir import Kind, Task
from pipec.render import draw
from pipec.timeline import Timeline

SIZES = {"weight_bytes": 1000, "activation_bytes": 100, "output_bytes": 10}


def runner(schedule: Any, microbatches: int, count: int = 2, **how: Any) -> pipec.Runner:
    costs = pipec.Costs(stages=dict.fromkeys("abc"[:count], SIZES))
    net = chain(stages(count))
    plan = pipec.compile(net, count, microbatches, schedule, update="stage", costs=costs)
    return pipec.Runner(net, plan, **{"optimizer": momentum, "backend": "replay", "seed": 1} | how)


def computed(timeline: Timeline, *kinds: Kind) -> list[Task]:
    return [task for device in range(timeline.plan.devices) for task in timeline.plan.compute(device)
            if task.kind in kinds]


@pytest.mark.parametrize("schedule", ["pipedream", "pipemare", "pipedream-2bw"])
@pytest.mark.parametrize("microbatches", [2, 4])
def test_numbers_and_versions_are_the_runs(schedule: str, microbatches: int) -> None:
    read: dict[Any, int] = {}
    with runner(schedule, microbatches) as run:
        def note(one: pipec.WeightsRead) -> None:
            own = next(own for own in run._flow.weights if own.stage.name == one.stage)  # type: ignore[union-attr]
            read[one.kind, one.stage, one.minibatch, one.microbatch] = own.updates - one.age

        def check(result: Any, name: str) -> None:
            timeline = run.trace()
            tasks = computed(timeline, Kind.FORWARD, Kind.BACKWARD)
            names = [stage.name for stage in timeline.plan.graph.stages]
            assert {(task.kind, names[task.stage], *timeline.item(task)): task.version for task in tasks} == read
            last = [timeline.item(task) for task in tasks if task.kind is Kind.BACKWARD and task.stage == 0]
            assert tuple(sorted(last)) == result.finished
            updates = computed(timeline, Kind.UPDATE)
            assert [timeline.item(task) for task in updates] == [(t.version, microbatches - 1) for t in updates]
            assert timeline.excerpt is not None
            assert timeline.excerpt.name == name
            read.clear()

        run.watch_weights(note)
        given = batches(12, 8)
        for number in range(8):
            check(run.step(**given[number]), f"step of minibatch {number}")
        check(run.flush(), "flush after minibatch 7")
        for number in range(8, 12):
            check(run.step(**given[number]), f"step of minibatch {number}")
        run.flush()


def test_a_picture_says_what_it_is_and_whose_numbers_it_shows(tmp_path: Path) -> None:
    with runner("pipemare", 4) as run:
        for batch in batches(7, 8):
            result = run.step(**batch)
        timeline = run.trace()
        run.flush()
    svg = Svg(draw(timeline))
    assert "2 devices · 4 microbatches a minibatch · weights corrected decay=0.135" in svg.text("title")
    assert "one measured step of an asynchronous plan: step of minibatch 6" in svg.text("title")
    assert "update per stage" not in svg.all_text
    assert "5.2: microbatch 2 of minibatch 5, as in result.finished" in svg.text("legend")
    task = next(task for task in computed(timeline, Kind.BACKWARD) if task.stage == 0)
    minibatch, microbatch = min(result.finished)
    box = svg.by_id(f"task-{task}")
    assert label(box) in ("", f"{minibatch}.{microbatch} w{task.version}")
    assert f"backward of a, microbatch {microbatch} of minibatch {minibatch} ({task} of the plan)" in tip(box)
    assert f"reads weight version {task.version}" in tip(box)
    assert "one measured step of an asynchronous plan, the step of minibatch 6" in str(timeline)
    timeline.to_chrome_trace(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    told = {(e["args"]["minibatch"], e["args"]["microbatch"]) for e in events
            if e.get("cat") == "backward" and e["args"]["stage"] == "a"}
    assert told == set(result.finished)
    assert any(e["name"] == "process_name" and "measured step of minibatch 6" in e["args"]["name"] for e in events)


def test_one_microbatch_a_minibatch_is_told_by_its_minibatch() -> None:
    with runner("pipedream", 1) as run:
        for batch in batches(6, 8):
            run.step(**batch)
        timeline = run.trace()
        run.flush()
        run.step(**batches(1, 8)[0])
        empty = run.trace()
        run.flush()
    svg = Svg(draw(timeline))
    assert "number: minibatch" in svg.text("legend")
    task = computed(timeline, Kind.FORWARD)[0]
    assert f"forward of {'ab'[task.stage]}, minibatch {timeline.item(task)[0]} (" in tip(svg.by_id(f"task-{task}"))
    assert "step of minibatch 6" in str(empty)
    assert draw(empty).dot  # a step that leaves all of its first minibatch to the next one has no task


@pytest.mark.parametrize("schedule", ["pipedream", "pipemare"])
def test_memory_is_that_of_the_whole_plan(schedule: str) -> None:
    with runner(schedule, 1, 3) as run:
        simulated = run.plan.simulate()
        peaks = []
        for batch in batches(9, 8):
            run.step(**batch)
            peaks.append(run.trace().peak_share)
        timeline = run.trace()
        run.flush()
    assert timeline.weight_memory == simulated.weight_memory
    assert [max(own) for own in zip(*peaks, strict=True)] == pytest.approx(simulated.peak_share)
    wanted = "the weight rule's own" if schedule == "pipemare" else "stashed versions"
    assert wanted in str(timeline)
    assert wanted in str(simulated)
    assert timeline.peak_bytes is not None
    if schedule == "pipedream":  # the stashes of older minibatches are there all the time
        assert timeline.peak_bytes[0] >= 2000


def numbered(timeline: Timeline) -> list[Any]:
    tasks = computed(timeline, Kind.FORWARD, Kind.BACKWARD, Kind.UPDATE)
    return sorted((str(task), timeline.item(task), task.version) for task in tasks)


def over_ranks(rank: int) -> list[Any]:
    with runner("pipemare", 4, backend=None) as run:
        for batch in batches(3, 8):
            run.step(**batch)
        run.flush()
        for batch in batches(4, 8):
            run.step(**batch)
        timeline = run.trace()
        run.flush()
    return numbered(timeline)


def test_ranks_tell_each_other_their_versions(crew2: Any) -> None:
    with runner("pipemare", 4) as run:
        for batch in batches(3, 8):
            run.step(**batch)
        run.flush()
        for batch in batches(4, 8):
            run.step(**batch)
        expected = numbered(run.trace())
        run.flush()
    assert {version for task, _, version in expected if "U" in task} == {5}
    assert crew2(over_ranks) == [expected, expected]


def test_versions_count_on_after_a_failure() -> None:
    """The stages had been updated with different minibatches when it came."""
    with runner("pipedream", 1, 3) as run:
        for batch in batches(5, 8):
            run.step(**batch)
        failing = run.stages[0].trainable()[0].register_hook(_fail)
        with pytest.raises(ValueError, match="on purpose"):
            run.step(**batches(1, 8)[0])
        failing.remove()
        updates = [own.updates for own in run._flow.weights]  # type: ignore[union-attr]
        assert len(set(updates)) > 1
        for batch in batches(2, 8):
            run.step(**batch)
        run.flush()
        timeline = run.trace()
        first = {task.stage: task.version for task in reversed(computed(timeline, Kind.UPDATE))}
        done = [own.updates for own in run._flow.weights]  # type: ignore[union-attr]
        assert [done[stage] - version for stage, version in sorted(first.items())] == [
            len([task for task in computed(timeline, Kind.UPDATE) if task.stage == stage]) for stage in sorted(first)
        ]


def _fail(gradient: Any) -> Any:
    raise ValueError("on purpose")


def test_measured_synchronous_timelines_say_so() -> None:
    net = chain(stages(2))
    plan = pipec.compile(net, 2, 2)
    with pipec.Runner(net, plan, backend="replay") as run:
        run.step(**batches(1, 8)[0])
        timeline = run.trace()
    assert Svg(draw(timeline)).text("title").endswith(" · measured")
    assert "measured" not in Svg(draw(plan)).all_text
    assert str(timeline).splitlines()[0].endswith("; measured")
    both = Svg(draw([plan.simulate(pipec.Costs(unit="ms")), timeline]))
    assert [label(g) for g in both.of("panel-title")] == ["1f1b", "1f1b, measured"]


@pytest.mark.parametrize("schedule", ["pipedream", "pipemare"])
def test_the_text_of_a_step_says_that_it_is_an_excerpt(schedule: str, tmp_path: Path) -> None:
    with runner(schedule, 2) as run:
        for batch in batches(4, 8):
            run.step(**batch)
            plan = run.trace().plan
            assert str(plan).startswith("excerpt of plan chain schedule=")
            with pytest.raises(pipec.PlanError, match=r"is the text of an excerpt, .*print the whole plan, run\.plan"):
                pipec.Plan.parse(str(plan))
            with pytest.raises(pipec.PlanError, match=r"asynchronous step is an excerpt"):
                plan.verify()
        assert pipec.Plan.parse(str(run.plan)) == run.plan
        run.flush()


def test_a_first_step_that_only_takes_its_minibatch_in(tmp_path: Path) -> None:
    """With a microbatch a minibatch two devices are further behind than the first one allows."""
    with runner("pipedream", 1) as run:
        assert run.plan.behind == (2, 3)
        first, second, third = (run.step(**batch) for batch in batches(3, 8)[:1] * 3)
        assert (first.finished, second.finished, third.finished) == ((), (), ((0, 0),))
        assert run.flush().finished == ((1, 0), (2, 0))
        assert not run.step(**batches(1, 8)[0]).finished
        trace = run.trace()
        assert (len(trace.plan), trace.makespan, trace.bubble, trace.critical_path) == (0, 0, 0, [])
        assert "the step of minibatch 3\nmakespan 0 ms" in str(trace)
        assert str(trace.plan).splitlines()[-2:] == ["device 0", "device 1"]
        trace.draw(tmp_path / "nothing.svg")
        trace.to_chrome_trace(tmp_path / "nothing.json")
        assert run.flush().finished == ((3, 0),)
