"""The state of one step that all devices share: inputs, results, gradients, times."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from pipec.errors import Location, RunError, caller, note
from pipec.ir import Kind, Plan
from pipec.runtime.batch import MISSING, bind_inputs, join, row_count, sequence_length, sizes, split
from pipec.runtime.borders import Gradient, Parcel, add
from pipec.runtime.buffers import Mark
from pipec.runtime.derivatives import check_derivatives
from pipec.runtime.gradients import Accumulator
from pipec.runtime.means import on_host
from pipec.runtime.randomness import OwnState, Randomness
from pipec.runtime.result import Result
from pipec.runtime.stages import brief
from pipec.runtime.stream_clock import StreamClock
from pipec.spec import InputSpec, OutputSpec, Spec
from pipec.tree import flatten


class Batch:
    """A minibatch bound to the pipeline's inputs and cut into microbatches.

    Attributes:
        values: per input what the caller gave.
        parts: rows per microbatch, None when no input is split.
        tokens: positions of the sequence per slice, None without slices.
        apart: inputs that no stage of this process reads, and whose gradient the caller wants all the same.
        scale: what every loss is multiplied by before it is differentiated.
        weights: per loss and piece the factor of its gradient: rows/all rows, 1, or 1/count. A piece is a microbatch
            or a slice of one, the slices of each microbatch in a row.
    """

    def __init__(
        self, spec: Spec, args: Sequence[Any], kwargs: dict[str, Any], microbatches: int, optional: Sequence[int] = (),
        slices: int = 1,
    ) -> None:
        self.spec = spec
        self.values = bind_inputs(spec, args, kwargs, optional)
        check_derivatives(spec, self.values)
        self.rows = row_count(spec, self.values)
        self.length = sequence_length(spec, self.values) if slices > 1 else None
        self._most = slices
        self.apart: dict[int, Any] = {}
        self.scale = 1.0
        self.wanted_losses = {
            index for index, loss in enumerate(spec.losses)
            if all(self.values[number] is not MISSING for number in loss.inputs)
            and (loss.count is None or not self._lacks(loss.count))
        }
        self.counts = [self._count(index) for index in range(len(spec.losses))]
        self.measure(microbatches, self.rows, self.rows, self.counts, self.length)

    def measure(
        self, microbatches: int, rows: int | None, total: int | None, counts: Sequence[float],
        length: int | None = None, replicas: int = 1,
    ) -> None:
        """Cut ``rows`` into microbatches, and sequences of ``length`` into slices; losses are weighed against ``total``
        rows and ``counts`` of all replicas."""
        self.rows, self.counts, self.length = rows, list(counts), length
        self.slices = min(self._most, length or 1)
        self.tokens = sizes(length, self.slices) if length and self.slices > 1 else None
        self.microbatches = microbatches if rows is None else min(microbatches, rows)
        self.parts = None if rows is None else sizes(rows, self.microbatches)
        self.weights = [
            self._of_pieces(index, self._weights(index, total, replicas)) if index in self.wanted_losses else []
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
            if isinstance(given, str | bytes):
                raise RunError(f"loss {loss.name!r}: count must give one number, got the text {given!r}")
            if isinstance(given, Tensor) and given.requires_grad:
                raise RunError(
                    f"loss {loss.name!r}: count gave a tensor that requires a gradient, but the loss is divided by a "
                    "plain number; count rows or tokens, or detach it"
                )
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

    def _of_pieces(self, index: int, weights: list[float]) -> list[float]:
        """Factors per slice from those per microbatch: a mean counts a slice by its positions."""
        loss, tokens = self.spec.losses[index], self.tokens
        if tokens is None:
            return weights
        if loss.count is not None or loss.reduction == "sum":
            return [weight for weight in weights for _ in tokens]
        return [weight * count / sum(tokens) for weight in weights for count in tokens]

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

    @property
    def pieces(self) -> int:
        """Slices of all microbatches."""
        return self.microbatches * self.slices

    @property
    def forms(self) -> list[tuple[int, int]] | None:
        """Per piece its rows and positions (-1 without any), on which the shapes in it depend; None where on none."""
        if self.parts is None and self.tokens is None:
            return None
        parts = self.parts if self.parts is not None else [-1] * self.microbatches
        return [(rows, count) for rows in parts for count in self.tokens or (-1,)]

    def leaves(self) -> list[Tensor]:
        """Tensors of the minibatch that collect a gradient themselves; others pass it on into the caller's graph."""
        leaves = [leaf for value in (*self.values, *self.apart.values()) for leaf in flatten(value)[0]]
        return [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad and leaf.is_leaf]

    def packets(self) -> list[list[Any]]:
        """Per input its pieces, ready to be read by stages."""
        return [
            split(item, value, self.parts, self.microbatches, self.tokens)
            for item, value in zip(self.spec.inputs, self.values, strict=True)
        ]


