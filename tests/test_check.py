"""Check: agreement is told, and a difference is named where it first shows."""

from __future__ import annotations

import re
import threading
from typing import Any

import pytest
import torch
from models import data, gradients, of_modules
from torch import nn
from torch.nn import functional as F

import pipec


class Impure(nn.Module):
    """Gives another result on worker threads: what a stage with hidden state looks like from outside."""

    def __init__(self, when: int) -> None:
        super().__init__()
        self.line, self.when, self.calls = nn.Linear(4, 4), when, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.line(x)
        if threading.current_thread() is not threading.main_thread():
            self.calls += 1
            if self.calls == self.when:
                out = out + 1
        return out


def net(second: nn.Module) -> pipec.Pipeline:
    made = pipec.Pipeline("net")
    x, y = made.input("x"), made.input("y")
    value = made.stage("second", second, made.stage("first", nn.Linear(4, 4), x))
    made.output(value)
    made.loss("mse", F.mse_loss, made.stage("third", nn.Linear(4, 4), value), y)
    return made


def batch() -> dict[str, torch.Tensor]:
    return {"x": torch.randn(6, 4), "y": torch.randn(6, 4)}


def test_agreement_counts_what_was_compared_and_leaves_everything_as_it_was() -> None:
    made = net(nn.Sequential(nn.BatchNorm1d(4), nn.Dropout(0.5)))
    modules = [stage.fn for stage in made.spec.stages]
    before = [{k: v.clone() for k, v in m.state_dict().items()} for m in modules]  # type: ignore[union-attr]
    report = pipec.check(made, batch(), devices=3, microbatches=2, recompute="always")
    assert report
    told = f"bit-equal to the reference in {report.compared} tensors"
    assert str(report) == f"net: 1f1b, 3 devices, 2 microbatches: {told}"
    assert report.compared > 20
    for module, state in zip(modules, before, strict=True):
        assert all(torch.equal(v, state[k]) for k, v in module.state_dict().items())  # type: ignore[union-attr]
        assert all(p.grad is None for p in module.parameters())  # type: ignore[union-attr]


def test_the_first_difference_is_named_with_stage_microbatch_and_task() -> None:
    report = pipec.check(net(Impure(when=2)), batch(), devices=2, microbatches=3, backend="threads")
    assert not report
    lines = str(report).splitlines()
    assert lines[0].startswith("net: 1f1b, 2 devices, 3 microbatches: ")
    assert lines[1].startswith("  stage 'second', microbatch 1, FORWARD (1F1): shape (2, 4) differs by up to 1")
    assert not any("microbatch 0" in line or "'first', microbatch 1, FORWARD" in line for line in lines)
    assert any("output 'second'" in d.where for d in report.differences)


def test_a_batch_without_names() -> None:
    with pytest.raises(pipec.RunError, match=r"a mapping by input name, \{'x': ..., 'y': ...\}; got tuple"):
        pipec.check(net(nn.Linear(4, 4)), tuple(batch().values()), devices=2)  # type: ignore[arg-type]


def test_a_given_plan_is_checked() -> None:
    made = net(nn.Tanh())
    plan = pipec.compile(made, 2, 3, "gpipe")
    assert pipec.check(made, batch(), plan)


def test_stages_that_carry_their_devices_are_checked_on_these() -> None:
    made = pipec.Pipeline("placed")
    x, y = made.input("x"), made.input("y")
    hidden = made.stage("a", nn.Linear(4, 4), x, device=1)
    made.loss("loss", nn.functional.mse_loss, made.stage("b", nn.Linear(4, 4), hidden, device=0), y)
    report = pipec.check(made, {"x": torch.randn(4, 4), "y": torch.randn(4, 4)})
    assert report
    assert "2 devices" in str(report)


def test_a_check_without_options_has_borders_and_several_microbatches() -> None:
    made = net(nn.Tanh())
    assert str(pipec.check(made, batch())).startswith("net: 1f1b, 2 devices, 4 microbatches: bit-equal")
    assert "2 devices, 2 microbatches" in str(pipec.check(made, batch(), microbatches=2))
    text = pipec.parse_schedule("0F0 0F1 0B0 0B1")
    assert "1 devices" in str(pipec.check(made, batch(), schedule=text, devices=1, microbatches=2))
    alone = pipec.Pipeline("alone")
    x, y = alone.input("x"), alone.input("y")
    alone.loss("loss", nn.functional.mse_loss, alone.stage("a", nn.Linear(4, 4), x), y)
    assert "1 devices, 4 microbatches" in str(pipec.check(alone, batch()))


class Third(nn.Module):
    """Gives another result in its third call."""

    def __init__(self) -> None:
        super().__init__()
        self.line, self.calls = nn.Linear(8, 8), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.line(x) + (self.calls == 3)


def over_ranks(rank: int) -> list[str]:
    """Each rank compares its own stages, and leaves everything as it was."""
    told = []
    for make in (lambda: nn.Linear(8, 8), Third):
        for schedule in ("1f1b", "zb-h1"):
            pipeline = of_modules(nn.Linear(8, 8), nn.Linear(8, 8), make(), nn.Linear(8, 8))
            told.append(str(pipec.check(pipeline, data(), pipec.compile(pipeline, 2, 4, schedule))))
            assert all(g is None for g in gradients(pipeline))
    with pytest.raises(pipec.RunError) as error:
        pipec.check(pipeline, data(), pipec.compile(pipeline, 1, 4, data_parallel=2))
    return [*told, str(error.value)]


def test_each_rank_checks_its_own_stages(crew2: Any) -> None:
    first, second = crew2(over_ranks)
    for text in (*first[:2], *second[:2]):
        assert re.fullmatch(r"net: \S+, 2 devices, 4 microbatches, the stages of this rank: bit-equal to the reference "
                            r"in \d+ tensors", text)
    for text in second[2:4]:
        assert text.splitlines()[1].startswith("  stage 'c', microbatch 2, FORWARD (2F2): shape")
    assert "the plan has data_parallel=2 replicas, each with data of its own" in first[-1]
