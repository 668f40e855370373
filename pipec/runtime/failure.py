"""Failures inside tasks: the original exception reaches the caller with the task it came from."""

from __future__ import annotations

from pipec.runtime.program import Op
from pipec.spec import Graph


class TaskFailure(Exception):  # noqa: N818 - carries an error, is not shown itself
    """What a task raised, on its way to the caller."""

    def __init__(self, op: Op | None, error: BaseException) -> None:
        super().__init__(str(error))
        self.op, self.error = op, error
        self.others: list[TaskFailure] = []


def describe(graph: Graph, op: Op | None) -> str:
    """``stage 'enc1', microbatch 3, FORWARD (0F3) on device 0``."""
    if op is None:
        return "between two tasks"
    stage = f"stage {graph.stages[op.stage].name!r}, " if op.stage >= 0 else ""
    token = f"{op.stage if op.stage >= 0 else ''}{op.kind.letter}{op.microbatch}"
    return f"{stage}microbatch {op.microbatch}, {op.kind.name} ({token}) on device {op.device}"


def annotate(failure: TaskFailure, graph: Graph, after: str = "") -> BaseException:
    """The original exception with a note that says where it happened (in ``__notes__``, shown since Python 3.11)."""
    error = failure.error
    notes = [f"pipec: raised in {describe(graph, failure.op)}"]
    notes += [
        f"pipec: {describe(graph, other.op)} failed as well: {type(other.error).__name__}: {other.error}"
        for other in failure.others
    ]
    if after:
        notes.append(f"pipec: {after}")
    for note in notes:
        if hasattr(error, "add_note"):
            error.add_note(note)
        else:
            error.__notes__ = [*getattr(error, "__notes__", []), note]  # type: ignore[attr-defined]
    return error
