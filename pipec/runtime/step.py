"""The state of one step that all devices share: inputs, results, gradients, times."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from pipec.errors import RunError
from pipec.ir import Kind, Plan
from pipec.runtime.batch import MISSING, bind_inputs, join, row_count, sizes, split
from pipec.runtime.borders import Gradient, Parcel, add
from pipec.runtime.buffers import Mark
from pipec.runtime.failure import note
from pipec.runtime.gradients import Accumulator
from pipec.runtime.randomness import Randomness
from pipec.runtime.result import Result
from pipec.runtime.stages import brief
from pipec.spec import OutputSpec, Spec
from pipec.tree import flatten


class Batch:
    """A minibatch bound to the pipeline's inputs and cut into microbatches.

    Attributes:
        values: per input what the caller gave.
        parts: rows per microbatch, None when no input is split.
        weights: per loss and microbatch the factor of its gradient: rows/all rows, 1, or 1/count.
    """

    def __init__(
        self, spec: Spec, args: Sequence[Any], kwargs: dict[str, Any], microbatches: int, optional: Sequence[int] = ()
    ) -> None:
        self.spec = spec
        self.values = bind_inputs(spec, args, kwargs, optional)
        self.rows = row_count(spec, self.values)
        self.wanted_losses = {
            index for index, loss in enumerate(spec.losses)
            if all(self.values[ref.index] is not MISSING for ref in loss.refs() if ref.source == "input")
            and (loss.count is None or not self._lacks(loss.count))
        }
        self.counts = [self._count(index) for index in range(len(spec.losses))]
        self.measure(microbatches, self.rows, self.rows, self.counts)

    def measure(
        self, microbatches: int, rows: int | None, total: int | None, counts: Sequence[float], replicas: int = 1
    ) -> None:
        """Cut ``rows`` into microbatches; losses are weighed against ``total`` rows and ``counts`` of all replicas."""
        self.rows, self.counts = rows, list(counts)
        self.microbatches = microbatches if rows is None else min(microbatches, rows)
        self.parts = None if rows is None else sizes(rows, self.microbatches)
        self.weights = [
            self._weights(index, total, replicas) if index in self.wanted_losses else []
            for index in range(len(self.spec.losses))
        ]

    def _count(self, index: int) -> float:
        """What a loss's sum is divided by, 0 for one without a count."""
        loss = self.spec.losses[index]
        if loss.count is not None and index in self.wanted_losses:
            try:
                positional, named = self._asked(loss.count)
                given = loss.count(*positional, **named)
            except BaseException as error:
                note(error, f"pipec: raised in count of loss {loss.name!r}, before any task")
                raise
            try:
                total = float(given)
            except (TypeError, ValueError, RuntimeError):
                raise RunError(f"loss {loss.name!r}: count must give one number, got {brief(given)}") from None
            if not 0 < total < float("inf"):
                raise RunError(
                    f"loss {loss.name!r}: count gave {total:g} for this minibatch; it must be positive and finite"
                )
            return total
        return 0.0

    def _weights(self, index: int, total: int | None, replicas: int) -> list[float]:
        loss, count = self.spec.losses[index], self.microbatches
        if loss.count is not None:
            return [1.0 / self.counts[index]] * count
        if loss.reduction == "sum":
            return [1.0] * count
        if self.parts is None or total is None:
            return [1.0 / (count * replicas)] * count
        return [part / total for part in self.parts]

    def _lacks(self, fn: Callable[..., Any]) -> bool:
        """Whether an input is missing that ``fn`` asks for."""
        positional, named = self._asked(fn)
        return any(value is MISSING for value in (*positional, *named.values()))

    def _asked(self, fn: Callable[..., Any]) -> tuple[list[Any], dict[str, Any]]:
        """The inputs that ``fn`` takes by its parameters' names; a default stands where there is none."""
        parameters = inspect.signature(fn).parameters.values()
        given = {item.name: value for item, value in zip(self.spec.inputs, self.values, strict=True)}
        known = {name: value for name, value in given.items() if value is not MISSING}
        if any(p.kind is p.VAR_KEYWORD for p in parameters):
            first = [p.name for p in parameters if p.kind is p.POSITIONAL_ONLY]
            return [known.pop(name, MISSING) for name in first], known
        positional: list[Any] = []
        named: dict[str, Any] = {}
        for p in parameters:
            value = known.get(p.name, MISSING if p.default is p.empty else p.default)
            if p.kind is p.POSITIONAL_ONLY:
                positional.append(value)
            else:
                named[p.name] = value
        return positional, named

    def leaves(self) -> list[Tensor]:
        """Tensors of the minibatch that collect a gradient themselves; others pass it on into the caller's graph."""
        leaves = [leaf for value in self.values for leaf in flatten(value)[0]]
        return [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad and leaf.is_leaf]

    def packets(self) -> list[list[Any]]:
        """Per input its microbatches, ready to be read by stages."""
        return [
            split(item, value, self.parts, self.microbatches)
            for item, value in zip(self.spec.inputs, self.values, strict=True)
        ]


Probe = Callable[[Kind, int, int, Any], None]  # kind, stage, microbatch, what the task made


