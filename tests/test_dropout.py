"""Random numbers in whole steps: one stream per step, stage and microbatch, whatever plan and backend run them."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import models
import pytest
import torch
from models import WIDTH, data, gradients, kept_streams, of_modules, runner, same
from torch import Tensor, nn
from torch.nn import functional as F

import pipec
from pipec.schedules import REGISTRY

__all__ = ["kept_streams"]

STAGES, MICROBATCHES = 4, 8


class Masks(nn.Module):
    """Two dropouts of ones; remembers what they kept by the microbatch's number, and the gradients' masks too."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(32))
        self.seen: dict[int, list[Tensor]] = defaultdict(list)

    def forward(self, x: Tensor) -> Tensor:
        number = int(x[0, -1])
        first, second = (F.dropout(torch.ones(len(x), 32) * self.gain, 0.5) for _ in range(2))
        assert not torch.equal(first, second)
        self.seen[number].append((first != 0).detach())
        out = torch.cat([x[:, :32] + first * second, x[:, -1:]], 1)
        if out.requires_grad:
            out.register_hook(lambda g: self.seen[number].append(first.detach() != 0))
        return out


def build() -> pipec.Pipeline:
    return models.of_modules(*(Masks() for _ in range(STAGES)), loss=lambda h, y: ((h - y) ** 2).mean())


def given() -> dict[str, Tensor]:
    numbers = torch.arange(MICROBATCHES).repeat_interleave(2)[:, None].float()
    return {"x": torch.cat([torch.zeros(2 * MICROBATCHES, 32), numbers], 1), "y": torch.zeros(2 * MICROBATCHES, 33)}


def two_steps(run: Any) -> list[Any]:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    results = [run.step(**given()) for _ in range(2)]
    assert torch.equal(torch.get_rng_state(), before)
    assert not torch.equal(results[0].loss, results[1].loss)
    return [[result.losses, result.outputs] for result in results]


@pytest.mark.parametrize("recompute", ["never", "always"])
@pytest.mark.parametrize("backend", ["threads", "replay"])
@pytest.mark.parametrize("schedule", list(REGISTRY))
def test_dropout_is_that_of_the_reference_in_every_plan(schedule: str, backend: str, recompute: str) -> None:
    theirs = build()
    expected = two_steps(pipec.reference(theirs, MICROBATCHES))
    for devices in (1, 2):
        mine = build()
        with models.runner(mine, devices, MICROBATCHES, schedule, backend=backend, recompute=recompute) as run:
            assert same(two_steps(run), expected)
        assert same(gradients(mine), gradients(theirs))


@pytest.mark.parametrize("recompute", ["never", "always"])
def test_every_stage_and_microbatch_has_a_mask_of_its_own_that_recompute_repeats(recompute: str) -> None:
    net = build()
    with models.runner(net, STAGES, MICROBATCHES, recompute=recompute) as run:
        run.step(**given())
        masks = []
        for stage in net.spec.stages:
            assert sorted(stage.fn.seen) == list(range(MICROBATCHES))
            for seen in stage.fn.seen.values():
                assert len(seen) == (3 if recompute == "always" else 2)  # forward, again, gradient
                assert all(torch.equal(mask, seen[0]) for mask in seen)
                masks.append(seen[0].flatten())
            stage.fn.seen.clear()
        run.step(**given())
        masks += [seen[0].flatten() for stage in net.spec.stages for seen in stage.fn.seen.values()]
    assert len({tuple(mask.tolist()) for mask in masks}) == len(masks) == 2 * STAGES * MICROBATCHES


class Noise(nn.Module):
    """Draws twice from a generator of its own, which goes on from forward to forward."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.net, self.own = nn.Linear(WIDTH, WIDTH), torch.Generator().manual_seed(seed)

    def forward(self, x: Tensor) -> Tensor:
        kept = torch.bernoulli(torch.full_like(x, 0.5), generator=self.own)
        return self.net(x * kept) + torch.empty_like(x).normal_(generator=self.own)


@pytest.mark.parametrize("backend", ["threads", "replay"])
@pytest.mark.parametrize("recompute", ["always", "except_last"])
def test_recompute_repeats_draws_from_a_generator_of_the_stages_own(recompute: str, backend: str) -> None:
    def build() -> pipec.Pipeline:
        torch.manual_seed(2)
        return of_modules(*(Noise(seed) for seed in range(3)))

    net, plain = build(), build()
    loop = pipec.reference(plain, 4)
    with runner(net, 2, 4, backend=backend, recompute=recompute) as run:
        for seed in range(3):
            assert torch.equal(run.step(**data(9, seed)).loss, loop.step(**data(9, seed)).loss)
    assert same(gradients(net), gradients(plain))
    mine, theirs = ([stage.fn.own.get_state() for stage in one.spec.stages] for one in (net, plain))
    assert same(mine, theirs)
