"""Lines between the ranks of a pipeline: records from each to each, read by the thread that waits for one.

What the lines of one host (:mod:`.lines`) and those between hosts (:mod:`.far_lines`) have in common.
"""

from __future__ import annotations

import pickle
import struct
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Sequence
from time import monotonic
from typing import Any, Protocol

from pipec.errors import RankError

SAME, CHANGED, FAILED, KNOWN, ROW, DROP, GONE = range(7)  # what a record says; the first three are messages
MOST = 64  # ranks: beyond, a rank would hold too many sockets
DAY = 86_400.0  # seconds
ROW_BYTES = 32_000  # of the longest row of numbers


class GoneError(RuntimeError):
    """A rank has given up because ``rank``, of all the world, is gone."""

    def __init__(self, rank: int, text: str) -> None:
        super().__init__(text)
        self.rank = rank


class Waits(Protocol):
    """Where a rank notes for whom it waits.

    Attributes:
        alarm: a descriptor that is readable when the run cannot go on.
        alarmed: whether it is.
    """

    alarm: int

    @property
    def alarmed(self) -> bool: ...

    def begins(self, peer: int) -> None:
        """This rank waits for another one, -1: for all. Where it gives up, it is left at that."""

    def ends(self) -> None:
        """It does not any more."""


class Unwatched:
    """Nobody wants to know."""

    alarm = -1
    alarmed = False

    def begins(self, peer: int) -> None:
        """Not noted."""

    def ends(self) -> None:
        """Not noted."""


class RecordLines(ABC):
    """The lines of one rank.

    Attributes:
        turn: the run of a task list that this rank is in.
        inbox: per rank the messages that have come and were not looked at.
        known: per rank how many messages of this turn it has read.
    """

    def __init__(self, me: int, peers: Iterable[int]) -> None:
        self.me, self._others = me, tuple(peers)
        self._ended: dict[int, str] = {}  # ranks whose line is closed
        self._told: dict[int, tuple[int, str]] = {}  # what ranks said that gave up because another is gone
        self._rows: dict[int, deque[bytes]] = {peer: deque() for peer in self._others}
        self.inbox: dict[int, deque[Any]] = {peer: deque() for peer in self._others}
        self.known = dict.fromkeys(self._others, 0)
        self.turn = 0
        self._waits: Waits = Unwatched()
        self._stopped = False

    def watched(self, waits: Waits) -> None:
        """Note from now on who is waited for, and stop to wait when the run cannot go on."""
        self._waits = waits
        self._listen(waits.alarm, True)

    @abstractmethod
    def _listen(self, number: int, wanted: bool) -> None:
        """Wake up when a descriptor is readable, or not any more."""

    @abstractmethod
    def next_turn(self) -> None:
        """All ranks have come to the end of the turn before, so nothing of it is needed any more."""

    @abstractmethod
    def tell(self, peer: int, status: int, task: int = 0, known: int = 0, *, rest: bytes = b"") -> None:
        """Send a record.

        Raises:
            RuntimeError: that rank has ended.
        """

    @abstractmethod
    def take(self, peer: int) -> bool:
        """Take in one record from a rank, if there is one."""

    @abstractmethod
    def give_up(self, story: tuple[int, str]) -> None:
        """Tell every rank that nothing comes from here any more, as far as it goes."""

    @abstractmethod
    def close(self) -> None:
        """Close all lines."""

    def fits(self, width: int) -> bool:
        """Whether rows of so many numbers can be exchanged here, alike on all ranks whatever lines they have."""
        return 8 * width <= ROW_BYTES

    def share(self, other: RecordLines) -> None:
        """Keep what comes, and who has ended, where ``other`` looks for it."""
        self.inbox, self.known, self._rows = other.inbox, other.known, other._rows
        self._ended, self._told = other._ended, other._told

    @abstractmethod
    def _look(self, seconds: float) -> bool:
        """Wait until something has come on any line, and take it in; False when nothing has."""

    def _fresh(self, peer: int) -> None:
        """A turn begins: what nobody waits for would fill a line in time."""
        self.known[peer] = 0
        inbox = self.inbox[peer]
        while self.take(peer):
            pass
        while inbox and inbox[0].turn < self.turn:
            inbox.popleft()

    def _note(self, peer: int, status: int, rest: bytes) -> None:
        """Keep what a record says that is no message."""
        if status == ROW:
            self._rows[peer].append(rest)
        elif status == GONE:
            self._told.setdefault(peer, pickle.loads(rest))

    def _ending(self, peer: int, error: Exception) -> RuntimeError:
        """Why nothing can be sent to a rank: what it said last, if it did."""
        while self.take(peer):
            pass
        if peer in self._told:
            return GoneError(*self._told[peer])
        if isinstance(error, BlockingIOError):
            return RuntimeError("timed out: the line is full")
        return RuntimeError(self._ended.setdefault(peer, self._why(peer, error)))

    def _why(self, peer: int, error: Exception) -> str:
        """What is said about a line that is lost."""
        return f"the line to device {peer}: {error}"

    def wait(self, peer: int, end: float) -> None:
        """Wait until something has come on any line, and take it in.

        Args:
            peer: the rank that the caller waits for.
            end: the time of :func:`time.monotonic` at which it gives up.

        Raises:
            GoneError: that rank has given up because another is gone.
            RuntimeError: it has ended, or nothing came in time.
        """
        if peer in self._told:
            raise GoneError(*self._told[peer])
        if peer in self._ended:
            raise RuntimeError(self._ended[peer])
        if self._waits.alarmed:
            self._stop()
            return
        left = end - monotonic()
        self._waits.begins(peer)
        if not self._look(max(0.0, min(left, DAY))) and left <= 0:
            raise RuntimeError("timed out")
        self._waits.ends()

    def _stop(self) -> None:
        """A rank is gone: take in what has come, which may be all that this one needs.

        Raises:
            RuntimeError: nothing has.
        """
        if not self._stopped:
            self._stopped = True
            self._listen(self._waits.alarm, False)
        if not self._look(0.0):
            raise RuntimeError("a rank is gone")

    def exchange(self, row: Sequence[float], timeout: float) -> list[list[float]]:
        """Everybody's row of numbers; every rank gives one of the same length.

        Raises:
            RankError: a rank has ended or does not answer in time.
        """
        form = struct.Struct(f"{len(row)}d")
        data = form.pack(*row)
        table: list[list[float]] = [[] for _ in range(len(self._others) + 1)]
        table[self.me] = list(row)
        peer, end = -1, monotonic() + timeout
        try:
            for peer in self._others:
                self.tell(peer, ROW, rest=data)
            for peer, rows in self._rows.items():
                while not rows:
                    self.wait(peer, end)
                table[peer] = list(form.unpack(rows.popleft()))
        except RuntimeError as error:
            raise RankError(f"rank {peer} has ended or does not answer: {error}", peer) from error
        return table
