"""Large values between ranks on several hosts: a thread reads all that comes in a turn, whatever the tasks do."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import threading
import time
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pairs import Pair, at_once, connected_sockets, pair

from pipec.errors import RankError
from pipec.runtime.distributed.far_lines import LARGE, FarLines
from pipec.runtime.distributed.sockets import NUMBERS

MIB = 1 << 20


def bytes_of(number: int, size: int) -> torch.Tensor:
    """A value that no other one looks like."""
    return (torch.arange(size, dtype=torch.int64) * 7 + number).to(torch.uint8)


def narrow(made: Pair) -> None:
    """Let the kernel hold little of what is on its way."""
    for lines, peer in zip(made.lines, (1, 0), strict=True):
        for name in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            lines._lines[peer]._socket.setsockopt(socket.SOL_SOCKET, name, 1 << 15)


def reading(made: Pair) -> bool:
    """Whether a thread of the reader reads."""
    return bool(made.lines[1]._lines[0].fetching)


def test_values_travel_while_the_reader_works() -> None:
    """All of a turn's, though the kernel holds less than one of them and the reader asks for none."""
    with pair(6, timeout=20.0, far=True) as made:
        narrow(made)
        made.step([bytes_of(n, MIB) for n in range(6)])  # from now on values are known to be large
        one, two = made.channels()
        two.begin()
        for number in range(6):
            one.send((0, 1), 0, bytes_of(number + 1, MIB))
        one.finish()  # nothing is left to be written
        for number in range(6):
            assert torch.equal(two.receive((0, 1))[1], bytes_of(number + 1, MIB))
        assert not reading(made)  # what else comes is read by whoever waits for it


def test_a_reader_that_learns_in_the_midst_of_a_turn() -> None:
    """From the first large value on, a thread reads what is left of the turn."""
    with pair(5, timeout=20.0, far=True) as made:
        narrow(made)
        one, two = made.channels()
        two.begin()
        sender = threading.Thread(target=lambda: [one.send((0, 1), 0, bytes_of(n, MIB)) for n in range(5)])
        sender.start()
        assert torch.equal(two.receive((0, 1))[1], bytes_of(0, MIB))
        assert reading(made)
        sender.join()
        one.finish()
        for number in range(1, 5):
            assert torch.equal(two.receive((0, 1))[1], bytes_of(number, MIB))


def test_small_values_need_no_thread_any_more() -> None:
    """A turn of small ones ends it, one without any message does not."""
    with pair(3, timeout=20.0, far=True) as made:
        made.step([bytes_of(n, LARGE) for n in range(3)])
        assert made.lines[1].heavy == {0}
        made.channels()  # a turn in which nothing begins, as where other tasks run
        assert made.lines[1].heavy == {0}
        made.step([bytes_of(n, 64) for n in range(3)])
        assert made.lines[1].heavy == set()
        one, two = made.channels()
        two.begin()
        assert not reading(made)
        one.send((0, 1), 0, bytes_of(0, 64))
        assert torch.equal(two.receive((0, 1))[1], bytes_of(0, 64))


def test_messages_that_were_faster_than_the_readers_turn_are_counted() -> None:
    with pair(3, timeout=20.0, far=True) as made:
        made.step([bytes_of(n, LARGE) for n in range(3)])
        one, two = made.channels()
        for number in range(2):
            one.send((0, 1), 0, bytes_of(number, LARGE))
        lines, end = made.lines[1], time.monotonic() + 10
        while len(lines.inbox[0]) < 2:
            lines.wait(0, end)
        two.begin()
        one.send((0, 1), 0, bytes_of(2, LARGE))
        assert [bool(torch.equal(two.receive((0, 1))[1], bytes_of(n, LARGE))) for n in range(3)] == [True] * 3
        assert not reading(made)
        beside = threading.Thread(target=lambda: made.lines[0].exchange([1.0], 10.0))
        beside.start()
        assert lines.exchange([2.0], 10.0) == [[1.0], [2.0]]  # read by the thread that waits for it
        beside.join()


@given(st.lists(st.lists(st.sampled_from([1, 3000, LARGE - 1, LARGE, 3 * LARGE]), min_size=5, max_size=5),
                min_size=1, max_size=4), st.booleans())
