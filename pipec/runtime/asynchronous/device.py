"""A device in an asynchronous plan: the same loop and handlers, with the weights that each task reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from pipec.errors import RunError
from pipec.ir import Kind
from pipec.runtime.asynchronous.program import Reading
from pipec.runtime.asynchronous.recognise import Following, check_saved
from pipec.runtime.asynchronous.saved import Saved, outer_hooks
from pipec.runtime.asynchronous.weights import Leaves, StageWeights
from pipec.runtime.borders import edges, pack, version, versions
from pipec.runtime.buffers import NOT_WATCHED
from pipec.runtime.engine import gradients
from pipec.runtime.executor import HANDLERS, Device, Tape, _flat, _shaped
from pipec.runtime.program import Op, Route
from pipec.runtime.randomness import Purpose
from pipec.runtime.stages import Stage
from pipec.runtime.strays import flat, leaves_below
from pipec.runtime.transfer import copied, tensors
from pipec.tree import tree_map


class WeightTape(Tape):
    """A graph, the leaves it was made from, and the hooks that give its backward other weights (None without)."""

    __slots__ = ("saved", "weights")

    def __init__(self, tape: Tape, weights: Leaves, saved: Saved | None) -> None:
        super().__init__(tape.leaves, tape.edges, tape.losses)
        self.weights, self.saved = weights, saved


class OverlappedDevice(Device):
    """One logical device; it lives from one flush to the next."""

    __slots__ = ("_common", "_leaves", "_reading", "_saved")
    step: Any

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._leaves: Leaves | None = None
        self._reading: Reading | None = None
        self._saved: Saved | None = None
        self._common: dict[tuple[int, bool, bool], tuple[Saved, Any]] = {}  # hooks of forwards with live weights

    def shift(self, by: int, period: Mapping[Route, int]) -> None:
        """Everything alive moves ``by`` microbatches towards the start; ``period``: hand-overs a step, by route."""
        del self.store[:by]
        self.store.extend([None] * by)
        for route in self.received:
            self.received[route] -= period[route]
        if self.inputs is not self.step.inputs:
            for column in self.inputs:
                del column[:by]
                column.extend([None] * by)

    def finished(self, microbatches: Sequence[int]) -> None:
        """Let go of this device's own copies of the inputs of microbatches that no task reads any more."""
        if self.inputs is not self.step.inputs:
            for column in self.inputs:
                for m in microbatches:
                    column[m] = None

    def forward(self, op: Op) -> None:
        """FORWARD with the weights that the plan and its rule say."""
        step, weights = self.step, self.step.weights[op.stage]
        self._check_inputs(op)
        if op.stage in step.statistics.marks:
            step.statistics.mark(op.stage, op.microbatch)
        reading: Reading = step.readings[op.task]
        back = step.delayed(op, weights)
        leaves = step.half.forward(
            weights, reading.version - back, reading.ahead + back, step.optimizers.get(op.stage)
        )
        if step.on_read is not None:
            step.tell(op, leaves, reading.version - back)
        self._with(weights, leaves, reading, super().forward, op)

    def recompute(self, op: Op) -> None:
        """RECOMPUTE with the weights that the plan and its rule say."""
        step, weights = self.step, self.step.weights[op.stage]
        self._check_inputs(op)
        reading: Reading = step.readings[op.task]
        back = step.delayed(op, weights) if reading.exact else 0
        leaves = step.half.recompute(
            weights, reading.version - back, reading.ahead + back, step.optimizers.get(op.stage)
        )
        if step.on_read is not None:
            step.tell(op, leaves, reading.version - back)
        self._with(weights, leaves, reading, super().recompute, op)

    def _check_inputs(self, op: Op) -> None:
        """Raise RunError when the caller has written into an input that is still to be read here."""
        stage, step = self.stages[op.stage], self.step
        if not stage.inputs or self.inputs is not step.inputs:  # copies of the device's own
            return
        flight = step.flight(op.microbatch)
        for index in stage.inputs:
            if version(self.inputs[index][op.microbatch]) != flight.written[index]:
                raise RunError(
                    f"input {step.spec.inputs[index].name!r} of minibatch {flight.number} was written into while the "
                    f"minibatch is in flight, so stage {stage.name!r} would read the numbers of another one; give "
                    "every step tensors of its own (clone() a buffer that is used again)"
                )

    def _with(self, weights: StageWeights, leaves: Leaves, reading: Reading, run: Any, op: Op) -> None:
        self._leaves, self._reading, self._saved = leaves, reading, None
        try:
            if leaves.live:
                run(op)
                self._part(self.stages[op.stage], op, leaves)
            else:
                with weights.standing_in(leaves):
                    run(op)
        finally:
            self._leaves = self._reading = self._saved = None
        if reading.drops:
            weights.drop(reading.drops)

    def _part(self, stage: Stage, op: Op, leaves: Leaves) -> None:
        """Where a value is a live parameter, or a view of one, hand on a copy: an UPDATE writes into the parameter
        while others still read the value, on other lanes and devices too."""
        store, storages = self.store, leaves.storages
        for slot in op.gives:
            if slot >= 0 and any(place(tensor) in storages for tensor in tensors(store[slot])):
                store[slot] = copied(store[slot], lambda tensor: apart(tensor, storages))
        if op.kind is Kind.FORWARD:
            for index, _ in stage.outputs:
                column = self.step.outputs[index]
                column[op.piece] = tree_map(lambda leaf: apart(leaf, storages), column[op.piece])

    def _call(self, stage: Stage, op: Op, hooks: Any) -> tuple[list[Any], Any, Any, list[Any]]:
        reading, leaves = self._reading, self._leaves
        assert reading is not None
        assert leaves is not None
        if op.tape < 0 or not reading.hooked or (reading.exact and not leaves.live):
            return super()._call(stage, op, hooks)
        kind = leaves.kind
        cast = torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind)
        mode = stage.module is not None and stage.module.training, cast
        known = self.step.known[op.stage].setdefault(mode, set())
        casts = not reading.exact and bool(cast)
        found, saved = self._saving(stage, op, self._hooks(op.stage, leaves, reading.exact, casts, follow=not known))
        signature = tuple(saved.signature)
        if signature not in known:
            if saved.seen is None:  # it saves other things than before: look at it again, then drop it
                marks = stage.buffers.mark()
                before = stage.buffers.exchange(marks, whole=True) if marks else []
                try:
                    self._saving(stage, op, self._hooks(op.stage, leaves, reading.exact, casts, follow=True))
                finally:
                    if marks:
                        stage.buffers.put_back(before, marks)
            known.add(signature)
        saved.seen = None
        saved.signature = []
        self._saved = saved
        return found

    def _hooks(self, stage: int, leaves: Leaves, exact: bool, casts: bool, follow: bool) -> tuple[Saved, Any]:
        """Hooks for a forward, and their context; ``follow``: that are told of all it saves."""
        outer = outer_hooks()
        if follow or outer is not None or not leaves.live:
            made = Saved(leaves, exact, casts, outer, [] if follow else None)
            return made, made.hooks()
        key = stage, exact, casts
        found = self._common.get(key)
        if found is None or found[0].leaves is not leaves:
            made = Saved(leaves, exact, casts)
            found = self._common[key] = made, made.hooks()
        found[0].signature = []  # a forward that failed may have left some
        return found

    def _saving(
        self, stage: Stage, op: Op, hooks: tuple[Saved, Any]
    ) -> tuple[tuple[list[Any], Any, Any, list[Any]], Saved]:
        """Run the stage under hooks. Those that are told of everything find out whether its backward can have other
        weights."""
        step, (saved, context) = self.step, hooks
        packets = [self.store[slot] for slot in op.reads]
        packets += [self.inputs[index][op.microbatch] for index in stage.inputs]
        values, read = stage.read(packets)
        before = versions(packets)
        following = None if saved.seen is None else Following(saved, values)
        watch = stage.buffers.watch
        with step.random.task(op.stage, op.microbatch, Purpose.FORWARD):
            if following is None and watch is NOT_WATCHED:
                with context:
                    out, carry, losses = stage.run_all(values, step.wanted_losses)
            else:
                with watch, NOT_WATCHED if following is None else following, context:
                    out, carry, losses = stage.run_all(values, step.wanted_losses)
        if stage.learning or before != versions(packets):
            stage.check_writes(packets, before, out)
        if following is not None:
            roots = [edges(stage.take(out, path)) for _, path in stage.gives]
            roots += [edges(value) for value in losses]
            check_saved(step.weights[op.stage], saved, following, flat(roots), step.plan.weights)
        return (read, out, carry, losses), saved

    def _keep(self, stage: Stage, op: Op, leaves: list[Any], out: Any, carry: Any, losses: list[Any]) -> None:
        super()._keep(stage, op, leaves, out, carry, losses)
        own = self._leaves
        assert own is not None
        tape: Tape = self.store[op.tape]
        if not own.live and op.stage not in self.step.stood_in:
            check_standing_in(stage, self.step.weights[op.stage], [tape.edges, tape.losses])
            self.step.stood_in.add(op.stage)
        self.store[op.tape] = WeightTape(tape, own, self._saved)
        if op.kind is Kind.RECOMPUTE:  # what the next stage of its segment recomputes from
            for slot, (_, path) in zip(op.gives, stage.gives, strict=True):
                if slot >= 0:
                    self.store[slot] = pack(stage.take(out, path))

    def backward(self, op: Op) -> None:
        """BACKWARD: vector-Jacobian products with the weights that the plan and its rule say."""
        stage, step = self.stages[op.stage], self.step
        self._check_inputs(op)
        reading: Reading = step.readings[op.task]
        weights, tape = step.weights[op.stage], self.store[op.tape]
        weights.of(reading.version)  # kept for this task, also where the graph holds the same tensors
        leaves, roots, seeds = self._arrived(stage, op)
        wanted, shape = _flat(leaves)
        inputs = len(wanted)
        wanted = wanted + tape.weights.tensors
        found: Any = [None] * len(wanted)
        if roots and wanted:
            saved = tape.saved
            if saved is not None:
                saved.give = step.half.backward(weights, reading.version)
            try:
                if step.on_read is not None:
                    step.tell(op, tape.weights, reading.version, None if saved is None else saved.give)
                with step.random.task(op.stage, op.microbatch, Purpose.BACKWARD):
                    found = gradients(roots, seeds, wanted)
            finally:
                if saved is not None:
                    saved.give = None
        step.add_gradients(op.stage, op.microbatch, found[inputs:])
        if step.probe is not None:
            step.probe(Kind.BACKWARD, op.stage, op.microbatch, list(found))
        self._give_back(stage, op, _shaped(found, shape))
        if reading.drops:
            weights.drop(reading.drops)

    def update(self, op: Op) -> None:
        """UPDATE: one step of the stage's optimizer, a new version of its weights."""
        self.step.update(op)


