"""Order: ask the schedule policy, check its answer, and expand chunks into stage tasks."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np

from pipec.errors import Problem as Fault
from pipec.errors import ScheduleError, raise_all
from pipec.ir import BACKWARDS, Chunk, Kind, concat_tables, make_table
from pipec.passes.draft import Draft
from pipec.schedules.base import Op, Policy, Problem, policy_name
from pipec.spec import Graph

KINDS = (Kind.FORWARD, *BACKWARDS)


def chunk_edges(graph: Graph, chunks: tuple[Chunk, ...]) -> tuple[tuple[int, int], ...]:
    """(producer, reader) pairs of chunks that exchange a value."""
    of_stage = {stage: chunk.index for chunk in chunks for stage in chunk.stages}
    found = {
        (of_stage[value.producer], of_stage[reader]) for value in graph.values for reader in value.readers
    }
    return tuple(sorted((a, b) for a, b in found if a != b))


def order(graph: Graph, problem: Problem, policy: Policy, training: bool = True) -> Draft:
    """The compute tasks of every device as ``policy`` orders them, chunks expanded to stages.

    A chunk's forward runs its stages in order, its backward in reverse; stages that no loss depends on have no
    backward.

    Raises:
        ScheduleError: listing every task that is missing, repeated, unknown or on the wrong device.
    """
    name = policy_name(policy)
    make = getattr(policy, "order", policy)
    answer = make(problem)
    try:
        rows = [list(row) for row in answer]
    except TypeError:
        raise ScheduleError(f"schedule {name!r} must return one list of tasks per device, got {answer!r}") from None
    check_order(problem, rows, name)
    if not training:
        rows = [[op for op in row if op[0] == Kind.FORWARD] for row in rows]
    tables = [_expand(graph, problem.chunks, device, row) for device, row in enumerate(rows)]
    return Draft(graph, problem.chunks, problem.devices, problem.microbatches, name, concat_tables(tables))


def _expand(graph: Graph, chunks: tuple[Chunk, ...], device: int, row: list[Op]) -> Any:
    if not row:
        return make_table(0)
    ops = np.asarray(row, np.int32)
    kinds, owners, microbatches = ops[:, 0], ops[:, 1], ops[:, 2]
    lists = [list(chunk.stages) for chunk in chunks]
    back = [[s for s in reversed(stages) if graph.stages[s].backward] for stages in lists]
    flat = np.asarray([s for stages in lists + back for s in stages], np.int32)
    sizes = np.asarray([len(stages) for stages in lists + back])
    first = np.concatenate([[0], np.cumsum(sizes)])[:-1]
    key = owners + np.where(kinds == Kind.FORWARD, 0, len(chunks))
    repeat = sizes[key]
    rows = np.repeat(np.arange(len(row)), repeat)
    offset = np.arange(len(rows)) - np.repeat(np.cumsum(repeat) - repeat, repeat)
    return make_table(
        len(rows), kind=kinds[rows], stage=flat[first[key[rows]] + offset], microbatch=microbatches[rows],
        device=device,
    )


def check_order(problem: Problem, rows: list[list[Op]], name: str) -> None:
    """Raise ScheduleError listing what is wrong with a policy's answer, in the words of the schedule."""
    faults: list[Fault] = []
    if len(rows) != problem.devices:
        faults.append(Fault(f"it ordered {len(rows)} devices, but there are {problem.devices}"))
    counted: Counter[tuple[int, int, int]] = Counter()
    owner = [chunk.device for chunk in problem.chunks]
    for device, row in enumerate(rows):
        for op in row:
            try:
                kind, chunk, microbatch = (int(part) for part in op)
            except (TypeError, ValueError):
                faults.append(Fault(f"device {device}: {op!r} is no task; write F(chunk, microbatch) or B, I, W"))
                continue
            if kind not in KINDS:
                faults.append(Fault(f"device {device}: {op!r} has no kind that a schedule orders"))
            elif not 0 <= chunk < len(owner):
                faults.append(Fault(f"device {device}: {_name(op)}: there is no chunk {chunk}, only 0..{len(owner) - 1}"))
            elif not 0 <= microbatch < problem.microbatches:
                faults.append(
                    Fault(f"device {device}: {_name(op)}: there is no microbatch {microbatch}, only "
                          f"0..{problem.microbatches - 1}")
                )
            elif owner[chunk] != device:
                faults.append(Fault(f"device {device}: {_name(op)}: chunk {chunk} is on device {owner[chunk]}"))
            else:
                counted[kind, chunk, microbatch] += 1
    if not faults:
        for op, times in counted.items():
            if times > 1:
                faults.append(Fault(f"{_name(op)} is ordered {times} times"))
        for chunk in range(len(owner)):
            for m in range(problem.microbatches):
                faults += [Fault(text) for text in _missing(counted, chunk, m)]
    if len(faults) > 12:
        faults = [*faults[:12], Fault(f"and {len(faults) - 12} more")]
    raise_all(f"schedule {name!r}", faults, ScheduleError)


def _missing(counted: Counter[Op], chunk: int, m: int) -> list[str]:
    found = []
    if (0, chunk, m) not in counted:
        found.append(f"{chunk}F{m} is missing")
    whole, first, second = ((k, chunk, m) in counted for k in BACKWARDS)
    if whole and (first or second):
        found.append(f"{chunk}B{m} is ordered whole and in halves; choose one")
    elif not whole and first != second:
        found.append(f"{chunk}{'W' if first else 'I'}{m} is missing, its other half is there")
    elif not whole and not first:
        found.append(f"{chunk}B{m} is missing")
    return found


def _name(op: Op) -> str:
    return f"{op[1]}{Kind(op[0]).letter}{op[2]}"
