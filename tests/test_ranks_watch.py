"""Ranks that die or stand still are named by all others, whichever way values travel; never one that only waits."""

from __future__ import annotations

import gc
import os
import signal
import socket
import time
from typing import Any

import pytest
from models import chain, data
from pairs import connected_sockets
from ranks import crew
from traps import WHAT, doomed

import pipec
from pipec.runtime.distributed.blame import Seen, blamed
from pipec.runtime.distributed.notes import ALL, NOBODY
from pipec.runtime.distributed.posts import BYE, LONGEST, NOTE, STORY, Post
from pipec.runtime.distributed.ranks import Ranks
from pipec.runtime.distributed.ways import MEMORY, SOCKETS

WAYS = {"memory": (MEMORY,), "sockets": (SOCKETS,), "gloo": ()}

# -- who is to blame ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("first", "waits", "still", "path"), [
    (1, {1: 2, 2: 3, 3: NOBODY}, (), [0, 1, 2, 3]),  # three wait, one is at a task
    (1, {1: 2, 2: 3, 3: 2}, (3,), [0, 1, 2, 3]),  # its note says that it waits, and it stands still
    (1, {1: NOBODY, 2: 3, 3: NOBODY}, (3,), [0, 1]),  # nobody here waits for the one that stands still
    (1, {1: 2, 2: 1, 3: NOBODY}, (), [0, 1]),  # in a circle
    (ALL, {1: 3, 2: ALL, 3: NOBODY}, (), [0, 3]),
    (ALL, {1: NOBODY, 2: 1, 3: 2}, (2,), [0, 2]),  # of equally near ones the one that stands still
    (2, {1: 3, 2: ALL, 3: 1}, (3,), [0, 2, 3]),
    (ALL, {1: ALL, 2: ALL, 3: ALL}, (), [0]),  # all wait for all: nobody in particular
])
def test_the_one_that_all_others_wait_for_is_to_blame(first: int, waits: Any, still: Any, path: list[int]) -> None:
    def seen(place: int) -> Seen:
        own = waits[place]
        return Seen(own if own in (ALL, NOBODY) else own + 1, place in still)

    assert blamed(0, first, 4, lambda place: Seen(NOBODY if waits[place] == NOBODY else seen(place).waits,
                                                  place in still)) == path


# -- what ranks say to each other -----------------------------------------------------------------------------------


@pytest.mark.parametrize("far", [False, True])
def test_posts_bring_what_was_said_in_order(far: bool) -> None:
    one, two = connected_sockets() if far else socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    here, there = Post(one), Post(two)
    here.note(b"12345")
    here.story(3, "x" * (LONGEST + 100))
    here.say(BYE)
    here.close()
    found: list[Any] = []
    while len(found) < 3:
        found += there.heard()
    with pytest.raises(EOFError):
        there.heard()
    there.close()
    assert [kind for kind, _ in found] == [NOTE, STORY, BYE]
    assert found[0][1] == b"12345"
    assert LONGEST < len(found[1][1]) < LONGEST + 100


def test_a_post_that_nobody_reads_holds_nobody_up() -> None:
    one, two = connected_sockets()
    here, there = Post(one), Post(two)
    for _ in range(2000):
        here.note(bytes(5000))
    here.story(1, "rank 1 has ended")
    kinds: list[int] = []
    while STORY not in kinds:  # a record that was begun is brought to its end
        kinds += [kind for kind, _ in there.heard()]
        here.note(b"")
    assert kinds.count(NOTE) > 10
    for end in (here, there):
        end.close()


# -- real processes -------------------------------------------------------------------------------------------------


def doomed_in(rank: int, ways: tuple[str, ...], watched: tuple[str, ...], *args: Any) -> float:
    Ranks.ways, Ranks.watched = ways, watched
    return doomed(rank, *args)


