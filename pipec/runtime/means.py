"""Means that microbatches cannot be averaged from: torch's cross entropy over some of the rows only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from pipec.errors import RunError

NAMES = ("input", "target", "weight", "size_average", "ignore_index", "reduce", "reduction", "label_smoothing")


class EvenMean(TorchFunctionMode):
    """Watches a loss that is declared a mean; torch's cross entropy is found wherever the loss calls it.

    Raises:
        RunError: from inside the loss, when its mean would not weigh every row alike.
    """

    def __init__(self, what: str, later: list[Tensor]) -> None:
        """``later``: takes flags of targets on a GPU, which the host does not wait for now: see :func:`check_later`."""
        super().__init__()
        self.what, self.later = what, later

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        named = kwargs or {}
        # while a compiled loss is traced there are no values to look at
        if (func is F.cross_entropy or func is F.nll_loss) and not torch.compiler.is_compiling():
            check_mean(self.what, dict(zip(NAMES, args, strict=False)) | named, self.later)
        return func(*args, **named)


def weighs_evenly(fn: Any) -> bool:
    """True for torch's own losses that cannot leave rows out: they need no watching."""
    if getattr(fn, "__module__", "") == "torch.nn.functional":
        return fn is not F.cross_entropy and fn is not F.nll_loss
    uneven = torch.nn.CrossEntropyLoss | torch.nn.NLLLoss
    return type(fn).__module__ == "torch.nn.modules.loss" and not isinstance(fn, uneven)


def check_mean(what: str, given: dict[str, Any], later: list[Tensor]) -> None:
    """Raise RunError when cross entropy with these arguments is a mean that leaves rows out or has weights."""
    target, ignore = given.get("target"), given.get("ignore_index", -100)
    if given.get("reduction", "mean") != "mean" or not isinstance(target, Tensor) or target.is_floating_point():
        return
    if given.get("weight") is not None:
        raise uneven(what, "has class weights", ignore)
    ignored = torch.eq(target, ignore).any()
    if on_host(target):
        if bool(ignored):
            raise uneven(what, f"meets targets equal to ignore_index={ignore}", ignore)
    else:
        later.append(ignored)


def on_host(tensor: Tensor) -> bool:
    """Whether the host can look at the tensor without waiting for a device."""
    return tensor.device.type == "cpu"


def check_later(what: str, flags: list[Tensor]) -> None:
    """Look at what was put off: at the end of a step, with one wait for the device. Empties ``flags``."""
    waiting = list(flags)
    flags.clear()
    if waiting and bool(torch.stack(waiting).any()):
        raise uneven(what, "meets targets equal to its ignore_index", "ignore_index")


def uneven(what: str, why: str, ignore: Any) -> RunError:
    return RunError(
        f"{what} {why}, so its mean does not weigh every row alike and microbatches cannot be averaged; "
        "declare it as a sum with a count: loss(..., reduction='sum' in the function, count=lambda target: "
        f"(target != {ignore}).sum())"
    )
