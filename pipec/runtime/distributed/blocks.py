"""Memory that two ranks of one host share: the sender writes a value there, the reader copies it out.

A block is an anonymous file in memory (Linux's ``memfd``) that both have mapped. It has no name anywhere, so nothing
stays behind however the processes end. Blocks are used again, within a step and from step to step.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from pipec.errors import RunError
from pipec.runtime.distributed.wire import Envelope, Frame, placed, rebuilt

PAGE = 4096
EVERY = 1 << 62  # above every number
FORMS = 8  # of the messages that a block was used for last: values and gradients take turns in it
KEEP = 16  # turns after which a block that nothing was sent in is given back


def mapped(file: int, size: int) -> Tensor:
    """An open file as a tensor of ``size`` bytes; the file may be closed then."""
    with torch.inference_mode(False):
        return torch.from_file(f"/proc/self/fd/{file}", shared=True, size=size, dtype=torch.uint8, device="cpu")


class Block:
    """Memory of the sender's, and envelopes of the forms that were sent in it last.

    Attributes:
        number: its name between the two ranks.
        size: its bytes.
        file: open until the reader has been told of the block, -1 then.
        used: the turn in which it was taken last.
    """

    __slots__ = ("_envelopes", "file", "memory", "number", "size", "used")

    def __init__(self, number: int, size: int) -> None:
        self.number, self.size, self.used = number, size, 0
        self.file = os.memfd_create("pipec", os.MFD_CLOEXEC)
        try:
            os.ftruncate(self.file, size)
            self.memory = mapped(self.file, size)
        except BaseException:
            os.close(self.file)
            raise
        self._envelopes: dict[int, Envelope] = {}  # by id of the frame, which the envelope keeps

    def envelope(self, frame: Frame) -> Envelope:
        """To fill with tensors of ``frame``."""
        made = self._envelopes.get(id(frame))
        if made is None:
            with torch.inference_mode(False):
                made = Envelope(frame, self.memory)
            remember(self._envelopes, frame, made)
        return made


def remember(made: dict[int, Any], frame: Frame, item: Any) -> None:
    """Keep what was made for a form, in the place of the oldest if there are many."""
    if len(made) >= FORMS:
        del made[next(iter(made))]
    made[id(frame)] = item


class Pool:
    """The blocks for what goes to one reader.

    Attributes:
        held: those it has not read, each with the number of its message; None for a message without content.
        size: their bytes.
    """

    def __init__(self) -> None:
        self.held: deque[tuple[int, Block | None]] = deque()
        self.size = 0
        self._free: dict[int, list[Block]] = {}  # by size
        self._made = 0

    def take(self, size: int, turn: int) -> Block:
        """A block of at least ``size`` bytes, the one that was given back last: it is still in the cache."""
        room = max(PAGE, 1 << (size - 1).bit_length())
        free = self._free.get(room)
        if free:
            block = free.pop()
        else:
            block = Block(self._made, room)
            self._made += 1
        block.used = turn
        return block

    def put_back(self, block: Block) -> None:
        """Nothing was sent in it."""
        self._free.setdefault(block.size, []).append(block)

    def hold(self, number: int, block: Block | None) -> None:
        """A message is on its way."""
        self.held.append((number, block))
        if block is not None:
            self.size += block.size

    def read(self, known: int) -> None:
        """The reader has all messages before number ``known``."""
        held = self.held
        while held and held[0][0] < known:
            _, block = held.popleft()
            if block is not None:
                self.size -= block.size
                self.put_back(block)

    def trimmed(self, turn: int) -> Iterator[Block]:
        """A turn begins with nothing on its way: blocks that the reader knows and that are forgotten now, as nothing of
        their size has travelled for a while."""
        self.read(EVERY)
        for size, free in list(self._free.items()):
            for block in [block for block in free if block.used < turn - KEEP]:
                free.remove(block)
                if block.file < 0:
                    yield block
                else:
                    os.close(block.file)
            if not free:
                del self._free[size]


class Seen:
    """A block of another rank's as its reader sees it, with views for the forms that were read from it last."""

    __slots__ = ("_views", "memory", "size")

    def __init__(self, file: int, size: int) -> None:
        self.memory, self.size = mapped(file, size), size
        self._views: dict[int, tuple[Frame, list[Tensor | None]]] = {}  # by id of the frame

    def tensors(self, frame: Frame) -> list[Tensor]:
        """Copies of the tensors of ``frame`` in it."""
        seen = self._views.get(id(frame))
        if seen is None:
            with torch.inference_mode(False):
                seen = frame, [
                    placed(frame, number, self.memory, at) if frame.plain[number] else None
                    for number, at in enumerate(frame.offsets)
                ]
            remember(self._views, frame, seen)
        views = seen[1]
        if len(frame.leaves) == 1 and views[0] is not None:  # most are: no loops
            lone = views[0].clone()
            return [lone.requires_grad_() if frame.leaves[0].grad else lone]
        made = [
            self._rebuilt(frame, number) if view is None else view.clone() for number, view in enumerate(views)
        ]
        for leaf, tensor in zip(frame.leaves, made, strict=True):
            if leaf.grad:
                tensor.requires_grad_()
        return made

    def _rebuilt(self, frame: Frame, number: int) -> Tensor:
        at = frame.offsets[number]
        return rebuilt(frame, number, self.memory[at : at + frame.leaves[number].nbytes].clone())


class Unseen:
    """A block of another rank's that could not be mapped here; there is no message in it that can be read."""

    size = 0

    def __init__(self, error: Exception) -> None:
        self._error = error

    @property
    def memory(self) -> Tensor:
        """Raises RunError."""
        raise RunError(
            f"memory that another rank shares cannot be mapped: {self._error}; raise the limit of open files (ulimit "
            "-n) or of memory, and make a new runner"
        ) from self._error

    def tensors(self, frame: Frame) -> list[Tensor]:
        """Raises RunError."""
        return [self.memory]
