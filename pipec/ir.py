"""The plan: every task of every device in order, with what it waits for and what it frees.

A plan of half a million tasks is a handful of numpy columns. ``plan.tasks`` is a lazy view that makes frozen
:class:`Task` values only where somebody looks. Task ids are rows of the table and, in every compiled plan, a
topological order: what a task waits for has a smaller id, and each lane is ascending.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import IntEnum
from functools import cached_property
from typing import TYPE_CHECKING, Any, overload

import numpy as np
import numpy.typing as npt
from attrs import field, fields, frozen

from pipec.columns import BUFFER_COLUMNS as BUFFER_COLUMNS
from pipec.columns import Buffer as Buffer
from pipec.columns import Buffers as Buffers
from pipec.columns import Column as Column
from pipec.columns import Waits as Waits
from pipec.columns import to_column
from pipec.spec import Graph

if TYPE_CHECKING:
    from pathlib import Path

    from pipec.costs import Activations, Costs
    from pipec.schedules import Policy
    from pipec.timeline import Timeline
    from pipec.verify import Report

class Kind(IntEnum):
    """What a task does."""

    FORWARD = 0
    RECOMPUTE = 1
    BACKWARD = 2
    BACKWARD_INPUT = 3
    BACKWARD_WEIGHT = 4
    COPY = 5
    REDUCE = 6
    UPDATE = 7

    @property
    def letter(self) -> str:
        return "FRBIWCGU"[self]


LETTERS = {kind.letter: kind for kind in Kind}
CARRIED = 5  # what a COPY can carry: a value, its gradient, a value recomputed by its segment, and as follows
TO_HOST, FROM_HOST = 3, 4  # a value on its way to wait in host memory, and from there to a reader's device
CARRIES = (  # per code what the source holds, and what the target
    (Buffer.VALUE, Buffer.VALUE), (Buffer.GRADIENT, Buffer.GRADIENT), (Buffer.RECOMPUTED, Buffer.RECOMPUTED),
    (Buffer.VALUE, Buffer.HOST), (Buffer.HOST, Buffer.FETCHED),
)
BACKWARDS = (Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)


class Lane(IntEnum):
    """The in-order queues of a device."""

    COMPUTE = 0
    OUT = 1
    IN = 2


@frozen
class Chunk:
    """Stages on one device that a schedule orders as one unit."""

    index: int
    device: int
    stages: tuple[int, ...]


@frozen
class Task:
    """One entry of a device's list.

    ``stage`` is the producer's for a COPY and -1 for an UPDATE of all stages; ``microbatch`` is the update's
    number for an UPDATE, and ``version`` the one it replaces. A COPY carries ``value`` (or its gradient, or
    itself recomputed) from ``device`` to ``peer``. With ``host`` "to" it goes from ``device``, which is ``peer`` too,
    to host memory that belongs to that device; with "from", from there to ``peer``.
    """

    kind: Kind
    stage: int
    microbatch: int
    replica: int = 0
    slice: int = 0
    version: int = 0
    group: int = 0
    device: int = 0
    peer: int = -1
    value: int = -1
    gradient: bool = False
    recomputed: bool = False
    host: str = ""

    @property
    def item(self) -> str:
        """The microbatch with slice and replica where there are any: ``3``, ``3.1``, ``3~1``."""
        slice_ = f".{self.slice}" if self.slice else ""
        replica = f"~{self.replica}" if self.replica else ""
        return f"{self.microbatch}{slice_}{replica}"

    def __str__(self) -> str:
        if self.kind is Kind.COPY:
            letter = "d" if self.gradient else "r" if self.recomputed else ""
            source, target = "host" if self.host == "from" else self.device, "host" if self.host == "to" else self.peer
            return f"{letter}v{self.value}[{self.item}]:{source}>{target}"
        return f"{self.stage if self.stage >= 0 else ''}{self.kind.letter}{self.item}"


@frozen(eq=False)
class Table:
    """Tasks as columns; row i is task i. All columns have the same length.

    ``gradient`` says which of ``CARRIED`` a COPY carries: 0 a value, 1 its gradient, 2 the value recomputed,
    ``TO_HOST`` and ``FROM_HOST`` a value by way of host memory.
    """

    kind: Column = field(converter=to_column)
    stage: Column = field(converter=to_column)
    replica: Column = field(converter=to_column)
    microbatch: Column = field(converter=to_column)
    slice: Column = field(converter=to_column)
    version: Column = field(converter=to_column)
    group: Column = field(converter=to_column)
    device: Column = field(converter=to_column)
    peer: Column = field(converter=to_column)
    value: Column = field(converter=to_column)
    gradient: Column = field(converter=to_column)

    def __len__(self) -> int:
        return len(self.kind)

    def task(self, index: int) -> Task:
        row = [int(getattr(self, name)[index]) for name in TABLE_COLUMNS]
        return Task(**dict(zip(TABLE_COLUMNS, row, strict=True)) | {  # type: ignore[arg-type]
            "kind": Kind(row[0]), "gradient": row[-1] == 1, "recomputed": row[-1] == 2,
            "host": {TO_HOST: "to", FROM_HOST: "from"}.get(row[-1], "")})

    def take(self, rows: npt.NDArray[Any]) -> Table:
        return Table(*(getattr(self, name)[rows] for name in TABLE_COLUMNS))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Table) and all(
            np.array_equal(getattr(self, name), getattr(other, name)) for name in TABLE_COLUMNS
        )

    __hash__ = None  # type: ignore[assignment]


TABLE_COLUMNS = tuple(f.name for f in fields(Table))


def make_table(size: int, **columns: Any) -> Table:
    """A table of ``size`` tasks; columns not given hold their default (0, or -1 for peer and value)."""
    defaults = {"peer": -1, "value": -1}
    return Table(*(
        np.broadcast_to(np.asarray(columns.get(name, defaults.get(name, 0)), dtype=np.int32), (size,))
        for name in TABLE_COLUMNS
    ))


def concat_tables(tables: Sequence[Table]) -> Table:
    """The rows of all tables in a row."""
    return Table(*(np.concatenate([getattr(t, name) for t in tables]) for name in TABLE_COLUMNS))


def sends(table: Table) -> npt.NDArray[np.bool_]:
    """Per task whether it stands in the copy-out lane of its device: REDUCE, and COPY unless it is from the host."""
    return np.asarray((table.kind == Kind.COPY) & (table.gradient != FROM_HOST) | (table.kind == Kind.REDUCE))


def arrives(table: Table) -> npt.NDArray[np.bool_]:
    """Per task whether it stands in the copy-in lane of its peer: COPY unless it is to the host."""
    return np.asarray((table.kind == Kind.COPY) & (table.gradient != TO_HOST))


class TaskView(Sequence[Task]):
    """A device's tasks, made when looked at."""

    def __init__(self, table: Table, ids: Column) -> None:
        self._table, self.ids = table, ids

    def __len__(self) -> int:
        return len(self.ids)

    @overload
    def __getitem__(self, index: int) -> Task: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Task]: ...
    def __getitem__(self, index: int | slice) -> Task | Sequence[Task]:
        if isinstance(index, slice):
            return TaskView(self._table, self.ids[index])
        return self._table.task(int(self.ids[index]))

    def __iter__(self) -> Iterator[Task]:
        return (self._table.task(int(i)) for i in self.ids)

    def __repr__(self) -> str:
        return f"({' '.join(map(str, self[:8]))}{' ...' if len(self) > 8 else ''})"


