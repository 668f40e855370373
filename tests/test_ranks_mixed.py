"""Pipelines over several hosts with several ranks each: memory within a host, sockets between hosts.

The border of a host is made here: ranks of different halves cannot call each other's doors.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from models import chain, data
from ranks import crew
from test_ranks_asynchronous import trained
from test_ranks_hosts import large_net
from test_ranks_numbers import differences, jumping, read_last
from traps import doomed, survived

import pipec
from pipec.runtime.distributed import doors
from pipec.runtime.distributed.mixed import MixedLines

HALVES, LONE = (0, 0, 1, 1), (0, 0, 1)  # the host of every rank


@contextmanager
def border(hosts: tuple[int, ...]) -> Iterator[None]:
    """Runners made inside find ranks only of their own host by way of the host."""
    real = doors._called

    def called(address: str, me: int, peer: int) -> Any:
        return real(address, me, peer) if hosts[me] == hosts[peer] else None

    doors._called = called
    try:
        yield
    finally:
        doors._called = real


def transports(rank: int, hosts: tuple[int, ...]) -> tuple[str, str, float]:
    with border(hosts):
        net = chain(len(hosts))
        with pipec.Runner(net, pipec.compile(net, len(hosts), 4)) as run:
            party: Any = run._party
            return type(party._lines).__name__, run.transport, float(run.step(**data()).loss)


def test_every_pair_of_ranks_has_its_own_way(crew4: Any) -> None:
    kinds, told, losses = zip(*crew4(transports, HALVES), strict=True)
    assert kinds == ("MixedLines",) * 4
    assert told == tuple(f"shared memory with rank {near}, sockets with ranks {far}"
                         for near, far in ((1, "2, 3"), (0, "2, 3"), (3, "0, 1"), (2, "0, 1")))
    assert len(set(losses)) == 1


def test_a_rank_alone_on_its_host_has_sockets_only() -> None:
    with crew(3) as made:
        kinds, told, _ = zip(*made(transports, LONE), strict=True)
    assert kinds == ("MixedLines", "MixedLines", "FarLines")
    assert told[2] == "sockets"
    assert told[0] == "shared memory with rank 1, sockets with rank 2"


def numbers(rank: int) -> list[list[str]]:
    given = [data(rows) | {"ids": torch.arange(rows), "scale": 0.5} for rows in (16, 7, 2)]
    big = [{name: torch.randn(rows, 256) for name in ("x", "y")} for rows in (2400, 16, 2400, 1200)]
    with border(HALVES):
        found = [
            differences(lambda: chain(8), {"devices": 4, "schedule": name}, [data(9)] * 2, 4)
            for name in ("1f1b", "interleaved-1f1b")
        ]
        found.append(differences(jumping, {"devices": 4, "schedule": "1f1b"}, given, 4, evaluate=True))
        found.append(differences(large_net, {"devices": 4, "schedule": "gpipe"}, big, 4))
        found.append(read_last(rank, "gpipe"))
        found.append(trained(rank, 4, "pipemare", {}))
    return found


def test_the_numbers_are_the_same(crew4: Any) -> None:
    assert crew4(numbers) == [[[]] * 6] * 4


def survived_there(rank: int, *args: Any) -> Any:
    with border(HALVES):
        return survived(rank, *args)


@pytest.mark.parametrize("stage", [0, 2])
def test_an_error_reaches_every_rank(stage: int, crew4: Any) -> None:
    for rank, (told, unchanged, equal, _) in enumerate(
        crew4(survived_there, "value", stage, 2, False, 4, {"schedule": "1f1b"})
    ):
        assert (told[0], told[2]) == (("ValueError", None) if rank == stage else ("RankError", stage))
        assert unchanged
        assert equal


def doomed_there(rank: int, *args: Any) -> float:
    doors._called = lambda address, me, peer, real=doors._called: (
        real(address, me, peer) if HALVES[me] == HALVES[peer] else None
    )
    return doomed(rank, *args)


@pytest.mark.parametrize(("what", "stage", "text"), [
    ("kill", 3, "rank 3 has ended; rank "),
    ("freeze", 3, "rank 3 has not answered for 2 s, its process stands still; rank "),
])
def test_the_one_that_is_gone_is_named_on_both_hosts(what: str, stage: int, text: str) -> None:
    with crew(4) as made:
        for pipe in made._pipes:
            pipe.send((doomed_there, (what, stage, 1, True, 4, 2.0 if what == "freeze" else 20.0)))
        begin = time.monotonic()
        for rank, pipe in enumerate(made._pipes):
            if rank != stage:
                assert pipe.poll(max(0.0, begin + 20 - time.monotonic())), f"rank {rank} waits for ever"
                word, told = pipe.recv()
                assert (word, told[0], told[2]) == ("raised", "RankError", stage)
                assert told[1].startswith(text)
        assert time.monotonic() - begin < 12
        if what == "freeze":
            os.kill(made.processes[stage].pid or 0, signal.SIGCONT)
        made.processes[stage].kill()


def leaves(rank: int) -> list[int]:
    found = []
    with border(HALVES):
        for _ in range(4):
            net = chain(4)
            with pipec.Runner(net, pipec.compile(net, 4, 4)) as run:
                run.step(**data())
                party: Any = run._party
                assert isinstance(party._lines, MixedLines)
            found.append(len(os.listdir("/proc/self/fd")))
    return found


def test_closing_leaves_no_descriptor(crew4: Any) -> None:
    for found in crew4(leaves):
        assert set(found[1:]) == {found[1]}
