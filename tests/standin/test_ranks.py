"""Ranks, each a process with a stand-in accelerator of its own; values travel through pinned host memory and gloo."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from models import data, same
from ranks import crew

import pipec
import standin
from pipec.runtime.distributed.gpus import Accelerators, Distributed
from standin.training import deep, of


class Own(Accelerators):
    """The stand-in, which gloo does not know."""

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def backends(self) -> dict[str, str]:
        return {"cpu": "gloo", "standin": "gloo"}

    def identity(self, device: torch.device) -> str:
        return f"{device} of rank {self._rank}"


def trained(rank: int, size: int, schedule: Any, hold: str | None, slow: bool) -> list[str]:
    """Steps, an evaluation and a failure-free end, beside the plain loop on the CPU; what differs or races."""
    standin.load()
    standin.reset()
    standin.slow(slow)
    mine, theirs = deep(hold=hold), deep(hold=hold)
    loop = pipec.reference(theirs, 4, seed=3)
    plan = pipec.compile(mine, size, 4, schedule, recompute="always" if slow else "never")
    found = []
    with pipec.Runner(mine, plan, devices="standin", outputs="all", seed=3, backend=Distributed(Own(rank))) as run:
        for step in range(3):
            got, expected = run.step(**data(8, step)), loop.step(**data(8, step))
            if not same(of(got), of(expected)):
                found.append(f"rank {rank}, step {step}: {got} instead of {expected}")
        for stage, other in zip(run.stages, theirs.spec.stages, strict=True):
            if stage.fn is not None:
                pairs = zip(stage.fn.parameters(), other.fn.parameters(), strict=True)
                found += [f"rank {rank}: a gradient" for a, b in pairs if not same(a.grad.cpu(), b.grad)]
    return found + standin.problems()


@pytest.mark.parametrize(("schedule", "hold", "slow"), [
    ("1f1b", None, False), ("gpipe", "host", True), ("zb-v", None, True),
])
def test_the_bits_of_the_plain_loop(schedule: str, hold: str | None, slow: bool) -> None:
    with crew(2) as ranks:
        assert ranks(trained, 2, schedule, hold, slow) == [[], []]
