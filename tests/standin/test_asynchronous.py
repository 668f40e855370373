"""Asynchronous schedules on the stand-in accelerator: the bits of the replay on the CPU, no race."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from models import kept_streams, same
from test_asynchronous_runs import SCHEDULES, batches, momentum, runner, stages, state

from standin.training import REAL, at_home, of

__all__ = ["kept_streams"]


def steady(params: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, lr=0.05, foreach=False)


@pytest.mark.parametrize("real", ["one", "several"])
@pytest.mark.parametrize("recompute", ["never", "always"])
@pytest.mark.parametrize("name", SCHEDULES)
def test_the_numbers_are_those_of_the_replay(name: str, recompute: str, real: str) -> None:
    """Filling, steady steps, a flush, an evaluation and another run."""
    found, given = [], batches(7)
    optimizer = momentum if name == "nesterov" else steady
    for devices in (None, REAL[real](3)):
        mine = stages(dropout=0.5)
        how: dict[str, Any] = {"devices": devices, "backend": None} if devices else {}
        with runner(mine, SCHEDULES[name], recompute=recompute, optimizer=optimizer, **how) as run:
            losses = [at_home(run.step(**one).microbatch_losses) for one in given[:5]]
            losses.append(at_home(run.flush().microbatch_losses))
            losses += [at_home(run.step(**one).microbatch_losses) for one in given[5:]]
            losses += [of(run.evaluate(**given[0])), at_home(run.flush().microbatch_losses)]
        found.append([losses, at_home(state(mine))])
    assert same(*found)
