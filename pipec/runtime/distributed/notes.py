"""Where a rank stands: a few numbers in memory that other processes of its host may map.

A rank writes them as it goes, which costs nothing, and they outlive its process: whoever has mapped them can still tell
at which task it was. The memory has no name, so that nothing stays behind, however the ranks end.
"""

from __future__ import annotations

import mmap
import os
import struct
from typing import Any, NamedTuple

import torch

from pipec.runtime.distributed.blocks import mapped

NUMBERS = struct.Struct("5q")
CALL, TASK, MICROBATCHES, WAITS, BEATS = range(5)
NOBODY, ALL = 0, -1  # for whom a rank waits; else the place of that rank, counted from 1


class Stand(NamedTuple):
    """What a note says.

    Attributes:
        call: calls of the runner, counted.
        task: of the plan, -1 between tasks.
        microbatches: of the call; negative in an evaluation.
        waits: the rank it waits for, counted from 1; ``NOBODY``; ``ALL``: every other one.
        beats: how often its process has told that it lives.
    """

    call: int
    task: int
    microbatches: int
    waits: int
    beats: int


class Note:
    """This rank's own.

    Attributes:
        numbers: to write to.
        file: open for others to map, -1 where this system has no such memory, or when they have it.
    """

    def __init__(self) -> None:
        self.file = -1
        if hasattr(os, "memfd_create"):
            self.file = os.memfd_create("pipec note", os.MFD_CLOEXEC)
            os.ftruncate(self.file, mmap.PAGESIZE)
            self.numbers = numbers_of(self.file)
        else:
            self.numbers = memoryview(bytearray(NUMBERS.size)).cast("q")
        self.numbers[TASK] = -1

    def data(self) -> bytes:
        """The numbers as they travel."""
        return NUMBERS.pack(*self.numbers[: BEATS + 1])

    def shared(self) -> None:
        """All have mapped it that can."""
        if self.file >= 0:
            os.close(self.file)
            self.file = -1


def numbers_of(file: int) -> Any:
    """The numbers in an open file, which may be closed then."""
    held: Any = mapped(file, mmap.PAGESIZE).view(torch.int64).numpy()
    return memoryview(held).cast("B").cast("q")


def stand_of(data: Any) -> Stand:
    """What the bytes of a note, or the memory of one, say."""
    return Stand(*NUMBERS.unpack_from(data))
