"""Channels between ranks: one first-in first-out queue per ordered pair, over torch.distributed point to point.

The plan says which values a rank sends and receives, in which order. So receives are posted ahead, ``AHEAD`` or
``SMALL`` per sender, and waited for when a task needs them; sends are kept until the reader has them, which readers
tell in the header of what they send back. A message has a header, and content of the form that both sides expect from
the last step. Where the form is another one, what was expected is sent unfilled, then the new form, then the content.

After a failure a rank runs no more tasks but sends and receives what the plan says, marked as failed. So every rank
comes to the end of the step, and the connections stay usable.
"""

from __future__ import annotations

import ctypes
import pickle
import struct
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
from attrs import define, field, frozen
from torch import Tensor

from pipec.errors import RankError
from pipec.runtime.distributed.links import Key, Links
from pipec.runtime.distributed.wire import (
    HEAD,
    Envelope,
    Frame,
    as_bytes,
    dumped,
    fits,
    frame_of,
    loaded,
    lone_of,
    payload_of,
    rebuilt,
    sole,
    sole_room,
)
from pipec.runtime.program import Op, Route
from pipec.spec import Graph

AHEAD = 2  # receives posted per sender beyond what has arrived
SMALL = 8  # the same where messages travel in one buffer: less room is needed, and gloo sends only what is posted
PENDING = 8  # sends that may be under way to a reader that never sends anything back
LAST = 1 << 62  # beyond every task
EXPECTED, FOLLOWING = 0, 1  # tags of a message's expected content, and of what follows when it is another one
SAME, CHANGED, FAILED = 0, 1, 2
HEADER = struct.Struct("4q")  # status, bytes that follow, task, how many of the other direction have arrived

Lost = Callable[[int, str, BaseException], RankError]  # peer, what it owes, what the connection said


@frozen(eq=False)
class Message:
    """One COPY as a rank sees it."""

    op: Op
    value: int
    gradient: int
    graph: Graph

    @property
    def what(self) -> str:
        """The words for it in an error."""
        name, op = self.graph.values[self.value].name, self.op
        kind = ("", "the gradient of ", "the recomputed ", "", "")[self.gradient]
        return f"{kind}value {name!r} of microbatch {op.microbatch}{f'.{op.slice}' if op.slice else ''}"


@define(eq=False)
class Posted:
    """A receive under way: its buffers, what they are expected to hold, and what to wait for."""

    message: Message
    frame: Frame | None
    buffers: list[Tensor]
    works: list[Any]


@define(eq=False)
class Sending:
    """A send under way, and what must live until it ends."""

    number: int  # of the message on its link
    work: Any
    envelope: Envelope | None  # free again when it has ended
    posted: bool = True  # its reader makes room for it without having looked at it


@define(eq=False)
class Link:
    """One direction between this rank and another: what is still to come, and what is under way."""

    peer: int
    messages: list[Message]
    at: int = 0  # messages sent, or received
    posted: deque[Posted] = field(factory=deque)
    sending: deque[Sending] = field(factory=deque)


def header_of(buffer: Tensor) -> Any:
    """The memory of the header at the beginning of a buffer of any dtype; for use while the buffer lives."""
    return (ctypes.c_char * HEAD).from_address(buffer.data_ptr())


