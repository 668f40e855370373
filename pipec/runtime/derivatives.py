"""Ways to differentiate that do not lead through a step, refused: values are detached at the stages' borders, so the
derivatives would be zero or missing without a word.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from pipec.errors import RunError
from pipec.spec import Spec
from pipec.tree import flatten

ADVICE = (
    "what it returns is detached and would have no derivatives. step() gives the gradients of the declared losses, to "
    "parameters and to inputs that require a gradient; other derivatives belong inside one stage"
)


def check_derivatives(spec: Spec, values: Sequence[Any]) -> None:
    """Before a minibatch with these inputs runs.

    Raises:
        RunError: inside a transform of ``torch.func``, or an input has a tangent of forward-mode differentiation.
    """
    if torch._C._functorch.maybe_current_level() is not None:
        raise RunError(f"pipeline {spec.name!r} cannot run inside torch.func (grad, vmap, jvp and others): {ADVICE}")
    if forward_ad._current_level < 0:
        return
    for item, value in zip(spec.inputs, values, strict=True):
        for leaf in flatten(value)[0]:
            if isinstance(leaf, Tensor) and _has_tangent(leaf):
                raise RunError(f"input {item.name!r} of pipeline {spec.name!r} has a tangent of forward-mode "
                               f"differentiation, but {ADVICE}")


def _has_tangent(tensor: Tensor) -> bool:
    return forward_ad.unpack_dual(tensor).tangent is not None  # type: ignore[no-untyped-call]
