"""From a spec to a plan: :func:`compile` runs the passes in turn and verifies what they made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from attrs import evolve, frozen

from pipec.costs import Activations, Costs
from pipec.errors import PlanError, ScheduleError, SpecError
from pipec.given import spec_of
from pipec.ir import BACKWARDS, Chunk, Kind, Plan
from pipec.passes.copies import copies
from pipec.passes.draft import Draft
from pipec.passes.lifetimes import lifetimes
from pipec.passes.linearise import linearise
from pipec.passes.order import chunk_edges, order
from pipec.passes.place import place
from pipec.passes.recompute import recompute as recompute_pass
from pipec.passes.reduce import reduce
from pipec.passes.settle import settle
from pipec.passes.updates import updates
from pipec.rescaled import at
from pipec.schedules import find_schedule
from pipec.schedules.base import Policy, Problem, is_asynchronous, policy_name
from pipec.slicing import check_slices
from pipec.spec import Graph
from pipec.verify import verify


def compile(  # noqa: A001 - the verb of this library
    pipeline: Any,
    devices: int | None = None,
    microbatches: int | None = None,
    schedule: str | Policy = "1f1b",
    *,
    placement: str | Mapping[str, int] | Sequence[int] | None = None,
    chunks: int | None = None,
    slices: int = 1,
    recompute: str | Mapping[str, str] = "never",
    update: str | None = None,
    update_early: bool = False,
    forward_only: bool = False,
    data_parallel: int = 1,
    costs: Costs | None = None,
    memory_limit: float | Activations | None = None,
) -> Plan:
    """Compile a pipeline into a plan: the verified task list of every device.

    Args:
        pipeline: a Pipeline or Spec.
        devices: number of logical devices; by default those that a schedule from a file is written for.
        microbatches: pieces a minibatch is cut into; by default as the schedule says, else 1. The plan of an
            asynchronous schedule lays out as many minibatches as show its prologue, three steady periods and epilogue.
        schedule: a name (see :func:`pipec.schedules`), an object with a method ``order(problem)``, a function, or
            "auto": the fastest of all synchronous ones under ``costs`` and ``memory_limit``, see :func:`pipec.tune`.
        placement: "linear", "looped", "v", a mapping from stage names to devices, or one device per stage; by
            default the stages' ``device=``, else the schedule's own.
        chunks: chunks per device for a looped placement; by default one per stage.
        slices: parts that each microbatch is cut into along its sequence, see ``input(slice_dim=)`` and
            ``stage(carry=)``.
        recompute: "never", "always", "except_last", or a mapping from stage names to these.
        update: None (the script steps its optimizer), "stage" (one optimizer a stage), "all" (one for everything);
            asynchronous schedules take "stage" only.
        update_early: a stage updates right after its own last backward; with update="stage" only.
        forward_only: no backward, for evaluation; without update= and recompute=.
        data_parallel: replicas of the pipeline, each in processes of its own with its own part of the data; REDUCE
            tasks add up their gradients. See docs/distributed.md.
        costs: balance the placement and inform the policy; kept as the default of ``plan.simulate()``. Those of a
            profile with another number of microbatches are taken in proportion.
        memory_limit: per device, in bytes or ``pipec.activations(n)``; verified, and given to the policy.

    Raises:
        SpecError, ScheduleError, PlanError: the declaration, the choice of schedule, or the plan is at fault.
    """
    spec = spec_of(pipeline, "compile")
    if isinstance(schedule, str) and schedule == "auto":
        from pipec.tuning import fastest

        return fastest(spec, devices, microbatches, recompute, {
            "placement": placement, "chunks": chunks, "slices": slices, "update": update, "update_early": update_early,
            "forward_only": forward_only, "data_parallel": data_parallel, "costs": costs, "memory_limit": memory_limit,
        })
    policy = find_schedule(schedule)
    devices = getattr(policy, "devices", None) if devices is None else devices
    microbatches = getattr(policy, "microbatches", 1) if microbatches is None else microbatches
    if devices is None:
        raise ScheduleError(f"devices= is needed: schedule {policy_name(policy)!r} does not say for how many it is")
    for name, number in (("devices", devices), ("microbatches", microbatches), ("data_parallel", data_parallel)):
        if isinstance(number, bool) or not isinstance(number, int) or number < 1:
            raise ScheduleError(f"{name} must be a whole number of at least 1, got {number!r}")
    for name, flag in (("forward_only", forward_only), ("update_early", update_early)):
        if not isinstance(flag, bool):
            raise ScheduleError(f"{name} must be True or False, got {flag!r}")
    if chunks is not None and (isinstance(chunks, bool) or not isinstance(chunks, int)):
        raise ScheduleError(f"chunks must be a whole number per device, got {chunks!r}")
    if chunks is not None and chunks < 1:
        raise ScheduleError(f"chunks must be at least 1 per device, got {chunks}")
    if forward_only:
        check_forward_only(update, update_early, recompute)
    if not spec.losses and not forward_only:
        raise ScheduleError(
            f"pipeline {spec.name!r} declares no loss, so it has nothing to train; add loss(...) or compile with "
            "forward_only=True"
        )
    if costs is not None:
        if not isinstance(costs, Costs):
            raise SpecError(f"costs must be pipec.Costs(...), got {type(costs).__name__}")
        costs.check(spec.graph)
        costs = at(costs, microbatches)
    if not forward_only and slices != 1:
        refuse_slices(policy, slices)
    check_slices(spec, slices)
    default = getattr(policy, "placement", "linear")
    made = place(spec, devices, placement, chunks or getattr(policy, "chunks", None), costs, default)
    recipe = Recipe(policy, recompute, update, update_early, not forward_only, data_parallel, memory_limit)
    return build(spec.graph, made, devices, microbatches, recipe, costs, slices)


def refuse_slices(policy: Policy, slices: Any) -> None:
    """Raise ScheduleError for a schedule that takes no slices at all, whatever the pipeline declares about them."""
    if is_asynchronous(policy):
        raise ScheduleError(
            f"schedule {policy_name(policy)!r} updates weights between microbatches, so it cannot cut them into "
            f"{slices} slices; use a synchronous schedule, 'seq-1f1b' say"
        )


def check_forward_only(update: Any, update_early: Any, recompute: Any) -> None:
    """Raise ScheduleError for options that only a plan with backwards has."""
    modes = set(recompute.values()) if isinstance(recompute, Mapping) else {recompute}
    wrong = [f"update={update!r}"] if update is not None else []
    wrong += ["update_early=True"] if update_early else []
    wrong += [f"recompute={recompute!r}"] if modes - {"never"} else []
    if wrong:
        raise ScheduleError(
            f"a plan with forward_only=True has no backward, so {' and '.join(wrong)} would do nothing; leave "
            f"{'it' if len(wrong) == 1 else 'them'} out"
        )


@frozen(eq=False)
class Recipe:
    """The choices behind a plan that do not depend on the number of microbatches."""

    policy: Policy
    recompute: str | Mapping[str, str] = "never"
    update: str | None = None
    update_early: bool = False
    training: bool = True
    data_parallel: int = 1
    memory_limit: float | Activations | None = None


def build(
    graph: Graph, chunks: tuple[Chunk, ...], devices: int, microbatches: int, recipe: Recipe, costs: Costs | None,
    slices: int = 1,
) -> Plan:
    """Run the passes on placed chunks, and verify what they made."""
    problem = Problem(chunks, devices, microbatches, chunk_edges(graph, chunks), costs or Costs(),
                      tuple(s.name for s in graph.stages), recipe.memory_limit, slices=slices)
    if recipe.training and is_asynchronous(recipe.policy):
        if slices != 1:
            refuse_slices(recipe.policy, slices)
        longest = getattr(getattr(recipe.policy, "weights", None), "longest", 0)
        # with copies: before the last minibatch is cut off, values come back from host memory as in all others
        draft = settle(problem, lambda longer: copies(compute_tasks(graph, longer, recipe, costs)), longest)
    else:
        draft = copies(compute_tasks(graph, problem, recipe, costs))
    plan = evolve(finish(draft, costs), recipe=recipe, data_parallel=recipe.data_parallel)
    verify(plan, memory_limit=recipe.memory_limit)
    return plan


def compute_tasks(graph: Graph, problem: Problem, recipe: Recipe, costs: Costs | None = None) -> Draft:
    """Every task but the copies, in one global order."""
    draft = order(graph, problem, recipe.policy, training=recipe.training)
    draft = recompute_pass(draft, recipe.recompute)
    draft = linearise(draft, costs)
    draft = reduce(draft, recipe.data_parallel)
    return updates(draft, recipe.update, recipe.update_early)


def finish(draft: Any, costs: Costs | None = None) -> Plan:
    """The plan of a draft that has all its tasks: lanes, waits and lifetimes added."""
    lanes, waits, buffers = lifetimes(draft)
    return Plan(
        draft.graph, draft.chunks, draft.devices, draft.microbatches, draft.schedule, draft.recompute, draft.update,
        draft.table, lanes, waits, buffers, draft.replicas, draft.slices, costs, update_early=draft.update_early,
        minibatches=draft.minibatches, weights="" if draft.rule is None else draft.rule.text, behind=draft.behind,
    )


def with_microbatches(plan: Plan, microbatches: int, slices: int | None = None) -> Plan:
    """The same pipeline on the same devices and schedule with another number of microbatches per minibatch, or of
    slices per microbatch.

    Raises:
        ScheduleError: the plan was loaded from a file and its schedule is not one that pipec knows by name.
    """
    recipe = plan.recipe or _recipe_from_text(plan)
    slices = plan.slices if slices is None else slices
    return build(plan.graph, plan.chunks, plan.devices, microbatches, recipe, plan.costs, slices)


def scheduled(plan: Plan, schedule: str | Policy) -> Plan:
    """``plan``, read from a file or text, with the schedule that it was compiled with, which these only name.

    Raises:
        PlanError: it is another schedule, or has another weight rule.
    """
    policy = find_schedule(schedule)
    name, rule = policy_name(policy), getattr(getattr(policy, "weights", None), "text", "")
    if name != plan.schedule:
        raise PlanError(f"plan {plan.graph.name!r} was compiled with schedule {plan.schedule!r}, not with {name!r}")
    if plan.asynchronous and rule != plan.weights:
        raise PlanError(
            f"plan {plan.graph.name!r} was compiled with weight rule {plan.weights!r}, but schedule {name!r} has "
            + (repr(rule) if rule else "none")
        )
    return evolve(plan, recipe=_recipe_from_text(plan, policy))


def _recipe_from_text(plan: Plan, policy: Policy | None = None) -> Recipe:
    if policy is None and plan.asynchronous:
        raise ScheduleError(
            f"plan {plan.graph.name!r} is asynchronous and was loaded from a file, which does not hold its policy; "
            f"for another number of microbatches compile it again, or load it with its schedule, as in "
            f"pipec.Plan.load(path, schedule={plan.schedule!r})"
        )
    modes: Any = plan.recompute
    if "=" in modes:
        modes = dict(part.split("=", 1) for part in modes.split(","))
    table = plan.table
    first_update = np.flatnonzero(table.kind == Kind.UPDATE)[:1]
    last_backward = np.flatnonzero(np.isin(table.kind, BACKWARDS))[-1:]
    early = not plan.asynchronous and bool(
        len(first_update) and len(last_backward) and first_update[0] < last_backward[0]
    )
    policy = find_schedule(plan.schedule) if policy is None else policy
    return Recipe(policy, modes, plan.update, early, plan.training, plan.data_parallel)


def forward_plan(plan: Plan, microbatches: int | None = None, slices: int | None = None) -> Plan:
    """The plan of forwards only on the same placement: what evaluation runs."""
    count = plan.minibatch if microbatches is None else microbatches
    slices = plan.slices if slices is None else slices
    recipe = Recipe(find_schedule("gpipe"), training=False)
    made = build(plan.graph, plan.chunks, plan.devices, count, recipe, plan.costs, slices)
    return evolve(made, schedule="forward")
