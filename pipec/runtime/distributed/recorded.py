"""Channels over lines between ranks: what those of one host and those between hosts have in common.

The protocol is that of :mod:`.channels`, with two differences. A sender gives a value away and goes on; it waits only
where too much is unread. And a reader posts nothing: it takes a value in when a task needs it, or before it waits for
something that comes later in the plan's order.
"""

from __future__ import annotations

import pickle
from abc import abstractmethod
from collections import deque
from collections.abc import Mapping, Sequence
from time import monotonic
from typing import Any

from attrs import define, field
from torch import Tensor

from pipec.errors import RankError
from pipec.runtime.distributed.backend import Traffic
from pipec.runtime.distributed.channels import PENDING, Lost, Message
from pipec.runtime.distributed.links import Key, Links
from pipec.runtime.distributed.records import CHANGED, FAILED, KNOWN, SAME, GoneError, RecordLines
from pipec.runtime.distributed.wire import Frame, dumped, fits, frame_of, lone_of
from pipec.runtime.program import Op, Route

UNTOLD = PENDING // 2  # messages that are read without a word to their sender
ROOM = 64 << 20  # bytes under way to a reader, beyond which a sender waits
ODD = -1  # status of a message that could not be read
TOLD = 4000  # characters of what is said about a failure


@define(eq=False)
class Out:
    """What goes to another rank: the messages, how many were sent, and what keeps account of those under way."""

    peer: int
    messages: list[Message]
    pool: Any
    at: int = 0
    told: bool = False  # of a failure


@define(eq=False)
class In:
    """What comes from another rank: the messages, how many tasks have asked for, those taken in before, and how
    much was read without a word to the sender."""

    peer: int
    messages: list[Message]
    inbox: deque[Any]
    at: int = 0
    early: deque[tuple[int, Any]] = field(factory=deque)
    taken: int = 0
    told: int = 0
    size: int = 0  # bytes read since


