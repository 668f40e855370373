"""What a task of an asynchronous plan computed with, for those who want to look on."""

from __future__ import annotations

from collections.abc import Callable

from attrs import field, frozen
from torch import Tensor

from pipec.ir import Kind
from pipec.runtime.asynchronous.weights import Leaves, StageWeights


def _shapes(weights: dict[str, Tensor]) -> str:
    return "{" + ", ".join(f"{name!r}: {tuple(value.shape)}" for name, value in weights.items()) + "}"


@frozen(eq=False)
class WeightsRead:
    """The weights of one FORWARD, RECOMPUTE or BACKWARD.

    Attributes:
        kind: of the task.
        stage: its name.
        minibatch: as the run counts its steps.
        microbatch: within the minibatch.
        age: how many updates of the stage had been made since these weights, before any correction or prediction, were
            the newest.
        weights: by parameter name, corrected or predicted as they were read. They are lent: newest weights are the
            parameters themselves, which the next update changes, so clone what you keep.
    """

    kind: Kind
    stage: str
    minibatch: int
    microbatch: int
    age: int
    weights: dict[str, Tensor] = field(repr=_shapes)


OnRead = Callable[[WeightsRead], None]


def version_of(weights: StageWeights, leaves: Leaves, declared: int) -> int:
    """The version that ``leaves`` are; ``declared`` where a rule made them of it."""
    if leaves.live:
        return weights.version
    return next((version for version, own in weights.kept.items() if own is leaves), declared)
