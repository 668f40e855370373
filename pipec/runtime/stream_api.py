"""The few calls that the stream backend makes of a device's runtime, and an implementation that writes them down.

A backend for a kind of GPU is these calls and nothing else; which of them are made, on which stream and in which
order, is decided in :mod:`pipec.runtime.stream_lanes` and proved on a CPU by the recorded ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from time import perf_counter
from typing import Any, Protocol

import torch
from attrs import field, frozen
from torch import Tensor

Stream = Any
Event = Any


class StreamApi(Protocol):
    """Streams of one kind of device."""

    def stream(self, device: torch.device, name: str) -> Stream:
        """A new in-order queue of ``device``."""

    def caller(self, device: torch.device) -> Stream:
        """The stream of ``device`` that the calling thread uses outside pipec."""

    def record(self, stream: Stream) -> Event:
        """An event that has happened when all work queued on ``stream`` so far has ended."""

    def wait(self, stream: Stream, event: Event) -> None:
        """Work queued on ``stream`` from now on starts after ``event``; the host does not wait."""

    def on(self, *streams: Stream, what: str) -> AbstractContextManager[Any]:
        """Queue work on these streams, each current on its device, the last one's device current; then as before.

        ``what`` says for the record which work.
        """

    def pin(self, tensor: Tensor) -> Tensor:
        """A copy of a host tensor in memory from which the device can copy by itself."""

    def host_memory(self, like: Tensor) -> Tensor:
        """Host memory for a tensor of this kind, to and from which the device can copy by itself. It may be dropped as
        soon as its last copy is queued: whoever gives it out again waits for that copy."""

    def synchronize(self, event: Event) -> None:
        """Let the host wait for an event."""

    def past(self, event: Event) -> bool:
        """Whether an event has happened; the host does not wait for it."""

    def mark(self, stream: Stream) -> Event:
        """An event that remembers when it happened."""

    def elapsed(self, first: Event, second: Event) -> float:
        """Milliseconds between two marks of one device; the host waits for the second."""

    def free(self, stream: Stream, name: str, payload: list[Any]) -> None:
        """Drop the references in ``payload``: memory of ``stream``'s pool, which may give it to the next that asks."""


VERBS = {"run": "runs", "record": "records", "wait": "waits for", "past": "sees", "free": "takes back"}


@frozen
class Call:
    """One recorded call.

    Attributes:
        kind: "run", "record", "wait", "past" (an event has been seen to have happened) or "free".
        stream: the stream it concerns; of a copy the one that does it; "host" where the host waits or looks.
        what: the work, the event, or the memory.
        others: further streams that are current on their devices.
        device: the current device while it ran.
    """

    kind: str
    stream: str
    what: str
    others: tuple[str, ...] = ()
    device: str = ""

    def __str__(self) -> str:
        beside = f" (with {', '.join(self.others)})" if self.others else ""
        return f"{self.stream:<12} {VERBS[self.kind]} {self.what}{beside}"


@frozen(eq=False)
class RecordedStream:
    """A name on a device."""

    device: torch.device
    name: str


class Recorder:
    """Runs everything at once on the CPU, and keeps the calls in order.

    Attributes:
        calls: what was called so far.
    """

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self._events = 0
        self._current: list[RecordedStream] = []
        self._callers: dict[torch.device, RecordedStream] = {}

    def stream(self, device: torch.device, name: str) -> RecordedStream:
        return RecordedStream(device, name)

    def caller(self, device: torch.device) -> RecordedStream:
        return self._callers.setdefault(device, RecordedStream(device, f"caller {device}"))

    def record(self, stream: RecordedStream) -> str:
        self._events += 1
        self._note("record", stream, f"e{self._events}")
        return f"e{self._events}"

    def wait(self, stream: RecordedStream, event: str) -> None:
        self._note("wait", stream, event)

    @contextmanager
    def on(self, *streams: RecordedStream, what: str) -> Iterator[None]:
        *others, last = streams
        self._current.append(last)
        self._note("run", last, what, tuple(other.name for other in others))
        try:
            yield
        finally:
            self._current.pop()

    def pin(self, tensor: Tensor) -> Tensor:
        return tensor.clone()

    def host_memory(self, like: Tensor) -> Tensor:
        return torch.empty_like(like, device="cpu")

    def synchronize(self, event: str) -> None:
        self.calls.append(Call("wait", "host", event))

    def past(self, event: str) -> bool:
        self.calls.append(Call("past", "host", event))
        return True

    def mark(self, stream: RecordedStream) -> float:
        return perf_counter() * 1e3

    def elapsed(self, first: float, second: float) -> float:
        return second - first

    def free(self, stream: RecordedStream, name: str, payload: list[Any]) -> None:
        self._note("free", stream, name)
        payload.clear()

    def _note(self, kind: str, stream: RecordedStream, what: str, others: tuple[str, ...] = ()) -> None:
        device = str(self._current[-1].device) if self._current else ""
        self.calls.append(Call(kind, stream.name, what, others, device))

    def __str__(self) -> str:
        return "\n".join(map(str, self.calls))


@frozen(eq=False)
class Held:
    """Memory that its pool takes back later.

    Attributes:
        name: for the record.
        payload: the references, in a list that is emptied.
        event: after the last work that uses it.
        turn: how many works its lane had been given when it became free.
    """

    name: str
    payload: list[Any] = field(eq=False)
    event: Event
    turn: int