Probe = Callable[[Kind, int, int, Any], None]  # kind, stage, piece, what the task made


class Step:
    """One step of a plan.

    ``scale`` multiplies every loss gradient (loss scaling); ``update`` and ``reduce`` are called by UPDATE and REDUCE
    tasks with the stage; ``probe`` sees what every FORWARD and BACKWARD made; ``random`` gives every task its stream of
    random numbers.
    """

    places: Any = None  # slots are those of the plan's program
    lasting = False  # inputs are for this step alone
    called: Any = None  # microbatches are called as the plan numbers them

    def __init__(
        self, plan: Plan, batch: Batch, accumulators: list[Accumulator], scale: float = 1.0,
        update: Callable[[int], None] | None = None, probe: Probe | None = None, *, random: Randomness,
        reduce: Callable[..., None] | None = None,
    ) -> None:
        spec, count = batch.spec, batch.pieces
        self.plan, self.batch, self.accumulators, self.scale = plan, batch, accumulators, scale
        self.inputs = batch.packets()
        self.fresh = range(count)  # pieces of the inputs that were not sent to devices yet
        self.outputs: list[list[Any]] = [[None] * count for _ in spec.outputs]
        self.losses: list[list[Any]] = [[None] * count for _ in spec.losses]
        self.input_gradients: list[list[Parcel] | None] = [  # None: the caller asks for none
            [Parcel(()) for _ in range(count)] if _wants_gradient(value) else None for value in batch.values
        ]
        self.snapshots: dict[tuple[int, int], list[Mark]] = {}
        self.drawn: dict[tuple[int, int], list[OwnState]] = {}  # for RECOMPUTE, by stage and piece
        self.starts: list[int] = [0] * len(plan.table)
        self.ends: list[int] = [0] * len(plan.table)
        self.clock: StreamClock | None = None  # times of the devices, where these are not the host's
        self.wanted_losses = batch.wanted_losses
        self._update, self._reduce, self.probe, self.random = update, reduce, probe, random

    def seed(self, loss: int, piece: int) -> Tensor:
        """The gradient of the minibatch's loss with respect to that of one microbatch or slice."""
        weight = self.batch.weights[loss][piece] * self.scale
        return torch.full_like(self.losses[loss][piece], weight)

    def update(self, stage: int) -> None:
        if self._update is not None:
            self._update(stage)

    def reduce(self, stage: int, failed: bool = False) -> None:
        """Begin to add up a stage's gradients with other processes; after a failure only for their sake."""
        if self._reduce is not None:
            self._reduce(stage, failed)

    def forget(self) -> None:
        """Drop every tensor and callback; what is left are the times of the tasks."""
        self.inputs.clear()  # devices hold the same list
        self.inputs, self.outputs, self.losses, self.input_gradients, self.accumulators = [], [], [], [], []
        self.batch.values = []
        self.snapshots, self.drawn = {}, {}
        self._update = self._reduce = None

    def backward_inputs(self) -> None:
        """Send the gradients of inputs that require one into the caller's own graph, once for all microbatches."""
        if not any(self.input_gradients):
            return
        columns = [
            [None] * self.batch.pieces if column is None else [_on_device_of(value, parcel).sum() for parcel in column]
            for value, column in zip(self.batch.values, self.input_gradients, strict=True)
        ]
        backward_inputs(self.batch, columns)

    def result(self) -> Result:
        """Losses and outputs of the minibatch."""
        return joined_result(self.batch, self.outputs, self.losses, self.number)

    @property
    def number(self) -> int:
        """Of the minibatch, counted as the run's steps; -1 in an evaluation."""
        return -1 if self.random.inference else self.random.position.step


def _wants_gradient(value: Any) -> bool:
    return any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in flatten(value)[0])


def _on_device_of(value: Any, parcel: Parcel) -> Parcel:
    """Gradients of an input on its own device: readers on several GPUs have sent them from theirs."""
    device = next((leaf.device for leaf in flatten(value)[0] if isinstance(leaf, Tensor)), None)
    if all(tensor.device == device for tensor in parcel.tensors()):
        return parcel
    return parcel.mapped(lambda gradient: moved_gradient(gradient, device))


def moved_gradient(gradient: Gradient, device: torch.device | None) -> Gradient:
    """A gradient with all its tensors on ``device``."""
    if isinstance(gradient, list):
        return [moved_gradient(one, device) for one in gradient]
    return None if gradient is None else gradient.to(device)


