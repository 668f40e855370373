"""Adversarial lanes: tasks run one by one in a hostile order, with traps on the memory that they hand over.

Submitted work is held. Whatever stands at the head of its lane and has nothing to wait for may run next; the adversary
chooses. By turns it draws at random, and it holds one task back while anything else can run: the order in which
whoever forgot to wait for that task is caught. Reading a value that was not written yet, or touching one that was
given back, raises RaceError with the task, its lane and what it should have waited for. Memory that nobody but the
plan holds is filled with NaN before it is given back.

The order of a step follows from the seed and the number of the step, so that what was found once is found again.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from pipec.errors import RaceError
from pipec.ir import TABLE_COLUMNS, Buffer, Kind, Plan
from pipec.runtime.channels import Channels
from pipec.runtime.executor import Device
from pipec.runtime.failure import Failure
from pipec.runtime.lanes import CopyingChannels, Turn, Turns, lane_name
from pipec.runtime.program import Op, Route, build_program
from pipec.runtime.transfer import tensors

Choice = Callable[[list[Turn]], Turn]  # which of the turns that may run is next


def at_random(seed: int | str) -> Choice:
    """Any of the turns, drawn."""
    return random.Random(seed).choice


def held_back(task: int, seed: int | str = 0) -> Choice:
    """Any turn but that of ``task`` while there is another."""
    draw = random.Random(seed)

    def choose(ready: list[Turn]) -> Turn:
        return draw.choice([turn for turn in ready if turn.op.task != task] or ready)

    return choose


class Adversarial:
    """Runs all lanes in the calling thread, task by task, in a hostile order that the plan allows."""

    def __init__(self, seed: int = 0, choose: Choice | None = None) -> None:
        """``choose``: the same adversary for every step, instead of one that follows from ``seed``."""
        self._seed, self._choose, self._steps = seed, choose, 0
        self._turns = Turns()
        self._memory: dict[int, Memory] = {}

    def run(self, devices: Sequence[Device], ops: Sequence[Sequence[Op]], channels: Channels) -> Failure | None:
        """Run to the end, or to the first task that raises."""
        plan = devices[0].step.plan
        turns = self._turns.of(plan, ops)
        memory = self._memory.setdefault(id(plan), Memory(plan, devices[0].step.places))
        traps = [_trapped(device, memory) for device in devices]
        for turn in legal_order(turns, self._choose or self._adversary(turns)):
            traps[turn.op.device].now = turn
            try:
                devices[turn.op.device].run((turn.op,))
            except BaseException as error:
                return Failure(turn.op, error)
            for trap in traps:
                trap.ran.add(turn.op.task)
        return None

    def _adversary(self, turns: list[Turn]) -> Choice:
        self._steps += 1
        seed = f"{self._seed} {self._steps}"
        if self._steps % 2:
            return at_random(seed)
        return held_back(random.Random(seed).choice(turns).op.task if turns else -1, seed)

    def channels(self, routes: tuple[Route, ...]) -> Channels | None:
        return CopyingChannels(routes)

    def close(self) -> None:
        """Nothing to close."""


def _trapped(device: Device, memory: Memory) -> Traps:
    """The slots of a device as traps, set at the first part of a step, or of an asynchronous run."""
    if not isinstance(device.store, Traps):
        device.store = Traps(memory, device.index, len(device.store))
    return device.store


def legal_order(turns: Sequence[Turn], choose: Choice) -> Any:
    """The turns one after another as ``choose`` picks them among those that lanes and waits allow."""
    lanes: dict[int, deque[Turn]] = {}
    for turn in turns:
        for lane in {turn.lane, turn.into} - {-1}:
            lanes.setdefault(lane, deque()).append(turn)
    left = {turn.op.task for turn in turns}
    while left:
        ready = [
            queue[0] for lane, queue in lanes.items()
            if queue and queue[0].lane == lane and (queue[0].into < 0 or lanes[queue[0].into][0] is queue[0])
            and not left.intersection(queue[0].waits)
        ]
        turn = choose(ready)
        for lane in {turn.lane, turn.into} - {-1}:
            lanes[lane].popleft()
        left.discard(turn.op.task)
        yield turn


# -- traps -------------------------------------------------------------------------------------------------------


class Held:
    """What a slot holds: its name in the plan, who writes it, and who gives it back."""

    __slots__ = ("free", "name", "value", "writers")

    def __init__(self, name: str, value: bool) -> None:
        self.name, self.value, self.free = name, value, -1
        self.writers: list[int] = []


VALUES = (Buffer.VALUE, Buffer.CARRY, Buffer.HOST, Buffer.FETCHED)


Places = Sequence[Mapping[tuple[int, int, int], int]]  # per device the slots of (Buffer, ref, piece)


class Memory:
    """What a plan's slots hold, worked out when it is first asked for."""

    def __init__(self, plan: Plan, places: Places | None = None) -> None:
        """``places``: the slots, where they are not those of the plan's program."""
        self.plan, self._places = plan, places

    @cached_property
    def held(self) -> list[dict[int, Held]]:
        """Per device the slots with values and gradients."""
        return what_slots_hold(self.plan, self._places)

    @cached_property
    def earlier(self) -> list[int]:
        """Per task of an asynchronous plan the same one of the minibatch before, -1 where there is none."""
        plan, table = self.plan, self.plan.table
        names = [name for name in TABLE_COLUMNS if name not in ("microbatch", "version", "group")]
        rows = list(zip(*(getattr(table, name).tolist() for name in names), strict=True))
        numbers = table.microbatch.tolist()
        found = {(row, number): task for task, (row, number) in enumerate(zip(rows, numbers, strict=True))}
        updates = plan.minibatch // plan.update_every
        by = [updates if kind == Kind.UPDATE else plan.minibatch for kind in table.kind.tolist()]
        return [found.get((row, number - back), -1) for row, number, back in zip(rows, numbers, by, strict=True)]


