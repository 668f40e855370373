"""The printed form of a plan, and back: text that a person can read and a test can pin."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from typing import Any

import numpy as np

from pipec.errors import PlanError
from pipec.ir import (
    BUFFER_COLUMNS,
    FROM_HOST,
    LETTERS,
    TABLE_COLUMNS,
    TO_HOST,
    Buffer,
    Buffers,
    Chunk,
    Kind,
    Lane,
    Plan,
    Waits,
    make_table,
)
from pipec.passes.draft import to_csr
from pipec.spec import Graph, InputInfo, StageInfo, ValueInfo
from pipec.verify.form import check_form

EXCERPT = "excerpt of "  # begins the text of one measured step


def quote(name: str) -> str:
    """A name as it is when it is plain, else quoted."""
    return name if re.fullmatch(r"[\w.\-\[\]]+", name) and not name.isdigit() else json.dumps(name)


def format_plan(plan: Plan) -> str:
    """The plan as text: header, stages, values, then every device's tasks with waits, new and freed buffers."""
    update = "none" if plan.update is None else plan.update
    lines = [
        f"{EXCERPT if plan.excerpt else ''}plan {quote(plan.graph.name)} schedule={quote(plan.schedule)} "
        f"devices={plan.devices} "
        f"microbatches={plan.microbatches} recompute={quote(plan.recompute)} update={update}"
        + (" update_early=yes" if plan.update_early else "")
        + (f" data_parallel={plan.data_parallel}" if plan.data_parallel > 1 else "")
        + (f" replicas={plan.replicas}" if plan.replicas > 1 else "")
        + (f" slices={plan.slices}" if plan.slices > 1 else "")
        + (f" minibatches={plan.minibatches} rule={quote(plan.weights)}" if plan.asynchronous else "")
        + (f" behind={','.join(map(str, plan.behind))}" if plan.behind else "")
    ]
    owner = {s: chunk for chunk in plan.chunks for s in chunk.stages}
    for number, stage in enumerate(plan.graph.stages):
        flags = [name for name in ("loss", "ordered", "carry") if getattr(stage, name)]
        flags += [] if stage.backward else ["forward-only"]
        flags += [f"tied-{other}" for other in stage.tied]
        lines.append(
            f"stage {number} {quote(stage.name)} chunk={owner[number].index} device={owner[number].device}"
            + "".join(f" {flag}" for flag in flags)
        )
    for item in plan.graph.inputs:
        lines.append(f"input {quote(item.name)} -> {_readers(item.readers)}")
    for number, value in enumerate(plan.graph.values):
        marks = f" skip {_readers(value.skips)}" if value.skips else ""
        marks += f" host {_readers(value.host)}" if value.host else ""
        lines.append(f"v{number} {quote(value.name)}: {value.producer} -> {_readers(value.readers)}{marks}")
    new, free = _by_task(plan)
    for device in range(plan.devices):
        lines.append(f"device {device}")
        width = len(str(len(plan.table)))
        for task in plan.issue_order(device).tolist():
            lines.append(_task_line(plan, device, task, width, new, free))
    return "\n".join(lines) + "\n"


def _readers(stages: tuple[int, ...]) -> str:
    return ",".join(map(str, stages)) or "none"


def _by_task(plan: Plan) -> tuple[dict[tuple[int, int], list[str]], dict[tuple[int, int], list[str]]]:
    new: dict[tuple[int, int], list[str]] = defaultdict(list)
    free: dict[tuple[int, int], list[str]] = defaultdict(list)
    for number in range(len(plan.buffers)):
        token, device = plan.buffers.token(number), int(plan.buffers.device[number])
        writer = int(plan.buffers.writer[number])
        gradient = plan.buffers.kind[number] == Buffer.GRADIENT and writer >= 0  # in an excerpt it may stand before it
        if gradient and plan.table.kind[writer] == Kind.COPY:
            token += f":{plan.table.device[writer]}"  # apart from this device's own gradient of the value
        last = int(plan.buffers.free[number])
        new[writer, device].append(token)  # a copy from the host stands only where it arrives
        free[last, int(plan.table.peer[last]) if plan.buffers.kind[number] == Buffer.HOST else device].append(token)
    return new, free


