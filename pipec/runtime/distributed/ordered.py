"""Channels with the discipline that NCCL needs: tensors travel in one order per rank that the plan fixes, without tags.

NCCL runs the transfers of a communicator one after another in the order in which a rank issues them, and each waits for
its other end. So what travels there, and in which order, must follow from what all ranks know: the plan and the forms
of the last step. Everything that is only known when it happens goes through a second group, between hosts: a header per
message, and where a message has another form than expected, its description and content. The tensors that were expected
are sent all the same, without meaning, so that the order stays. The host never reads a device's memory.
"""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from attrs import define, field
from torch import Tensor

from pipec.errors import RankError
from pipec.runtime.channels import Stopped
from pipec.runtime.distributed.backend import Traffic
from pipec.runtime.distributed.channels import (
    CHANGED,
    EXPECTED,
    FAILED,
    FOLLOWING,
    HEADER,
    SAME,
    Link,
    Lost,
    Message,
    header_of,
)
from pipec.runtime.distributed.order import Order, Transfer
from pipec.runtime.distributed.wire import (
    HEAD,
    Envelope,
    Frame,
    as_bytes,
    dumped,
    fits,
    frame_of,
    loaded,
    payload_of,
    rebuilt,
)
from pipec.runtime.program import Op, Route

AHEAD = 4  # transfers issued beyond what is needed now
GONE = 3  # in place of CHANGED or FAILED: a rank is gone, nothing that is expected comes any more
PENDING = 16  # headers and tensors under way that are not waited for


@define(eq=False)
class Works:
    """What to wait for until a group has ended; once, whichever of its transfers is asked for first."""

    left: list[Any] = field(factory=list)

    def wait(self, timeout: timedelta) -> None:
        while self.left:
            self.left.pop().wait(timeout)


@define(eq=False)
class Awaited:
    """A message to come: room for its header and for the tensors that are expected."""

    frame: Frame | None
    head: Tensor
    header: Any
    buffers: list[Tensor]
    works: Works


