"""What is proved of a plan. Each invariant has a name, works from the graph alone and trusts no pass.

``form`` comes first; the others index by what it has checked. All problems are raised together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from attrs import frozen

from pipec.costs import Activations
from pipec.errors import PlanError, Problem, raise_all
from pipec.ir import Plan
from pipec.verify.facts import Facts, NotChecked
from pipec.verify.flow import copies, deadlock_story, progress, rendezvous, waits
from pipec.verify.form import MOST, check_form
from pipec.verify.groups import groups
from pipec.verify.lifetimes import lifetimes, memory
from pipec.verify.reach import Reach
from pipec.verify.reduces import reduces
from pipec.verify.tasks import order, tasks, updates
from pipec.verify.weights import periods, versions

Check = Callable[[Facts], list[str] | NotChecked]

INVARIANTS: dict[str, Check] = {
    "tasks": tasks,
    "order": order,
    "groups": groups,
    "progress": progress,
    "rendezvous": rendezvous,
    "waits": waits,
    "lifetimes": lifetimes,
    "copies": copies,
    "versions": versions,
    "memory": memory,
    "updates": updates,
    "reduces": reduces,
    "periods": periods,
}


@frozen
class Finding:
    """One invariant: it holds, or why it was not checked."""

    invariant: str
    unchecked: str | None = None

    def __str__(self) -> str:
        result = "holds" if self.unchecked is None else f"not checked: {self.unchecked}"
        return f"{self.invariant}: {result}"


@frozen
class Report:
    """What :func:`verify` found of a plan that breaks no invariant."""

    plan: str
    findings: tuple[Finding, ...]

    def __getitem__(self, invariant: str) -> Finding:
        for finding in self.findings:
            if finding.invariant == invariant:
                return finding
        raise PlanError(f"no invariant is named {invariant!r}; they are {', '.join(('form', *INVARIANTS))}")

    def __str__(self) -> str:
        return "\n".join([f"plan {self.plan!r}", *(f"  {finding}" for finding in self.findings)])


def verify(plan: Plan, memory_limit: float | Activations | None = None) -> Report:
    """Prove the invariants of ``plan``. Takes time in proportion to the number of tasks.

    Args:
        memory_limit: per device, in bytes or ``pipec.activations(n)``, for the invariant "memory".

    Raises:
        PlanError: listing the problems of every invariant that is broken.
        ScheduleError: the limit is in bytes and bytes are unknown, or it is no limit.
    """
    check_form(plan)
    facts = Facts(plan, memory_limit)
    problems, findings = [], [Finding("form")]
    for name, check in INVARIANTS.items():
        found = check(facts)
        if isinstance(found, NotChecked):
            findings.append(Finding(name, found.why))
        else:
            findings.append(Finding(name))
            problems += [Problem(f"{name}: {text}") for text in found]
    raise_all(f"plan {plan.graph.name!r}", problems, PlanError, most=MOST)
    return Report(plan.graph.name, tuple(findings))


def execution_order(plan: Plan) -> Sequence[int]:
    """Task ids in an order that keeps every lane's own and every wait; the ids themselves in a compiled plan.

    Raises:
        PlanError: on a deadlock, with the task at which every lane stands.
    """
    reach = Reach(plan)
    if reach.canonical:
        return range(reach.size)
    if reach.order is None:
        raise PlanError(deadlock_story(plan, reach, reach.united))
    return [int(task) for task in reach.order]


__all__ = ["INVARIANTS", "Finding", "Report", "execution_order", "verify"]
