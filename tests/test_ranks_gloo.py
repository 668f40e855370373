"""Ranks of one host through gloo, as those of several hosts talk: the same bits, the same errors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from models import chain, data
from ranks import crew
from test_ranks_asynchronous import trained
from test_ranks_failure import CASES, doomed, survived
from test_ranks_numbers import differences, jumping, read_last

from pipec.runtime.distributed.ranks import Ranks


@contextmanager
def apart() -> Iterator[None]:
    """Runners made inside talk through gloo alone, as those on several hosts do."""
    ways, Ranks.ways = Ranks.ways, ()
    try:
        yield
    finally:
        Ranks.ways = ways


def schedules(rank: int, devices: int) -> dict[str, list[str]]:
    with apart():
        return {
            name: differences(lambda: chain(2 * devices), {"devices": devices, "schedule": name}, [data(9)] * 2, 4)
            for name in ("1f1b", "gpipe", "zb-v", "interleaved-1f1b")
        }


def values(rank: int) -> list[str]:
    given = [data(rows) | {"ids": torch.arange(rows), "scale": 0.5} for rows in (16, 7, 2)]
    how = {"devices": 4, "schedule": "1f1b"}
    with apart():
        return differences(jumping, how, given, 4, evaluate=True) + read_last(rank, "gpipe")


def test_through_gloo_the_numbers_are_the_same(crew2: Any, crew4: Any) -> None:
    names = ("1f1b", "gpipe", "zb-v", "interleaved-1f1b")
    assert crew2(schedules, 2) == [{name: [] for name in names}] * 2
    assert crew4(values) == [[]] * 4


def survived_apart(rank: int, *args: Any) -> Any:
    with apart():
        return survived(rank, *args)


@pytest.mark.parametrize("case", CASES[:3], ids=lambda c: "-".join(map(str, c)))
def test_through_gloo_an_error_reaches_every_rank(case: Any, crew2: Any) -> None:
    what, stage, number, backward, schedule = case
    for rank, (told, unchanged, equal, _) in enumerate(
        crew2(survived_apart, what, stage, number, backward, 2, {"schedule": schedule})
    ):
        assert told[0] == ("RankError" if rank != stage else {"value": "ValueError", "quarrel": "QuarrelError"}[what])
        assert unchanged
        assert equal


def doomed_apart(rank: int, *args: Any) -> float:
    with apart():
        return doomed(rank, *args)


def test_through_gloo_a_rank_that_dies_is_named() -> None:
    with crew(2) as made:
        answers = made.answers(doomed_apart, "kill", 0, 3, True, 2, 20.0)
    assert answers[0] == ("gone", -9)
    assert answers[1][1][0] == "RankError"
    assert "rank 0 has ended" in answers[1][1][1]



def trained_apart(rank: int) -> list[str]:
    with apart():
        return trained(rank, 2, "pipemare", {})


def test_through_gloo_asynchronous_plans_train_alike(crew2: Any) -> None:
    assert crew2(trained_apart) == [[]] * 2
