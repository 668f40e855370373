"""What is alive between the two halves of a backward."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import attrs
import models
import numpy as np
import pytest
import torch
from halves import halves, three
from live_bytes import live_bytes
from models import kept_streams, same
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.nn import functional as F

import pipec
from pipec.runtime import alone as alone_module
from pipec.runtime.borders import anchored
from pipec.runtime.executor import Device
from pipec.runtime.split import input_half
from pipec.runtime.stages import bind
from pipec.simulate import buffer_bytes, later_bytes

__all__ = ["kept_streams"]


class Marked(nn.Module):
    """Keeps weak references to the storages that its graph saves."""

    def __init__(self) -> None:
        super().__init__()
        self.line, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
        self.seen: list[dict[str, Any]] = []

    def forward(self, x: Tensor) -> Any:
        first = x.exp()
        into = first.sin()  # saves first; is saved by the product
        tanh = self.line(into).tanh()
        made = self.last(tanh.cos())
        values = {"read": x, "first": first, "into": into, "tanh": tanh, "made": made}
        self.seen.append({name: weakref.ref(value.untyped_storage()) for name, value in values.items()})
        return made.sigmoid().clone()


def watched(monkeypatch: pytest.MonkeyPatch, look: Any) -> None:
    """Call ``look(op)`` after every task."""

    class Watched(Device):
        def run(self, ops: Any) -> None:
            for op in ops:
                super().run([op])
                look(op)

    monkeypatch.setattr(alone_module, "Device", Watched)


@pytest.mark.parametrize("recompute", ["never", "always"])
def test_what_only_the_input_half_reads_is_gone_after_it(monkeypatch: pytest.MonkeyPatch, recompute: str) -> None:
    module = Marked()
    net = models.of_modules(nn.Linear(8, 8), module, nn.Linear(8, 8))
    checked = {"I": 0, "W": 0}

    def look(op: Any) -> None:
        if op.stage != 1 or op.kind.letter not in checked:
            return
        number = op.microbatch if recompute == "never" else -1  # the last forward is this microbatch's RECOMPUTE
        alive = {name for name, ref in module.seen[number].items() if ref() is not None}
        if op.kind.letter == "I":
            assert alive == {"into"}, op.microbatch
        else:
            assert not alive, op.microbatch
        checked[op.kind.letter] += 1

    watched(monkeypatch, look)

    def policy(problem: Any) -> Any:
        forwards, inputs = [(0, 0, m) for m in range(3)], [(3, 0, m) for m in range(3)]
        if recompute == "always":  # one graph at a time
            return [forwards + [half for m in range(3) for half in (inputs[m], (4, 0, m))]]
        return [forwards + inputs + [(4, 0, m) for m in (2, 0, 1)]]

    gc.collect()
    gc.disable()
    try:
        with models.runner(net, 1, 3, policy, recompute=recompute, backend="replay") as run:
            run.step(**models.data(6))
    finally:
        gc.enable()
    assert checked == {"I": 3, "W": 3}


def test_a_tensor_that_a_product_reads_lives_until_the_weight_half_and_no_longer() -> None:
    """The halves by themselves, where only the product's own operands are left between them."""
    line, value = nn.Linear(8, 8), torch.randn(4, 8, requires_grad=True)
    stage = bind(models.of_modules(line).spec)[0]
    x = anchored(value, torch.zeros((), requires_grad=True))
    made = line(x)
    root, seed = get_gradient_edge(made), torch.ones(4, 8)
    left = [weakref.ref(t.untyped_storage()) for t in (value, seed)]
    found, weights = input_half(stage, [root], [seed], [x], list(line.parameters()))
    torch.testing.assert_close(found[0], torch.ones(4, 8) @ line.weight)
    del x, made, root, value, seed
    assert [ref() is not None for ref in left] == [True, True]
    assert same(weights.run()[1], torch.full((8,), 4.0))
    assert [ref() is not None for ref in left] == [False, False]


@pytest.mark.parametrize("backend", ["threads", "replay"])
@pytest.mark.parametrize("kind", ["attention", "checkpointed", "reuse tdt", "custom"])
def test_nothing_grows_over_steps_without_the_garbage_collector(kind: str, backend: str) -> None:
    net, counts = three(kind), []
    with models.runner(net, 2, 4, halves(delay=3), backend=backend) as run:
        for number in range(12):
            run.step(**models.data(8))
            if number in (3, 11):
                gc.collect()
                gc.disable() if number == 3 else gc.enable()
                counts.append(sum(1 for item in gc.get_objects() if issubclass(type(item), Tensor)))
    assert counts[0] == counts[1]


class Steps(nn.Module):
    """Saves results of exp and tanh for the input half and what three joins read; what it gives it does not save."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(32, 32), nn.LayerNorm(32), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Any:
        return self.last(self.norm(self.first(x.exp().sin().exp().sin()).tanh().cos()).tanh().cos())


@pytest.mark.parametrize("recompute", ["never", "always"])
@pytest.mark.parametrize("delay", [0, 4])
def test_live_bytes_between_the_halves_are_those_of_the_simulator(
    monkeypatch: pytest.MonkeyPatch, delay: int, recompute: str
) -> None:
    torch.manual_seed(0)
    net = pipec.Pipeline("steps")  # without an output, which a step would keep
    value, y = net.input("x"), net.input("y")
    for name in "abc":
        value = net.stage(name, Steps(), value)
    net.loss("mse", F.mse_loss, value, y)
    data = {"x": torch.randn(5 * 64, 32), "y": torch.randn(5 * 64, 32)}
    costs = pipec.profile(net, microbatches=5, repeats=1, **data)
    own = costs.stages["b"]
    unit = 64 * 32 * 4
    # exp and tanh, each twice, the operands of two products and a norm, two numbers per row; then, of the three, the
    # operands and the gradients that arrived
    assert own.activation_bytes == 7 * unit + 2 * 64 * 4
    assert own.weight_activation_bytes == 6 * unit + 2 * 64 * 4
    plan = pipec.compile(net, 3, 5, halves("1f1b", delay=delay), recompute=recompute, costs=costs)
    sizes = buffer_bytes(plan, costs)
    assert sizes is not None
    half, later = later_bytes(plan, costs, sizes)
    seen = live_bytes(monkeypatch, net, plan, data)
    begun: set[int] = set()
    for task, device, got in seen:
        row = plan.table.task(task)
        if row.kind is pipec.Kind.BACKWARD_WEIGHT:
            begun.add(row.stage)
        alive = (plan.buffers.writer <= task) & (plan.buffers.free > task) & (plan.buffers.device == device)
        expected = float(np.where((half >= 0) & (half <= task), later, sizes)[alive].sum())
        expected += sum(costs.weight_bytes("abc"[s]) or 0 for s in begun if plan.stage_device(s) == device)
        assert got == pytest.approx(expected, rel=0.02, abs=600), (str(row), device)
    peaks = plan.simulate().peak_bytes
    assert peaks is not None
    without = plan.simulate(attrs.evolve(costs, stages={
        name: attrs.evolve(own, weight_activation_bytes=None) for name, own in costs.stages.items()
    })).peak_bytes
    assert without is not None
    if delay:  # with W right after I, what the seeds of the first stage add shows more
        assert sum(peaks) < sum(without)
