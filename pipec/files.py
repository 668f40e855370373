"""A plan as a JSON file, and back. What a file says is checked here value by value, and by ``verify`` as a whole."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from attrs import asdict

from pipec.costs import Costs
from pipec.errors import PlanError, SpecError
from pipec.ir import BUFFER_COLUMNS, TABLE_COLUMNS, Buffers, Chunk, Column, Lane, Lanes, Plan, Table, Waits
from pipec.paths import read_text, write_text
from pipec.spec import Graph, InputInfo, StageInfo, ValueInfo
from pipec.verify.form import check_form

FORMAT = 1
PLAIN = ("devices", "microbatches", "schedule", "recompute", "update", "replicas", "slices", "update_early")
ASYNCHRONOUS = ("minibatches", "weights")  # written for asynchronous plans only, so that older readers read all others
T = TypeVar("T")


def to_dict(plan: Plan) -> dict[str, Any]:
    """A plan as plain Python values, for JSON."""
    made: dict[str, Any] = {"format": FORMAT} | {name: getattr(plan, name) for name in PLAIN}
    if plan.asynchronous:
        made |= {name: getattr(plan, name) for name in ASYNCHRONOUS}
    if plan.data_parallel > 1:
        made["data_parallel"] = plan.data_parallel
    if plan.behind:
        made["behind"] = list(plan.behind)
    made["graph"] = asdict(plan.graph)
    made["chunks"] = [asdict(chunk) for chunk in plan.chunks]
    made["table"] = {name: getattr(plan.table, name).tolist() for name in TABLE_COLUMNS}
    made["lanes"] = [[lane.tolist() for lane in lanes] for lanes in plan.lanes]
    made["waits"] = {"start": plan.waits.start.tolist(), "ids": plan.waits.ids.tolist()}
    made["buffers"] = {name: getattr(plan.buffers, name).tolist() for name in BUFFER_COLUMNS}
    made["costs"] = None if plan.costs is None else plan.costs.to_dict()
    return made


def from_dict(given: Any) -> Plan:
    """The plan that :func:`to_dict` wrote.

    Raises:
        PlanError: it is no plan, or one of another format, naming what cannot be read or does not exist.
    """
    if not isinstance(given, dict) or given.get("format") != FORMAT:
        raise PlanError(f"this is no plan of format {FORMAT}")
    at = _At("the saved plan", given)
    graph = at["graph"]
    devices, microbatches, replicas, slices = (
        at[name].whole(1) for name in ("devices", "microbatches", "replicas", "slices")
    )
    update = at["update"]
    try:
        costs = None if at["costs"].value is None else Costs(**at["costs"].all(dict))
    except (TypeError, SpecError, AttributeError) as error:
        raise PlanError(f"the saved plan's costs cannot be read: {error}") from None
    plan = Plan(
        Graph(
            graph["name"].all(str),
            graph["stages"].each(lambda s: StageInfo(
                s["name"].all(str), s["backward"].all(bool), s["loss"].all(bool), s["ordered"].all(bool),
                s["reads"].wholes(), s["gives"].wholes(), s["carry"].all(bool),
                s["tied"].wholes() if "tied" in s.all(dict) else (),
            )),
            graph["values"].each(lambda v: ValueInfo(
                v["name"].all(str), v["producer"].whole(), v["readers"].wholes(), v["skips"].wholes(),
                v["host"].wholes() if "host" in v.all(dict) else (),
            )),
            graph["inputs"].each(lambda i: InputInfo(i["name"].all(str), i["readers"].wholes())),
        ),
        at["chunks"].each(lambda c: Chunk(c["index"].whole(), c["device"].whole(), c["stages"].wholes())),
        devices, microbatches, at["schedule"].all(str), at["recompute"].all(str),
        None if update.value is None else update.all(str),
        Table(*(at["table"][name].column() for name in TABLE_COLUMNS)),
        at["lanes"].each(_lanes),
        Waits(at["waits"]["start"].column(), at["waits"]["ids"].column()),
        Buffers(*(at["buffers"][name].column() for name in BUFFER_COLUMNS)),
        replicas, slices, costs, update_early=at["update_early"].all(bool),
        minibatches=at["minibatches"].whole(1) if "minibatches" in given else 1,
        weights=at["weights"].all(str) if "weights" in given else "",
        data_parallel=at["data_parallel"].whole(1) if "data_parallel" in given else 1,
        behind=at["behind"].wholes() if "behind" in given else (),
    )
    check_form(plan)
    return plan


def _lanes(at: _At) -> Lanes:
    lanes = at.each(lambda lane: lane.column())
    if len(lanes) != len(Lane):
        raise PlanError(f"{at.name}: expected {len(Lane)} lanes, got {len(lanes)}")
    return lanes[Lane.COMPUTE], lanes[Lane.OUT], lanes[Lane.IN]


class _At:
    """A place in a file that knows its name, for errors."""

    def __init__(self, name: str, value: Any) -> None:
        self.name, self.value = name, value

    def all(self, kind: type[T]) -> T:
        """The value, which must be of ``kind``."""
        if not isinstance(self.value, kind):
            raise PlanError(f"{self.name}: expected {kind.__name__}, got {str(self.value)[:40]!r}")
        return self.value

    def __getitem__(self, key: str) -> _At:
        inside = self.all(dict)
        if key not in inside:
            raise PlanError(f"{self.name} lacks {key!r}")
        return _At(f"{self.name}: {key}", inside[key])

    def each(self, read: Callable[[_At], T]) -> tuple[T, ...]:
        return tuple(read(_At(f"{self.name}[{i}]", item)) for i, item in enumerate(self.all(list)))

    def whole(self, least: int = 0) -> int:
        value = self.all(int)
        if isinstance(value, bool) or not least <= value < 2**31:
            raise PlanError(f"{self.name}: expected a whole number of at least {least}, got {value!r}")
        return value

    def wholes(self) -> tuple[int, ...]:
        return self.each(lambda item: item.whole())

    def column(self) -> Column:
        """A list of whole numbers as a column."""
        value = self.all(list)
        if not all(type(item) is int and -(2**31) <= item < 2**31 for item in value):
            raise PlanError(f"{self.name}: expected a list of whole numbers")
        return np.asarray(value, np.int32)


def picklable(value: Any) -> Any:
    """``value``, or None where pickle cannot take it."""
    try:
        pickle.dumps(value)
    except Exception:  # whatever a user's object raises
        return None
    return value


def save(plan: Plan, path: str | Path) -> None:
    """Write a plan as JSON. Raises PlanError when that fails."""
    write_text(path, json.dumps(to_dict(plan)), PlanError)


def load(path: str | Path) -> Plan:
    """Read a plan that :func:`save` wrote. Raises PlanError when the file is not there or holds none."""
    text = read_text(path, PlanError)
    try:
        given = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise PlanError(f"{path} is no JSON: {error}") from None
    return from_dict(given)
