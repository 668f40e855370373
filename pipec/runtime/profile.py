"""Profiling: durations and sizes of every stage, measured on example inputs, as :class:`~pipec.costs.Costs`."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor

from pipec.costs import Costs, StageCosts
from pipec.errors import RunError
from pipec.runtime.borders import Packed, collect, edges, pack, unpack, version
from pipec.runtime.engine import accumulate
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


def profile(pipeline: Any, *args: Any, microbatches: int = 1, repeats: int = 5, **inputs: Any) -> Costs:
    """Measure every stage on one microbatch of an example minibatch.

    Args:
        args, inputs: an example minibatch, as for ``Runner.step``.
        microbatches: pieces it is cut into; the first one is measured.
        repeats: runs per stage after two warm-ups; the least counts.

    Returns:
        Costs in milliseconds: forward, and backward as its input half and the rest; saved bytes per stage without
        parameters and what the stage reads and gives; bytes per value; bytes of parameters. Parameters, ``.grad``,
        buffers and the global random numbers are left as they were.

    Raises:
        RunError: a stage has no module.
        BaseException: whatever a stage raises.
    """
    spec = pipeline.spec
    empty = [stage.name for stage in spec.stages if stage.fn is None]
    if empty:
        raise RunError(f"stages without a module cannot be profiled: {', '.join(empty)}")
    batch = Batch(spec, args, inputs, microbatches)
    stages = bind(spec)
    packets = [column[0] for column in batch.packets()]
    values: dict[int, Any] = {}
    made: dict[str, StageCosts] = {}
    sizes: dict[str, int] = {}
    gradients: dict[str, int] = {}
    kept: dict[str, int] = {}
    buffers = [(stage, stage.buffers.originals(), stage.buffers.snapshot()) for stage in stages if stage.buffers]
    gradients_before = [(p, p.grad) for stage in stages for p in stage.trainable()]
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        try:
            for parameter, _ in gradients_before:
                parameter.grad = None
            for stage in stages:
                read = [values[port] for port in stage.reads] + [packets[index] for index in stage.inputs]
                out, costs, saved = _measure(stage, read, repeats)
                for (port, path), own in zip(stage.gives, saved, strict=True):
                    name = spec.graph.values[port].name
                    values[port] = pack(select(out, path))
                    sizes[name] = packet_bytes(values[port])
                    gradients[name] = packet_bytes(values[port], wanted=True)
                    kept[name] = own
                made[stage.name] = costs
        finally:
            for parameter, gradient in gradients_before:
                parameter.grad = gradient
            for stage, originals, before in buffers:
                stage.buffers.restore(originals, before)
    return Costs(stages=made, values=sizes, gradients=gradients, saved_values=kept, unit="ms")


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


def _measure(stage: Stage, read: list[Any], repeats: int) -> tuple[Any, StageCosts, list[int]]:
    """The stage's result, its costs (the least of all runs), and per value it gives the bytes its graph saves."""
    parameters = stage.trainable()
    known = {p.untyped_storage()._cdata for _, p in stage.named_parameters()}
    known |= {buffer.untyped_storage()._cdata for buffer in stage.buffers.originals() if buffer is not None}
    forward: list[float] = []
    whole: list[float] = []
    inputs: list[float] = []
    out, saved, kept = None, 0, [0] * len(stage.gives)
    for number in range(repeats + 2):
        for halves in (False, True):
            packets = list(read)
            values, leaves = stage.read(packets)
            versions = [version(packet) for packet in packets]
            wanted = [t for leaf in leaves for t in (leaf if isinstance(leaf, list) else [leaf]) if t is not None]
            hooks = _Saved(known | _storages(values))
            begin = time.perf_counter()
            if number == 0:
                with hooks:
                    out, losses = _run(stage, values)
                given = [_storages(select(out, path)) for _, path in stage.gives]
                kept = [sum(hooks.storages.pop(storage, 0) for storage in own) for own in given]
                saved = sum(hooks.storages.values())
            else:
                out, losses = _run(stage, values)
            forward.append(time.perf_counter() - begin)
            stage.check_writes(packets, versions)
            own = wanted if halves else wanted + parameters
            (inputs if halves else whole).append(_backward(stage, out, losses, own) if own else 0.0)
    given_in = {s for packet in read[len(stage.reads) :] for s in _storages(unpack(packet)[0])}
    between = _between_halves(stage, read, known | given_in)
    best = [min(times[2:]) * 1e3 for times in (forward, inputs, whole)]
    costs = StageCosts(
        forward=best[0], backward_input=best[1], backward_weight=max(best[2] - best[1], 0.0), update=0.0,
        activation_bytes=saved, weight_bytes=sum(p.numel() * p.element_size() for _, p in stage.named_parameters()),
        weight_activation_bytes=between,
    )
    return out, costs, kept


def _between_halves(stage: Stage, read: list[Any], known: set[int]) -> int:
    """Bytes that the input half of the stage's backward leaves to the weight half."""
    stage.anchor, stage.told_split = torch.zeros((), requires_grad=True), True  # a plan may not split it: no notice
    values, leaves = stage.read(list(read))
    out, losses = _run(stage, values)
    stage.anchor = None
    roots, seeds = _roots(stage, out, losses)
    wanted = [t for leaf in leaves for t in (leaf if isinstance(leaf, list) else [leaf]) if t is not None]
    del out, losses, values
    if not roots:
        return 0
    _, weights = input_half(stage, roots, seeds, wanted, stage.trainable())
    kept = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in weights.tensors()} if weights.late else {}
    return sum(size for storage, size in kept.items() if storage not in known)


def _run(stage: Stage, values: list[Any]) -> tuple[Any, list[Tensor]]:
    out = stage.run(values)
    return out, [stage.run_loss(loss, values, out) for loss in stage.losses]


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


def _backward(stage: Stage, out: Any, losses: list[Tensor], wanted: list[Tensor]) -> float:
    roots, seeds = _roots(stage, out, losses)
    if not roots:
        return 0.0
    begin = time.perf_counter()
    accumulate(roots, seeds, wanted, [])  # as a step does it, so that adding to .grad is part of the cost
    return time.perf_counter() - begin