class RecordChannels(Links):
    """The channels of one rank during one run of a task list; the same methods as :class:`.channels.RankChannels`."""

    _lines: RecordLines

    def __init__(
        self, lines: RecordLines, pools: Mapping[int, Any], rank: int, traffic: Traffic, frames: dict[Key, Frame],
        forms: Sequence[Any] | None, timeout: float, lost: Lost, received: Mapping[Route, int] | None = None,
    ) -> None:
        """``pools``: per rank what keeps account of what goes there."""
        lines.next_turn()
        self._rank, self._lost, self._timeout = rank, lost, timeout
        self._in = {peer: In(peer, messages, lines.inbox[peer]) for peer, messages in traffic.incoming.items()}
        self._out = {peer: Out(peer, messages, pools[peer]) for peer, messages in traffic.outgoing.items()}
        self._frames, self._forms, self._before, self._own = frames, forms, received or {}, deque()
        self.learned: dict[Key, Frame] = {}
        self.stopped = False
        self.failure: tuple[Any, ...] | None = None
        self.broken: RankError | None = None

    def begin(self) -> None:
        """Nothing has to be posted."""

    # -- receiving ------------------------------------------------------------------------------------------

    def _next(self, link: In) -> tuple[int, Any]:
        message = link.messages[link.at]
        if not link.early:
            if not link.inbox:
                end = monotonic() + self._timeout
                while not link.inbox:
                    self._wait(link.peer, message, end)
            link.early.append(self._read(link, message))
        status, payload = link.early.popleft()
        link.at += 1
        if status == FAILED:
            self.stopped = True
            self.failure = self.failure or payload
            payload = None
        elif status == ODD:
            raise payload
        return message.op.slot, payload

    def _read(self, link: In, message: Message) -> tuple[int, Any]:
        """Status and payload of the record that came first; its block is free then."""
        record = link.inbox.popleft()
        if record.task != message.op.task or record.turn != self._lines.turn:
            text = f"device {link.peer} sent task {record.task}, this rank expects {message.op.task}"
            self.broken = RankError(text, link.peer)
            raise self.broken
        try:
            made = record.status, self._payload(link, message, record)
        except Exception as error:  # of what a pickle makes, say: raised where a task asks for the message
            made = ODD, error
        link.taken += 1
        if link.taken - link.told >= UNTOLD or link.size >= ROOM // 2:
            self._tell(link)
        return made

    @abstractmethod
    def _payload(self, link: In, message: Message, record: Any) -> Any:
        """What a record brought."""

    def _tell(self, link: In) -> None:
        """Say how many messages have been read, where no message of this rank's does."""
        link.told, link.size = link.taken, 0
        try:
            self._lines.tell(link.peer, KNOWN, known=link.taken)
        except RuntimeError:  # it has ended: found out by whoever waits for it
            return

    def _make_room(self, task: int) -> None:
        """Read all that has come and is before ``task`` in the plan's order.

        Done before this rank waits. So whoever waits, for a message or for room for one, waits for a rank that itself
        waits for an earlier one at most, and the first of all can go on: no rank waits for ever, whatever the others
        read last.
        """
        for link in self._in.values():
            before = link.taken
            while link.inbox and link.messages[link.taken].op.task < task:
                link.early.append(self._read(link, link.messages[link.taken]))
            if link.taken > before and link.taken > link.told:
                self._tell(link)

    def _wait(self, peer: int, message: Message, end: float) -> None:
        """Make room, then wait for a message, or for room for it, until something has come."""
        if self.broken is not None:
            raise self.broken
        self._make_room(message.op.task)
        try:
            self._lines.wait(peer, end)
        except RuntimeError as error:
            raise self._broken(peer, message, error) from error

    def _broken(self, peer: int, message: Message, error: RuntimeError) -> RankError:
        """The error when a rank has ended or does not answer."""
        self.stopped = True
        if isinstance(error, GoneError):
            self.failure = self.failure or (error.rank, str(error))
            self.broken = RankError(str(error), error.rank)
        else:
            self.broken = self._lost(peer, message.what, error)
        return self.broken

    # -- sending --------------------------------------------------------------------------------------------

    def send(self, route: Route, slot: int, payload: Any) -> None:
        """Give away what a COPY carries."""
        if route[1] == self._rank:
            self._own.append((slot, payload))
            return
        link = self._out[route[1]]
        message = link.messages[link.at]
        expected = self._frames.get(self._key(message))
        if expected is not None:
            lone = lone_of(expected, payload)
            if lone is not None:
                self._give(link, message, SAME, expected, [lone], None)
                return
        frame, tensors = frame_of(payload)
        if expected is not None and fits(expected, frame):
            self._give(link, message, SAME, expected, tensors, None)
            return
        self._give(link, message, CHANGED, frame, tensors, dumped(frame, message.what))
        self.learned[self._key(message)] = frame

    @abstractmethod
    def _give(
        self, link: Out, message: Message, status: int, frame: Frame, tensors: list[Tensor], form: Tensor | None
    ) -> None:
        """Send a message, with the description of its form if it has another one now."""

    @abstractmethod
    def _say(self, link: Out, message: Message, status: int, *, rest: bytes = b"") -> None:
        """Send the record of a message without content."""

    def _acknowledged(self, link: Out) -> int:
        """How many messages of the other direction have been read, to be told with the next record."""
        back: In | None = self._in.get(link.peer)
        if back is None:
            return 0
        back.told, back.size = back.taken, 0
        return back.taken

    def _await_room(self, link: Out, message: Message) -> None:
        """Take back what the reader has read; wait while too much is under way to it."""
        pool, lines = link.pool, self._lines
        pool.read(lines.known[link.peer])
        end = 0.0
        while len(pool.held) >= PENDING or pool.size >= ROOM:
            if not lines.take(link.peer):
                end = end or monotonic() + self._timeout
                self._wait(link.peer, message, end)
            pool.read(lines.known[link.peer])

    # -- ends -----------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """What was sent needs no more of this rank."""

    def drain(self, ops: Sequence[Op], failure: tuple[Any, ...]) -> None:
        """Bring this rank's part of a failed run to its end."""
        self._to_the_end(ops, failure)

    def _fail(self, link: Out, failure: tuple[Any, ...]) -> None:
        """Send the next message without content; the first of a link says why."""
        message = link.messages[link.at]
        self._await_room(link, message)
        story = None if link.told else (failure[0], failure[1][:TOLD])
        self._say(link, message, FAILED, rest=pickle.dumps(story))
        link.told = True

    def farewell(self, failure: tuple[Any, ...]) -> None:
        """With a rank gone the step cannot be brought to its end: tell the others, as far as it goes."""
        self._lines.give_up((failure[0], failure[1]))

    def stop(self) -> None:
        """This rank has failed."""
        self.stopped = True