OverlappedDevice.handlers = (
    OverlappedDevice.forward, OverlappedDevice.recompute, OverlappedDevice.backward, *HANDLERS[3:7],
    OverlappedDevice.update,
)


def place(tensor: Tensor) -> int:
    """Where the memory of a tensor begins; 0 for one without a storage."""
    return tensor.untyped_storage().data_ptr() if tensor.layout is torch.strided else 0


def apart(leaf: Any, storages: Mapping[int, Any]) -> Any:
    """A copy of a tensor in one of ``storages``; anything else as it is."""
    return leaf.clone() if isinstance(leaf, Tensor) and place(leaf) in storages else leaf


def check_standing_in(stage: Stage, weights: StageWeights, roots: list[Any]) -> None:
    """Raise RunError when a graph made with other weights reaches a live parameter."""
    names: dict[int, str] = {id(p): name for name, p in zip(weights.names, weights.parameters, strict=True)}
    for leaf in leaves_below(flat(roots), stage.name):
        if isinstance(leaf, Tensor) and id(leaf) in names:
            raise RunError(
                f"stage {stage.name!r} reads its parameter {names[id(leaf)]!r} in another way than as an attribute of "
                "its module or from params=, so no other version of it can stand in: the weight rule has a forward "
                "read older or predicted weights; read it through the module, or use schedule='pipedream'"
            )