@settings(max_examples=25, deadline=None)
def test_values_of_all_sizes_keep_their_order(turns: list[list[int]], slow: bool) -> None:
    with pair(5, timeout=20.0, far=True) as made:
        if slow:
            narrow(made)
        for turn, sizes in enumerate(turns):
            sent = [bytes_of(5 * turn + n, size) for n, size in enumerate(sizes)]
            for a, b in zip(sent, made.step(sent), strict=True):
                assert torch.equal(a, b)


def test_ranks_that_send_much_to_each_other_while_both_work() -> None:
    """64 MiB each, in both directions at once; nobody looks at anything until all of it has left."""
    one, two = connected_sockets()
    ends = [FarLines(0, {1: one}), FarLines(1, {0: two})]
    parts, found = 4, [False, False]

    def talk(me: int) -> None:
        lines = ends[me]
        lines.heavy.add(1 - me)
        lines.expect(1 - me, parts)
        for task in range(parts):
            value = torch.full((16 * MIB,), 2 * task + me, dtype=torch.uint8)
            lines.give(1 - me, 0, task, 0, b"", [value.numpy().data], [value])
        end = time.monotonic() + 30
        while lines.writing(1 - me) and time.monotonic() < end:
            time.sleep(0.01)
        gone = not lines.writing(1 - me)
        while len(lines.inbox[1 - me]) < parts:
            lines.wait(1 - me, end)
        found[me] = gone and all(
            own.task == task and bool((own.content[0] == 2 * task + 1 - me).all())
            for task, own in enumerate(lines.inbox[1 - me])
        )

    at_once(ends, talk)
    assert found == [True, True]


SENDER = """
import os, signal, socket, sys
line = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
line.sendall(bytes.fromhex(sys.argv[2]) + bytes(1 << 20))
sys.stdin.read(1)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("heavy", [True, False])
def test_a_sender_that_is_killed_in_the_middle_of_a_value(heavy: bool) -> None:
    """What has come of it is no value; the reader hears of it at once, whoever reads."""
    with pair(1, timeout=30.0, far=True) as made, socket.create_server(("127.0.0.1", 0)) as door:
        head = NUMBERS.pack(0, 1, made.ends[1].incoming[0][0].op.task, 0, 0, 1, 8 * MIB)
        child = subprocess.Popen(
            [sys.executable, "-c", SENDER, str(door.getsockname()[1]), head.hex()], stdin=subprocess.PIPE
        )
        lines = FarLines(1, {0: door.accept()[0]})
        made.lines[1].close()
        made.lines[1] = lines
        if heavy:
            lines.heavy.add(0)
        _, two = made.channels()
        two.begin()
        assert reading(made) is heavy
        told: list[Any] = []

        def read() -> None:
            with pytest.raises(RankError, match="of microbatch 0 of 0: device 0 has closed its line") as caught:
                two.receive((0, 1))
            told.append(caught.value.rank)

        reader = threading.Thread(target=read)
        reader.start()
        time.sleep(0.1)
        assert child.stdin is not None
        begin = time.monotonic()
        child.stdin.write(b"x")
        child.stdin.close()
        reader.join()
        assert told == [0]
        assert time.monotonic() - begin < 10
        assert child.wait() == -signal.SIGKILL


@pytest.mark.parametrize("heavy", [True, False])
def test_a_reader_that_is_gone_in_the_middle_of_a_value(heavy: bool) -> None:
    """Its sender gives up what it has not written, and ends its thread."""
    with pair(3, timeout=20.0, far=True) as made:
        narrow(made)
        if heavy:
            made.step([bytes_of(n, MIB) for n in range(3)])
        one, two = made.channels()
        two.begin()
        one.send((0, 1), 0, torch.zeros(32 * MIB, dtype=torch.uint8))
        made.lines[1].close()
        end = time.monotonic() + 10
        while made.lines[0].writing(1) and time.monotonic() < end:
            time.sleep(0.01)
        assert not made.lines[0].writing(1)
        with pytest.raises(RankError, match="of 1: device 1 has closed its line"):
            one.send((0, 1), 0, torch.zeros(MIB, dtype=torch.uint8))
    assert not [one.name for one in threading.enumerate() if one.name.startswith("pipec line")]
