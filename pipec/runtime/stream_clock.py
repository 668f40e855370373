"""When tasks ran on their devices, by marks in the streams that are read when somebody asks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from pipec.runtime.stream_api import StreamApi

Mark = Any
ORIGIN = 1  # nanoseconds: zero means that a task did not run


class StreamClock:
    """The marks of one step. Every device has a zero of its own, when its streams reached the step."""

    def __init__(self, api: StreamApi) -> None:
        self._api = api
        self._zeros: dict[torch.device, Mark] = {}
        self._marks: dict[int, tuple[torch.device, Mark, Mark]] = {}

    def begin(self, streams: Iterable[tuple[torch.device, Any]]) -> None:
        """Set the zeros, once a step, on one stream of each device."""
        for device, stream in streams:
            if device not in self._zeros:
                self._zeros[device] = self._api.mark(stream)

    def note(self, task: int, device: torch.device, start: Mark, end: Mark) -> None:
        self._marks[task] = device, start, end

    def write(self, starts: list[int], ends: list[int]) -> None:
        """Put the times of all tasks, in nanoseconds, in place of those at which the host queued them.

        The host waits until the tasks have ended.
        """
        for task, (device, start, end) in self._marks.items():
            zero = self._zeros[device]
            ends[task] = ORIGIN + int(self._api.elapsed(zero, end) * 1e6)
            starts[task] = ORIGIN + int(self._api.elapsed(zero, start) * 1e6)
