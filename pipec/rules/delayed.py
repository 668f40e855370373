"""Delays that are given and not counted: the model of the theory, for study."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
from attrs import field, frozen

from pipec.errors import PlanError, ScheduleError
from pipec.ir import Kind
from pipec.rules.base import Counts, Reads, Rule, number_of
from pipec.rules.corrected import Corrected


def _decay(value: float | str | None) -> float | str | None:
    return None if value is None else Corrected(value).decay


def delays(value: Any) -> tuple[int, ...]:
    """One delay for all stages or one per stage, also as the text of a plan has them (``10,6``).

    Raises:
        ScheduleError: something else.
    """
    parts = value.split(",") if isinstance(value, str) else value if isinstance(value, list | tuple) else [value]
    numbers = [number_of(part) for part in parts]
    if not numbers or not all(number >= 0 and number % 1 == 0 for number in numbers):
        raise ScheduleError(f"delays are whole numbers of updates, at least 0: one, or one per stage; got {value!r}")
    return tuple(int(number) for number in numbers)


@frozen
class Delayed(Rule):
    """Forwards read weights ``forward`` updates older than the newest, backwards those ``backward`` updates older.

    ``forward``, ``backward``: tau_fwd and tau_bkwd, one number or one per stage. ``decay``: the D of discrepancy
    correction, "optimal", or None for none: backwards then read w(t - tau_bkwd) - (tau_fwd - tau_bkwd) delta.
    """

    name: ClassVar[str] = "delayed"
    forward: tuple[int, ...] = field(default=0, converter=delays)
    backward: tuple[int, ...] = field(default=0, converter=delays)
    decay: float | str | None = field(default=None, converter=_decay)

    def __attrs_post_init__(self) -> None:
        both = max(len(self.forward), len(self.backward))
        if {len(self.forward), len(self.backward)} - {1, both}:
            raise ScheduleError(f"delays of {len(self.forward)} stages forward, but of {len(self.backward)} backward")
        for stage in range(both):
            if self.back(stage) > self.forth(stage):
                raise ScheduleError(
                    f"the backward reads weights {self.back(stage)} updates old and its forward {self.forth(stage)}"
                    f"{f' (stage {stage})' if both > 1 else ''}; a backward comes later than its forward, so it cannot "
                    "read older ones"
                )

    def forth(self, stage: int) -> int:
        """tau_fwd of a stage."""
        return self.forward[stage if len(self.forward) > 1 else 0]

    def back(self, stage: int) -> int:
        """tau_bkwd of a stage."""
        return self.backward[stage if len(self.backward) > 1 else 0]

    def check(self, stages: int) -> None:
        """Raise PlanError where there are not as many delays as stages."""
        given = max(len(self.forward), len(self.backward))
        if given not in (1, stages):
            raise PlanError(f"{given} delays are given for {stages} stages; give one per stage, or one for all")

    @property
    def longest(self) -> int:  # type: ignore[override]
        """The largest delay."""
        return max(self.forward)

    @property
    def buffers(self) -> int:  # type: ignore[override]
        """delta, and those of the versions that a backward may still read."""
        return 0 if self.decay is None else 1 + max(self.backward)

    @property
    def text(self) -> str:
        words = [self.name, f"forward={','.join(map(str, self.forward))}"]
        words.append(f"backward={','.join(map(str, self.backward))}")
        return " ".join(words + ([] if self.decay is None else [f"decay={self.decay}"]))

    def versions(self, reads: Reads) -> Counts:
        self.check(int(reads.stage.max(initial=0)) + 1)
        stages = np.maximum(reads.stage, 0)  # a COPY belongs to none
        forth, back = (
            np.asarray([of(stage) for stage in range(int(stages.max(initial=0)) + 1)], np.int64)
            for of in (self.forth, self.back)
        )
        old = np.where(reads.kind == Kind.BACKWARD, back[stages], forth[stages])
        return np.asarray(np.maximum(reads.newest - old, 0), np.int64)
