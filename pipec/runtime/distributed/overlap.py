"""One rank's part in an asynchronous plan: its device's tasks of every segment, and losses on every rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from attrs import evolve

from pipec.runtime.asynchronous.device import OverlappedDevice
from pipec.runtime.asynchronous.program import Segment, Steps
from pipec.runtime.asynchronous.result import Finished
from pipec.runtime.asynchronous.together import Together
from pipec.runtime.asynchronous.window import Window
from pipec.runtime.backends import Backend
from pipec.runtime.distributed.backend import Standing, Traffic, traffic
from pipec.runtime.distributed.channels import RankChannels
from pipec.runtime.distributed.council import FIXED
from pipec.runtime.distributed.results import LOSS_WIDTH, loss_from, loss_numbers
from pipec.runtime.distributed.watch import Watch
from pipec.runtime.failure import Failure
from pipec.runtime.stages import Stage

if TYPE_CHECKING:
    from pipec.runtime.distributed.ranks import Ranks


class RankOverlappedDevice(Standing, OverlappedDevice):
    """An overlapped device that notes where it stands, and ends a segment with all in hand that was sent in it."""

    __slots__ = ("_at", "_watch")
    channels: Any  # of the segment that runs

    def __init__(self, watch: Watch, *args: Any) -> None:
        self._watch = watch
        super().__init__(*args)

    def run(self, ops: Any) -> None:
        """Run tasks in order, then take in what later segments read."""
        super().run(ops)
        self.take_in()

    def take_in(self) -> None:
        """Receive what was sent in this segment and no task has asked for."""
        for route, count in self.channels.left():
            self.receive(route, self.received[route] + count)


class RankTogether(Together):
    """The device of this rank. Every segment has messages of its own: what is sent in it is received in it."""

    whole = False

    def __init__(self, steps: Steps, ranks: Ranks) -> None:
        self.steps, self._ranks = steps, ranks
        self._traffic: dict[int, tuple[Segment, Traffic]] = {}
        self._window: Window | None = None
        self._open: RankChannels | None = None
        for segment in steps.segments:
            ranks.proved(segment.ops)

    def devices(self, stages: list[Stage], window: Window, backend: Backend) -> list[OverlappedDevice]:
        """The one device of this rank."""
        self._window, me = window, self._ranks.device
        return [self._ranks.overlapped(me, self.steps.slots[me], stages, window)]

    def drop(self) -> None:
        """Forget what is in flight."""
        self._window = self._open = None

    def run(self, devices: Sequence[OverlappedDevice], segment: Segment, backend: Backend) -> Failure | None:
        """Run this rank's tasks of a segment."""
        device: Any = devices[0]
        ranks, plan = self._ranks, self.steps.plan
        if id(segment) not in self._traffic:
            self._traffic[id(segment)] = segment, traffic(plan, segment.ops, ranks.device)
        own = self._traffic[id(segment)][1]
        ranks.watch.runs(plan.microbatches, True)
        self._open = device.channels = ranks.channels(plan, own, self._forms(), dict(device.received))
        return backend.run(devices, segment.ops, device.channels)

    def _forms(self) -> list[int | None]:
        """The rows of every microbatch in the window."""
        window = self._window
        assert window is not None
        return [
            None if flight is None or flight.rows is None else flight.rows[m]
            for flight in window.flights for m in range(window.minibatch)
        ]

    def settle(self, window: Window, segment: Segment, work: Callable[[], None]) -> list[Finished]:
        """Run a segment by ``work``; what was finished, with everybody's losses, when every rank has come to its end.

        Raises:
            RankError: another rank failed.
        """
        ranks, found = self._ranks, list[Finished]()

        data = b""

        def row() -> list[float]:
            nonlocal data
            work()
            ranks.landed(self._open)
            found.extend(window.take(segment.finished))
            data = ranks.packed([item.outputs for item in found])
            return [number for item in found for loss in item.losses for number in loss_numbers(loss)]

        self._open = None
        losses = len(ranks.spec.losses)
        width = LOSS_WIDTH * losses
        table = ranks.ended(lambda: self._open, row, True, FIXED + width * len(segment.finished))
        made = []
        for place, item in enumerate(found):
            rows = [own[FIXED + width * place : FIXED + width * (place + 1)] for own in table]
            made.append(evolve(item, losses=[ranks.here(loss_from(rows, index)) for index in range(losses)]))
        if ranks.outputs == "all" and ranks.spec.outputs:
            parts = ranks.everywhere(data)
            owners = [ranks.homes[out.ref.index] for out in ranks.spec.outputs]
            made = [
                evolve(item, outputs=[parts[owner][place][index] for index, owner in enumerate(owners)])
                for place, item in enumerate(made)
            ]
        return made
