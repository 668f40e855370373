"""Schedule policies, one a file, and the registry of their names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pipec.errors import ScheduleError
from pipec.schedules.base import B, F, I, Op, Order, Policy, Problem, Schedule, W, merge, policy_name
from pipec.schedules.custom import TextSchedule, format_schedule, parse_schedule
from pipec.schedules.gpipe import GPipe
from pipec.schedules.one_f_one_b import OneFOneB

REGISTRY: dict[str, Callable[[], Schedule]] = {"gpipe": GPipe, "1f1b": OneFOneB}


def find_schedule(schedule: Any) -> Policy:
    """A policy from a name, an object with ``order(problem)``, or a function of a problem.

    Raises:
        ScheduleError: listing the known names.
    """
    if isinstance(schedule, str):
        if schedule not in REGISTRY:
            raise ScheduleError(
                f"unknown schedule {schedule!r}; known are {', '.join(REGISTRY)}, or pass an object with a method "
                "order(problem)"
            )
        return REGISTRY[schedule]()
    if isinstance(schedule, type):
        return find_schedule(schedule())
    if callable(getattr(schedule, "order", None)) or callable(schedule):
        return schedule  # type: ignore[no-any-return]
    raise ScheduleError(f"a schedule is a name or an object with a method order(problem), got {schedule!r}")


__all__ = [
    "REGISTRY", "B", "F", "GPipe", "I", "OneFOneB", "Op", "Order", "Policy", "Problem", "Schedule", "TextSchedule",
    "W", "find_schedule", "format_schedule", "merge", "parse_schedule", "policy_name",
]
