"""From a spec to a plan: :func:`compile` runs the passes in turn and verifies what they made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from attrs import evolve

from pipec.costs import Activations, Costs
from pipec.errors import ScheduleError
from pipec.ir import Plan
from pipec.passes.copies import copies
from pipec.passes.lifetimes import lifetimes
from pipec.passes.linearise import linearise
from pipec.passes.order import chunk_edges, order
from pipec.passes.place import place
from pipec.passes.recompute import recompute as recompute_pass
from pipec.passes.updates import updates
from pipec.schedules import find_schedule
from pipec.schedules.base import Policy, Problem
from pipec.verify import verify


def compile(  # noqa: A001 - the verb of this library
    pipeline: Any,
    devices: int,
    microbatches: int = 1,
    schedule: str | Policy = "1f1b",
    *,
    placement: str | Mapping[str, int] | Sequence[int] | None = None,
    chunks: int | None = None,
    recompute: str | Mapping[str, str] = "never",
    update: str | None = None,
    update_early: bool = False,
    forward_only: bool = False,
    costs: Costs | None = None,
    memory_limit: float | Activations | None = None,
) -> Plan:
    """Compile a pipeline into a plan: the verified task list of every device.

    Args:
        pipeline: a Pipeline or Spec.
        devices: number of logical devices.
        microbatches: pieces a minibatch is cut into.
        schedule: a name (see :func:`pipec.schedules`), an object with a method ``order(problem)``, or a function.
        placement: "linear", "looped", "v", a mapping from stage names to devices, or one device per stage; by
            default the stages' ``device=``, else the schedule's own.
        chunks: chunks per device for a looped placement; by default one per stage.
        recompute: "never", "always", "except_last", or a mapping from stage names to these.
        update: None (the script steps its optimizer), "stage" (one optimizer a stage), "all" (one for everything).
        update_early: a stage updates right after its own last backward; with update="stage" only.
        forward_only: no backward, for evaluation.
        costs: balance the placement and inform the policy; kept as the default of ``plan.simulate()``.
        memory_limit: per device, in bytes or ``pipec.activations(n)``; verified, and given to the policy.

    Raises:
        SpecError, ScheduleError, PlanError: the declaration, the choice of schedule, or the plan is at fault.
    """
    spec = pipeline.spec
    for name, number in (("devices", devices), ("microbatches", microbatches)):
        if isinstance(number, bool) or not isinstance(number, int) or number < 1:
            raise ScheduleError(f"{name} must be a whole number of at least 1, got {number!r}")
    if not spec.losses and not forward_only:
        raise ScheduleError(
            f"pipeline {spec.name!r} declares no loss, so it has nothing to train; add loss(...) or compile with "
            "forward_only=True"
        )
    if costs is not None:
        costs.check(spec.graph)
    policy = find_schedule(schedule)
    default = getattr(policy, "placement", "linear")
    made = place(spec, devices, placement, chunks or getattr(policy, "chunks", None), costs, default)
    problem = Problem(made, devices, microbatches, chunk_edges(spec.graph, made), costs or Costs(),
                      tuple(s.name for s in spec.stages), memory_limit)
    draft = order(spec.graph, problem, policy, training=not forward_only)
    draft = recompute_pass(draft, recompute)
    draft = linearise(draft)
    draft = updates(draft, update, update_early)
    draft = copies(draft)
    plan = finish(draft, costs)
    verify(plan, memory_limit=memory_limit)
    return plan


def finish(draft: Any, costs: Costs | None = None) -> Plan:
    """The plan of a draft that has all its tasks: lanes, waits and lifetimes added."""
    lanes, waits, buffers = lifetimes(draft)
    return Plan(
        draft.graph, draft.chunks, draft.devices, draft.microbatches, draft.schedule, draft.recompute, draft.update,
        draft.table, lanes, waits, buffers, draft.replicas, draft.slices, costs,
    )


def forward_plan(plan: Plan, microbatches: int | None = None) -> Plan:
    """The plan of forwards only on the same placement: what evaluation runs."""
    count = plan.microbatches if microbatches is None else microbatches
    problem = Problem(plan.chunks, plan.devices, count, chunk_edges(plan.graph, plan.chunks), plan.costs or Costs(),
                      tuple(s.name for s in plan.graph.stages))
    draft = order(plan.graph, problem, find_schedule("gpipe"), training=False)
    return finish(copies(linearise(evolve(draft, schedule="forward"))), plan.costs)