class OrderedChannels:
    """The channels of one rank during one run of a task list; the same methods as :class:`.channels.RankChannels`.

    Attributes:
        issued: every group of transfers in the order it was issued, for whoever wants to look.
    """

    def __init__(
        self, groups: Any, ranks: Sequence[int], rank: int, traffic: Traffic, order: Order,
        frames: dict[Any, Frame], forms: Sequence[Any] | None, timeout: float, device: torch.device, lost: Lost,
        received: Mapping[Route, int] | None = None,
    ) -> None:
        """``groups``: (tensors, between hosts); ``ranks``: the global rank of every device; ``order``: this rank's."""
        self._data, self._hosts = groups
        self._ranks, self._rank, self._device, self._lost = ranks, rank, device, lost
        self._in = {peer: Link(peer, messages) for peer, messages in traffic.incoming.items()}
        self._out = {peer: Link(peer, messages) for peer, messages in traffic.outgoing.items()}
        self._frames, self._forms, self._before = frames, forms, received or {}
        links = (*self._in.values(), *self._out.values())
        self._message = {message.op.task: message for link in links for message in link.messages}
        self._left = deque(order)
        self._ready: dict[int, list[Tensor]] = {}  # tensors of sends that have not been issued
        self._awaited: dict[int, Awaited] = {}
        self._sending: deque[tuple[Message, list[Any], Any]] = deque()
        self._late: deque[tuple[Message, list[Any], Any]] = deque()  # sends that end when the reader looks closer
        self._timeout = timedelta(seconds=timeout)
        self.issued: list[tuple[Transfer, ...]] = []
        self.learned: dict[Any, Frame] = {}
        self.stopped = False
        self.failure: tuple[Any, ...] | None = None
        self.broken: RankError | None = None

    def begin(self) -> None:
        """Issue the first transfers of which this rank is the receiver."""
        self._advance(-1)

    # -- the order ------------------------------------------------------------------------------------------

    def _advance(self, task: int) -> None:
        """Issue what comes up to ``task``, and some more, as far as all that this rank sends is ready."""
        while self._left:
            group = self._left[0]
            if any(one.route[0] == self._rank and one.task not in self._ready for one in group):
                return
            if group[0].task > task and len(self._awaited) >= AHEAD:
                return
            self._issue(self._left.popleft())

    def _issue(self, group: tuple[Transfer, ...]) -> None:
        operations, works = [], Works()
        kind: Any
        for one in group:
            source, target = one.route
            if source == self._rank:
                peer, kind, buffers = self._ranks[target], dist.isend, self._ready.pop(one.task)
                self._sending.append((self._message[one.task], [works], buffers))
            else:
                peer, kind = self._ranks[source], dist.irecv
                frame = self._frames.get(self._key(self._message[one.task]))
                buffers, head = room(frame, self._device), torch.empty(HEAD, dtype=torch.uint8)
                header = self._hosts.recv([head], source, EXPECTED)
                self._awaited[one.task] = Awaited(frame, head, header, buffers, works)
            operations += [dist.P2POp(kind, buffer, peer, self._data) for buffer in buffers]
        self.issued.append(group)
        if operations:
            works.left += dist.batch_isend_irecv(operations)

    def _key(self, message: Message) -> Any:
        form = None if self._forms is None else self._forms[message.op.piece]
        return (*message.op.route, message.value, message.gradient, form)

    # -- receiving ------------------------------------------------------------------------------------------

    def receive(self, route: Route) -> tuple[int, Any]:
        """The next (slot, payload) of ``route``; waits for it.

        Raises:
            Stopped: the sender has failed.
            RankError: it has ended or does not answer.
        """
        slot, payload = self._next(self._in[route[0]])
        if self.stopped:
            raise Stopped
        return slot, payload

    def _next(self, link: Link) -> tuple[int, Any]:
        message = link.messages[link.at]
        task = message.op.task
        self._advance(task)
        own = self._awaited[task]
        self._wait([own.header], link.peer, message)
        status, length, sent, _ = HEADER.unpack_from(header_of(own.head))
        if sent != task:
            self.broken = RankError(f"device {link.peer} sent task {sent}, this rank expects {task}", link.peer)
            raise self.broken
        link.at += 1
        del self._awaited[task]
        self._advance(-1)
        if status == SAME and own.frame is not None:
            self._wait([own.works], link.peer, message)
            return message.op.slot, opened(own.frame, own.buffers)
        self._sending.append((message, [own.works], own.buffers))  # without meaning; waited for at the end
        blob = torch.empty(length, dtype=torch.uint8)
        self._take([blob], link.peer, message)
        if status in (FAILED, GONE):
            self.stopped = True
            self.failure = self.failure or pickle.loads(blob.numpy().tobytes())
            if status == GONE:
                rank, text = self.failure or (-1, "")
                self.broken = RankError(text, rank)
                raise self.broken
            return message.op.slot, None
        frame = loaded(blob)
        buffers = room(frame, torch.device("cpu"))
        self._take(buffers, link.peer, message)
        self.learned[self._key(message)] = frame
        return message.op.slot, opened(frame, [buffer.to(self._device) for buffer in buffers])

    def _take(self, buffers: Sequence[Tensor], peer: int, message: Message) -> None:
        self._wait([self._hosts.recv([buffer], peer, FOLLOWING) for buffer in buffers], peer, message)

    def _wait(self, works: Sequence[Any], peer: int, message: Message) -> None:
        if self.broken is not None:
            raise self.broken
        try:
            for work in works:
                work.wait(self._timeout)
        except RuntimeError as error:
            self.stopped = True
            self.broken = self._lost(peer, message.what, error)
            raise self.broken from error

    def left(self) -> list[tuple[Route, int]]:
        """By route how many messages no task has asked for yet."""
        return [((link.peer, self._rank), len(link.messages) - link.at) for link in self._in.values()]

    # -- sending --------------------------------------------------------------------------------------------

    def send(self, route: Route, slot: int, payload: Any) -> None:
        """Begin to send what a COPY carries; it is kept until the reader has it."""
        link = self._out[route[1]]
        message = link.messages[link.at]
        expected = self._frames.get(self._key(message))
        frame, tensors = frame_of(payload)
        if expected is not None and fits(expected, frame):
            self._give(link, message, SAME, parts(frame, tensors, self._device), [])
            return
        blob, content = dumped(frame, message.what), parts(frame, [t.cpu() for t in tensors], torch.device("cpu"))
        self._give(link, message, CHANGED, room(expected, self._device), [blob, *content])
        self.learned[self._key(message)] = frame

    def _give(
        self, link: Link, message: Message, status: int, buffers: list[Tensor], following: Sequence[Tensor]
    ) -> None:
        """Send a header and what follows it between hosts; issue what comes up to this message."""
        task = message.op.task
        head = torch.empty(HEAD, dtype=torch.uint8)
        HEADER.pack_into(header_of(head), 0, status, len(following[0]) if following else 0, task, 0)
        works = [self._hosts.send([head], link.peer, EXPECTED)]
        works += [self._hosts.send([one], link.peer, FOLLOWING) for one in following]
        link.at += 1
        self._ready[task] = buffers
        self._advance(task)
        own = (message, works, [head, *following])
        if following:  # looked for only when the message is read
            self._late.append(own)
        else:
            self._sending.append(own)
        while len(self._sending) > PENDING:
            self._sent()

    def _sent(self) -> None:
        message, works, _ = self._sending.popleft()
        source, target = message.op.route
        self._wait(works, target if source == self._rank else source, message)

    # -- ends -----------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """Wait until everything sent has arrived."""
        self._sending.extend(self._late)
        self._late.clear()
        while self._sending:
            self._sent()

    def drain(self, ops: Sequence[Op], failure: tuple[Any, ...]) -> None:
        """Send and receive the rest of what the plan says without any content, so that every rank gets to its end."""
        self.stopped = True
        place: dict[int, int] = {}
        for op in ops:
            for route, count in op.receives:
                link = self._in[route[0]]
                while link.at < count - self._before.get(route, 0):
                    self._next(link)
            if op.route[0] == self._rank:
                link = self._out[op.route[1]]
                place[link.peer] = place.get(link.peer, 0) + 1
                if link.at < place[link.peer]:
                    self._fail(link, failure)
        for link in self._in.values():
            while link.at < len(link.messages):
                self._next(link)
        self.finish()

    def _fail(self, link: Link, failure: tuple[Any, ...]) -> None:
        """Send the next message of a link without meaning."""
        message = link.messages[link.at]
        blob = torch.frombuffer(bytearray(pickle.dumps(failure)), dtype=torch.uint8)
        self._give(link, message, FAILED, room(self._frames.get(self._key(message)), self._device), [blob])

    def farewell(self, failure: tuple[Any, ...]) -> None:
        """With a rank gone the step cannot be brought to its end: tell those that wait for this one, as far as it goes.

        Nothing is received any more and nothing waited for; the connections are of no use afterwards.
        """
        blob = torch.frombuffer(bytearray(pickle.dumps(failure)), dtype=torch.uint8)
        for link in self._out.values():
            for message in link.messages[link.at :]:
                head = torch.empty(HEAD, dtype=torch.uint8)
                HEADER.pack_into(header_of(head), 0, GONE, len(blob), message.op.task, 0)
                try:
                    works = [self._hosts.send([head], link.peer, EXPECTED),
                             self._hosts.send([blob], link.peer, FOLLOWING)]
                except RuntimeError:  # that one is gone as well
                    break
                self._late.append((message, works, [head, blob]))

    def stop(self) -> None:
        """This rank has failed."""
        self.stopped = True


