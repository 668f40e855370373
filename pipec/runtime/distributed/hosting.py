"""Values of a rank on a GPU that wait in host memory: on their way there, and back to the rank's own GPU.

As in one process: the copy-out stream copies a value there after the task that makes it, the copy-in stream copies it
back after the task that the plan lets it wait for; the host waits for neither. Memory on the GPU belongs to the pool of
the compute stream: what is copied away is held until that stream, or the host, is past the copy, and what comes back is
opened after that stream has waited for it. A tensor with gaps comes back without them, as on streams of one process.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from attrs import frozen
from torch import Tensor

from pipec.errors import RunError
from pipec.runtime.stream_api import Event, Stream, StreamApi
from pipec.runtime.stream_lanes import StreamLane
from pipec.runtime.transfer import Pairs, copied, fill, prepared, tensors


@frozen(eq=False)
class Hosted:
    """A value in host memory, which holds it once ``event`` has happened."""

    payload: Any
    event: Event


class HostMemory:
    """What one run of a task list copies to host memory and back."""

    def __init__(
        self, api: StreamApi, compute: Stream, out: Stream, into: StreamLane, memory: torch.device
    ) -> None:
        """``into``: copies from the host, inputs among them; ``memory``: of the rank."""
        self._api, self._compute, self._out, self._into, self._memory = api, compute, out, into, memory
        self._leaving: deque[tuple[str, Event, list[Any]]] = deque()

    @property
    def stream(self) -> Stream:
        """The one of copies from the host."""
        return self._into.stream

    def away(self, name: str, payload: Any) -> Hosted:
        """Begin to copy a value to host memory.

        Raises:
            RunError: it has a tensor that is more than its elements.
        """
        wrong = next((tensor.layout for tensor in tensors(payload) if tensor.layout is not torch.strided), None)
        if wrong is not None:
            raise RunError(f"{name}: a tensor of layout {wrong} cannot leave its device; make it dense")
        self._api.wait(self._out, self._api.record(self._compute))
        pairs: Pairs = []
        with self._api.on(self._out, what=name):
            made = copied(payload, lambda tensor: prepared(tensor, self._api.host_memory, pairs))
            fill(pairs)
        event = self._api.record(self._out)
        self._leaving.append((name, event, [payload]))
        return Hosted(made, event)

    def back(self, name: str, hosted: Hosted) -> tuple[Any, Event]:
        """Begin to copy a value back to this rank's GPU; what it will be, and when it is there."""
        pairs: Pairs = []
        with self._api.on(self._compute, what=f"memory for {name}"):
            made = copied(hosted.payload, lambda tensor: prepared(tensor, self._empty, pairs))
        with self._fetching(hosted.event, name):
            fill(pairs)
        return made, self._api.record(self._into.stream)

    def fetch(self, name: str, event: Event, write: Callable[[], None]) -> None:
        """Begin to ``write`` into memory of the GPU what is in host memory after ``event``, to be sent from there."""
        with self._fetching(event, f"fetches {name}"):
            write()

    def _fetching(self, event: Event, what: str) -> Any:
        """Work of the copy-in stream after ``event``, and after all that is queued on the compute stream."""
        self._into.begin()
        self._into.after([event, self._api.record(self._compute)])
        return self._api.on(self._into.stream, what=what)

    def _empty(self, like: Tensor) -> Tensor:
        return torch.empty_like(like, device=self._memory)

    def await_device(self, event: Event) -> None:
        """Queue what comes next on the compute stream after a copy."""
        self._api.wait(self._compute, event)

    def await_host(self, event: Event) -> None:
        """Let the host wait for a copy."""
        self._api.synchronize(event)

    def look(self) -> None:
        """Let go of what the host sees to have been copied away."""
        while self._leaving and self._api.past(self._leaving[0][1]):
            name, _, payload = self._leaving.popleft()
            self._api.free(self._compute, f"{name} sent", payload)

    def finish(self) -> None:
        """Let go of all; the compute stream waits for the copies."""
        while self._leaving:
            name, event, payload = self._leaving.popleft()
            self._api.wait(self._compute, event)
            self._api.free(self._compute, f"{name} sent", payload)
