"""What a step hands back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from attrs import frozen
from torch import Tensor

from pipec.errors import RunError


def _number(value: Any) -> str:
    return f"{value.item():.6g}" if isinstance(value, Tensor) and value.numel() == 1 else str(value)


def _shape(value: Any) -> str:
    """Tensors as their shapes, containers by their parts, anything else by its type."""
    if isinstance(value, Tensor):
        return str(tuple(value.shape))
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key!r}: {_shape(part)}" for key, part in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_shape(part) for part in value) + "]"
    return "None" if value is None else type(value).__name__


def counted_minibatches(numbers: Sequence[int]) -> str:
    """``minibatch 3``, ``minibatches 3, 4``."""
    return f"minibatch{'es' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"


class Here(dict[str, Any]):
    """The outputs on one rank of several; asking for another's says where it is."""

    def __init__(self, found: Mapping[str, Any], elsewhere: Sequence[tuple[str, int]]) -> None:
        super().__init__(found)
        self._elsewhere = dict(elsewhere)

    def __missing__(self, name: str) -> Any:
        if name not in self._elsewhere:
            raise KeyError(name)
        raise RunError(f"outputs are on other ranks: {name!r} with that of device {self._elsewhere[name]}; {ALL}")


ALL = "give Runner(outputs='all') to have them on every rank"


@frozen(eq=False)
class Result:
    """Losses and outputs of one minibatch, without any graph.

    Attributes:
        losses: by name, scalars.
        outputs: by name, microbatches joined.
        microbatches: how many the minibatch was cut into; fewer than the plan's when it had fewer rows.
        elsewhere: of a run over several ranks, outputs that are in another rank's result, with its device.
        slices: how many each microbatch was cut into along its sequence.
        skipped: True when a gradient scaler found an inf or NaN and no stage was updated.
        drained: minibatches that were in flight in an asynchronous pipeline and were finished first.
        minibatch: its number, counted as the run's steps from 0; -1 in an evaluation.
    """

    losses: dict[str, Any]
    outputs: dict[str, Any]
    microbatches: int
    skipped: bool = False
    elsewhere: tuple[tuple[str, int], ...] = ()
    drained: tuple[int, ...] = ()
    slices: int = 1
    minibatch: int = -1

    def __attrs_post_init__(self) -> None:
        if self.elsewhere:
            object.__setattr__(self, "outputs", Here(self.outputs, self.elsewhere))

    @property
    def finished(self) -> tuple[tuple[int, int], ...]:
        """(minibatch, microbatch) of each that was trained on: all of a step's, none of an evaluation's."""
        return tuple((self.minibatch, m) for m in range(self.microbatches)) if self.minibatch >= 0 else ()

    @property
    def minibatches(self) -> tuple[int, ...]:
        """The minibatches that the finished microbatches belong to, ascending."""
        return tuple(sorted({minibatch for minibatch, _ in self.finished}))

    def __repr__(self) -> str:
        losses = ", ".join(f"{name} {_number(value)}" for name, value in self.losses.items()) or "none"
        outputs = ", ".join(f"{name} {_shape(value)}" for name, value in self.outputs.items()) or "none"
        count = f"{self.microbatches} microbatch" + ("" if self.microbatches == 1 else "es")
        count += f" of {self.slices} slices" if self.slices > 1 else ""
        told = f"; {counted_minibatches(self.drained)} finished first" if self.drained else ""
        return f"Result(losses: {losses}; outputs: {outputs}; {count}{'; skipped' if self.skipped else ''}{told})"

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
            total = total + value.to(total.device)  # losses of stages on different GPUs
        return total  # type: ignore[no-any-return]

    @property
    def output(self) -> Any:
        """The only output.

        Raises:
            RunError: there are none or several; take them by name from ``outputs``.
        """
        count = len(self.outputs) + len(self.elsewhere)
        if self.elsewhere and count == 1:
            told = ", ".join(f"{name!r} with that of device {device}" for name, device in self.elsewhere)
            raise RunError(f"outputs are on other ranks: {told}; {ALL}")
        if count != 1:
            there = [f"{name} on the rank of device {device}" for name, device in self.elsewhere]
            raise RunError(f"the pipeline has {count} outputs: {', '.join([*self.outputs, *there]) or 'none declared'}")
        return next(iter(self.outputs.values()))
