"""The reference: the plain loop that defines what is right.

Stages one after another in one thread with detached borders, microbatch by microbatch in ascending order; gradients
of several readers added from the last reader to the first; microbatch gradients added one after another onto what
``.grad`` held. Every synchronous plan on every backend gives exactly these numbers.

With slices the forwards of a microbatch run slice by slice and its backwards from the last slice to the first.

It shares with the executor how a stage is called and how a batch is cut, and nothing of plans, slots or channels.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pipec.errors import RunError
from pipec.given import spec_of
from pipec.ir import Kind
from pipec.runtime.aliases import check_aliases
from pipec.runtime.batchnorm import minibatch
from pipec.runtime.borders import add, collect, edges, pack, version
from pipec.runtime.claim import Claim
from pipec.runtime.context import fresh_casts
from pipec.runtime.engine import refusal, waits
from pipec.runtime.gradients import plus, run_hooks, shared_parameters
from pipec.runtime.group_hooks import anchor_reads, check_group_hooks, modules_are_watched
from pipec.runtime.placement import generators_of
from pipec.runtime.randomness import Position, Purpose, Randomness, Streams
from pipec.runtime.result import Result
from pipec.runtime.stages import bind, check_means
from pipec.runtime.step import Batch, Probe, backward_inputs, joined_result
from pipec.runtime.strays import check_strays
from pipec.slicing import check_slices
from pipec.tree import tree_map


class Reference:
    """See :func:`reference`."""

    def __init__(self, pipeline: Any, microbatches: int, seed: int | None = None, slices: int = 1) -> None:
        self.spec, self.microbatches, self.slices = spec_of(pipeline, "reference", RunError), microbatches, slices
        check_slices(self.spec, slices)
        self.stages = bind(self.spec)
        self.probe: Probe | None = None
        self._position, self._streams = Position(seed), Streams()

    def step(self, *args: Any, **inputs: Any) -> Result:
        """Losses and outputs of one minibatch; parameter gradients are added to ``.grad``."""
        for stage in self.stages:
            stage.buffers.refresh()
        deferred = [layer for stage in self.stages for layer in stage.buffers.deferred]
        with minibatch(deferred), fresh_casts(), Claim(self.spec.name) as claim:
            return self._step(args, inputs, claim)

    def _step(self, args: tuple[Any, ...], inputs: dict[str, Any], claim: Claim) -> Result:
        batch = Batch(self.spec, args, inputs, self.microbatches, slices=self.slices)
        packets = batch.packets()
        self._random = Randomness(
            self._streams, self._position.pinned(), generators=generators_of(self.stages)
        )
        outputs: list[list[Any]] = [[] for _ in self.spec.outputs]
        losses: list[list[Any]] = [[] for _ in self.spec.losses]
        trained = [stage.trainable() for stage in self.stages]
        check_group_hooks(self.stages, trained)
        claim.take({id(p): p for own in trained for p in own}.values(), self.stages)
        watched = modules_are_watched()
        for stage in self.stages:
            anchor_reads(stage, watched)
        shared = shared_parameters(trained)
        per_stage: dict[tuple[int, int], Tensor] = {}  # gradients of shared parameters by stage
        touched: dict[int, Tensor] = {}
        pieces, slices = batch.microbatches * batch.slices, batch.slices
        to_inputs: list[list[Any]] = [[None] * pieces for _ in self.spec.inputs]
        for first in range(0, pieces, slices):
            own_pieces = range(first, first + slices)
            carried: dict[int, Any] = {}  # per stage what it hands on, from slice to slice
            graphs = [self._forward(batch, packets, piece, outputs, losses, carried) for piece in own_pieces]
            check_aliases(self.stages, self.spec)
            back: dict[int, Any] = {}  # per stage the gradient of that
            for stage, own, gradients in (
                made for piece in reversed(own_pieces)
                for made in self._backward(batch, graphs.pop(), piece, trained, losses, to_inputs, back)
            ):
                for parameter, gradient in zip(own, gradients, strict=True):
                    if gradient is None:
                        continue
                    key = id(parameter), stage
                    touched[id(parameter)] = parameter
                    if id(parameter) in shared:
                        before = per_stage.get(key)
                        per_stage[key] = gradient.clone() if before is None else before + gradient
                    else:
                        before = parameter.grad
                        parameter.grad = gradient.clone() if before is None else plus(before, gradient)
        for number, own in enumerate(trained):
            for parameter in own:
                gradient = per_stage.get((id(parameter), number))
                if gradient is not None:
                    parameter.grad = gradient if parameter.grad is None else plus(parameter.grad, gradient)
        check_means(self.stages)
        run_hooks({id(p): p for own in trained for p in own if id(p) in touched}.values())  # stage by stage, once each
        backward_inputs(batch, to_inputs)
        number, self._position = self._position.step, self._position.advanced()
        return joined_result(batch, outputs, losses, number)

    def _forward(
        self, batch: Batch, packets: Any, m: int, outputs: Any, losses: Any, carried: dict[int, Any]
    ) -> list[Any]:
        values: dict[int, Any] = {}
        graphs = []
        for stage in self.stages:
            read = [values[port] for port in stage.reads] + [carried.get(stage.index)] * stage.carry
            read += [packets[index][m] for index in stage.inputs]
            arguments, leaves = stage.read(read)
            versions = [version(packet) for packet in read]
            with self._random.task(stage.index, m, Purpose.FORWARD):
                out, carry = stage.run(arguments)
                own_losses = [stage.run_loss(loss, arguments, out) for loss in stage.losses]
            stage.check_writes(read, versions, out)
            if self.probe is not None:
                self.probe(Kind.FORWARD, stage.index, m, [out, *[carry] * stage.carry, own_losses])
            for port, path in stage.gives:
                values[port] = pack(stage.take(out, path))
            for index, path in stage.outputs:
                outputs[index].append(
                    tree_map(lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, stage.take(out, path))
                )
            for loss, value in zip(stage.losses, own_losses, strict=True):
                losses[loss.index].append(value.detach())
            roots = [edges(stage.take(out, path)) for _, path in stage.gives]
            if stage.carry:
                carried[stage.index] = pack(carry)
                roots.append(edges(carry))
            loss_roots = [edges(value) for value in own_losses]
            if not stage.searched:
                check_strays(stage, self.stages, [roots, loss_roots], [*leaves, stage.anchor])
                check_group_hooks([stage], [stage.trainable()])
                stage.searched = True
            graphs.append((leaves, roots, loss_roots))
        return graphs

    def _backward(
        self, batch: Batch, graphs: list[Any], m: int, trained: list[list[Tensor]], losses: Any, to_inputs: Any,
        carried: dict[int, Any],
    ) -> Any:
        arriving: dict[int, list[tuple[int, Any]]] = {}  # per port (reader, gradient), readers descending
        for stage in reversed(self.stages):
            leaves, port_edges, loss_edges = graphs[stage.index]
            roots: list[Any] = []
            seeds: list[Tensor] = []
            for (port, _), edge in zip(stage.gives, port_edges, strict=False):
                total = None
                for _, part in arriving.pop(port, []):
                    total = add(total, part)
                collect(edge, total, roots, seeds)
            if stage.carry:
                collect(port_edges[-1], carried.pop(stage.index, None), roots, seeds)
            for loss, edge in zip(stage.losses, loss_edges, strict=True):
                if edge is not None:
                    roots.append(edge)
                    seeds.append(torch.full_like(losses[loss.index][m], batch.weights[loss.index][m]))
            wanted = [t for leaf in leaves for t in (leaf if isinstance(leaf, list) else [leaf]) if t is not None]
            own = trained[stage.index]
            if not roots or not wanted + own:
                continue
            if any(leaf._backward_hooks and leaf.is_leaf and waits(leaf) for leaf in wanted):
                raise refusal()
            with self._random.task(stage.index, m, Purpose.BACKWARD):
                found = list(torch.autograd.grad(roots, wanted + own, seeds, allow_unused=True))
            if self.probe is not None:
                self.probe(Kind.BACKWARD, stage.index, m, list(found))
            yield stage.index, own, found[len(wanted) :]
            back: list[Any] = []
            for leaf in leaves:
                if isinstance(leaf, list):
                    back.append([None if t is None else found.pop(0) for t in leaf])
                else:
                    back.append(None if leaf is None else found.pop(0))
            for port, gradient in zip(stage.reads, back, strict=False):
                arriving.setdefault(port, []).append((stage.index, gradient))
            if stage.carry:
                carried[stage.index] = back.pop(len(stage.reads))
            for index, gradient in zip(stage.inputs, back[len(stage.reads) :], strict=True):
                to_inputs[index][m] = add(to_inputs[index][m], gradient)


def reference(pipeline: Any, microbatches: int = 1, seed: int | None = None, slices: int = 1) -> Reference:
    """The plain loop over the stages of ``pipeline`` with ``microbatches`` per minibatch, each in ``slices``.

    Its ``step`` takes the same batches as :meth:`pipec.Runner.step` and gives, bit for bit, the same losses,
    outputs, gradients and buffers, on one device type and with the same number of intra-op threads.
    """
    return Reference(pipeline, microbatches, seed, slices)

