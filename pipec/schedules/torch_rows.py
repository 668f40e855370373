"""A schedule in the CSV of PyTorch's pipelining: one row per rank, a task per cell, an empty cell idle, no header.

``torch.distributed.pipelining`` writes it with ``schedule._dump_csv(path, format="compute_only")`` and reads it with
``_load_csv``. Cells are stage, letter, microbatch, ``1F0`` forward, ``3B1`` whole backward, ``2I3`` and ``2W3`` its
halves, and ``(0F3;3B1)OVERLAP_F_B`` for tasks that run fused. Its stages are pipec's chunks: what a rank runs as one.
"""

from __future__ import annotations

import csv
import io
import re
from itertools import count, islice
from pathlib import Path
from typing import NamedTuple

from attrs import field, frozen

from pipec.errors import Problem as Fault
from pipec.errors import ScheduleError, raise_all
from pipec.ir import LETTERS, Kind
from pipec.paths import read_text
from pipec.schedules.base import Op, Order, Overlap, Problem, op_name, overlap

FORMAT = "PyTorch's pipelining CSV: a row per rank, cells such as 1F0, 3B1, 2I3, 2W3 or empty, no header"
OVERLAP = "OVERLAP_F_B"
MOST = 24  # problems shown in one error

_TASK = re.compile(r"([0-9]{1,8})([FBIW])([0-9]{1,8})")
_FUSED = re.compile(rf"\(([^()]*)\){OVERLAP}")
_COMMUNICATION = re.compile(r"[0-9]+(SEND_[FB]|RECV_[FB]|UNSHARD|RESHARD|REDUCE_GRAD)[0-9]*")


class Cell(NamedTuple):
    """A task and where it stands, row and column from 1."""

    row: int
    column: int
    op: Op

    def __str__(self) -> str:
        return f"row {self.row}, column {self.column}: {op_name(self.op)}"


@frozen
class TorchSchedule:
    """The order that :func:`torch_csv` read, for ``pipec.compile(net, schedule=...)``.

    Attributes:
        rows: per device its tasks in order, kind, chunk and microbatch each, or overlaps of them.
        placement: the device of every chunk; stages are grouped into as many chunks.
        devices, microbatches: those it is written for, and compile's default. A smaller number of microbatches takes
            the same order without the last ones.
    """

    rows: tuple[tuple[Op | Overlap, ...], ...] = field(repr=False)
    name: str
    placement: tuple[int, ...]
    microbatches: int

    @property
    def devices(self) -> int:
        return len(self.rows)

    def order(self, problem: Problem) -> Order:
        """Raises ScheduleError when the pipeline is placed otherwise than the file says, or has more microbatches."""
        placed = tuple(chunk.device for chunk in problem.chunks)
        wrong = []
        if placed != self.placement:
            wrong.append(Fault(
                f"it places {len(self.placement)} stages on the ranks {_few(self.placement)}, but the pipeline has "
                f"{len(placed)} chunks on the devices {_few(placed)}; leave out placement=, chunks= and device= of "
                "the stages, then the file decides"
            ))
        if problem.microbatches > self.microbatches:
            wrong.append(Fault(
                f"it is written for {self.microbatches} microbatches, but there are {problem.microbatches}; export it "
                "for as many, or use a schedule that pipec knows by name"
            ))
        raise_all(f"schedule {self.name!r}", wrong, ScheduleError)
        return [[own for entry in row for own in _kept(entry, problem.microbatches)] for row in self.rows]


def _kept(entry: Op | Overlap, microbatches: int) -> list[Op | Overlap]:
    """What is left of an entry without the later microbatches."""
    ops = [op for op in (entry.ops if isinstance(entry, Overlap) else (entry,)) if op[2] < microbatches]
    return [overlap(*ops)] if len(ops) > 1 else [*ops]


def _few(numbers: tuple[int, ...], most: int = 8) -> str:
    return " ".join(map(str, numbers[:most])) + (" ..." if len(numbers) > most else "")


def torch_csv(path: str | Path) -> TorchSchedule:
    """The schedule in a CSV of PyTorch's pipelining, to compile any pipeline with.

    For example ``pipec.compile(net, schedule=pipec.torch_csv("order.csv"))``: ranks become devices, its stages chunks.

    Raises:
        ScheduleError: the file cannot be read; or listing every cell that cannot be, by row and column, and every task
            that is missing, repeated, out of order or on a second rank.
    """
    text = read_text(path, ScheduleError)
    return parse_torch_csv(text.removeprefix("\ufeff"), Path(path).name)


