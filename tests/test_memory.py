"""Live memory: what the plan frees is free, the simulator's bytes are the measured ones, nothing grows."""

from __future__ import annotations

import gc
import weakref
from collections import defaultdict

import pytest
import torch
from live_bytes import live_bytes
from torch import nn
from torch.nn import functional as F

import pipec
from pipec.runtime import gradients as gradients_module
from pipec.schedules import REGISTRY
from pipec.simulate import buffer_bytes

WIDTH, ROWS, MICROBATCHES = 32, 64, 5


class Join(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, skip: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.line(torch.cat([x, skip], 1)))


def net() -> pipec.Pipeline:
    torch.manual_seed(0)
    made = pipec.Pipeline("net")
    x, y = made.input("x"), made.input("y")
    a = made.stage("a", nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()), x)
    b = made.stage("b", nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH)), a)
    c = made.stage("c", nn.Sequential(nn.LayerNorm(WIDTH), nn.GELU()), b)
    d = made.stage("d", Join(), c, pipec.skip(b))
    e = made.stage("e", Join(), d, pipec.skip(a))
    made.loss("mse", F.mse_loss, e, y)
    return made


def batch() -> dict[str, torch.Tensor]:
    return {"x": torch.randn(ROWS * MICROBATCHES, WIDTH), "y": torch.randn(ROWS * MICROBATCHES, WIDTH)}


WHOLE = [name for name, make in REGISTRY.items() if not getattr(make(), "split", False)]  # halves: test_split_memory
CASES = [(schedule, mode, 2) for schedule in WHOLE for mode in ("never", "always", "except_last")]
CASES += [("gpipe", "never", 1), ("1f1b", "always", 3), ("1f1b", "never", 5)]


@pytest.mark.parametrize(("schedule", "recompute", "devices"), CASES)
def test_live_bytes_after_every_task_are_those_of_the_plans_buffers(
    monkeypatch: pytest.MonkeyPatch, schedule: str, recompute: str, devices: int
) -> None:
    made, data = net(), batch()
    costs = pipec.profile(made, microbatches=MICROBATCHES, repeats=1, **data)
    plan = pipec.compile(made, devices, MICROBATCHES, schedule, recompute=recompute, costs=costs)
    sizes, buffers = buffer_bytes(plan, costs), plan.buffers
    assert sizes is not None
    monkeypatch.setattr(gradients_module, "LARGE", 0)  # as for large stages, whose gradients autograd adds up
    seen = live_bytes(monkeypatch, made, plan, data)
    weights = {stage.name: costs.weight_bytes(stage.name) for stage in plan.graph.stages}
    backwards: set[int] = set()
    peak_got, peak_expected = defaultdict(float), defaultdict(float)
    for task, device, got in seen:
        row = plan.table.task(task)
        if row.kind is pipec.Kind.BACKWARD:
            backwards.add(row.stage)
        alive = (buffers.writer <= task) & (buffers.free > task) & (buffers.device == device)
        expected = float(sizes[alive].sum())
        expected += sum(weights[plan.graph.stages[s].name] or 0 for s in backwards if plan.stage_device(s) == device)
        assert got == pytest.approx(expected, rel=0.02, abs=600), (str(row), device)  # abs: losses and seeds, scalars
        peak_got[device], peak_expected[device] = max(peak_got[device], got), max(peak_expected[device], expected)
    assert peak_expected[0] > 20_000
    for device in range(devices):
        assert peak_got[device] == pytest.approx(peak_expected[device], rel=0.02)


def live_tensors() -> int:
    return sum(1 for item in gc.get_objects() if issubclass(type(item), torch.Tensor))


@pytest.mark.parametrize("backend", ["threads", "replay"])
def test_nothing_grows_over_a_thousand_steps_without_the_garbage_collector(backend: str) -> None:
    made = pipec.Pipeline("tiny")
    x, y = made.input("x"), made.input("y")
    first = made.stage("first", nn.Linear(4, 4), x)
    second = made.stage("second", nn.Tanh(), first)
    made.output(second)
    made.loss("mse", F.mse_loss, made.stage("third", lambda a, b: a + b, second, pipec.skip(first)), y)
    plan = pipec.compile(made, 3, 2, recompute="except_last", update="stage")
    data = {"x": torch.randn(4, 4), "y": torch.randn(4, 4)}
    run = pipec.Runner(made, plan, optimizer=lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), backend=backend)
    counts = []
    gc.collect()
    gc.disable()
    try:
        for number in range(1000):
            result = run.step(**data)
            if number in (9, 99, 999):
                counts.append(live_tensors())
    finally:
        gc.enable()
        run.close()
    assert counts[0] == counts[1] == counts[2]
    assert not result.output.requires_grad
    assert result.loss.grad_fn is None


def test_results_of_all_steps_can_be_kept_without_keeping_any_graph() -> None:
    made, data = net(), batch()
    with pipec.Runner(made, pipec.compile(made, 2, MICROBATCHES)) as run:
        kept = [run.step(**data) for _ in range(2)]
        gc.collect()
        before = live_tensors()
        kept += [run.step(**data) for _ in range(5)]
        gc.collect()
        assert live_tensors() - before == 5  # the loss of each step


def test_a_value_dies_once_its_last_reader_has_ended() -> None:
    """The producer's own handle on what it gave away, seen by the next device's later tasks."""
    alive: list[int] = []
    references: list[weakref.ref[torch.Tensor]] = []

    class Give(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out = x * 2
            references.append(weakref.ref(out.untyped_storage()))  # type: ignore[arg-type]
            return out

    class Take(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.line = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            alive.append(sum(r() is not None for r in references))
            return self.line(x)

    made = pipec.Pipeline("pair")
    x, y = made.input("x"), made.input("y")
    made.loss("mse", F.mse_loss, made.stage("take", Take(), made.stage("give", Give(), x)), y)
    data = {"x": torch.randn(6, 4, requires_grad=True), "y": torch.randn(6, 4)}
    with pipec.Runner(made, pipec.compile(made, 2, 6, "1f1b"), backend="replay") as run:
        run.step(**data)
    # one in use, and at most the next one that the first device has already made
    assert max(alive) <= 2
    assert sum(r() is not None for r in references) == 0
