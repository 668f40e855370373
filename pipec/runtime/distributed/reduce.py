"""REDUCE: gradients added up over the replicas of a pipeline, and over ranks whose stages share a parameter.

A REDUCE begins the addition and goes on; the sums are taken when all tasks have ended. Over replicas it is an
all-reduce per stage, each device in its own group, in the order of the plan, which is the same in all of them. For a
shared parameter each rank hands the sum of each of its stages to the others that hold it, and every rank adds them
up itself, in ascending order of the stages, as one process would: all replicas of the parameter stay bit-equal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from time import perf_counter_ns
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from attrs import define, field
from torch import Tensor

from pipec.errors import RunError
from pipec.ir import Kind
from pipec.runtime.distributed.group import Groups, LostError
from pipec.runtime.distributed.local import Tied
from pipec.runtime.gradients import Accumulator
from pipec.runtime.step import Step

TAG = 16  # tags from here on belong to shared parameters


@define(eq=False)
class Sum:
    """An all-reduce under way: a stage's gradients of one dtype in a row, then how many replicas have each."""

    stage: int
    places: list[int]
    flat: Tensor
    work: Any


@define(eq=False)
class Part:
    """A stage's sum for a shared parameter on its way from another rank: whether there is one, and its values."""

    stage: int
    place: int
    device: int
    buffers: list[Tensor]
    works: list[Any] = field(factory=list)


def owed(
    tied: Sequence[Tied], accumulators: Sequence[Accumulator], stage: int, failed: bool
) -> Iterator[tuple[int, Tied, Tensor | None]]:
    """Parameters that a stage shares with others, by their number, and its sums of them, dense; None for nothing."""
    for number, one in enumerate(tied):
        if stage not in one.stages or not one.parameter.requires_grad:
            continue
        own = accumulators[stage]
        total = None if failed else own.sums[place_of(own.parameters, one.parameter)]
        yield number, one, total.to_dense() if total is not None and total.is_sparse else total


def noting_ends(step: Step) -> Callable[[int], None]:
    """Notes when the REDUCE of a stage has ended, for the trace: its task only begins it."""
    table, ends = step.plan.table, step.ends
    tasks = {int(table.stage[task]): int(task) for task in np.flatnonzero(table.kind == Kind.REDUCE)}

    def ended(stage: int) -> None:
        ends[tasks[stage]] = perf_counter_ns()

    return ended


