"""Every schedule on the stand-in accelerator: the bits of the plain loop, no race, no memory back too early."""

from __future__ import annotations

import pytest
from models import RUNS, kept_streams

from standin.training import compare, deep

__all__ = ["kept_streams"]


@pytest.mark.parametrize(("devices", "real"), [(1, "one"), (2, "one"), (2, "several"), (4, "one"), (4, "several")])
@pytest.mark.parametrize("schedule", RUNS)
def test_every_schedule_gives_the_bits_of_the_plain_loop(schedule: str, devices: int, real: str) -> None:
    compare(deep, devices, schedule, real)


@pytest.mark.parametrize("schedule", RUNS)
def test_with_recompute_and_skips_that_wait_on_the_host(schedule: str) -> None:
    compare(lambda: deep(hold="host"), 4, schedule, "two", recompute="always")