def backward_inputs(batch: Batch, sums: Sequence[Sequence[Gradient]]) -> None:
    """One backward into the caller's graph from the gradients of its inputs, per input and piece."""
    tensors: list[Tensor] = []
    gradients: list[Tensor] = []
    for item, value, own in zip(batch.spec.inputs, batch.values, sums, strict=True):
        leaves = flatten(value)[0]
        rows = [total if isinstance(total, list) else [total] * len(leaves) for total in own]
        for place, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                gradient = _join_gradient(batch, leaf, [row[place] for row in rows], item)
                if gradient is not None:
                    tensors.append(leaf)
                    gradients.append(gradient)
    if tensors:
        torch.autograd.backward(tensors, gradients)


def _join_gradient(batch: Batch, leaf: Tensor, column: list[Tensor | None], item: InputSpec) -> Tensor | None:
    """The gradient of an input's leaf from those of its pieces."""
    whole, slices = leaf.detach(), batch.slices
    if batch.tokens is not None:
        cut = item.split is not None and batch.parts is not None
        rows = torch.split(whole, batch.parts or [], item.split or 0) if cut else [whole] * batch.microbatches
        column = [
            _put_together(row, column[m * slices : (m + 1) * slices], batch.tokens, item.slice_dim)
            for m, row in enumerate(rows)
        ]
    return _put_together(whole, column, batch.parts, item.split)


def _put_together(
    whole: Tensor, column: list[Tensor | None], parts: list[int] | None, dim: int | None
) -> Tensor | None:
    """Gradients of the parts of ``whole`` along ``dim``, or the sum of those of all of it."""
    if all(gradient is None for gradient in column):
        return None
    if dim is None or parts is None:
        total: Gradient = None
        for gradient in column:
            total = add(total, gradient)
        return total  # type: ignore[no-any-return]
    pieces = torch.split(whole, parts, dim)
    filled = [torch.zeros_like(p) if g is None else g for p, g in zip(pieces, column, strict=True)]
    return torch.cat(filled, dim)


def joined_result(
    batch: Batch, outputs: list[list[Any]], losses: list[list[Any]], number: int = -1
) -> Result:
    """The result of minibatch ``number`` from those of its pieces: losses weighed and summed in ascending order."""
    totals = {}
    for index, loss in enumerate(batch.spec.losses):
        if index in batch.wanted_losses:
            totals[loss.name] = total = total_loss(losses[index], batch.weights[index])
            averaged = loss.reduction == "mean" and loss.count is None
            if averaged and isinstance(total, Tensor) and on_host(total) and total != total:
                tell_undefined(loss.name, losses[index])
    joined = {
        out.name: joined_output(out, values, batch.slices)
        for out, values in zip(batch.spec.outputs, outputs, strict=True)
    }
    return Result(totals, joined, batch.microbatches, slices=batch.slices, minibatch=number)


def tell_undefined(name: str, values: Sequence[Tensor]) -> None:
    """Warn when a mean is NaN for some microbatches only, as that of no rows is."""
    undefined = [m for m, value in enumerate(values) if value != value]
    if len(undefined) < len(values):
        some = ", ".join(map(str, undefined[:4])) + (" ..." if len(undefined) > 4 else "")
        where = caller() or Location("pipec", 0)
        warnings.warn_explicit(
            f"loss {name!r} is NaN in microbatch {some} and a number in the others. A mean over some rows only (behind "
            "a mask, say) is NaN where a microbatch has none of them, and is no mean of the minibatch elsewhere; "
            "declare it as a sum with count=, see docs/contracts.md", UserWarning, where.file, where.line,
        )


def total_loss(values: Sequence[Any], weights: Sequence[float]) -> Any:
    """One loss of a minibatch: those of its pieces weighed and summed in ascending order."""
    total = None
    for value, weight in zip(values, weights, strict=True):
        part = value if weight == 1.0 else value * weight
        total = part if total is None else total + part
    return total


def joined_output(out: OutputSpec, values: list[Any], slices: int = 1) -> Any:
    """One output from its pieces.


    Raises:
        RunError: they do not fit together along the output's dimension.
    """
    if slices > 1:
        values = [
            _joined(out.name, values[first : first + slices], out.slice_dim, "slices", "give another slice_dim=")
            for first in range(0, len(values), slices)
        ]
    return _joined(out.name, values, out.dim, "microbatches", "give another dim=, or dim=None for a list of them")


def _joined(name: str, values: list[Any], dim: int | None, what: str, advice: str) -> Any:
    try:
        return join(values, dim)
    except (RuntimeError, IndexError) as error:
        shapes = sorted({str(tuple(leaf.shape)) for leaf in flatten(values)[0] if isinstance(leaf, Tensor)})
        raise RunError(
            f"output {name!r} cannot be joined along dimension {dim}: its {what} have the shapes "
            f"{', '.join(shapes)}; {advice}"
        ) from error
