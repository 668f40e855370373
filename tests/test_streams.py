"""The stream backend's calls, recorded on the CPU and proved against the plan; its numbers are the plain loop's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st
from models import RUNS, WIDTH, batch, buffers, chain, data, gradients, kept_streams, options, recipes, same
from test_lanes import skipping
from torch import nn

import pipec
from pipec.ir import Plan
from pipec.runtime import stream_lanes
from pipec.runtime.placement import check_places
from pipec.runtime.stream_api import Call, RecordedStream, Recorder
from pipec.runtime.stream_lanes import StreamLanes
from pipec.runtime.stream_proof import MEMORY, Happened, memory_problems, problems

__all__ = ["kept_streams"]


def backend(devices: int, real: int | None = None) -> StreamLanes:
    """Streams that are written down; "cpu:0", "cpu:1" stand for different devices."""
    count = devices if real is None else real
    return StreamLanes(Recorder(), [torch.device(f"cpu:{number % count}") for number in range(devices)])


def recorded(streams: StreamLanes) -> list[Call]:
    calls = list(streams.api.calls)  # type: ignore[attr-defined]
    streams.api.calls.clear()  # type: ignore[attr-defined]
    return calls


@pytest.mark.parametrize("recompute", ["never", "always"])
@pytest.mark.parametrize("schedule", RUNS)
def test_every_schedules_calls_are_right_and_so_are_its_numbers(schedule: str, recompute: str) -> None:
    mine, theirs = skipping(), skipping()
    loop = pipec.reference(theirs, 4, seed=3)
    plan = pipec.compile(mine, 3, 4, schedule, recompute=recompute)
    streams = backend(3, real=2)
    with pipec.Runner(mine, plan, backend=streams, seed=3) as run:
        for step in range(2):
            got, expected = run.step(**data(8, step)), loop.step(**data(8, step))
            assert same([got.losses, got.outputs], [expected.losses, expected.outputs])
            assert problems(plan, recorded(streams)) == []
    assert same(gradients(mine), gradients(theirs))
    assert same(buffers(mine), buffers(theirs))


@given(recipes(most=5), st.data())
@settings(max_examples=25)
def test_any_pipelines_calls_are_right(recipe: Any, draw: st.DataObject) -> None:
    how = draw.draw(options(recipe)) | {"update": None}
    mine, theirs = recipe.build(), recipe.build()
    plan = pipec.compile(mine, **how)
    streams = backend(plan.devices, real=draw.draw(st.integers(1, plan.devices)))
    with pipec.Runner(mine, plan, backend=streams) as run:
        got = run.step(**batch(6))
    expected = pipec.reference(theirs, plan.microbatches).step(**batch(6))
    assert same([got.losses, got.outputs], [expected.losses, expected.outputs])
    assert same(gradients(mine), gradients(theirs))
    assert problems(plan, recorded(streams)) == []


def calls_of(plan: Plan, net: pipec.Pipeline, rows: int = 8) -> list[Call]:
    streams = backend(plan.devices)
    with pipec.Runner(net, plan, backend=streams) as run:
        run.step(**data(rows))
    return recorded(streams)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1"])
def test_every_wait_counts(schedule: str) -> None:
    """Without any one of its waits the proof fails, unless others imply it."""
    net = skipping()
    plan = pipec.compile(net, 3, 3, schedule)
    calls = calls_of(plan, net, 6)
    assert problems(plan, calls) == []
    assert needed_waits(plan, calls) > 30


def needed_waits(plan: Plan, calls: list[Call]) -> int:
    """How many waits the proof misses when each is left out in turn; the others order nothing."""
    needed = 0
    for number, call in enumerate(calls):
        if call.kind == "wait":
            mutant = calls[:number] + calls[number + 1 :]
            if problems(plan, mutant):
                needed += 1
            else:
                assert order_of(mutant) == order_of(calls), f"nobody misses {call}"
    return needed


def order_of(calls: list[Call]) -> dict[str, set[str]]:
    """Per piece of work what comes before it on the devices."""
    happened = Happened(calls)
    works = [n for n, call in enumerate(calls) if call.kind == "run" and not call.what.startswith(MEMORY)]
    return {calls[w].what: {calls[b].what for b in works if happened.ordered(b, w)} for w in works}


def without(calls: Sequence[Call], wrong: Callable[[Call], bool]) -> list[Call]:
    kept = [call for call in calls if not wrong(call)]
    assert len(kept) < len(calls)
    return kept


MISTAKES: dict[str, tuple[Callable[[list[Call]], list[Call]], str]] = {
    "a task left out": (lambda calls: without(calls, lambda c: c.what == "0F1"), "0F1 does not run"),
    "a task twice": (lambda calls: [*calls, next(c for c in calls if c.what == "0F1")], "0F1 runs twice"),
    "another stream": (
        lambda calls: [evolve(c, stream="out 0") if c.what == "0F1" else c for c in calls], "0F1 runs on out 0",
    ),
    "another device current": (
        lambda calls: [evolve(c, device="cpu:1") if c.what == "0F1" else c for c in calls], "runs with",
    ),
    "the caller is not waited for": (
        lambda calls: without(calls, lambda c: c.kind == "wait" and c.stream == "compute 1" and c.what == "e2"),
        "compute 1 does not wait for its caller first",
    ),
    "the caller does not wait": (
        lambda calls: without(calls, lambda c: c.kind == "wait" and c.stream.startswith("caller")), "no caller waits",
    ),
    "memory given back at once": (
        lambda calls: [early for c in calls for early in (
            [c, Call("free", "compute 0", "v0[0]:0>1 sent")] if c.what == "v0[0]:0>1" else [c])],
        r"takes back v0[0]:0>1 sent, which v0[0]:0>1 may still use",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_the_proof_finds(name: str) -> None:
    plan = pipec.compile(chain(2), 2, 3, "gpipe")
    calls = calls_of(plan, chain(2))
    mistake, told = MISTAKES[name]
    assert any(told in problem for problem in problems(plan, mistake(calls)))


def test_memory_that_goes_back_too_early_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same backend with holding left out: the proof, not the numbers, tells."""

    class Careless(stream_lanes.StreamLane):
        def hold(self, name: str, payload: Any, event: Any) -> None:
            self.api.free(self.stream, name, [payload])

    monkeypatch.setattr(stream_lanes, "StreamLane", Careless)
    plan = pipec.compile(chain(2), 2, 3)
    found = problems(plan, calls_of(plan, chain(2)))
    assert any("takes back v0[0]:0>1 sent" in problem for problem in found)
    assert any("arrived, which" in problem for problem in found)


