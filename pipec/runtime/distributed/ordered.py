"""Channels of a rank on a GPU: content travels in one order per rank that the plan fixes, without tags, as NCCL needs.

NCCL runs the transfers of a communicator one after another in the order in which a rank issues them, and each waits for
its other end. So what travels there, and in which order, must follow from what all ranks know: the plan and the forms
of the last step. Everything that is only known when it happens goes through a second group, between hosts: a header per
message, and where a message has another form than expected, its description and content. The tensors that were expected
are sent all the same, without meaning, so that the order stays.

The host waits for headers, which come from another host as soon as that one has queued the send, and never for a
device; but for a message of another form, whose content goes by way of the hosts.
"""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
from attrs import define, evolve
from torch import Tensor

from pipec.errors import RankError
from pipec.ir import Kind
from pipec.runtime.distributed.backend import Traffic
from pipec.runtime.distributed.carriers import Carrier, parts, room
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
from pipec.runtime.distributed.hosting import Hosted, HostMemory
from pipec.runtime.distributed.links import Links
from pipec.runtime.distributed.order import REPLICAS, Order, Transfer
from pipec.runtime.distributed.wire import HEAD, Frame, dumped, fits, frame_of, loaded, payload_of, rebuilt
from pipec.runtime.distributed.wires import Leg
from pipec.runtime.program import Op, Route

AHEAD = 4  # transfers issued beyond what is needed now
GONE = 3  # in place of CHANGED or FAILED: a rank is gone, nothing that is expected comes any more
PENDING = 16  # headers under way that are not waited for
HELD = 8  # groups of transfers under way that the compute stream does not wait for
HOST = torch.device("cpu")


@define(eq=False)
class Awaited:
    """A message to come: room for its header, and the form that is expected."""

    frame: Frame | None
    head: Tensor
    header: list[Any]  # what to wait for


