"""Losses on every rank, outputs where they are asked for."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pipec.errors import RunError
from pipec.ir import Plan
from pipec.runtime.result import Result
from pipec.runtime.step import Step, joined_output, total_loss

DTYPES = (  # that a loss may have; of counts that an evaluation makes too
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool, torch.float8_e4m3fn, torch.float8_e5m2,
)
LOSS_WIDTH = 2  # per loss: its dtype as a place in DTYPES plus one, 0 where it was not computed; its value


def loss_row(step: Step, plan: Plan, device: int) -> list[float]:
    """The losses computed on ``device``, as numbers; float64 holds them exactly, integers up to 2^53."""
    row: list[float] = []
    for index, loss in enumerate(step.batch.spec.losses):
        if index in step.wanted_losses and plan.stage_device(loss.home) == device:
            row += loss_numbers(total_loss(step.losses[index], step.batch.weights[index]))
        else:
            row += loss_numbers(None)
    return row


def loss_numbers(loss: Tensor | None) -> list[float]:
    """A loss as numbers; None for one of another rank."""
    return [0.0, 0.0] if loss is None else [1.0 + DTYPES.index(loss.dtype), float(loss)]


def loss_from(rows: Sequence[Sequence[float]], index: int) -> Tensor | None:
    """A loss from everybody's rows of numbers: those of all replicas added up; None where nobody has computed it."""
    found = [row[LOSS_WIDTH * index : LOSS_WIDTH * (index + 1)] for row in rows]
    total = None
    for kind, value in found:
        if kind:
            part = torch.tensor(value, dtype=DTYPES[int(kind) - 1])
            total = part if total is None else total + part
    return total


def own_outputs(step: Step, plan: Plan, device: int) -> dict[str, Any]:
    """The outputs made on ``device``, by name."""
    return {
        out.name: joined_output(out, values, step.batch.slices)
        for out, values in zip(step.batch.spec.outputs, step.outputs, strict=True)
        if plan.stage_device(out.ref.index) == device
    }


def packed(outputs: Any) -> bytes:
    """Outputs as what can travel to other ranks.

    Raises:
        RunError: one cannot.
    """
    try:
        return pickle.dumps(outputs)
    except Exception as error:
        raise RunError(
            f"an output cannot be sent to the other ranks: {type(error).__name__}: {error}; with outputs='owner' it "
            "stays on the rank of its stage"
        ) from error


def gathered_result(
    step: Step, plan: Plan, table: Sequence[Sequence[float]], here: dict[str, Any],
    parts: Sequence[dict[str, Any]] | None,
) -> Result:
    """The result of a minibatch: losses of all replicas added up, outputs of this one.

    Args:
        table: the loss rows of all ranks.
        here: the outputs of this rank.
        parts: everybody's, None: only those of this rank are wanted.
    """
    spec = step.batch.spec
    losses: dict[str, Any] = {}
    for index, loss in enumerate(spec.losses):
        total = loss_from(table, index)
        if total is not None:
            losses[loss.name] = total
    if parts is not None:
        here = {out.name: next(p[out.name] for p in parts if out.name in p) for out in spec.outputs}
    return Result(losses, here, step.batch.microbatches, elsewhere=tuple(
        (out.name, plan.stage_device(out.ref.index)) for out in spec.outputs if out.name not in here
    ), slices=step.batch.slices, minibatch=step.number)
