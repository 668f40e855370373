"""Minibatch after minibatch through an asynchronous plan: one segment of it per step, and the flush."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import ceil
from typing import Any

from torch.optim import Optimizer

from pipec.errors import Problem, RaceError, RunError, note, raise_all
from pipec.excerpt import Excerpt
from pipec.ir import Plan
from pipec.runtime.alone import Alone
from pipec.runtime.asynchronous import rescheduling as rates
from pipec.runtime.asynchronous.delays import TruncatedExponential
from pipec.runtime.asynchronous.device import OverlappedDevice
from pipec.runtime.asynchronous.measured import Measured, measured_part
from pipec.runtime.asynchronous.program import Segment, build_steps
from pipec.runtime.asynchronous.reads import OnRead
from pipec.runtime.asynchronous.rescheduling import Rescheduling
from pipec.runtime.asynchronous.result import AsynchronousResult, Finished, result_of
from pipec.runtime.asynchronous.weights import StageWeights
from pipec.runtime.asynchronous.window import Flight, Window, flight_of
from pipec.runtime.backends import Backend
from pipec.runtime.failure import annotate
from pipec.runtime.gradients import commit
from pipec.runtime.program import Op
from pipec.runtime.randomness import Position, Randomness
from pipec.runtime.shared import SharedBuffers
from pipec.runtime.step import Batch, Probe
from pipec.spec import Spec


class Flow:
    """An asynchronous plan in motion.

    Attributes:
        fed: minibatches since the last flush.
        staleness: per stage the mean age of a forward's weights when its gradient is made, in updates.
        on_read: called with the weights that each task reads.
        pending: microbatches that a flush in between, or a step that failed, finished, for the next result.
    """

    def __init__(
        self, spec: Spec, plan: Plan, weights: Sequence[StageWeights], optimizers: Mapping[int, Optimizer],
        rescheduling: Rescheduling | None = None, delay: TruncatedExponential | None = None,
        party: Alone | None = None,
    ) -> None:
        self.spec, self.plan, self.weights, self.optimizers = spec, plan, weights, optimizers
        late = None if delay is None else delay.average
        self.steps = build_steps(plan, late)
        self.staleness = [
            float(own) + (late or 0.0) * info.backward
            for own, info in zip(self.steps.staleness, plan.graph.stages, strict=True)
        ]
        self.rescheduling, self.delay = rescheduling, delay
        self.window: Window | None = None
        self.fed = 0
        self.on_read: OnRead | None = None
        self.pending: list[Finished] = []
        self.measured: Measured | None = None  # the last step or flush
        self._known: list[dict[Any, set[Any]]] = [{} for _ in weights]
        self._devices: list[OverlappedDevice] = []
        self._party = party or Alone()
        self._together = self._party.together(self.steps)
        self._shared: SharedBuffers | None = None
        for own in weights:
            self.steps.half.check(own, optimizers.get(own.stage.index))

    @property
    def in_flight(self) -> list[Flight]:
        """Minibatches that were fed and have not updated every stage, oldest first."""
        return self._flying(min(self.fed, len(self.steps.segments)))

    def _flying(self, step: int) -> list[Flight]:
        """Those that some stage has still to be updated with when ``step`` of the plan begins."""
        return [] if self.window is None else [
            flight for place, flight in enumerate(self.window.flights)
            if flight is not None and self.steps.ends[place] >= step
        ]

    def ready(self) -> None:
        """Look at parameters and gradients before a minibatch is fed.

        Raises:
            RunError: they were changed in a way that asynchronous steps cannot live with; nothing is lost then.
        """
        if self.window is not None:
            check_unchanged(self.weights)
            return
        for weights in self.weights:
            weights.begin()
            weights.history = self._history(weights.stage.index)
            weights.stage.buffers.refresh()
            weights.stage.buffers.mark()  # to tell which of them change
            self.steps.half.check(weights, self.optimizers.get(weights.stage.index))
        check_gradients(self.weights)

    def step(
        self, batch: Batch, random: Randomness, probe: Probe | None, backend: Backend
    ) -> AsynchronousResult:
        """Feed one minibatch and run one step of the plan, when it is :meth:`ready`.

        Raises:
            BaseException: what a task raised. What was in flight is dropped then.
        """
        packets = batch.packets()
        options = {stage: rates.options_of(optimizer) for stage, optimizer in self.optimizers.items()}
        flight = flight_of(batch, packets, random, self.steps.every, options)
        if self.window is None:
            self._begin(backend)
        window = self.window
        assert window is not None
        place = min(self.fed, len(self.steps.segments) - 1)
        if self.fed > place:
            self._shift()
        window.feed(place, flight, packets)
        window.probe = probe
        self.fed += 1
        self.pending += self._run(self.steps.segments[place], place, backend)
        return self.result()

    def drain(self, backend: Backend, position: Position) -> tuple[int, ...]:
        """Run what is left of the minibatches in flight; the next result has what it finished.

        Returns:
            The numbers of these minibatches.

        Raises:
            RunError: parameters were frozen or replaced meanwhile; nothing is lost then.
        """
        if self.window is None:
            return ()
        self._party.flush(lambda: check_unchanged(self.weights), position)
        numbers = tuple(flight.number for flight in self.in_flight)
        count = min(self.fed, len(self.steps.segments))
        self.pending += self._run(self.steps.flush(count), count, backend)
        self.drop()
        return numbers

    def result(self) -> AsynchronousResult:
        """What was finished since the last result."""
        found, self.pending = self.pending, []
        return result_of(self.spec, self.plan.minibatch, found, self._party.elsewhere_outputs())

    def measured_part(self) -> tuple[Plan, list[int], list[int], Excerpt]:
        """The last step's tasks as a plan, when each began and ended, and what it is an excerpt of."""
        assert self.measured is not None
        return measured_part(self.plan, self.steps, self.measured, self._party)

    def drop(self) -> None:
        """Forget everything in flight."""
        self.window, self.fed, self._devices = None, 0, []
        self._together.drop()
        for weights in self.weights:
            weights.kept, weights.made, weights.corrected = {}, None, None

    def _begin(self, backend: Backend) -> None:
        """An empty pipeline."""
        for optimizer in self.optimizers.values():  # schedulers step before the first update is there; that is right
            optimizer._opt_called = True  # type: ignore[attr-defined]
        self._shared = SharedBuffers([weights.stage for weights in self.weights], True)
        self.window = Window(self.steps, self.spec, self.weights, self.optimizers, self._update, self.delay)
        self.window.known = self._known
        stages = [weights.stage for weights in self.weights]
        self._devices = self._together.devices(stages, self.window, backend)

    def _history(self, stage: int) -> int:
        return 0 if self.delay is None else self.delay.longest + ceil(self.steps.staleness[stage]) + 1

    def _shift(self) -> None:
        """Move everything alive one minibatch towards the start of the plan."""
        assert self.window is not None
        self.window.shift()
        self._together.shift(self._devices, self.plan.minibatch)

    def _run(self, segment: Segment, step: int, backend: Backend) -> list[Finished]:
        """Run a segment, that of ``step``; what was finished in it."""
        window = self.window
        assert window is not None
        size, flying = len(self.plan), self._flying(step)
        window.on_read = self.on_read
        window.starts, window.ends, window.clock = [0] * size, [0] * size, None

        def work() -> None:
            failure = self._together.run(self._devices, segment, backend)
            try:
                if failure is not None:
                    raise annotate(failure, self.plan.graph, called=window.called)
            finally:
                del failure  # a caught traceback must not keep tensors in a cycle
            assert self._shared is not None
            self._shared.check()

        try:
            found = self._together.settle(window, segment, work)
        except BaseException as error:
            note(error, lost(flying, self._updates if self._together.whole else None))
            self._fail(window)
            del window
            raise
        for device in self._devices:
            device.finished(segment.finished)
        numbers = tuple(-1 if flight is None else flight.number for flight in window.flights)
        self.measured = Measured(segment, step, window.starts, window.ends, window.clock, numbers,
                                 [own.updates - own.version for own in self.weights])
        return found

    @property
    def _updates(self) -> int:
        """UPDATEs that a minibatch brings, all stages together."""
        return sum(1 for stage in self.plan.graph.stages if stage.backward) * self.steps.updates

    def _fail(self, window: Window) -> None:
        """Drop what is in flight and leave every stage as its last UPDATE did, buffers included.

        What was finished comes with the next result; over several processes, where losses are elsewhere, it does not.
        """
        if self._together.whole:
            self.pending += window.take(window.finished(self._updates))
        window.statistics.put_back()
        self.drop()
        for weights in self.weights:
            for parameter in weights.parameters:
                parameter.grad = None

    def _update(self, op: Op) -> None:
        """One UPDATE: the gradients of its microbatches become ``.grad``, the optimizer steps, the rule has its say."""
        window, weights = self.window, self.weights[op.stage]
        assert window is not None
        optimizer = self.optimizers.get(op.stage)
        flight = window.flight((op.microbatch + 1) * window.every - 1)
        sums = window.sums.pop((op.stage, op.microbatch), None)
        if sums is None or not sums.complete:
            raise RaceError(
                f"the UPDATE {op.microbatch} of stage {weights.stage.name!r} runs before all gradients it uses are "
                "there; nothing in the plan keeps it after their backwards"
            )
        if op.task in self.steps.keeps or weights.history:
            weights.keep()
        if optimizer is not None:
            options, factor = flight.options[op.stage], self._factor(weights)

            def advance(scale: float) -> None:
                weights.rates = rates.advance(optimizer, options, factor * scale)

            try:
                commit([sums], set())
                self.steps.half.update(weights, advance)
            finally:
                for group in optimizer.param_groups:
                    for parameter in group["params"]:
                        parameter.grad = None
        weights.advanced()
        window.statistics.updated(op.stage, op.microbatch)
        flight.updated.append(weights.stage.name)

    def _factor(self, weights: StageWeights) -> float:
        if self.rescheduling is None:
            return 1.0
        return self.rescheduling.factor(weights.updates, self.staleness[weights.stage.index])


