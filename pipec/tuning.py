"""Tuning: schedules, microbatches and recompute tried one after another, the fastest plan within the memory first.

Costs are of one microbatch of a minibatch cut into so many; cut into others, a microbatch has as many rows as there are
fewer of them, and so have its times and its bytes, beside what a task takes whatever its size.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from attrs import evolve, frozen, has

from pipec.compiler import compile as compile_plan
from pipec.costs import Activations, Costs
from pipec.errors import PipecError, PlanError, ScheduleError, SpecError
from pipec.ir import Plan
from pipec.rescaled import at, costs_of
from pipec.schedules import SCHEDULES, Policy, find_schedule, is_asynchronous, policy_name
from pipec.timeline import Timeline, show_bytes

RECOMPUTE = ("never", "except_last", "always")
SHOWN = 12  # rows of a table
POLISHED = 3  # of the fastest, whose orders are searched again for as long as their policies say


@frozen(eq=False)
class Trial:
    """One combination: its plan and what that takes, or why there is none."""

    schedule: str
    microbatches: int
    recompute: Any  # as of compile: a mode, or a mapping from stage names to modes
    timeline: Timeline | None = None
    reason: str = ""

    @property
    def plan(self) -> Plan | None:
        return None if self.timeline is None else self.timeline.plan

    @property
    def time(self) -> float:
        """Of one minibatch."""
        return float("inf") if self.timeline is None else self.timeline.step

    @property
    def peak(self) -> float:
        """The most that a device holds: bytes where they are known, else the part of a minibatch's activations."""
        if self.timeline is None:
            return float("inf")
        known = self.timeline.peak_bytes
        return float(max(self.timeline.peak_share) / self.microbatches if known is None else max(known))


@frozen(eq=False, repr=False)
class Tuning:
    """All combinations that were tried, the fastest first, those that cannot be last; prints as a table."""

    trials: tuple[Trial, ...]

    @property
    def best(self) -> Plan:
        """The plan of the fastest; of several that take as long, that with the least memory.

        Raises:
            PlanError: no combination can be compiled within the limit, with the reasons.
        """
        plan = self.trials[0].plan if self.trials else None
        if plan is None:
            raise PlanError("\n  ".join(["no schedule serves this pipeline with these options:", *self.reasons]))
        return plan

    @property
    def reasons(self) -> list[str]:
        """Why combinations cannot be compiled, by schedule, each reason once."""
        bad = [trial for trial in self.trials if trial.timeline is None]
        return list(dict.fromkeys(f"{trial.schedule}: {trial.reason}" for trial in bad))

    def __str__(self) -> str:
        good = [trial for trial in self.trials if trial.timeline is not None]
        lines = [f"{'schedule':<25}{'microbatches':>13}  {'recompute':<12}{'time':>10}{'bubble':>9}{'peak':>19}"]
        lines += [_row(trial) for trial in good[:SHOWN]]
        if not good:
            head = f"none of {len(self.trials)} combinations can be compiled with these options:"
            more = [f"and {len(self.reasons) - SHOWN} more reasons"] if len(self.reasons) > SHOWN else []
            return "\n  ".join([head, *self.reasons[:SHOWN], *more])
        left, refused = len(good) - SHOWN, len(self.trials) - len(good)
        lines += [f"and {left} slower ones"] if left > 0 else []
        lines += [f"{refused} of {len(self.trials)} combinations cannot be compiled with these options"] * (refused > 0)
        return "\n".join(lines)

    __repr__ = __str__


def _row(trial: Trial) -> str:
    timeline = trial.timeline
    assert timeline is not None
    known = timeline.peak_bytes
    peak = f"{max(timeline.peak_share):.4g} activations" if known is None else show_bytes(max(known))
    return (f"{trial.schedule:<25}{trial.microbatches:>13}  {trial.recompute!s:<12}{trial.time:>10.5g}"
            f"{timeline.bubble:>9.1%}{peak:>19}")


