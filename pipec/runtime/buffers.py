"""Module buffers: snapshots for recompute and for failed steps."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

Mark = tuple[Tensor, Tensor]  # a buffer and a copy of its values


class BufferKeeper:
    """Snapshots of one stage's buffers.

    A buffer that did not change since the last snapshot is not copied again, so constant buffers cost one copy and no
    memory per microbatch. Values are compared: batch norm moves its statistics without raising their version.
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
        self._last: list[Mark] = []

    def __bool__(self) -> bool:
        return bool(self.places)

    def snapshot(self) -> list[Tensor]:
        """Copies of all buffers as they are now."""
        return [copy for _, copy in self.mark()]

    @torch.no_grad()
    def mark(self) -> list[Mark]:
        """The buffers as they are now, for :meth:`exchange`."""
        if not self.places:
            return []
        taken = []
        for number, (owner, name) in enumerate(self.places):
            now = owner[name]
            last = self._last[number] if self._last else None
            if last is not None and last[0] is now and torch.equal(now, last[1]):
                taken.append(last)
            else:
                taken.append((now, now.detach().clone()))
        self._last = taken
        return taken

    @torch.no_grad()
    def exchange(self, marks: list[Mark]) -> list[Tensor | None]:
        """Put copies of what was marked into the module; returns what stood there, None where nothing differs.

        A buffer that did not change since stays: the forward that is run again will hardly change it either, and
        other stages may be reading it. Exchanging instead of writing leaves the versions that autograd remembers
        alone.
        """
        before: list[Tensor | None] = []
        for (owner, name), (source, copy) in zip(self.places, marks, strict=True):
            now = owner[name]
            if now is source and torch.equal(now, copy):
                before.append(None)
            else:
                before.append(now)
                owner[name] = copy.clone()
        return before

    def put_back(self, before: list[Tensor | None], marks: list[Mark]) -> None:
        """Undo an exchange, and what a forward did since to buffers that were not exchanged."""
        for (owner, name), tensor, (source, copy) in zip(self.places, before, marks, strict=True):
            owner[name] = source if tensor is None else tensor
            if tensor is None:
                _write(source, copy)

    def originals(self) -> list[Tensor]:
        """The tensors that stand in the module now."""
        return [owner[name] for owner, name in self.places]

    def restore(self, originals: list[Tensor], values: list[Tensor]) -> None:
        """Put ``originals`` back into the module, holding ``values`` again."""
        for (owner, name), tensor, value in zip(self.places, originals, values, strict=True):
            owner[name] = tensor
            _write(tensor, value)


@torch.no_grad()
def _write(tensor: Tensor, value: Tensor) -> None:
    if not torch.equal(tensor, value):
        tensor.copy_(value)
