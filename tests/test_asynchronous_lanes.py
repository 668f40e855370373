"""Asynchronous plans on lanes: the numbers of the replay, and every order that updates need is missed when gone."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch
from attrs import evolve
from declared import chain
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from models import batch, data, kept_streams, parameters, recipes, same
from mutate import edges_of, row, set_buffer, waits_of
from plans import POLICIES, ancestors, needs
from test_asynchronous_runs import SCHEDULES, adam, batches, momentum, runner, stages, state
from test_lanes import skipping
from torch import nn

import pipec
from pipec.errors import RaceError
from pipec.ir import TO_HOST, Buffer, Lane, Plan
from pipec.races import find_races
from pipec.races import told as told_of
from pipec.rules.base import READERS
from pipec.runtime.adversary import Adversarial, held_back
from pipec.runtime.asynchronous.program import build_steps
from pipec.runtime.lanes import Turn, Turns

__all__ = ["kept_streams"]
LANES = ("lanes", "adversarial")


@pytest.mark.parametrize(("name", "recompute"), [
    *((name, "never") for name in SCHEDULES), *((name, "always") for name in ("pipedream", "2bw", "pipemare")),
])
def test_lanes_give_the_numbers_of_the_replay(name: str, recompute: str) -> None:
    """Filling, steady steps, a flush, and an evaluation between; with dropout and batch norm."""
    found, given_ = [], batches(7)
    for backend in ("replay", *LANES):
        mine = stages(dropout=0.5)
        with runner(mine, SCHEDULES[name], backend=backend, recompute=recompute, optimizer=adam) as run:
            losses = [run.step(**one).microbatch_losses for one in given_[:5]] + [run.flush().microbatch_losses]
            losses += [run.step(**one).microbatch_losses for one in given_[5:]]
            losses += [run.evaluate(**given_[0]).losses, run.flush().microbatch_losses]
        found.append([losses, state(mine)])
    assert same(found[0], found[1])
    assert same(found[0], found[2])


POLICY = {"stash": "pipedream", "2bw": "pipedream-2bw", "corrected": "pipemare", "live": pipec.LiveWeights(1),
          "segments": pipec.PipeMare(segments=2)}


LINEAR, FOLDED = [0, 0, 1, 1, 2, 2], [0, 1, 2, 1, 2, 0]


@pytest.mark.parametrize(("policy", "placement"), [("stash", LINEAR), *((policy, FOLDED) for policy in POLICY)])
def test_skips_wait_in_host_memory_of_asynchronous_plans(policy: str, placement: list[int]) -> None:
    found = []
    for hold, backend in ((None, "replay"), ("host", "replay"), ("host", "threads"), *(("host", own) for own in LANES)):
        net = skipping(hold=hold)
        plan = pipec.compile(net, 3, 6, POLICY[policy], placement=placement, update="stage")
        assert bool((plan.table.gradient == TO_HOST).any()) is (hold == "host")
        with pipec.Runner(net, plan, backend=backend, seed=3, optimizer=momentum) as run:
            losses = [run.step(**data(12, step)).microbatch_losses for step in range(4)]
            found.append([losses, run.flush().microbatch_losses, parameters(net)])
    for other in found[1:]:
        assert same(found[0], other)


@given(recipes(most=4), st.sampled_from([own for own in POLICIES if own.name != "pipedream-2bw"]), st.data())
@settings(max_examples=15, suppress_health_check=[HealthCheck.too_slow])
def test_no_false_alarm_on_any_pipeline(recipe: Any, policy: Any, draw: st.DataObject) -> None:
    results = []
    devices = draw.draw(st.integers(1, 3))
    for backend in ("replay", Adversarial(draw.draw(st.integers(0, 99)))):
        net = recipe.build()
        try:
            plan = pipec.compile(net, min(devices, len(net.spec.stages)), 3, policy, update="stage")
            with pipec.Runner(net, plan, backend=backend, seed=1, optimizer=momentum) as run:
                losses = [run.step(**batch(6, step)).microbatch_losses for step in range(5)]
                results.append([losses, run.flush().microbatch_losses, parameters(net)])
        except (pipec.SpecError, pipec.ScheduleError, pipec.RunError) as error:  # a RaceError comes through
            results.append([str(error)])
    assert same(*results) if len(results[0]) > 1 else results[0] == results[1]


# -- what is missed ----------------------------------------------------------------------------------------------


def net() -> pipec.Pipeline:
    return chain(stages())


def families(plan: Plan) -> dict[tuple[str, str], list[tuple[int, int]]]:
    """The waits of a plan by what waits for what, whatever the microbatch."""
    made: dict[tuple[str, str], list[tuple[int, int]]] = {}
    for edge in edges_of(plan):
        names = [re.sub(r"(?<=[A-Z\[])\d+", "*", str(plan.table.task(task)), count=1) for task in edge]
        made.setdefault((names[0], names[1]), []).append(edge)
    return made


class Mutant(Adversarial):
    """Runs a good plan's steps without some of its waits, or with two tasks of a lane in the other order."""

    def __init__(self, held: int = -1, waits: Any = (), late: int = -1, early: int = -1) -> None:
        super().__init__(choose=held_back(held))
        self.gone, self.late, self.early = set(waits), late, early
        self._turns = self  # type: ignore[assignment]
        self._right = Turns()

    def of(self, plan: Plan, ops: Any) -> list[Turn]:
        made = [
            evolve(turn, waits=tuple(need for need in turn.waits if (turn.op.task, need) not in self.gone))
            for turn in self._right.of(plan, ops)
        ]
        place = {turn.op.task: number for number, turn in enumerate(made)}
        if self.late in place and self.early in place:
            made.insert(place[self.early], made.pop(place[self.late]))
        return made