def parse_torch_csv(text: str, name: str = "torch-csv") -> TorchSchedule:
    """The schedule in the text of a CSV; see :func:`torch_csv`."""
    rows, faults = _read(text)
    if not rows and not faults:
        faults.append(Fault("it is empty"))
    faults += [
        Fault(f"row {number} has no task; every rank runs at least one stage")
        for number, row in enumerate(rows, 1) if not row
    ]
    unreadable = bool(faults)
    owner: dict[int, int] = {}
    found: dict[Op, Cell] = {}
    for row in rows:
        faults += _place([cell for cells in row for cell in cells], owner, found)
    if not unreadable:
        faults += _gaps("stage", set(owner)) + _gaps("microbatch", {op[2] for op in found})
    microbatches = 1 + max((op[2] for op in found), default=-1)
    if not faults:
        faults += _backwards(found, len(owner), microbatches)
    raise_all(f"schedule {name!r} ({FORMAT})", faults, ScheduleError, most=MOST)
    return TorchSchedule(
        tuple(
            tuple(overlap(*(cell.op for cell in cells)) if len(cells) > 1 else cells[0].op for cells in row)
            for row in rows
        ),
        name, tuple(owner[s] for s in range(len(owner))), microbatches,
    )


def _read(text: str) -> tuple[list[list[list[Cell]]], list[Fault]]:
    """Row by row and cell by cell the tasks, more than one where they run fused; and a problem for every cell that
    cannot be read."""
    rows: list[list[list[Cell]]] = []
    faults: list[Fault] = []
    try:
        lines = list(csv.reader(io.StringIO(text, newline="")))
    except csv.Error as error:
        return rows, [Fault(f"it is no CSV: {error}")]
    while lines and not any(cell.strip() for cell in lines[-1]):
        lines.pop()
    for number, line in enumerate(lines, 1):
        row: list[list[Cell]] = []
        for column, cell in enumerate(line, 1):
            ops, wrong = _tasks(cell.strip())
            row += [[Cell(number, column, op) for op in ops]] if ops else []
            if wrong:
                faults.append(Fault(f"row {number}, column {column}: {wrong}"))
        rows.append(row)
    return rows, faults


def _tasks(text: str) -> tuple[list[Op], str | None]:
    """The tasks of one cell, none when it is idle, or why it cannot be read."""
    if not text:
        return [], None
    if match := _TASK.fullmatch(text):
        return [(int(LETTERS[match[2]]), int(match[1]), int(match[3]))], None
    if match := _FUSED.fullmatch(text):
        parts = [_TASK.fullmatch(part.strip()) for part in match[1].split(";")]
        ops: list[Op] = [(int(LETTERS[part[2]]), int(part[1]), int(part[3])) for part in parts if part]
        if len(ops) == len(parts) > 1:
            return ops, None
        return [], f"{_brief(text)} fuses no two tasks; written as (0F3;3B1){OVERLAP}"
    if _COMMUNICATION.fullmatch(text):
        return [], f"{_brief(text)} is communication, which pipec adds itself; dump it with format='compute_only'"
    return [], f"{_brief(text)} is no task"


def _brief(text: str) -> str:
    return repr(text if len(text) <= 40 else text[:37] + "...")


def _place(row: list[Cell], owner: dict[int, int], found: dict[Op, Cell]) -> list[Fault]:
    """Enter the tasks of a row; problems are tasks twice, before what they need, or of another rank's stage."""
    faults = []
    strangers = set()
    for cell in row:
        kind, stage, microbatch = cell.op
        rank = owner.setdefault(stage, cell.row - 1)
        if rank != cell.row - 1:
            if stage not in strangers:
                faults.append(Fault(f"{cell}: stage {stage} is on rank {rank} already (row {rank + 1})"))
            strangers.add(stage)
            continue
        first = found.setdefault(cell.op, cell)
        if first is not cell:
            faults.append(Fault(f"{cell} stands in column {first.column} already"))
        elif kind != Kind.FORWARD:
            needed = Kind.BACKWARD_INPUT if kind == Kind.BACKWARD_WEIGHT else Kind.FORWARD
            if (int(needed), stage, microbatch) not in found:
                faults.append(Fault(f"{cell} stands before {stage}{needed.letter}{microbatch}, or that is missing"))
    return faults


def _gaps(what: str, numbers: set[int]) -> list[Fault]:
    """A problem when numbers are left out below the largest."""
    lost = max(numbers, default=-1) + 1 - len(numbers)
    if not lost:
        return []
    few = list(islice((n for n in count() if n not in numbers), min(lost, 4)))
    more = " ..." if lost > len(few) else ""
    plural = "es" if what == "microbatch" else "s"
    return [Fault(f"{what}{plural if lost > 1 else ''} {', '.join(map(str, few))}{more} stand"
                  f"{'' if lost > 1 else 's'} nowhere, but the largest is {max(numbers)}; both are numbered from 0")]


def _backwards(found: dict[Op, Cell], stages: int, microbatches: int) -> list[Fault]:
    """A problem for each stage and microbatch without one forward and one backward, whole or in halves."""
    faults = []
    kinds = [int(kind) for kind in (Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)]
    for stage in range(stages):
        for m in range(microbatches):
            forward, whole, half, weight = [(kind, stage, m) in found for kind in kinds]
            if not forward:
                faults.append(Fault(f"{stage}F{m} is missing"))
            if whole and half:
                faults.append(Fault(f"{found[int(Kind.BACKWARD), stage, m]} is there whole and in halves; choose one"))
            elif not whole and not half:
                faults.append(Fault(f"{stage}B{m} is missing"))
            elif half and not weight:
                faults.append(Fault(f"{stage}W{m} is missing, its other half is there"))
    return faults
