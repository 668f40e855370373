"""REDUCE on GPUs: the sums of :mod:`.reduce`, added up on the devices or by way of the hosts.

Whether there is a gradient at all is known to the host, and told between hosts. The sums themselves go as values do: on
wires each all-reduce has its place in the rank's one order, and the parameters that stages share are exchanged, in a
group for each other device, after all tasks. Through host memory they are copied there beside the tasks that follow,
and added up or sent when all have ended. Either way the sums are added up in the order of one process.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from attrs import define, field
from torch import Tensor

from pipec.errors import RunError
from pipec.runtime.distributed.carriers import CONTENT
from pipec.runtime.distributed.group import Groups, LostError
from pipec.runtime.distributed.local import Tied
from pipec.runtime.distributed.reduce import Reducer, owed, place_of, rows_of
from pipec.runtime.distributed.wires import Leg, Wire
from pipec.runtime.gradients import Accumulator
from pipec.runtime.stream_api import Stream, StreamApi


@define(eq=False)
class Total:
    """A sum over replicas under way: a stage's gradients of one dtype in a row, and how many replicas have each."""

    stage: int
    places: list[int]
    flat: Tensor
    has: Tensor
    told: Any
    moving: Any = None


@define(eq=False)
class Given:
    """A stage's sum for a shared parameter, from this rank or to it: whether there is one, and its values."""

    number: int
    stage: int
    device: int  # the other end
    sends: bool
    has: Tensor
    values: Tensor
    told: Any = None
    moving: Any = field(default=None)


class Road(Protocol):
    """How sums of gradients get from GPU to GPU."""

    def total(self, name: str, flat: Tensor) -> Any:
        """Begin to add up ``flat`` over all replicas, in place."""

    def reached(self, moving: Any, flat: Tensor) -> None:
        """Let work that is queued from now on find the sum in ``flat``."""

    def leaving(self, name: str, values: Tensor) -> Any:
        """Before :meth:`exchange`: what it is to send is complete."""

    def exchange(self, given: Sequence[Given]) -> None:
        """Send and receive the values of shared parameters; work that is queued from now on finds them."""


class WiredRoad:
    """From device to device."""

    def __init__(self, wires: Mapping[int, Wire], sums: Wire | None, ranks: Sequence[int]) -> None:
        """``wires``: by the device at the other end, in the order in which to use them; ``sums``: between the replicas;
        ``ranks``: of all devices."""
        self._wires, self._sums, self._ranks = wires, sums, ranks

    def total(self, name: str, flat: Tensor) -> Any:
        assert self._sums is not None
        return self._sums.total(name, flat)

    def reached(self, moving: Any, flat: Tensor) -> None:
        assert self._sums is not None
        self._sums.wait(moving)

    def leaving(self, name: str, values: Tensor) -> Any:
        return None

    def exchange(self, given: Sequence[Given]) -> None:
        legs = [
            Leg(-1, f"sum {one.number} of {one.stage}", one.device, self._ranks[one.device], one.sends, None,
                [one.values.reshape(-1).view(torch.uint8)])
            for one in given if one.values.numel()
        ]
        flights = [(wire, wire.issue(own)) for peer, wire in self._wires.items()
                   if (own := [leg for leg in legs if leg.device == peer])]
        for wire, flight in flights:
            wire.wait(flight)


class StagedRoad:
    """Through pinned host memory and groups of gloo."""

    def __init__(
        self, api: StreamApi, groups: Groups, compute: Stream, out: Stream, timeout: float
    ) -> None:
        self._api, self._groups, self._compute, self._out = api, groups, compute, out
        self._timeout = timedelta(seconds=timeout)

    def total(self, name: str, flat: Tensor) -> Any:
        return self.leaving(name, flat)

    def leaving(self, name: str, values: Tensor) -> tuple[Tensor, Any]:
        self._api.wait(self._out, self._api.record(self._compute))
        with self._api.on(self._out, what=name):
            host = self._api.host_memory(values)
            host.copy_(values, non_blocking=True)
        return host, self._api.record(self._out)

    def reached(self, moving: tuple[Tensor, Any], flat: Tensor) -> None:
        host, event = moving
        self._api.synchronize(event)
        dist.all_reduce(host, group=self._groups.totals, async_op=True).wait(self._timeout)
        flat.copy_(host, non_blocking=True)

    def exchange(self, given: Sequence[Given]) -> None:
        works = []
        for one in given:
            if one.sends:
                host, event = one.moving
                self._api.synchronize(event)
                works.append((self._groups.pipeline.send([host], one.device, CONTENT), one, host))
            else:
                host = self._api.host_memory(one.values)
                works.append((self._groups.pipeline.recv([host], one.device, CONTENT), one, host))
        for work, one, host in works:
            work.wait(self._timeout)
            if not one.sends:
                one.values.copy_(host, non_blocking=True)