def what_slots_hold(plan: Plan, places: Places | None = None) -> list[dict[int, Held]]:
    """Per device the slots with values and gradients."""
    if places is None:
        places = [{key: slot for slot, key in enumerate(keys)} for keys in build_program(plan).keys]
    made: list[dict[int, Held]] = [{} for _ in places]
    buffers = plan.buffers
    piece = buffers.microbatch * plan.slices + buffers.slice
    columns = (buffers.kind, buffers.ref, piece, buffers.device, buffers.writer, buffers.free)
    rows = zip(*(column.tolist() for column in columns), strict=True)
    for number, (kind, ref, own, device, writer, free) in enumerate(rows):
        if kind not in (Buffer.ACTIVATION, Buffer.WEIGHT):  # versions of weights look after themselves
            slot = places[device][kind, ref, own]
            held = made[device].setdefault(slot, Held(buffers.token(number), kind in VALUES))
            held.writers.append(writer)
            held.free = max(held.free, free)
    return made


class Traps(list[Any]):
    """The slots of a device, which tell when one is touched at the wrong time."""

    def __init__(self, memory: Memory, device: int, size: int) -> None:
        super().__init__([None] * size)
        self.plan, self.held, self._memory = memory.plan, memory.held[device], memory
        self.freed: dict[int, Turn | None] = {}  # by slot the task that gave it back
        self.now: Turn | None = None
        self.ran: set[int] = set()

    def __getitem__(self, slot: Any) -> Any:
        found = list.__getitem__(self, slot)
        held = self.held.get(slot)
        if held is not None:
            if slot in self.freed:
                self._caught(f"touches {held.name}, which was given back by", self.freed[slot], late=True)
            last = self.now is not None and self.now.op.task == held.free
            if last or (held.value and found is None):
                missing = [task for task in held.writers if task not in self.ran]
                if missing or (held.value and found is None):
                    names = ", ".join(str(self.plan.table.task(task)) for task in missing or held.writers)
                    self._caught(f"reads {held.name} before it was written by {names}", None)
        return found

    def __setitem__(self, slot: Any, value: Any) -> None:
        held = self.held.get(slot)
        if held is not None:
            if value is None:
                remains = Remains(list.__getitem__(self, slot))
                list.__setitem__(self, slot, None)
                remains.poison()
                self.freed[slot] = self.now
                return
            if slot in self.freed:
                self._caught(f"writes {held.name}, which was given back by", self.freed[slot], late=True)
        list.__setitem__(self, slot, value)

    def __delitem__(self, places: Any) -> None:
        """An asynchronous run moves one minibatch on: all that is known of slots and tasks moves along."""
        by, row = places.stop, self.plan.microbatches
        super().__delitem__(places)
        self.freed = {slot - by: None for slot in self.freed if slot % row >= by}
        self.ran = {self._memory.earlier[task] for task in self.ran} - {-1}

    def _caught(self, what: str, other: Turn | None, late: bool = False) -> None:
        told = f"{self._name(self.now)} {what}"
        if late:
            told += f" {self._name(other)}"
        advice = "the later must wait for the earlier" if late else "it must wait for that"
        raise RaceError(f"{told}; nothing in the plan keeps them in order, {advice}")

    def _name(self, turn: Turn | None) -> str:
        if turn is None:
            return "a task of an earlier step"
        return f"{self.plan.table.task(turn.op.task)} ({lane_name(turn.lane)})"


class Remains:
    """The memory of a payload; once the payload is gone, what nobody else holds can be filled."""

    def __init__(self, payload: Any) -> None:
        dense = [t for t in tensors(payload) if t.layout is torch.strided and not t.is_inference()]
        self._storages = [(tensor.untyped_storage(), tensor.dtype) for tensor in dense]

    def poison(self) -> int:
        """Fill it: floats with NaN, integers with their least value. Returns how many tensors' memory it filled."""
        count = 0
        for storage, dtype in self._storages:
            if torch._C._storage_Use_Count(storage._cdata) == 1:
                _fill(torch.empty(0, dtype=dtype, device=storage.device).set_(storage))
                count += 1
        return count


@torch.no_grad()
def _fill(flat: Tensor) -> None:
    if flat.dtype.is_floating_point or flat.dtype.is_complex:
        flat.fill_(float("nan"))
    elif flat.dtype is torch.bool:
        flat.fill_(True)
    else:
        flat.fill_(torch.iinfo(flat.dtype).min)
