"""Inputs on their way to the devices that read them: pinned on the host, copied by the copy-in stream in time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from pipec.ir import Lane
from pipec.runtime.executor import Device
from pipec.runtime.stream_api import Event, StreamApi
from pipec.runtime.transfer import copied, duplicate, tensors

if TYPE_CHECKING:
    from pipec.runtime.stream_lanes import StreamLane


class Inputs:
    """Gives every device the microbatches of the inputs that its stages read, in its own memory.

    What is on the device already is used as it is. From memory of the host that is not pinned a pinned copy is made
    first, so that the host need not wait while the device copies; memory that the user has pinned is read in place, and
    the host waits at the end of the step until that is done, so that the user may write into it again.
    """

    def __init__(self, api: StreamApi, lanes: Sequence[StreamLane] | Mapping[int, StreamLane]) -> None:
        """``lanes``: by 3 * device + lane, with those of the devices that run here."""
        self._api, self._lanes = api, lanes
        self._events: dict[tuple[int, int], Event] = {}
        self._users = False  # whether memory that the user has pinned is being read
        self._last: Event | None = None

    def send(self, devices: Sequence[Device]) -> None:
        """Queue the copies of all microbatches that are new, first ones first."""
        step = devices[0].step
        pieces, step.fresh = step.fresh, range(0)
        if not pieces:
            return
        for device in devices:
            stages = [s for chunk in step.plan.chunks if chunk.device == device.index for s in chunk.stages]
            wanted = sorted({index for stage in stages for index in device.stages[stage].inputs})
            if wanted:
                self._send(device, wanted, pieces)

    def _send(self, device: Device, wanted: list[int], pieces: range) -> None:
        lane = self._lanes[3 * device.index + Lane.IN]
        given = device.step.inputs
        if device.inputs is given:
            device.inputs = [list(column) for column in given]
        sent: dict[int, Any] = {}  # an input that is the same for all microbatches goes once
        last: Event | None = None
        for piece in pieces:
            before = len(sent)
            for index in wanted:
                device.inputs[index][piece] = packet = given[index][piece]
                if all(tensor.device == lane.device for tensor in tensors(packet)):
                    continue
                if id(packet) not in sent:
                    with self._api.on(lane.stream, what=f"input {index}[{piece}] for {device.index}"):
                        sent[id(packet)] = copied(packet, lambda tensor: self._copy(tensor, lane))
                device.inputs[index][piece] = sent[id(packet)]
            if len(sent) > before:
                lane.used = True
                last = self._last = self._api.record(lane.stream)
            if last is not None:
                self._events[device.index, piece] = last

    def _copy(self, tensor: Tensor, lane: StreamLane) -> Tensor:
        if tensor.device.type == "cpu":
            if tensor.is_pinned():
                self._users = True
            else:
                tensor = self._api.pin(tensor)
        return duplicate(tensor, lane.device)

    def arrived(self, device: int, piece: int) -> list[Event]:
        """What the first task of a device that reads inputs of this piece has to wait for."""
        event = self._events.pop((device, piece), None)
        return [] if event is None else [event]

    def forget(self, devices: Sequence[Device]) -> None:
        """At the end of a part of a step: its copies go when nothing reads them any more. In an asynchronous run the
        devices themselves let go of what they have finished."""
        self._events.clear()
        if self._users:
            self._api.synchronize(self._last)
            self._users = False
        for device in devices:
            if device.inputs is not device.step.inputs and not device.step.lasting:
                device.inputs = []
