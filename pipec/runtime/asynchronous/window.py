"""What devices share while minibatches overlap: inputs, losses, gradients and weights of all that is in flight.

Microbatches are counted as the plan counts them. When the steady step begins anew everything moves N microbatches
towards the start.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Any

import torch
from attrs import Factory, frozen
from torch import Tensor
from torch.optim import Optimizer

from pipec.runtime.asynchronous.delays import TruncatedExponential
from pipec.runtime.asynchronous.program import Steps
from pipec.runtime.asynchronous.reads import OnRead, WeightsRead, version_of
from pipec.runtime.asynchronous.result import Finished
from pipec.runtime.asynchronous.statistics import Statistics
from pipec.runtime.asynchronous.weights import Leaves, StageWeights
from pipec.runtime.borders import versions
from pipec.runtime.gradients import Accumulator
from pipec.runtime.program import Op
from pipec.runtime.randomness import Purpose, Randomness, Stream
from pipec.runtime.step import Batch, Probe
from pipec.runtime.stream_clock import StreamClock
from pipec.spec import Spec


@frozen(eq=False)
class Flight:
    """One minibatch in flight.

    Attributes:
        number: as the run counts its steps.
        weights: per loss and microbatch the factor of its loss in the minibatch's.
        seeds: the same for its gradient, where an update takes fewer backwards than a minibatch.
        options: per stage what its optimizer's groups said when the minibatch was fed.
        updated: names of the stages of this process that were updated with it, in order.
        written: per input how often its tensors had been written into when the minibatch was fed.
        rows: of every microbatch, None where no input is split.
        finished: its microbatches that results have told of, or the next one will.
    """

    number: int
    random: Randomness
    weights: list[list[float]]
    seeds: list[list[float]]
    shares: list[Fraction]
    options: Mapping[int, list[dict[str, Any]]]
    updated: list[str]
    written: Sequence[int]
    rows: Sequence[int] | None = None
    finished: list[int] = Factory(list)


def flight_of(
    batch: Batch, packets: Sequence[Sequence[Any]], random: Randomness, every: int,
    options: Mapping[int, list[dict[str, Any]]],
) -> Flight:
    """The record of a minibatch that is fed, its inputs cut into ``packets``.

    An update of ``every`` backwards takes the mean over their rows.
    """
    parts, count = batch.parts or [1] * batch.microbatches, batch.microbatches
    rows = sum(parts)
    seeds = []
    for index, loss in enumerate(batch.spec.losses):
        own = batch.weights[index]
        if every < count and (loss.count is not None or loss.reduction != "sum"):
            groups = [sum(parts[m // every * every : m // every * every + every]) for m in range(count)]
            own = [weight * rows / group for weight, group in zip(own, groups, strict=True)]
        seeds.append(own)
    shares = [Fraction(part, rows) for part in parts]
    written = versions([pieces[0] for pieces in packets])  # the pieces of a tensor count their writes together
    return Flight(random.position.step, random, batch.weights, seeds, shares, options, [], written, batch.parts)


class Window:
    """The shared state of an asynchronous run from one flush to the next; devices know it as their step."""

    lasting = True  # inputs are there until their microbatches are finished

    def __init__(
        self, steps: Steps, spec: Spec, weights: Sequence[StageWeights], optimizers: Mapping[int, Optimizer],
        update: Callable[[Op], None], delay: TruncatedExponential | None = None,
    ) -> None:
        plan = steps.plan
        self.steps, self.plan, self.half, self.readings = steps, plan, steps.half, steps.readings
        self.spec = spec
        self.weights, self.optimizers, self.places = weights, optimizers, steps.places
        self.minibatch, self.every = plan.minibatch, steps.every
        count = plan.microbatches
        self.inputs: list[list[Any]] = [[None] * count for _ in spec.inputs]
        self.outputs: list[list[Any]] = [[None] * count for _ in spec.outputs]
        self.losses: list[list[Any]] = [[None] * count for _ in spec.losses]
        self.flights: list[Flight | None] = [None] * plan.minibatches
        self.snapshots: dict[tuple[int, int], Any] = {}
        self.drawn: dict[tuple[int, int], Any] = {}
        self.sums: dict[tuple[int, int], Accumulator] = {}
        self.statistics = Statistics((own.stage for own in weights), steps.every)
        self.known: list[dict[Any, set[Any]]] = [{} for _ in weights]
        self.stood_in: set[int] = set()
        self.probe: Probe | None = None
        self.on_read: OnRead | None = None
        self.input_gradients: list[Any] = [None] * len(spec.inputs)  # nobody asks for any
        self.starts: list[int] = []
        self.ends: list[int] = []
        self.clock: StreamClock | None = None  # times of the devices, where these are not the host's
        self.fresh = range(0)  # microbatches whose inputs were not sent to devices yet
        self._update, self._delay = update, delay

    def feed(self, place: int, flight: Flight, packets: list[list[Any]]) -> None:
        """Put a minibatch in place ``place`` of the plan."""
        self.flights[place] = flight
        first = place * self.minibatch
        self.fresh = range(first, first + self.minibatch)
        for row, given in zip(self.inputs, packets, strict=True):
            row[first : first + self.minibatch] = given

    def shift(self) -> None:
        """Move everything one minibatch towards the start."""
        by, updates = self.minibatch, self.steps.updates
        for rows in (self.inputs, self.outputs, self.losses):
            for row in rows:
                del row[:by]
                row.extend([None] * by)
        del self.flights[0]
        self.flights.append(None)
        self.snapshots = {(stage, m - by): marks for (stage, m), marks in self.snapshots.items()}
        self.drawn = {(stage, m - by): states for (stage, m), states in self.drawn.items()}
        self.sums = {(stage, update - updates): own for (stage, update), own in self.sums.items()}
        self.statistics.shift(updates)
        for weights, stage in zip(self.weights, self.plan.graph.stages, strict=True):
            if stage.backward:  # others are never updated: every task reads version 0
                weights.shift(updates)

    def take(self, microbatches: Sequence[int]) -> list[Finished]:
        """What finished microbatches leave; it is forgotten here."""
        found = []
        for m in microbatches:
            flight, own = self.flight(m), m % self.minibatch
            flight.finished.append(own)
            found.append(Finished(
                flight.number, own, [row[m] for row in self.losses], [row[m] for row in self.outputs],
                [row[own] for row in flight.weights], flight.shares[own],
            ))
            for rows in (self.inputs, self.outputs, self.losses):
                for row in rows:
                    row[m] = None
        return found

    def finished(self, updates: int) -> list[int]:
        """Microbatches not taken yet of minibatches that have had all their ``updates``."""
        whole = [flight is not None and len(flight.updated) == updates for flight in self.flights]
        return [m for m, loss in enumerate(self.losses[0]) if loss is not None and whole[m // self.minibatch]]

    def flight(self, microbatch: int) -> Flight:
        """The minibatch that a microbatch belongs to."""
        found = self.flights[microbatch // self.minibatch]
        assert found is not None
        return found

    def called(self, microbatch: int) -> str:
        """A microbatch of the plan in the user's words."""
        flight = self.flights[microbatch // self.minibatch]
        number = "an unknown minibatch" if flight is None else f"minibatch {flight.number}"
        return f"microbatch {microbatch % self.minibatch} of {number}"

    # -- what handlers call ---------------------------------------------------------------------------------

    @property
    def random(self) -> Window:
        """Where tasks find their random numbers."""
        return self

    @property
    def wanted_losses(self) -> range:
        """All: training is given every input."""
        return range(len(self.losses))

    def task(self, stage: int, microbatch: int, purpose: Purpose) -> Stream:
        """The random numbers of a task: those of its own minibatch, as if that were a step of its own."""
        return self.flight(microbatch).random.task(stage, microbatch % self.minibatch, purpose)

    def seed(self, loss: int, microbatch: int) -> Tensor:
        """The gradient of an update's loss with respect to one microbatch's."""
        weight = self.flight(microbatch).seeds[loss][microbatch % self.minibatch]
        return torch.full_like(self.losses[loss][microbatch], weight)

    def add_gradients(self, stage: int, microbatch: int, found: Sequence[Tensor | None]) -> None:
        """Add a microbatch's gradients to those of its update, when their turn comes."""
        update = microbatch // self.every
        own = self.sums.get((stage, update))
        if own is None:
            own = self.sums[stage, update] = Accumulator(self.weights[stage].parameters, set(), range(self.every))
        own.add(microbatch % self.every, found)

    def delayed(self, op: Op, weights: StageWeights) -> int:
        """How many updates older than the plan says a task's weights are."""
        if self._delay is None:
            return 0
        version = self.readings[op.task].version  # type: ignore[union-attr]
        oldest = min(weights.kept, default=weights.version)
        position = self.flight(op.microbatch).random.position
        drawn = self._delay.draw(position, op.stage, op.microbatch % self.minibatch)
        return max(0, min(drawn, version - oldest))

    def tell(self, op: Op, leaves: Leaves, declared: int, give: Callable[[int], Tensor] | None = None) -> None:
        """Tell who looks on what a task reads: what ``give`` makes of the ``declared`` version, or ``leaves``."""
        weights, on_read = self.weights[op.stage], self.on_read
        assert on_read is not None
        version = declared if give is not None else version_of(weights, leaves, declared)
        read = leaves.tensors.__getitem__ if give is None else give
        on_read(WeightsRead(
            op.kind, weights.stage.name, self.flight(op.microbatch).number, op.microbatch % self.minibatch,
            weights.version - version, {name: read(index).detach() for index, name in enumerate(weights.names)},
        ))

    def update(self, op: Op) -> None:
        """UPDATE of a stage."""
        self._update(op)

    def forget(self) -> None:
        """Nothing to forget before the flush."""
