"""Whether a plan can run over several processes, and whether another may take its place."""

from __future__ import annotations

from collections.abc import Sequence

from pipec.errors import Problem, RunError, raise_all
from pipec.ir import Plan
from pipec.runtime.distributed.local import Tied
from pipec.spec import Spec
from pipec.verify.flow import issue_deadlock


def check_plan(spec: Spec, plan: Plan, tied: Sequence[Tied]) -> None:
    """Raise RunError for a plan that ranks cannot run; ``tied``: parameters that stages of several share."""
    story = issue_deadlock(plan)
    if story is not None:
        raise RunError(f"the plan does not run over several processes: {story}")
    if not tied:
        return
    names = " and ".join(f"{spec.stages[s].name!r} (as {name!r})" for s, name in tied[0].users)
    if plan.update_early:
        raise RunError(f"stages {names} share a parameter, which must wait for the gradients of all, but the plan "
                       "was compiled with update_early=True; compile without it")
    if plan.asynchronous:
        raise RunError(f"asynchronous schedule {plan.schedule!r}: stages {names} share a parameter, whose versions "
                       "would differ from stage to stage; give each its own, or use a synchronous schedule")


def check_successor(spec: Spec, plan: Plan, now: Plan) -> None:
    """Raise RunError for a plan that ranks cannot go on with: each has only the modules of its own stages."""
    problems = []
    if (plan.devices, plan.data_parallel) != (now.devices, now.data_parallel):
        problems.append(Problem(
            f"it has {plan.devices} devices and {plan.data_parallel} replicas, there are processes for {now.devices} "
            f"and {now.data_parallel}"
        ))
    else:
        places = [(stage.name, plan.stage_device(s), now.stage_device(s)) for s, stage in enumerate(spec.stages)]
        problems += [
            Problem(f"stage {name!r} is on device {there}, but its module and optimizer are on rank {here}'s")
            for name, there, here in places if there != here
        ]
        if problems:
            problems.append(Problem(f"compile it with placement={[here for _, _, here in places]}"))
    raise_all("switch(plan) over several processes", problems, RunError)