def _task_line(plan: Plan, device: int, task: int, width: int, new: Any, free: Any) -> str:
    row = plan.table.task(task)
    own_side = (row.peer if row.host else row.device) == device
    line = f"  %{task:<{width}} {row!s:<12}"
    if row.kind is Kind.COPY:
        line += " out" if own_side and row.host != "from" else " in "
    elif row.kind is Kind.REDUCE:
        line += " out"
    if own_side and len(waits := plan.waits.of(task)):
        line += " wait " + " ".join(f"%{w}" for w in waits)
    if own_side and row.version:
        line += f" weights {row.version}"
    if own_side and row.group:
        line += f" group {row.group}"
    for word, tokens in (("new", new), ("free", free)):
        if found := tokens.get((task, device)):
            line += f" {word} " + " ".join(found)
    return line.rstrip()


_HEAD = re.compile(r'plan (?P<name>"(?:[^"\\]|\\.)*"|\S+) (?P<rest>.*)')
_NAME = r'("(?:[^"\\]|\\.)*"|[\w.\-\[\]]+)'
_STAGE = re.compile(rf"stage ([0-9]+) {_NAME} chunk=([0-9]+) device=([0-9]+)((?: [\w-]+)*)")
_INPUT = re.compile(rf"input {_NAME} -> (\S+)")
_VALUE = re.compile(rf"v([0-9]+) {_NAME}: ([0-9]+) -> (\S+)(?: skip (\S+))?(?: host (\S+))?")
_ITEM = r"([0-9]+)(?:\.([0-9]+))?(?:~([0-9]+))?"
_TASK = re.compile(
    rf"%([0-9]+)\s+(?:(?P<copy>[dr]?v([0-9]+)\[{_ITEM}\]:([0-9]+|host)>([0-9]+|host))"
    rf"|(?P<task>([0-9]*)([FRBIWGU]){_ITEM}))(?P<rest>.*)"
)
_BUFFER = re.compile(rf"(dv|dc|rv|hv|fv|v|a|w|c)([0-9]+)\[{_ITEM}\](?::[0-9]+)?")


def parse_plan(text: str) -> Plan:
    """Read the text of a plan back.

    Raises:
        PlanError: naming the first line that cannot be read, or every number that names nothing.
    """
    if not isinstance(text, str):
        raise PlanError(f"expected the text of a plan, got {type(text).__name__}")
    lines = [line for line in text.splitlines() if line.strip()]
    if lines and lines[0].strip().startswith(EXCERPT):
        raise PlanError(
            "this is the text of an excerpt, one measured step of an asynchronous run: it frees what earlier steps "
            "made and leaves buffers to later ones, so it cannot be read back; print the whole plan, run.plan"
        )
    head = _HEAD.fullmatch(lines[0].strip()) if lines else None
    if head is None:
        raise PlanError("a plan's text begins with a line 'plan NAME schedule=...'")
    options = dict(part.split("=", 1) for part in re.findall(r'\w+=(?:"(?:[^"\\]|\\.)*"|\S+)', head["rest"]))
    body = _Body()
    for line in lines[1:]:
        try:
            body.read(line.strip())
        except (ValueError, KeyError) as error:
            raise PlanError(f"cannot read the plan's line {line.strip()!r}: {error}") from None
    try:
        plan = body.plan(_unquote(head["name"]), options)
    except KeyError as error:
        raise PlanError(f"the plan's text lacks {error}") from None
    except OverflowError:
        raise PlanError("the plan's text holds a number that is too large") from None
    except ValueError as error:
        raise PlanError(f"cannot read the plan's first line: {error}") from None
    check_form(plan)
    return plan


def _unquote(text: str) -> str:
    return str(json.loads(text)) if text.startswith('"') else text


def _ints(text: str | None) -> tuple[int, ...]:
    return () if text in (None, "none") else tuple(int(part) for part in str(text).split(","))


