"""Check: a plan and the reference side by side on one batch; the first stage and task that differs is named."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from attrs import evolve, frozen
from torch import Tensor

from pipec.compiler import compile as compile_plan
from pipec.errors import RunError
from pipec.given import spec_of
from pipec.ir import Kind, Plan
from pipec.runtime.asynchronous.part import part
from pipec.runtime.reference import Reference
from pipec.runtime.runner import Runner
from pipec.tree import flatten

Record = dict[tuple[Kind, int, int], list[Any]]


@frozen
class Difference:
    """Something that the plan computed otherwise than the reference."""

    where: str
    detail: str

    def __str__(self) -> str:
        return f"{self.where}: {self.detail}"


@frozen
class CheckReport:
    """What :func:`check` found; true when everything was bit-equal."""

    plan: str
    compared: int
    differences: tuple[Difference, ...]

    def __bool__(self) -> bool:
        return not self.differences

    def __str__(self) -> str:
        if not self.differences:
            return f"{self.plan}: bit-equal to the reference in {self.compared} tensors"
        shown = [f"  {difference}" for difference in self.differences[:10]]
        more = len(self.differences) - len(shown)
        return "\n".join([
            f"{self.plan}: {len(self.differences)} of {self.compared} tensors differ from the reference; in the order "
            "of computation:", *shown, *([f"  and {more} more"] if more > 0 else []),
        ])


def check(
    pipeline: Any, batch: Mapping[str, Any], plan: Plan | None = None, *, backend: str | None = None, **options: Any
) -> CheckReport:
    """Run one step of a plan and of the reference on the same batch and compare every result bit by bit.

    Args:
        batch: the minibatch by input name.
        plan: the plan to check; by default compiled from ``options`` as for :func:`pipec.compile`, with 4
            microbatches for 2 devices, or for those that the stages carry or the schedule says.
        backend: as for Runner.

    Returns:
        A report that names, in the order of computation, every stage, microbatch and task whose values or gradients
        differ, then losses, outputs, parameter gradients and buffers. Parameters, ``.grad`` and buffers are put back.

    UPDATE tasks of the plan are left out: gradients are compared as an optimizer would find them.

    Over ranks all of them call it, and each compares what its stages computed.

    Raises:
        RunError: a plan and options to compile another, an asynchronous plan, whose minibatches overlap, or one with
            replicas, which compute with other data than the reference.
    """
    spec = spec_of(pipeline, "check", RunError)
    if not isinstance(batch, Mapping):
        names = ", ".join(f"{item.name!r}: ..." for item in spec.inputs)
        raise RunError(f"check: the batch is a mapping by input name, {{{names}}}; got {type(batch).__name__}")
    if plan is not None and not isinstance(plan, Plan):
        raise RunError(f"check: plan= is what pipec.compile returns, got {type(plan).__name__} {plan!r}")
    if plan is not None and options:
        raise RunError(
            f"check: got a plan and {', '.join(f'{name}=' for name in options)} to compile another; leave one of them "
            "out: check(net, batch, plan), or check(net, batch, schedule='1f1b')"
        )
    if plan is None:
        stages, schedule = spec.stages, options.get("schedule")
        carried = [stage.device for stage in stages if stage.device is not None]
        devices = 1 + max(carried) if carried else min(2, len(stages))
        usual: dict[str, Any] = {"devices": devices, "microbatches": 4}
        written = [name for name in usual if getattr(schedule, name, None) is not None]
        plan = compile_plan(pipeline, **({name: n for name, n in usual.items() if name not in written} | options))
    plan = without_updates(plan)
    mine, theirs = Record(), Record()
    with Runner(pipeline, plan, backend=backend) as run:
        run.probe = _recorder(mine)
        got = _observe(run, run.stages, batch)
        here = [stage.fn is not None for stage in run.stages]
    loop = Reference(pipeline, plan.microbatches, slices=plan.slices)
    loop.probe = _recorder(theirs)
    expected = _observe(loop, loop.stages, batch)
    differences: list[Difference] = []
    compared = 0
    names = [stage.name for stage in spec.stages]
    for key in theirs:
        kind, stage, piece = key
        if not here[stage]:
            continue
        m = _item(piece, plan.slices)
        where = f"stage {names[stage]!r}, microbatch {m}, {kind.name} ({stage}{kind.letter}{m})"
        compared += _compare(where, mine.get(key), theirs[key], differences)
    for where in expected if all(here) else got:
        compared += _compare(where, got.get(where), expected[where], differences)
    title = f"{plan.graph.name}: {plan.schedule}, {plan.devices} devices, {plan.microbatches} microbatches"
    title += "" if all(here) else ", the stages of this rank"
    return CheckReport(title, compared, tuple(differences))


def without_updates(plan: Plan) -> Plan:
    """The plan without its UPDATE tasks.

    Raises:
        RunError: it is asynchronous: without updates between minibatches nothing of it is left; or it has replicas.
    """
    if plan.asynchronous:
        raise RunError(
            f"check: {plan.schedule!r} is asynchronous: several minibatches are under way at once on different "
            "weights, so no single step of the plain loop has its numbers; check the stages with a synchronous "
            "schedule, check(net, batch, schedule='1f1b'), and which weights each task reads with plan.verify()"
        )
    if plan.data_parallel > 1:
        raise RunError(
            f"check: the plan has data_parallel={plan.data_parallel} replicas, each with data of its own, and the "
            "plain loop has one batch; check a plan without them in every process, check(net, batch, schedule="
            f"{plan.schedule!r}, devices={plan.devices}, backend='threads')"
        )
    if plan.update is None:
        return plan
    kept = np.flatnonzero(plan.table.kind != Kind.UPDATE)
    recipe = None if plan.recipe is None else evolve(plan.recipe, update=None, update_early=False)
    return evolve(part(plan, kept), update=None, update_early=False, recipe=recipe)


def _item(piece: int, slices: int) -> str:
    """How a task of a microbatch or slice prints: ``3``, ``3.1``."""
    m, slice_ = divmod(piece, slices)
    return f"{m}.{slice_}" if slice_ else str(m)


def _recorder(record: Record) -> Any:
    def see(kind: Kind, stage: int, piece: int, made: Any) -> None:
        record[kind, stage, piece] = [
            leaf.detach().clone() if isinstance(leaf, Tensor) else leaf for leaf in flatten(made)[0]
        ]

    return see


def _observe(run: Any, stages: list[Any], batch: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Step once from empty gradients, note what came out, and put everything back."""
    parameters = {id(p): p for stage in stages for p in stage.trainable()}
    gradients = {key: p.grad for key, p in parameters.items()}
    buffers = [(stage, stage.buffers.originals(), stage.buffers.snapshot()) for stage in stages if stage.buffers]
    random = torch.get_rng_state()
    for parameter in parameters.values():
        parameter.grad = None
    try:
        result = run.step(**batch)
        seen = {f"loss {name!r}": [value] for name, value in result.losses.items()}
        seen |= {f"output {name!r}": flatten(value)[0] for name, value in result.outputs.items()}
        for stage in stages:
            for name, parameter in stage.named_parameters():
                if parameter.requires_grad:
                    seen[f"gradient of {stage.name}.{name}"] = [parameter.grad]
            if stage.buffers:
                seen[f"buffers of {stage.name}"] = [b if b is None else b.clone() for b in stage.buffers.originals()]
        return seen
    finally:
        torch.set_rng_state(random)
        for key, parameter in parameters.items():
            parameter.grad = gradients[key]
        for stage, originals, values in buffers:
            stage.buffers.restore(originals, values)


