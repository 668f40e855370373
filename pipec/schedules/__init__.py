"""Schedule policies, one a file, and the registry of their names."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from pipec.errors import ScheduleError
from pipec.given import meant
from pipec.schedules.base import (
    B,
    F,
    I,
    Op,
    Order,
    Overlap,
    Policy,
    Problem,
    R,
    Schedule,
    U,
    W,
    is_asynchronous,
    overlap,
    policy_name,
    tasks_of,
)
from pipec.schedules.catalog import ScheduleInfo, ScheduleTable, table_of
from pipec.schedules.custom import TextSchedule, format_schedule, parse_schedule
from pipec.schedules.delayed import Delayed
from pipec.schedules.dualpipe_v import DualPipeV
from pipec.schedules.gpipe import GPipe
from pipec.schedules.interleaved import InterleavedOneFOneB
from pipec.schedules.interleaved_zero_bubble import InterleavedZeroBubble
from pipec.schedules.live_weights import LiveWeights
from pipec.schedules.looped_bfs import LoopedBFS
from pipec.schedules.merge import merge
from pipec.schedules.nesterov import Nesterov
from pipec.schedules.one_f_one_b import EagerOneFOneB, OneFOneB
from pipec.schedules.pipedream import PipeDream
from pipec.schedules.pipedream_2bw import PipeDream2BW
from pipec.schedules.pipemare import PipeMare
from pipec.schedules.predicted import Predicted
from pipec.schedules.seq_1f1b import SeqOneFOneB
from pipec.schedules.torch_rows import TorchSchedule, parse_torch_csv, torch_csv
from pipec.schedules.v_half import VHalf
from pipec.schedules.v_min import VMin
from pipec.schedules.wave import Wave
from pipec.schedules.zb_auto import ZB1P, ZB2P
from pipec.schedules.zb_h1 import ZBH1, ZBH2
from pipec.schedules.zb_v import ZBV

REGISTRY: dict[str, Callable[[], Schedule]] = {
    "gpipe": GPipe,
    "1f1b": OneFOneB,
    "eager-1f1b": EagerOneFOneB,
    "seq-1f1b": SeqOneFOneB,
    "interleaved-1f1b": InterleavedOneFOneB,
    "looped-bfs": LoopedBFS,
    "wave": Wave,
    "zb-h1": ZBH1,
    "zb-h2": ZBH2,
    "zb-1p": ZB1P,
    "zb-2p": ZB2P,
    "interleaved-zero-bubble": InterleavedZeroBubble,
    "zb-v": ZBV,
    "v-half": VHalf,
    "v-min": VMin,
    "dualpipe-v": DualPipeV,
}
ASYNCHRONOUS: dict[str, Callable[[], Schedule]] = {
    "pipedream": PipeDream,
    "pipedream-2bw": PipeDream2BW,
    "pipemare": PipeMare,
    "predicted": Predicted,
    "live-weights": LiveWeights,
    "nesterov": Nesterov,
}
SCHEDULES = REGISTRY | ASYNCHRONOUS
ALIASES = {"pipedream-flush": "1f1b", "spectrain": "predicted", "pipeoptim": "predicted", "paci": "live-weights"}


def list_schedules() -> ScheduleTable:
    """Every schedule known by name, with its placement, closed forms and source; prints as a table."""
    return table_of(SCHEDULES, ALIASES)


def made(policy: type) -> Any:
    """An instance of a policy's class; ScheduleError when it takes arguments."""
    try:
        inspect.signature(policy).bind()
    except TypeError as error:
        raise ScheduleError(f"schedule {policy.__name__!r} is a class that takes arguments ({error}); pass an instance "
                            "of it") from None
    except ValueError:  # Python does not know its arguments
        pass
    return policy()


def find_schedule(schedule: Any) -> Policy:
    """A policy from a name, an object with ``order(problem)``, or a function of a problem.

    Raises:
        ScheduleError: listing the known names.
    """
    if isinstance(schedule, str):
        schedule = ALIASES.get(schedule, schedule)
        if schedule not in SCHEDULES:
            near = meant(schedule, [*SCHEDULES, *ALIASES])
            raise ScheduleError(
                f"unknown schedule {schedule!r}{near}; known are {', '.join(SCHEDULES)} and auto, or pass a function "
                "of a problem, an object with a method order(problem), or pipec.parse_schedule(text)"
            )
        return SCHEDULES[schedule]()
    if isinstance(schedule, type):
        if hasattr(schedule, "order") or "__call__" in dir(schedule):
            return find_schedule(made(schedule))
    elif callable(getattr(schedule, "order", None)) or callable(schedule):
        return schedule  # type: ignore[no-any-return]
    raise ScheduleError(
        f"a schedule is a name, a function of a problem, or an object with a method order(problem), got {schedule!r}"
    )


__all__ = [
    "ALIASES", "ASYNCHRONOUS", "REGISTRY", "SCHEDULES", "ZB1P", "ZB2P", "ZBH1", "ZBH2", "ZBV", "B", "Delayed",
    "DualPipeV", "EagerOneFOneB", "F", "GPipe", "I", "InterleavedOneFOneB", "InterleavedZeroBubble", "LiveWeights",
    "LoopedBFS", "Nesterov", "OneFOneB", "Op", "Order", "Overlap", "PipeDream", "PipeDream2BW", "PipeMare", "Policy",
    "Predicted", "Problem", "R", "Schedule", "ScheduleInfo", "ScheduleTable", "SeqOneFOneB", "TextSchedule",
    "TorchSchedule", "U", "VHalf", "VMin", "W", "Wave", "find_schedule", "format_schedule", "is_asynchronous",
    "list_schedules", "merge", "overlap", "parse_schedule", "parse_torch_csv", "policy_name", "tasks_of", "torch_csv",
]
