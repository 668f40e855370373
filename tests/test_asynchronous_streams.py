"""Asynchronous plans on streams: recorded calls of whole runs, proved against a plan of as many minibatches."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
from attrs import evolve
from declared import chain
from models import data, kept_streams, parameters, same
from test_asynchronous_lanes import FOLDED, LINEAR, POLICY
from test_asynchronous_runs import SCHEDULES, adam, batches, momentum, runner, stages, state
from test_lanes import skipping
from test_streams import Callers, OnlyCallers, backend, order_of, recorded

import pipec
from pipec.ir import Plan
from pipec.runtime.asynchronous.program import build_steps
from pipec.runtime.stream_api import Call, Recorder
from pipec.runtime.stream_lanes import StreamLanes
from pipec.runtime.stream_proof import run_problems

__all__ = ["kept_streams"]


@pytest.mark.parametrize("name", SCHEDULES)
def test_streams_give_the_numbers_of_the_replay(name: str) -> None:
    """Filling, steady steps, a flush, an evaluation and another run; two logical devices on one device."""
    found, given_ = [], batches(7)
    for how in ("replay", "streams"):
        mine = stages(dropout=0.5)
        streams: Any = backend(3, real=2) if how == "streams" else how
        with runner(mine, SCHEDULES[name], backend=streams, recompute="always", optimizer=adam) as run:
            losses = [run.step(**one).microbatch_losses for one in given_[:5]] + [run.flush().microbatch_losses]
            losses += [run.step(**one).microbatch_losses for one in given_[5:]]
            losses += [run.evaluate(**given_[0]).losses, run.flush().microbatch_losses]
        found.append([losses, state(mine)])
    assert same(*found)


def parts_of(net: pipec.Pipeline, plan: Plan, rows: int = 12, real: int = 2) -> tuple[list[list[Call]], int]:
    """The calls of each step and of the flush of a run over the plan's minibatches, and the first steady step."""
    streams = backend(plan.devices, real=real)
    parts = []
    with pipec.Runner(net, plan, backend=streams, seed=3, optimizer=momentum) as run:
        for step in range(plan.minibatches):
            run.step(**data(rows, step))
            parts.append(recorded(streams))
        run.flush()
        parts.append(recorded(streams))
    return parts, len(build_steps(plan).segments) - 1


CASES: list[tuple[str, list[int], str | None]] = [
    ("stash", LINEAR, None), ("segments", LINEAR, None), *((policy, FOLDED, "host") for policy in POLICY),
]


@pytest.mark.parametrize(("policy", "placement", "hold"), CASES)
def test_the_calls_of_whole_runs_are_right(policy: str, placement: list[int], hold: str | None) -> None:
    net = skipping(hold=hold)
    plan = pipec.compile(net, 3, 6, POLICY[policy], placement=placement, update="stage")
    parts, steady = parts_of(net, plan)
    assert plan.minibatches > steady + 2, "the steady step runs again"
    assert run_problems(plan, parts, steady) == []
    if policy == "stash":
        other = skipping()
        again = pipec.compile(other, 3, 6, POLICY[policy], placement=placement, update="stage")
        with pipec.Runner(other, again, backend="replay", seed=3, optimizer=momentum) as run:
            for step in range(plan.minibatches):
                run.step(**data(12, step))
            run.flush()
        assert same(parameters(net), parameters(other))


def small() -> tuple[Plan, list[list[Call]], int]:
    net = chain(stages(2))
    plan = pipec.compile(net, 2, 1, "pipedream", update="stage")
    streams, parts = backend(2), []
    with pipec.Runner(net, plan, backend=streams, optimizer=momentum) as run:
        for one in batches(plan.minibatches):
            run.step(**one)
            parts.append(recorded(streams))
        run.flush()
        parts.append(recorded(streams))
    return plan, parts, len(build_steps(plan).segments) - 1


def in_a_row(parts: list[list[Call]]) -> list[Call]:
    return [call for part in parts for call in part]