def test_what_a_stage_hands_on_or_keeps_is_never_the_copy_in_streams_memory() -> None:
    """A stage may return its input, or keep it: what it sees belongs to the compute stream."""
    arrived: list[int] = []
    seen: list[int] = []
    held: list[torch.Tensor] = []

    class Keep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.line = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.append(x.data_ptr())
            return x + 0 * self.line(x)

    net = pipec.Pipeline("keep")
    x, y = net.input("x"), net.input("y")
    net.loss("mse", nn.functional.mse_loss, net.stage("b", Keep(), net.stage("a", nn.Linear(WIDTH, WIDTH), x)), y)
    streams = backend(2)

    class Watched(Recorder):
        def free(self, stream: Any, name: str, payload: list[Any]) -> None:
            own = [tensor for tensor in payload if name.startswith("v0[") and name.endswith("arrived")]
            held.extend(own)
            arrived.extend(tensor.data_ptr() for tensor in own)
            super().free(stream, name, payload)

    streams = StreamLanes(Watched(), streams.devices)
    with pipec.Runner(net, pipec.compile(net, 2, 4, "gpipe"), backend=streams) as run:
        run.step(**data())
    assert len(seen) == len(arrived) == 4
    assert len(held) == 4, "the memory is still there, so that addresses can be compared"
    assert not set(seen) & set(arrived)


class Callers(Recorder):
    """A caller that changes streams: ``turn`` says which one it is on."""

    turn = 0

    def caller(self, device: torch.device) -> RecordedStream:
        return RecordedStream(device, f"caller {self.turn} {device}")


