"""Real tensors in hostile orders: the numbers of the plain loop on good plans, an error that says why on bad ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from models import RUNS, WIDTH, batch, data, gradients, kept_streams, options, recipes, same
from mutate import edges_of, row, set_buffer, without_wait
from plans import ancestors, needs
from test_lanes import Join, skipping
from torch import nn
from torch.nn import functional as F

import pipec
from pipec.errors import RaceError
from pipec.ir import Plan
from pipec.races import find_races
from pipec.runtime.adversary import Adversarial, held_back

__all__ = ["kept_streams"]


@pytest.mark.parametrize("recompute", ["never", "always"])
@pytest.mark.parametrize("schedule", RUNS)
def test_hostile_orders_of_good_plans_give_the_numbers_of_the_plain_loop(schedule: str, recompute: str) -> None:
    mine, theirs = skipping(), skipping()
    loop = pipec.reference(theirs, 3, seed=3)
    plan = pipec.compile(mine, 3, 3, schedule, recompute=recompute)
    with pipec.Runner(mine, plan, backend="adversarial", seed=3) as run:
        for step in range(4):
            got, expected = run.step(**data(6, step)), loop.step(**data(6, step))
            assert same([got.losses, got.outputs], [expected.losses, expected.outputs])
        assert same(gradients(mine), gradients(theirs))
        run.evaluate(**data(6))


@given(recipes(most=4), st.data())
@settings(max_examples=25)
def test_no_false_alarm_on_any_pipeline(recipe: Any, draw: st.DataObject) -> None:
    how = draw.draw(options(recipe))
    mine, theirs = recipe.build(), recipe.build()
    how |= {"update": None}
    plan = pipec.compile(mine, **how)
    with pipec.Runner(mine, plan, backend=Adversarial(draw.draw(st.integers(0, 99)))) as run:
        for step in range(2):
            got = run.step(**batch(6, step))
            expected = pipec.reference(theirs, plan.microbatches).step(**batch(6, step))
            assert same([got.losses, got.outputs], [expected.losses, expected.outputs])
    assert same(gradients(mine), gradients(theirs))


def net() -> pipec.Pipeline:
    """A skip that is read on two devices, its home among them."""
    torch.manual_seed(2)
    made = pipec.Pipeline("net")
    x, y = made.input("x"), made.input("y")
    a = made.stage("a", nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()), x)
    b = made.stage("b", nn.Linear(WIDTH, WIDTH), a)
    c = made.stage("c", Join(), b, pipec.skip(a))
    d = made.stage("d", Join(), c, pipec.skip(a))
    made.output(d)
    made.loss("mse", F.mse_loss, d, y)
    return made


def is_caught(plan: Plan, task: int) -> bool:
    """Whether a run of the mutant with ``task`` held back raises."""
    with pipec.Runner(net(), plan, backend=Adversarial(choose=held_back(task))) as run:
        try:
            run.step(**data(4))
        except RaceError:
            return True
    return False


@pytest.mark.parametrize("schedule", RUNS)
def test_every_wait_that_is_needed_is_missed_at_run_time(schedule: str) -> None:
    """For each wait its task is run as early as the mutant allows: what it should have waited for is held back."""
    plan = pipec.compile(net(), 2, 2, schedule)
    tried = 0
    for task, need in edges_of(plan):
        mutant = without_wait(plan, task, need)
        if need in ancestors(needs(mutant), task):
            continue
        tried += 1
        assert is_caught(mutant, need), f"{plan.table.task(task)} without {plan.table.task(need)}"
    assert tried


def test_seeds_find_a_missing_wait_within_a_few_steps() -> None:
    plan = pipec.compile(net(), 2, 2, "1f1b")
    for task, need in edges_of(plan):
        mutant = without_wait(plan, task, need)
        if need in ancestors(needs(mutant), task):
            continue
        with pipec.Runner(net(), mutant, backend="adversarial") as run, pytest.raises(RaceError):
            steps(run, 200)


def steps(run: pipec.Runner, count: int) -> None:
    for _ in range(count):
        run.step(**data(4))


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_early_frees_are_caught_at_run_time(schedule: str) -> None:
    plan = pipec.compile(net(), 2, 2, schedule)
    tried = 0
    for buffer in range(len(plan.buffers)):
        writer, free = int(plan.buffers.writer[buffer]), int(plan.buffers.free[buffer])
        if plan.buffers.kind[buffer] == 0 or plan.table.device[writer] != plan.buffers.device[buffer]:
            continue  # what autograd saved is not the plan's to free early, nor can a sender free at the receiver
        mutant = set_buffer(plan, "free", buffer, writer)
        if free == writer or not find_races(mutant):
            continue
        tried += 1
        assert is_caught(mutant, -1), plan.buffers.token(buffer)
    assert tried > 4


def test_a_race_names_the_task_its_lane_and_what_it_should_have_waited_for() -> None:
    plan = pipec.compile(net(), 2, 2, "gpipe")
    copy = row(plan, "v0[1]:0>1")
    mutant = without_wait(plan, copy, next(need for task, need in edges_of(plan) if task == copy))
    with pipec.Runner(net(), mutant, backend=Adversarial(choose=held_back(row(plan, "0F1")))) as run:
        with pytest.raises(RaceError) as caught:
            run.step(**data(4))
        assert "reads v0[" in str(caught.value)
        assert "(copy-out lane of device 0)" in str(caught.value)
        assert "before it was written by 0F" in str(caught.value)
    with pytest.raises(pipec.RunError, match="unknown backend 'hostile'; known are auto, threads"):
        pipec.Runner(net(), plan, backend="hostile")
