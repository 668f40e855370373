"""What all ranks must have alike before the first step, and the error that names what differs on which rank."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch

from pipec.errors import Problem, RankError, raise_all
from pipec.ir import TABLE_COLUMNS, Plan
from pipec.spec import Spec


def summary(spec: Spec, plan: Plan, options: dict[str, Any]) -> dict[str, str]:
    """What identifies a pipeline and its plan, in words where there are few and as a hash where there are many."""
    made = {
        "torch": torch.__version__.split("+")[0],
        "pipeline": spec.name,
        "stages": ", ".join(stage.name for stage in spec.stages),
        "inputs": ", ".join(
            f"{item.name} (split {item.split}{'' if item.slice_dim is None else f', slices along {item.slice_dim}'})"
            for item in spec.inputs
        ),
        "outputs": ", ".join(item.name for item in spec.outputs) or "none",
        "losses": ", ".join(f"{item.name} ({item.reduction})" for item in spec.losses) or "none",
        "edges": _hash(repr(spec.graph)),
        "placement": str([plan.stage_device(s) for s in range(len(spec.stages))]),
        "devices": str(plan.devices),
        "microbatches": str(plan.minibatch),
        "slices": str(plan.slices),
        "schedule": plan.schedule,
        "weights": plan.weights or "synchronous",
        "recompute": plan.recompute,
        "update": str(plan.update) + (", early" if plan.update_early else ""),
        **{key: str(value) for key, value in options.items()},
    }
    columns = [getattr(plan.table, name) for name in TABLE_COLUMNS]
    parts = [*columns, *(ids for lanes in plan.lanes for ids in lanes), plan.waits.start, plan.waits.ids]
    made["tasks"] = _hash(*(part.tobytes() for part in parts), str(plan.behind))
    return made


def _hash(*parts: Any) -> str:
    total = hashlib.sha256()
    for part in parts:
        total.update(part if isinstance(part, bytes) else part.encode())
    return total.hexdigest()[:12]


def compare(told: Sequence[dict[str, str]], ranks: Sequence[int], me: int) -> None:
    """Raise RankError listing what differs between the ranks; ``told[i]`` is what rank ``ranks[i]`` has."""
    failed = [(rank, own["failed"]) for rank, own in zip(ranks, told, strict=True) if "failed" in own]
    if failed and all(rank != me for rank, _ in failed):
        rank, text = failed[0]
        raise RankError(f"rank {rank} could not make its runner: {text}", rank)
    if failed:  # its own error is raised
        return
    problems = []
    for key in told[0]:
        values: dict[str, list[int]] = {}
        for rank, own in zip(ranks, told, strict=True):
            values.setdefault(own.get(key, "nothing"), []).append(rank)
        if len(values) > 1:
            text = "; ".join(f"{value} on {_ranks(own)}" for value, own in values.items())
            problems.append(Problem(f"{key}: {text}"))
    if len(problems) > 1:  # the order of tasks follows from the rest
        problems = [p for p in problems if not p.message.startswith("tasks:")]
    raise_all("the ranks do not run the same plan", problems, RankError)


def _ranks(numbers: Sequence[int]) -> str:
    return f"rank{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"


def same_call(table: Sequence[Sequence[float]], ranks: Sequence[int]) -> None:
    """Raise RankError when the first rows of a call say that the ranks are not at the same one.

    Args:
        table: per rank: call, failed, training, microbatches, rows, seed in two halves, step, length of sequences.
    """
    where = where_of(table)
    for column, what in ((2, "call"), (5, "seed"), (6, "seed"), (7, "step")):
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
            text = ", ".join(f"{number} on rank {rank}" for number, rank in given.items())
            raise RankError(f"the {one} {text} {what}; all ranks of a pipeline are given the same ones",
                            list(given.values())[1])
        found.append(next(iter(given), None))
    if any(number is not None and number < least for number in found) and len(set(found)) > 1:
        told = ", ".join(map(str, found))
        raise RankError(f"the replicas' {several} {told} {what}; where one has fewer than there are {parts} ({least}), "
                        "all need as many")
    return found