class Totals(Reducer):
    """The REDUCE tasks of one step on one rank with a GPU.

    Attributes:
        channels: those of the step, where REDUCE tasks have places in the order of transfers.
    """

    channels: Any = None

    def __init__(
        self, groups: Groups, tied: Sequence[Tied], devices: Sequence[int], accumulators: Sequence[Accumulator],
        timeout: float, road: Road,
    ) -> None:
        self._road = road
        self._totals: list[Total] = []
        self._given: list[Given] = []
        super().__init__(groups, tied, devices, accumulators, timeout)

    def _begin(self) -> None:
        """Expect what other ranks say about their sums."""
        for number, stage, one in self._expected():
            has, values = torch.zeros(1), empty(one.parameter)
            told = self._groups.pipeline.recv([has], self._devices[stage], self._tag(number, stage))
            self._given.append(Given(number, stage, self._devices[stage], False, has, values, told))

    def start(self, stage: int, failed: bool = False) -> None:
        """Begin the REDUCE of ``stage``; after a failure only so that others come to their end."""
        if self._groups.replicas is None:
            self._hand_over(stage, failed)
            return
        own = []
        for places, rows, given in rows_of(self._accumulators[stage], failed):
            has = torch.tensor(given)
            told = dist.all_reduce(has, group=self._groups.replicas, async_op=True)
            own.append(Total(stage, places, torch.cat(rows), has, told))
        self._totals += own

        def begin() -> None:
            for number, one in enumerate(own):
                one.moving = self._road.total(f"sum {number} of {stage}", one.flat)

        self.channels.reduce(stage, begin)

    def _hand_over(self, stage: int, failed: bool) -> None:
        for number, one, total in owed(self._tied, self._accumulators, stage, failed):
            has = torch.tensor([float(total is not None)])
            values = empty(one.parameter)
            values.zero_() if total is None else values.copy_(total)
            moving = self._road.leaving(f"sum {number} of {stage}", values)
            for device in self._holders(one):
                told = self._groups.pipeline.send([has], device, self._tag(number, stage))
                self._given.append(Given(number, stage, device, True, has, values, told, moving))

    def finish(self, discard: bool = False) -> None:
        """Wait for every sum, and put it where this rank adds gradients to ``.grad``.

        Raises:
            LostError: a rank has ended or does not answer.
        """
        try:
            totals, self._totals = self._totals, []
            for one in totals:
                one.told.wait(self._timeout)
                self._road.reached(one.moving, one.flat)
                if not discard:
                    self._keep_total(one)
            if self._groups.replicas is not None:
                for stage in dict.fromkeys(one.stage for one in totals):
                    self._hand_over(stage, discard)
            given, self._given = sorted(self._given, key=lambda one: (one.number, one.stage, one.device)), []
            for part in given:
                part.told.wait(self._timeout)
            self._road.exchange(given)
        except RuntimeError as error:
            if isinstance(error, RunError):
                raise
            raise LostError(f"a REDUCE did not end: {error}") from error
        for part in given:
            if not part.sends and not discard and float(part.has):
                own = self._accumulators[part.stage]
                own.give(place_of(own.parameters, self._tied[part.number].parameter), part.values)

    def _keep_total(self, one: Total) -> None:
        own, at = self._accumulators[one.stage], 0
        for place, count in zip(one.places, one.has.tolist(), strict=True):
            parameter = own.parameters[place]
            row = one.flat[at : at + parameter.numel()]
            at += parameter.numel()
            if count:
                own.give(place, torch.empty_like(parameter, requires_grad=False).copy_(row.view(parameter.shape)))


def empty(parameter: Tensor) -> Tensor:
    """Memory for a parameter's sum, without gaps."""
    return torch.empty(parameter.shape, dtype=parameter.dtype, device=parameter.device)