Lanes = tuple[Column, Column, Column]


@frozen(eq=False)
class Plan:
    """A compiled pipeline: what every device does, in order. See :func:`pipec.compile`.

    An asynchronous plan is laid out over ``minibatches`` minibatches, enough for its prologue, three steady periods
    and its epilogue; ``microbatches`` counts those of all of them, and ``weights`` names the rule that says which
    weight version a task reads. See :mod:`pipec.periods`.
    """

    graph: Graph
    chunks: tuple[Chunk, ...]
    devices: int
    microbatches: int
    schedule: str
    recompute: str
    update: str | None
    table: Table
    lanes: tuple[Lanes, ...]
    waits: Waits
    buffers: Buffers
    replicas: int = 1
    slices: int = 1
    costs: Costs | None = None
    recipe: Any = None  # how it was compiled, for the same plan with fewer microbatches; not part of its identity
    update_early: bool = False  # each stage updates right after its own last backward
    minibatches: int = 1
    weights: str = ""  # the weight rule of an asynchronous plan, as text
    data_parallel: int = 1  # replicas of the whole pipeline in other processes, which add up their gradients
    behind: tuple[int, ...] = ()  # of an asynchronous plan: per device the tasks that a step leaves to the next

    @property
    def asynchronous(self) -> bool:
        """True when minibatches follow one another without a flush, each stage updating on its own."""
        return bool(self.weights)

    @property
    def excerpt(self) -> bool:
        """True for one measured step of an asynchronous run: part of a plan, with buffers that live beyond it."""
        return self.minibatches > 1 and not self.asynchronous

    @property
    def minibatch(self) -> int:
        """Microbatches per minibatch."""
        return self.microbatches // self.minibatches

    @property
    def update_every(self) -> int:
        """Backwards of a stage that go into one of its updates: those of a minibatch, or as the rule says."""
        from pipec.rules import update_every

        return update_every(self.table, self.microbatches)

    def __reduce__(self) -> Any:
        """For pickle. A schedule that cannot be pickled (a lambda) is left out, as in a saved plan."""
        from pipec.files import picklable

        return Plan, tuple(
            picklable(getattr(self, item.name)) if item.name == "recipe" else getattr(self, item.name)
            for item in fields(Plan)
        )

    def __deepcopy__(self, memo: Any = None) -> Plan:
        return self  # nothing in it can change

    __copy__ = __deepcopy__

    @cached_property
    def training(self) -> bool:
        """False for a plan of forwards only."""
        kinds = self.table.kind
        return bool(((kinds >= Kind.BACKWARD) & (kinds <= Kind.BACKWARD_WEIGHT)).any())

    @property
    def tasks(self) -> tuple[TaskView, ...]:
        """Per device its tasks of all lanes in the order they are issued."""
        return tuple(TaskView(self.table, self.issue_order(d)) for d in range(self.devices))

    def compute(self, device: int) -> TaskView:
        """A device's compute tasks in order."""
        return TaskView(self.table, self.lanes[device][Lane.COMPUTE])

    def issue_order(self, device: int) -> Column:
        """Ids of a device's tasks on all lanes, in one order that keeps every lane's own."""
        return to_column(np.unique(np.concatenate(self.lanes[device])))

    def stage_device(self, stage: int) -> int:
        return next(chunk.device for chunk in self.chunks if stage in chunk.stages)

    def __len__(self) -> int:
        return len(self.table)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Plan):
            return NotImplemented
        plain = ("graph", "chunks", "devices", "microbatches", "schedule", "recompute", "update", "table", "waits",
                 "buffers", "replicas", "slices", "update_early", "data_parallel", "minibatches", "weights", "behind")
        return all(getattr(self, name) == getattr(other, name) for name in plain) and all(
            np.array_equal(a, b)
            for mine, theirs in zip(self.lanes, other.lanes, strict=True)
            for a, b in zip(mine, theirs, strict=True)
        )

    __hash__ = None  # type: ignore[assignment]

    def __str__(self) -> str:
        from pipec.text import format_plan

        return format_plan(self)

    def __repr__(self) -> str:
        return (
            f"<Plan {self.graph.name!r}: {self.schedule}, {self.devices} devices, {self.microbatches} microbatches, "
            f"{len(self.graph.stages)} stages, {len(self)} tasks>"
        )

    def verify(self, memory_limit: float | Activations | None = None) -> Report:
        """Prove the invariants of this plan again and report on each. Raises PlanError naming each that is broken."""
        from pipec.verify import verify

        return verify(self, memory_limit=memory_limit)

    def simulate(self, costs: Costs | None = None) -> Timeline:
        """When every task runs under ``costs`` (by default those it was compiled with, else one unit each)."""
        from pipec.simulate import simulate

        return simulate(self, costs)

    def draw(self, path: str | Path | None = None, **options: Any) -> Any:
        """Draw the simulated timeline, or with ``graph="stages"``/``"tasks"`` a dependency graph. See pipec.draw."""
        from pipec.render import draw_plan

        return draw_plan(self, path, **options)

    def save(self, path: str | Path) -> None:
        """Write the plan as JSON."""
        from pipec.files import save

        save(self, path)

    def to_torch_csv(self, path: str | Path | None = None) -> str:
        """The order as a CSV that PyTorch's pipelining loads, also written to ``path``. See :mod:`pipec.export`."""
        from pipec.export import to_torch_csv

        return to_torch_csv(self, path)

    @staticmethod
    def load(path: str | Path, schedule: str | Policy | None = None) -> Plan:
        """Read a plan written by :meth:`save`.

        Args:
            schedule: what it was compiled with, for one of your own: the file holds only its name and that of its
                weight rule.

        Raises:
            PlanError: the file is not there, holds no plan, or one of another schedule.
        """
        from pipec.compiler import scheduled
        from pipec.files import load

        return load(path) if schedule is None else scheduled(load(path), schedule)

    @staticmethod
    def parse(text: str, schedule: str | Policy | None = None) -> Plan:
        """The plan whose ``str`` is ``text``; ``schedule`` as for :meth:`load`."""
        from pipec.compiler import scheduled
        from pipec.text import parse_plan

        return parse_plan(text) if schedule is None else scheduled(parse_plan(text), schedule)
