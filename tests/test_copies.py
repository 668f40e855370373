"""Pickle and copy: plans, pipelines, results and references can be; a runner says what to do instead."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import models
import pytest
import torch
from models import WIDTH, data, kept_streams, runner, same
from torch import nn

import pipec

__all__ = ["kept_streams"]


def by_hand(problem: Any) -> Any:
    return [
        [(0, c, m) for m in range(problem.microbatches) for c in problem.on(d)]
        + [(2, c, m) for m in range(problem.microbatches) for c in reversed(problem.on(d))]
        for d in range(problem.devices)
    ]


@pytest.mark.parametrize("how", [copy.copy, copy.deepcopy, pickle.dumps])
@pytest.mark.parametrize("backend", ["threads", "replay", None])
def test_a_runner_is_not_copied(how: Any, backend: str | None) -> None:
    net = models.chain(2)
    with pipec.Runner(net, pipec.compile(net, 2, 2), backend=backend) as run:
        run.step(**data())
        with pytest.raises(pipec.RunError, match=r"a Runner cannot be copied or pickled.*make a new Runner"):
            how(run)
        run.step(**data())


@pytest.mark.parametrize("schedule", ["1f1b", by_hand, lambda problem: by_hand(problem)])
def test_a_plan_of_any_schedule_is_pickled(schedule: Any) -> None:
    net = models.chain(2)
    plan = pipec.compile(net, 2, 4, schedule)
    again = pickle.loads(pickle.dumps(plan))
    assert again == plan
    assert copy.deepcopy(plan) is plan
    assert copy.copy(plan) is plan
    assert str(again) == str(plan)
    with pipec.Runner(net, again) as run:
        run.step(**data())


def test_a_pickled_plan_compiles_for_fewer_rows_where_its_schedule_came_along() -> None:
    net = models.chain(2)
    for schedule in ("1f1b", by_hand):
        again = pickle.loads(pickle.dumps(pipec.compile(net, 2, 4, schedule)))
        with pipec.Runner(net, again) as run:
            assert run.step(**data(3)).microbatches == 3
    lost = pickle.loads(pickle.dumps(pipec.compile(net, 2, 4, lambda problem: by_hand(problem))))
    with pipec.Runner(net, lost) as run, pytest.raises(pipec.ScheduleError, match="schedule"):
        run.step(**data(3))


def test_pipelines_results_and_timelines_are_copied() -> None:
    net = models.chain(2)
    for again in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        with runner(net) as first, runner(again) as second:
            mine, theirs = first.step(**data()), second.step(**data())
        assert torch.equal(mine.loss, theirs.loss)
        assert same(pickle.loads(pickle.dumps(mine)).outputs, mine.outputs)
    timeline = pipec.compile(net, 2, 4).simulate()
    assert pickle.loads(pickle.dumps(timeline)).makespan == timeline.makespan


def test_a_copied_reference_draws_from_streams_of_its_own() -> None:
    """Also after the original is gone, and with it the streams that it held."""
    net = models.of_modules(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5))
    loop = pipec.reference(net, 4, seed=3)
    again, read = copy.deepcopy(loop), pickle.loads(pickle.dumps(loop))
    expected = loop.step(**data()).outputs
    del loop
    before = torch.get_rng_state()
    assert same(again.step(**data()).outputs, expected)
    assert same(read.step(**data()).outputs, expected)
    assert torch.equal(torch.get_rng_state(), before)
