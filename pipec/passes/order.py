"""Order: ask the schedule policy, check its answer, and expand chunks into stage tasks."""

from __future__ import annotations

import inspect
import operator
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import product
from typing import Any

import numpy as np
import numpy.typing as npt

from pipec.errors import Problem as Fault
from pipec.errors import ScheduleError, raise_all
from pipec.ir import BACKWARDS, Chunk, Kind, concat_tables
from pipec.passes.draft import Draft
from pipec.passes.expand import expand
from pipec.rules.base import Rule
from pipec.schedules.base import Op, Overlap, Policy, Problem, is_asynchronous, op_name, policy_name
from pipec.segments import segments_text
from pipec.spec import Graph

KINDS = (Kind.FORWARD, *BACKWARDS)
ASYNCHRONOUS_KINDS = (*KINDS, Kind.RECOMPUTE, Kind.UPDATE)
READ_TEXT = "text is read by pipec.parse_schedule"
Ops = npt.NDArray[np.int64]  # (tasks, 3): kind, chunk, microbatch; or (tasks, 4): and the slice


def chunk_edges(graph: Graph, chunks: tuple[Chunk, ...]) -> tuple[tuple[int, int], ...]:
    """(producer, reader) pairs of chunks that exchange a value."""
    of_stage = {stage: chunk.index for chunk in chunks for stage in chunk.stages}
    found = {
        (of_stage[value.producer], of_stage[reader]) for value in graph.values for reader in value.readers
    }
    return tuple(sorted((a, b) for a, b in found if a != b))


def order(graph: Graph, problem: Problem, policy: Policy, training: bool = True) -> Draft:
    """The compute tasks of every device as ``policy`` orders them, chunks expanded to stages.

    Raises:
        ScheduleError: listing every task that is missing, repeated, unknown or on the wrong device.
    """
    name = policy_name(policy)
    rule = rule_given(policy, name) if training and is_asynchronous(policy) else None
    make: Any = getattr(policy, "order", policy)
    check_asked(make, problem, name)
    given, groups = without_groups(read_rows(make(problem), name), name)
    rows = check_order(problem, given, name, is_asynchronous(policy))
    if not training:
        kept = [row[:, 0] == Kind.FORWARD for row in rows]
        rows = [row[keep] for row, keep in zip(rows, kept, strict=True)]
        groups = [group[keep] for group, keep in zip(groups, kept, strict=True)]
    tables = [
        expand(graph, problem.chunks, device, row, group, problem.slices)
        for device, (row, group) in enumerate(zip(rows, groups, strict=True))
    ]
    table = concat_tables(tables)
    recompute = "never"
    if (table.kind == Kind.RECOMPUTE).any():
        starts: Any = getattr(policy, "segment_starts", lambda problem: range(len(problem.chunks)))
        recompute = segments_text([problem.chunks[c].stages[0] for c in starts(problem)])
    return Draft(graph, problem.chunks, problem.devices, problem.microbatches, name, table, recompute,
                 slices=problem.slices, minibatches=problem.minibatches, rule=rule)


def rule_given(policy: Any, name: str) -> Rule:
    """The weight rule of an asynchronous policy.

    Raises:
        ScheduleError: it has none, or something else.
    """
    rule = getattr(policy, "weights", None)
    if not isinstance(rule, Rule):
        told = "has none" if rule is None else f"has {rule!r}"
        raise ScheduleError(
            f"schedule {name!r} is asynchronous, so its attribute 'weights' must be a weight rule, such as "
            f"pipec.rules.Stash() or an instance of a subclass of pipec.rules.Rule; it {told}"
        )
    if not isinstance(getattr(rule, "name", None), str):
        raise ScheduleError(f"schedule {name!r}: the weight rule {type(rule).__name__} needs a class attribute name, "
                            "a word by which plans know it")
    return rule


def check_asked(make: Any, problem: Problem, name: str) -> None:
    """Raise ScheduleError when a policy cannot be called with the problem alone."""
    try:
        asked = inspect.signature(make)
    except (TypeError, ValueError):  # Python does not know its arguments
        return
    try:
        asked.bind(problem)
    except TypeError as error:
        raise ScheduleError(
            f"schedule {name!r} is called with one argument, the problem, but takes {asked}: {error}; give the others "
            "defaults, or functools.partial"
        ) from None


