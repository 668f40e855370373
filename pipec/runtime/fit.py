"""Whether a pipeline, a plan and devices fit together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pipec.errors import RunError
from pipec.ir import Plan

BACKENDS = ("auto", "threads", "replay", "lanes", "adversarial", "cuda", "distributed")
HONEST = tuple(name for name in BACKENDS if name != "adversarial")  # that looks for what is wrong in a plan itself


def check_fit(pipeline: Any, plan: Any, devices: Sequence[Any] | None, backend: Any) -> None:
    """Raise RunError when they do not, PlanError when the plan breaks an invariant."""
    if isinstance(pipeline, Plan) or not isinstance(plan, Plan):
        swapped = "; swap them" if isinstance(pipeline, Plan) and hasattr(plan, "spec") else ""
        raise RunError(f"Runner(pipeline, plan): got {type(pipeline).__name__} and {type(plan).__name__}{swapped}")
    spec = pipeline.spec
    if spec.graph != plan.graph:
        raise RunError(
            f"the plan was compiled for another pipeline: {_difference(spec.graph, plan.graph)}; "
            "compile this pipeline again"
        )
    empty = [stage.name for stage in spec.stages if stage.fn is None]
    if empty:
        raise RunError(
            f"stages without a module cannot run: {', '.join(empty)}; placeholders are for plans and pictures"
        )
    if devices is not None and len(devices) != plan.devices:
        raise RunError(f"the plan has {plan.devices} devices, got {len(devices)}: {list(devices)}")
    if isinstance(backend, str) and backend not in BACKENDS:
        raise RunError(f"unknown backend {backend!r}; known are {', '.join(BACKENDS)}")
    if backend is None or backend in HONEST:
        plan.verify()  # it may come from a file or an edited text, and a wrong order would wait for ever


def _difference(mine: Any, theirs: Any) -> str:
    own, other = [s.name for s in mine.stages], [s.name for s in theirs.stages]
    if own != other:
        return f"its stages are {', '.join(own)}, the plan's are {', '.join(other)}"
    if [v.name for v in mine.values] != [v.name for v in theirs.values]:
        return f"it carries {[v.name for v in mine.values]}, the plan carries {[v.name for v in theirs.values]}"
    return "its edges, losses or buffers differ from the plan's"
