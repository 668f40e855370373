"""What the channels of a rank have in common, however values travel: who sends what in which order, and how a run of a
task list that has failed is brought to its end."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pipec.runtime.channels import Stopped
from pipec.runtime.distributed.records import Unwatched, Waits
from pipec.runtime.program import Op, Route

Key = tuple[Any, ...]  # from, to, value, gradient, form of the microbatch or slice


class Links(ABC):
    """The messages of one rank, by sender and by reader.

    Attributes:
        stopped: True once this rank has failed or knows that another has.
    """

    stopped: bool
    _rank: int
    _in: Mapping[int, Any]  # by sender: its messages, and how many were asked for
    _out: Mapping[int, Any]  # by reader: the messages, and how many were sent
    _forms: Sequence[Any] | None
    _before: Mapping[Route, int]
    waits: Waits = Unwatched()  # where this rank notes for whom it waits
    _own: deque[Any]  # what comes back to this rank from its host memory: slots, and what is for them

    def _key(self, message: Any) -> Key:
        """What messages share whose form both sides expect to be the same from step to step."""
        form = None if self._forms is None else self._forms[message.op.piece]
        return (*message.op.route, message.value, message.gradient, form)

    def receive(self, route: Route) -> tuple[int, Any]:
        """The next (slot, payload) of ``route``; waits for it, or for what queues it on a device.

        Raises:
            Stopped: the sender has failed.
            RankError: it has ended or does not answer.
        """
        if route[0] == self._rank:
            return self._back()
        found = self._next(self._in[route[0]])
        if self.stopped:
            raise Stopped
        return found

    def left(self) -> list[tuple[Route, int]]:
        """By route how many messages no task has asked for yet."""
        own = [((self._rank, self._rank), len(self._own))] if self._own else []
        return own + [((link.peer, self._rank), len(link.messages) - link.at) for link in self._in.values()]

    def to_host(self, payload: Any) -> Any:
        """A value in host memory: here itself, as a rank on the CPU has no other."""
        return payload

    def _back(self) -> tuple[int, Any]:
        """The next (slot, payload) that comes back from this rank's own host memory."""
        return self._own.popleft()  # type: ignore[no-any-return]

    def leave(self) -> None:
        """The runner is closed: hold no group any more, nor anything that is under way in it."""
        self._in, self._out = {}, {}

    @abstractmethod
    def _next(self, link: Any) -> tuple[int, Any]:
        """The next message of a sender."""

    @abstractmethod
    def _fail(self, link: Any, failure: tuple[Any, ...]) -> None:
        """Send the next message of a link without meaning."""

    def _to_the_end(
        self, ops: Sequence[Op], failure: tuple[Any, ...], each: Callable[[Op], None] | None = None
    ) -> None:
        """Send and receive the rest of what the plan says without any content, so that every rank gets to its end.

        Args:
            each: called with every task at its place.
        """
        self.stopped = True
        place: dict[int, int] = {}
        for op in ops:
            for route, count in op.receives:
                if route[0] == self._rank:
                    continue
                link = self._in[route[0]]
                while link.at < count - self._before.get(route, 0):
                    self._next(link)
            if each is not None:
                each(op)
            if op.route[0] == self._rank != op.route[1]:
                out = self._out[op.route[1]]
                place[out.peer] = place.get(out.peer, 0) + 1
                if out.at < place[out.peer]:
                    self._fail(out, failure)
        for link in self._in.values():
            while link.at < len(link.messages):
                self._next(link)
