"""Over ranks, delays that are random or given: every task reads the version that it reads in one process."""

from __future__ import annotations

from typing import Any

import pytest
from fake_gpus import there
from test_asynchronous_runs import batches, momentum
from test_ranks_asynchronous import build, compare, pair

import pipec


def late(rank: int, size: int, schedule: Any, recompute: str) -> list[str]:
    """Random delays: every rank draws for its own stages what one process draws, from versions that it keeps itself."""
    delay, found = pipec.TruncatedExponential(mean=1.5, max=4.0), []
    one, two = pair(rank, lambda: build(2 * size - 1), lambda net: pipec.compile(
        net, size, 2, schedule, update="stage", recompute=recompute),
        rescheduling=pipec.Rescheduling(steps=10), delay=delay)
    ages: dict[str, set[int]] = {}

    def seen(read: pipec.WeightsRead) -> None:
        if read.kind is pipec.Kind.FORWARD:
            ages.setdefault(read.stage, set()).add(read.age)

    with one as run, two as other:
        run.watch_weights(seen)
        for number, batch in enumerate(batches(9, 8)):
            if number == 6:
                found += compare(run, other, lambda r: r.flush())
            found += compare(run, other, lambda r, batch=batch: r.step(**batch))
        found += compare(run, other, lambda r: r.flush())
        found += [] if run.staleness == other.staleness else ["staleness"]
    found += [f"{name} reads {own} only" for name, own in ages.items() if len(own) == 1 and name != "last"]
    return found


@pytest.mark.parametrize(("schedule", "recompute"), [
    ("live-weights", "never"), ("pipedream", "always"), (pipec.Delayed(1, 0, 0.4), "never")])
def test_random_delays(schedule: Any, recompute: str, crew2: Any) -> None:
    assert crew2(late, 2, schedule, recompute) == [[]] * 2


@pytest.mark.parametrize("how", ["wired", "staged"])
def test_random_delays_on_gpus(how: str, crew2: Any) -> None:
    assert crew2(there, how, late, 2, "pipemare", "never") == [[]] * 2


def given_delays(rank: int) -> list[str]:
    found = []
    one, two = pair(rank, lambda: build(3), lambda net: pipec.compile(
        net, 2, 2, pipec.Delayed((4, 2, 1, 1), (2, 2, 0, 1), "optimal"), update="stage"))
    with one as run, two as other:
        for batch in batches(9, 8):
            found += compare(run, other, lambda r, batch=batch: r.step(**batch))
        return found + compare(run, other, lambda r: r.flush())


def test_given_delays(crew2: Any) -> None:
    assert crew2(given_delays) == [[]] * 2


def other_delays(rank: int) -> str:
    net = build(3)
    plan = pipec.compile(net, 2, 4, "pipemare", update="stage")
    with pytest.raises(pipec.RankError) as error:
        pipec.Runner(net, plan, optimizer=momentum, delay=pipec.TruncatedExponential(mean=1.0, max=2.0 + rank))
    return str(error.value)


def test_ranks_with_other_delays_are_told(crew2: Any) -> None:
    one, two = crew2(other_delays)
    assert one == two
    assert "delay: TruncatedExponential(mean=1.0, max=2.0) on rank 0; TruncatedExponential(mean=1.0, max=3.0)" in one
