"""The watch's connections to other ranks: short records over a socket of their own, never waited for."""

from __future__ import annotations

import os
import pickle
import socket
import struct
import sys
from contextlib import suppress
from threading import Lock

NOTE, STORY, BYE = range(3)  # what a record is: where its rank stands, who is gone and what is said about it, farewell
HEAD = struct.Struct("<2i")  # what it is, bytes that follow
MOST = 1 << 14  # bytes read at once
LONGEST = 4000  # characters of a story
SILENT = 30_000  # milliseconds after which the kernel gives a host up that confirms nothing


class Post:
    """The connection to one other rank.

    Attributes:
        number: its descriptor.
    """

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self._socket, self.number = connection, connection.fileno()
        self._left = b""  # what the kernel has not taken yet
        self._came = b""
        self._lock = Lock()
        if connection.family != getattr(socket, "AF_UNIX", None):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if sys.platform == "linux":
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, SILENT)

    def note(self, data: bytes) -> None:
        """Say where this rank stands; left out where the other one does not read."""
        with self._lock:
            self._send(b"" if self._left else HEAD.pack(NOTE, len(data)) + data)

    def story(self, rank: int, text: str) -> None:
        """Say that a rank is gone."""
        data = pickle.dumps((rank, text[:LONGEST]))
        self.say(STORY, data)

    def say(self, kind: int, data: bytes = b"") -> None:
        """Say something that must arrive, as far as it goes."""
        with self._lock:
            self._send(HEAD.pack(kind, len(data)) + data)

    def _send(self, data: bytes) -> None:
        self._left += data
        with suppress(OSError):  # there is no room now; or it has ended, which reading tells
            while self._left:
                self._left = self._left[self._socket.send(self._left) :]

    def heard(self) -> list[tuple[int, bytes]]:
        """What has come.

        Raises:
            EOFError: nothing will come any more.
        """
        found: list[tuple[int, bytes]] = []
        try:
            while data := self._socket.recv(MOST):
                self._came += data
        except BlockingIOError:
            data = b"-"
        except OSError:
            data = b""
        while len(self._came) >= HEAD.size:
            kind, size = HEAD.unpack_from(self._came)
            if len(self._came) < HEAD.size + size:
                break
            found.append((kind, self._came[HEAD.size : HEAD.size + size]))
            self._came = self._came[HEAD.size + size :]
        if not data and not found:
            raise EOFError
        return found

    def close(self) -> None:
        self._socket.close()


def process_of(connection: socket.socket) -> int | None:
    """A descriptor that is readable when the process at the other end has ended, however many children hold its
    sockets; None where this system has none, or that process is on another host."""
    if connection.family != getattr(socket, "AF_UNIX", None) or not hasattr(os, "pidfd_open"):
        return None
    with suppress(OSError):  # the process has another name there
        data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        return os.pidfd_open(struct.unpack("3i", data)[0])
    return None
