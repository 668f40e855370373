"""How groups of transfers are issued to a process group whose transfers wait on the device, and a wire that is written
down.

A wire runs what is issued one group after another, on a stream of its own: NCCL on one that torch keeps per
communicator. A group begins after all that was queued on the compute stream when it was issued, and work is queued
after a group by letting the compute stream wait for it. The host waits for neither.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from attrs import frozen
from torch import Tensor

from pipec.runtime.distributed.wire import Frame
from pipec.runtime.stream_api import Event, Stream, StreamApi

MOST = 64  # transfers of one batch: groups of NCCL are bounded


@frozen(eq=False)
class Leg:
    """One end of a transfer.

    Attributes:
        task: the COPY.
        name: for records.
        device, rank: the other end, as a device of this pipeline and as a rank of the world.
        sends: whether this end does.
        frame: of a receive, what is expected.
        buffers: of bytes, what travels or where it arrives.
    """

    task: int
    name: str
    device: int
    rank: int
    sends: bool
    frame: Frame | None
    buffers: list[Tensor]


class Wire(Protocol):
    """Transfers of one process group, one after another."""

    def issue(self, legs: Sequence[Leg], behind: Stream | None = None) -> Any:
        """Begin a group after all that is queued on ``behind``, by default the compute stream; what to give to
        :meth:`wait`."""

    def total(self, name: str, flat: Tensor) -> Any:
        """Begin to add up ``flat`` over all ranks, in place; what to give to :meth:`wait`."""

    def wait(self, flight: Any) -> None:
        """Queue what comes next on the compute stream after a group, and so after all that were issued before it."""

    def close(self) -> None:
        """Leave the group; nothing of it need end."""


def batches(legs: Sequence[Leg], most: int = MOST) -> list[list[tuple[Leg, Tensor]]]:
    """The buffers of a group in batches of at most ``most``. Both ends make the same: they know the same sizes."""
    share = max(1, most // max(len(legs), 1))
    count = max((-(-len(leg.buffers) // share) for leg in legs), default=0)
    return [
        [(leg, buffer) for leg in legs for buffer in leg.buffers[share * n : share * (n + 1)]] for n in range(count)
    ]


def operations(batch: Sequence[tuple[Leg, Tensor]], group: Any) -> list[dist.P2POp]:
    return [dist.P2POp(dist.isend if leg.sends else dist.irecv, buffer, leg.rank, group) for leg, buffer in batch]


class GroupWire:
    """A process group of NCCL, or another whose works let a stream wait."""

    def __init__(self, api: StreamApi, group: Any, device: torch.device) -> None:
        self._api, self._group, self._device = api, group, device

    def issue(self, legs: Sequence[Leg], behind: Stream | None = None) -> list[Any]:
        works: list[Any] = []
        stream = behind or self._api.caller(self._device)
        with self._api.on(stream, what="issues " + " ".join(leg.name for leg in legs)):
            for batch in batches(legs):
                works += dist.batch_isend_irecv(operations(batch, self._group))
        return works

    def total(self, name: str, flat: Tensor) -> list[Any]:
        with self._api.on(self._api.caller(self._device), what=f"issues {name}"):
            return [dist.all_reduce(flat, group=self._group, async_op=True)]

    def wait(self, flight: list[Any]) -> None:
        with self._api.on(self._api.caller(self._device), what="waits"):
            for work in flight:
                work.wait()  # given a time it would hold the host

    def close(self) -> None:
        with suppress(RuntimeError):
            backend = self._group._get_backend(self._device)
            if hasattr(backend, "abort"):
                backend.abort()  # leaving in peace waits for transfers whose other end is gone


@frozen(eq=False)
class Flight:
    """A group under way on a recorded wire."""

    event: Event
    number: int


class RecordedWire:
    """The same over any process group, gloo say, with the calls written down.

    What a stream would wait for the host waits for, without a note: it is the data that this needs, not the order.

    Attributes:
        issued: the names of every group, in order; wires may share the list.
    """

    def __init__(
        self, api: StreamApi, group: Any, device: torch.device, name: str, timeout: float,
        issued: list[tuple[str, ...]],
    ) -> None:
        self._api, self._group, self._device = api, group, device
        self._timeout = timedelta(seconds=timeout)
        self.stream: Stream = api.stream(device, name)
        self.issued, self._count = issued, 0
        self._under_way: deque[tuple[int, list[Any], list[Tensor]]] = deque()

    def issue(self, legs: Sequence[Leg], behind: Stream | None = None) -> Flight:
        def begin() -> tuple[list[Any], list[Tensor]]:
            made = [work for batch in batches(legs) for work in dist.batch_isend_irecv(operations(batch, self._group))]
            return made, [buffer for leg in legs for buffer in leg.buffers]

        return self._begin(tuple(leg.name for leg in legs), begin, behind)

    def total(self, name: str, flat: Tensor) -> Flight:
        return self._begin((name,), lambda: ([dist.all_reduce(flat, group=self._group, async_op=True)], [flat]))

    def _begin(self, names: tuple[str, ...], begin: Any, behind: Stream | None = None) -> Flight:
        self._api.wait(self.stream, self._api.record(behind or self._api.caller(self._device)))
        for name in names:
            with self._api.on(self.stream, what=name):
                pass
        self.issued.append(names)
        self._count += 1
        self._under_way.append((self._count, *begin()))
        return Flight(self._api.record(self.stream), self._count)

    def wait(self, flight: Flight) -> None:
        while self._under_way and self._under_way[0][0] <= flight.number:
            for work in self._under_way.popleft()[1]:
                work.wait(self._timeout)
        self._api.wait(self._api.caller(self._device), flight.event)

    def close(self) -> None:
        self._under_way.clear()
