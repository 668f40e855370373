"""Threads where they pay: the default backend looks at how long tasks take."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import pipec
from pipec.runtime import backends


class Observe(nn.Module):
    """Notes the threads that run it and takes ``seconds``."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.line, self.seconds, self.seen = nn.Linear(4, 4), seconds, set[str]()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.add(threading.current_thread().name)
        time.sleep(self.seconds)
        return self.line(x)


def run_of(seconds: float, backend: str | None = None) -> tuple[list[Observe], pipec.Runner]:
    stages = [Observe(seconds), Observe(seconds)]
    net = pipec.Pipeline("net")
    x, y = net.input("x"), net.input("y")
    net.loss("mse", F.mse_loss, net.stage("b", stages[1], net.stage("a", stages[0], x)), y)
    return stages, pipec.Runner(net, pipec.compile(net, 2, 2), backend=backend)


def threads_of(stages: list[Observe], run: pipec.Runner) -> set[str]:
    for stage in stages:
        stage.seen.clear()
    run.step(x=torch.randn(4, 4), y=torch.randn(4, 4))
    return stages[0].seen | stages[1].seen


def test_long_tasks_get_a_thread_per_device_after_the_first_step() -> None:
    stages, run = run_of(0.002)
    with run:
        assert threads_of(stages, run) == {threading.current_thread().name}
        assert len(threads_of(stages, run)) == 2
        assert len(threads_of(stages, run)) == 2


def test_short_tasks_stay_in_one_thread_and_start_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "PAYS_FROM", 10**10)  # short on however busy a machine
    stages, run = run_of(0.0)
    before = threading.active_count()
    with run:
        for _ in range(5):
            assert threads_of(stages, run) == {threading.current_thread().name}
    assert threading.active_count() == before


def test_a_change_of_duration_is_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    stages, run = run_of(0.002)
    with run:
        threads_of(stages, run)
        assert len(threads_of(stages, run)) == 2
        monkeypatch.setattr(backends, "PAYS_FROM", 10**10)
        threads_of(stages, run)
        assert threads_of(stages, run) == {threading.current_thread().name}


def test_both_can_be_asked_for() -> None:
    stages, run = run_of(0.0, "threads")
    with run:
        assert len(threads_of(stages, run)) == 2
    stages, run = run_of(0.002, "replay")
    with run:
        threads_of(stages, run)
        assert len(threads_of(stages, run)) == 1
