"""What a rank asks of the GPUs of its host and of the process group; everything else follows from the answers.

A test gives others: ``Runner(backend=Distributed(gpus))``.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from attrs import frozen

from pipec.runtime.accelerator import Accelerator
from pipec.runtime.distributed.wires import GroupWire, Wire
from pipec.runtime.placement import accelerators
from pipec.runtime.stream_api import StreamApi

MARGIN = 60.0  # seconds that NCCL's own watchdog gives more than the runner, which says more


class Gpus(Protocol):
    """The GPUs of this host, and how processes talk about them."""

    def found(self) -> tuple[str, int]:
        """Their kind, "cuda" say, and how many this process sees."""

    def backends(self) -> dict[str, str]:
        """By kind of device the backend of the default process group that moves its tensors."""

    def identity(self, device: torch.device) -> str:
        """What only this GPU is called, in every process of the host."""

    def memory(self, device: torch.device) -> torch.device:
        """Where its tensors are: the device itself."""

    def streams(self, device: torch.device) -> StreamApi:
        """Its streams."""

    def group(self, ranks: Sequence[int], backend: str, timeout: float) -> Any:
        """A process group for tensors on GPUs. Every process of the world calls it, in one order."""

    def wire(self, api: StreamApi, group: Any, device: torch.device, name: str, timeout: float) -> Wire:
        """The transfers of a group, from ``device``."""


class Accelerators:
    """Those that torch finds."""

    def found(self) -> tuple[str, int]:
        return accelerators()

    def backends(self) -> dict[str, str]:
        pairs = dist.get_backend_config().split(",")
        return {kind: backend for kind, _, backend in (pair.partition(":") for pair in pairs)}

    def identity(self, device: torch.device) -> str:
        kind = getattr(torch, device.type, None)
        with contextlib.suppress(AttributeError, RuntimeError, AssertionError):
            return str(kind.get_device_properties(device).uuid)  # type: ignore[union-attr]
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        return f"{device} of {visible or 'all'}"

    def memory(self, device: torch.device) -> torch.device:
        return device

    def streams(self, device: torch.device) -> StreamApi:
        return Accelerator([device])

    def group(self, ranks: Sequence[int], backend: str, timeout: float) -> Any:
        return dist.new_group(list(ranks), timeout=timedelta(seconds=timeout + MARGIN), backend=backend)

    def wire(self, api: StreamApi, group: Any, device: torch.device, name: str, timeout: float) -> Wire:
        return GroupWire(api, group, device)


@frozen(eq=False)
class Distributed:
    """``Runner(backend="distributed")`` on other GPUs than those that torch finds."""

    gpus: Gpus
