"""Lines between the ranks of a pipeline that all run on one host: short records over sockets, read by whoever waits.

gloo moves bytes in threads of its own, which take turns with the tasks where a rank has one core, and wake each other
for every message. Here a value stands in memory that both ranks share (:mod:`.blocks`), a record of a few numbers says
so, and the thread that waits for it is woken by the kernel itself. The kernel also tells at once that a rank has ended,
even where children that it forked, a data loader's workers say, still hold its lines open.
"""

from __future__ import annotations

import errno
import os
import pickle
import select
import socket
import struct
import weakref
from array import array
from collections.abc import Sequence
from contextlib import suppress
from time import perf_counter
from typing import Any, NamedTuple

import torch.distributed as dist

from pipec.runtime.distributed.blocks import Block, Pool, Seen, Unseen
from pipec.runtime.distributed.doors import owner, reached
from pipec.runtime.distributed.records import DROP, FAILED, GONE, MOST, RecordLines

NUMBERS = struct.Struct("8q")  # of a record: status, turn, task, how many messages of the other direction have been
# read, block, its size where it is told of for the first time, place and length of a description in it
TIME = struct.Struct("2l")  # seconds and microseconds, as the kernel has them
ROOM = 1 << 16  # bytes of the longest record
AWAKE = 100e-6  # seconds a rank looks for a record before it sleeps; to be woken takes about half of that
FILE = socket.CMSG_SPACE(array("i", [0]).itemsize) if hasattr(socket, "CMSG_SPACE") else 0


class Record(NamedTuple):
    """A message from another rank.

    Attributes:
        turn: run of a task list, counted alike on all ranks.
        task: the COPY.
        block: where its content is, -1 for none.
        at, length: place in the block, and bytes, of the description of a message that has another form than expected.
        rest: bytes behind the numbers.
    """

    status: int
    turn: int
    task: int
    block: int
    at: int
    length: int
    rest: bytes


