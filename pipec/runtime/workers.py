"""Persistent worker threads, each with a queue of its own that it empties in order."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Any

import torch

from pipec.errors import RunError

Queue = SimpleQueue[Any]  # None ends its worker


class Workers:
    """Threads started at the first use and again after a fork; they end with their owner, or when it closes them."""

    def __init__(self, names: Sequence[str], work: Callable[[Queue], bool]) -> None:
        """``work`` takes the next item of its worker's queue and does it; False at None, the end. It must not raise,
        keep the item, or know the owner."""
        self._names, self._work = names, work
        self._queues: list[Queue] = []
        self._threads: list[threading.Thread] = []
        self._process = -1
        self._closed = False
        self._finalizer: weakref.finalize[[list[Queue]], Workers] | None = None

    def start(self) -> list[Queue]:
        """A queue per worker, whose threads run.

        Raises:
            RunError: they were closed.
        """
        if self._closed:
            raise RunError("this runner was closed while a step was running")
        if self._process == os.getpid() and self._queues:
            return self._queues
        if self._finalizer is not None:
            self._finalizer.detach()  # a fork left the parent's threads behind
        self._process = os.getpid()
        self._queues = [SimpleQueue() for _ in self._names]
        self._finalizer = weakref.finalize(self, _stop, self._queues)
        self._threads = [
            threading.Thread(target=_empty, args=(queue, self._work), name=name, daemon=True)
            for queue, name in zip(self._queues, self._names, strict=True)
        ]
        for thread in self._threads:
            thread.start()
        return self._queues

    def close(self) -> None:
        """End the workers and wait for them."""
        self._closed = True
        if self._finalizer is not None:
            self._finalizer()
        for thread in self._threads:
            thread.join()
        self._queues, self._threads = [], []


def _empty(queue: Queue, work: Callable[[Queue], bool]) -> None:
    # Autocast keeps casts of weights in one cache for all threads, and a thread that leaves its outermost autocast
    # empties it, also under another that is between two uses of a weight. Workers never leave theirs.
    torch.autocast_increment_nesting()
    while work(queue):
        pass


def _stop(queues: list[Queue]) -> None:
    for queue in queues:
        queue.put(None)
