"""Profiles: what they measure, and that they leave everything as it was."""

from __future__ import annotations

import time

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import pipec
from pipec.runtime.split import Weights


class Slow(nn.Module):
    """Takes ``seconds`` in its forward and twice that in its backward."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.line = nn.Linear(4, 4)
        self.seconds = seconds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(self.seconds)
        out = torch.tanh(self.line(x))
        out.register_hook(lambda _: time.sleep(2 * self.seconds))
        return out


def net() -> pipec.Pipeline:
    torch.manual_seed(0)
    made = pipec.Pipeline("net")
    x, y = made.input("x"), made.input("y")
    a = made.stage("a", Slow(0.002), x)
    b = made.stage("b", nn.Sequential(nn.BatchNorm1d(4), Slow(0.006), nn.Dropout(0.5)), a)
    c = made.stage("c", lambda v: {"h": v, "ids": (v > 0).sum(1), "n": 3}, b)
    made.loss("mse", F.mse_loss, made.stage("d", lambda v: v["h"] * v["n"], c), y)
    return made


def batch() -> dict[str, torch.Tensor]:
    return {"x": torch.randn(8, 4), "y": torch.randn(8, 4)}


def test_times_are_those_of_the_stages_and_sizes_those_of_one_microbatch() -> None:
    costs = pipec.profile(net(), microbatches=2, repeats=2, **batch())
    a, b = costs.stages["a"], costs.stages["b"]
    assert costs.unit == "ms"
    assert a.forward is not None
    assert b.forward is not None
    assert a.forward >= 2
    assert b.forward >= 6
    assert a.backward_input is not None
    assert a.backward_weight is not None
    assert a.backward is not None
    assert a.backward >= 4
    assert a.backward_weight >= 4
    assert a.backward_input < 1  # its input is data: all of the backward is for the parameters
    assert costs.values["a"] == 4 * 4 * 4
    assert costs.values["c"] == 4 * 4 * 4 + 4 * 8
    assert costs.gradients["c"] == 4 * 4 * 4  # integers have none
    assert costs.saved_values["a"] == 4 * 4 * 4  # tanh saves what it gives
    assert a.weight_bytes == 4 * 20


def test_the_halves_of_a_backward_are_measured_and_not_taken_from_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Weights.run

    def slow(weights: Weights) -> list[torch.Tensor | None]:
        time.sleep(0.05)
        return run(weights)

    monkeypatch.setattr(Weights, "run", slow)
    b = pipec.profile(net(), repeats=1, **batch()).stages["b"]
    assert b.backward is not None
    assert b.backward_input is not None
    assert b.backward_weight is not None
    assert b.backward_weight >= 50
    assert b.backward_input >= 12  # the hook of Slow: on the way to what the stage read
    assert 12 <= b.backward < b.backward_input + b.backward_weight


def test_a_backward_that_cannot_be_split_is_all_input_half(caplog: pytest.LogCaptureFixture) -> None:
    made = pipec.Pipeline("net")
    first = made.stage("first", nn.Linear(4, 4), made.input("x"))
    layer = nn.Linear(4, 4)
    layer.weight.register_hook(lambda gradient: time.sleep(0.02) or gradient)
    layer.bias.register_hook(lambda gradient: gradient)
    made.loss("mse", F.mse_loss, made.stage("second", layer, first), made.input("y"))
    second = pipec.profile(made, repeats=1, **batch()).stages["second"]
    assert second.backward_input is not None
    assert second.backward_weight is not None
    assert second.backward_input >= 20 > second.backward_weight
    assert not caplog.records  # a plan may not split it


def test_a_profile_changes_nothing() -> None:
    made = net()
    modules = [stage.fn for stage in made.spec.stages if isinstance(stage.fn, nn.Module)]
    for module in modules:
        for parameter in module.parameters():
            parameter.grad = torch.ones_like(parameter)
    before = [{k: v.clone() for k, v in module.state_dict().items()} for module in modules]
    data = batch()
    random = torch.get_rng_state()
    pipec.profile(made, repeats=1, **data)
    assert torch.equal(random, torch.get_rng_state())
    for module, state in zip(modules, before, strict=True):
        assert all(torch.equal(v, state[k]) for k, v in module.state_dict().items())
        assert all(torch.equal(p.grad, torch.ones_like(p)) for p in module.parameters() if p.grad is not None)


def test_placeholders_cannot_be_profiled() -> None:
    with pytest.raises(pipec.RunError, match="stages without a module cannot be profiled: s0, s1"):
        pipec.profile(pipec.chain(2), x=torch.randn(2, 2))


def test_profiled_costs_balance_the_placement() -> None:
    made = net()
    costs = pipec.profile(made, microbatches=2, repeats=2, **batch())
    plan = pipec.compile(made, 2, 2, costs=costs)
    assert plan.chunks[0].stages == (0,)
    assert plan.simulate().makespan >= 4 * 6