def caught(plan: Plan, backend: Any) -> str:
    """What a few steps and a flush of the plan raise; "" if nothing."""
    own = net()
    with pipec.Runner(own, plan, backend=backend, optimizer=momentum) as run:
        try:
            for one in batches(len(build_steps(plan).segments)):
                run.step(**one)
            run.flush()
        except RaceError as error:
            return str(error)
    return ""


@pytest.mark.parametrize("policy", ["stash", "corrected", "live", "segments"])
def test_every_wait_that_is_needed_is_missed(policy: str) -> None:
    """The detector tells from the plan; with real tensors a run that holds back what is not waited for. A step begins
    when the one before has ended, so only waits inside a step or a flush can be missed there."""
    plan = pipec.compile(net(), 3, 2, POLICY[policy], update="stage")
    assert find_races(plan) == []
    steps = build_steps(plan)
    run = *steps.segments, steps.flush(len(steps.segments))
    parts = [{op.task for ops in part.ops for op in ops} for part in run]
    tried = 0
    for names, edges in families(plan).items():
        mutant = evolve(plan, waits=waits_of([e for e in edges_of(plan) if e not in edges], len(plan)))
        before = needs(mutant)
        missing = [(task, need) for task, need in edges if need not in ancestors(before, task)]
        assert bool(find_races(mutant)) is bool(missing), names
        inside = [need for task, need in missing if any({task, need} <= part for part in parts)]
        if inside:
            tried += 1
            assert any(caught(plan, Mutant(need, edges)) for need in inside), names
    assert tried > 3


def in_order(plan: Plan, late: int, early: int) -> Plan:
    """The plan where task ``late`` stands right before ``early``, which came before it on their lane."""
    device = int(plan.table.device[late])
    ids = plan.lanes[device][Lane.COMPUTE].tolist()
    ids.remove(late)
    ids.insert(ids.index(early), late)
    lanes = list(plan.lanes)
    lanes[device] = (np.asarray(ids, np.int32), *lanes[device][1:])
    return evolve(plan, lanes=tuple(lanes))


ORDERS: dict[str, tuple[Any, str, str, str, str]] = {
    "an update before the last gradient": (
        "pipedream", "0U1", "0B3", "0U1 (compute lane of device 0) steps the optimizer without the gradient that is "
        "still to be made by 0B3", "the UPDATE 1 of stage 'a' runs before all gradients it uses are there",
    ),
    "an update before a read of live weights": (
        "live-weights", "1U1", "1B3", "1U1 (compute lane of device 1) replaces weight version 1, which is still to be "
        "read by 1B3", "the UPDATE 1 of stage 'b' runs before all gradients it uses are there",
    ),
    "a read of live weights before its update": (
        pipec.LiveWeights(1), "2F3", "2U2", "2F3 (compute lane of device 2) reads weight version 3 before it is made "
        "by 2U2", "a task of stage 'c' reads weight version 3, which has not been made yet (the newest is 2)",
    ),
    "a read of live weights after the next update": (
        "live-weights", "1U0", "1F2", "1U0 (compute lane of device 1) replaces weight version 0, which is still to be "
        "read by 1F2", "the UPDATE 0 of stage 'b' runs before",
    ),
}