def ends(
    size: int, what: str, stage: int, way: str, watched: tuple[str, ...] = (MEMORY, SOCKETS), timeout: float = 20.0
) -> tuple[list[Any], float]:
    """What all ranks but the one of ``stage`` raise when that one dies or stands still in its first backward, and how
    many seconds that takes; all have waited for it, by way of those in between."""
    with crew(size) as made:
        for pipe in made._pipes:
            pipe.send((doomed_in, (WAYS[way], watched, what, stage, 1, True, size, timeout)))
        begin = time.monotonic()
        found = []
        for rank, pipe in enumerate(made._pipes):
            if rank != stage:
                assert pipe.poll(max(0.0, begin + 30 - time.monotonic())), f"rank {rank} waits for ever"
                found.append(pipe.recv())
        took = time.monotonic() - begin
        if what == "freeze":
            os.kill(made.processes[stage].pid or 0, signal.SIGCONT)
        made.processes[stage].kill()
    return found, took


@pytest.mark.parametrize(("size", "stage", "way", "watched"), [
    (4, 3, "gloo", (MEMORY, SOCKETS)), (4, 0, "gloo", (SOCKETS,)), (4, 1, "gloo", ()), (4, 3, "sockets", (SOCKETS,)),
])
def test_the_dead_one_is_named_within_seconds(size: int, stage: int, way: str, watched: Any) -> None:
    found, took = ends(size, "kill", stage, way, watched)
    assert took < 12
    for word, told in found:
        assert (word, told[0], told[2]) == ("raised", "RankError", stage)
        assert told[1].startswith(f"rank {stage} has ended; rank ")
        assert f"rank {stage} stands at " in told[1]
        if watched == (MEMORY, SOCKETS):  # its note is mapped
            assert f"rank {stage} stands at stage {'abcd'[stage]!r}, microbatch 0, BACKWARD ({stage}B0)" in told[1]


@pytest.mark.parametrize(("size", "stage", "way", "watched"), [
    (4, 3, "memory", (MEMORY, SOCKETS)), (4, 3, "sockets", (MEMORY, SOCKETS)), (4, 3, "gloo", (SOCKETS,)),
    (2, 0, "gloo", (MEMORY, SOCKETS)),
])
def test_the_one_that_stands_still_is_named_after_the_timeout(size: int, stage: int, way: str, watched: Any) -> None:
    found, took = ends(size, "freeze", stage, way, watched, timeout=2.0)
    assert 2 < took < 15
    for word, told in found:
        assert (word, told[0], told[2]) == ("raised", "RankError", stage)
        assert told[1].startswith(f"rank {stage} has not answered for 2 s, its process stands still; rank ")
        for rank in range(size):
            assert f"\n  rank {rank} stands at " in told[1]


def lively(rank: int) -> list[str]:
    """Rank 1's script goes on without its runner; then rank 0 waits for it."""
    Ranks.ways = ()
    net, told = chain(2), []
    with pipec.Runner(net, pipec.compile(net, 2, 4), timeout=30.0) as run:
        run.step(**data())
        if rank == 0:
            try:
                run.step(**data())
            except pipec.RankError as error:
                told.append(str(error))
    if rank:
        time.sleep(3)
    return told


def test_a_rank_that_has_closed_its_runner_is_named() -> None:
    with crew(2) as made:
        begin = time.monotonic()
        first, second = made(lively)
        assert time.monotonic() - begin < 15
    assert first[0].startswith("rank 1 has closed its runner; rank 0 waits for the start of step()")
    assert second == []


def saves(rank: int, folder: str) -> None:
    from pipec.runtime import saving

    if rank == 1:
        saving.write = lambda *_: WHAT["kill"]()
    net = chain(4)
    with pipec.Runner(net, pipec.compile(net, 4, 4), timeout=20.0) as run:
        run.step(**data())
        run.save(folder)


def test_one_that_dies_in_save_is_named(tmp_path: Any) -> None:
    with crew(4) as made:
        begin = time.monotonic()
        answers = made.answers(saves, str(tmp_path / "saved"))
        assert time.monotonic() - begin < 15
    for rank in (0, 2, 3):
        word, told = answers[rank]
        assert (word, told[0], told[2]) == ("raised", "RankError", 1)
        assert told[1].startswith("rank 1 has ended; rank ")