class OrderedChannels(Links):
    """The channels of one rank during one run of a task list; the same methods as :class:`.channels.RankChannels`.

    Attributes:
        issued: every group of transfers in the order it was issued, for whoever wants to look.
    """

    def __init__(
        self, carrier: Carrier, memory: HostMemory, hosts: Any, ranks: Sequence[int], rank: int, traffic: Traffic,
        order: Order, frames: dict[Any, Frame], forms: Sequence[Any] | None, timeout: float, lost: Lost,
        received: Mapping[Route, int] | None = None,
    ) -> None:
        """``memory``: for values that wait in host memory; ``hosts``: the group between hosts; ``ranks``: the global
        rank of every device; ``order``: this rank's; the others as in :class:`.channels.RankChannels`."""
        self._carrier, self._memory, self._hosts = carrier, memory, hosts
        self._ranks, self._rank, self._lost = ranks, rank, lost
        self._in = {peer: Link(peer, messages) for peer, messages in traffic.incoming.items()}
        self._out = {peer: Link(peer, messages) for peer, messages in traffic.outgoing.items()}
        self._frames, self._forms, self._before = frames, forms, received or {}
        self._own: deque[tuple[int, Any, Any]] = deque()
        self._name, self._reached = "", -1  # the task that is queued now
        links = (*self._in.values(), *self._out.values())
        self._message = {message.op.task: message for link in links for message in link.messages}
        self._left = deque(order)
        self._late_receives = any(one.hosted and one.route[0] != rank for group in order for one in group)
        reduces = {one.task for group in order for one in group if one.route[1] == REPLICAS}
        self._reduces = {op.stage: op.task for op in traffic.ops[rank] if op.task in reduces}
        self._ready: dict[int, Any] = {}  # buffers of sends that have not been issued; of a REDUCE what begins it
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

    def look(self, task: int, name: str) -> None:
        """Before a task: begin what could not begin yet."""
        self._name, self._reached = name, task
        self._carrier.push(wait=False)
        self._memory.look()
        if self._late_receives:
            self._advance(-1)

    # -- the order ------------------------------------------------------------------------------------------

    def _advance(self, task: int) -> None:
        """Issue what comes up to ``task``, and some more, as far as all that this rank sends is ready.

        Nothing overtakes a send that is not ready. So all that a receive may have to wait for, here and elsewhere, was
        queued before it, and it holds up nothing that it needs, even where streams share one queue of the device.
        """
        while self._left:
            group = self._left[0]
            if any(one.route[0] == self._rank and one.task not in self._ready for one in group):
                return
            if group[0].task > task and (len(self._awaited) >= AHEAD or self._early(group)):
                return
            self._left.popleft()
            try:
                self._issue(group)
            except RuntimeError as error:
                if group[0].route[1] == REPLICAS or not (self.waits.alarmed or "gloo" in str(error)):
                    raise  # it is not a connection between hosts that has ended
                source, target = group[0].route
                peer = target if source == self._rank else source
                raise self._over(peer, self._message[group[0].task], error) from error

    def _over(self, peer: int, message: Message, error: RuntimeError) -> RankError:
        """The error when a connection has ended, or nothing comes."""
        self.stopped = True
        self.broken = self._lost(peer, message.what, error)
        return self.broken

    def _early(self, group: tuple[Transfer, ...]) -> bool:
        """Whether a value would come from host memory before the task that the plan lets it wait for is queued."""
        return group[0].hosted and group[0].route[0] != self._rank and group[0].task > self._reached

    def _issue(self, group: tuple[Transfer, ...]) -> None:
        self.issued.append(group)
        if group[0].route[1] == REPLICAS:
            self._ready.pop(group[0].task)()
            return
        legs = []
        for one in group:
            source, target = one.route
            message, sends = self._message[one.task], source == self._rank
            peer = target if sends else source
            frame = None if sends else self._frames.get(self._key(message))
            buffers = self._ready.pop(one.task) if sends else []
            if not sends:
                head = torch.empty(HEAD, dtype=torch.uint8)
                self._awaited[one.task] = Awaited(frame, head, [self._hosts.recv([head], source, EXPECTED)])
            legs.append(Leg(one.task, name_of(message), peer, self._ranks[peer], sends, frame, buffers))
        self._carrier.issue(legs)

    def reduce(self, stage: int, begin: Callable[[], None]) -> None:
        """Let ``begin`` begin the REDUCE of a stage at its place in the order; at once where it has none."""
        task = self._reduces.get(stage)
        if task is None:
            begin()
        else:
            self._ready[task] = begin
            self._advance(task)

    # -- receiving ------------------------------------------------------------------------------------------

    def _back(self) -> tuple[int, Any]:
        slot, payload, event = self._own.popleft()
        self._memory.await_device(event)
        return slot, payload

    def _next(self, link: Link) -> tuple[int, Any]:
        message = link.messages[link.at]
        task = message.op.task
        self._advance(task)
        own = self._awaited[task]
        self._wait(own.header, link.peer, message)
        status, length, sent, _ = HEADER.unpack_from(header_of(own.head))
        if sent != task:
            self.broken = RankError(f"device {link.peer} sent task {sent}, this rank expects {task}", link.peer)
            raise self.broken
        link.at += 1
        del self._awaited[task]
        self._advance(-1)
        if status == SAME and own.frame is not None:
            self._wait(self._carrier.awaited(task), link.peer, message)
            return message.op.slot, opened(own.frame, self._carrier.take(task))
        self._carrier.drop(task)
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
        buffers = room(frame, HOST)
        self._take(buffers, link.peer, message)
        self.learned[self._key(message)] = frame
        memory = self._carrier.memory
        return message.op.slot, opened(moved(frame, memory), [buffer.to(memory) for buffer in buffers])

    def _take(self, buffers: Sequence[Tensor], peer: int, message: Message) -> None:
        try:
            works = [self._hosts.recv([buffer], peer, FOLLOWING) for buffer in buffers]
        except RuntimeError as error:
            raise self._over(peer, message, error) from error
        self._wait(works, peer, message)

    def _wait(self, works: list[Any], peer: int, message: Message) -> None:
        """Wait for ``works``, which leave the list: a second wait for one that has ended, as an interrupt came in
        between, would not end."""
        if self.broken is not None:
            raise self.broken
        if not works:
            return
        self.waits.begins(peer)
        try:
            self._carrier.push(wait=True)
            while works:
                works.pop(0).wait(self._timeout)
        except RuntimeError as error:
            raise self._over(peer, message, error) from error
        self.waits.ends()

    # -- sending --------------------------------------------------------------------------------------------

    def send(self, route: Route, slot: int, payload: Any) -> None:
        """Begin to send what a COPY carries; it is kept until the reader has it."""
        if route[1] == self._rank:
            self._own.append((slot, *self._memory.back(self._name, payload)))
            return
        link = self._out[route[1]]
        message = link.messages[link.at]
        expected = self._frames.get(self._key(message))
        event = None
        if type(payload) is Hosted:
            payload, event = payload.payload, payload.event
        frame, tensors = frame_of(payload)
        if expected is not None and fits(expected, frame):
            if event is None:
                buffers = self._carrier.parts(frame, tensors)
            else:
                buffers = self._carrier.from_host(message.op.task, self._name, frame, tensors, event)
            self._give(link, message, SAME, buffers, [])
            return
        if event is not None:
            self._memory.await_host(event)
        blob = dumped(moved(frame, HOST), message.what)
        content = [buffer.cpu() for buffer in parts(frame, tensors, self._carrier.memory if event is None else HOST)]
        self._give(link, message, CHANGED, self._carrier.blank(expected), [blob, *content])
        self.learned[self._key(message)] = frame

    def to_host(self, payload: Any) -> Hosted:
        """Begin to copy a value to host memory."""
        return self._memory.away(self._name, payload)

    def _give(
        self, link: Link, message: Message, status: int, buffers: list[Tensor], following: Sequence[Tensor]
    ) -> None:
        """Send a header and what follows it between hosts; issue what comes up to this message."""
        task = message.op.task
        head = torch.empty(HEAD, dtype=torch.uint8)
        HEADER.pack_into(header_of(head), 0, status, len(following[0]) if following else 0, task, 0)
        try:
            works = [self._hosts.send([head], link.peer, EXPECTED)]
            works += [self._hosts.send([one], link.peer, FOLLOWING) for one in following]
        except RuntimeError as error:
            raise self._over(link.peer, message, error) from error
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
        self._release(HELD)

    def _sent(self) -> None:
        message, works, _ = self._sending.popleft()
        self._wait(works, self._peer(message), message)

    def _release(self, most: int) -> None:
        for owed in self._carrier.over(most):
            message = self._message[owed.task]
            self._wait(owed.works, self._peer(message), message)

    def _peer(self, message: Message) -> int:
        source, target = message.op.route
        return target if source == self._rank else source

    # -- ends -----------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """Let everything sent arrive: the host waits for what leaves it, the compute stream for the rest."""
        self._sending.extend(self._late)
        self._late.clear()
        while self._sending:
            self._sent()
        self._release(0)
        while self._own:  # nobody reads it after a failure
            self._back()
        self._memory.finish()

    def drain(self, ops: Sequence[Op], failure: tuple[Any, ...], left: Collection[int] = (),
              reduce: Callable[[Op], None] | None = None) -> None:
        """Send and receive the rest of what the plan says without any content, so that every rank gets to its end.

        Args:
            left: REDUCE tasks that have not begun.
            reduce: begins one without content.
        """
        def begin(op: Op) -> None:
            if op.kind is Kind.REDUCE and op.task in left and reduce is not None:
                reduce(op)

        self._to_the_end(ops, failure, begin)
        self.finish()

    def _fail(self, link: Link, failure: tuple[Any, ...]) -> None:
        """Send the next message of a link without meaning."""
        message = link.messages[link.at]
        blob = torch.frombuffer(bytearray(pickle.dumps(failure)), dtype=torch.uint8)
        self._give(link, message, FAILED, self._carrier.blank(self._frames.get(self._key(message))), [blob])

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
        self._carrier.abandon()

    def leave(self) -> None:
        super().leave()
        self._sending.clear()
        self._late.clear()
        self._awaited.clear()
        self._hosts = None
        del self._carrier

    def stop(self) -> None:
        """This rank has failed."""
        self.stopped = True


def moved(frame: Frame, device: torch.device) -> Frame:
    """The frame with what is pickled whole, tensors that are more than their elements, on ``device``."""
    if frame.kind not in ("packed", "parcel") or frame.steady:
        return frame
    head, layout, leaves = frame.rest
    there = [leaf.to(device) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    return evolve(frame, rest=(head, layout, there))


def name_of(message: Message) -> str:
    """A COPY as a plan prints it."""
    op, (source, target) = message.op, message.op.route
    piece = f"{op.microbatch}.{op.slice}" if op.slice else f"{op.microbatch}"
    carries = ("", "d", "r", "", "")[message.gradient]
    return f"{carries}v{message.value}[{piece}]:{'host' if op.hosted else source}>{target}"


def opened(frame: Frame, buffers: Sequence[Tensor]) -> Any:
    """The value in buffers of :func:`.carriers.room`."""
    if frame.room and frame.leaves:
        made = [rebuilt(frame, number, buffers[0], at) for number, at in enumerate(frame.offsets)]
    else:
        rest = iter(buffers)
        made = [
            rebuilt(frame, number, next(rest) if leaf.nbytes else buffers[0][:0])
            for number, leaf in enumerate(frame.leaves)
        ]
    return payload_of(frame, made)
