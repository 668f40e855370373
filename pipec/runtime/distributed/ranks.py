"""The places in a step where ranks must agree; the same methods as :class:`pipec.runtime.alone.Alone`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from attrs import evolve

from pipec.ir import Plan
from pipec.runtime.asynchronous.program import Steps
from pipec.runtime.backends import Backend
from pipec.runtime.batch import MISSING
from pipec.runtime.distributed.agree import (
    FLUSH,
    HELD,
    HOOKED,
    Summary,
    agreed,
    lengths_of,
    rows_of,
    same_call,
    summary,
    where_of,
)
from pipec.runtime.distributed.backend import RankBackend, RankDevice, Traffic, traffic
from pipec.runtime.distributed.channels import RankChannels
from pipec.runtime.distributed.council import BEGIN, FINISH, FIXED, SETTLE, SWITCH, Council
from pipec.runtime.distributed.fit import check_plan, check_successor
from pipec.runtime.distributed.group import Groups
from pipec.runtime.distributed.held import Held
from pipec.runtime.distributed.input_gradients import InputGradients, mask_of
from pipec.runtime.distributed.links import Links
from pipec.runtime.distributed.local import local_spec, tied_parameters
from pipec.runtime.distributed.overlap import RankOverlappedDevice, RankTogether
from pipec.runtime.distributed.reduce import Reducer, noting_ends
from pipec.runtime.distributed.results import LOSS_WIDTH, gathered_result, loss_row, own_outputs
from pipec.runtime.distributed.sample import check_samples, sample_of
from pipec.runtime.distributed.trained import FLAGS, Trained
from pipec.runtime.distributed.watch import Watch
from pipec.runtime.distributed.ways import MEMORY, SOCKETS, channels_of, lines_between
from pipec.runtime.distributed.wire import Frame
from pipec.runtime.distributed.wiring import held_forms
from pipec.runtime.executor import Device
from pipec.runtime.failure import told as told_of
from pipec.runtime.program import Op, Program, Route
from pipec.runtime.randomness import Position
from pipec.runtime.result import Result
from pipec.runtime.stages import Stage
from pipec.runtime.step import Batch, Step
from pipec.spec import Spec


class Ranks(Held):
    """One process per device; this one runs the list of ``place.device``.

    Args:
        plan, spec: the same on every rank.
        groups: between the hosts.
        timeout: seconds after which a rank that does not answer is given up.
        outputs: "owner": an output is in the result of the rank of its stage; "all": in everybody's.
    """

    ways: ClassVar[tuple[str, ...]] = (MEMORY, SOCKETS)  # in which values may travel, the first that can be had
    watched: ClassVar[tuple[str, ...]] = (MEMORY, SOCKETS)  # the same for the watch

    def __init__(self, spec: Spec, plan: Plan, groups: Groups, timeout: float, outputs: str) -> None:
        self.homes = [plan.stage_device(stage) for stage in range(len(spec.stages))]
        self._tied = tied_parameters(spec, self.homes)
        self.spec, self.outputs, self._plan, self._timeout = spec, outputs, plan, timeout
        self.groups, place = groups, groups.place
        self.place, self.device, self.replica = place, place.device, place.replica
        self.me = place.everyone.index(dist.get_rank())
        self.watch = Watch(groups, self.me, MEMORY in self.watched, SOCKETS in self.watched)
        self.backend = RankBackend(place.ranks[place.replica], place.device)
        self._traffic: dict[int, tuple[Program, Traffic]] = {}
        self._frames: dict[bool, dict[Any, Frame]] = {True: {}, False: {}}
        self._closed, self._hooked, self._elsewhere = False, False, list[int]()
        self._open: Links | None = None  # channels that hold a group
        width = FIXED + max(LOSS_WIDTH * len(spec.losses), len(spec.losses) + 2 * len(spec.inputs) + FLAGS)
        self._council = Council(self.groups, self.watch, plan, width, timeout)
        with self._council.waiting("the sockets of all ranks"):
            self._lines, self.way = lines_between(self.groups.pipeline, place, timeout, self.ways)
        self._waiting = self.watch.waiting(self.replica * place.devices)
        if self._lines is not None:
            self._lines.watched(self._waiting)
            self._council.lines = self._lines if place.replicas == 1 else None
        self._reducer: Reducer | None = None
        self._inputs = InputGradients(spec, plan, groups, timeout)
        self.flags = Trained(self._tied, self.homes, place, [stage.name for stage in spec.stages])

    # -- before the first step ------------------------------------------------------------------------------

    def local(self, spec: Spec) -> Spec:
        """The stages this rank holds; others are placeholders."""
        return local_spec(spec, self._plan, self.device)

    @contextmanager
    def agreement(self, options: dict[str, Any], holds: Callable[[], tuple[Any, Any]]) -> Iterator[None]:
        """Around the making of a runner: at its end every rank compares with the others what it has, and ``holds``.

        Raises:
            RankError: naming what differs on which rank, or what went wrong on another one.
        """
        try:
            try:
                yield
            except BaseException as failure:
                self._agree({"failed": told_of(failure)}, self._plan)
                raise
            held = held_forms(*holds(), self._tied, self.place.replicas)
            told = self._agree(summary(self.spec, self._plan, options) | {HELD: held}, self._plan)
            self._hooked = any(one[HOOKED] for one in told)
        except BaseException:
            self.close()
            raise

    def _agree(self, own: Summary, plan: Plan) -> list[Summary]:
        with self._council.waiting("what other ranks run"):
            return agreed(self.groups.everyone, own, plan, self.place.everyone, dist.get_rank())

    def reduce(self, stage: int, failed: bool) -> None:
        """Begin the REDUCE of a stage."""
        if self._reducer is not None:
            self._reducer.start(stage, failed)

    def reduced(self) -> None:
        """Wait for every REDUCE that has begun."""
        if self._reducer is not None:
            with self._council.waiting("a REDUCE"):
                self._reducer.finish()

    def inputs_elsewhere(self, stages: Sequence[Stage]) -> list[int]:
        """Inputs that no stage of this rank reads; they may be left out here."""
        here = {index for stage in stages if stage.fn is not None for index in stage.inputs}
        self._elsewhere = [index for index in range(len(self.spec.inputs)) if index not in here]
        return self._elsewhere

    def position(self, position: Position) -> Position:
        """The random numbers of this replica: each draws its own, the first as one process would."""
        if self.replica == 0 or position.seed is None:
            return position
        return evolve(position, seed=(position.seed + self.replica * 0x9E3779B97F4A7C15) % (1 << 63))

    # -- a step ---------------------------------------------------------------------------------------------

    def begin(self, make: Callable[[], Batch], training: bool, position: Position) -> Batch:
        """The minibatch of a call, when every rank has one that fits.

        Raises:
            RankError: the ranks are not at the same call, or another one's inputs are wrong.
            RunError: the inputs are wrong here.
        """
        self._council.ready()
        failure: BaseException | None = None
        seed = position.seed or 0
        row = [*map(float, (training, 0, -1, seed >> 32, seed & 0xFFFFFFFF, position.step, -1, 1))]
        counts, samples, masks = ([0.0] * len(own) for own in (self.spec.losses, self.spec.inputs, self.spec.inputs))
        try:
            batch = make()
            if self._plan.asynchronous and training:  # every rank hands back every loss
                batch.wanted_losses = set(range(len(counts)))
            row[1:3] = [float(self._plan.minibatch), -1.0 if batch.rows is None else float(batch.rows)]
            row[6:8] = [-1.0 if batch.length is None else float(batch.length), batch.scale]
            counts, samples = batch.counts, [float(sample_of(value)) for value in batch.values]
            if training:
                masks = [*map(mask_of, batch.values), *self.flags.row()]
        except BaseException as error:
            failure = error
        self.watch.begin()
        table = self._council.table(BEGIN, [*row, *counts, *samples, *masks], failure)
        if failure is not None:
            raise failure
        same_call(table, self.place.everyone)
        rows = rows_of(table, self.place.ranks, self._plan.minibatch)
        length = lengths_of(table, self.place.ranks, self._plan.slices)[self.replica]
        check_samples(table, FIXED + len(counts), self.spec, self.place.ranks, where_of(table))
        self._inputs.agree(table, FIXED + len(counts) + len(samples), batch, self._elsewhere)
        self.flags.check(table, FIXED + len(counts) + 2 * len(samples))
        total = sum(max(r or 0, 0) for r in rows) if all(r is not None for r in rows) else None
        first = [table[n * self.place.devices : (n + 1) * self.place.devices] for n in range(self.place.replicas)]
        counts = [
            sum(max(own[FIXED + index] for own in block) for block in first) for index in range(len(counts))
        ]
        batch.measure(self._plan.minibatch, rows[self.replica], total, counts, length, self.place.replicas)
        self._council.settled = False
        for index in self._elsewhere:  # not cut into microbatches here
            batch.values[index] = MISSING
        self.watch.runs(batch.microbatches, training)
        return batch

    def devices(
        self, plan: Plan, program: Program, stages: list[Stage], step: Step, backend: Backend
    ) -> tuple[list[Device], Any]:
        """This rank's device, and its channels."""
        if id(program) not in self._traffic:
            self._traffic[id(program)] = program, traffic(plan, program.ops, self.device)
        own = self._traffic[id(program)][1]
        channels = self.channels(plan, own, step.batch.forms)
        self._reducer = None
        if plan.training and (self._tied or self.place.replicas > 1):
            self._reducer = self.reducer(step, channels)
        return [self.rank_device(self.device, program.slots[self.device], stages, step, channels)], channels

    def rank_device(self, *args: Any) -> Device:
        """The device of this rank; the arguments are those of a Device."""
        return RankDevice(self.watch, *args)

    def overlapped(self, *args: Any) -> RankOverlappedDevice:
        """The same in an asynchronous plan, which gives it channels for each segment."""
        return RankOverlappedDevice(self.watch, *args, None)

    def reducer(self, step: Step, channels: Any) -> Reducer:
        """The REDUCE tasks of one step."""
        return Reducer(self.groups, self._tied, self.homes, step.accumulators, self._timeout, noting_ends(step))

    def channels(
        self, plan: Plan, own: Traffic, forms: Sequence[Any] | None, received: dict[Route, int] | None = None
    ) -> Any:
        """The channels of this rank during one run of its tasks of ``plan``."""
        self._council.at = plan
        if self._lines is not None:
            return channels_of(
                self._lines, self.device, own, self._frames[plan.training], forms, self._timeout, self._council.lost,
                received,
            )
        self._open = made = RankChannels(
            self.groups.pipeline, self.device, own.incoming, own.outgoing, self._frames[plan.training], forms,
            self._timeout, torch.device("cpu"), self._council.lost, received,
        )
        made.waits = self._waiting
        return made

    def settle(self, step: Step, channels: Any, work: Callable[[], None]) -> Result:
        """Run this rank's tasks; losses and outputs when every rank has come to its end.

        Raises:
            RankError: another rank failed.
            BaseException: what a task raised here.
        """
        here: dict[str, Any] = {}
        data = b""

        def row() -> list[float]:
            nonlocal data
            work()
            self.landed(channels)
            here.update(own_outputs(step, self._council.at, self.device))  # what can fail comes before ranks agree
            data = self.packed(here)
            return loss_row(step, self._council.at, self.device)

        table = self.ended(lambda: channels, row, step.plan.training)
        if self._inputs.wanted and step.plan.training:
            with self._council.waiting("the gradients of inputs"):
                self._inputs.exchange(step)
        parts = self.everywhere(data) if self.outputs == "all" else None
        return gathered_result(step, self._council.at, [row[FIXED:] for row in table], here, parts)

    def landed(self, channels: Any) -> None:
        """What this rank has queued on a device has ended."""

    def proved(self, ops: Sequence[Sequence[Op]]) -> None:
        """Raise RunError when the ranks cannot run these tasks of all devices."""

    def prepared(self, plan: Plan) -> Program | None:
        """The program of a plan, when it had to be made to prove that the ranks can run it.

        Raises:
            RunError: they cannot.
        """
        return None

    def ended(
        self, channels: Callable[[], Any], work: Callable[[], list[float]], training: bool, width: int = 0
    ) -> list[list[float]]:
        """Do this rank's part, and come to its end with all others: everybody's row of at least ``width`` numbers.

        Args:
            channels: those that ``work`` used.
            work: gives the numbers of this rank's row behind the first ``FIXED``.

        Raises:
            RankError: another rank failed.
            BaseException: what ``work`` raised here.
        """
        failure: BaseException | None = None
        row: list[float] = []
        try:
            row = work()
        except BaseException as error:
            failure = error
        used = channels()
        if used is not None and used.broken is not None:
            self._council.broken = True
            self.watch.tell((used.broken.rank, str(used.broken)))
            raise failure or used.broken
        try:
            table = self._council.table(SETTLE, [0.0] * (FIXED - 2) + row, failure, width)
            if failure is not None:
                raise failure
        except BaseException:
            self._frames[training].clear()
            if self._reducer is not None and not self._council.broken:
                with self._council.waiting("a REDUCE"):
                    self._reducer.finish(discard=True)
            raise
        finally:
            del failure  # this frame is in its traceback: a cycle
        if used is not None:
            self._frames[training].update(used.learned)
        self._council.settled = not training or self._plan.asynchronous
        return table

    def updates(self, program: Program) -> Sequence[Sequence[Op]]:
        """The UPDATE tasks per device; the one of all stages runs on every rank, each on its own parameters."""
        if self._plan.update != "all":
            return program.updates
        return tuple(tuple(op for row in program.updates for op in row) for _ in program.updates)

    def finish(self, plan: Plan, work: Callable[[], None]) -> None:
        """Commit and update; it ends when every rank's did.

        Raises:
            RankError: another rank failed; what it has not updated differs from what others have.
        """
        failure: BaseException | None = None
        try:
            work()
        except BaseException as error:
            failure = error
            if self._council.settled or self._council.broken:
                raise
        try:
            if plan.update is not None or self._inputs.asked:
                self._council.table(FINISH, [], failure)
            self._council.settled = True
            if failure is not None:
                raise failure
        finally:
            del failure

    # -- agreement ------------------------------------------------------------------------------------------

    def switch(self, plan: Plan, check: Callable[[], None]) -> None:
        """Raise RunError when another plan cannot take the place of this one, on any rank."""
        def own() -> None:
            check()
            check_plan(self.spec, plan, self._tied)
            check_successor(self.spec, plan, self._plan)

        self._council.ready()
        self._told(own, SWITCH)
        self._agree(summary(self.spec, plan, {}), plan)

    def adopt(self, plan: Plan) -> None:
        """Go on with another plan."""
        self._plan, self._traffic = plan, {}
        for frames in self._frames.values():
            frames.clear()

    def together(self, steps: Steps) -> RankTogether:
        """This rank's part in an asynchronous plan."""
        return RankTogether(steps, self)

    def flush(self, check: Callable[[], None], position: Position) -> None:
        """Before minibatches in flight are finished: every rank is about to, and can.

        Raises:
            RankError: another rank is at another call, or cannot.
            BaseException: what ``check`` raised.
        """
        self._council.ready()
        failure: BaseException | None = None
        try:
            check()
        except BaseException as error:
            failure = error
        self.watch.begin()
        table = self._council.table(BEGIN, [FLUSH, *[0.0] * 4, float(position.step)], failure)
        if failure is not None:
            raise failure
        same_call(table, self.place.everyone)
        self._council.settled = False

    def close(self) -> None:
        """Leave the groups, and let go of all that holds a descriptor or a thread."""
        if not self._closed:
            self._closed = True
            self._council.closed = True
            if self._lines is not None:
                self._lines.close()
            if self._open is not None:
                self._open.leave()
            self._open = self._reducer = None
            self.watch.close()
            self.groups.close()