def tune(
    pipeline: Any,
    devices: int,
    microbatches: int | Sequence[int],
    *,
    schedules: str | Policy | Sequence[str | Policy] | None = None,
    recompute: Any = RECOMPUTE,
    costs: Costs | None = None,
    costs_at: int | None = None,
    overhead: float = 0.0,
    memory_limit: float | Activations | None = None,
    **options: Any,
) -> Tuning:
    """Compile and simulate every combination of schedule, microbatches and recompute.

    Args:
        microbatches: one number of microbatches or several.
        schedules: a name or policy, or several; by default all synchronous ones that pipec knows: asynchronous ones
            train differently, and take part where they are named.
        recompute: one way as of :func:`pipec.compile`, or a list of several.
        costs: of one microbatch; by default one unit per task.
        costs_at: into how many microbatches the minibatch was cut that ``costs`` belong to; by default as many as they
            say themselves, which those of a profile do, else the first of ``microbatches``.
        overhead: of every task beside what depends on its rows, in the costs' unit: the more of it, the fewer
            microbatches are best.
        memory_limit: as of :func:`pipec.compile`; activations are those of one of ``costs_at`` microbatches.
        options: others of :func:`pipec.compile`.

    Raises:
        SpecError, ScheduleError: the pipeline is at fault, or an unknown schedule is named.
    """
    if costs is not None and not isinstance(costs, Costs):
        raise SpecError(f"tune: costs must be pipec.Costs(...), got {type(costs).__name__}")
    counts = list(microbatches) if isinstance(microbatches, Sequence) else [microbatches]
    if not counts or any(isinstance(own, bool) or not isinstance(own, int) or own < 1 for own in counts):
        raise ScheduleError(f"tune: microbatches must be whole numbers of at least 1, got {microbatches!r}")
    if costs_at is not None and (isinstance(costs_at, bool) or not isinstance(costs_at, int) or costs_at < 1):
        raise ScheduleError(f"tune: costs_at must be a whole number of at least 1, got {costs_at!r}")
    wanted = [find_schedule(own) for own in several(schedules)] if schedules is not None else [
        own for own in map(find_schedule, SCHEDULES) if not is_asynchronous(own)
    ]
    first = costs_at or (None if costs is None else costs.microbatches) or counts[0]

    def tried(policy: Policy, count: int, mode: Any) -> Trial:
        scaled, limit = costs_of(costs, first / count, overhead, count), memory_limit
        if isinstance(limit, Activations):
            limit = Activations(limit.shares * count / first)
        update = {"update": "stage"} if is_asynchronous(policy) and options.get("update") is None else {}
        name = policy_name(policy)
        try:
            plan = compile_plan(pipeline, devices, count, policy, recompute=mode, costs=scaled, memory_limit=limit,
                                **(options | update))
            return Trial(name, count, mode, plan.simulate(scaled))
        except (ScheduleError, PlanError) as error:
            return Trial(name, count, mode, reason=brief(error))

    combinations = list(itertools.product(counts, wanted, several(recompute)))
    trials = [tried(_quick(policy), count, mode) for count, policy, mode in combinations]
    for place in _ranked(trials)[:POLISHED]:
        count, policy, mode = combinations[place]
        if trials[place].timeline is not None and _quick(policy) is not policy:
            trials[place] = tried(policy, count, mode)
    return Tuning(tuple(trials[place] for place in _ranked(trials)))


def several(given: Any) -> Sequence[Any]:
    """What may be one thing or a list of such."""
    return [given] if isinstance(given, str | Mapping) or not isinstance(given, Iterable) else list(given)


def _quick(policy: Any) -> Any:
    """The policy without the search that polishes its order, for a first look."""
    return evolve(policy, moves=0) if has(type(policy)) and getattr(policy, "moves", None) else policy


def _ranked(trials: Sequence[Trial]) -> list[int]:
    return sorted(range(len(trials)), key=lambda n: (float(f"{trials[n].time:.9g}"), trials[n].peak, n))


def fastest(spec: Any, devices: int | None, microbatches: int | None, recompute: Any, options: dict[str, Any]) -> Plan:
    """The plan of ``compile(schedule="auto")``.

    Raises:
        ScheduleError: the number of devices is not given.
        PlanError: no synchronous schedule can be compiled so.
    """
    if devices is None:
        raise ScheduleError("devices= is needed: schedule 'auto' does not say for how many it is")
    count = 1 if microbatches is None else microbatches
    if isinstance(options["costs"], Costs) and isinstance(count, int) and count > 0:
        options = options | {"costs": at(options["costs"], count)}  # the limit is counted in the plan's own activations
    return tune(spec, devices, count, recompute=[recompute], **options).best


def brief(error: PipecError) -> str:
    """Why a combination cannot be: the first of several problems, without their heading."""
    found: list[str] = re.findall(r"^\s+\d+\. (.*)$", str(error), flags=re.MULTILINE)
    if not found:
        return re.sub(r"\s*\n\s*", "; ", str(error).strip())
    count = re.search(r": (\d+) problems\n", str(error))
    return found[0] + (f" (and {int(count[1]) - 1} more)" if count else "")
