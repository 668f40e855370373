"""Ranks of one host that talk as those of several hosts do, through sockets or gloo: the same bits, the same errors."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from models import chain, data
from ranks import crew
from test_ranks_asynchronous import trained
from test_ranks_failure import CASES
from test_ranks_numbers import differences, jumping, read_last
from torch import nn
from torch.nn import functional as F
from traps import doomed, survived

import pipec
from pipec.runtime import executor
from pipec.runtime.distributed import held
from pipec.runtime.distributed.ranks import Ranks
from pipec.runtime.distributed.ways import SOCKETS

WAYS = [(SOCKETS,), ()]
either = pytest.mark.parametrize("ways", WAYS, ids=["sockets", "gloo"])


@contextmanager
def apart(ways: tuple[str, ...] = ()) -> Iterator[None]:
    """Runners made inside talk in one of these ways, or through gloo alone."""
    before, Ranks.ways = Ranks.ways, ways
    try:
        yield
    finally:
        Ranks.ways = before


def schedules(rank: int, ways: tuple[str, ...], devices: int) -> dict[str, list[str]]:
    with apart(ways):
        return {
            name: differences(lambda: chain(2 * devices), {"devices": devices, "schedule": name}, [data(9)] * 2, 4)
            for name in ("1f1b", "gpipe", "zb-v", "interleaved-1f1b")
        }


def values(rank: int, ways: tuple[str, ...]) -> list[str]:
    given = [data(rows) | {"ids": torch.arange(rows), "scale": 0.5} for rows in (16, 7, 2)]
    how = {"devices": 4, "schedule": "1f1b"}
    with apart(ways):
        return differences(jumping, how, given, 4, evaluate=True) + read_last(rank, "gpipe")


@either
def test_the_numbers_are_the_same(ways: Any, crew2: Any, crew4: Any) -> None:
    names = ("1f1b", "gpipe", "zb-v", "interleaved-1f1b")
    assert crew2(schedules, ways, 2) == [{name: [] for name in names}] * 2
    assert crew4(values, ways) == [[]] * 4


def survived_apart(rank: int, ways: tuple[str, ...], *args: Any) -> Any:
    with apart(ways):
        return survived(rank, *args)


@either
@pytest.mark.parametrize("case", CASES[:3], ids=lambda c: "-".join(map(str, c)))
def test_an_error_reaches_every_rank(case: Any, ways: Any, crew2: Any) -> None:
    what, stage, number, backward, schedule = case
    for rank, (told, unchanged, equal, _) in enumerate(
        crew2(survived_apart, ways, what, stage, number, backward, 2, {"schedule": schedule})
    ):
        assert told[0] == ("RankError" if rank != stage else {"value": "ValueError", "quarrel": "QuarrelError"}[what])
        assert unchanged
        assert equal


def doomed_apart(rank: int, ways: tuple[str, ...], *args: Any) -> float:
    with apart(ways):
        return doomed(rank, *args)


@either
def test_a_rank_that_dies_is_named(ways: Any) -> None:
    with crew(2) as made:
        answers = made.answers(doomed_apart, ways, "kill", 0, 3, True, 2, 20.0)
    assert answers[0] == ("gone", -9)
    assert answers[1][1][0] == "RankError"
    assert "rank 0 has ended" in answers[1][1][1]


def test_four_ranks_name_the_one_that_died() -> None:
    """Those without a word from it hear of it from those that wait for it."""
    with crew(4) as made:
        begin = time.monotonic()
        answers = made.answers(doomed_apart, (SOCKETS,), "kill", 2, 1, False, 4, 20.0)
        assert time.monotonic() - begin < 15
    for rank, (word, told) in enumerate(answers):
        assert (word, told) == ("gone", -9) if rank == 2 else (word, told[0], told[2]) == ("raised", "RankError", 2)


def trained_apart(rank: int, ways: tuple[str, ...]) -> list[str]:
    with apart(ways):
        return trained(rank, 2, "pipemare", {})


@either
def test_asynchronous_plans_train_alike(ways: Any, crew2: Any) -> None:
    assert crew2(trained_apart, ways) == [[]] * 2


def large_net() -> pipec.Pipeline:
    torch.manual_seed(0)
    net = pipec.Pipeline("large")
    x, y = net.input("x"), net.input("y")
    first = value = net.stage("s0", nn.Linear(256, 256), x)
    for number in range(1, 4):
        value = net.stage(f"s{number}", nn.Linear(256, 256), value)
    net.loss("mse", F.mse_loss, net.stage("sum", torch.add, value, pipec.skip(first)), y)
    return net


def large(rank: int) -> list[str]:
    """Values that threads read and write beside the tasks, of other sizes from step to step."""
    given = [{name: torch.randn(rows, 256) for name in ("x", "y")} for rows in (2400, 2400, 16, 1200, 4000)]
    with apart((SOCKETS,)):
        return [
            wrong for schedule in ("1f1b", "gpipe")
            for wrong in differences(large_net, {"devices": 4, "schedule": schedule}, given, 4)
        ]


def test_large_values_through_sockets(crew4: Any) -> None:
    assert crew4(large) == [[]] * 4


def in_replicas(rank: int) -> bool:
    """Each replica has sockets of its own; tables of all go through gloo."""
    with apart((SOCKETS,)):
        net = chain(2)
        plan = pipec.compile(net, 2, 4, data_parallel=2)
        with pipec.Runner(net, plan) as run:
            for step in range(2):
                run.step(**data(8, step))
            party: Any = run._party
            return bool(run.transport == SOCKETS and len(party._lines.inbox) == 1)


def test_replicas(crew4: Any) -> None:
    assert crew4(in_replicas) == [True] * 4


def measured(rank: int) -> Any:
    """Costs of a run whose second host was started long before the first, and how long the trace is."""
    net = chain(4)
    with pytest.MonkeyPatch.context() as patch:
        for module in (held, executor):
            patch.setattr(module, "perf_counter_ns", lambda: time.perf_counter_ns() + rank // 2 * 10**15)
        with pipec.Runner(net, pipec.compile(net, 4, 4)) as run:
            for _ in range(2):
                run.step(**data(8))
            trace = run.trace()
    return trace.to_costs(), trace.makespan


def test_what_a_run_costs_is_the_same_on_every_rank(crew4: Any) -> None:
    found = crew4(measured)
    assert all(costs == found[0][0] for costs, _ in found)
    assert all(makespan < 10**6 for _, makespan in found), "the clocks of the hosts were not set right"
    assert all(own.forward > 0 and own.backward > 0 for own in found[0][0].stages.values())