class RankChannels(Links):
    """The channels of one rank during one run of a task list.

    Attributes:
        stopped: True once this rank has failed or knows that another has.
        failure: what another rank said about its failure.
    """

    def __init__(
        self, group: Any, rank: int, incoming: dict[int, list[Message]], outgoing: dict[int, list[Message]],
        frames: dict[Key, Frame], forms: Sequence[Any] | None, timeout: float, device: torch.device, lost: Lost,
        received: Mapping[Route, int] | None = None,
    ) -> None:
        """``frames``: what both sides expect, from the last step; ``forms``: what the shapes in every microbatch or
        slice depend on; ``lost`` words the error about a silent rank; ``received``: by route, how many messages
        came before."""
        self._group, self._rank, self._device, self._lost = group, rank, device, lost
        self._in = {peer: Link(peer, messages) for peer, messages in incoming.items()}
        self._out = {peer: Link(peer, messages) for peer, messages in outgoing.items()}
        self._frames, self._forms = frames, forms
        self._envelopes: dict[Frame, list[Envelope]] = {}  # those that no send is using
        self._before, self._own = received or {}, deque()
        self._soonest = -1  # the first task whose message this rank has made no room for
        self.learned: dict[Key, Frame] = {}
        self._timeout = timedelta(seconds=timeout)
        self.stopped = False
        self.failure: tuple[Any, ...] | None = None
        self.broken: RankError | None = None

    def begin(self) -> None:
        """Post the first receives of every sender."""
        for link in self._in.values():
            self._post(link)

    # -- receiving ------------------------------------------------------------------------------------------

    def _post(self, link: Link, count: int = AHEAD) -> None:
        while len(link.posted) < max(count, SMALL) and link.at + len(link.posted) < len(link.messages):
            message = link.messages[link.at + len(link.posted)]
            frame = self._frames.get(self._key(message))
            if len(link.posted) >= count and (frame is None or not frame.room):
                break
            buffers = self._room(frame)
            works = self._receive(buffers, link, message, EXPECTED)
            link.posted.append(Posted(message, frame, buffers, works))
        self._soonest = min((link.messages[place].op.task for link in self._in.values()
                             if (place := link.at + len(link.posted)) < len(link.messages)), default=LAST)

    def _keep_up(self, task: int) -> None:
        """Make room for all that comes before ``task`` in the plan's order.

        Done before this rank waits for the message of ``task``. So whoever waits, for a message or for room for one,
        waits for a rank that itself waits for an earlier one at most, and the first of all can go on: no rank waits
        for ever, whatever the others read last.
        """
        for link in self._in.values():
            count = len(link.posted)
            while link.at + count < len(link.messages) and link.messages[link.at + count].op.task < task:
                count += 1
            self._post(link, count)

    def _room(self, frame: Frame | None) -> list[Tensor]:
        """Empty buffers for a message: one with its header in front, or header and tensors apart."""
        if frame is None or not frame.leaves:
            return [torch.empty(HEAD, dtype=torch.uint8)]
        if frame.room and len(frame.leaves) == 1:
            return [sole_room(frame, self._device)]
        if frame.room:
            return [torch.empty(frame.room, dtype=torch.uint8, device=self._device)]
        return [torch.empty(HEAD, dtype=torch.uint8), *(
            torch.empty(leaf.nbytes, dtype=torch.uint8, device=self._device) for leaf in frame.leaves if leaf.nbytes
        )]

    def _next(self, link: Link) -> tuple[int, Any]:
        if not link.posted:
            self._post(link)
        posted = link.posted[0]
        self._wait(posted.works, link, posted.message)
        link.posted.popleft()
        link.at += 1
        self._post(link)
        status, length, task, known = HEADER.unpack_from(header_of(posted.buffers[0]))
        message = posted.message
        if task != message.op.task:
            text = f"device {link.peer} sent task {task}, this rank expects {message.op.task}"
            self.broken = RankError(text, link.peer)
            raise self.broken
        self._acknowledged(link.peer, known)
        frame, buffers = posted.frame, posted.buffers
        if status == SAME and frame is not None:
            return message.op.slot, self._opened(frame, buffers)
        blob = torch.empty(length, dtype=torch.uint8)
        self._take([blob], link, message)
        if status == FAILED:
            self.stopped = True
            self.failure = self.failure or pickle.loads(blob.numpy().tobytes())
            return message.op.slot, None
        frame = loaded(blob)
        buffers = self._room(frame) if frame.leaves else []
        self._take(buffers, link, message)
        self.learned[self._key(message)] = frame
        return message.op.slot, self._opened(frame, buffers)

    def _take(self, buffers: Sequence[Tensor], link: Link, message: Message) -> None:
        self._wait(self._receive(buffers, link, message, FOLLOWING), link, message)

    def _receive(self, buffers: Sequence[Tensor], link: Link, message: Message, tag: int) -> list[Any]:
        try:
            return [self._group.recv([buffer], link.peer, tag) for buffer in buffers]
        except RuntimeError as error:
            raise self._over(link, message, error) from error

    def _wait(self, works: list[Any], link: Link, message: Message) -> None:
        """Wait for ``works``, which leave the list: a second wait for one that has ended, as an interrupt came in
        between, would not end."""
        if self.broken is not None:
            raise self.broken
        if self._soonest < message.op.task:
            self._keep_up(message.op.task)
        self.waits.begins(link.peer)
        try:
            while works:
                works.pop(0).wait(self._timeout)
        except RuntimeError as error:
            raise self._over(link, message, error) from error
        self.waits.ends()

    def _over(self, link: Link, message: Message, error: RuntimeError) -> RankError:
        """The error when a connection has ended, or nothing comes."""
        self.stopped = True
        self.broken = self._lost(link.peer, message.what, error)
        return self.broken

    def _opened(self, frame: Frame, buffers: list[Tensor]) -> Any:
        if frame.room and len(frame.leaves) == 1:
            made = [sole(frame, buffers[0])]
        elif frame.room:
            made = [rebuilt(frame, number, buffers[0], at) for number, at in enumerate(frame.offsets)]
        else:
            rest = iter(buffers[1:])
            made = [
                rebuilt(frame, number, next(rest) if leaf.nbytes else torch.empty(0, dtype=torch.uint8))
                for number, leaf in enumerate(frame.leaves)
            ]
        return payload_of(frame, made)

    # -- sending --------------------------------------------------------------------------------------------

    def send(self, route: Route, slot: int, payload: Any) -> None:
        """Begin to send what a COPY carries; it is kept until the reader has it."""
        if route[1] == self._rank:
            self._own.append((slot, payload))
            return
        link = self._out[route[1]]
        message = link.messages[link.at]
        expected = self._frames.get(self._key(message))
        lone = None if expected is None else lone_of(expected, payload)
        if expected is not None and lone is not None:
            self._give(link, message, expected, [lone])
            return
        frame, tensors = frame_of(payload)
        if expected is not None and fits(expected, frame):
            self._give(link, message, expected, tensors)
            return
        blob = dumped(frame, message.what)
        envelope = self._envelope(frame, tensors) if frame.leaves else None  # what can fail comes before the first send
        parts = self._parts(frame, tensors) if envelope is None and frame.leaves else []
        self._unfilled(link, message, expected, CHANGED, len(blob))
        for buffer in (blob, *parts):
            self._send(link, buffer, FOLLOWING)
        if envelope is not None:
            self._send(link, envelope.buffer, FOLLOWING, envelope)
        self.learned[self._key(message)] = frame

    def _unfilled(self, link: Link, message: Message, expected: Frame | None, status: int, length: int) -> None:
        """Send what the reader has made room for, so that its receives end, with a header that says it is nothing."""
        buffers = self._room(expected)
        self._head(header_of(buffers[0]), link, message, status, length)
        for buffer in buffers:
            self._send(link, buffer, EXPECTED)
        link.at += 1

    def _give(self, link: Link, message: Message, frame: Frame, tensors: list[Tensor]) -> None:
        """Send a message of the form that is expected."""
        envelope = self._envelope(frame, tensors)
        if envelope is not None:
            self._head(envelope.head, link, message, SAME, 0)
            self._send(link, envelope.buffer, EXPECTED, envelope)
        else:
            parts = self._parts(frame, tensors)
            self._head(header_of(parts[0]), link, message, SAME, 0)
            for buffer in parts:
                self._send(link, buffer, EXPECTED)
        link.at += 1

    def _envelope(self, frame: Frame, tensors: list[Tensor]) -> Envelope | None:
        """A filled envelope, used before if one is free; None where the tensors travel one by one."""
        if not frame.room:
            return None
        free = self._envelopes.get(frame)
        if free:
            envelope = free.pop()
        else:
            envelope = Envelope(frame, torch.empty(frame.room, dtype=torch.uint8, device=self._device))
        envelope.fill(tensors)
        return envelope

    def _parts(self, frame: Frame, tensors: list[Tensor]) -> list[Tensor]:
        """A header, and each tensor sent from its own memory."""
        parts = (as_bytes(t) for t, leaf in zip(tensors, frame.leaves, strict=True) if leaf.nbytes)
        return [torch.empty(HEAD, dtype=torch.uint8), *parts]

    def _head(self, memory: Any, link: Link, message: Message, status: int, length: int) -> None:
        back = self._in.get(link.peer)
        known = back.at if back is not None else 0
        HEADER.pack_into(memory, 0, status, length, message.op.task, known)

    def _send(self, link: Link, buffer: Tensor, tag: int, envelope: Envelope | None = None) -> None:
        posted = tag == EXPECTED
        try:
            work = self._group.send([buffer], link.peer, tag)
        except RuntimeError as error:
            raise self._over(link, link.messages[min(link.at, len(link.messages) - 1)], error) from error
        link.sending.append(Sending(link.at, work, envelope, posted))
        while link.sending[0].posted and link.at - link.sending[0].number >= PENDING:
            self._sent(link)

    def _acknowledged(self, peer: int, known: int) -> None:
        """Let go of what the peer says it has received."""
        link = self._out.get(peer)
        if link is not None:
            while link.sending and link.sending[0].number < known:
                self._sent(link)

    def _sent(self, link: Link) -> None:
        sending = link.sending.popleft()
        self._wait([sending.work], link, link.messages[min(sending.number, len(link.messages) - 1)])
        if sending.envelope is not None:
            self._envelopes.setdefault(sending.envelope.frame, []).append(sending.envelope)

    # -- ends -----------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """Wait until everything sent has arrived."""
        for link in self._out.values():
            while link.sending:
                self._sent(link)

    def drain(self, ops: Sequence[Op], failure: tuple[Any, ...]) -> None:
        """Bring this rank's part of a failed run to its end."""
        self._to_the_end(ops, failure)
        self.finish()

    def _fail(self, link: Link, failure: tuple[Any, ...]) -> None:
        blob = torch.frombuffer(bytearray(pickle.dumps(failure)), dtype=torch.uint8)
        message = link.messages[link.at]
        self._unfilled(link, message, self._frames.get(self._key(message)), FAILED, len(blob))
        self._send(link, blob, FOLLOWING)

    def farewell(self, failure: tuple[Any, ...]) -> None:
        """With a rank gone the step cannot be brought to its end: tell those that wait for this one, as far as it goes.

        Nothing is received any more and nothing waited for; the connections are of no use afterwards.
        """
        blob = torch.frombuffer(bytearray(pickle.dumps(failure)), dtype=torch.uint8)
        for link in self._out.values():
            for message in link.messages[link.at :]:
                try:
                    expected = self._frames.get(self._key(message))
                    buffers = self._room(expected)
                    self._head(header_of(buffers[0]), link, message, FAILED, len(blob))
                    for buffer, tag in [*((b, EXPECTED) for b in buffers), (blob, FOLLOWING)]:
                        link.sending.append(Sending(link.at, self._group.send([buffer], link.peer, tag), None))
                except RuntimeError:  # that one is gone as well
                    break

    def leave(self) -> None:
        super().leave()
        self._group = None

    def stop(self) -> None:
        """This rank has failed."""
        self.stopped = True
