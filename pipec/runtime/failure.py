"""Failures inside tasks: the original exception reaches the caller with the task it came from; the step is undone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Literal

from attrs import frozen
from torch import Tensor

from pipec.errors import RankError, RunError, note
from pipec.ir import Kind
from pipec.runtime.program import Op
from pipec.runtime.shared import SharedBuffers
from pipec.runtime.stages import Stage
from pipec.spec import Graph


@frozen(eq=False)
class Failure:
    """What a task raised; ``others`` are failures of other devices that happened before these were stopped."""

    op: Op | None
    error: BaseException
    others: tuple[Failure, ...] = ()


Called = Callable[[int], str]  # what a user calls a microbatch of the plan: "microbatch 3 of minibatch 7"


def describe(graph: Graph, op: Op | None, called: Called | None = None) -> str:
    """``stage 'enc1', microbatch 3, FORWARD (0F3) on device 0``; an UPDATE belongs to no microbatch."""
    if op is None:
        return "outside of any task"
    stage = f"stage {graph.stages[op.stage].name!r}, " if op.stage >= 0 else ""
    item = f"{op.microbatch}" + (f".{op.slice}" if op.slice else "")
    part = ""
    if op.kind not in (Kind.UPDATE, Kind.REDUCE):
        part = f"microbatch {item}, " if called is None else f"{called(op.microbatch)}, "
    token = f"{op.stage if op.stage >= 0 else ''}{op.kind.letter}{item}{'' if called is None else ' of the plan'}"
    return f"{stage}{part}{op.kind.name} ({token}) on device {op.device}"


def annotate(
    failure: Failure, graph: Graph, updated: Sequence[str] = (), called: Called | None = None
) -> BaseException:
    """The original exception with notes that say where it happened (``__notes__``, shown since Python 3.11)."""
    if not isinstance(failure.error, RankError):  # which says itself where
        where = describe(graph, failure.op, called)
        note(failure.error, f"pipec: raised {'in ' if failure.op is not None else ''}{where}")
    for other in failure.others:
        note(failure.error, f"pipec: {describe(graph, other.op, called)} failed as well: {told(other.error)}")
    if updated:
        note(failure.error, f"pipec: updated before: {', '.join(updated)}; their parameters have changed")
    return failure.error


def told(error: BaseException) -> str:
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:  # a user's __str__ may fail too
        return type(error).__name__


class Undo:
    """A context that puts buffers and ``.grad`` back when what runs inside it fails.

    Buffers that stages share are watched: only one that no stage changes has a well-defined value on several devices.
    """

    def __init__(self, stages: Sequence[Stage], parameters: Sequence[Tensor], others: Sequence[Tensor] = (), *,
                 training: bool = True) -> None:
        """``others``: tensors outside the pipeline whose ``.grad`` a step adds to in place."""
        for stage in stages:
            stage.buffers.refresh()
        self._buffers = [(s, s.buffers.originals(), s.buffers.snapshot()) for s in stages if s.buffers]
        self._gradients = [(p, p.grad) for p in parameters]
        self._values = [(t.grad, t.grad.clone()) for t in others if t.grad is not None]
        self._gradients += [(t, t.grad) for t in others]
        self._shared = SharedBuffers(stages, training)

    def check_lent_buffers(self) -> None:
        """Raise RunError when a stage handed on a buffer, not a copy, and has changed it since."""
        for stage, originals, values in self._buffers:
            if stage.lent.fixed and (names := stage.lent.wrong(stage.buffers, originals, values)):
                raise RunError(
                    f"stage {stage.name!r} hands on its buffer {', '.join(map(repr, names))}, which it changes for the "
                    "first time now, so later stages may have read what it wrote for other microbatches; return a "
                    "clone of it"
                )

    def __enter__(self) -> Undo:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> Literal[False]:
        if error is not None:
            for stage, originals, values in self._buffers:
                stage.buffers.restore(originals, values)
            for parameter, gradient in self._gradients:
                parameter.grad = gradient
            for gradient, value in self._values:
                gradient.copy_(value)
        return False

    def check_shared_buffers(self) -> None:
        """Raise RunError when a buffer was written that several stages use: its value depends on the schedule."""
        self._shared.check()
