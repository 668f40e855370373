"""Module buffers: snapshots for recompute and for failed steps."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class BufferKeeper:
    """Snapshots of one stage's buffers.

    A buffer that did not change since the last snapshot (same tensor, same version) is not copied again, so
    constant buffers cost one copy and no memory per microbatch.
    """

    def __init__(self, *modules: nn.Module) -> None:
        self.places: list[tuple[dict[str, Any], str]] = []
        self.names: list[str] = []
        seen: set[int] = set()
        for prefix, sub in (pair for module in modules for pair in module.named_modules()):
            for name, buffer in sub._buffers.items():
                if buffer is not None and id(buffer) not in seen:
                    seen.add(id(buffer))
                    self.places.append((sub._buffers, name))
                    self.names.append(f"{prefix}.{name}" if prefix else name)
        self._last: list[tuple[Tensor, int, Tensor]] = []

    def __bool__(self) -> bool:
        return bool(self.places)

    @torch.no_grad()
    def snapshot(self) -> list[Tensor]:
        """Copies of all buffers as they are now."""
        if not self.places:
            return []
        taken = []
        for number, (owner, name) in enumerate(self.places):
            now = owner[name]
            if number < len(self._last):
                source, version, copy = self._last[number]
                if source is now and version == now._version:
                    taken.append((source, version, copy))
                    continue
            taken.append((now, now._version, now.detach().clone()))
        self._last = taken
        return [copy for _, _, copy in taken]

    def originals(self) -> list[Tensor]:
        """The tensors that stand in the module now."""
        return [owner[name] for owner, name in self.places]

    def swap(self, tensors: list[Tensor]) -> list[Tensor]:
        """Put ``tensors`` into the module and return what stood there.

        Swapping instead of copying leaves the versions that autograd remembers alone.
        """
        before = self.originals()
        for (owner, name), tensor in zip(self.places, tensors, strict=True):
            owner[name] = tensor
        return before

    @torch.no_grad()
    def restore(self, originals: list[Tensor], values: list[Tensor]) -> None:
        """Put ``originals`` back into the module, holding ``values`` again."""
        self.swap(originals)
        for tensor, value in zip(originals, values, strict=True):
            if not torch.equal(tensor, value):
                tensor.copy_(value)
