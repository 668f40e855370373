"""A U-Net in a V: both ends of every skip on one device, so no skip is copied; and what it holds instead."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from models import gradients, kept_streams, same
from torch import Tensor, nn

import pipec
from pipec.ir import Buffer, Kind, Plan

__all__ = ["kept_streams"]


class Level(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Conv1d(2, 2, 3, padding=1)

    def forward(self, x: Tensor, kept: Tensor | None = None) -> Tensor:
        return self.net(x if kept is None else x + kept).tanh()


def unet(levels: int, real: bool = False) -> pipec.Pipeline:
    torch.manual_seed(0)
    net = pipec.Pipeline("unet")
    value, target = net.input("image"), net.input("target")
    kept = []
    for level in range(levels):
        value = net.stage(f"enc{level}", Level() if real else None, value)
        kept.append(value)
    for level in reversed(range(levels)):
        skip = [pipec.skip(kept[level])] if level < levels - 1 else []
        value = net.stage(f"dec{level}", Level() if real else None, value, *skip)
    net.loss("mse", nn.functional.mse_loss if real else None, value, target)
    return net


def skips_copied(plan: Plan) -> int:
    """Copies that bring a value to a device where only a skip reads it."""
    table, count = plan.table, 0
    for task in np.flatnonzero(table.kind == Kind.COPY).tolist():
        info = plan.graph.values[table.value[task]]
        there = {r for r in info.readers if plan.stage_device(r) == table.peer[task]}
        count += bool(not table.gradient[task] and there and there <= set(info.skips))
    return count


@pytest.mark.parametrize("schedule", ["wave", "zb-v", "v-half", "v-min", "dualpipe-v", "1f1b"])
@pytest.mark.parametrize("levels", [2, 3, 4, 6])
def test_no_skip_is_copied_in_a_v(levels: int, schedule: str) -> None:
    plan = pipec.compile(unet(levels), levels, 5, schedule, placement="v")
    for level in range(levels):
        assert plan.stage_device(level) == plan.stage_device(2 * levels - 1 - level)
    assert skips_copied(plan) == 0
    copies = plan.table.kind == Kind.COPY
    assert (np.abs(plan.table.device - plan.table.peer)[copies] == 1).all()  # neighbours only
    values = plan.buffers.kind == Buffer.VALUE
    for value, info in enumerate(plan.graph.values):
        own = values & (plan.buffers.ref == value)
        homes = {plan.stage_device(info.producer), *map(plan.stage_device, info.readers)}
        assert int(own.sum()) == 5 * len(homes) == 5 * (1 if value == levels - 1 else min(2, len(homes)))


@pytest.mark.parametrize("levels", [2, 4, 6])
def test_every_long_skip_is_copied_in_a_line(levels: int) -> None:
    plan = pipec.compile(unet(levels), levels, 5, "1f1b")
    far = sum(plan.stage_device(r) != plan.stage_device(v.producer) for v in plan.graph.values for r in v.skips)
    assert skips_copied(plan) == 5 * far
    assert far == levels - 1


def test_what_a_v_holds() -> None:
    """One unit per activation at each level, double at the level above: the first device holds both outer levels."""
    sizes = {f"{side}{level}": {"activation_bytes": 8 >> level, "output_bytes": 0} for level in range(4)
             for side in ("enc", "dec")}
    costs = pipec.Costs(stages=sizes)
    line = pipec.compile(unet(4), 4, 8, "1f1b", costs=costs).simulate()
    vee = pipec.compile(unet(4), 4, 8, "wave", costs=costs).simulate()
    assert line.peak_bytes == [4 * (8 + 4), 3 * (2 + 1), 2 * (1 + 2), 1 * (4 + 8)]
    assert vee.peak_bytes is not None
    assert vee.peak_bytes[0] <= 4 * (8 + 8)
    assert vee.peak_bytes[0] > line.peak_bytes[0]
    assert vee.bubble < line.bubble


@pytest.mark.parametrize("schedule", ["wave", "zb-v", "dualpipe-v"])
def test_numbers(schedule: str) -> None:
    mine, theirs = unet(3, real=True), unet(3, real=True)
    batch: dict[str, Any] = {"image": torch.randn(5, 2, 8), "target": torch.randn(5, 2, 8)}
    plan = pipec.compile(mine, 3, 4, schedule, placement="v")
    with pipec.Runner(mine, plan, backend="threads") as run:
        assert same(run.step(**batch).losses, pipec.reference(theirs, 4).step(**batch).losses)
    assert same(gradients(mine), gradients(theirs))
