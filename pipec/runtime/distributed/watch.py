"""Where every rank stands: for the error when one is gone or does not answer.

A rank notes the task it is at in a few bytes of a file that is mapped into memory, so that it costs nothing and
outlives the process; ranks of the same host map it too. The file has lost its name by then, so that nothing stays
behind, however all of them end. Once a second a thread puts the same into
torch.distributed's store for ranks on other hosts. A rank that misses another says so in the store and in its note, so
that those who lose their connection only because of that name the right one; the store may be gone with its process.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import pickle
import socket
import struct
import tempfile
import threading
import weakref
from collections.abc import Callable
from queue import Empty, SimpleQueue
from time import monotonic
from typing import Any

from pipec.runtime.distributed.group import own_store

BEAT = 1.0  # seconds between two notes in the store
SOON = 5.0  # seconds after which a store that is asked about others does not answer
RECORD = struct.Struct("4q")  # call, task (-1: between tasks), microbatches of the call (negative in evaluation), and
# which rank, counted from 1, this one has given up because it misses that


class Watch:
    """This rank's note, and those of the others.

    Args:
        name: the same on every rank, other than that of any other runner.
        me, size: this rank's place among ``size``.
    """

    def __init__(self, name: str, me: int, size: int) -> None:
        self._store = own_store(f"pipec/{name}")
        self.me, self.size = me, size
        number, self._path = tempfile.mkstemp(prefix=f"pipec-{os.getpid()}-")
        os.ftruncate(number, mmap.PAGESIZE)
        self._map = mmap.mmap(number, mmap.PAGESIZE)
        os.close(number)
        self._note = memoryview(self._map).cast("q")
        self._notes: dict[int, mmap.mmap] = {}  # of other ranks on this host
        self._silent = False  # the store has not answered
        self.call = 0
        self.at(-1)
        self._store.set(f"where/{me}", pickle.dumps((socket.gethostname(), self._path)))
        self._end = threading.Event()
        self._finalizer = weakref.finalize(self, _close, self._end, self._path)
        threading.Thread(
            target=_beat, args=(self._store, me, self._map, self._end), name=f"pipec watch {me}", daemon=True
        ).start()

    def meet(self) -> None:
        """Map the notes of ranks on this host, when all have made theirs."""
        for rank in range(self.size):
            with contextlib.suppress(RuntimeError, OSError, ValueError):
                host, path = pickle.loads(self._store.get(f"where/{rank}"))
                if host == socket.gethostname():
                    with open(path, "rb") as file:
                        self._notes[rank] = mmap.mmap(file.fileno(), RECORD.size, access=mmap.ACCESS_READ)

    def hide(self) -> None:
        """Remove the name of this rank's file, when all have met."""
        with contextlib.suppress(OSError):
            os.unlink(self._path)

    def at(self, task: int) -> None:
        """This rank begins ``task``; -1: it has none."""
        self._note[1] = task

    def begin(self) -> None:
        """A call of the runner begins."""
        self.call += 1
        self._note[0], self._note[2] = self.call, 0

    def runs(self, microbatches: int, training: bool) -> None:
        """It is a step, or an evaluation, of so many microbatches."""
        self._note[2] = microbatches if training else -microbatches

    def where(self, rank: int) -> tuple[int, int, int] | None:
        """The note of a rank, None when it cannot be had."""
        note = self._read(rank)
        return None if note is None else (note[0], note[1], note[2])

    def _read(self, rank: int) -> tuple[int, int, int, int] | None:
        if rank in self._notes:
            return RECORD.unpack(self._notes[rank][: RECORD.size])
        with contextlib.suppress(RuntimeError, struct.error):
            return RECORD.unpack(self._asked(lambda: self._found(f"at/{rank}")))
        return None

    def _found(self, key: str) -> bytes:
        """What the store has under a key; nothing where it has none."""
        return bytes(self._store.get(key)) if self._store.check([key]) else b""

    def _asked(self, ask: Callable[[], Any]) -> Any:
        """What the store answers, which may be on a host that cannot be reached.

        Raises:
            RuntimeError: it is gone, or does not answer soon.
        """
        if self._silent:
            raise RuntimeError("the store does not answer")
        answers: SimpleQueue[tuple[bool, Any]] = SimpleQueue()

        def wait() -> None:
            try:
                answers.put((True, ask()))
            except Exception as error:
                answers.put((False, error))

        threading.Thread(target=wait, name=f"pipec asks {self.me}", daemon=True).start()
        try:
            fine, answer = answers.get(timeout=SOON)
        except Empty:
            self._silent = True
            raise RuntimeError("the store does not answer") from None
        if not fine:
            raise RuntimeError(str(answer)) from answer
        return answer

    def misses(self, rank: int) -> None:
        """This rank gives up because ``rank`` has ended."""
        self._note[3] = rank + 1

    def first_missed(self, rank: int) -> int:
        """``rank`` has ended: because it misses another, that one, and so on."""
        seen = {self.me}
        while rank not in seen:
            seen.add(rank)
            note = self._read(rank)
            if note is None or not note[3] or note[3] - 1 in seen:
                break
            rank = note[3] - 1
        return rank

    def culprit(self, rank: int, tell: Callable[[], str]) -> tuple[int, str]:
        """The rank that was missed first, and what was said about it; ``rank`` if nobody missed another before."""
        with contextlib.suppress(RuntimeError):
            told = self._asked(lambda: self._found("culprit"))
            if told:
                first: tuple[int, str] = pickle.loads(told)
                return first
        found = rank, tell()
        with contextlib.suppress(RuntimeError):
            self._asked(lambda: self._store.set("culprit", pickle.dumps(found)))
        return found

    def beats(self, rank: int) -> int:
        """How often a rank's thread has told that it lives; -1: nobody knows, as the store is gone."""
        try:
            return int(self._store.add(f"beats/{rank}", 0))
        except RuntimeError:
            return -1

    def close(self) -> None:
        self._finalizer()


class Pulse:
    """Which rank has stopped to tell that it lives, since this was made."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self._seen: dict[int, tuple[int, float]] = {}  # by rank its beats, and when the last one was noticed
        self._next = 0.0

    def silent(self, seconds: float) -> int | None:
        """A rank that has not beaten for so long; looked for once a beat."""
        now = monotonic()
        if now < self._next:
            return None
        self._next = now + BEAT
        for rank in range(self._watch.size):
            beats = self._watch.beats(rank)
            before, since = self._seen.get(rank, (beats, now))
            self._seen[rank] = beats, (since if beats == before else now)
            if rank != self._watch.me and now - self._seen[rank][1] > seconds:
                return rank
        return None


def _beat(store: Any, me: int, note: mmap.mmap, end: threading.Event) -> None:
    while not end.wait(BEAT):
        try:
            store.set(f"at/{me}", bytes(note[: RECORD.size]))
            store.add(f"beats/{me}", 1)
        except RuntimeError:  # the store is gone; so is whoever would read it
            return


def _close(end: threading.Event, path: str) -> None:
    end.set()
    with contextlib.suppress(OSError):
        os.unlink(path)
