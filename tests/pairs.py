"""Two ranks in one process: the ends of one route, over lines of one host or between hosts."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from test_wire import lost

import pipec
from pipec.ir import Kind
from pipec.runtime.distributed.backend import traffic
from pipec.runtime.distributed.far_lines import FarLines
from pipec.runtime.distributed.lines import Lines
from pipec.runtime.distributed.ways import channels_of
from pipec.runtime.distributed.wire import Frame
from pipec.runtime.program import build_program


def connected_sockets() -> tuple[socket.socket, socket.socket]:
    """Both ends of a connection over the loopback interface."""
    with socket.create_server(("127.0.0.1", 0)) as door:
        one = socket.create_connection(door.getsockname())
        two, _ = door.accept()
    return one, two


def at_once(ends: Sequence[Any], talk: Callable[[int], None]) -> None:
    """Both ends talk, each in a thread of its own, and are closed then."""
    beside = threading.Thread(target=talk, args=(0,))
    beside.start()
    talk(1)
    beside.join()
    for lines in ends:
        lines.close()


class Pair:
    """The two ends of one route 0 -> 1, over as many steps as wanted."""

    def __init__(self, count: int, timeout: float, far: bool) -> None:
        plan = pipec.compile(pipec.chain(2), 2, count, forward_only=True)
        program = build_program(plan)
        self.ops = [[op for op in row if op.kind is not Kind.UPDATE] for row in program.ops]
        self.ends = [traffic(plan, program.ops, rank) for rank in (0, 1)]
        self.frames: list[dict[Any, Frame]] = [{}, {}]
        self.lines: list[Any]
        if far:
            one, two = connected_sockets()
            self.lines = [FarLines(0, {1: one}), FarLines(1, {0: two})]
        else:
            one, two = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            self.lines = [Lines(0, {1: one}, timeout), Lines(1, {0: two}, timeout)]
        self.timeout = timeout

    def channels(self) -> list[Any]:
        return [
            channels_of(self.lines[rank], rank, own, self.frames[rank], None, self.timeout, lost)
            for rank, own in enumerate(self.ends)
        ]

    def step(self, payloads: list[Any]) -> list[Any]:
        """Send, receive, and keep the forms as after a step that succeeded."""
        one, two = self.channels()

        def give() -> None:
            for payload in payloads:
                one.send((0, 1), 0, payload)
            one.finish()

        sender = threading.Thread(target=give)
        sender.start()
        two.begin()
        got = [two.receive((0, 1))[1] for _ in payloads]
        sender.join()
        for frames, channels in zip(self.frames, (one, two), strict=True):
            frames.update(channels.learned)
        self.learned = [list(one.learned), list(two.learned)]
        return got

    def close(self) -> None:
        for lines in self.lines:
            lines.close()


@contextmanager
def pair(count: int, timeout: float = 5.0, far: bool = False) -> Iterator[Pair]:
    made = Pair(count, timeout, far)
    try:
        yield made
    finally:
        made.close()
