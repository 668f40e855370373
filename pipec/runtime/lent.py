"""Results that share memory with the stage's own buffers.

A buffer that changes from microbatch to microbatch (a counter, a queue, running statistics) cannot be handed on as it
is: a later stage would read what the stage has written since. So it is handed on as a copy. A buffer that stays (a
table of positions) needs none. Which is which is seen in the first run of each mode, and looked at again after every
step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pipec.runtime.borders import differs
from pipec.runtime.buffers import BufferKeeper
from pipec.tree import flatten, tree_map


class Lent:
    """What one stage hands on of its buffers.

    Attributes:
        copied: whether results are copied where they share memory with a buffer.
        fixed: numbers of buffers that are handed on as they are.
    """

    def __init__(self) -> None:
        self.copied = False
        self.fixed: set[int] = set()
        self._places: Any = None  # those that the numbers are of

    def looks(self, buffers: BufferKeeper) -> bool:
        """Whether results are looked at after the first run too."""
        return self.copied or buffers.places is not self._places

    def result(self, buffers: BufferKeeper, out: Any) -> Any:
        """The stage's result with copies of changing buffers."""
        if buffers.places is not self._places:
            self.fixed, self._places = set(), buffers.places
        held = {
            _storage(buffer): number for number in range(len(buffers.places))
            if (buffer := buffers.at(number)) is not None and buffer.layout is torch.strided
        }
        found = {held[key] for leaf in flatten(out)[0] if (key := _storage(leaf)) in held}
        if not found:
            return out
        if not self.copied and not buffers.changed(found):
            self.fixed |= found
            return out
        self.copied, self.fixed = True, set()
        return tree_map(lambda leaf: leaf.clone() if _storage(leaf) in held else leaf, out)

    def wrong(self, buffers: BufferKeeper, originals: Sequence[Any], values: Sequence[Any]) -> list[str]:
        """Names of buffers that were handed on as they are and have changed since a step began with ``values``."""
        if buffers.places is not self._places:
            return []
        found = [
            buffers.names[number] for number in sorted(self.fixed)
            if buffers.at(number) is originals[number] and _on_host(originals[number])
            and differs(originals[number], values[number])
        ]
        if found:
            self.copied, self.fixed = True, set()
        return found


def _storage(value: Any) -> int:
    if not isinstance(value, Tensor) or value.layout is not torch.strided or not value.numel():
        return 0
    return int(value.untyped_storage()._cdata)


def _on_host(value: Any) -> bool:
    return isinstance(value, Tensor) and value.device.type == "cpu"
