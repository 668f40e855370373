"""Streams and events of real devices: CUDA, and whatever else ``torch.accelerator`` speaks for."""

from __future__ import annotations

from collections.abc import Iterable
from types import TracebackType
from typing import Any

import torch
from torch import Tensor


class Accelerator:
    """:class:`pipec.runtime.stream_api.StreamApi` on the GPUs of this machine."""

    def __init__(self, devices: Iterable[torch.device]) -> None:
        """``devices``: those that will be used; each is made ready."""
        for device in set(devices):
            torch.empty(0, device=device)

    def stream(self, device: torch.device, name: str) -> torch.Stream:
        return torch.Stream(device=device)

    def caller(self, device: torch.device) -> torch.Stream:
        return torch.accelerator.current_stream(device)

    def record(self, stream: torch.Stream) -> torch.Event:
        return stream.record_event()

    def wait(self, stream: torch.Stream, event: torch.Event) -> None:
        stream.wait_event(event)

    def on(self, *streams: torch.Stream, what: str) -> Current:
        return Current(streams)

    def pin(self, tensor: Tensor) -> Tensor:
        return tensor.pin_memory()

    def host_memory(self, like: Tensor) -> Tensor:
        return torch.empty_like(like, device="cpu", pin_memory=True)  # torch notes who copies

    def synchronize(self, event: torch.Event) -> None:
        event.synchronize()

    def past(self, event: torch.Event) -> bool:
        return bool(event.query())

    def mark(self, stream: torch.Stream) -> torch.Event:
        return stream.record_event(torch.Event(device=stream.device, enable_timing=True))

    def elapsed(self, first: torch.Event, second: torch.Event) -> float:
        second.synchronize()
        return first.elapsed_time(second)

    def free(self, stream: torch.Stream, name: str, payload: list[Any]) -> None:
        payload.clear()


class Current:
    """Makes streams current on their devices, and puts back the ones before and the current device."""

    __slots__ = ("_before", "_device", "_streams")

    def __init__(self, streams: tuple[torch.Stream, ...]) -> None:
        self._streams = streams
        self._before: list[torch.Stream] = []
        self._device = -1

    def __enter__(self) -> None:
        current = torch.accelerator.current_stream
        self._device = torch.accelerator.current_device_index()
        for stream in self._streams:
            self._before.append(current(stream.device))
            torch.accelerator.set_stream(stream)  # makes its device the current one

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        while self._before:
            torch.accelerator.set_stream(self._before.pop())
        torch.accelerator.set_device_index(self._device)
