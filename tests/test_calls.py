"""How ranks on several hosts get their sockets, keep them, and what is said when one of them is gone."""

from __future__ import annotations

import socket
import struct
import threading
import time
from typing import Any

import pytest
import torch
from ranks import crew
from test_far import threads

import pipec
from pipec.runtime.distributed import calls


def test_a_call_without_the_key_is_not_taken_for_a_ranks() -> None:
    door = socket.create_server(("127.0.0.1", 0))
    place, key = door.getsockname(), bytes(range(32))
    strangers = [socket.create_connection(place) for _ in range(4)]
    strangers[0].sendall(b"GET / HTTP/1.1\r\n\r\n" + 40 * b"x")
    strangers[1].sendall(struct.pack("<q", 1) + calls._signature(bytes(32), 1, 0))
    strangers[2].sendall(struct.pack("<q", 0) + calls._signature(key, 0, 0))
    strangers[3].sendall(struct.pack("<q", 2) + calls._signature(key, 1, 0))
    caller = socket.create_connection(place)
    caller.sendall(struct.pack("<q", 1) + calls._signature(key, 1, 0))
    lines: dict[int, socket.socket] = {}
    with door:
        assert calls._answered(door, lines, key, 0, 2) == ""
    assert lines[1].getpeername() == caller.getsockname()
    assert calls._received(caller, 32, time.monotonic() + 5) == calls._signature(key, 0, 1)
    for one in (*strangers, caller, *lines.values()):
        one.close()


def test_calls_that_never_come_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "PATIENCE", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as door:
        assert calls._answered(door, {}, bytes(32), 1, 4) == "device 1 has waited 0.1 s for calls of devices 2, 3"


def addresses(rank: int) -> list[str]:
    found = []
    for name in ("lo", "nothing-of-the-kind,lo", ""):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("GLOO_SOCKET_IFNAME", name)
            found.append(calls.own_address())
    return found


def test_the_interface_that_the_process_group_is_told_of_is_taken(crew2: Any) -> None:
    for found in crew2(addresses):
        assert found[:2] == ["127.0.0.1"] * 2
        socket.inet_pton(socket.AF_INET6 if ":" in found[2] else socket.AF_INET, found[2])


def unreachable(rank: int) -> Any:
    """Rank 0 gives an address where somebody else is."""
    from datetime import timedelta

    from pipec.runtime.distributed.group import new_group

    group = new_group([0, 1], timedelta(seconds=30))
    with pytest.MonkeyPatch.context() as patch, socket.create_server(("127.0.0.1", 0)) as other:
        patch.setattr(calls, "PATIENCE", 1.0)
        if rank == 0:
            opened = calls._opened
            patch.setattr(calls, "_opened", lambda *how: (opened(*how)[0], other.getsockname()[:2], ""))
        made = calls.called(group, rank, 2)
    return made.lines, made.why


def test_a_rank_that_cannot_be_called_is_told_to_all(crew2: Any) -> None:
    found = crew2(unreachable)
    assert found[0] == found[1]
    lines, why = found[0]
    assert lines is None
    assert why == "device 0 has waited 1 s for calls of devices 1"


# -- real processes -------------------------------------------------------------------------------------------------


def leaves(rank: int) -> list[int]:
    """What is open, and which threads run, before and after a runner whose values are large."""
    import os

    from pipec.runtime.distributed.ranks import Ranks

    found = []
    ways, Ranks.ways = Ranks.ways, ("sockets",)
    try:
        for _ in range(3):
            net = pipec.Pipeline("large")
            x = net.input("x")
            value = net.stage("s0", torch.nn.Linear(512, 512), x)
            net.loss("sum", torch.sum, net.stage("s1", torch.nn.Linear(512, 512), value), reduction="sum")
            with pipec.Runner(net, pipec.compile(net, 2, 4)) as run:
                for _ in range(3):
                    run.step(x=torch.ones(4 * 512, 512))
                assert len(threads()) >= 1
            assert threads() == []
            found.append(len(os.listdir("/proc/self/fd")))
    finally:
        Ranks.ways = ways
    return found


def test_closing_leaves_no_socket_and_no_thread(crew2: Any) -> None:
    for first, second, third in crew2(leaves):
        assert first == second == third


def hangs_after_its_turn(rank: int) -> None:
    """Rank 1 lives and does nothing: both its line and its process are there."""
    from pipec.runtime.distributed.ranks import Ranks

    Ranks.ways = ("sockets",)
    net = pipec.Pipeline("two")
    x = net.input("x")
    net.loss("sum", torch.sum, net.stage("b", torch.nn.Linear(4, 4), net.stage("a", torch.nn.Linear(4, 4), x)),
             reduction="sum")
    with pipec.Runner(net, pipec.compile(net, 2, 2), timeout=1.0) as run:
        run.step(x=torch.ones(4, 4))
        if rank == 1:
            time.sleep(3)
            return
        run.step(x=torch.ones(4, 4))


def test_a_rank_that_does_not_answer_is_named_after_the_timeout() -> None:
    with crew(2) as made:
        ((word, told),) = made.answers(hangs_after_its_turn, of=1)
    assert (word, told[0]) == ("raised", "RankError")
    assert "rank 1 has not answered for 1 s" in told[1]


class Mute:
    """A store on a host that cannot be reached."""

    def __init__(self) -> None:
        self.asked, self.over = 0, threading.Event()

    def check(self, keys: list[str]) -> bool:
        self.asked += 1
        self.over.wait(20)
        return False

    set = check


def watched(rank: int) -> Any:
    from pipec.runtime.distributed import bulletin as module

    heard: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "SOON", 0.1)
        made = module.Bulletin(f"mute {rank}", 0, [1], bytes, heard.append)
        real, made._store = made._store, Mute()
        begin = time.monotonic()
        made.look([1])
        made.tell((1, "rank 1 has ended"))
        took = time.monotonic() - begin
        asked = made._store.asked
        made._store.over.set()
        made._store = real
        made.close()
    return dict(made.looks), heard, asked, took < 5


def test_a_store_that_cannot_be_reached_holds_nobody_up(crew2: Any) -> None:
    assert crew2(watched) == [({}, [], 1, True)] * 2
