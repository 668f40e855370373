"""A rank that may open no more files, or make no larger ones: an error on all ranks says so, and nothing is lost."""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Iterator
from typing import Any

import pytest
from models import chain, data, same, snapshot
from ranks import crew
from test_ranks_alike import told

import pipec


@contextlib.contextmanager
def at_most(kind: int, value: int) -> Iterator[None]:
    """A lower limit of this process."""
    before = resource.getrlimit(kind)
    resource.setrlimit(kind, (value, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(kind, before)


@contextlib.contextmanager
def no_more_files() -> Iterator[None]:
    """Everything that may be opened is open."""
    held = []
    with at_most(resource.RLIMIT_NOFILE, max(map(int, os.listdir("/proc/self/fd"))) + 8):
        with contextlib.suppress(OSError):
            while True:
                held.append(os.open("/dev/null", os.O_RDONLY))
        try:
            yield
        finally:
            for file in held:
                os.close(file)


@pytest.fixture(scope="module")
def crew2() -> Iterator[Any]:
    """Ranks for these tests alone: what others have left open, or let go of just now, would count."""
    with crew(2) as made:
        yield made


def few_files(rank: int, left: int) -> list[str]:
    """Rank 1 may open a few files only; then all may as many as they want."""
    net = chain(2)
    plan = pipec.compile(net, 2, 4)

    def run() -> None:
        with pipec.Runner(net, plan, timeout=20.0) as made:
            made.step(**data())

    limit = len(os.listdir("/proc/self/fd")) - 1 + left
    with at_most(resource.RLIMIT_NOFILE, limit) if rank else contextlib.nullcontext():
        found = told(run)
    return [found, told(run)]


@pytest.mark.parametrize("left", [1, 12])
def test_too_few_files_for_a_runner_are_told_to_all_before_anything_is_opened(left: int, crew2: Any) -> None:
    first, second = crew2(few_files, left)
    assert second[0].startswith("RunError: a rank of 2 needs about 21 sockets and files, and this process may open")
    assert "raise the limit (ulimit -n" in second[0]
    assert first[0] == f"RankError: rank 1 could not make its runner: {second[0]}"
    assert (first[1], second[1]) == ("nothing", "nothing")


def large(rank: int, what: str) -> list[Any]:
    """A step needs larger memory to share, which rank 1 may not map, or make; a new runner works."""
    net = chain(2)
    plan = pipec.compile(net, 2, 4)
    limited = {"map": no_more_files, "make": lambda: at_most(resource.RLIMIT_FSIZE, 8192)}[what]
    with pipec.Runner(net, plan, timeout=20.0) as run:
        run.step(**data())
        before = snapshot(net)
        with limited() if rank else contextlib.nullcontext():
            found = [told(lambda: run.step(**data(6000))), same(snapshot(net), before)]
    with pipec.Runner(net, plan, timeout=20.0) as run:
        run.step(**data(6000))
    return found


@pytest.mark.parametrize(("what", "text"), [
    ("map", "RunError: memory that another rank shares cannot be mapped: [Errno 24] Too many open files; raise"),
    ("make", "OSError: [Errno 27] File too large"),
])
def test_memory_that_cannot_be_shared_fails_the_step_on_all(what: str, text: str, crew2: Any) -> None:
    first, second = crew2(large, what)
    assert second[0].startswith(text)
    assert first[0].startswith(f"RankError: rank 1 failed: {text}")
    assert (first[1], second[1]) == (True, True)