class OnlyCallers(StreamLanes):
    """Streams that wait for their callers, but not for the end of the part before."""

    def _enter(self) -> None:
        self._ends = [None] * len(self.devices)
        super()._enter()


def of_two_callers(kind: type[StreamLanes]) -> list[Call]:
    """The calls of two steps, each on a caller's stream of its own that does not know of the other."""
    net, callers = chain(2), Callers()
    with pipec.Runner(net, pipec.compile(net, 2, 3, "gpipe"), backend=kind(callers, backend(2).devices)) as run:
        run.step(**data(6))
        callers.turn = 1
        run.step(**data(6))
    return callers.calls


def test_memory_of_a_step_is_taken_again_when_all_have_left_it_whoever_calls_next() -> None:
    assert memory_problems(of_two_callers(StreamLanes)) == []
    found = memory_problems(of_two_callers(OnlyCallers))
    assert "in 1 takes back v0[2]:0>1 arrived, which takes over v0[2]:0>1 may still use" in found


def test_updates_and_evaluation_on_streams() -> None:
    results = []
    for how in ("replay", "streams"):
        net = chain(3)
        plan = pipec.compile(net, 3, 4, update="stage")
        streams: Any = backend(3) if how == "streams" else how
        with pipec.Runner(net, plan, optimizer=lambda p: torch.optim.Adam(p, 0.1), backend=streams) as run:
            losses = [run.step(**data(8, step)).loss for step in range(3)]
            results.append([losses, run.evaluate(**data()).output])
    assert same(*results)


def test_a_failure_gives_all_memory_back_and_the_next_step_works() -> None:
    net, armed = chain(3), [True]

    def fail(module: nn.Module, args: Any) -> None:
        if armed and armed.pop():
            raise ValueError("wrong")

    handle = net.spec.stages[1].fn.register_forward_pre_hook(fail)
    streams = backend(3)
    with pipec.Runner(net, pipec.compile(net, 3, 4), backend=streams) as run:
        with pytest.raises(ValueError, match="wrong") as caught:
            run.step(**data())
        assert "1F0" in "".join(getattr(caught.value, "__notes__", []))
        assert not [lane for lane in streams.lanes if lane.held]
        handle.remove()
        recorded(streams)
        got, other = run.step(**data()), chain(3)
        assert same(got.losses, pipec.reference(other, 4).step(**data()).losses)
        assert same(gradients(net), gradients(other))
        assert problems(run.plan, recorded(streams)) == []


def test_inputs_go_to_each_device_that_reads_them_once_per_microbatch() -> None:
    net = pipec.Pipeline("scaled")
    x, scale, y = net.input("x"), net.input("scale", split=None), net.input("y")

    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.line = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
            return self.line(x) * scale

    net.loss("mse", nn.functional.mse_loss, net.stage("b", Scale(), net.stage("a", Scale(), x, scale), scale), y)
    plan = pipec.compile(net, 2, 2, "gpipe")
    streams = backend(2)
    with pipec.Runner(net, plan, backend=streams) as run:
        run.step(**data(4), scale=torch.tensor(2.0))
    calls = recorded(streams)
    sent = [(call.stream, call.what) for call in calls if call.what.startswith("input")]
    assert sent == [
        ("in 0", "input 0[0] for 0"), ("in 0", "input 1[0] for 0"), ("in 0", "input 0[1] for 0"),
        ("in 1", "input 1[0] for 1"), ("in 1", "input 2[0] for 1"), ("in 1", "input 2[1] for 1"),
    ]
    for number, call in enumerate(calls):  # the first task of a microbatch waits for its inputs
        if call.what in ("0F0", "0F1"):
            waited = next(c for c in reversed(calls[:number]) if c.stream == "compute 0" and c.kind == "wait")
            record = next(at for at, c in enumerate(calls) if (c.kind, c.what) == ("record", waited.what))
            assert calls[record - 1].what == f"input {'01'['1' not in call.what[2:]]}[{call.what[2:]}] for 0"


