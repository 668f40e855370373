"""How the content of messages gets from one GPU to another: on a wire between the devices, or through host memory.

Memory. Everything here belongs to the pool of the compute stream, on which all tasks of the rank run. What is sent is
held until that stream has waited for the transfer, or the host has seen its end; what is received is made room for
before the transfer is issued, and opened after the compute stream has waited for it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from attrs import define, frozen
from torch import Tensor

from pipec.runtime.distributed.hosting import HostMemory
from pipec.runtime.distributed.wire import Frame, as_bytes, placed
from pipec.runtime.distributed.wires import Leg, Wire
from pipec.runtime.stream_api import Event, Stream, StreamApi

CONTENT = 2  # tag of content that goes through host memory
HOST = torch.device("cpu")
Content = Callable[[], list[Tensor]]  # what leaves the host, once a copy has ended


@frozen(eq=False)
class Owed:
    """What the host has to wait for before a message has left it, and the memory that must live until then."""

    task: int
    works: list[Any]
    buffers: list[Tensor]


class Carrier(Protocol):
    """Content of messages between GPUs.

    Attributes:
        memory: where tensors are.
    """

    memory: torch.device

    def parts(self, frame: Frame, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The tensors of a message as buffers to send."""

    def from_host(self, task: int, name: str, frame: Frame, tensors: Sequence[Tensor], event: Event) -> list[Tensor]:
        """The same of tensors in host memory, which hold their elements after ``event``."""

    def blank(self, frame: Frame | None) -> list[Tensor]:
        """Buffers of the same sizes without meaning."""

    def issue(self, legs: Sequence[Leg]) -> None:
        """Begin a group of transfers."""

    def push(self, wait: bool) -> None:
        """Begin what could not begin yet; ``wait``: all of it, as the host has nothing else to do."""

    def awaited(self, task: int) -> list[Any]:
        """What the host has to wait for before it can take what a message brought."""

    def take(self, task: int) -> list[Tensor]:
        """What a message brought, for work that is queued from now on."""

    def drop(self, task: int) -> None:
        """What a message brought is without meaning."""

    def over(self, most: int) -> list[Owed]:
        """Let go of the oldest that was sent, or dropped, until ``most`` are left; what the host has to wait for."""

    def abandon(self) -> None:
        """A rank is gone: nothing that was begun will end."""


def room(frame: Frame | None, device: torch.device) -> list[Tensor]:
    """Empty buffers for the tensors of a message: one for all where they are small."""
    return [torch.empty(size, dtype=torch.uint8, device=device) for size in sizes(frame)]


def sizes(frame: Frame | None) -> list[int]:
    """Bytes of each buffer of a message."""
    if frame is None or not frame.leaves:
        return []
    return [frame.room] if frame.room else [leaf.nbytes for leaf in frame.leaves if leaf.nbytes]


