"""One connection between two ranks on different hosts: records, each with bytes of its own and the tensors it brings.

The thread that runs the tasks writes a record straight from the memory of its tensors and reads one straight into
theirs; no other thread wakes up for that. What the kernel does not take at once, as more is on its way than its
buffers hold, a thread of the line writes beside the tasks. Where contents are large another one reads all that comes
in a turn: the kernel holds a part of such a value only, and whoever reads late lets the link stand still. Both threads
begin with the first work they get.
"""

from __future__ import annotations

import ctypes
import os
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, NamedTuple

import torch
from torch import Tensor

NUMBERS = struct.Struct("<7q")  # of a record: status, turn, task, how many messages of the other direction have been
# read, bytes of its own behind the numbers, tensors it brings, bytes of the first of them; those of more stand in front
# of its own
SIZE = struct.Struct("<q")
PARTS = 512  # buffers given to the kernel at once
SMALL = 1 << 18  # bytes: what is left of less is copied, so that its memory is free again

AT_ONCE, WHOLE = getattr(socket, "MSG_DONTWAIT", 0), getattr(socket, "MSG_WAITALL", 0)


class Arrival(NamedTuple):
    """A record from another rank.

    Attributes:
        turn: run of a task list, counted alike on all ranks.
        task: the COPY.
        known: messages of the other direction that have been read.
        rest: bytes of its own.
        content: what it brings, tensors of bytes.
    """

    status: int
    turn: int
    task: int
    known: int
    rest: bytes
    content: tuple[Tensor, ...]


class Parts(NamedTuple):
    """Memory to be written, and the tensors that hold it."""

    views: list[Any]
    size: int
    tensors: Sequence[Tensor]


def memory_of(tensor: Tensor, size: int) -> Any:
    """The memory of a tensor without gaps, ``size`` bytes of it; for use while the tensor lives."""
    return (ctypes.c_char * size).from_address(tensor.data_ptr())


def room(size: int) -> Tensor:
    """Memory that any mode of autograd may use later."""
    if torch.is_inference_mode_enabled():
        with torch.inference_mode(False):
            return torch.empty(size, dtype=torch.uint8)
    return torch.empty(size, dtype=torch.uint8)


def behind(views: Sequence[Any], count: int) -> list[Any]:
    """What follows the first ``count`` bytes."""
    left: list[Any] = []
    for view in views:
        if count >= len(view):
            count -= len(view)
            continue
        left.append(memoryview(view)[count:] if count else view)
        count = 0
    return left


