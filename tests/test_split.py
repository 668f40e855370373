"""Backwards in two halves: the numbers are those of the whole backward, and what only the first half reads is freed."""

from __future__ import annotations

import random
from typing import Any

import models
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from models import buffers, gradients, kept_streams, parameters, recipes, same
from plans import any_order
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

import pipec
from pipec.schedules import REGISTRY

__all__ = ["kept_streams"]


def halves(schedule: str = "1f1b", seed: int | None = None, delay: int = 0) -> Any:
    """``schedule`` with every backward in halves; each W comes ``delay`` tasks later, or a random number of tasks."""
    policy = REGISTRY[schedule]()

    def split_in_halves(problem: Any) -> Any:
        rng, rows = random.Random(seed), []
        for row in policy.order(problem):
            made: list[Any] = []
            waiting: list[tuple[int, Any]] = []
            for place, (kind, chunk, m) in enumerate(row):
                made += [w for due, w in waiting if due <= place]
                waiting = [(due, w) for due, w in waiting if due > place]
                made.append((3 if kind == 2 else kind, chunk, m))
                if kind == 2:
                    due = place + 1 + (delay if seed is None else rng.randrange(8))
                    waiting.append((due, (4, chunk, m)))
            if seed is not None:
                rng.shuffle(waiting)
            rows.append(made + [w for _, w in waiting])
        return rows

    split_in_halves.placement = policy.placement  # type: ignore[attr-defined]
    return split_in_halves


@settings(max_examples=250, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(st.data())
def test_any_plan_with_split_backwards_gives_the_numbers_of_the_reference(draw: Any) -> None:
    recipe = draw.draw(recipes())
    how = draw.draw(models.options(recipe))
    if isinstance(how["schedule"], str):
        how["schedule"] = halves(how["schedule"], draw.draw(st.integers(0, 1000)))
    else:
        how["schedule"] = any_order(draw.draw(st.integers(0, 1000)), split=True)
    backend = draw.draw(st.sampled_from(["threads", "replay"]))
    dirty = draw.draw(st.booleans())
    mine, theirs = recipe.build(), recipe.build()
    update = how["update"]
    plan = pipec.compile(mine, **how)
    loop = pipec.reference(theirs, plan.microbatches)

    def optimizer(params: Any) -> torch.optim.Optimizer:
        return torch.optim.Adam(params, lr=0.01)

    own = optimizer([p for p in parameters(theirs) if p.requires_grad]) if update else None
    made: Any = {None: None, "stage": optimizer, "all": None}[update]
    if update == "all":
        made = optimizer([p for p in parameters(mine) if p.requires_grad])
    for net in (mine, theirs):
        for number, parameter in enumerate(parameters(net)):
            if dirty and not update and parameter.requires_grad:
                make = torch.Generator().manual_seed(number)
                parameter.grad = torch.randn(parameter.shape, generator=make) * 3
    with pipec.Runner(mine, plan, optimizer=made, backend=backend) as run:
        for number in range(2):
            count = draw.draw(st.integers(1, 9))
            got, expected = run.step(**models.batch(count, number)), loop.step(**models.batch(count, number))
            if own is not None:
                own.step()
                own.zero_grad()
            assert same([got.losses, got.outputs], [expected.losses, expected.outputs])
            assert same(gradients(mine), gradients(theirs))
            assert same(buffers(mine), buffers(theirs))
            assert same([p.detach() for p in parameters(mine)], [p.detach() for p in parameters(theirs)])