def lost(flights: Sequence[Flight], updates: int | None) -> str:
    """Which minibatches a failure loses, and which stages had been updated with them.

    Those whose losses results have told of are *finished* and named apart: only updates of theirs are lost.

    ``updates``: all that a minibatch brings; None where other processes have stages too.
    """
    flights = [flight for flight in flights if updates is None or len(flight.updated) < updates]
    gone = [flight for flight in flights if len(flight.finished) < len(flight.shares)]
    before = [f"{flight.number}, but not updated everywhere" for flight in flights if flight not in gone] + [
        f"{len(flight.finished)} of {len(flight.shares)} microbatches of {flight.number}"
        for flight in gone if flight.finished
    ]
    numbers = ", ".join(str(flight.number) for flight in gone) or "none"
    numbers += f"; finished before: {'; '.join(before)}" if before else ""
    told = [
        f"{', '.join(dict.fromkeys(flight.updated))} with minibatch {flight.number}"
        for flight in flights if flight.updated
    ]
    here = "" if updates is not None else "of this rank's stages "
    none = f"; {'no stage' if not here else 'none of its stages'} was updated with any of them"
    updated = f"; {here}updated already: " + "; ".join(told) if told else none
    return f"pipec: minibatches in flight are lost: {numbers}{updated if flights else ''}. The next step begins with " \
           "an empty pipeline"


def check_unchanged(weights: Sequence[StageWeights]) -> None:
    """Raise RunError for parameters that were frozen or replaced while minibatches that use them are in flight."""
    problems = [Problem(f"{own.stage.name}.{told}") for own in weights for told in own.changes()]
    what = "parameters changed while minibatches are in flight; undo that, call run.flush(), then change them " \
           "(run.restore() of a checkpoint drops what is in flight)"
    raise_all(what, problems, RunError, most=8)


def check_gradients(weights: Sequence[StageWeights]) -> None:
    """Raise RunError for gradients that asynchronous updates would neither use nor clear."""
    problems = [
        Problem(f"{own.stage.name}.{name} has a .grad from before")
        for own in weights for name, p in zip(own.names, own.parameters, strict=True) if p.grad is not None
    ]
    raise_all("asynchronous steps make their own gradients; set these to None first (optimizer.zero_grad())", problems,
              RunError, most=8)
