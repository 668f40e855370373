"""Lines between the ranks of a pipeline on several hosts: a connection for each pair of them.

gloo moves bytes in threads of its own, which take turns with the tasks where a rank has one core, and each message is
agreed upon, to and fro, before its bytes travel. Here the thread that runs the tasks writes to its sockets and reads
from them itself; only large contents travel in threads beside it, see :mod:`.sockets`: from ranks that sent some in the
turn before, or have begun to in this one.
"""

from __future__ import annotations

import pickle
import select
import socket
import weakref
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from torch import Tensor

from pipec.runtime.distributed.records import FAILED, GONE, RecordLines
from pipec.runtime.distributed.sockets import Arrival, Bell, Line

LARGE = 1 << 18  # bytes: contents from which on a thread reads


class Account:
    """What is under way to another rank.

    Attributes:
        held: messages it has not read, with the bytes of each.
        size: their bytes.
    """

    def __init__(self) -> None:
        self.held: deque[tuple[int, int]] = deque()
        self.size = 0

    def hold(self, number: int, size: int) -> None:
        """A message is on its way."""
        self.held.append((number, size))
        self.size += size

    def read(self, known: int) -> None:
        """The reader has all messages before number ``known``."""
        held = self.held
        while held and held[0][0] < known:
            self.size -= held.popleft()[1]


class FarLines(RecordLines):
    """The lines of one rank.

    Attributes:
        accounts: per rank what is under way there.
        heavy: ranks that have sent large contents, when they last sent any.
    """

    def __init__(self, me: int, sockets: dict[int, socket.socket], poll: Any = None) -> None:
        """``poll``: what waits, where it also waits for other lines."""
        super().__init__(me, sockets)
        self._bell = Bell()
        self._lines = {peer: Line(one, self._bell.ring) for peer, one in sockets.items()}
        self._peers = {line.number: peer for peer, line in self._lines.items()}
        self._poll = poll or select.poll()
        self._poll.register(self._bell.number, select.POLLIN)
        for number in self._peers:
            self._poll.register(number, select.POLLIN)
        self._finalizer = weakref.finalize(self, _close, list(self._lines.values()), self._bell)
        self._reset: set[int] = set()  # ranks whose line said so once
        self._fetched: set[int] = set()  # those that a thread reads from
        self.heavy: set[int] = set()
        self.accounts = {peer: Account() for peer in sockets}

    def next_turn(self) -> None:
        self.turn += 1
        for peer in self._others:
            self._fresh(peer)
            self.accounts[peer] = Account()

    # -- sending --------------------------------------------------------------------------------------------

    def tell(self, peer: int, status: int, task: int = 0, known: int = 0, *, rest: bytes = b"") -> None:
        self.give(peer, status, task, known, rest, (), ())

    def give(
        self, peer: int, status: int, task: int, known: int, rest: bytes, content: Sequence[Any],
        tensors: Sequence[Tensor],
    ) -> None:
        """Send a record with what it brings; see :meth:`.sockets.Line.write`.

        Raises:
            RuntimeError: that rank has ended.
        """
        try:
            self._lines[peer].write(status, self.turn, task, known, rest, content, tensors)
        except OSError as error:
            raise self._ending(peer, error) from error

    def writing(self, peer: int) -> bool:
        """Whether something of what was sent still needs its memory."""
        return self._lines[peer].writing

    def give_up(self, story: tuple[int, str]) -> None:
        rest = pickle.dumps((story[0], story[1][:4000]))
        for line in self._lines.values():
            with suppress(OSError):  # that one is gone as well
                line.write(GONE, self.turn, 0, 0, rest)

    # -- receiving ------------------------------------------------------------------------------------------

    def take(self, peer: int) -> bool:
        line = self._lines[peer]
        try:
            found = line.read()
        except BlockingIOError:
            return False
        except EOFError:
            return self._over(peer, f"device {peer} has closed its line")
        except Exception as error:
            if isinstance(error, ConnectionError) and peer not in self._reset:
                self._reset.add(peer)  # it left something unread; what it has sent can still be read
                return self.take(peer)
            return self._over(peer, self._why(peer, error))
        if found.turn == self.turn and found.known > self.known[peer]:
            self.known[peer] = found.known
        if found.status <= FAILED:
            self.inbox[peer].append(found)
            self._weigh(peer, found)
        else:
            self._note(peer, found.status, found.rest)
        return True

    def _why(self, peer: int, error: Exception) -> str:
        if isinstance(error, TimeoutError):  # it is the kernel that gives up, and not the runner
            return f"the host of device {peer} cannot be reached"
        return super()._why(peer, error)

    def _weigh(self, peer: int, found: Arrival) -> None:
        for one in found.content:
            if len(one) >= LARGE:
                self.heavy.add(peer)
                return

    def expect(self, peer: int, count: int) -> None:
        """A turn begins in which a rank sends ``count`` messages."""
        heavy, early = peer in self.heavy, self.inbox[peer]
        self.heavy.discard(peer)
        for found in early:
            self._weigh(peer, found)
        if heavy:
            self.fetch(peer, count - len(early))

    def fetch(self, peer: int, count: int) -> None:
        """Let a thread read the next ``count`` messages of a rank, which are sure to come, unless one reads already.

        All of them: while a task runs, several may come, and a thread that stopped after the first one would let the
        link stand still. How many there can be unread is up to the sender.
        """
        line = self._lines[peer]
        if count <= 0 or line.fetching or line.waiting or peer in self._ended:
            return
        if peer not in self._fetched:
            self._fetched.add(peer)
            self._poll.unregister(line.number)
        line.fetch(FAILED, count)

    def _over(self, peer: int, text: str) -> bool:
        """Nothing comes from a rank any more."""
        self._ended.setdefault(peer, text)
        number = self._lines[peer].number
        if self._peers.pop(number, None) is not None and peer not in self._fetched:
            self._poll.unregister(number)
        return False

    def _look(self, seconds: float) -> bool:
        ready = self._poll.poll(seconds * 1e3)
        for number, _ in ready:
            self.came(number)
        return bool(ready)

    def came(self, number: int) -> None:
        """Take in what makes a descriptor readable; it may be another one's, or none's any more."""
        if number in self._peers:
            self.take(self._peers[number])
        elif number == self._bell.number:
            self._heard()

    def _heard(self) -> None:
        """Take in what threads have read, and read from the lines that they have done with."""
        self._bell.heard()
        for peer in list(self._fetched):
            line = self._lines[peer]
            done = not line.fetching
            while self.take(peer):
                pass
            if done:
                self._fetched.discard(peer)
                if line.number in self._peers:
                    self._poll.register(line.number, select.POLLIN)

    def _listen(self, number: int, wanted: bool) -> None:
        if wanted:
            self._poll.register(number, select.POLLIN)
        else:
            self._poll.unregister(number)

    def close(self) -> None:
        self._finalizer()


def _close(lines: Sequence[Line], bell: Bell) -> None:
    for line in lines:
        line.close()
    bell.close()
