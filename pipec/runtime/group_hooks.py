"""Hooks of PyTorch that wait for several gradients, and hooks on all modules, which set such hooks themselves.

``torch.autograd.graph.register_multi_grad_hook`` asks the engine which of its tensors a backward will reach. The
engine answers for every tensor but a leaf whose gradient is asked for by itself, and that is how a step asks for the
gradients of parameters and of what a stage read. So hooks on parameters are refused, at every size of the stage; and
while there are hooks on all modules (``FlopCounterMode`` and other trackers set some on the arguments of each), what a
stage reads is handed to it as no leaf.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from pipec.errors import RunError
from pipec.runtime.engine import ADVICE, waits
from pipec.runtime.stages import Stage


def check_group_hooks(stages: Iterable[Stage], parameters: Iterable[Sequence[Tensor]]) -> None:
    """Raise RunError for a parameter with a hook that waits for several gradients; ``parameters``: those per stage."""
    for stage, own in zip(stages, parameters, strict=True):
        found = {id(p) for p in own if p._backward_hooks and waits(p)}
        if found:
            names = [name for name, p in stage.named_parameters() if id(p) in found]
            told = ", ".join(map(repr, names[:4])) + (" and more" if len(names) > 4 else "")
            raise RunError(
                f"stage {stage.name!r}: {told} {'has' if len(names) == 1 else 'have'} a hook of "
                f"torch.autograd.graph.register_multi_grad_hook, {ADVICE}"
            )


def modules_are_watched() -> bool:
    """Whether hooks on all modules are set."""
    return bool(torch.nn.modules.module._has_any_global_hook())  # type: ignore[no-untyped-call]


def anchor_reads(stage: Stage, anchored: bool) -> None:
    """Whether what ``stage`` reads is no leaf of its graph, see :class:`pipec.runtime.borders.Anchored`."""
    if not anchored:
        stage.anchor = None
    elif stage.anchor is None:
        stage.anchor = torch.zeros((), requires_grad=True)
