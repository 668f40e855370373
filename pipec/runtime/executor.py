"""The executor loop and its handlers, one per task kind: the same for every backend."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from contextlib import nullcontext
from time import perf_counter_ns
from typing import Any, ClassVar

import torch
from torch import Tensor

from pipec.errors import RunError
from pipec.ir import Kind
from pipec.runtime.borders import (
    Discard,
    Parcel,
    collect,
    compact,
    edges,
    pack,
    versions,
)
from pipec.runtime.buffers import NOT_WATCHED
from pipec.runtime.channels import Channels, Stopped
from pipec.runtime.engine import accumulate, gradients
from pipec.runtime.group_hooks import check_group_hooks
from pipec.runtime.program import NOWHERE, Op, Route
from pipec.runtime.randomness import Purpose, Stream, repeated
from pipec.runtime.record import profiling, recorded
from pipec.runtime.split import Weights, input_half
from pipec.runtime.stages import Stage
from pipec.runtime.step import Step
from pipec.runtime.strays import check_strays
from pipec.tree import tree_map

NO_HOOKS = nullcontext()


class Tape:
    """What a forward leaves for its backward: where gradients enter and leave the graph."""

    __slots__ = ("edges", "leaves", "losses")

    def __init__(self, leaves: list[Any], out: list[Any], losses: list[Any]) -> None:
        self.leaves, self.edges, self.losses = leaves, out, losses


class Half:
    """What an input half leaves for its weight half; ``inputs`` are gradients kept for a probe."""

    __slots__ = ("inputs", "random", "weights")

    def __init__(self, random: Stream, weights: Weights, inputs: list[Tensor | None]) -> None:
        self.random, self.weights, self.inputs = random, weights, inputs


DONE: Any = object()  # in place of a Half whose weight half had nothing left to do


class Device:
    """One logical device during a step: its slots and the task it is at."""

    __slots__ = ("at", "channels", "index", "inputs", "received", "stages", "step", "store")
    handlers: ClassVar[tuple[Any, ...]]  # by Kind

    def __init__(self, index: int, slots: int, stages: list[Stage], step: Step, channels: Channels) -> None:
        self.index, self.stages, self.step, self.channels = index, stages, step, channels
        self.store: list[Any] = [None] * slots
        self.inputs = step.inputs  # per input its microbatches, where this device can read them
        self.received: dict[Route, int] = defaultdict(int)
        self.at: Op | None = None

    def run(self, ops: Iterable[Op]) -> None:
        """Run tasks in order.

        Raises:
            Stopped: another device failed.
            BaseException: whatever a stage raised; ``at`` is the task it came from.
        """
        step, store, channels = self.step, self.store, self.channels
        handlers = RECORDED if profiling() else self.handlers
        starts, ends = step.starts, step.ends
        for op in ops:
            if channels.stopped:
                raise Stopped
            self.at = op
            for route, count in op.receives:
                if self.received[route] < count:
                    self.receive(route, count)
            starts[op.task] = perf_counter_ns()
            handlers[op.kind](self, op)
            ends[op.task] = perf_counter_ns()
            for slot in op.frees:
                store[slot] = None
        self.at = None

    def receive(self, route: Route, count: int) -> None:
        """Take what arrives on ``route`` until ``count`` values have come in this step."""
        store, received = self.store, self.received
        while received[route] < count:
            slot, payload = self.channels.receive(route)
            received[route] += 1
            if type(payload) is not Parcel:
                if payload is not None:  # None: no gradient flowed
                    store[slot] = payload
            elif store[slot] is None:
                store[slot] = payload.opened()
            else:
                store[slot].receive(payload)

    # -- handlers -------------------------------------------------------------------------------------------

    def forward(self, op: Op) -> None:
        """FORWARD: run the stage, hand its values on, keep its graph unless it is recomputed later."""
        stage, step, piece = self.stages[op.stage], self.step, op.piece
        if op.recomputed:
            if stage.buffers:
                step.snapshots[op.stage, piece] = stage.buffers.mark()
            hooks: Any = Discard()
        else:
            hooks = NO_HOOKS if op.tape >= 0 else torch.no_grad()
        leaves, out, carry, losses = self._call(stage, op, hooks)
        if op.recomputed and stage.learning and (made := stage.buffers.appeared()):
            raise RunError(
                f"stage {stage.name!r} registered the buffer {made[0]!r} in its forward, so a RECOMPUTE would begin "
                "from another state; register it in __init__ (None will do), or compile with recompute='never' for it"
            )
        for slot, (_, path) in zip(op.gives, stage.gives, strict=True):
            if slot >= 0:
                self.store[slot] = pack(stage.take(out, path) if path else out)
        if op.carry >= 0:
            self.store[op.carry] = pack(carry)
        for index, path in stage.outputs:
            step.outputs[index][piece] = _bare(stage.take(out, path))
        for loss, value in zip(stage.losses, losses, strict=True):
            if value is not None:
                step.losses[loss.index][piece] = value.detach().clone()  # torch's scalar may hold a whole buffer
        if step.probe is not None:
            step.probe(Kind.FORWARD, op.stage, piece, [out, *[carry] * stage.carry, losses])
        if op.tape >= 0:
            self._keep(stage, op, leaves, out, carry, losses)

    def recompute(self, op: Op) -> None:
        """RECOMPUTE: FORWARD again from the same inputs, buffers and random numbers, for its graph only."""
        stage = self.stages[op.stage]
        marks = self.step.snapshots.pop((op.stage, op.piece), [])
        before = stage.buffers.exchange(marks) if marks else []
        drawn = self.step.drawn.pop((op.stage, op.piece), None)
        try:
            with repeated(drawn) if drawn else NO_HOOKS:
                leaves, out, carry, losses = self._call(stage, op, NO_HOOKS)
        finally:
            if marks:
                stage.buffers.put_back(before, marks)
        self._keep(stage, op, leaves, out, carry, losses)

    def _call(self, stage: Stage, op: Op, hooks: Any) -> tuple[list[Any], Any, Any, list[Any]]:
        store, step = self.store, self.step
        packets = [store[slot] for slot in op.reads]
        packets += [self.inputs[index][op.piece] for index in stage.inputs]
        values, leaves = stage.read(packets)
        before = versions(packets)
        watch = stage.buffers.watch
        stream = step.random.task(op.stage, op.piece, Purpose.FORWARD)
        with stream:
            if hooks is NO_HOOKS and watch is NOT_WATCHED:
                out, carry, losses = stage.run_all(values, step.wanted_losses)
            else:
                with hooks, watch:
                    out, carry, losses = stage.run_all(values, step.wanted_losses)
        if op.recomputed and stream.others:
            step.drawn[op.stage, op.piece] = stream.others
        if stage.learning or before != versions(packets):
            stage.check_writes(packets, before, out)
        return leaves, out, carry, losses

    def _keep(self, stage: Stage, op: Op, leaves: list[Any], out: Any, carry: Any, losses: list[Any]) -> None:
        for loss, value in zip(stage.losses, losses, strict=True) if losses else ():
            if value is not None and not value.requires_grad:
                raise RunError(
                    f"loss {loss.spec.name!r} of stage {stage.name!r} does not require a gradient, so there is "
                    "nothing to differentiate; does a stage detach its result, or is every parameter frozen?"
                )
        out_edges = [edges(stage.take(out, path) if path else out) for _, path in stage.gives]
        if stage.carry:
            out_edges.append(edges(carry))
        loss_edges = [edges(value) if value is not None else None for value in losses] if losses else losses
        if not stage.searched:
            check_strays(stage, self.stages, [out_edges, loss_edges], [*leaves, stage.anchor])
            check_group_hooks([stage], [stage.trainable()])
            stage.searched = True
        self.store[op.tape] = Tape(leaves, out_edges, loss_edges)

    def backward(self, op: Op) -> None:
        """BACKWARD: gradients of the stage's parameters and of what it read."""
        stage, step = self.stages[op.stage], self.step
        leaves, roots, seeds = self._arrived(stage, op)
        accumulator = step.accumulators[op.stage]
        flat, shape = _flat(leaves)
        wanted = flat + accumulator.parameters
        if not roots or not wanted:
            accumulator.add(op.turn, [None] * len(accumulator.parameters))
            return
        with step.random.task(op.stage, op.piece, Purpose.BACKWARD):
            if accumulator.direct:
                found: Any = accumulate(roots, seeds, accumulator.parameters, flat)
            else:
                found = gradients(roots, seeds, wanted)
                accumulator.add(op.turn, found[len(flat) :])
        if step.probe is not None:
            step.probe(Kind.BACKWARD, op.stage, op.piece, list(found))
        self._give_back(stage, op, _shaped(found, shape))

    def _arrived(self, stage: Stage, op: Op) -> tuple[list[Any], list[Any], list[Tensor]]:
        """What the stage read, where gradients enter its graph, and these. The graph leaves its slot."""
        store, step = self.store, self.step
        tape: Tape = store[op.tape]
        store[op.tape] = None
        roots: list[Any] = []
        seeds: list[Tensor] = []
        for edge, slot in zip(tape.edges, op.gradients, strict=True):
            if slot >= 0 and store[slot] is not None:
                collect(edge, store[slot].sum(), roots, seeds)
        for loss, edge in zip(stage.losses, tape.losses, strict=True):
            if edge is not None:
                roots.append(edge)
                seeds.append(step.seed(loss.index, op.piece))
        return tape.leaves, roots, seeds

    def backward_input(self, op: Op) -> None:
        """BACKWARD_INPUT: gradients of what the stage read. What is left for the weight half takes the graph's slot."""
        stage, step = self.stages[op.stage], self.step
        leaves, roots, seeds = self._arrived(stage, op)
        flat, shape = _flat(leaves)
        if not roots:
            return
        random = step.random.task(op.stage, op.piece, Purpose.BACKWARD)
        accumulator = step.accumulators[op.stage]
        with random:
            found, weights = input_half(stage, roots, seeds, flat, accumulator.parameters)
        half = Half(random, weights, list(found) if step.probe is not None else [])
        if not weights.late:
            self._end_backward(op, half)
            half = DONE
        self.store[op.tape] = half
        self._give_back(stage, op, _shaped(found, shape))

    def backward_weight(self, op: Op) -> None:
        """BACKWARD_WEIGHT: gradients of the parameters."""
        half = self.store[op.tape]
        self.store[op.tape] = None
        if half is None:
            accumulator = self.step.accumulators[op.stage]
            accumulator.add(op.turn, [None] * len(accumulator.parameters))
        elif half is not DONE:
            self._end_backward(op, half)

    def _end_backward(self, op: Op, half: Half) -> None:
        """The weight half. Random numbers go on where the input half left them."""
        step = self.step
        with half.random:
            found = half.weights.run()
        step.accumulators[op.stage].add(op.turn, found)
        if step.probe is not None:
            step.probe(Kind.BACKWARD, op.stage, op.piece, half.inputs + found)

    def _give_back(self, stage: Stage, op: Op, gradients: list[Any]) -> None:
        reads = len(op.returns)
        for slot, readers, gradient in zip(op.returns, op.readers, gradients, strict=False):
            if slot >= 0:
                parcel = self.store[slot]
                if parcel is None:
                    parcel = self.store[slot] = Parcel(readers)
                parcel.add(op.stage, compact(gradient))
        for index, gradient in zip(stage.inputs, gradients[reads:], strict=True):
            if gradient is not None and (column := self.step.input_gradients[index]) is not None:
                column[op.piece].add(op.stage, gradient)

    def copy(self, op: Op) -> None:
        """COPY, the sender's half: hand a value or its gradients to another device, or a value to host memory."""
        if op.route is NOWHERE:
            self.store[op.slot] = self.channels.to_host(self.store[op.source])
        else:
            self.channels.send(op.route, op.slot, self.store[op.source])

    def reduce(self, op: Op) -> None:
        """REDUCE: begin to add up a stage's gradients with those of other processes; in one process they are complete
        already, on GPUs brought together by the streams (see :mod:`.stream_replicas`)."""
        self.step.reduce(op.stage)

    def update(self, op: Op) -> None:
        """UPDATE: step the optimizer of a stage, or the one of all."""
        self.step.update(op.stage)


