"""What several invariants ask of a plan: where its tasks and copies are, and what each task needs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cached_property
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt
from attrs import frozen

from pipec.costs import Activations
from pipec.ir import CARRIED, FROM_HOST, TO_HOST, Kind, Lane, Plan
from pipec.passes.draft import Index, grouped, pairs
from pipec.passes.hold import gates
from pipec.segments import recomputed_values
from pipec.verify.reach import Reach

Rows = npt.NDArray[np.int64]
Route = tuple[int, int, int, int]  # value, gradient, from device, to device
SHOWN = 4  # problems of one kind told in full


@frozen
class NotChecked:
    """Why an invariant could not be looked at."""

    why: str


def some(rows: npt.NDArray[Any], messages: Iterator[str]) -> list[str]:
    """The first of ``messages``, one a row, and how many there are beyond."""
    shown = list(islice(messages, SHOWN))
    return [*shown, f"and {len(rows) - SHOWN} more like the last"] if len(rows) > SHOWN else shown


@frozen(eq=False)
class Need:
    """Pairs of tasks of which the first must end before the second starts, and why, for messages."""

    before: Rows
    after: Rows
    why: str  # of the form "... {after} ... {before} ..."


class Facts:
    """A plan of the right form, and what follows from it; computed when first asked for."""

    def __init__(self, plan: Plan, memory_limit: float | Activations | None = None) -> None:
        self.plan, self.table, self.graph, self.memory_limit = plan, plan.table, plan.graph, memory_limit
        self.training = plan.training or plan.update is not None
        self.reach = Reach(plan)
        self.index = Index(plan.table, len(plan.graph.stages), plan.microbatches, plan.slices, plan.replicas)
        self.again = recomputed_values(plan.graph, plan.recompute) if self.training else {}
        self.home = np.full(len(plan.graph.stages), -1, np.int64)
        for chunk in plan.chunks:
            self.home[list(chunk.stages)] = chunk.device

    # -- words ----------------------------------------------------------------------------------------------

    def stage(self, number: int) -> str:
        name = repr(self.graph.stages[number].name)
        return name if len(name) <= 60 else name[:57] + "..."

    def value(self, number: int) -> str:
        name = repr(self.graph.values[number].name)
        return name if len(name) <= 60 else name[:57] + "..."

    def task(self, row: int) -> str:
        """A task as it prints, with its stage's name and its device."""
        task = self.table.task(row)
        if task.kind is Kind.COPY:
            which = "gradient of " if task.gradient else "recomputed " if task.recomputed else ""
            where = {"to": " to host memory", "from": " back from host memory"}.get(task.host, "")
            return f"{task} ({which}value {self.value(task.value)}{where})"
        if task.stage < 0:
            return f"{task} (all stages, device {task.device})"
        return f"{task} (stage {self.stage(task.stage)}, device {task.device})"

    def token(self, kind: Kind, stage: int, item: int) -> str:
        """How the task of ``kind`` of a stage would print."""
        return f"{stage}{kind.letter}{self.item(item)} (stage {self.stage(stage)}, device {self.home[stage]})"

    def item(self, item: int) -> str:
        microbatch, rest = item % self.plan.microbatches, item // self.plan.microbatches
        slice_, replica = rest % self.plan.slices, rest // self.plan.slices
        return f"{microbatch}" + (f".{slice_}" if slice_ else "") + (f"~{replica}" if replica else "")

    # -- where things are -----------------------------------------------------------------------------------

    @property
    def items(self) -> int:
        """Microbatches x slices x replicas."""
        return self.index.items

    def item_of(self, columns: Any) -> Rows:
        """Per row of a table or of buffers its item number."""
        outer = columns.replica.astype(np.int64) * self.plan.slices + columns.slice
        return np.asarray(outer * self.plan.microbatches + columns.microbatch)

    @cached_property
    def copies(self) -> dict[Route, Rows]:
        """Rows of the COPY tasks of a route by item, -1 where there is none."""
        ids = np.flatnonzero(self.table.kind == Kind.COPY)
        table, devices = self.table, self.plan.devices
        key = table.value[ids].astype(np.int64) * CARRIED + table.gradient[ids]
        key = (key * devices + table.device[ids]) * devices + table.peer[ids]
        item = self.item_of(table)[ids]
        made: dict[Route, Rows] = {}
        for value, own in grouped(key):
            rows = np.full(self.items, -1, np.int64)
            rows[item[own]] = ids[own]
            value, peer = divmod(value, devices)
            value, device = divmod(value, devices)
            made[value // CARRIED, value % CARRIED, device, peer] = rows
        return made

    def copy(self, value: int, gradient: int, source: int, target: int) -> Rows:
        """Rows of the COPY tasks of a route by item; -1 where there is none."""
        rows = self.copies.get((value, gradient, source, target))
        return np.full(self.items, -1, np.int64) if rows is None else rows

    def readers_on(self, value: int) -> dict[int, list[int]]:
        """Per device the stages there that read ``value``, those apart that take it from host memory."""
        hosted = self.hosted_on(value)
        return {d: own for d, own in self._by_device(self.graph.values[value].readers).items() if d not in hosted}

    def hosted_on(self, value: int) -> dict[int, list[int]]:
        """Per device that takes ``value`` from host memory the stages there that read it."""
        info = self.graph.values[value]
        devices = info.through_host([int(device) for device in self.home]) if info.host else ()
        return {d: own for d, own in self._by_device(info.readers).items() if d in devices}

    def gate(self, device: int, stages: list[int]) -> Rows:
        """By item the task after which a value may come back to ``device`` for the first of its readers there."""
        rows = np.stack([self.index.of(Kind.FORWARD, reader) for reader in stages])
        place = np.where(rows >= 0, self.reach.place[0, rows], len(self.table))  # ids need not be an order
        first = rows[place.argmin(axis=0), np.arange(self.items)]
        return gates(self.table, self.plan.lanes[device][Lane.COMPUTE], first)

    def gradients_on(self, value: int) -> dict[int, list[int]]:
        """Per device the stages there that send a gradient of ``value`` back; none in a plan of forwards."""
        return self._by_device(self.graph.gradient_readers(value) if self.training else ())

    def again_on(self, value: int) -> dict[int, list[int]]:
        """Per device the stages there that read ``value`` recomputed by its segment."""
        return self._by_device(self.again.get(value, ()))

    def _by_device(self, stages: Iterable[int]) -> dict[int, list[int]]:
        made: dict[int, list[int]] = {}
        for stage in stages:
            made.setdefault(int(self.home[stage]), []).append(stage)
        return made

    # -- what tasks need ------------------------------------------------------------------------------------

    @cached_property
    def own_needs(self) -> list[Need]:
        """The order of a stage's own tasks on one microbatch."""
        made = []
        for stage in range(len(self.graph.stages)):
            forward, again = self.index.of(Kind.FORWARD, stage), self.index.of(Kind.RECOMPUTE, stage)
            backward, weight = self.index.input_backward(stage), self.index.of(Kind.BACKWARD_WEIGHT, stage)
            made += [
                self._need(forward, again, "{after} recomputes what {before} has not computed before it"),
                self._need(forward, backward, "{after} stands before its forward {before}"),
                self._need(again, backward, "{after} stands before its recompute {before}"),
                self._need(backward, weight, "{after} stands before its input half {before}"),
            ]
            if self.graph.stages[stage].carry:
                carried = "{after} does not come after {before}, which carries on to it from the slice "
                made += [
                    self._need(forward, self.index.of_next(forward), carried + "before"),
                    self._need(self.index.of_next(backward), backward, carried + "after it"),
                ]
        return made

    @cached_property
    def data_needs(self) -> list[Need]:
        """What tasks need of other stages, through the copies that carry it between devices."""
        made = []
        reads = "{after} reads a value but does not wait for {before}, which brings it"
        needs = "{after} needs a gradient but does not wait for {before}, which brings it"
        for value, info in enumerate(self.graph.values):
            home = int(self.home[info.producer])
            forward = self.index.of(Kind.FORWARD, info.producer)
            backward = self.index.input_backward(info.producer)
            for device, stages in self.readers_on(value).items():
                source = forward if device == home else self.copy(value, 0, home, device)
                if device != home:
                    made.append(self._need(forward, source, reads))
                made += [self._need(source, self.index.of(Kind.FORWARD, reader), reads) for reader in stages]
            made += self._host_needs(value, home, forward)
            anew = self.index.of(Kind.RECOMPUTE, info.producer)
            for device, stages in self.again_on(value).items():
                source = anew if device == home else self.copy(value, 2, home, device)
                if device != home:
                    made.append(self._need(anew, source, reads))
                made += [self._need(source, self.index.of(Kind.RECOMPUTE, reader), reads) for reader in stages]
            for device, stages in self.gradients_on(value).items():
                target = backward if device == home else self.copy(value, 1, device, home)
                if device != home:
                    made.append(self._need(target, backward, needs))
                made += [self._need(self.index.input_backward(reader), target, needs) for reader in stages]
        return made

    def _host_needs(self, value: int, home: int, forward: Rows) -> list[Need]:
        """The way of a value through host memory, and not earlier than one task ahead of its reader."""
        out, made = self.copy(value, TO_HOST, home, home), []
        for device, stages in self.hosted_on(value).items():
            back = self.copy(value, FROM_HOST, home, device)
            made += [
                self._need(forward, out, "{after} reads a value but does not wait for {before}, which brings it"),
                self._need(out, back, "{after} reads a value but does not wait for {before}, which brings it"),
                self._need(self.gate(device, stages), back,
                           "{after} comes back more than one task ahead of its reader: it does not wait for {before}"),
                *(self._need(back, self.index.of(Kind.FORWARD, reader), "{after} reads a value but does not wait for "
                             "{before}, which brings it") for reader in stages),
            ]
        return made

    def _need(self, before: Any, after: Any, why: str) -> Need:
        return Need(*pairs(before, after), why)

    def unproved(self, needs: list[Need]) -> list[str]:
        """A message for the needs that no path through lanes and waits meets."""
        if not needs:
            return []
        before = np.concatenate([need.before for need in needs])
        after = np.concatenate([need.after for need in needs])
        which = np.repeat(np.arange(len(needs)), [len(need.before) for need in needs])
        open_ = np.flatnonzero(~self.reach.proved(before, after))
        return some(open_, (
            needs[which[i]].why.format(before=self.task(int(before[i])), after=self.task(int(after[i])))
            for i in open_.tolist()
        ))