def read_rows(answer: Any, name: str) -> Iterator[list[Any]]:
    """A policy's answer as lists, one after another; an error that the user's own generator raises keeps its type."""
    given: Iterable[Any] = answer if _listed(answer) else [None]
    for row in given:
        if not _listed(row):
            text = f"; {READ_TEXT}" if isinstance(answer, str) or isinstance(row, str) else ""
            raise ScheduleError(f"schedule {name!r} must return one list of tasks per device, got {answer!r}{text}")
        yield list(row)


def _listed(value: Any) -> bool:
    return isinstance(value, Iterable) and not isinstance(value, str)


def without_groups(rows: Iterable[list[Any]], name: str) -> tuple[list[list[Any]], list[Ops]]:
    """The rows with the tasks of each overlap in its place, and per device and task the number of its overlap.

    Overlaps are objects that the garbage collector follows, unlike tasks, so they are dropped row by row: kept for all
    devices at once they would set off collections of all that the process has.

    Raises:
        ScheduleError: an overlap of fewer than two tasks.
    """
    plain: list[list[Any]] = []
    groups: list[Ops] = []
    count, faults = 0, []
    for device, row in enumerate(rows):
        if not any(isinstance(op, Overlap) for op in row):
            plain.append(row)
            groups.append(np.zeros(len(row), np.int64))
            continue
        ops: list[Any] = []
        numbers: list[int] = []
        for op in row:
            own = list(op.ops) if isinstance(op, Overlap) else [op]
            count += isinstance(op, Overlap)
            if isinstance(op, Overlap) and len(own) < 2:
                faults.append(Fault(f"device {device}: an overlap of {len(own)} tasks; it needs at least two"))
            ops += own
            numbers += [count if isinstance(op, Overlap) else 0] * len(own)
        plain.append(ops)
        groups.append(np.asarray(numbers, np.int64))
    raise_all(f"schedule {name!r}", faults, ScheduleError, most=12)
    return plain, groups


def check_order(problem: Problem, rows: list[list[Any]], name: str, asynchronous: bool = False) -> list[Ops]:
    """The tasks per device as arrays, when every chunk, microbatch (and slice) has its forward and backward once.

    Returns:
        Per device (tasks, 3), or (tasks, 4) when the schedule orders slices.

    ``asynchronous``: every chunk also has its updates 0, 1, ... once, as many in each minibatch.

    Raises:
        ScheduleError: listing what is wrong with a policy's answer, in the words of the schedule.
    """
    sliced = not asynchronous and any(isinstance(row[0], tuple) and len(row[0]) == 4 for row in rows if row)
    width = 4 if sliced else 3
    arrays = [_as_array(row, width) for row in rows]
    kinds = ASYNCHRONOUS_KINDS if asynchronous else KINDS
    if not _complete(problem, arrays, kinds, width):
        raise_all(f"schedule {name!r}", _faults(problem, rows, kinds, width), ScheduleError, most=12)
        arrays = [np.asarray([_as_op(op, width) for op in row], np.int64).reshape(-1, width) for row in rows]
    return [array for array in arrays if array is not None]


def _as_array(row: list[Any], width: int) -> Ops | None:
    """``row`` as an array, or None when that takes a closer look at each task."""
    try:
        array = np.asarray(row if row else np.empty((0, width), np.int64))
    except ValueError:
        return None
    return array.astype(np.int64) if array.dtype.kind == "i" and array.shape[1:] == (width,) else None


def _as_op(op: Any, width: int) -> Op:
    made = tuple(operator.index(part) for part in op)
    if len(made) != width:
        raise ValueError
    return made


def _complete(problem: Problem, arrays: list[Ops | None], kinds: tuple[Kind, ...], width: int) -> bool:
    """True when nothing is missing, repeated, unknown or on the wrong device."""
    found = [array for array in arrays if array is not None]
    if not len(found) == len(arrays) == problem.devices:
        return False
    chunks, slices = len(problem.chunks), problem.slices if width == 4 else 1
    columns = np.concatenate(found).T
    kind, chunk, microbatch = columns[:3]
    slice_ = columns[3] if width == 4 else np.zeros_like(kind)
    if not (np.isin(kind, kinds) & (chunk >= 0) & (chunk < chunks) & (microbatch >= 0)
            & (microbatch < problem.microbatches) & (slice_ >= 0) & (slice_ < slices)).all():
        return False
    owner = np.asarray([c.device for c in problem.chunks])
    if (owner[chunk] != np.repeat(np.arange(len(found)), [len(array) for array in found])).any():
        return False
    key = ((kind * chunks + chunk) * problem.microbatches + microbatch) * slices + slice_
    size = len(Kind) * chunks * problem.microbatches * slices
    times = np.bincount(key, minlength=size).reshape(len(Kind), -1)
    whole, first, second = times[list(BACKWARDS)]
    if Kind.UPDATE in kinds and _update_faults(problem, times[Kind.UPDATE].reshape(chunks, -1)):
        return False
    if len(np.unique(times[Kind.RECOMPUTE])) > 1 or times[Kind.RECOMPUTE].max(initial=0) > 1:
        return False
    return bool((times[Kind.FORWARD] == 1).all() and (first == second).all() and (whole + first == 1).all())