# By Kind. Kept here and not on each Device, where bound methods would make a cycle that only the collector frees.
HANDLERS = (
    Device.forward, Device.recompute, Device.backward, Device.backward_input, Device.backward_weight, Device.copy,
    Device.reduce, Device.update,
)
Device.handlers = HANDLERS


def _record(device: Device, op: Op) -> None:
    """A task under the name it has in the user's profiler."""
    with recorded(device.step.plan, op.task):
        device.handlers[op.kind](device, op)


RECORDED = (_record,) * len(HANDLERS)


def _bare(value: Any) -> Any:
    """A value for the caller: tensors without their graph."""
    if isinstance(value, Tensor):
        return value.detach()
    return tree_map(lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, value)


ONE: list[Any] = [True]


def _flat(leaves: list[Any]) -> tuple[list[Tensor], list[Any]]:
    """The tensors in ``leaves`` and, per entry, None, True for one tensor, or a list of these."""
    if len(leaves) == 1 and isinstance(leaves[0], Tensor):
        return leaves, ONE
    flat: list[Tensor] = []
    shape: list[Any] = []
    for leaf in leaves:
        if leaf is None:
            shape.append(None)
        elif isinstance(leaf, list):
            shape.append([one is not None for one in leaf])
            flat += [one for one in leaf if one is not None]
        else:
            shape.append(True)
            flat.append(leaf)
    return flat, shape


def _shaped(found: Any, shape: list[Any]) -> list[Any]:
    if shape is ONE:
        return [found[0]]
    rest = iter(found)
    return [
        None if own is None else next(rest) if own is True else [next(rest) if one else None for one in own]
        for own in shape
    ]