def parts(frame: Frame, tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """The tensors of a message as buffers of the sizes of :func:`room`: views of their own memory where they are
    large and have no gaps."""
    if not frame.leaves:
        return []
    if not frame.room:
        return [as_bytes(tensor) for tensor, leaf in zip(tensors, frame.leaves, strict=True) if leaf.nbytes]
    buffer = torch.empty(frame.room, dtype=torch.uint8, device=device)
    join(frame, tensors, buffer)
    return [buffer]


def join(frame: Frame, tensors: Sequence[Tensor], buffer: Tensor) -> None:
    """Write the tensors of a message into one buffer; the host does not wait."""
    for number, (leaf, offset, tensor) in enumerate(zip(frame.leaves, frame.offsets, tensors, strict=True)):
        there, bare = placed(frame, number, buffer, offset), tensor.detach()
        if 0 in leaf.stride:  # elements that share memory travel once
            once = [1 if stride == 0 else n for n, stride in zip(leaf.size, leaf.stride, strict=True)]
            there, bare = there.as_strided(once, there.stride()), bare.as_strided(once, bare.stride())
        there.copy_(bare, non_blocking=True)


def bring(frame: Frame, tensors: Sequence[Tensor], buffers: Sequence[Tensor]) -> None:
    """Write tensors that are in host memory into buffers of :func:`room`; the host does not wait."""
    if frame.room:
        join(frame, tensors, buffers[0])
        return
    for there, here in zip(buffers, parts(frame, tensors, HOST), strict=True):
        there.copy_(here, non_blocking=True)


@define(eq=False)
class Group:
    """Transfers under way on a wire, and the memory they use.

    Attributes:
        peer: the device at the other end.
        number: counted on all wires.
    """

    peer: int
    number: int
    flight: Any
    held: list[tuple[str, list[Tensor]]]


class Wired:
    """Straight from device to device; neither the host nor the compute stream waits for a send.

    There is a wire for each other device, so that nobody's transfers stand behind another's. On one wire groups end in
    the order in which they were issued. So whenever the compute stream waits for one, because a task reads what it
    brings, everything sent there before is free again; only where nothing is read for long it waits for the oldest.
    """

    def __init__(
        self, api: StreamApi, wires: Mapping[int, Wire], compute: Stream, memory: torch.device, hosts: HostMemory
    ) -> None:
        """``wires``: by the device at the other end."""
        self.memory, self._hosts = memory, hosts
        self._fetched: set[int] = set()  # sends whose content comes by the stream of copies from the host
        self._api, self._wires, self._compute = api, wires, compute
        self._groups: dict[int, deque[Group]] = {peer: deque() for peer in wires}
        self._count = 0
        self._coming: dict[int, tuple[Group, str, list[Tensor]]] = {}

    def parts(self, frame: Frame, tensors: Sequence[Tensor]) -> list[Tensor]:
        return parts(frame, tensors, self.memory)

    def from_host(self, task: int, name: str, frame: Frame, tensors: Sequence[Tensor], event: Event) -> list[Tensor]:
        """A send begins after the copy-in stream has fetched it; the compute stream does not wait."""
        with self._api.on(self._compute, what=f"memory for {name}"):
            buffers = self.blank(frame)
        if buffers:
            self._fetched.add(task)
            self._hosts.fetch(name, event, lambda: bring(frame, tensors, buffers))
        return buffers

    def blank(self, frame: Frame | None) -> list[Tensor]:
        return room(frame, self.memory)

    def issue(self, legs: Sequence[Leg]) -> None:
        for leg in legs:
            if not leg.sends:
                with self._api.on(self._compute, what=f"memory for {leg.name}"):
                    leg.buffers.extend(room(leg.frame, self.memory))
        self._count += 1
        held = [(f"{leg.name} sent", leg.buffers) for leg in legs if leg.sends and leg.buffers]
        group = Group(legs[0].device, self._count, None, held)
        for leg in legs:
            if not leg.sends:
                self._coming[leg.task] = group, leg.name, leg.buffers
        legs = [leg for leg in legs if leg.buffers]
        if legs:
            behind = self._hosts.stream if self._fetched and legs[0].task in self._fetched else None
            group.flight = self._wires[group.peer].issue(legs, behind)
            self._groups[group.peer].append(group)

    def push(self, wait: bool) -> None:
        """All has begun already."""

    def awaited(self, task: int) -> list[Any]:
        return []

    def take(self, task: int) -> list[Tensor]:
        group, _, buffers = self._coming.pop(task)
        if buffers:
            self._reach(group)
        return buffers

    def drop(self, task: int) -> None:
        group, name, buffers = self._coming.pop(task)
        if not buffers:
            return
        if group in self._groups[group.peer]:
            group.held.append((f"{name} unread", buffers))
        else:  # the compute stream is past it
            self._api.free(self._compute, f"{name} unread", buffers)

    def over(self, most: int) -> list[Owed]:
        while sum(map(len, self._groups.values())) > most:
            self._reach(min((own[0] for own in self._groups.values() if own), key=lambda group: group.number))
        return []

    def _reach(self, group: Group) -> None:
        """Let the compute stream wait for a group, and all before it on its wire, which torch lets go of only then."""
        own = self._groups[group.peer]
        if group not in own:
            return
        while True:
            ended = own.popleft()
            self._wires[group.peer].wait(ended.flight)
            for name, buffers in ended.held:
                self._api.free(self._compute, name, buffers)
            if ended is group:
                return

    def abandon(self) -> None:
        for wire in self._wires.values():
            wire.close()


class Staged:
    """Through pinned host memory and a group of gloo.

    A send is copied to the host on a stream of its own, beside the tasks that follow, and goes out when that has ended:
    looked for at every task, waited for only when the host has to wait for another rank anyhow.
    """

    def __init__(
        self, api: StreamApi, group: Any, compute: Stream, out: Stream, memory: torch.device
    ) -> None:
        self.memory = memory
        self._api, self._group, self._compute, self._out = api, group, compute, out
        self._copied: deque[tuple[Leg, Content, Event]] = deque()
        self._from_host: dict[int, tuple[Content, Event]] = {}
        self._leaving: deque[Owed] = deque()
        self._coming: dict[int, tuple[Leg, list[Any]]] = {}
        self._dropped: list[Owed] = []

    def parts(self, frame: Frame, tensors: Sequence[Tensor]) -> list[Tensor]:
        return parts(frame, tensors, self.memory)

    def from_host(self, task: int, name: str, frame: Frame, tensors: Sequence[Tensor], event: Event) -> list[Tensor]:
        """It is where it leaves from already; nothing of the GPU's is sent."""
        self._from_host[task] = lambda: parts(frame, tensors, HOST), event
        return []

    def blank(self, frame: Frame | None) -> list[Tensor]:
        return room(frame, HOST)

    def issue(self, legs: Sequence[Leg]) -> None:
        for leg in legs:
            if leg.sends:
                self._copy(leg)
            else:
                leg.buffers.extend(self._host(size) for size in sizes(leg.frame))
                works = [self._group.recv([buffer], leg.device, CONTENT) for buffer in leg.buffers]
                self._coming[leg.task] = leg, works

    def _host(self, size: int) -> Tensor:
        return self._api.host_memory(torch.empty(size, dtype=torch.uint8, device="meta"))

    def _copy(self, leg: Leg) -> None:
        waiting = self._from_host.pop(leg.task, None)
        if waiting is not None:
            self._copied.append((leg, *waiting))
            return
        if not leg.buffers:
            return
        self._api.wait(self._out, self._api.record(self._compute))
        with self._api.on(self._out, what=leg.name):
            host = [self._host(buffer.numel()) for buffer in leg.buffers]
            for there, buffer in zip(host, leg.buffers, strict=True):
                there.copy_(buffer, non_blocking=True)
        self._copied.append((leg, lambda: host, self._api.record(self._out)))

    def push(self, wait: bool) -> None:
        while self._copied:
            leg, content, event = self._copied[0]
            if wait:
                self._api.synchronize(event)
            elif not self._api.past(event):
                return
            self._copied.popleft()
            if leg.buffers:
                self._api.free(self._compute, f"{leg.name} sent", leg.buffers)
            host = content()
            works = [self._group.send([buffer], leg.device, CONTENT) for buffer in host]
            self._leaving.append(Owed(leg.task, works, host))

    def awaited(self, task: int) -> list[Any]:
        return self._coming[task][1]

    def take(self, task: int) -> list[Tensor]:
        leg, _ = self._coming.pop(task)
        with self._api.on(self._compute, what=f"brings {leg.name}"):
            return [
                torch.empty(buffer.numel(), dtype=torch.uint8, device=self.memory).copy_(buffer, non_blocking=True)
                for buffer in leg.buffers
            ]

    def drop(self, task: int) -> None:
        leg, works = self._coming.pop(task)
        self._dropped.append(Owed(task, works, leg.buffers))

    def over(self, most: int) -> list[Owed]:
        found: list[Owed] = []
        if most == 0:
            self.push(wait=True)
            found, self._dropped = self._dropped, found
        while len(self._leaving) > most:
            found.append(self._leaving.popleft())
        return found

    def abandon(self) -> None:
        """Host memory is no device's business."""
