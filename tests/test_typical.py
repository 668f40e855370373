"""What the backend that chooses between one thread and several takes for the time of a task."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import pipec
from pipec.runtime.backends import typical


def stepped() -> tuple[pipec.Runner, Any]:
    """A runner after its first step, of two stages and five microbatches, and that step."""
    torch.manual_seed(0)
    net = pipec.Pipeline("two")
    x, y = net.input("x"), net.input("y")
    net.loss("mse", F.mse_loss, net.stage("b", nn.Linear(4, 4), net.stage("a", nn.Linear(4, 4), x)), y)
    run = pipec.Runner(net, pipec.compile(net, 2, 5))
    run.step(torch.randn(10, 4), torch.randn(10, 4))
    assert run._last is not None
    return run, run._last[1]


@pytest.mark.parametrize(("took", "threads"), [
    (lambda stage, m: 10_000, False),
    (lambda stage, m: 50_000_000 if m == 0 else 10_000, False),  # the machine held one microbatch up
    (lambda stage, m: 10_000 if m == 0 else 50_000_000, True),
    (lambda stage, m: 500_000 if stage else 10_000, True),  # one long stage is worth it
    (lambda stage, m: 0 if m < 2 else 210_000, True),  # a mean of little more than half of what pays
])
def test_one_microbatch_that_was_held_up_changes_nothing(took: Callable[[int, int], int], threads: bool) -> None:
    run, step = stepped()
    with run:
        backend: Any = run._backend
        for task in range(len(step.plan.table)):
            row = step.plan.table.task(task)
            step.starts[task], step.ends[task] = 1_000, 1_000 + took(row.stage, row.microbatch)
        backend._decide(step)
        assert backend._overlap[True] is threads


def test_tasks_that_did_not_run_do_not_count() -> None:
    run, step = stepped()
    with run:
        step.starts, step.ends = [0] * len(step.starts), [0] * len(step.ends)
        assert typical(step) == 0.0
        step.starts[0], step.ends[0] = 5, 12
        assert typical(step) == 7.0
