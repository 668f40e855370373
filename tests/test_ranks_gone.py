"""A rank that dies, ends early or hangs: every rank hears of it, by name; none waits for ever, nothing is left."""

from __future__ import annotations

import os
import time
from typing import Any

import pytest
from models import chain, data
from ranks import crew, left_behind
from traps import doomed, kill

import pipec


@pytest.mark.parametrize(("what", "stage", "number", "backward", "size", "code"), [
    ("die", 1, 2, False, 2, 7), ("kill", 0, 3, True, 2, -9), ("kill", 2, 1, False, 4, -9),
])
def test_a_rank_that_dies_is_named_by_all(
    what: str, stage: int, number: int, backward: bool, size: int, code: int
) -> None:
    with crew(size) as made:
        begin = time.monotonic()
        answers = made.answers(doomed, what, stage, number, backward, size, 20.0)
        assert time.monotonic() - begin < 15
    task = f"{stage}{'B' if backward else 'F'}{number - 1}"
    for rank, (word, told) in enumerate(answers):
        if rank == stage:
            assert (word, told) == ("gone", code)
        else:
            assert word == "raised"
            assert told[0] == "RankError"
            assert told[2] == stage
            assert f"rank {stage} has ended" in told[1]
            assert f"rank {stage} stands at stage {'abcd'[stage]!r}, microbatch {number - 1}" in told[1]
            assert f"({task})" in told[1]
    assert left_behind(made) == []


def quits(rank: int, size: int) -> None:
    """The script of rank 1 ends between two steps."""
    net = chain(size)
    with pipec.Runner(net, pipec.compile(net, size, 4), timeout=20.0) as run:
        for _ in range(3):
            run.step(**data())
        if rank == 1:
            os._exit(0)
        run.step(**data())


def test_a_rank_whose_script_ends_early_is_named() -> None:
    with crew(2) as made:
        (word, told), gone = made.answers(quits, 2)
    assert gone == ("gone", 0)
    assert word == "raised"
    assert told[0] == "RankError"
    assert told[1].startswith("rank 1 has ended; rank 0 waits for the start of step()")
    assert "rank 1 stands at no task (call 3)" in told[1]


def test_a_rank_that_hangs_is_named_after_the_timeout() -> None:
    with crew(2) as made:
        begin = time.monotonic()
        answers = made.answers(doomed, "hang", 1, 2, False, 2, 2.0, of=1)
        assert time.monotonic() - begin < 15
        for process in made.processes:
            process.kill()
    word, told = answers[0]
    assert word == "raised"
    assert told[0] == "RankError"
    assert "rank 1 has not answered for 2 s" in told[1]
    assert "rank 0 stands at" in told[1]
    assert "rank 1 stands at stage 'b', microbatch 1, FORWARD (1F1) on device 1" in told[1]


def all_killed(rank: int) -> None:
    net = chain(2)
    with pipec.Runner(net, pipec.compile(net, 2, 4)) as run:
        run.step(**data())
        kill()


def test_ranks_that_are_all_killed_leave_nothing() -> None:
    with crew(2) as made:
        assert made.answers(all_killed) == [("gone", -9)] * 2
        assert left_behind(made) == []


def test_nothing_is_left_behind(crew2: Any) -> None:
    """A runner's file goes with it."""
    crew2(doomed, "value", 0, 1000, False, 2, 20.0)
    assert left_behind(crew2) == []