def _same(mine: Any, theirs: Any) -> bool:
    """``==`` of two leaves that are no tensors; arrays of other libraries compare entry by entry."""
    found: Any = mine == theirs
    return mine is theirs or bool(found.all()) if hasattr(found, "all") else bool(found)


def _compare(where: str, got: list[Any] | None, expected: list[Any], differences: list[Difference]) -> int:
    if got is None:
        differences.append(Difference(where, "the plan did not compute it"))
        return 1
    for mine, theirs in zip(got, expected, strict=False):
        if not (isinstance(mine, Tensor) and isinstance(theirs, Tensor)):
            if type(mine) is not type(theirs) or (not isinstance(mine, Tensor) and not _same(mine, theirs)):
                differences.append(Difference(where, f"got {mine!r}, expected {theirs!r}"))
        elif mine.shape != theirs.shape or mine.dtype != theirs.dtype:
            differences.append(
                Difference(where, f"got {mine.dtype} {tuple(mine.shape)}, expected {theirs.dtype} "
                           f"{tuple(theirs.shape)}")
            )
        elif not torch.equal(mine, theirs) and not bool((mine.isnan() == theirs.isnan()).all() and torch.equal(
            mine.nan_to_num(), theirs.nan_to_num()
        )):
            gap = (mine.double() - theirs.double()).abs().max().item() if not mine.is_complex() else float("nan")
            differences.append(Difference(where, f"shape {tuple(mine.shape)} differs by up to {gap:.3g}"))
    if len(got) != len(expected):
        differences.append(Difference(where, f"got {len(got)} leaves, expected {len(expected)}"))
    return max(len(expected), 1)
