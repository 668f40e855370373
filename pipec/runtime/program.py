"""A plan as the instructions of each device: every task with the slots it reads, writes, sends and frees.

Programs hold numbers only, so they are built once per plan and shared by all its steps.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np
from attrs import frozen

from pipec.ir import CARRIES, TO_HOST, Buffer, Kind, Lane, Plan
from pipec.segments import Again, recomputed_values

Slot = int
Route = tuple[int, int]  # source device, target device
NOTHING = -1  # in place of a kind of buffer
NOWHERE: Route = (-1, -1)


class Op:
    """One task of a device, ready to run.

    Attributes:
        task: id in the plan.
        piece: number of the slice over all microbatches, m x slices + slice: where its inputs and results are.
        turn: the same with the slices of a microbatch in reverse, the order in which gradients are added up.
        receives: (route, n): it needs the first n values that arrive on this route.
        reads: per value the stage reads, its slot.
        gives: per value the stage gives, its slot, or -1 where nobody needs it.
        tape: slot of the graph that a forward leaves for its backward, or -1.
        recomputed: a FORWARD whose RECOMPUTE follows.
        gradients: per value the stage gives, the slot of its gradients, or -1.
        returns: per value the stage reads, the slot its gradient goes to, or -1.
        carry: slot of what a forward hands on to the next slice, or -1. What a stage carries also stands behind the
            values in ``reads`` and ``returns``, its gradient behind those in ``gradients``.
        source, route: of a COPY: the slot it sends and where; ``slot`` is the one it arrives in. One to host memory has
            no route: what it makes stays in a slot of the same device.
        hosted: a COPY to host memory, or from there.
        readers: per value the stage reads, all stages that send a gradient of it.
        frees: slots that are dead when it has ended.
    """

    __slots__ = (
        "carry",
        "device",
        "frees",
        "gives",
        "gradients",
        "hosted",
        "kind",
        "microbatch",
        "piece",
        "readers",
        "reads",
        "receives",
        "recomputed",
        "returns",
        "route",
        "slice",
        "slot",
        "source",
        "stage",
        "tape",
        "task",
        "turn",
    )

    def __init__(
        self, task: int, kind: Kind, stage: int, microbatch: int, device: int, slice_: int = 0, slices: int = 1
    ) -> None:
        self.task, self.kind, self.stage, self.microbatch, self.device = task, kind, stage, microbatch, device
        self.slice, self.piece = slice_, microbatch * slices + slice_
        self.turn = microbatch * slices + slices - 1 - slice_
        self.carry: Slot = -1
        self.receives: tuple[tuple[Route, int], ...] = ()
        self.reads: tuple[Slot, ...] = ()
        self.gives: tuple[Slot, ...] = ()
        self.gradients: tuple[Slot, ...] = ()
        self.returns: tuple[Slot, ...] = ()
        self.tape: Slot = -1
        self.recomputed = self.hosted = False
        self.source: Slot = -1
        self.slot: Slot = -1
        self.route: Route = NOWHERE
        self.readers: tuple[tuple[int, ...], ...] = ()
        self.frees: tuple[Slot, ...] = ()


@frozen(eq=False)
class Program:
    """The instructions of a plan: per device its tasks and the number of its slots."""

    ops: tuple[tuple[Op, ...], ...]  # per device, UPDATE apart
    updates: tuple[tuple[Op, ...], ...]  # per device
    slots: tuple[int, ...]
    routes: tuple[Route, ...]
    backward_order: tuple[tuple[int, ...], ...]  # per stage the turns of its backwards in their order
    split: frozenset[int]  # stages with a backward in two halves
    keys: tuple[tuple[tuple[int, int, int], ...], ...]  # per device and slot what it holds: Buffer, ref, microbatch


class Slots:
    """Numbers for (kind, value or stage, piece) on one device."""

    def __init__(self) -> None:
        self.number: dict[tuple[int, int, int], int] = {}

    def of(self, kind: int, ref: int, piece: int) -> Slot:
        return self.number.setdefault((kind, ref, piece), len(self.number))

    def find(self, kind: Buffer, ref: int, piece: int) -> Slot:
        return self.number.get((kind, ref, piece), -1)

    def nothing(self) -> Slot:
        """A slot that stays empty: what a stage carries to the first slice."""
        return self.of(NOTHING, -1, 0)


def build_program(plan: Plan) -> Program:
    """Translate ``plan`` into instructions, one sweep over its tasks."""
    slots = [Slots() for _ in range(plan.devices)]
    made = instructions(plan, slots)
    ops, updates = [], []
    for device in range(plan.devices):
        own = np.flatnonzero(plan.table.device == device).tolist()
        last = max((i for i in own if made[i].kind is not Kind.UPDATE), default=-1)
        late = [made[i] for i in own if i > last]
        ops.append(tuple(made[i] for i in own if i <= last))
        updates.append(tuple(late))
    routes = tuple(sorted({op.route for op in made if op.kind is Kind.COPY} - {NOWHERE}))
    order: list[list[int]] = [[] for _ in plan.graph.stages]
    for op in made:
        if op.kind in (Kind.BACKWARD, Kind.BACKWARD_WEIGHT):
            order[op.stage].append(op.turn)
    split = frozenset(op.stage for op in made if op.kind is Kind.BACKWARD_WEIGHT)
    return Program(tuple(ops), tuple(updates), tuple(len(s.number) for s in slots), routes,
                   tuple(map(tuple, order)), split, tuple(tuple(s.number) for s in slots))


def instructions(plan: Plan, slots: Sequence[Slots]) -> list[Op]:
    """Every task of ``plan`` as an instruction, in the order of the table; ``slots``: one per device, filled here."""
    frees: dict[tuple[int, int], list[Slot]] = defaultdict(list)
    tapes: dict[int, Slot] = {}
    columns = [getattr(plan.buffers, name).tolist() for name in (
        "kind", "ref", "microbatch", "slice", "device", "writer", "free")]
    for kind, ref, microbatch, slice_, device, writer, free in zip(*columns, strict=True):
        if kind == Buffer.WEIGHT:
            continue  # versions stand beside the parameters
        slot = slots[device].of(Buffer(kind), ref, microbatch * plan.slices + slice_)
        if slot not in frees[device, free]:
            frees[device, free].append(slot)
        if kind == Buffer.ACTIVATION:
            tapes[writer] = slot
    again = recomputed_values(plan.graph, plan.recompute)
    made = [_op(plan, task, slots, again) for task in range(len(plan.table))]
    for op in made:
        if op.kind in (Kind.FORWARD, Kind.RECOMPUTE):
            op.tape = tapes.get(op.task, -1)
            op.recomputed = op.tape < 0 and slots[op.device].find(Buffer.ACTIVATION, op.stage, op.piece) >= 0
        op.frees = tuple(frees.get((op.device, op.task), ()))
    place = _places(plan, made)
    for op in made:
        op.receives = tuple(
            (made[w].route, place[w]) for w in plan.waits.of(op.task).tolist()
            if made[w].kind is Kind.COPY and made[w].route[1] == op.device
        )
    return made


def _places(plan: Plan, made: list[Op]) -> dict[int, int]:
    """Per COPY its place, from 1, among those of its route."""
    counts: dict[Route, int] = defaultdict(int)
    place = {}
    for lanes in plan.lanes:
        for task in lanes[Lane.IN].tolist():
            counts[made[task].route] += 1
            place[task] = counts[made[task].route]
    return place


def _op(plan: Plan, task: int, slots: Sequence[Slots], again: Again) -> Op:
    table, graph = plan.table, plan.graph
    kind, stage, m, device = (
        Kind(table.kind[task]), int(table.stage[task]), int(table.microbatch[task]), int(table.device[task])
    )
    op = Op(task, kind, stage, m, device, int(table.slice[task]), plan.slices)
    own, piece = slots[device], op.piece
    if kind is Kind.COPY:
        value, peer = int(table.value[task]), int(table.peer[task])
        carries = int(table.gradient[task])
        here, there = CARRIES[carries]
        op.route = NOWHERE if carries == TO_HOST else (device, peer)
        op.hosted = carries >= TO_HOST
        op.source, op.slot = own.find(here, value, piece), slots[peer].find(there, value, piece)
        return op
    if stage < 0:
        return op
    info = graph.stages[stage]
    if kind in (Kind.FORWARD, Kind.RECOMPUTE):
        fetched = [own.find(Buffer.FETCHED, value, piece) for value in info.reads]
        op.reads = tuple(
            back if back >= 0 else own.find(Buffer.VALUE, value, piece)
            for back, value in zip(fetched, info.reads, strict=True)
        )
        op.gives = tuple(own.find(Buffer.VALUE, value, piece) for value in info.gives)
        if kind is Kind.RECOMPUTE:
            op.reads = tuple(
                own.find(Buffer.RECOMPUTED, value, piece) if stage in again.get(value, ()) else slot
                for slot, value in zip(op.reads, info.reads, strict=True)
            )
            op.gives = tuple(own.find(Buffer.RECOMPUTED, value, piece) for value in info.gives)
        if info.carry:
            op.reads += (own.find(Buffer.CARRY, stage, piece - 1) if op.slice else own.nothing(),)
            op.carry = own.find(Buffer.CARRY, stage, piece)
    else:
        op.gradients = tuple(own.find(Buffer.GRADIENT, value, piece) for value in info.gives)
        op.returns = tuple(own.find(Buffer.GRADIENT, value, piece) for value in info.reads)
        op.readers = tuple(graph.gradient_readers(value) for value in info.reads)
        op.tape = own.find(Buffer.ACTIVATION, stage, piece)
        if info.carry:
            op.gradients += (own.find(Buffer.CARRY_GRADIENT, stage, piece),)
            op.returns += (own.find(Buffer.CARRY_GRADIENT, stage, piece - 1) if op.slice else -1,)
            op.readers += ((stage,),)
    return op