class Reducer:
    """The REDUCE tasks of one step on one rank."""

    def __init__(
        self, groups: Groups, tied: Sequence[Tied], devices: Sequence[int], accumulators: Sequence[Accumulator],
        timeout: float, ended: Callable[[int], None] | None = None,
    ) -> None:
        """``devices``: of every stage; ``ended``: told the stage when its sum over replicas is there, from a thread."""
        self._groups, self._tied, self._devices, self._accumulators = groups, tied, devices, accumulators
        self._me, self._timeout = groups.place.device, timedelta(seconds=timeout)
        self._ended = ended
        self._sums: list[Sum] = []
        self._parts: list[Part] = []
        self._sends: list[tuple[Any, Tensor]] = []
        self._begin()

    def _begin(self) -> None:
        """Make room for what other ranks send, and expect it."""
        for number, stage, one in self._expected():
            place = place_of(self._accumulators[stage].parameters, one.parameter)
            buffers = [torch.zeros(1), torch.empty(one.parameter.shape, dtype=one.parameter.dtype)]
            part = Part(stage, place, self._devices[stage], buffers)
            part.works = [self._groups.pipeline.recv([b], part.device, self._tag(number, stage)) for b in buffers]
            self._parts.append(part)

    def _expected(self) -> Iterator[tuple[int, int, Tied]]:
        """What other ranks send to this one: the sum of a stage of theirs for a parameter held here, and its number."""
        for number, one in enumerate(self._tied):
            if one.parameter.requires_grad and any(self._devices[stage] == self._me for stage in one.stages):
                yield from ((number, stage, one) for stage in one.stages if self._devices[stage] != self._me)

    def _holders(self, one: Tied) -> list[int]:
        """The other ranks that hold a parameter."""
        return sorted({self._devices[stage] for stage in one.stages} - {self._me})

    def _tag(self, number: int, stage: int) -> int:
        return TAG + number * len(self._devices) + stage

    def start(self, stage: int, failed: bool = False) -> None:
        """Begin the REDUCE of ``stage``; after a failure only so that others come to their end."""
        if self._groups.replicas is not None:
            self._sum(stage, failed)
        else:
            self._hand_over(stage, failed)

    def _sum(self, stage: int, failed: bool) -> None:
        for places, rows, has in rows_of(self._accumulators[stage], failed):
            flat = torch.cat([*rows, torch.tensor(has, dtype=rows[0].dtype)])
            work = dist.all_reduce(flat, group=self._groups.replicas, async_op=True)
            if self._ended is not None:
                work.get_future().add_done_callback(lambda _, stage=stage, told=self._ended: told(stage))
            self._sums.append(Sum(stage, places, flat, work))

    def _hand_over(self, stage: int, failed: bool) -> None:
        """Send the stage's sums of shared parameters to every other rank that holds them."""
        for number, one, total in owed(self._tied, self._accumulators, stage, failed):
            buffers = [torch.tensor([float(total is not None)]),
                       torch.zeros_like(one.parameter) if total is None else total.contiguous()]
            for device in self._holders(one):
                for buffer in buffers:
                    work = self._groups.pipeline.send([buffer], device, self._tag(number, stage))
                    self._sends.append((work, buffer))

    def finish(self, discard: bool = False) -> None:
        """Wait for every sum, and put it where this rank adds gradients to ``.grad``.

        Raises:
            LostError: a rank has ended or does not answer.
        """
        try:
            for one in self._sums:
                one.work.wait(self._timeout)
                if not discard:
                    self._keep(one)
            if self._groups.replicas is not None:
                for stage in dict.fromkeys(one.stage for one in self._sums):
                    self._hand_over(stage, discard)
            for part in self._parts:
                for work in part.works:
                    work.wait(self._timeout)
                if not discard and float(part.buffers[0]):
                    own = self._accumulators[part.stage]
                    own.give(part.place, part.buffers[1])
            for work, _ in self._sends:
                work.wait(self._timeout)
        except RuntimeError as error:
            if isinstance(error, RunError):
                raise
            raise LostError(f"a REDUCE did not end: {error}") from error
        self._sums, self._parts, self._sends = [], [], []

    def _keep(self, one: Sum) -> None:
        own = self._accumulators[one.stage]
        has = one.flat[len(one.flat) - len(one.places) :].tolist()
        at = 0
        for place, count in zip(one.places, has, strict=True):
            parameter = own.parameters[place]
            row = one.flat[at : at + parameter.numel()]
            at += parameter.numel()
            if count:
                own.give(place, torch.empty_like(parameter).copy_(row.view(parameter.shape)))


def rows_of(own: Accumulator, failed: bool) -> Iterator[tuple[list[int], list[Tensor], list[float]]]:
    """A stage's sums by dtype: places of the parameters, each sum as a row, and whether there is one."""
    by_dtype: dict[torch.dtype, list[int]] = {}
    for place, parameter in enumerate(own.parameters):
        by_dtype.setdefault(parameter.dtype, []).append(place)
    for places in by_dtype.values():
        rows, has = [], []
        for place in places:
            total = None if failed else own.sums[place]
            if total is not None and total.is_sparse:
                total = total.to_dense()
            has.append(float(total is not None))
            rows.append((torch.zeros_like(own.parameters[place]) if total is None else total).reshape(-1))
        yield places, rows, has


def place_of(parameters: Sequence[Tensor], wanted: Tensor) -> int:
    return next(place for place, parameter in enumerate(parameters) if parameter is wanted)
