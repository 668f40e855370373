"""The watch by way of torch.distributed's store, for ranks that no socket of the watch reaches.

A thread writes there where this rank stands and reads where others do. Nobody else touches the store: it may be on a
host that cannot be reached, or that stands still, and then it is the thread that waits.
"""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from queue import Empty, SimpleQueue
from time import monotonic

from pipec.runtime.distributed.group import own_store
from pipec.runtime.distributed.notes import Stand, stand_of

EVERY = 1.0  # seconds between two notes
AT_ONCE = 16  # other ranks that are looked at each time
SOON = 5.0  # seconds after which a store that was asked does not answer

Story = tuple[int, str]  # the rank that is gone, and what is said about it


class Bulletin:
    """What ranks tell each other in the store.

    Attributes:
        looks: where other ranks stood when they were looked at last, and when that was.
    """

    def __init__(
        self, name: str, me: int, others: Sequence[int], note: Callable[[], bytes], heard: Callable[[Story], None]
    ) -> None:
        """
        Args:
            name: the same on every rank, other than that of any other runner.
            others: places to look at.
            note: what to write.
            heard: called with the first story there is.
        """
        self._store = own_store(f"pipec/{name}")
        self._me, self._others, self._note, self._heard = me, list(others), note, heard
        self._asked: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._known = False
        self.looks: dict[int, tuple[Stand, float]] = {}
        self._thread = threading.Thread(target=self._run, name=f"pipec bulletin {me}", daemon=True)
        self._thread.start()

    def tell(self, story: Story) -> None:
        """Write that a rank is gone; returns when that is there, or the store does not answer."""
        self._do(lambda: self._told(story))

    def look(self, places: Sequence[int]) -> None:
        """Look where some ranks stand now; returns then, or when the store does not answer."""
        self._do(lambda: self._seen(places))

    def close(self) -> None:
        self._asked.put(None)
        self._thread.join(SOON)

    def _do(self, work: Callable[[], None]) -> None:
        done = threading.Event()

        def whole() -> None:
            try:
                work()
            finally:
                done.set()

        self._asked.put(whole)
        done.wait(SOON)

    # -- the thread -----------------------------------------------------------------------------------------

    def _run(self) -> None:
        following, turn = 0.0, 0
        while True:
            try:
                work = self._asked.get(timeout=max(0.0, following - monotonic()))
            except Empty:
                following = monotonic() + EVERY
                row = [self._others[(turn + n) % len(self._others)] for n in range(min(AT_ONCE, len(self._others)))]
                turn += len(row)
                work = self._each(row)
            if work is None:
                del self._store
                return
            with suppress(RuntimeError):  # the store is gone; so is whoever would read it
                work()

    def _each(self, row: Sequence[int]) -> Callable[[], None]:
        def work() -> None:
            self._store.set(f"at/{self._me}", self._note())
            told = self._found("story")
            if told and not self._known:
                self._known = True
                self._heard(pickle.loads(told))
            self._seen(row)

        return work

    def _told(self, story: Story) -> None:
        self._known = True
        if not self._found("story"):
            self._store.set("story", pickle.dumps(story))

    def _seen(self, places: Sequence[int]) -> None:
        for place in places:
            if data := self._found(f"at/{place}"):
                self.looks[place] = stand_of(data), monotonic()

    def _found(self, key: str) -> bytes:
        """What the store has under a key; nothing where it has none."""
        return bytes(self._store.get(key)) if self._store.check([key]) else b""
