"""Corrected weights that are kept from update to update: the same numbers, one more copy of the weights."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import pipec
from pipec.footprint import weight_memory
from pipec.rules import Corrected, find_rule


def net() -> pipec.Pipeline:
    torch.manual_seed(0)
    made = pipec.Pipeline("net")
    value, target = made.input("x"), made.input("y")
    for name, module in {"a": nn.Linear(4, 6), "b": nn.LayerNorm(6), "c": nn.Linear(6, 2)}.items():
        value = made.stage(name, module, value)
    made.loss("loss", functional.mse_loss, value, target)
    return made


def plan_of(spec: pipec.Pipeline, keep: bool, segments: int | None) -> pipec.Plan:
    policy = pipec.PipeMare(segments=segments, keep_corrected=keep)
    return pipec.compile(spec, 3, 2, policy, update="stage")


def trained(keep: bool, segments: int | None, backend: str) -> dict[str, Tensor]:
    spec = net()
    with pipec.Runner(spec, plan_of(spec, keep, segments), backend=backend,
                      optimizer=lambda own: torch.optim.SGD(own, lr=0.05, momentum=0.9)) as run:
        torch.manual_seed(1)
        for step in range(6):
            if step == 4:
                run.flush()
            run.step(torch.randn(4, 4), torch.randn(4, 2))
        run.flush()
        return {name: value.clone() for name, value in run.state_dict().items()}


@pytest.mark.parametrize("segments", [None, 3])
@pytest.mark.parametrize("backend", ["replay", "threads"])
def test_numbers_are_the_same(segments: int | None, backend: str) -> None:
    made, kept = trained(False, segments, "replay"), trained(True, segments, backend)
    assert all(torch.equal(made[name], kept[name]) for name in made)


def test_the_memory_model_counts_the_copy() -> None:
    spec = net()
    costs = pipec.Costs(stages={name: {"weight_bytes": 100} for name in "abc"})
    for keep, size in ((False, 100), (True, 200)):
        memory = weight_memory(plan_of(spec, keep, None), costs)
        assert memory is not None
        assert [device.rule for device in memory] == [size] * 3


def test_the_plan_says_so() -> None:
    assert find_rule("corrected decay=0.135 kept") == Corrected(kept=True)
    assert plan_of(net(), True, None).weights == "corrected decay=0.135 kept"
    assert plan_of(net(), False, None).weights == "corrected decay=0.135"