def replicas(rank: int) -> None:
    """The last rank of the second replica dies; the first replica hears of it where all meet."""
    net = chain(2)
    with pipec.Runner(net, pipec.compile(net, 2, 4, data_parallel=2), timeout=20.0) as run:
        run.step(**data(8, rank // 2))
        if rank == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        run.step(**data(8, rank // 2))


def test_a_death_in_another_replica() -> None:
    with crew(4) as made:
        begin = time.monotonic()
        answers = made.answers(replicas)
        assert time.monotonic() - begin < 12
    assert answers[3] == ("gone", -9)
    assert [(word, told[0], told[2]) for word, told in answers[:3]] == [("raised", "RankError", 3)] * 3


def never_made(rank: int, what: str) -> None:
    """Rank 1 is gone before the ranks have their watch."""
    from pipec.runtime.distributed import gpu_ranks

    net = chain(4)
    plan = pipec.compile(net, 4, 4)
    if rank == 1:
        gpu_ranks.claim = lambda *_: WHAT[what]()
    pipec.Runner(net, plan, timeout=1.5)


@pytest.mark.parametrize("what", ["kill", "freeze"])
def test_one_that_is_gone_while_runners_are_made_is_named(what: str) -> None:
    with crew(4) as made:
        for pipe in made._pipes:
            pipe.send((never_made, (what,)))
        begin = time.monotonic()
        for rank in (0, 2, 3):
            assert made._pipes[rank].poll(max(0.0, begin + 20 - time.monotonic()))
            word, told = made._pipes[rank].recv()
            assert (word, told[0], told[2]) == ("raised", "RankError", 1)
            assert told[1].startswith("rank 1 has ended or does not answer while the ranks make this runner together")
        made.processes[1].kill()


# -- what a closed runner leaves ------------------------------------------------------------------------------------


def made_and_closed(rank: int, ways: tuple[str, ...], schedule: str) -> tuple[list[tuple[int, int]], list[str]]:
    """How many descriptors and threads there are after each of 20 runners, all of them kept; and what one says then."""
    before, Ranks.ways = Ranks.ways, ways
    collects = gc.isenabled()
    gc.disable()
    try:
        net = chain(2)
        plan = pipec.compile(net, 2, 4, schedule, update="stage")
        kept, found = [], []
        apart = chain(2)
        other = pipec.Runner(apart, pipec.compile(apart, 2, 4))
        other.step(**data())
        for number in range(20):
            run = pipec.Runner(net, plan, optimizer=SGD)
            if number % 5 == 0:
                run.step(**data())
            run.close()
            run.close()
            kept.append(run)
            found.append((len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))))
        assert float(other.step(**data()).loss) > 0  # it is another one's
        other.close()
        told = []
        for call in (lambda: run.step(**data()), lambda: run.evaluate(**data()), lambda: kept[0].trace(),
                     lambda: run.save("nowhere")):
            try:
                call()
            except pipec.RunError as error:
                told.append(str(error))
        return found, told
    finally:
        Ranks.ways = before
        if collects:
            gc.enable()


def SGD(parameters: Any) -> Any:
    import torch

    return torch.optim.SGD(parameters, lr=0.1)


@pytest.mark.parametrize(("way", "schedule"), [("memory", "1f1b"), ("sockets", "1f1b"), ("gloo", "pipedream")])
def test_a_closed_runner_holds_no_descriptor_and_no_thread(way: str, schedule: str, crew2: Any) -> None:
    for found, told in crew2(made_and_closed, WAYS[way], schedule):
        files, threads = zip(*found, strict=True)
        assert set(files[1:]) == {files[1]}
        assert max(threads[1:]) <= threads[1]
        assert [text for text in told if "closed" not in text] == []
        assert len(told) == 4