def _update_faults(problem: Problem, times: npt.NDArray[Any]) -> list[str]:
    """What is wrong with the updates, given how often each stands, shape (chunks, microbatches)."""
    count, minibatches = int(np.flatnonzero(times.any(axis=0)).max(initial=-1)) + 1, problem.minibatches
    found = [
        f"{chunk}U{u} is {'missing' if not times[chunk, u] else f'ordered {times[chunk, u]} times'}"
        for chunk, u in np.argwhere(times[:, :count] != 1).tolist()
    ]
    if count % minibatches or problem.microbatches % max(count, 1) or not count:
        found.append(
            f"{count} updates of a chunk do not spread evenly over {minibatches} minibatches of {problem.minibatch} "
            "microbatches; order one for every minibatch, or for equal parts of one"
        )
    return found


def _faults(problem: Problem, rows: list[list[Any]], kinds: tuple[Kind, ...], width: int) -> list[Fault]:
    faults: list[Fault] = []
    if len(rows) != problem.devices:
        faults.append(Fault(f"it ordered {len(rows)} devices, but there are {problem.devices}"))
    counted: Counter[Op] = Counter()
    for device, row in enumerate(rows):
        for op in row:
            wrong = _wrong(problem, device, op, kinds, width)
            if wrong:
                faults.append(Fault(f"device {device}: {wrong}"))
            else:
                counted[_as_op(op, width)] += 1
    if not faults:
        for op, times in counted.items():
            if times > 1 and op[0] != Kind.UPDATE:
                faults.append(Fault(f"{op_name(op)} is ordered {times} times"))
        ranges = (range(len(problem.chunks)), range(problem.microbatches), range(problem.slices))
        for item in product(*ranges[: width - 1]):
            faults += [Fault(text) for text in _missing(counted, item)]
        recomputes = [op for op in counted if op[0] == Kind.RECOMPUTE]
        if recomputes and len(recomputes) < len(problem.chunks) * problem.microbatches:
            faults.append(Fault(f"{op_name(recomputes[0])} is there, but not every chunk and microbatch recomputes"))
        if Kind.UPDATE in kinds:
            table = np.asarray([[counted[int(Kind.UPDATE), c, m] for m in range(problem.microbatches)]
                                for c in range(len(problem.chunks))])
            faults += [Fault(text) for text in _update_faults(problem, table)]
    return faults


def _wrong(problem: Problem, device: int, op: Any, kinds: tuple[Kind, ...], width: int) -> str | None:
    """Why ``op`` cannot stand in the list of ``device``, or None."""
    try:
        made = _as_op(op, width)
    except (TypeError, ValueError):
        text = f"; {READ_TEXT}" if isinstance(op, str) else ""
        return f"{op!r} is no task; write F(chunk, microbatch{', slice' * (width == 4)}) or B, I, W{text}"
    kind, chunk = made[:2]
    if kind == Kind.UPDATE and kind not in kinds:
        return f"{op_name(made)}: only asynchronous schedules order updates"
    if kind not in kinds:
        return f"{op!r} has no kind that a schedule orders"
    limits = (len(problem.chunks), problem.microbatches, problem.slices)
    for what, part, limit in zip(("chunk", "microbatch", "slice"), made[1:], limits, strict=False):
        if not 0 <= part < limit:
            return f"{op_name(made)}: there is no {what} {part}, only 0..{limit - 1}"
    owner = problem.chunks[chunk].device
    return None if owner == device else f"{op_name(made)}: chunk {chunk} is on device {owner}"


def _missing(counted: Counter[Op], item: Op) -> list[str]:
    found = []
    if (0, *item) not in counted:
        found.append(f"{op_name((0, *item))} is missing")
    whole, first, second = ((int(k), *item) in counted for k in BACKWARDS)
    if whole and (first or second):
        found.append(f"{op_name((2, *item))} is ordered whole and in halves; choose one")
    elif not whole and first != second:
        found.append(f"{op_name((4 if first else 3, *item))} is missing, its other half is there")
    elif not whole and not first:
        found.append(f"{op_name((2, *item))} is missing")
    return found
