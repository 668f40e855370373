"""Interrupts, and failures between a rank's tasks: every rank ends its call at once and says which one it was."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from models import WIDTH, chain, data, of_modules
from ranks import crew
from test_ranks_hosts import apart
from torch import Tensor, nn

import pipec
from pipec.runtime.distributed import council
from pipec.runtime.distributed.channels import RankChannels
from pipec.runtime.distributed.far import FarChannels
from pipec.runtime.distributed.near import NearChannels
from pipec.runtime.distributed.ways import MEMORY, SOCKETS

WAYS = [(MEMORY,), (SOCKETS,), ()]
every_way = pytest.mark.parametrize("ways", WAYS, ids=["memory", "sockets", "gloo"])


class Slow(nn.Linear):
    """Takes a while in its second step."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls > 4:
            time.sleep(0.15)
        return super().forward(x)


def outcome(call: Callable[[], Any]) -> tuple[str, str, int | None, float]:
    begin = time.monotonic()
    try:
        call()
        return "nothing", "", None, 0.0
    except BaseException as error:
        return type(error).__name__, str(error), getattr(error, "rank", None), time.monotonic() - begin


@contextlib.contextmanager
def interrupts() -> Iterator[None]:
    """SIGINT raises, in processes that were started without."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def while_waiting(rank: int, ways: tuple[str, ...]) -> Any:
    """Rank 1 is interrupted while it waits for rank 0; then all go on."""
    torch.manual_seed(0)
    net = of_modules(Slow(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    with apart(ways), interrupts(), pipec.Runner(net, pipec.compile(net, 2, 4), timeout=20.0) as run:
        run.step(**data())
        if rank:
            threading.Timer(0.1, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
        found = outcome(lambda: run.step(**data()))
        return found, outcome(lambda: run.step(**data()))[0]


@every_way
def test_an_interrupt_while_a_rank_waits(ways: Any, crew2: Any) -> None:
    (first, again), (second, too) = crew2(while_waiting, ways)
    assert second[0] == "KeyboardInterrupt"
    assert first[0] == "RankError"
    assert first[2] == 1
    assert first[1].startswith("rank 1 failed: KeyboardInterrupt:")
    assert "stage 'b', microbatch 0, FORWARD (1F0) on device 1" in first[1]
    assert max(first[3], second[3]) < 5.0
    assert (again, too) == ("nothing", "nothing")


@contextlib.contextmanager
def after(owner: Any, name: str, error: BaseException) -> Iterator[None]:
    """Raise ``error`` once, right after a function of ``owner`` has done its work."""
    plain, left = getattr(owner, name), [error]

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        made = plain(*args, **kwargs)
        if left:
            raise left.pop()
        return made

    setattr(owner, name, wrapper)
    try:
        yield
    finally:
        setattr(owner, name, plain)


def in_the_midst(rank: int, ways: tuple[str, ...], where: str) -> Any:
    """Rank 1 is interrupted right after it has sent a value, or fails between the beginning of a step and its first
    task."""
    net = chain(2)
    channels = {(MEMORY,): NearChannels, (SOCKETS,): FarChannels, (): RankChannels}[ways]
    what: Any = {
        "value": lambda: after(channels, "_give", KeyboardInterrupt()),
        "before": lambda: after(pipec.Runner, "_split", MemoryError("no room")),
    }[where]
    with apart(ways), pipec.Runner(net, pipec.compile(net, 2, 4), timeout=20.0) as run:
        run.step(**data())
        with what() if rank else contextlib.nullcontext():
            found = outcome(lambda: run.step(**data()))
        return found, outcome(lambda: run.step(**data()))[:2]


@every_way
@pytest.mark.parametrize(("where", "kind"), [("value", "KeyboardInterrupt"), ("before", "MemoryError")])
def test_a_failure_in_the_midst_of_a_transfer_or_before_the_tasks(ways: Any, where: str, kind: str) -> None:
    with crew(2) as made:
        (first, again), (second, too) = made(in_the_midst, ways, where)
    assert second[0] == kind
    assert first[0] == "RankError"
    assert first[2] == 1
    assert first[1].startswith(f"rank 1 failed: {kind}:")
    assert max(first[3], second[3]) < 5.0
    assert again[0] == too[0] == "RankError"
    assert "have lost each other in an earlier call" in again[1]


def in_a_table(rank: int, ways: tuple[str, ...]) -> Any:
    """Rank 1 is interrupted when its row of a table is on its way, so that rank 0 goes on with the step."""
    net = chain(2)
    with apart(ways), pipec.Runner(net, pipec.compile(net, 2, 4), timeout=20.0) as run:
        run.step(**data())
        lines: Any = run._party._council.lines  # type: ignore[attr-defined]
        owner, name = (council, "exchange") if lines is None else (lines, "exchange")
        with after(owner, name, KeyboardInterrupt()) if rank else contextlib.nullcontext():
            return outcome(lambda: run.step(**data()))


@every_way
def test_an_interrupt_when_ranks_have_agreed(ways: Any) -> None:
    with crew(2) as made:
        first, second = made(in_a_table, ways)
    assert second[0] == "KeyboardInterrupt"
    assert first[:2] == ("RankError", "rank 1 failed: KeyboardInterrupt: ")
    assert first[2] == 1
    assert first[3] < 5.0