def test_every_wait_of_a_run_counts() -> None:
    """Without any one of its waits the proof fails, unless others imply it."""
    plan, parts, steady = small()
    assert run_problems(plan, parts, steady) == []
    needed = 0
    for number, part in enumerate(parts):
        for place, call in enumerate(part):
            if call.kind == "wait":
                mutant = [*parts[:number], part[:place] + part[place + 1 :], *parts[number + 1 :]]
                if run_problems(plan, mutant, steady):
                    needed += 1
                else:
                    assert order_of(in_a_row(mutant)) == order_of(in_a_row(parts)), f"nobody misses {call}"
    assert needed > 40


MISTAKES: dict[str, tuple[Callable[[Call], Call | None], str]] = {
    "no update": (lambda call: None if call.what == "0U0" else call, "0U0 does not run"),
    "an update elsewhere": (
        lambda call: evolve(call, stream="out 0") if call.what == "0U0" else call, "0U0 runs on out 0 (), not on",
    ),
    "an update of another step": (
        lambda call: evolve(call, what="0U1") if call.what == "0U0" else call, "0U1 runs twice",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_the_proof_of_a_run_finds(name: str) -> None:
    mistake, told = MISTAKES[name]
    plan, parts, steady = small()
    wrong = [[made for call in part if (made := mistake(call)) is not None] for part in parts]
    assert any(told in problem for problem in run_problems(plan, wrong, steady))


def in_turns(kind: type[StreamLanes]) -> tuple[list[list[Call]], Plan, int]:
    """The calls of a run whose caller is on another stream in every second step."""
    net = chain(stages(2))
    plan = pipec.compile(net, 2, 2, "pipedream", update="stage")
    callers, parts = Callers(), []
    with pipec.Runner(net, plan, backend=kind(callers, backend(2).devices), optimizer=momentum) as run:
        for number, one in enumerate(batches(plan.minibatches)):
            callers.turn = number % 2
            run.step(**one)
            parts.append(list(callers.calls))
            callers.calls.clear()
        run.flush()
        parts.append(list(callers.calls))
    return parts, plan, len(build_steps(plan).segments) - 1


def test_steps_of_two_caller_streams_come_after_one_another() -> None:
    """What the last step queued is past when the next one's copies begin, though their callers know nothing of each
    other."""
    parts, plan, steady = in_turns(StreamLanes)
    assert {call.stream for call in in_a_row(parts) if call.stream.startswith("caller")} == {
        "caller 0 cpu:0", "caller 0 cpu:1", "caller 1 cpu:0", "caller 1 cpu:1"}
    assert run_problems(plan, parts, steady) == []
    parts, plan, steady = in_turns(OnlyCallers)
    found = run_problems(plan, parts, steady)
    assert any(re.search(r"in 1 takes back v0\[\d\]:0>1 arrived, which takes over", text) for text in found)


def test_inputs_go_once_when_fed_and_stay_until_their_last_reader() -> None:
    """The target is read steps after it was fed."""
    plan, parts, _ = small()
    sent = [[call.what for call in part if call.what.startswith("input")] for part in parts]
    assert all(len(own) == 2 for own in sent[:-1])
    assert sent[-1] == []
    net = chain(stages(2))
    streams = backend(2)
    with pipec.Runner(net, plan, backend=streams, optimizer=momentum) as run:
        held = []
        for one in batches(8):
            run.step(**one)
            held.append([sum(packet is not None for column in device.inputs for packet in column)
                         for device in run._flow._devices])
    assert held[3:] == [held[3]] * 5, "inputs of finished microbatches are let go"


def test_a_trace_of_a_step_has_the_devices_times() -> None:
    net = chain(stages(2))
    plan = pipec.compile(net, 2, 1, "pipedream", update="stage")
    streams = StreamLanes(Recorder(), backend(2).devices)
    with pipec.Runner(net, plan, backend=streams, optimizer=momentum) as run:
        for one in batches(4):
            run.step(**one)
        timeline = run.trace()
    assert len(timeline.plan) == sum(map(len, build_steps(plan).segments[-1].ops))
    assert (timeline.end > timeline.start).all()