class Step:
    """One step of a plan.

    ``scale`` multiplies every loss gradient (loss scaling); ``update`` is called by UPDATE tasks with the stage;
    ``probe`` sees what every FORWARD and BACKWARD made; ``random`` gives every task its stream of random numbers.
    """

    def __init__(
        self, plan: Plan, batch: Batch, accumulators: list[Accumulator], scale: float = 1.0,
        update: Callable[[int], None] | None = None, probe: Probe | None = None, *, random: Randomness,
    ) -> None:
        spec, count = batch.spec, batch.microbatches
        self.plan, self.batch, self.accumulators, self.scale = plan, batch, accumulators, scale
        self.inputs = batch.packets()
        self.outputs: list[list[Any]] = [[None] * count for _ in spec.outputs]
        self.losses: list[list[Any]] = [[None] * count for _ in spec.losses]
        self.input_gradients = [[Parcel(()) for _ in range(count)] for _ in spec.inputs]
        self.snapshots: dict[tuple[int, int], list[Mark]] = {}
        self.starts: list[int] = [0] * len(plan.table)
        self.ends: list[int] = [0] * len(plan.table)
        self.wanted_losses = batch.wanted_losses
        self._update, self.probe, self.random = update, probe, random

    def seed(self, loss: int, microbatch: int) -> Tensor:
        """The gradient of the minibatch's loss with respect to one microbatch's."""
        weight = self.batch.weights[loss][microbatch] * self.scale
        return torch.full_like(self.losses[loss][microbatch], weight)

    def update(self, stage: int) -> None:
        if self._update is not None:
            self._update(stage)

    def forget(self) -> None:
        """Drop every tensor and callback; what is left are the times of the tasks."""
        self.inputs.clear()  # devices hold the same list
        self.inputs, self.outputs, self.losses, self.input_gradients, self.accumulators = [], [], [], [], []
        self.batch.values = []
        self.snapshots = {}
        self._update = None

    def backward_inputs(self) -> None:
        """Send the gradients of inputs that require one into the caller's own graph, once for all microbatches."""
        backward_inputs(self.batch, [[parcel.sum() for parcel in column] for column in self.input_gradients])

    def result(self) -> Result:
        """Losses and outputs of the minibatch."""
        return joined_result(self.batch, self.outputs, self.losses)


def backward_inputs(batch: Batch, sums: Sequence[Sequence[Gradient]]) -> None:
    """One backward into the caller's graph from the gradients of its inputs, per input and microbatch."""
    tensors: list[Tensor] = []
    gradients: list[Tensor] = []
    for item, value, own in zip(batch.spec.inputs, batch.values, sums, strict=True):
        leaves = flatten(value)[0]
        rows = [total if isinstance(total, list) else [total] * len(leaves) for total in own]
        for place, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                gradient = _join_gradient(batch, leaf, [row[place] for row in rows], item.split)
                if gradient is not None:
                    tensors.append(leaf)
                    gradients.append(gradient)
    if tensors:
        torch.autograd.backward(tensors, gradients)


def _join_gradient(batch: Batch, leaf: Tensor, column: list[Tensor | None], dim: int | None) -> Tensor | None:
    if all(gradient is None for gradient in column):
        return None
    if dim is None or batch.parts is None:
        total: Gradient = None
        for gradient in column:
            total = add(total, gradient)
        return total  # type: ignore[no-any-return]
    pieces = torch.split(leaf.detach(), batch.parts, dim)
    filled = [torch.zeros_like(p) if g is None else g for p, g in zip(pieces, column, strict=True)]
    return torch.cat(filled, dim)


def joined_result(batch: Batch, outputs: list[list[Any]], losses: list[list[Any]]) -> Result:
    """The result of a minibatch from those of its microbatches: losses weighed and summed in ascending order."""
    totals = {}
    for index, loss in enumerate(batch.spec.losses):
        if index in batch.wanted_losses:
            totals[loss.name] = total_loss(losses[index], batch.weights[index])
    joined = {out.name: joined_output(out, values) for out, values in zip(batch.spec.outputs, outputs, strict=True)}
    return Result(totals, joined, batch.microbatches)


def total_loss(values: Sequence[Any], weights: Sequence[float]) -> Any:
    """One loss of a minibatch: those of its microbatches weighed and summed in ascending order."""
    total = None
    for value, weight in zip(values, weights, strict=True):
        part = value if weight == 1.0 else value * weight
        total = part if total is None else total + part
    return total


def joined_output(out: OutputSpec, values: list[Any]) -> Any:
    """One output from its microbatches.

    Raises:
        RunError: they do not fit together along the output's dimension.
    """
    try:
        return join(values, out.dim)
    except (RuntimeError, IndexError) as error:
        shapes = sorted({str(tuple(leaf.shape)) for leaf in flatten(values)[0] if isinstance(leaf, Tensor)})
        raise RunError(
            f"output {out.name!r} cannot be joined along dimension {out.dim}: its microbatches have the shapes "
            f"{', '.join(shapes)}; give another dim=, or dim=None for a list of them"
        ) from error
