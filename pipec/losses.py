"""What a loss says about itself: whether it averages or sums, so that a declaration cannot say otherwise."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.loss import _Loss

PLAIN = ((torch.sum, "sum"), (Tensor.sum, "sum"), (torch.nansum, "sum"), (torch.mean, "mean"), (Tensor.mean, "mean"))


def stated_reduction(fn: Any) -> str | None:
    """``"mean"``, ``"sum"`` or ``"none"`` where ``fn`` fixes it: a loss module of torch, a partial, torch.sum."""
    if isinstance(fn, functools.partial):
        given = fn.keywords.get("reduction")
        return given if isinstance(given, str) else stated_reduction(fn.func)
    for one, reduction in PLAIN:
        if fn is one:
            return reduction
    return str(fn.reduction) if isinstance(fn, _Loss) else None


def takes_reduction(fn: Any) -> bool:
    """True for torch's loss functions, which take the reduction as an argument and average without it."""
    if getattr(fn, "__module__", None) != "torch.nn.functional":
        return False
    return "reduction" in inspect.signature(fn).parameters


def settle(fn: Any, reduction: str | None, counted: bool) -> tuple[str, str | None]:
    """The reduction of a declared loss, and what is wrong with it.

    Args:
        reduction: as declared, None: not said.
        counted: declared with ``count=``, which divides a sum.
    """
    stated = stated_reduction(fn)
    if reduction is None:
        reduction = "sum" if counted else stated or "mean"
    if reduction not in ("mean", "sum"):
        return reduction, f"reduction must be 'mean' or 'sum', got {reduction!r}"
    if counted and reduction == "mean":
        return reduction, "with count= the loss must be a sum; drop reduction='mean'"
    if stated is not None and stated != reduction:
        why = "count= divides a sum" if counted else f"the declaration says reduction={reduction!r}"
        return reduction, f"{why}, but the loss itself has reduction={stated!r}; make both the same"
    return reduction, None
