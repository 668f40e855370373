"""Whether a pipeline, a plan and devices fit together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from pipec.errors import RunError
from pipec.given import meant, spec_of
from pipec.ir import Plan
from pipec.runtime.asynchronous.delays import TruncatedExponential
from pipec.runtime.asynchronous.rescheduling import Rescheduling

BACKENDS = ("auto", "threads", "replay", "lanes", "adversarial", "cuda", "distributed")
HONEST = tuple(name for name in BACKENDS if name != "adversarial")  # that looks for what is wrong in a plan itself


def check_fit(pipeline: Any, plan: Any, devices: Any, backend: Any, many: bool = False) -> None:
    """Raise RunError when they do not, PlanError when the plan breaks an invariant.

    ``many``: this process is one rank of many, which has one device.
    """
    if isinstance(pipeline, Plan) or not isinstance(plan, Plan):
        if not isinstance(pipeline, Plan):
            spec_of(pipeline, "Runner", RunError)
        swapped = "; swap them" if isinstance(pipeline, Plan) and hasattr(plan, "spec") else ""
        raise RunError(f"Runner(pipeline, plan): got {type(pipeline).__name__} and {type(plan).__name__}{swapped}")
    spec = spec_of(pipeline, "Runner", RunError)
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
    one = isinstance(devices, str | torch.device)
    if devices is not None and (not (many or kind_of_gpu(devices)) if one else not isinstance(devices, Sequence)):
        same = f"; for one and the same: devices=[{str(devices)!r}] * {plan.devices}" if is_device(devices) else (
            "; such as 'cpu' or 'cuda:0', or the name 'cuda' for the GPUs there are")
        raise RunError(
            f"devices= is a list of one torch device per logical device, {plan.devices} here, got {devices!r}{same}"
        )
    if devices is not None and not one and len(devices) != plan.devices:
        raise RunError(f"the plan has {plan.devices} devices, got {len(devices)}: {list(devices)}")
    if isinstance(backend, str) and backend not in BACKENDS:
        raise RunError(f"unknown backend {backend!r}{meant(backend, BACKENDS)}; known are {', '.join(BACKENDS)}")
    if backend is None or backend in HONEST:
        plan.verify()  # it may come from a file or an edited text, and a wrong order would wait for ever


def check_trains(plan: Plan) -> None:
    """Raise RunError when ``step()`` cannot train with this plan here."""
    if not plan.training:
        raise RunError("the plan was compiled with forward_only=True; use evaluate() or forward()")
    if torch.is_inference_mode_enabled() or not torch.is_grad_enabled():
        raise RunError("step() needs gradients but runs under no_grad or inference_mode; use evaluate()")


def is_device(name: Any) -> bool:
    """Whether torch knows such a device; an int would be a GPU's number."""
    try:
        return isinstance(name, torch.device) or (isinstance(name, str) and torch.device(name) is not None)
    except RuntimeError:
        return False


def kind_of_gpu(devices: Any) -> bool:
    """Whether ``devices`` is one name for all GPUs there are, "cuda" say."""
    try:
        return isinstance(devices, str) and (one := torch.device(devices)).type != "cpu" and one.index is None
    except RuntimeError:
        return False


def check_asynchronous_options(plan: Plan, rescheduling: Any, delay: Any) -> None:
    """Raise RunError for an option of asynchronous plans of the wrong type, or where it could never do anything.

    A synchronous plan with update="stage" may be a warm-up, after which the runner switches to an asynchronous one.
    """
    for name, given, kind in (("rescheduling", rescheduling, Rescheduling), ("delay", delay, TruncatedExponential)):
        if given is None:
            continue
        if not isinstance(given, kind):
            usual = "steps=1000" if kind is Rescheduling else "mean=1.0, max=4.0"
            raise RunError(f"{name}= takes pipec.{kind.__name__}({usual}) or None, got {given!r}")
        if plan.update != "stage":
            raise RunError(
                f"{name}= is for asynchronous plans, or a synchronous warm-up with update='stage' before one "
                f"(run.switch); the plan has schedule {plan.schedule!r} and update={plan.update!r}, where it would do "
                f"nothing; leave it out, or compile with schedule='pipemare', update='stage'"
            )


def _difference(mine: Any, theirs: Any) -> str:
    own, other = [s.name for s in mine.stages], [s.name for s in theirs.stages]
    if own != other:
        return f"its stages are {', '.join(own)}, the plan's are {', '.join(other)}"
    if [v.name for v in mine.values] != [v.name for v in theirs.values]:
        return f"it carries {[v.name for v in mine.values]}, the plan carries {[v.name for v in theirs.values]}"
    if mine.name != theirs.name:
        return f"it is named {mine.name!r}, the plan is for {theirs.name!r}"
    return "its edges, losses or buffers differ from the plan's"
