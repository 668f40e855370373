"""Channels between devices of one process, and the switch that stops them all."""

from __future__ import annotations

from queue import SimpleQueue
from typing import Any

from pipec.runtime.program import Route


class Stopped(BaseException):  # not an error: another device failed, this one just ends
    """Raised inside a worker whose step was given up because of a failure elsewhere."""


_STOP = object()


class Channels:
    """One first-in first-out queue per ordered pair of devices; values are handed over by reference."""

    def __init__(self, routes: tuple[Route, ...]) -> None:
        self._queues: dict[Route, SimpleQueue[Any]] = {route: SimpleQueue() for route in routes}
        self.stopped = False

    def send(self, route: Route, slot: int, payload: Any) -> None:
        self._queues[route].put((slot, payload))

    def to_host(self, payload: Any) -> Any:
        """A value in host memory: here itself, as the devices of one process have that memory in common."""
        return payload

    def receive(self, route: Route) -> tuple[int, Any]:
        """The next (slot, payload) of ``route``; waits for it.

        Raises:
            Stopped: the step was given up.
        """
        item = self._queues[route].get()
        if item is _STOP:
            self._queues[route].put(_STOP)
            raise Stopped
        return item  # type: ignore[no-any-return]

    def shift(self, by: int) -> None:
        """Between two steps of an asynchronous run: what is under way goes to a slot ``by`` places before."""
        for queue in self._queues.values():
            for _ in range(queue.qsize()):
                slot, payload = queue.get()
                queue.put((slot - by, payload))

    def stop(self) -> None:
        """Wake every receiver and let every later receive fail."""
        self.stopped = True
        for queue in self._queues.values():
            queue.put(_STOP)
