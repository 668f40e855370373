"""What a step hands back."""

from __future__ import annotations

from typing import Any

from attrs import frozen
from torch import Tensor

from pipec.errors import RunError


@frozen(eq=False)
class Result:
    """Losses and outputs of one minibatch, without any graph.

    Attributes:
        losses: by name, scalars.
        outputs: by name, microbatches joined.
        microbatches: how many the minibatch was cut into; fewer than the plan's when it had fewer rows.
        skipped: True when a gradient scaler found an inf or NaN and no stage was updated.
    """

    losses: dict[str, Any]
    outputs: dict[str, Any]
    microbatches: int
    skipped: bool = False

    @property
    def loss(self) -> Tensor:
        """The sum of all losses.

        Raises:
            RunError: no loss was computed.
        """
        if not self.losses:
            raise RunError("no loss was computed: the pipeline declares none, or evaluation was given no targets")
        values = list(self.losses.values())
        total = values[0]
        for value in values[1:]:
            total = total + value
        return total  # type: ignore[no-any-return]

    @property
    def output(self) -> Any:
        """The only output.

        Raises:
            RunError: there are none or several; take them by name from ``outputs``.
        """
        if len(self.outputs) != 1:
            told = ", ".join(self.outputs) or "none declared"
            raise RunError(f"the pipeline has {len(self.outputs)} outputs: {told}")
        return next(iter(self.outputs.values()))
