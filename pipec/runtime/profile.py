"""Profiling: durations and sizes of every stage, measured on example inputs, as :class:`~pipec.costs.Costs`."""

from __future__ import annotations

import time
from statistics import median
from typing import Any

import torch
from attrs import evolve
from torch import Tensor

from pipec.costs import Costs, StageCosts
from pipec.errors import RunError
from pipec.given import spec_of
from pipec.runtime.borders import Packed, collect, edges, pack, unpack, version
from pipec.runtime.engine import accumulate
from pipec.runtime.gradients import Accumulator
from pipec.runtime.group_hooks import anchor_reads
from pipec.runtime.split import input_half
from pipec.runtime.stages import Stage, bind
from pipec.runtime.step import Batch
from pipec.tree import flatten, select


class _Saved(torch.autograd.graph.saved_tensors_hooks):
    """Counts the bytes a graph saves, each storage once, without those in ``known``."""

    def __init__(self, known: set[int]) -> None:
        self.storages: dict[int, int] = {}

        def see(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage._cdata not in known:
                self.storages[storage._cdata] = storage.nbytes()
            return tensor

        super().__init__(see, lambda tensor: tensor)


def profile(pipeline: Any, *args: Any, microbatches: int | None = None, repeats: int = 5, **inputs: Any) -> Costs:
    """Measure every stage on one microbatch of an example minibatch.

    Args:
        args, inputs: an example minibatch, as for ``Runner.step``.
        microbatches: pieces it is cut into; the first one is measured, and plans that cut the minibatch into others
            take its costs in proportion. None: the example is one microbatch, whatever plans make of a minibatch.
        repeats: rounds over all stages after a warm-up; the median counts.

    Returns:
        Costs in milliseconds: forward, the whole backward, and its two halves as a plan that splits them runs them;
        saved bytes per stage without parameters and what the stage reads and gives; bytes per value; bytes of
        parameters. Parameters, ``.grad``, buffers and the global random numbers are left as they were.

    Raises:
        RunError: a stage has no module, or the example does not fit the pipeline or the number of microbatches.
        BaseException: whatever a stage raises.
    """
    spec = spec_of(pipeline, "profile", RunError)
    empty = [stage.name for stage in spec.stages if stage.fn is None]
    if empty:
        raise RunError(f"stages without a module cannot be profiled: {', '.join(empty)}")
    for name, number in (("microbatches", 1 if microbatches is None else microbatches), ("repeats", repeats)):
        if isinstance(number, bool) or not isinstance(number, int) or number < 1:
            raise RunError(f"profile: {name} must be a whole number of at least 1, got {number!r}")
    batch = Batch(spec, args, inputs, microbatches or 1)
    cut = None if microbatches is None else batch.microbatches  # a batch of fewer rows is cut into fewer
    stages = bind(spec)
    packets = [column[0] for column in batch.packets()]
    values: dict[int, Any] = {}
    reads: list[list[Any]] = []
    made: dict[str, StageCosts] = {}
    sizes: dict[str, int] = {}
    gradients: dict[str, int] = {}
    kept: dict[str, int] = {}
    buffers = [(stage, stage.buffers.originals(), stage.buffers.snapshot()) for stage in stages if stage.buffers]
    gradients_before = [(p, p.grad) for stage in stages for p in stage.trainable()]
    gpus = _gpus(stages, packets)
    kind, numbers = gpus[0].type if gpus else "cuda", [gpu.index for gpu in gpus]
    with torch.random.fork_rng(devices=numbers, device_type=kind), torch.enable_grad():
        try:
            for parameter, _ in gradients_before:
                parameter.grad = None
            for stage in stages:
                read = [values[port] for port in stage.reads] + [None] * stage.carry
                read += [packets[index] for index in stage.inputs]
                reads.append(read)
                out, costs, saved = _sizes(stage, read)
                for (port, path), own in zip(stage.gives, saved, strict=True):
                    name = spec.graph.values[port].name
                    values[port] = pack(select(out, path))
                    sizes[name] = packet_bytes(values[port])
                    gradients[name] = packet_bytes(values[port], wanted=True)
                    kept[name] = own
                made[stage.name] = costs
            for stage, times in zip(stages, _timed(stages, reads, repeats, gpus), strict=True):
                made[stage.name] = evolve(
                    made[stage.name], forward=times["forward"], backward=times["backward"],
                    backward_input=times["backward_input"], backward_weight=times["backward_weight"], update=0.0,
                )
        finally:
            for parameter, gradient in gradients_before:
                parameter.grad = gradient
            for stage, originals, before in buffers:
                stage.buffers.restore(originals, before)
    return Costs(stages=made, values=sizes, gradients=gradients, saved_values=kept, unit="ms", microbatches=cut)


def _gpus(stages: list[Stage], packets: list[Any]) -> list[torch.device]:
    """Those that parameters or inputs are on already."""
    found = {p.device for stage in stages for _, p in stage.named_parameters()}
    found |= {leaf.device for packet in packets for leaf in flatten(unpack(packet)[0])[0] if isinstance(leaf, Tensor)}
    return sorted((device for device in found if device.type not in ("cpu", "meta")), key=str)


def packet_bytes(packet: Any, wanted: bool = False) -> int:
    """Bytes of the tensors of a value as it is handed over, or of those that get a gradient."""
    leaves = packet.leaves if isinstance(packet, Packed) else [packet]
    storages = {}
    for leaf in leaves:
        if isinstance(leaf, Tensor) and (leaf.requires_grad or not wanted):
            storages[leaf.untyped_storage()._cdata] = leaf.untyped_storage().nbytes()
    return sum(storages.values())


def _storages(value: Any) -> set[int]:
    return {leaf.untyped_storage()._cdata for leaf in flatten(value)[0] if isinstance(leaf, Tensor)}


def _sizes(stage: Stage, read: list[Any]) -> tuple[Any, StageCosts, list[int]]:
    """The stage's result, its bytes, and per value it gives the bytes of it that its graph saves."""
    known = {p.untyped_storage()._cdata for _, p in stage.named_parameters()}
    known |= {buffer.untyped_storage()._cdata for buffer in stage.buffers.originals() if buffer is not None}
    packets = list(read)
    values, _ = stage.read(packets)
    versions = [version(packet) for packet in packets]
    hooks = _Saved(known | _storages(values))
    with hooks:
        out, carry, losses = _run(stage, values)
    stage.check_writes(packets, versions, out)
    given = [_storages(select(out, path)) for _, path in stage.gives]
    kept = [sum(hooks.storages.pop(storage, 0) for storage in own) for own in given]
    saved = sum(hooks.storages.values())
    del losses
    given_in = {s for packet in read[len(stage.reads) :] for s in _storages(unpack(packet)[0])}
    costs = StageCosts(
        activation_bytes=saved, weight_bytes=sum(p.numel() * p.element_size() for _, p in stage.named_parameters()),
        weight_activation_bytes=_between_halves(stage, read, known | given_in),
        carry_bytes=packet_bytes(pack(carry)) if stage.carry else None,
    )
    return out, costs, kept


class _Clock:
    """Times of one stage in milliseconds, under their names in :class:`~pipec.costs.StageCosts`.

    Both ways of a backward are run as a step runs them, so the halves' own work (finding what belongs to which, keeping
    gradients in between, adding them to a sum) is in their times: together they take longer than the whole.
    """

    def __init__(self, stage: Stage, read: list[Any], rounds: int, gpus: list[torch.device]) -> None:
        self.stage, self.read, self.gpus = stage, read, gpus
        self.sums = Accumulator(stage.trainable(), set(), range(rounds))
        self.taken: dict[str, list[float]] = {
            "forward": [], "backward": [], "backward_input": [], "backward_weight": []
        }

    def whole(self) -> None:
        """A forward and a whole backward."""
        roots, seeds, leaves, forward = self._forward()
        self.taken["forward"].append(forward)
        wanted = [*leaves, *self.sums.parameters]
        begin = self._now()
        if roots and wanted:
            accumulate(roots, seeds, wanted, [])  # as a step does it, so that adding to .grad is part of the cost
        self._took("backward", begin)

    def halves(self, turn: int) -> None:
        """A forward and a backward in two halves."""
        anchor_reads(self.stage, True)
        roots, seeds, leaves, _ = self._forward()
        anchor_reads(self.stage, False)
        begin = self._now()
        weights = input_half(self.stage, roots, seeds, leaves, self.sums.parameters)[1] if roots else None
        if weights is not None and not weights.late:  # the input half was the whole backward
            self.sums.add(turn, weights.run())
            weights = None
        begin = self._took("backward_input", begin)
        if weights is not None:
            self.sums.add(turn, weights.run())
        self._took("backward_weight", begin)

    def costs(self) -> dict[str, float]:
        """Medians without the first round, which warms up."""
        return {name: median(times[1:]) for name, times in self.taken.items()}

    def _now(self) -> float:
        """Seconds; what was queued on GPUs has ended."""
        for gpu in self.gpus:
            torch.accelerator.synchronize(gpu)
        return time.perf_counter()

    def _took(self, name: str, begin: float) -> float:
        end = self._now()
        self.taken[name].append((end - begin) * 1e3)
        return end

    def _forward(self) -> tuple[list[Any], list[Tensor], list[Tensor], float]:
        """Where gradients enter the graph of a forward, ones for these, what the stage read, and the time."""
        stage, packets = self.stage, list(self.read)
        values, leaves = stage.read(packets)
        versions = [version(packet) for packet in packets]
        begin = self._now()
        out, _, losses = _run(stage, values)
        taken = (self._now() - begin) * 1e3
        stage.check_writes(packets, versions, out)
        return *_roots(stage, out, losses), _tensors(leaves), taken


def _timed(
    stages: list[Stage], reads: list[list[Any]], repeats: int, gpus: list[torch.device]
) -> list[dict[str, float]]:
    """Per stage the medians of its times.

    Stages take turns, so that each finds the caches as another stage has left them, which is how a step runs.
    """
    clocks = [_Clock(stage, read, repeats + 1, gpus) for stage, read in zip(stages, reads, strict=True)]
    for turn in range(repeats + 1):
        for clock in clocks:
            clock.whole()
        for clock in clocks:
            clock.halves(turn)
    return [clock.costs() for clock in clocks]


def _tensors(leaves: list[Any]) -> list[Tensor]:
    return [t for leaf in leaves for t in (leaf if isinstance(leaf, list) else [leaf]) if t is not None]


def _between_halves(stage: Stage, read: list[Any], known: set[int]) -> int:
    """Bytes that the input half of the stage's backward leaves to the weight half."""
    stage.anchor, stage.told_split = torch.zeros((), requires_grad=True), True  # a plan may not split it: no notice
    values, leaves = stage.read(list(read))
    out, _, losses = _run(stage, values)
    stage.anchor = None
    roots, seeds = _roots(stage, out, losses)
    wanted = _tensors(leaves)
    del out, losses, values
    if not roots:
        return 0
    _, weights = input_half(stage, roots, seeds, wanted, stage.trainable())
    kept = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in weights.tensors()} if weights.late else {}
    return sum(size for storage, size in kept.items() if storage not in known)


def _run(stage: Stage, values: list[Any]) -> tuple[Any, Any, list[Tensor]]:
    out, carry = stage.run(values)
    return out, carry, [stage.run_loss(loss, values, out) for loss in stage.losses]


def _roots(stage: Stage, out: Any, losses: list[Tensor]) -> tuple[list[Any], list[Tensor]]:
    """Where gradients enter the stage's graph, and ones for all of them."""
    roots: list[Any] = []
    seeds: list[Tensor] = []
    for _, path in stage.gives:
        value = select(out, path)
        ones = [torch.ones_like(leaf) if isinstance(leaf, Tensor) else None for leaf in flatten(value)[0]]
        collect(edges(value), ones[0] if isinstance(value, Tensor) else ones, roots, seeds)
    for loss in losses:
        collect(edges(loss), torch.ones_like(loss), roots, seeds)
    return roots, seeds

