"""Which step adds to a parameter's ``.grad`` now.

A step begins from what ``.grad`` holds and puts its sum there at the end. Two at once on the same parameters, of two
runners in two threads, would both begin from the same gradient, and one sum would be lost without a word. So a step
leaves its claim on the parameters themselves while it runs: no list of all steps is kept anywhere.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

from torch import Tensor

from pipec.errors import RunError
from pipec.runtime.stages import Stage

PLACE = "_pipec_step"


class Claim:
    """A context around a step; :meth:`take` claims parameters until its end."""

    __slots__ = ("_taken", "pipeline")

    def __init__(self, pipeline: str) -> None:
        self.pipeline = pipeline
        self._taken: list[Tensor] = []

    def take(self, parameters: Iterable[Tensor], stages: Iterable[Stage]) -> None:
        """Claim ``parameters``.

        Raises:
            RunError: another step has claimed one of them; names it as ``stages`` do.
        """
        for parameter in parameters:
            self._taken.append(parameter)
            holder = parameter.__dict__.setdefault(PLACE, self)  # one operation: no other thread comes between
            if holder is not self and isinstance(holder, Claim):
                name = next(
                    (f"{stage.name}.{name}" for stage in stages for name, own in stage.named_parameters()
                     if own is parameter), "a parameter"
                )
                raise RunError(
                    f"pipeline {self.pipeline!r} cannot step now: a step of pipeline {holder.pipeline!r} is running in "
                    f"another thread or around this call and trains {name} too. Both would begin from the same .grad "
                    "and one gradient would be lost; step one after the other, or give each modules of its own"
                )
            parameter.__dict__[PLACE] = self

    def __enter__(self) -> Claim:
        return self

    def __exit__(self, *_: object) -> Literal[False]:
        for parameter in self._taken:
            if parameter.__dict__.get(PLACE) is self:
                del parameter.__dict__[PLACE]
        self._taken.clear()
        return False

    def __reduce__(self) -> Any:
        """A copy of a parameter that is made or saved during a step is claimed by nobody."""
        return set, ()
