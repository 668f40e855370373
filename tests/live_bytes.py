"""Bytes alive on every logical device after every task of a step, measured from the operations themselves."""

from __future__ import annotations

import gc
import weakref
from collections import defaultdict
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import pipec
from pipec.runtime import alone as alone_module
from pipec.runtime.borders import Packed, Parcel
from pipec.runtime.channels import Channels
from pipec.runtime.executor import Device

HOST = -2  # in place of a device


class Storages(TorchDispatchMode):
    """Bytes of every storage that operations make, by the device whose task made it, while it is alive."""

    def __init__(self) -> None:
        super().__init__()
        self.device = -1
        self.live: dict[int, int] = defaultdict(int)
        self.known: set[int] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        if func.is_view:
            return out
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        before = {tensor.untyped_storage()._cdata for tensor in tensors}
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                storage = leaf.untyped_storage()
                if storage._cdata not in before and storage._cdata not in self.known:
                    self.known.add(storage._cdata)
                    self.live[self.device] += storage.nbytes()
                    weakref.finalize(storage, self._dead, storage._cdata, self.device, storage.nbytes())
        return out

    def _dead(self, key: int, device: int, size: int) -> None:
        self.known.discard(key)
        self.live[device] -= size


class CopyingChannels(Channels):
    """Channels that really copy, as between two real devices: the copy belongs to the receiver."""

    storages: Storages

    def send(self, route, slot, payload):  # type: ignore[no-untyped-def]
        self.storages.device = route[1]
        super().send(route, slot, _copy(payload))
        self.storages.device = route[0]

    def to_host(self, payload):  # type: ignore[no-untyped-def]
        device, self.storages.device = self.storages.device, HOST
        made = _copy(payload)
        self.storages.device = device
        return made


def _copy(payload):  # type: ignore[no-untyped-def]
    if isinstance(payload, torch.Tensor):
        return payload.detach().clone().requires_grad_(payload.requires_grad)
    if isinstance(payload, Packed):
        return Packed([_copy(leaf) for leaf in payload.leaves], payload.layout)
    if isinstance(payload, Parcel):
        payload._total = _copy(payload._total)
        payload._waiting = {key: _copy(value) for key, value in payload._waiting.items()}
    return payload


def live_bytes(
    monkeypatch: pytest.MonkeyPatch, net: pipec.Pipeline, plan: pipec.Plan, data: dict[str, torch.Tensor]
) -> list[tuple[int, int, int]]:
    """(task, device or HOST, bytes alive on it after the task) in the second step of a plan, in one thread.

    Gradients of the first step are dropped, what it gave too; handed-over tensors are copied as between real devices.
    """
    seen: list[tuple[int, int, int]] = []
    storages = Storages()

    class Watched(Device):
        def run(self, ops: Any) -> None:
            for op in ops:
                storages.device = self.index
                super().run([op])
                seen.extend((op.task, device, storages.live[device]) for device in (*range(plan.devices), HOST))

    class Copying(CopyingChannels):
        pass

    Copying.storages = storages
    monkeypatch.setattr(alone_module, "Device", Watched)
    monkeypatch.setattr(alone_module, "Channels", Copying)
    run = pipec.Runner(net, plan, backend="replay")
    run.step(**data)
    for parameter in run.parameters():
        parameter.grad = None
    seen.clear()
    gc.collect()
    storages.live.clear()
    storages.known.clear()
    gc.disable()
    try:
        with storages:
            run.step(**data)
    finally:
        gc.enable()
    return seen
