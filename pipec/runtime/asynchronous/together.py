"""How one process runs the segments of an asynchronous plan. ``pipec.runtime.distributed.overlap`` has the same for
one rank of many."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pipec.runtime.asynchronous.device import OverlappedDevice
from pipec.runtime.asynchronous.program import Segment, Steps
from pipec.runtime.asynchronous.result import Finished
from pipec.runtime.asynchronous.window import Window
from pipec.runtime.backends import Backend
from pipec.runtime.channels import Channels
from pipec.runtime.failure import Failure
from pipec.runtime.stages import Stage


class Together:
    """All devices of a plan in this process."""

    whole = True  # every stage is here
    _channels: Channels | None = None  # what is sent in one step and read in a later one stays in them

    def __init__(self, steps: Steps) -> None:
        self.steps = steps

    def devices(self, stages: list[Stage], window: Window, backend: Backend) -> list[OverlappedDevice]:
        """The devices of this process, from one flush to the next."""
        self._channels = channels = backend.channels(self.steps.routes) or Channels(self.steps.routes)
        return [
            OverlappedDevice(device, slots, stages, window, channels)
            for device, slots in enumerate(self.steps.slots)
        ]

    def drop(self) -> None:
        """Forget what is on its way."""
        self._channels = None

    def shift(self, devices: Sequence[OverlappedDevice], by: int) -> None:
        """Everything alive moves ``by`` microbatches, one step, towards the start of the plan."""
        if self._channels is not None:
            self._channels.shift(by)
        for device in devices:
            device.shift(by, self.steps.period)

    def run(self, devices: Sequence[OverlappedDevice], segment: Segment, backend: Backend) -> Failure | None:
        """Run a segment."""
        assert self._channels is not None
        return backend.run(devices, segment.ops, self._channels)

    def settle(self, window: Window, segment: Segment, work: Callable[[], None]) -> list[Finished]:
        """Run a segment by ``work``; what was finished, when it ended everywhere."""
        work()
        return window.take(segment.finished)