def room(frame: Frame | None, device: torch.device) -> list[Tensor]:
    """Empty buffers for the tensors of a message: one for all where they are small."""
    if frame is None or not frame.leaves:
        return []
    if frame.room:
        return [torch.empty(frame.room, dtype=torch.uint8, device=device)]
    return [torch.empty(leaf.nbytes, dtype=torch.uint8, device=device) for leaf in frame.leaves if leaf.nbytes]


def parts(frame: Frame, tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """The tensors of a message as buffers of the sizes of :func:`room`."""
    if not frame.leaves:
        return []
    if frame.room:
        envelope = Envelope(frame, torch.empty(frame.room, dtype=torch.uint8, device=device))
        envelope.fill(tensors)
        return [envelope.buffer]
    return [as_bytes(tensor) for tensor, leaf in zip(tensors, frame.leaves, strict=True) if leaf.nbytes]


def opened(frame: Frame, buffers: Sequence[Tensor]) -> Any:
    """The value in buffers of :func:`room`."""
    if frame.room and frame.leaves:
        made = [rebuilt(frame, number, buffers[0], at) for number, at in enumerate(frame.offsets)]
    else:
        rest = iter(buffers)
        made = [
            rebuilt(frame, number, next(rest) if leaf.nbytes else torch.empty(0, dtype=torch.uint8))
            for number, leaf in enumerate(frame.leaves)
        ]
    return payload_of(frame, made)
