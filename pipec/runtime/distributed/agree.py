"""What all ranks must have alike before the first step, and the error that names what differs on which rank."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any

import torch

from pipec.errors import Problem, RankError, raise_all
from pipec.ir import TABLE_COLUMNS, Plan
from pipec.runtime.distributed.group import gather_objects
from pipec.runtime.distributed.wiring import ORDER, wiring
from pipec.spec import Spec

# Parts of a summary that are looked at when the rest is the same
REST, DETAILS, HELD, TASKS, EDGES = "rest", "details", "held", "tasks", "edges"
COSTS = "costs"  # may differ where plans do not
HOOKED = "before_update"  # whether a rank has such a hook
DIFFERENT = "the ranks do not run the same plan"


Summary = dict[str, Any]  # by what is compared a text, or texts by what they are about; a bool is told only


def summary(spec: Spec, plan: Plan, options: dict[str, Any]) -> Summary:
    """What identifies a pipeline and its plan, in words where there are few and as a hash where there are many."""
    made: Summary = {
        "torch": torch.__version__.split("+")[0],
        "pipeline": spec.name,
        "stages": ", ".join(stage.name for stage in spec.stages),
        "inputs": ", ".join(
            f"{item.name} (split {item.split}{'' if item.slice_dim is None else f', slices along {item.slice_dim}'})"
            for item in spec.inputs
        ),
        "outputs": ", ".join(item.name for item in spec.outputs) or "none",
        "losses": ", ".join(f"{item.name} ({item.reduction})" for item in spec.losses) or "none",
        "placement": str([plan.stage_device(s) for s in range(len(spec.stages))]),
        "devices": str(plan.devices),
        "microbatches": str(plan.minibatch),
        "slices": str(plan.slices),
        "schedule": plan.schedule,
        "weights": plan.weights or "synchronous",
        "recompute": plan.recompute,
        "update": str(plan.update) + (", early" if plan.update_early else ""),
        **{key: value if isinstance(value, bool | dict) else str(value) for key, value in options.items()},
        DETAILS: wiring(spec) | {EDGES: _hash(repr(spec.graph))},
    }
    columns = [getattr(plan.table, name) for name in TABLE_COLUMNS]
    parts = [*columns, *(ids for lanes in plan.lanes for ids in lanes), plan.waits.start, plan.waits.ids]
    made[COSTS] = [_hash(repr(plan.costs))]
    made[TASKS] = _hash(*(part.tobytes() for part in parts), str(plan.behind))
    return made


def _hash(*parts: Any) -> str:
    total = hashlib.sha256()
    for part in parts:
        total.update(part if isinstance(part, bytes) else part.encode())
    return total.hexdigest()[:12]


def agreed(group: Any, own: Summary, plan: Plan, ranks: Sequence[int], me: int) -> list[Summary]:
    """What every rank of ``group`` has.

    Tasks are told one by one only when something is wrong with them.

    Raises:
        RankError: they differ, on all ranks.
    """
    told = gather_objects(group, own, len(ranks))
    if not compare(told, ranks, me):
        orders = [[str(task) for task in plan.compute(device)] for device in range(plan.devices)]
        raise other_tasks(gather_objects(group, orders, len(ranks)), ranks)
    return told


def compare(told: Sequence[Summary], ranks: Sequence[int], me: int) -> bool:
    """Raise RankError listing what differs between the ranks; ``told[i]`` is what rank ``ranks[i]`` has.

    Returns:
        Whether all have the same, tasks included; they are the only thing that may differ without an error here.
    """
    failed = [(rank, own["failed"]) for rank, own in zip(ranks, told, strict=True) if "failed" in own]
    if failed and all(rank != me for rank, _ in failed):
        rank, text = failed[0]
        raise RankError(f"rank {rank} could not make its runner: {text}", rank)
    if failed:  # its own error is raised
        return True
    plain = [{key: value for key, value in own.items() if isinstance(value, str)} for own in told]
    problems = differences(plain, ranks, but=(TASKS,))
    for key, but in ((REST, ()), (DETAILS, (EDGES,)), (HELD, (ORDER,)), (DETAILS, ()), (HELD, ())):  # causes first
        problems = problems or differences([own.get(key, {}) for own in told], ranks, but)
    raise_all(DIFFERENT + other_costs(told), problems, RankError, 20)
    return len({own.get(TASKS) for own in told}) == 1


def other_costs(told: Sequence[Summary]) -> str:
    """What to say where plans differ, when it may be because of their costs."""
    if len({str(own.get(COSTS)) for own in told}) == 1:
        return ""
    return ("; their costs differ, as where each rank has profiled by itself: give all those of one, with "
            "torch.distributed.broadcast_object_list")


def differences(told: Sequence[Mapping[str, Any]], ranks: Sequence[int], but: Sequence[str] = ()) -> list[Problem]:
    """What is not the same on all ranks, of texts by what they are about; a dict of texts concerns the ranks that have
    it."""
    problems = []
    for key in dict.fromkeys(key for own in told for key in own if key not in but):
        if isinstance(next(own[key] for own in told if key in own), Mapping):
            have = [(rank, own[key]) for rank, own in zip(ranks, told, strict=True) if key in own]
            found = differences([parts for _, parts in have], [rank for rank, _ in have], but)
            problems += [Problem(f"{key}, {problem.message}") for problem in found]
            continue
        values: dict[str, list[int]] = {}
        for rank, own in zip(ranks, told, strict=True):
            values.setdefault(own.get(key, "nothing"), []).append(rank)
        if len(values) > 1:
            text = "; ".join(f"{value} on {_ranks(own)}" for value, own in values.items())
            problems.append(Problem(f"{key}: {text}"))
    return problems


def other_tasks(orders: Sequence[Sequence[Sequence[str]]], ranks: Sequence[int]) -> RankError:
    """The error when plans differ in nothing but their tasks; ``orders``: per rank and device the tasks in order."""
    problems = []
    for device, rows in enumerate(zip(*orders, strict=True)):
        for place, tasks in enumerate(zip_longest(*rows, fillvalue="nothing")):
            if len(set(tasks)) > 1:
                problems += differences([{f"device {device}, task {place}": task} for task in tasks], ranks)
                break
    problems = problems or [Problem("the copies and waits between tasks, or the weights that they read")]
    try:
        raise_all(f"{DIFFERENT}; were costs or memory limits given alike?", problems, RankError, 20)
    except RankError as error:
        return error
    raise AssertionError


def _ranks(numbers: Sequence[int]) -> str:
    return f"rank{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"


def same_call(table: Sequence[Sequence[float]], ranks: Sequence[int]) -> None:
    """Raise RankError when the first rows of a call say that the ranks are not at the same one.

    Args:
        table: per rank: call, failed, training, microbatches, rows, seed in two halves, step, length of sequences,
            what losses are multiplied by.
    """
    where = where_of(table)
    for column, what in ((2, "call"), (5, "seed"), (6, "seed"), (7, "step"), (9, "scale")):
        values = [row[column] for row in table]
        odd = next((n for n, value in enumerate(values) if value != values[0]), None)
        if odd is None:
            continue
        one, two = ranks[0], ranks[odd]
        if what == "call":
            text = f"rank {one} is in {where[0]}, rank {two} in {where[odd]}; all ranks make the same calls"
        elif what == "seed":
            text = (f"ranks {one} and {two} have different random seeds; call torch.manual_seed with one number on "
                    "every rank, or give Runner(seed=)")
        elif what == "scale":
            text = (f"the gradient scaler of rank {one} has scale {values[0]:g}, that of rank {two} {values[odd]:g}; "
                    "make them alike on every rank, and restore all ranks from one checkpoint")
        else:
            text = f"rank {one} is in {where[0]}, rank {two} in {where[odd]}; restore all ranks from one checkpoint"
        raise RankError(text, two)


FLUSH = 2.0  # in the column that says whether a call trains


def where_of(table: Sequence[Sequence[float]]) -> list[str]:
    """Per rank, in words, the call and the step that it is in, from the table of :func:`same_call`."""
    words = ("evaluate() before step", "step", "a flush before step")
    return [f"{words[int(row[2])]} {row[7]:.0f}" for row in table]


def rows_of(
    table: Sequence[Sequence[float]], replicas: Sequence[Sequence[int]], microbatches: int
) -> list[int | None]:
    """Per replica the rows of its minibatch, from the table of :func:`same_call`; None where no input is split.

    Raises:
        RankError: ranks of a replica were given different rows, or replicas have too different ones.
    """
    return _measured(table, replicas, 4, microbatches, ("rows", "minibatch has", "minibatches have", "microbatches"))


def lengths_of(
    table: Sequence[Sequence[float]], replicas: Sequence[Sequence[int]], slices: int
) -> list[int | None]:
    """Per replica the length of its sequences, from the same table; None where no input is cut into slices.

    Raises:
        RankError: ranks of a replica were given different lengths, or replicas have too different ones.
    """
    return _measured(table, replicas, 8, slices, ("positions", "sequences have", "sequences have", "slices"))


def _measured(
    table: Sequence[Sequence[float]], replicas: Sequence[Sequence[int]], column: int, least: int,
    words: tuple[str, str, str, str],
) -> list[int | None]:
    """Per replica the one number that its ranks have in a column, None where all have -1."""
    everyone = [rank for ranks in replicas for rank in ranks]
    what, one, several, parts = words
    found: list[int | None] = []
    for ranks in replicas:
        given: dict[int, int] = {}
        for rank in ranks:
            number = int(table[everyone.index(rank)][column])
            if number >= 0:
                given.setdefault(number, rank)
        if len(given) > 1:
            text = ", ".join(f"{number} {what} on rank {rank}" for number, rank in given.items())
            raise RankError(f"the {one} {text}; all ranks of a pipeline are given the same ones",
                            list(given.values())[1])
        found.append(next(iter(given), None))
    if any(number is not None and number < least for number in found) and len(set(found)) > 1:
        told = ", ".join(map(str, found))
        raise RankError(f"the replicas' {several} {told} {what}; where one has fewer than there are {parts} ({least}), "
                        "all need as many")
    return found
