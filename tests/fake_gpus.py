"""GPUs that are not there: names and streams that are written down, tensors in the host's memory, real processes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, ClassVar

import torch
import torch.distributed as dist

import pipec
from pipec.runtime.distributed.gpus import Distributed
from pipec.runtime.distributed.wires import GroupWire, RecordedWire
from pipec.runtime.stream_api import Call, Recorder

KINDS = {"wired": {"cpu": "gloo", "cuda": "nccl"}, "staged": {"cpu": "gloo", "cuda": "gloo"}}


class FakeGpus:
    """As many GPUs as are asked for; ``how``: "wired", as if the process group had NCCL for them, or "staged".

    Attributes:
        made: what was made last.
        recorder: the calls of all streams.
        issued: the names of every group of transfers, of all wires, in order.
    """

    made: ClassVar[FakeGpus]
    recording: ClassVar[type[Recorder]] = Recorder
    torchs: ClassVar[bool] = False  # wires are torch's own calls, as with NCCL, and not written down

    def __init__(self, how: str = "wired", count: int = 8, backends: dict[str, str] | None = None) -> None:
        self.count, self._backends = count, KINDS[how] if backends is None else backends
        self.recorder, self.issued = self.recording(), list[tuple[str, ...]]()
        FakeGpus.made = self

    def found(self) -> tuple[str, int]:
        return "cuda", self.count

    def backends(self) -> dict[str, str]:
        return self._backends

    def identity(self, device: torch.device) -> str:
        return f"serial number {device.index}"

    def memory(self, device: torch.device) -> torch.device:
        return torch.device("cpu", device.index)

    def streams(self, device: torch.device) -> Recorder:
        return self.recorder

    def group(self, ranks: Sequence[int], backend: str, timeout: float) -> Any:
        assert backend == "nccl"
        return dist.new_group(list(ranks), timeout=timedelta(seconds=timeout), backend="gloo")

    def wire(self, api: Any, group: Any, device: torch.device, name: str, timeout: float) -> Any:
        if self.torchs:
            return GroupWire(api, group, device)
        return RecordedWire(api, group, device, name, timeout, self.issued)

    def calls(self) -> list[Call]:
        """What was called since the last time."""
        calls = list(self.recorder.calls)
        self.recorder.calls.clear()
        return calls


class _Runners:
    """``pipec.Runner`` on GPUs that are not there."""

    def __init__(self, how: str, devices: str) -> None:
        self.how, self.devices = how, devices

    def __call__(self, *args: Any, **options: Any) -> Any:
        if options.get("backend") is not None:  # what is compared with
            return RUNNER(*args, **options)
        return RUNNER(*args, **options | {"devices": self.devices, "backend": Distributed(FakeGpus(self.how))})


RUNNER = pipec.Runner


@contextmanager
def on_gpus(how: str, devices: str = "cuda") -> Iterator[None]:
    """Runners made inside are on them."""
    pipec.Runner = _Runners(how, devices)  # type: ignore[misc,assignment]
    try:
        yield
    finally:
        pipec.Runner = RUNNER  # type: ignore[misc]


def there(rank: int, how: str, fn: Any, *args: Any) -> Any:
    """What ``fn(rank, *args)`` gives on them."""
    with on_gpus(how):
        return fn(rank, *args)