class Lines(RecordLines):
    """The lines of one rank, and the memory it shares over them.

    Attributes:
        pools: per rank the blocks for what goes there.
    """

    def __init__(
        self, me: int, sockets: dict[int, socket.socket], timeout: float, awake: float = 0.0, poll: Any = None
    ) -> None:
        """
        Args:
            timeout: seconds after which a rank is given up whose line is full, as it does not read.
            awake: seconds to look for a record before the thread sleeps.
            poll: what waits, where it also waits for other lines.
        """
        super().__init__(me, sockets)
        self._sockets, self._awake = sockets, awake
        for line in sockets.values():
            line.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, TIME.pack(int(timeout), int(timeout % 1 * 1e6)))
        self._poll = poll or select.poll()
        self._peers = {line.fileno(): peer for peer, line in sockets.items()}
        for number in self._peers:
            self._poll.register(number, select.POLLIN)
        self._ends: dict[int, int] = {}  # descriptors of the ranks' processes: readable when one has ended
        for peer, line in sockets.items():
            with suppress(OSError, AttributeError):  # where the kernel has none, or the process has another name there
                number = os.pidfd_open(owner(line)[0])
                self._poll.register(number, select.POLLIN)
                self._ends[number] = peer
        self._finalizer = weakref.finalize(self, _close, list(sockets.values()), list(self._ends))
        self._buffer = memoryview(bytearray(ROOM))
        self._reset: set[int] = set()  # those whose line said so once
        self._seen: dict[int, dict[int, Seen | Unseen]] = {peer: {} for peer in sockets}
        self.pools = {peer: Pool() for peer in sockets}

    def next_turn(self) -> None:
        self.turn = turn = self.turn + 1
        for peer in self._others:
            self._fresh(peer)
            for block in self.pools[peer].trimmed(turn):
                with suppress(RuntimeError):  # it has ended: found out by whoever waits for it
                    self.tell(peer, DROP, block=block.number)

    # -- sending --------------------------------------------------------------------------------------------

    def tell(
        self, peer: int, status: int, task: int = 0, known: int = 0, block: int = 0, at: int = 0, length: int = 0,
        rest: bytes = b"",
    ) -> None:
        data = NUMBERS.pack(status, self.turn, task, known, block, 0, at, length)
        try:
            self._sockets[peer].send(data + rest if rest else data)
        except OSError as error:
            raise self._ending(peer, error) from error

    def announce(self, peer: int, status: int, task: int, known: int, block: Block, at: int, length: int) -> None:
        """Send the record of a message that is the first one in its block.

        Raises:
            RuntimeError: that rank has ended.
        """
        data = NUMBERS.pack(status, self.turn, task, known, block.number, block.size, at, length)
        file = array("i", [block.file])
        try:
            self._sockets[peer].sendmsg([data], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, file)])
        except OSError as error:
            raise self._ending(peer, error) from error
        os.close(block.file)
        block.file = -1

    def give_up(self, story: tuple[int, str]) -> None:
        data = NUMBERS.pack(GONE, self.turn, 0, 0, 0, 0, 0, 0) + pickle.dumps((story[0], story[1][:4000]))
        for line in self._sockets.values():
            try:
                line.send(data, socket.MSG_DONTWAIT)
            except OSError:  # that one is gone as well, or does not read
                continue

    # -- receiving ------------------------------------------------------------------------------------------

    def take(self, peer: int) -> bool:
        try:
            count, extra, _, _ = self._sockets[peer].recvmsg_into([self._buffer], FILE, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except ConnectionError:  # it left something unread; what it has sent can still be read
            if peer not in self._reset:
                self._reset.add(peer)
                return self.take(peer)
            count = 0
        if not count:
            self._over(peer, f"device {peer} has closed its line")
            return False
        status, turn, task, known, block, size, at, length = NUMBERS.unpack_from(self._buffer)
        rest = bytes(self._buffer[NUMBERS.size : count]) if count > NUMBERS.size else b""
        if size:
            self._map(peer, block, size, extra)
        if turn == self.turn and known > self.known[peer]:
            self.known[peer] = known
        if status <= FAILED:
            self.inbox[peer].append(Record(status, turn, task, block, at, length, rest))
        elif status == DROP:
            self._seen[peer].pop(block, None)
        else:
            self._note(peer, status, rest)
        return True

    def _over(self, peer: int, text: str) -> None:
        """Nothing comes from a rank any more."""
        self._ended.setdefault(peer, text)
        number = self._sockets[peer].fileno()
        if self._peers.pop(number, None) is not None:
            self._poll.unregister(number)

    def _map(self, peer: int, block: int, size: int, extra: Sequence[Any]) -> None:
        files = array("i")
        for _, _, data in extra:
            files.frombytes(data[: len(data) - len(data) % files.itemsize])
        try:
            if not files:
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            self._seen[peer][block] = Seen(files[0], size)
        except (OSError, RuntimeError) as error:  # told to whoever reads a message in it
            self._seen[peer][block] = Unseen(error)
        finally:
            for file in files:
                os.close(file)

    def seen(self, peer: int, block: int) -> Seen | Unseen:
        """A block of another rank's."""
        return self._seen[peer][block]

    def _look(self, seconds: float) -> bool:
        ready = readable(self._poll, seconds, self._awake)
        for number, _ in ready:
            self.came(number)
        return bool(ready)

    def came(self, number: int) -> None:
        """Take in what makes a descriptor readable; it may be another one's, or none's any more."""
        if number in self._peers:
            self.take(self._peers[number])
        elif number in self._ends:
            self._poll.unregister(number)
            one = self._ends[number]
            while self.take(one):
                pass
            self._over(one, f"the process of device {one} has ended")

    def _listen(self, number: int, wanted: bool) -> None:
        if wanted:
            self._poll.register(number, select.POLLIN)
        else:
            self._poll.unregister(number)

    def close(self) -> None:
        self._finalizer()


def readable(poll: Any, seconds: float, awake: float) -> Any:
    """The descriptors that are readable, when some are: looked for again and again for ``awake`` seconds."""
    if awake:
        end = perf_counter() + awake
        while not (ready := poll.poll(0)) and perf_counter() < end:
            pass
        if ready:
            return ready
    return poll.poll(seconds * 1e3)


def _close(sockets: Sequence[socket.socket], files: Sequence[int]) -> None:
    for line in sockets:
        line.close()
    for number in files:
        os.close(number)


# -- making them ----------------------------------------------------------------------------------------------------


def neighbours(group: Any, me: int, size: int) -> tuple[dict[int, socket.socket], bool]:
    """Sockets to those ranks of ``group`` that are processes of this user on this Linux host; whether, on all ranks,
    that is everybody."""
    return reached(group, me, size, MOST)


def attention() -> float:
    """Seconds that this rank may look for records before it sleeps."""
    return awake(len(os.sched_getaffinity(0)), here())


def here() -> int:
    """How many ranks are on this host, as far as torchrun says so, else on all."""
    local = os.environ.get("LOCAL_WORLD_SIZE", "")
    return int(local) if local.isdecimal() else dist.get_world_size()


def awake(cores: int, ranks: int) -> float:
    """Seconds that ranks may look for records before they sleep: none where they take turns on the cores, as the one
    that looks may hold up the one it waits for."""
    return AWAKE if ranks <= cores else 0.0
