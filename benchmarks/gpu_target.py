"""Where the GPU checks run, and every call that they make of a GPU's runtime."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from attrs import frozen

import pipec
from pipec.runtime.backends import Replay
from pipec.runtime.placement import accelerators


@frozen
class Target:
    """A GPU, with all logical devices on it."""

    device: torch.device
    small = False  # whether the checks must do with little work
    stand_in = False  # whether it only stands for a GPU

    def runner(self, net: Any, plan: Any, **how: Any) -> Any:
        """All logical devices on the one real device, each with streams of its own."""
        return pipec.Runner(net, plan, devices=[self.device] * plan.devices, backend="cuda", **how)

    def spread(self, net: Any, plan: Any, gpus: int, **how: Any) -> Any:
        """Logical devices in turn on the first ``gpus`` real ones."""
        devices = [torch.device(self.device.type, number % gpus) for number in range(plan.devices)]
        return pipec.Runner(net, plan, devices=devices, backend="cuda", **how)

    def replay(self, net: Any, plan: Any, **how: Any) -> Any:
        """The same on the caller's own stream, task by task."""
        return pipec.Runner(net, plan, devices=[self.device] * plan.devices, backend=Replay(), **how)

    def describe(self) -> str:
        """The name of the device."""
        return torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else str(self.device)

    def gpus(self) -> int:
        """How many there are of its kind."""
        return accelerators()[1]

    def synchronize(self) -> None:
        """Wait for all that was queued."""
        torch.accelerator.synchronize(self.device)

    @contextmanager
    def side_stream(self) -> Iterator[None]:
        """The caller on a stream of its own."""
        with torch.cuda.stream(torch.cuda.Stream(self.device)):
            yield

    @contextmanager
    def little_memory(self, spare: float = 1.1) -> Iterator[None]:
        """Let the allocator have little more than it has needed so far."""
        total = torch.cuda.get_device_properties(self.device).total_memory
        share = min(1.0, torch.cuda.max_memory_reserved(self.device) * spare / total)
        torch.cuda.set_per_process_memory_fraction(share, self.device)
        try:
            yield
            self.synchronize()
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0, self.device)

    def peak(self, work: Callable[[], Any]) -> tuple[int, int]:
        """Bytes in use before ``work``, and most in use during it."""
        self.synchronize()
        before = torch.cuda.memory_allocated(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        work()
        self.synchronize()
        return before, torch.cuda.max_memory_allocated(self.device)

    def trace(self, work: Callable[[], Any]) -> Any:
        """The Chrome trace that torch.profiler makes of ``work``."""
        from torch.profiler import ProfilerActivity, profile, supported_activities

        with profile(activities=supported_activities() or [ProfilerActivity.CPU]) as profiler:
            work()
            self.synchronize()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json"
            profiler.export_chrome_trace(str(path))
            return json.loads(path.read_text(encoding="utf-8", errors="replace"))


@frozen
class Lanes(Target):
    """The CPU in its place, with a worker per lane."""

    small = True
    stand_in = True

    def runner(self, net: Any, plan: Any, **how: Any) -> Any:
        return pipec.Runner(net, plan, backend="lanes", **how)

    def spread(self, net: Any, plan: Any, gpus: int, **how: Any) -> Any:
        return self.runner(net, plan, **how)

    def replay(self, net: Any, plan: Any, **how: Any) -> Any:
        return pipec.Runner(net, plan, backend="replay", **how)

    def describe(self) -> str:
        return "CPU"

    def gpus(self) -> int:
        return 2

    def synchronize(self) -> None:
        """Lanes have ended when a step has."""

    @contextmanager
    def side_stream(self) -> Iterator[None]:
        yield

    @contextmanager
    def little_memory(self, spare: float = 1.1) -> Iterator[None]:
        yield

    def peak(self, work: Callable[[], Any]) -> tuple[int, int]:
        """No counter knows the CPU's memory: nothing before, nothing during."""
        work()
        return 0, 0