class _Body:
    """What the lines after the first say."""

    def __init__(self) -> None:
        self.stages: list[tuple[str, int, int, list[str]]] = []
        self.inputs: list[InputInfo] = []
        self.values: list[ValueInfo] = []
        self.device = -1
        self.rows: dict[int, dict[str, int]] = {}
        self.lanes: dict[int, tuple[list[int], list[int], list[int]]] = {}
        self.seen: set[tuple[int, int]] = set()
        self.waits: list[tuple[int, int]] = []
        self.new: list[tuple[int, str, int]] = []  # device, token, task
        self.free: dict[tuple[int, str], list[int]] = defaultdict(list)

    def read(self, line: str) -> None:
        if match := re.fullmatch(r"device ([0-9]+)", line):
            self.device = int(match[1])
            if self.device in self.lanes:
                raise ValueError("the device has a list already")
            self.lanes[self.device] = ([], [], [])
        elif match := _STAGE.fullmatch(line):
            if int(match[1]) != len(self.stages):
                raise ValueError(f"stage {match[1]} stands where stage {len(self.stages)} belongs")
            self.stages.append((_unquote(match[2]), int(match[3]), int(match[4]), match[5].split()))
        elif match := _INPUT.fullmatch(line):
            self.inputs.append(InputInfo(_unquote(match[1]), _ints(match[2])))
        elif match := _VALUE.fullmatch(line):
            if int(match[1]) != len(self.values):
                raise ValueError(f"v{match[1]} stands where v{len(self.values)} belongs")
            self.values.append(ValueInfo(_unquote(match[2]), int(match[3]), _ints(match[4]), _ints(match[5]),
                                         _ints(match[6])))
        elif match := _TASK.fullmatch(line):
            self._task(match)
        else:
            raise ValueError("it is neither a stage, an input, a value, a device nor a task")

    def _task(self, match: re.Match[str]) -> None:
        task = int(match[1])
        lane, here = Lane.COMPUTE, self.device  # where it is written in full
        if self.device < 0:
            raise ValueError("it stands before any 'device' line")
        if match["copy"]:
            value, item = int(match[3]), match.group(4, 5, 6)
            if value >= len(self.values):
                raise ValueError(f"no value v{value} is declared")
            device, peer, carries = self._route(match["copy"][0], value, match[7], match[8])
            row = {"kind": Kind.COPY, "stage": self.values[value].producer, "value": value, "device": device,
                   "peer": peer, "gradient": carries}
            lane = Lane.OUT if device == self.device and carries != FROM_HOST else Lane.IN
            here = peer if carries == FROM_HOST else device
        else:
            item = match.group(12, 13, 14)
            if LETTERS[match[11]] is Kind.REDUCE:
                lane = Lane.OUT
            row = {"kind": LETTERS[match[11]], "stage": int(match[10]) if match[10] else -1, "device": self.device}
        row |= dict(zip(("microbatch", "slice", "replica"), (int(part or 0) for part in item), strict=True))
        if (task, lane) in self.seen:
            raise ValueError(f"the task %{task} stands twice on a lane")
        self.seen.add((task, lane))
        self.lanes[self.device][lane].append(task)
        word = ""
        own = here == self.device
        for part in match["rest"].split():
            if part in ("out", "in", "wait", "weights", "group", "new", "free"):
                word = part
            elif word == "wait":
                self.waits.append((task, int(part.lstrip("%"))))
            elif word in ("weights", "group"):
                row["version" if word == "weights" else "group"] = int(part)
            elif word == "new":
                self.new.append((self.device, part, task))
            elif word == "free":
                self.free[self.device, part].append(task)
            else:
                raise ValueError(f"{part!r} is not understood")
        if own:
            self.rows[task] = row

    def _route(self, letter: str, value: int, source: str, target: str) -> tuple[int, int, int]:
        """Device, peer and what is carried of a copy."""
        if "host" not in (source, target):
            return int(source), int(target), "vdr".index(letter)
        if letter != "v" or source == target:
            raise ValueError("only a value goes to host memory or comes back from there")
        if target == "host":
            return int(source), int(source), TO_HOST
        producer = self.values[value].producer
        if producer >= len(self.stages):
            raise ValueError(f"v{value} is made by stage {producer}, which is not declared")
        return self.stages[producer][2], int(target), FROM_HOST

    def plan(self, name: str, options: dict[str, str]) -> Plan:
        size = max(self.rows, default=-1) + 1
        if size != len(self.rows):  # a number may be huge; what is allocated follows what the text holds
            raise PlanError("the plan's tasks are not numbered %0, %1, ... without gaps")
        table = make_table(size, **{
            column: [self.rows[i].get(column, -1 if column in ("peer", "value") else 0) for i in range(size)]
            for column in TABLE_COLUMNS
        })
        waits = np.asarray(self.waits, np.int64).reshape(-1, 2)
        bad = [w for pair in self.waits for w in pair if w >= size]
        if bad:
            raise PlanError(f"the plan waits for %{bad[0]}, which it does not hold")
        devices = int(options["devices"])
        for option in ("devices", "microbatches", "replicas", "slices", "minibatches", "data_parallel"):
            if int(options.get(option, 1)) < 1:
                raise PlanError(f"the plan's text says {option}={options[option]}; there is at least one")
        stray = [d for d in self.lanes if d >= devices]
        if stray:
            raise PlanError(f"device {stray[0]} of the plan's text is not one of 0..{devices - 1}")
        if devices > len(self.lanes):
            raise PlanError(f"the plan's text has lists for {len(self.lanes)} devices, but devices={devices}")
        lanes = tuple(
            tuple(np.asarray(lane, np.int32) for lane in self.lanes.get(d, ([], [], []))) for d in range(devices)
        )
        update = options["update"]
        return Plan(
            self._graph(name), self._chunks(), devices, int(options["microbatches"]), _unquote(options["schedule"]),
            _unquote(options["recompute"]), None if update == "none" else update, table, lanes,  # type: ignore[arg-type]
            Waits(*to_csr((waits[:, 0], waits[:, 1]), size)), self._buffers(), int(options.get("replicas", 1)),
            int(options.get("slices", 1)), update_early=options.get("update_early") == "yes",
            minibatches=int(options.get("minibatches", 1)), weights=_unquote(options.get("rule", '""')),
            data_parallel=int(options.get("data_parallel", 1)),
            behind=tuple(int(count) for count in options["behind"].split(",")) if "behind" in options else (),
        )

    def _chunks(self) -> tuple[Chunk, ...]:
        made: dict[int, tuple[int, list[int]]] = {}
        for number, (_, chunk, device, _flags) in enumerate(self.stages):
            made.setdefault(chunk, (device, []))[1].append(number)
        return tuple(Chunk(index, device, tuple(stages)) for index, (device, stages) in sorted(made.items()))

    def _graph(self, name: str) -> Graph:
        stages = tuple(
            StageInfo(
                stage, "forward-only" not in flags, "loss" in flags, "ordered" in flags,
                tuple(v for v, info in enumerate(self.values) if number in info.readers),
                tuple(v for v, info in enumerate(self.values) if info.producer == number),
                "carry" in flags,
                tuple(int(flag[5:]) for flag in flags if flag.startswith("tied-")),
            )
            for number, (stage, _, _, flags) in enumerate(self.stages)
        )
        return Graph(name, stages, tuple(self.values), tuple(self.inputs))

    def _buffers(self) -> Buffers:
        rows = []
        letters = {kind.letter: kind for kind in Buffer}
        for device, token, writer in self.new:
            match = _BUFFER.fullmatch(token)
            if match is None:
                raise PlanError(f"cannot read the buffer {token!r} of the plan")
            freed = self.free[device, token]
            if not freed and match[1] == Buffer.HOST.letter:
                freed = next((tasks for (_, other), tasks in self.free.items() if other == token and tasks), freed)
            if not freed:
                raise PlanError(f"the buffer {token!r} on device {device} is never freed")
            microbatch, slice_, replica = (int(part or 0) for part in match.group(3, 4, 5))
            rows.append((letters[match[1]], int(match[2]), replica, microbatch, slice_, device, writer, freed.pop(0)))
        columns = np.asarray(rows, np.int64).reshape(-1, len(BUFFER_COLUMNS)).T
        order = np.lexsort((columns[1], columns[0], columns[6]))
        return Buffers(*(column[order] for column in columns))
