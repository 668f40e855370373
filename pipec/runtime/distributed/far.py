"""Channels between ranks on several hosts: values and records over the sockets between them.

A sender writes a value from the memory it is in, and its reader reads it into the memory where it stays, see
:mod:`.recorded`. A value that a thread still writes when its task has ended lives until then.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from time import monotonic
from typing import Any

import torch
from torch import Tensor

from pipec.runtime.distributed.backend import Traffic
from pipec.runtime.distributed.channels import Lost, Message
from pipec.runtime.distributed.far_lines import FarLines
from pipec.runtime.distributed.links import Key
from pipec.runtime.distributed.recorded import In, Out, RecordChannels
from pipec.runtime.distributed.records import CHANGED, FAILED
from pipec.runtime.distributed.sockets import Arrival, memory_of
from pipec.runtime.distributed.wire import Frame, as_bytes, loaded, payload_of, rebuilt
from pipec.runtime.program import Op, Route


class FarChannels(RecordChannels):
    """Through sockets."""

    _lines: FarLines

    def __init__(
        self, lines: FarLines, rank: int, traffic: Traffic, frames: dict[Key, Frame], forms: Sequence[Any] | None,
        timeout: float, lost: Lost, received: Mapping[Route, int] | None = None,
    ) -> None:
        self._lines = lines
        super().__init__(lines, lines.accounts, rank, traffic, frames, forms, timeout, lost, received)

    def begin(self) -> None:
        """Where large contents are on their way, begin to read them."""
        for link in self._in.values():
            self._lines.expect(link.peer, len(link.messages))

    # -- receiving ------------------------------------------------------------------------------------------

    def _read(self, link: In, message: Message) -> tuple[int, Any]:
        made = super()._read(link, message)
        if link.peer in self._lines.heavy:  # since now, maybe
            self._lines.fetch(link.peer, len(link.messages) - link.taken - len(link.inbox))
        return made

    def _payload(self, link: In, message: Message, record: Arrival) -> Any:
        if record.status == FAILED:
            return pickle.loads(record.rest)
        key = self._key(message)
        link.size += sum(map(len, record.content))
        if record.status == CHANGED:
            frame = self.learned[key] = loaded(record.rest)
        else:
            frame = self._frames[key]
        if len(record.content) == len(frame.leaves) == 1:
            return payload_of(frame, [rebuilt(frame, 0, record.content[0])])
        rest = iter(record.content)
        return payload_of(frame, [
            rebuilt(frame, number, next(rest) if leaf.nbytes else torch.empty(0, dtype=torch.uint8))
            for number, leaf in enumerate(frame.leaves)
        ])

    # -- sending --------------------------------------------------------------------------------------------

    def _give(
        self, link: Out, message: Message, status: int, frame: Frame, tensors: list[Tensor], form: Tensor | None
    ) -> None:
        """Write a message, with the description of its form in front if it has another one now."""
        self._await_room(link, message)
        held, content = [], []
        for tensor, leaf, plain in zip(tensors, frame.leaves, frame.plain, strict=True):
            size = leaf.nbytes
            if size:
                held.append(tensor if plain and tensor.stride() == leaf.stride else as_bytes(tensor))
                content.append(memory_of(held[-1], size))
        self._write(link, message, status, b"" if form is None else form.numpy().tobytes(), content, held)

    def _say(self, link: Out, message: Message, status: int, *, rest: bytes = b"") -> None:
        self._write(link, message, status, rest, (), ())

    def _write(
        self, link: Out, message: Message, status: int, rest: bytes, content: Sequence[Any], tensors: Sequence[Tensor]
    ) -> None:
        try:
            self._lines.give(link.peer, status, message.op.task, self._acknowledged(link), rest, content, tensors)
        except RuntimeError as error:
            raise self._broken(link.peer, message, error) from error
        link.pool.hold(link.at, sum(map(len, content)))
        link.at += 1

    # -- ends -----------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """Wait until nothing that was sent needs its memory any more."""
        end = 0.0
        for link in self._out.values():
            while self._lines.writing(link.peer):
                end = end or monotonic() + self._timeout
                self._wait(link.peer, link.messages[link.at - 1], end)

    def drain(self, ops: Sequence[Op], failure: tuple[Any, ...]) -> None:
        super().drain(ops, failure)
        self.finish()
