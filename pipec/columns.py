"""Columns of whole numbers: live ranges and waits of a plan, beside the table of its tasks."""

from __future__ import annotations

from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt
from attrs import field, fields, frozen

Column = npt.NDArray[np.int32]


def to_column(value: Any) -> Column:
    """A value as a column that nobody can change."""
    array = np.ascontiguousarray(value, dtype=np.int32)
    array.setflags(write=False)
    return array


class Buffer(IntEnum):
    """What a live buffer holds."""

    ACTIVATION = 0  # saved by a stage's FORWARD or RECOMPUTE for its backward
    VALUE = 1  # a value, at its producer or at a reader's device
    GRADIENT = 2  # gradients of a value, at a reader's device or back at its producer
    WEIGHT = 3  # an older version of a stage's weights, kept for tasks that still read it
    RECOMPUTED = 4  # a value that a segment's recompute made anew
    CARRY = 5  # what a stage hands on from a slice to the next
    CARRY_GRADIENT = 6  # its gradient, from a slice to the one before
    HOST = 7  # a value in host memory, charged to its producer's device
    FETCHED = 8  # a value come back from host memory, at a reader's device

    @property
    def letter(self) -> str:
        return ("a", "v", "dv", "w", "rv", "c", "dc", "hv", "fv")[self]


OF_STAGES = (Buffer.ACTIVATION, Buffer.WEIGHT, Buffer.CARRY, Buffer.CARRY_GRADIENT)  # of any other kind: of a value


@frozen(eq=False)
class Buffers:
    """Live ranges as columns: a buffer comes to life in task ``writer`` and is freed when ``free`` has ended.

    ``ref`` is a stage for activations, weights and what is carried, and a value otherwise; ``microbatch`` is the
    version of weights, which come to life when the UPDATE that replaces them makes a copy. Every other reader of the
    buffer, on any lane, ends before ``free`` does.
    """

    kind: Column = field(converter=to_column)
    ref: Column = field(converter=to_column)
    replica: Column = field(converter=to_column)
    microbatch: Column = field(converter=to_column)
    slice: Column = field(converter=to_column)
    device: Column = field(converter=to_column)
    writer: Column = field(converter=to_column)
    free: Column = field(converter=to_column)

    def __len__(self) -> int:
        return len(self.kind)

    def token(self, index: int) -> str:
        slice_, replica = int(self.slice[index]), int(self.replica[index])
        item = f"{self.microbatch[index]}" + (f".{slice_}" if slice_ else "") + (f"~{replica}" if replica else "")
        return f"{Buffer(self.kind[index]).letter}{self.ref[index]}[{item}]"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Buffers) and all(
            np.array_equal(getattr(self, name), getattr(other, name)) for name in BUFFER_COLUMNS
        )

    __hash__ = None  # type: ignore[assignment]


BUFFER_COLUMNS = tuple(f.name for f in fields(Buffers))


@frozen(eq=False)
class Waits:
    """Per task the tasks on other lanes that must have ended first: ``ids[start[i]:start[i + 1]]``."""

    start: Column = field(converter=to_column)
    ids: Column = field(converter=to_column)

    def of(self, task: int) -> Column:
        return self.ids[self.start[task] : self.start[task + 1]]

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Waits)
            and np.array_equal(self.start, other.start)
            and np.array_equal(self.ids, other.ids)
        )

    __hash__ = None  # type: ignore[assignment]