@pytest.mark.parametrize("name", ORDERS)
def test_the_order_around_an_update_is_missed(name: str) -> None:
    """Updates and what reads their weights are kept in order by the compute lane."""
    schedule, late, early, told, at_run_time = ORDERS[name]
    plan = pipec.compile(net(), 3, 2, schedule, update="stage")
    tasks = row(plan, late), row(plan, early)
    mutant = in_order(plan, *tasks)
    races = [told_of(mutant, race) for race in find_races(mutant)]
    assert any(told in text for text in races), races
    assert at_run_time in caught(plan, Mutant(late=tasks[0], early=tasks[1]))


@pytest.mark.parametrize("policy", ["stash", "2bw"])
def test_a_version_that_is_given_back_early_is_missed(policy: str) -> None:
    plan = pipec.compile(net(), 3, 3, POLICY[policy], update="stage")
    tried = 0
    for buffer in np.flatnonzero(plan.buffers.kind == Buffer.WEIGHT).tolist():
        last, stage, version = (int(getattr(plan.buffers, name)[buffer]) for name in ("free", "ref", "microbatch"))
        readers = [task for task in range(int(plan.buffers.writer[buffer]), last) if plan.table.stage[task] == stage
                   and plan.table.version[task] == version and plan.table.kind[task] in READERS]
        if not readers:
            continue
        mutant = set_buffer(plan, "free", buffer, readers[-1])
        races = [told_of(mutant, race) for race in find_races(mutant)]
        assert any(f"frees w{stage}[{version}] while it is still to be read by" in text for text in races), races
        if last in {op.task for part in build_steps(plan).segments for ops in part.ops for op in ops}:
            tried += 1
            told = f"reads weight version {version}, which has been replaced and given back"
            assert told in caught(mutant, Adversarial())
    assert tried


def test_a_stage_that_no_loss_depends_on_reads_its_weights_for_ever() -> None:
    modules = stages(4)
    made = pipec.Pipeline("aside")
    x, y = made.input("x"), made.input("y")
    a = made.stage("a", modules[0], x)
    b = made.stage("b", modules[1], a)
    made.output(made.stage("aside", modules[3], a))
    made.loss("loss", nn.functional.mse_loss, made.stage("c", modules[2], b), y)
    before = [p.detach().clone() for p in modules[3].parameters()]
    plan = pipec.compile(made, 3, 2, "pipedream", placement=[0, 1, 0, 2], update="stage")
    with pipec.Runner(made, plan, backend="lanes", optimizer=momentum) as run:
        finished = [item for one in batches(8) for item in run.step(**one).finished] + list(run.flush().finished)
    assert finished == [(k, m) for k in range(8) for m in range(2)]
    assert same(before, list(modules[3].parameters()))


# -- values that are parameters ------------------------------------------------------------------------------------


class Table(nn.Module):
    """Gives a view of its parameter beside what it computes; ``own``: a copy of it."""

    def __init__(self, own: bool) -> None:
        super().__init__()
        self.weight, self.own = nn.Parameter(torch.randn(4, 4) / 2), own

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.tanh(x @ self.weight), self.weight.t().clone() if self.own else self.weight.t()


class Reader(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        return self.line(x) @ table


@pytest.mark.parametrize("backend", ["replay", "threads", *LANES])
@pytest.mark.parametrize("schedule", ["pipemare", "pipedream", "live-weights"])
def test_a_value_that_is_a_parameter_is_that_of_its_forward(schedule: str, backend: str) -> None:
    """However late its reader runs, updates of the stage that gave it do not show in it."""
    found = []
    for own in (True, False):
        torch.manual_seed(5)
        made = pipec.Pipeline("table")
        x, y = made.input("x"), made.input("y")
        first = made.stage("a", Table(own), x, outputs=2)
        middle = made.stage("b", nn.Linear(4, 4), first[0])
        last = made.stage("c", Reader(), middle, pipec.skip(first[1]))
        made.output(last)
        made.output(first[1], "table")
        made.loss("loss", nn.functional.mse_loss, last, y)
        plan = pipec.compile(made, 3, 2, schedule, update="stage")
        with pipec.Runner(made, plan, backend=backend, optimizer=momentum) as run:
            results = [run.step(**one) for one in batches(5)] + [run.flush()]
            found.append([[one.microbatch_losses, list(one.outputs.values())] if one.finished else None
                          for one in results])
    assert same(*found)
    assert np.isfinite(float(found[0][-1][0]["loss"][-1]))