def test_the_caller_gets_one_wait_per_device_and_gives_one() -> None:
    plan = pipec.compile(chain(4), 4, 2, placement="looped")
    streams = backend(4, real=2)
    with pipec.Runner(chain(4), plan, backend=streams) as run:
        run.step(**data(4))
    calls = [call for call in recorded(streams) if call.stream.startswith("caller")]
    assert [(call.kind, call.stream) for call in calls] == [
        ("record", "caller cpu:0"), ("record", "caller cpu:1"),
        *[("wait", f"caller cpu:{device % 2}") for device in range(4)],
    ]


def test_one_device_needs_no_event_between_tasks() -> None:
    plan = pipec.compile(chain(4), 1, 4)
    calls = calls_of(plan, chain(4))
    between = [call for call in calls if call.kind in ("record", "wait") and not call.stream.startswith("caller")]
    # the caller, inputs of four microbatches, the end of the copy-in stream, its own end
    assert len([call for call in between if call.stream == "compute 0"]) == 1 + 4 + 1 + 1
    assert not [call for call in calls if call.stream == "out 0" and call.kind == "run"]


@pytest.mark.parametrize("tied", [False, True])
def test_casts_that_autocast_keeps_are_not_read_by_another_stream(tied: bool) -> None:
    kept: list[bool] = []

    class Note(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            kept.append(torch.is_autocast_cache_enabled())
            return super().forward(x)

    first, second = Note(WIDTH, WIDTH), Note(WIDTH, WIDTH)
    if tied:
        second.weight = first.weight
    net = pipec.Pipeline("tied")
    x, y = net.input("x"), net.input("y")
    net.loss("mse", nn.functional.mse_loss, net.stage("b", second, net.stage("a", first, x)), y)
    run = pipec.Runner(net, pipec.compile(net, 2, 2), backend=backend(2))
    with run, torch.autocast("cpu", torch.bfloat16):
        run.step(**data(4))
        assert torch.is_autocast_cache_enabled()
    assert kept == [not tied] * 4


def test_stages_do_not_move_when_the_plan_is_switched() -> None:
    net = chain(4)
    there, again = pipec.compile(net, 2, 2), pipec.compile(net, 2, 4, "gpipe")
    elsewhere = pipec.compile(net, 2, 2, placement=[0, 1, 0, 1])
    gpus = [torch.device("cpu:0"), torch.device("cpu:1")]
    check_places(gpus, there, again)
    check_places(None, there, elsewhere)
    for other in (elsewhere, pipec.compile(net, 1, 2)):
        with pytest.raises(pipec.RunError, match="places stages on other devices than the one before"):
            check_places(gpus, there, other)


def test_a_trace_has_the_devices_times_and_not_those_of_the_host() -> None:
    """Marks that tell 1, 2, 3, ... ms: the timeline follows them, each device from its own zero."""

    class Ticking(Recorder):
        ticks = 0

        def mark(self, stream: Any) -> float:
            self.ticks += 1
            return float(self.ticks)

    net = chain(2)
    plan = pipec.compile(net, 2, 1, update="stage")
    streams = StreamLanes(Ticking(), backend(2).devices)
    with pipec.Runner(net, plan, optimizer=lambda p: torch.optim.SGD(p, 0.1), backend=streams) as run:
        run.step(**data(2))
        timeline = run.trace()
    tasks = [str(plan.table.task(task)) for task in range(len(plan))]
    times = {name: (start, end) for name, start, end in zip(tasks, timeline.start, timeline.end, strict=True)}
    assert times == {  # zeros at 1 and 2, then two marks for each task as it is queued
        "0F0": (2 - 2, 3 - 2), "v0[0]:0>1": (4 - 2, 5 - 2), "1F0": (5 - 2, 6 - 2), "1B0": (7 - 2, 8 - 2),
        "dv0[0]:1>0": (9 - 2, 10 - 2), "0B0": (12 - 2, 13 - 2), "0U0": (14 - 2, 15 - 2), "1U0": (15 - 2, 16 - 2),
    }
