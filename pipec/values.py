"""What a declaration passes around: values that stand for results to come, and the mark of a skip edge."""

from __future__ import annotations

import dis
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from attrs import frozen

from pipec.errors import Location, caller
from pipec.operators import NoTensor
from pipec.spec import Ref
from pipec.tree import flatten, show_path

if TYPE_CHECKING:
    from pipec.dsl import Pipeline


def unpacked_into(frame: Any) -> int | None:
    """How many names the running line of ``frame`` unpacks into; None where it does something else.

    Python asks an iterator for one item after another and then raises its own error about their number, before the
    problems of a pipeline are told. So the number is read from the instruction that asks.
    """
    code, at = frame.f_code.co_code, frame.f_lasti
    return int(code[at + 1]) if 0 <= at < len(code) - 1 and code[at] == dis.opmap["UNPACK_SEQUENCE"] else None


@frozen(eq=False)
class Value(NoTensor):
    """What flows on an edge: an input, a stage's result, or a part of it (``v[0]``, ``v["h"]``)."""

    pipeline: Pipeline
    ref: Ref
    outputs: int | None = None

    def __getitem__(self, key: Any) -> Value:
        if self.outputs is not None and isinstance(key, int) and not -self.outputs <= key < self.outputs:
            self.pipeline._problem(f"{self}[{key}]: the stage was declared with outputs={self.outputs}")
        if isinstance(key, int) and key < 0 and self.outputs is not None:
            key += self.outputs
        try:
            hash(key)
            fits = not isinstance(key, slice | tuple) or not any(isinstance(k, slice) for k in flatten(key)[0])
        except TypeError:  # a list, and before Python 3.12 a slice
            fits = False
        if not fits:
            self.pipeline._problem(
                f"{self}[{key!r}]: a part of a value is named by one index or key; cut it inside a stage"
            )
            return self
        return Value(self.pipeline, Ref(self.ref.source, self.ref.index, (*self.ref.path, key)))

    def __iter__(self) -> Iterator[Value]:
        names = unpacked_into(sys._getframe(1))
        if self.outputs is None:
            told = f"outputs={names}" if names else "outputs=n"
            self.pipeline._problem(f"{self} is unpacked: declare the stage with {told} to unpack its result")
            return iter((self,) * (names or 2))
        if names is not None and names != self.outputs:
            self.pipeline._problem(
                f"{self} is unpacked into {names} names, but the stage was declared with outputs={self.outputs}"
            )
            return iter((self,) * names)
        return (self[index] for index in range(self.outputs))

    def __len__(self) -> int:
        return self.outputs or 0

    def __bool__(self) -> bool:
        return True

    def __repr__(self) -> str:
        return f"{self.pipeline._source_name(self.ref)}{show_path(self.ref.path)}"


@frozen(eq=False)
class Skip:
    """A value marked as a skip edge where it is read."""

    value: Any
    location: Location | None = None
    hold: str | None = None


def skip(value: Any, *, hold: str | None = None) -> Any:
    """Mark a value as a skip edge: drawn dashed, carried straight from its producer to the reader's device.

    Any value may be read by any later stage with or without the mark; it changes no number.

    ``hold="host"``: until shortly before its reader runs, the value waits in host memory instead of on a device. It is
    copied out after its forward and back one task ahead of the reader. Where a stage on the reader's device reads the
    value without this, it is there anyway and goes straight. See docs/streams.md.
    """
    if isinstance(value, Skip):
        value, hold = value.value, hold or value.hold
    return Skip(value, caller(), hold)