class Line:
    """A connected socket, which is the line's from now on.

    Attributes:
        number: its descriptor.
        fetching: a thread reads; meanwhile nobody else does.
    """

    def __init__(self, connection: socket.socket, wake: Callable[[], None]) -> None:
        """``wake``: called by the threads when there is something new."""
        connection.settimeout(None)  # what must not wait says so call by call
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        _kept_alive(connection)
        self._socket, self._wake, self.number = connection, wake, connection.fileno()
        self._head = memoryview(bytearray(NUMBERS.size))
        self._views: list[Any] = [self._head]  # to be filled
        self._numbers: tuple[int, ...] | None = None
        self._rest: bytearray | None = None
        self._content: list[Tensor] | None = None
        self._came: deque[Arrival | Exception] = deque()
        self._fetches: SimpleQueue[int] | None = None
        self._jobs: SimpleQueue[Parts | None] | None = None
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._left = 0  # jobs that the writer has not ended
        self._failed: OSError | None = None
        self.fetching = False

    # -- writing --------------------------------------------------------------------------------------------

    def write(
        self, status: int, turn: int, task: int, known: int, rest: bytes = b"", content: Sequence[Any] = (),
        tensors: Sequence[Tensor] = (),
    ) -> None:
        """Send a record.

        Args:
            content: the memory of what it brings.
            tensors: they hold that memory.

        Raises:
            OSError: nothing can be sent any more.
        """
        count = len(content)
        if count > 1:
            rest = b"".join([*(SIZE.pack(len(view)) for view in content), rest])
        first = len(content[0]) if count else 0
        head = NUMBERS.pack(status, turn, task, known, len(rest), count, first)
        views = [head + rest if rest else head, *content]
        size = NUMBERS.size + len(rest) + (first if count < 2 else sum(map(len, content)))
        sent = 0
        if not self._left:
            if self._failed is not None:
                raise self._failed
            with suppress(BlockingIOError):
                sent = self._socket.sendmsg(views[:PARTS], (), AT_ONCE)
            if sent == size:
                return
        views = behind(views, sent)
        if size - sent <= SMALL:
            views, tensors = [b"".join(views)], ()
        self._later(Parts(views, size - sent, tensors))

    def _later(self, parts: Parts) -> None:
        if self._jobs is None:
            self._jobs = SimpleQueue()
            self._begin(self._writes, self._jobs, "writes")
        with self._lock:
            self._left += 1
        self._jobs.put(parts)

    def _begin(self, work: Callable[[Any], None], queue: Any, name: str) -> None:
        thread = threading.Thread(target=work, args=(queue,), name=f"pipec line {name}", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _writes(self, jobs: SimpleQueue[Parts | None]) -> None:
        while (parts := jobs.get()) is not None:
            views = parts.views if self._failed is None else []
            try:
                while views:
                    views = behind(views, self._socket.sendmsg(views[:PARTS]))
            except OSError as error:
                self._failed = error
            del parts, views  # only now: the tensors hold the memory that was written from
            with self._lock:
                self._left -= 1
                idle = not self._left
            if idle:
                self._wake()

    @property
    def writing(self) -> bool:
        """Whether something is left to be written."""
        return self._left > 0

    # -- reading --------------------------------------------------------------------------------------------

    def read(self) -> Arrival:
        """The next record, when all of it has come.

        Raises:
            BlockingIOError: it has not.
            EOFError: nothing comes any more.
            OSError: the connection is lost.
        """
        fetching = self.fetching
        if self._came:
            found = self._came.popleft()
            if isinstance(found, Exception):
                raise found
            return found
        if fetching:
            raise BlockingIOError
        return self._read(AT_ONCE)

    def _read(self, flags: int) -> Arrival:
        while True:
            views = self._views
            while views:
                if len(views) == 1:
                    count = self._socket.recv_into(views[0], 0, flags)
                else:
                    count = self._socket.recvmsg_into(views[:PARTS], 0, flags)[0]
                if not count:
                    raise EOFError
                self._views = views = behind(views, count)
            if self._numbers is None:
                self._numbers = numbers = NUMBERS.unpack_from(self._head)
                rest, count, first = numbers[4:]
                self._views = views = []
                if rest:
                    self._rest = bytearray(rest)
                    views.append(memoryview(self._rest))
                if count < 2:
                    self._expect([first] if count else [])
            elif self._content is None:
                if self._rest is None:
                    raise OSError("what came makes no sense")
                count = self._numbers[5]
                self._expect([SIZE.unpack_from(self._rest, SIZE.size * n)[0] for n in range(count)])
                del self._rest[: SIZE.size * count]
            if not self._views and self._content is not None:
                return self._whole(self._numbers, self._content)

    def _expect(self, sizes: Sequence[int]) -> None:
        """Make room for what a record brings."""
        self._content = [room(size) for size in sizes]
        self._views.extend(memory_of(one, size) for one, size in zip(self._content, sizes, strict=True))

    def _whole(self, numbers: tuple[int, ...], content: list[Tensor]) -> Arrival:
        rest = b"" if self._rest is None else bytes(self._rest)
        self._views, self._numbers, self._rest, self._content = [self._head], None, None, None
        return Arrival(numbers[0], numbers[1], numbers[2], numbers[3], rest, tuple(content))

    @property
    def waiting(self) -> bool:
        """Whether records that a thread has read wait to be taken."""
        return bool(self._came)

    def fetch(self, last: int, count: int) -> None:
        """Let a thread read on, until ``count`` records have come whose status is ``last`` at most."""
        if self._fetches is None:
            self._fetches = SimpleQueue()
            self._begin(lambda queue: self._reads(queue, last), self._fetches, "reads")
        self.fetching = True
        self._fetches.put(count)

    def _reads(self, fetches: SimpleQueue[int], last: int) -> None:
        while left := fetches.get():
            try:
                while left:
                    if self._came:
                        self._wake()
                    found = self._read(WHOLE)
                    left -= found.status <= last
                    self._came.append(found)
                    del found  # its memory is the reader's from here on
            except Exception as error:  # raised where the message is asked for
                self._came.append(error)
            self.fetching = False
            self._wake()

    # -- end ------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Close the connection and end the threads."""
        with suppress(OSError):  # the other end was faster
            self._socket.shutdown(socket.SHUT_RDWR)
        if self._jobs is not None:
            self._jobs.put(None)
        if self._fetches is not None:
            self._fetches.put(0)
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()
        self._socket.close()


def _kept_alive(connection: socket.socket) -> None:
    """Let the kernel find out within half a minute that the other host is gone, while nothing is on its way there."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 4)):
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


class Bell:
    """Wakes a thread that polls."""

    def __init__(self) -> None:
        self.number, self._other = os.pipe()
        for number in (self.number, self._other):
            os.set_blocking(number, False)

    def ring(self) -> None:
        with suppress(BlockingIOError):  # it has been rung often enough
            os.write(self._other, b"\0")

    def heard(self) -> None:
        """Be silent again."""
        with suppress(BlockingIOError):
            os.read(self.number, 1 << 12)

    def close(self) -> None:
        os.close(self.number)
        os.close(self._other)
