"""The backend of one rank: it runs its own device's list, and after a failure brings the step to its end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from attrs import frozen

from pipec.errors import RankError
from pipec.ir import Kind, Plan
from pipec.runtime.channels import Stopped
from pipec.runtime.distributed.channels import Message, RankChannels
from pipec.runtime.distributed.watch import Watch
from pipec.runtime.executor import Device
from pipec.runtime.failure import Failure, describe, told
from pipec.runtime.program import Op, Route


class Standing:
    """The part of a device that notes where it stands."""

    __slots__ = ()
    _at: Op | None
    _watch: Watch

    @property
    def at(self) -> Op | None:
        return self._at

    @at.setter
    def at(self, op: Op | None) -> None:
        self._at = op  # type: ignore[misc]  # a slot of the classes that have this part
        self._watch.at(-1 if op is None else op.task)


class RankDevice(Standing, Device):
    """A device that notes where it stands."""

    __slots__ = ("_at", "_watch")

    def __init__(self, watch: Watch, *args: Any) -> None:
        self._watch = watch
        super().__init__(*args)


@frozen(eq=False)
class Traffic:
    """The messages of one rank in a plan, per other rank in the order they are sent."""

    incoming: dict[int, list[Message]]
    outgoing: dict[int, list[Message]]
    ops: Sequence[Sequence[Op]] = ()  # of all devices


def traffic(plan: Plan, ops: Sequence[Sequence[Op]], me: int) -> Traffic:
    """What the rank of device ``me`` receives and sends when all devices run their ``ops``."""
    made = Traffic({}, {}, ops)
    for row in ops:
        for op in row:
            if op.kind is Kind.COPY and me in op.route and op.route[0] != op.route[1]:
                source, target = op.route
                message = Message(op, int(plan.table.value[op.task]), int(plan.table.gradient[op.task]), plan.graph)
                if me == target:
                    made.incoming.setdefault(source, []).append(message)
                else:
                    made.outgoing.setdefault(target, []).append(message)
    return made


class RankBackend:
    """Runs the list of one device.

    Args:
        ranks: global rank of every device.
        me: this rank's device.
    """

    def __init__(self, ranks: Sequence[int], me: int) -> None:
        self.ranks, self.me = ranks, me

    def run(self, devices: Sequence[Device], ops: Sequence[Sequence[Op]], channels: Any) -> Failure | None:
        """Run to the end, or to the first task that raises here or elsewhere."""
        (device,), own = devices, ops[self.me]
        channels = cast(RankChannels, channels)
        try:
            channels.begin()
            device.run(own)
            channels.finish()
            return None
        except Stopped:
            found = Failure(None, other(channels.failure))
        except BaseException as error:
            found = Failure(device.at, error)
        self._end(device, own, channels, found)
        try:
            return found
        finally:
            del found  # this frame is in its traceback: a cycle

    def _end(self, device: Device, own: Sequence[Op], channels: RankChannels, found: Failure) -> None:
        """Let the other ranks come to the end of the step."""
        story: tuple[Any, ...] | None = channels.failure
        if story is None:
            if isinstance(found.error, RankError):
                story = found.error.rank, str(found.error)
            else:
                rank = self.ranks[self.me]
                where = describe(device.step.plan.graph, found.op, device.step.called)
                story = rank, f"rank {rank} failed: {told(found.error)} in {where}"
                if interrupted(found.error, channels):
                    channels.broken = RankError(story[1], rank)
        if channels.broken is None:
            left = own if device.at is None else own[own.index(device.at) :]
            try:
                self.drain(device, left, own, channels, story)
                return
            except BaseException as error:  # one is gone meanwhile, or this rank is interrupted again
                channels.broken = channels.broken or RankError(story[1], story[0])
                if not isinstance(error, Exception):
                    self.farewell(channels, story)
                    raise
        self.farewell(channels, story)

    def drain(self, device: Device, left: Sequence[Op], own: Sequence[Op], channels: Any, story: Any) -> None:
        """Bring this rank's part to its end without content; ``left``: tasks that have not run."""
        for op in left:
            if op.kind is Kind.REDUCE:
                device.step.reduce(op.stage, True)
        channels.drain(own, story)

    def farewell(self, channels: Any, story: Any) -> None:
        """A rank is gone: tell the others."""
        channels.farewell(story)

    def channels(self, routes: tuple[Route, ...]) -> None:
        """The ranks make their channels themselves."""

    def close(self) -> None:
        """Nothing to close: the groups belong to the ranks."""


UNDONE = "this rank's part of the step was undone"


def interrupted(error: BaseException, channels: Any) -> bool:
    """Whether ``error`` came from outside in the midst of a transfer, of which nobody knows how far it got; while this
    rank waited for one that is known."""
    trace, inside = error.__traceback__, list[str]()
    while trace is not None and not isinstance(error, Exception):
        if trace.tb_frame.f_locals.get("self") is channels:
            inside.append(trace.tb_frame.f_code.co_name)
        trace = trace.tb_next
    return bool(inside) and (inside[-1] != "_wait" or "_take" in inside)  # that takes the rest of a message


def other(failure: tuple[Any, ...] | None, after: str = UNDONE) -> RankError:
    rank, text = failure or (-1, "another rank failed")
    return RankError(f"{text}; {after}", rank)
