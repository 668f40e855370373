"""Which step adds to a parameter's ``.grad`` now, and who has its module in eval mode.

A step begins from what ``.grad`` holds and puts its sum there at the end. Two at once on the same parameters, of two
runners in two threads, would both begin from the same gradient, and one sum would be lost without a word. So a step
leaves its claim on the parameters themselves while it runs: no list of all steps is kept anywhere.

An evaluation that switches modules from train to eval mode claims their parameters too: a step that began meanwhile
would train in eval mode, and a second evaluation would go on in train mode when the first one ends.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

from torch import Tensor

from pipec.errors import RunError
from pipec.runtime.stages import Stage

PLACE = "_pipec_step"


class Claim:
    """A context around a step or an evaluation; :meth:`take` claims parameters until its end."""

    __slots__ = ("_taken", "evaluates", "pipeline")

    def __init__(self, pipeline: str, evaluates: bool = False) -> None:
        self.pipeline, self.evaluates = pipeline, evaluates
        self._taken: list[Tensor] = []

    def take(self, parameters: Iterable[Tensor], stages: Iterable[Stage]) -> None:
        """Claim ``parameters``.

        Raises:
            RunError: another one has claimed one of them; names it as ``stages`` do.
        """
        for parameter in parameters:
            self._taken.append(parameter)
            holder = parameter.__dict__.setdefault(PLACE, self)  # one operation: no other thread comes between
            if holder is not self and isinstance(holder, Claim):
                raise self._refusal(holder, parameter, stages)
            parameter.__dict__[PLACE] = self

    def look(self, parameters: Iterable[Tensor], stages: Iterable[Stage]) -> None:
        """For an evaluation that switches nothing.

        Raises:
            RunError: another one has switched the modules and will switch them back.
        """
        for parameter in parameters:
            holder = parameter.__dict__.get(PLACE)
            if isinstance(holder, Claim) and holder is not self and holder.evaluates:
                raise self._refusal(holder, parameter, stages)

    def _refusal(self, holder: Claim, parameter: Tensor, stages: Iterable[Stage]) -> RunError:
        name = next((f"{stage.name}.{name}" for stage in stages for name, own in stage.named_parameters()
                     if own is parameter), "a parameter")
        me = f"pipeline {self.pipeline!r} cannot {'evaluate' if self.evaluates else 'step'} now"
        other = f"of pipeline {holder.pipeline!r} is running in another thread or around this call"
        if not (self.evaluates or holder.evaluates):
            return RunError(
                f"{me}: a step {other} and trains {name} too. Both would begin from the same .grad and one gradient "
                "would be lost; step one after the other, or give each modules of its own"
            )
        return RunError(
            f"{me}: {'an evaluation' if holder.evaluates else 'a step'} {other} and uses {name} too. An evaluation "
            "switches its modules to eval mode, for everybody; do one after the other, evaluate a copy of the modules, "
            "or call eval() on them before both"
        )

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
