"""Channels between ranks of one host: values through memory they share, records over the lines between them.

A sender writes a value into a block of memory; its reader copies it out when a task needs it, see :mod:`.recorded`.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from pipec.runtime.distributed.backend import Traffic
from pipec.runtime.distributed.blocks import Block
from pipec.runtime.distributed.channels import Lost, Message
from pipec.runtime.distributed.lines import Lines, Record
from pipec.runtime.distributed.links import Key
from pipec.runtime.distributed.recorded import In, Out, RecordChannels
from pipec.runtime.distributed.records import FAILED, SAME
from pipec.runtime.distributed.wire import Frame, loaded, payload_of
from pipec.runtime.program import Route


class NearChannels(RecordChannels):
    """Through shared memory."""

    _lines: Lines

    def __init__(
        self, lines: Lines, rank: int, traffic: Traffic, frames: dict[Key, Frame], forms: Sequence[Any] | None,
        timeout: float, lost: Lost, received: Mapping[Route, int] | None = None,
    ) -> None:
        self._lines = lines
        super().__init__(lines, lines.pools, rank, traffic, frames, forms, timeout, lost, received)

    def _payload(self, link: In, message: Message, record: Record) -> Any:
        if record.status == FAILED:
            return pickle.loads(record.rest)
        key = self._key(message)
        if record.block < 0:
            return payload_of(self._frames[key], [])
        seen = self._lines.seen(link.peer, record.block)
        link.size += seen.size
        if record.status == SAME:
            frame = self._frames[key]
        else:
            frame = self.learned[key] = loaded(seen.memory[record.at : record.at + record.length])
        return payload_of(frame, seen.tensors(frame))

    def _give(
        self, link: Out, message: Message, status: int, frame: Frame, tensors: list[Tensor], form: Tensor | None
    ) -> None:
        """Write a message into a block, with the description of its form behind it if it has another one now."""
        self._await_room(link, message)
        length = 0 if form is None else len(form)
        if not tensors and form is None:
            self._say(link, message, status)
            return
        block = link.pool.take(frame.span + length, self._lines.turn)
        try:
            if tensors:
                block.envelope(frame).fill(tensors)
            if form is not None:
                block.memory[frame.span : frame.span + length].copy_(form)
        except BaseException:
            link.pool.put_back(block)
            raise
        self._say(link, message, status, block, frame.span, length)

    def _say(
        self, link: Out, message: Message, status: int, block: Block | None = None, at: int = 0, length: int = 0,
        rest: bytes = b"",
    ) -> None:
        """Send the record of a message."""
        known, task, lines = self._acknowledged(link), message.op.task, self._lines
        try:
            if block is None:
                lines.tell(link.peer, status, task, known, -1, rest=rest)
            elif block.file < 0:
                lines.tell(link.peer, status, task, known, block.number, at, length)
            else:
                lines.announce(link.peer, status, task, known, block, at, length)
        except RuntimeError as error:
            raise self._broken(link.peer, message, error) from error
        link.pool.hold(link.at, block)
        link.at += 1
