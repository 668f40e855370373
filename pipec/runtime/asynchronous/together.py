"""How one process runs the segments of an asynchronous plan. ``pipec.runtime.distributed.overlap`` has the same for
one rank of many."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from pipec.runtime.asynchronous.device import OverlappedDevice
from pipec.runtime.asynchronous.program import Segment, Steps
from pipec.runtime.asynchronous.result import Finished
from pipec.runtime.asynchronous.window import Window
from pipec.runtime.channels import Channels
from pipec.runtime.failure import Failure
from pipec.runtime.program import Op
from pipec.runtime.stages import Stage

Run = Callable[[Sequence[OverlappedDevice], Sequence[Sequence[Op]], Any], Failure | None]


class Together:
    """All devices of a plan in this process."""

    whole = True  # every stage is here

    def __init__(self, steps: Steps) -> None:
        self.steps = steps
        self._channels = Channels(steps.routes)

    def devices(self, stages: list[Stage], window: Window) -> list[OverlappedDevice]:
        """The devices of this process, from one flush to the next."""
        return [
            OverlappedDevice(device, slots, stages, window, self._channels)
            for device, slots in enumerate(self.steps.slots)
        ]

    def drop(self) -> None:
        """Forget what is on its way."""
        self._channels = Channels(self.steps.routes)

    def run(self, devices: Sequence[OverlappedDevice], segment: Segment, run: Run) -> Failure | None:
        """Run a segment, and take in what arrived for later ones."""
        failure = run(devices, segment.ops, self._channels)
        if failure is None:
            for route, count in segment.sent.items():
                devices[route[1]].receive(route, count)
        try:
            return failure
        finally:
            del failure  # this frame is in its traceback: a cycle

    def settle(self, window: Window, segment: Segment, work: Callable[[], None]) -> list[Finished]:
        """Run a segment by ``work``; what was finished, when it ended everywhere."""
        work()
        return window.take(segment.finished)
