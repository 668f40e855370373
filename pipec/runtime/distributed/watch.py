"""Where every rank stands: for the error when one is gone or does not answer.

A rank notes the task it is at in a few bytes of a file that is mapped into memory, so that it costs nothing and
outlives the process; ranks of the same host read it there. Once a second a thread puts the same into
torch.distributed's store for ranks on other hosts. The first rank that misses another names it in the store, so that
those who lose their connection only because of that name the right one.
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
from typing import Any

import torch.distributed as dist

BEAT = 1.0  # seconds between two notes in the store
RECORD = struct.Struct("3q")  # call, task (-1: between tasks), microbatches of the call; negative in evaluation


class Watch:
    """This rank's note, and those of the others.

    Args:
        name: the same on every rank, other than that of any other runner.
        me, size: this rank's place among ``size``.
    """

    def __init__(self, name: str, me: int, size: int) -> None:
        store = dist.distributed_c10d._get_default_store()
        own = store.clone() if hasattr(store, "clone") else store
        self._store: Any  # its type says that values are str; bytes are what it keeps
        self._store = dist.distributed_c10d.PrefixStore(f"pipec/{name}", own)
        self.me, self.size = me, size
        number, self._path = tempfile.mkstemp(prefix=f"pipec-{os.getpid()}-")
        os.ftruncate(number, mmap.PAGESIZE)
        self._map = mmap.mmap(number, mmap.PAGESIZE)
        os.close(number)
        self._note = memoryview(self._map).cast("q")
        self.call = 0
        self.at(-1)
        self._store.set(f"where/{me}", pickle.dumps((socket.gethostname(), self._path)))
        self._end = threading.Event()
        self._finalizer = weakref.finalize(self, _close, self._end, self._path)
        threading.Thread(
            target=_beat, args=(self._store, me, self._map, self._end), name=f"pipec watch {me}", daemon=True
        ).start()

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
        try:
            host, path = pickle.loads(self._store.get(f"where/{rank}"))
            if host == socket.gethostname():
                with open(path, "rb") as file:
                    return RECORD.unpack(file.read(RECORD.size))
            if self._store.check([f"at/{rank}"]):
                return RECORD.unpack(self._store.get(f"at/{rank}"))
        except (RuntimeError, OSError, struct.error):
            return None
        return None

    def forget(self, rank: int) -> None:
        """Remove the file of a rank that is gone, if it is on this host."""
        with contextlib.suppress(RuntimeError, OSError):
            host, path = pickle.loads(self._store.get(f"where/{rank}"))
            if host == socket.gethostname():
                os.unlink(path)

    def culprit(self, rank: int, tell: Callable[[], str]) -> tuple[int, str]:
        """The rank that was missed first, and what was said about it; ``rank`` if nobody missed another before."""
        with contextlib.suppress(RuntimeError):
            if self._store.check(["culprit"]):
                first: tuple[int, str] = pickle.loads(self._store.get("culprit"))
                return first
        found = rank, tell()
        with contextlib.suppress(RuntimeError):
            self._store.set("culprit", pickle.dumps(found))
        return found

    def close(self) -> None:
        self._finalizer()


def _beat(store: Any, me: int, note: mmap.mmap, end: threading.Event) -> None:
    while not end.wait(BEAT):
        try:
            store.set(f"at/{me}", bytes(note[: RECORD.size]))
        except RuntimeError:  # the store is gone; so is whoever would read it
            return


def _close(end: threading.Event, path: str) -> None:
    end.set()
    with contextlib.suppress(OSError):
        os.unlink(path)
