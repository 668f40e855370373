"""Every error pipec raises, and where in the user's script its cause stands.

Problems of one spec or one plan are collected and raised together: a user mends all of them in one pass.
"""

from __future__ import annotations

import linecache
import os
import sys

from attrs import field, frozen

_PACKAGE = os.path.dirname(os.path.abspath(__file__)) + os.sep


class PipecError(Exception):
    """Base of every error raised by pipec itself (a stage's own exception keeps its own type)."""


class SpecError(PipecError):
    """The pipeline as declared cannot be compiled; the message lists every problem found."""


class ScheduleError(PipecError):
    """A schedule cannot serve this pipeline, number of devices or number of microbatches."""


class PlanError(PipecError):
    """A plan breaks an invariant, cannot be parsed, or deadlocks."""


class RaceError(PlanError):
    """Two tasks of a plan touch the same memory, and nothing keeps them in order."""


class RunError(PipecError):
    """A batch, an optimizer or a device does not fit the plan, or a run was used in a way it cannot serve."""


class RankError(RunError):
    """Another rank failed, ended, or runs something else; ``rank`` is its number, -1 where it is not one alone."""

    def __init__(self, message: str, rank: int = -1) -> None:
        super().__init__(message)
        self.rank = rank


class RenderError(PipecError):
    """A picture could not be made."""


def note(error: BaseException, text: str) -> None:
    """Add a note to an exception, where it takes one; Python 3.10 keeps it without showing it."""
    try:
        if hasattr(error, "add_note"):
            error.add_note(text)
        else:
            error.__notes__ = [*getattr(error, "__notes__", []), text]  # type: ignore[attr-defined]
    except Exception:  # a user's class may refuse attributes; its own type matters more than the note
        return


@frozen
class Location:
    """A line of the user's script."""

    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"

    @property
    def source(self) -> str:
        return linecache.getline(self.file, self.line).strip()


def caller() -> Location | None:
    """The innermost stack frame outside pipec: the line a declaration was written on."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if not os.path.abspath(name).startswith(_PACKAGE):
            return Location(name, frame.f_lineno)
        frame = frame.f_back  # type: ignore[assignment]
    return None


@frozen
class Problem:
    """One thing that is wrong, and the line that declared it."""

    message: str
    location: Location | None = field(default=None, eq=False)

    def __str__(self) -> str:
        if self.location is None:
            return self.message
        source = self.location.source
        where = f"{self.location}" + (f": {source}" if source else "")
        return f"{self.message}\n      at {where}"


def raise_all(
    what: str, problems: list[Problem], kind: type[PipecError] = SpecError, most: int | None = None
) -> None:
    """Raise ``kind`` listing every problem, or the first ``most``; return when there is none."""
    if not problems:
        return
    count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
    lines = [f"{what}: {count}"]
    lines += [f"  {number}. {problem}" for number, problem in enumerate(problems[:most], 1)]
    if most is not None and len(problems) > most:
        lines.append(f"  and {len(problems) - most} more")
    raise kind("\n".join(lines))
