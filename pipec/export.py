"""A plan as the CSV that PyTorch's pipelining loads: the same order, executed by its runtime.

Its format is that of :mod:`pipec.schedules.torch_rows`. It holds forwards and backwards of a chain of stages, one per
chunk, on one set of weights. What a plan has beyond that is refused when it changes what a rank does in between
(RECOMPUTE, REDUCE, several weight versions, slices, replicas), and left out when PyTorch works it out itself or leaves
it to the script: COPY tasks and waits are laid down anew by its runtime, and an UPDATE is the script's
``optimizer.step()`` after ``schedule.step()``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from pipec.errors import PlanError, Problem, raise_all
from pipec.ir import BACKWARDS, Kind, Lane, Plan
from pipec.paths import write_text
from pipec.schedules.torch_rows import OVERLAP

ORDERED = (Kind.FORWARD, *BACKWARDS)
MOST = 24  # problems shown in one error


def to_torch_csv(plan: Plan, path: str | Path | None = None) -> str:
    """The CSV of a plan; with ``path`` also written there.

    Raises:
        PlanError: listing everything PyTorch's runtime could not execute: every edge beyond the next chunk, inputs
            of later chunks, chunks without a backward, and tasks that its format has no word for.
    """
    what = f"plan {plan.graph.name!r} cannot be exported for PyTorch's pipelining"
    faults = [*_structure(plan), *_tasks(plan)]
    rows: list[str] = []
    if not faults:
        made = [_row(plan, device) for device in range(plan.devices)]
        faults += [fault for _, found in made for fault in found]
        rows = [row for row, _ in made]
    raise_all(what, [Problem(text) for text in faults], PlanError, most=MOST)
    text = "".join(f"{row}\n" for row in rows)
    if path is not None:
        write_text(path, text, PlanError)
    return text


def _structure(plan: Plan) -> Iterator[str]:
    """What of the graph does not flow from each chunk to the next."""
    graph, last = plan.graph, len(plan.chunks) - 1
    names = [repr(stage.name) for stage in graph.stages]
    training = plan.training
    chunk = {stage: c.index for c in plan.chunks for stage in c.stages}
    for value in graph.values:
        source = chunk[value.producer]
        for reader in value.readers:
            target = chunk[reader]
            if target not in (source, source + 1):
                yield (
                    f"{value.name!r} goes from stage {names[value.producer]} (chunk {source}) to {names[reader]} "
                    f"(chunk {target}); its runtime hands values to the next chunk only"
                )
    for item in graph.inputs:
        for reader in item.readers:
            if chunk[reader] and not (chunk[reader] == last and graph.stages[reader].loss):
                yield (
                    f"input {item.name!r} is read by stage {names[reader]} (chunk {chunk[reader]}); its runtime gives "
                    "inputs to the first chunk, and the target to the loss of the last one, only"
                )
    for c in plan.chunks:
        lost = [names[stage] for stage in c.stages if graph.stages[stage].loss]
        if lost and c.index != last:
            yield f"stage {lost[0]} (chunk {c.index}) computes a loss; its runtime has a loss in the last chunk only"
        if training and not any(graph.stages[stage].backward for stage in c.stages):
            yield (
                f"chunk {c.index} ({', '.join(names[s] for s in c.stages)}) has no backward, as no loss depends on "
                "it; its runtime runs one for every stage"
            )


def _tasks(plan: Plan) -> Iterator[str]:
    """What tasks there are that the format has no word for."""
    table = plan.table
    if not plan.training:
        yield "it has no backwards; its runtime runs one for every forward, and evaluates with schedule.eval()"
    if (table.kind == Kind.RECOMPUTE).any():
        yield (
            "it has RECOMPUTE tasks, for which there is no word; compile with recompute='never' and wrap the modules "
            "in torch.utils.checkpoint, which recomputes inside the backward"
        )
    if (table.kind == Kind.REDUCE).any():
        yield "it has REDUCE tasks, for which there is no word; its runtime does not add up shared parameters"
    if plan.asynchronous or table.version.any():
        yield f"schedule {plan.schedule!r} is asynchronous; its runtime has one version of the weights, and no updates"
    if plan.slices > 1:
        yield f"it cuts microbatches into {plan.slices} slices, for which there is no word"
    if plan.replicas > 1:
        yield f"it runs {plan.replicas} replicas of its stages, for which there is no word"


Op = tuple[int, int, int]  # kind, chunk, microbatch


def _row(plan: Plan, device: int) -> tuple[str, list[str]]:
    """The cells of a device, and what keeps its tasks from being one per chunk."""
    table, letters = plan.table, [kind.letter for kind in Kind]
    ids = plan.lanes[device][Lane.COMPUTE]
    ids = ids[np.isin(table.kind[ids], ORDERED)]
    owner = np.full(len(plan.graph.stages), -1, np.int64)
    for chunk in plan.chunks:
        owner[list(chunk.stages)] = chunk.index
    columns = (table.kind[ids], owner[table.stage[ids]], table.microbatch[ids])
    cells = _cells(zip(*(column.tolist() for column in columns), strict=True), table.group[ids].tolist())
    words = [[f"{chunk}{letters[kind]}{microbatch}" for kind, chunk, microbatch in cell] for cell in cells]
    text = ",".join(cell[0] if len(cell) == 1 else f"({';'.join(cell)}){OVERLAP}" for cell in words)
    ops = [op for cell in cells for op in cell]
    return text, [*_interrupted(plan, ops), *_loss_order(plan, ops)]


def _cells(ops: Iterable[Op], groups: list[int]) -> list[list[Op]]:
    """Tasks of stages as those of chunks: all stages of a chunk in one cell, as are those of an overlap group.

    The stages of chunks that run fused take turns, a group per turn, so a group may go on with the cell before it.
    """
    cells: list[list[Op]] = []
    unit: list[Op] = []
    for number, op in enumerate(ops):
        unit.append(op)
        if groups[number] and groups[number + 1 : number + 2] == [groups[number]]:
            continue
        if not cells or not all(own in cells[-1] for own in unit):
            cells.append(unit)
        unit = []
    return cells


def _interrupted(plan: Plan, ops: list[Op]) -> Iterator[str]:
    """Tasks of one chunk between which others run: a chunk is one module of one rank there."""
    for (kind, chunk, microbatch), times in Counter(ops).items():
        if times > 1:
            names = ", ".join(repr(plan.graph.stages[s].name) for s in plan.chunks[chunk].stages)
            yield (
                f"{chunk}{Kind(kind).letter}{microbatch} is interrupted: other tasks run between the stages of chunk "
                f"{chunk} ({names}); its runtime runs a chunk as one"
            )


def _loss_order(plan: Plan, ops: list[Op]) -> Iterator[str]:
    """Its runtime keeps losses in the order of the last chunk's forwards and looks them up by microbatch."""
    last = [m for kind, chunk, m in ops if kind == Kind.FORWARD and chunk == len(plan.chunks) - 1]
    if last != sorted(last):
        yield (
            f"the last chunk runs its forwards in the order {' '.join(map(str, last[:8]))}"
            f"{' ...' if len(last) > 8 else ''}; its runtime takes the wrong losses unless microbatches ascend"
        )
