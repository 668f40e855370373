"""Tasks by name in torch's own profiler."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest
import torch
from test_trace import runner, step

import pipec


def profiled(run: pipec.Runner, **options: Any) -> dict[str, set[int]]:
    """Names of pipec's slices in torch's profiler, with the threads they ran in."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], **options) as profiler:
        step(run)
    found = defaultdict(set)
    for event in profiler.events():
        if event.name.startswith("pipec "):
            found[event.name].add(event.thread)
    return found


def expected(plan: pipec.Plan) -> set[str]:
    graph = plan.graph
    return {f"pipec {task} {graph.stages[task.stage].name}" for d in plan.tasks for task in d}


def test_tasks_show_in_the_profiler_of_the_calling_thread() -> None:
    run, plan = runner(backend="replay")
    with run:
        step(run)
        found = profiled(run)
    assert set(found) == expected(plan)
    assert "pipec 1F0 enc1" in found


def test_tasks_of_workers_show_when_all_threads_are_profiled() -> None:
    run, plan = runner(backend="threads")
    with run:
        step(run)
        assert profiled(run) == {}  # torch records the calling thread alone unless told otherwise
        every = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
        found = profiled(run, experimental_config=every)
    assert set(found) == expected(plan)
    for device, tasks in enumerate(plan.tasks):
        threads = {t for task in tasks if task.device == device
                   for t in found[f"pipec {task} {plan.graph.stages[task.stage].name}"]}
        assert len(threads) == 1
    assert len(set().union(*found.values())) == plan.devices


def test_nothing_is_recorded_without_a_profiler(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object) -> None:
        raise AssertionError("record_function without a profiler")

    monkeypatch.setattr("pipec.runtime.record.record_function", never)
    run, _ = runner(backend="replay")
    with run:
        step(run)
        with pytest.raises(AssertionError, match="without a profiler"):
            profiled(run)
