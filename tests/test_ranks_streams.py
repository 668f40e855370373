"""Ranks on GPUs that are not there: what they call is written down and proved, and their numbers are the plain loop's.

Real processes, with gloo where NCCL would be; see fake_gpus.py.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fake_gpus import FakeGpus, on_gpus
from models import chain, data
from test_lanes import skipping
from test_ranks_numbers import differences
from test_streams import order_of
from torch.utils._python_dispatch import TorchDispatchMode

import pipec
from pipec.runtime.distributed import order as orders
from pipec.runtime.distributed import ordered
from pipec.runtime.distributed.carriers import Wired
from pipec.runtime.distributed.order import check_orders
from pipec.runtime.distributed.ordered import OrderedChannels
from pipec.runtime.distributed.stream_proof import part_problems, rank_problems
from pipec.runtime.distributed.streams import RankStreams
from pipec.runtime.program import build_program
from pipec.runtime.stream_api import Call, Recorder

# -- the calls are right ----------------------------------------------------------------------------------------------


def calls_of(rank: int, how: str, net: pipec.Pipeline, plan: Any, steps: int = 2, rows: int = 12) -> list[list[Call]]:
    """The calls of every step but the first, in which forms are new and go by way of the hosts."""
    with on_gpus(how), pipec.Runner(net, plan) as run:
        found = []
        for step in range(steps):
            FakeGpus.made.calls()
            run.step(**data(rows, step))
            found.append(FakeGpus.made.calls())
    return found[1:]


def proved(rank: int, size: int, how: str, cases: list[dict[str, Any]]) -> list[list[str]]:
    made = []
    for case in cases:
        net = skipping() if size == 2 else chain(2 * size)
        plan = pipec.compile(net, size, 6, **case)
        made.append([text for calls in calls_of(rank, how, net, plan) for text in rank_problems(plan, calls, rank)])
    return made


CASES: list[dict[str, Any]] = [
    {"schedule": "gpipe"}, {"schedule": "1f1b", "recompute": "always"}, {"schedule": "zb-h1"}, {"schedule": "zb-v"},
    {"schedule": "1f1b", "placement": "looped"},
]


@pytest.mark.parametrize("how", ["wired", "staged"])
def test_the_calls_of_every_rank_are_right(how: str, crew2: Any, crew4: Any) -> None:
    """Tasks and transfers in the plan's order, readers after transfers, memory alive until they have ended; on a wire
    the host waits for nothing inside a step."""
    assert crew2(proved, 2, how, CASES[:3]) == [[[]] * 3] * 2
    assert crew4(proved, 4, how, CASES) == [[[]] * 5] * 4


READS = ("aten::_local_scalar_dense", "aten::equal", "aten::nonzero", "aten::is_nonzero", "aten::_unique2")


class Reads(TorchDispatchMode):
    """Operators that would let the host wait for a device."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.name().split(".")[0] in READS:
            self.seen.append(func.name())
        return func(*args, **(kwargs or {}))


def read(rank: int, how: str) -> list[str]:
    """What the tasks of a step read from the device: nothing, once the forms of values are known."""
    modes: list[Reads] = []
    right = RankStreams.run

    def run(self: RankStreams, *args: Any) -> None:
        with Reads() as mode:
            right(self, *args)
        modes.append(mode)

    net = skipping()
    RankStreams.run = run  # type: ignore[method-assign]
    try:
        with on_gpus(how), pipec.Runner(net, pipec.compile(net, 2, 4, "zb-h1", data_parallel=2)) as made:
            for _ in range(3):
                made.step(**data(8))
    finally:
        RankStreams.run = right  # type: ignore[method-assign]
    assert len(modes) == 3
    return [name for mode in modes[1:] for name in mode.seen]


@pytest.mark.parametrize("how", ["wired", "staged"])
def test_no_operator_of_a_step_reads_from_the_device(how: str, crew4: Any) -> None:
    assert crew4(read, how) == [[]] * 4


def room_made(rank: int, schedule: str) -> tuple[int, int]:
    """The most messages there was room for at a time, and the most groups that were held."""
    most = [0, 0]

    class Counted(Wired):
        def issue(self, legs: Any) -> None:
            super().issue(legs)
            most[:] = max(most[0], len(self._coming)), max(most[1], sum(map(len, self._groups.values())))

    import pipec.runtime.distributed.gpu_ranks as module

    net = chain(4)
    module.Wired = Counted  # type: ignore[misc]
    try:
        with on_gpus("wired"), pipec.Runner(net, pipec.compile(net, 2, 64, schedule)) as run:
            for _ in range(2):
                run.step(**data(64))
    finally:
        module.Wired = Wired  # type: ignore[misc]
    return most[0], most[1]


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_memory_for_messages_does_not_grow_with_the_microbatches(schedule: str, crew2: Any) -> None:
    for coming, held in crew2(room_made, schedule):
        assert 0 < coming <= ordered.AHEAD + 1
        assert held <= ordered.HELD + ordered.AHEAD + 1


def orders_issued(rank: int, schedule: str) -> Any:
    """What was issued in the second step, and its names on the wire."""
    made: list[OrderedChannels] = []

    class Noted(OrderedChannels):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            made.append(self)

    import pipec.runtime.distributed.gpu_ranks as module

    net = chain(8)
    plan = pipec.compile(net, 4, 8, schedule)
    before, module.OrderedChannels = module.OrderedChannels, Noted  # type: ignore[misc]
    try:
        with on_gpus("wired"), pipec.Runner(net, plan) as run:
            run.step(**data(16))
            FakeGpus.made.issued.clear()
            run.step(**data(16))
    finally:
        module.OrderedChannels = before  # type: ignore[misc]
    return made[-1].issued, FakeGpus.made.issued


@pytest.mark.parametrize("schedule", ["1f1b", "zb-v", "dualpipe-v"])
def test_both_ends_issue_the_same_transfers_in_the_same_order_and_groups(schedule: str, crew4: Any) -> None:
    found = crew4(orders_issued, schedule)
    assert check_orders([tuple(issued) for issued, _ in found]) is None
    grouped = 0
    for rank, (issued, names) in enumerate(found):
        told = [tuple(f"{one.route[0]}>{one.route[1]}" for one in group) for group in issued]
        assert told == [tuple(name.split(":")[1] for name in group) for group in names]
        for other in range(rank + 1, 4):
            both = [[group for group in own if any(f"{a}>{b}" in name for name in group for a, b in (
                (rank, other), (other, rank)))] for own in (names, found[other][1])]
            assert both[0] == both[1]
        for group in issued:
            assert len({frozenset(one.route) for one in group}) == 1  # to and fro between two ranks, never more
            assert len({one.route for one in group}) == len(group) <= 2
            grouped += len(group) == 2
    assert grouped >= 10


def sums_issued(rank: int, how: dict[str, Any]) -> tuple[list[tuple[str, ...]], list[str]]:
    """Two replicas of two devices: what each wire was given, and all of it in the order of the calls."""
    net = chain(4)
    with on_gpus("wired"), pipec.Runner(net, pipec.compile(net, 2, 4, data_parallel=2, **how)) as run:
        run.step(**data(8))
        FakeGpus.made.issued.clear()
        FakeGpus.made.calls()
        run.step(**data(8))
        calls = FakeGpus.made.calls()
    return [name for name in FakeGpus.made.issued if name[0].startswith("sum")], [
        call.what for call in calls if call.kind == "run" and call.stream.startswith(("wire", "sums"))
    ]


@pytest.mark.parametrize("how", [{"schedule": "zb-h1"}, {"schedule": "1f1b", "placement": "looped"}])
def test_sums_over_replicas_have_places_in_the_one_order_of_a_rank(how: dict[str, Any], crew4: Any) -> None:
    found = crew4(sums_issued, how)
    plan = pipec.compile(chain(4), 2, 4, data_parallel=2, **how)
    rows = orders.orders_of(build_program(plan).ops, 2)
    for device in (0, 1):
        (sums, calls), other = found[device], found[device + 2]
        assert (sums, calls) == other  # both replicas alike
        stages = [int(plan.table.stage[one.task]) for group in rows[device] for one in group if one.route[1] < 0]
        assert sums == [(f"sum 0 of {stage}",) for stage in stages]
        expected = [f"sum 0 of {plan.table.stage[one.task]}" if one.route[1] < 0 else str(plan.table.task(one.task))
                    for group in rows[device] for one in group]
        assert calls == expected
        if device and "placement" in how:  # one is begun before values travel for the last time
            assert not all(name.startswith("sum") for name in calls[-2:])


def overlapping(rank: int, how: str, name: str) -> list[str]:
    net, found = chain(3), []
    plan = pipec.compile(net, 2, 4, name, update="stage")
    with on_gpus(how), pipec.Runner(net, plan, optimizer=lambda p: torch.optim.SGD(p, 0.1)) as run:
        for step in range(5):
            FakeGpus.made.calls()
            run.step(**data(8, step))
            found += part_problems(FakeGpus.made.calls()) if step > 2 else []  # forms are known by then
        FakeGpus.made.calls()
        run.flush()
        return found + part_problems(FakeGpus.made.calls())


@pytest.mark.parametrize("how", ["wired", "staged"])
def test_the_calls_of_asynchronous_steps_are_right(how: str, crew2: Any) -> None:
    for name in ("pipedream", "pipemare"):
        assert crew2(overlapping, how, name) == [[]] * 2


def mutants(rank: int, schedule: str) -> tuple[int, list[str]]:
    """How many waits the proof misses one by one, and those that nobody misses although they order something."""
    net = chain(4)
    plan = pipec.compile(net, 2, 4, schedule)
    (calls,) = calls_of(rank, "wired", net, plan, rows=8)
    assert rank_problems(plan, calls, rank) == []
    needed, left = 0, []
    for number, call in enumerate(calls):
        if call.kind == "wait":
            mutant = calls[:number] + calls[number + 1 :]
            if rank_problems(plan, mutant, rank):
                needed += 1
            elif order_of(mutant) != order_of(calls):
                left.append(str(call))
    return needed, left


def test_every_wait_counts(crew2: Any) -> None:
    """Without any one of its waits the proof fails, unless others imply it, or it is for inputs of the caller's."""
    for needed, left in crew2(mutants, "1f1b"):
        assert needed >= 8
        assert all("in " in text for text in left), left


MISTAKES: dict[str, str] = {
    "a host that waits": "the host waits for",
    "a transfer twice": "runs 2 times on wire 0-1, not once",
    "a task left out": "runs 0 times on caller, not once",
    "transfers exchanged": "the transfers of device 0 are in another order than the plan's",
    "memory given back at once": "takes back",
    "an early end": "the part ends before",
}


def mistaken(rank: int) -> dict[str, list[str]]:
    net = chain(4)
    plan = pipec.compile(net, 2, 4, "gpipe")
    (calls,) = calls_of(rank, "wired", net, plan, rows=8)
    if rank:
        return {}
    first, second = (n for n, c in enumerate(calls) if c.what in ("v1[0]:0>1", "v1[1]:0>1") and c.stream == "wire 0-1")
    swapped = list(calls)
    swapped[first], swapped[second] = calls[second], calls[first]
    early = next(n for n, c in enumerate(calls) if c.kind == "free")
    looks = [n for n, c in enumerate(calls) if c.kind == "past"]
    made = {
        "a host that waits": [*calls[:5], Call("wait", "host", "e1"), *calls[5:]],
        "a transfer twice": [*calls[:first], calls[first], *calls[first:]],
        "a task left out": [c for c in calls if c.what != "0F1"],
        "transfers exchanged": swapped,
        "memory given back at once": [*calls[: first + 1], calls[early], *calls[first + 1 :]],
        "an early end": [c for n, c in enumerate(calls) if n != looks[-1] - 1] + [calls[looks[-1]]],
    }
    return {name: rank_problems(plan, own, rank) for name, own in made.items()}


def test_the_proof_finds_mistakes(crew2: Any) -> None:
    found = crew2(mistaken)[0]
    assert list(found) == list(MISTAKES)
    for name, told in MISTAKES.items():
        assert any(told in text for text in found[name]), (name, found[name])


def careless(rank: int) -> list[str]:
    """Sends that are let go of when they are issued."""
    class Careless(Wired):
        def issue(self, legs: Any) -> None:
            super().issue(legs)
            for group in self._groups[1 - rank]:
                for name, buffers in group.held:
                    self._api.free(self._compute, name, list(buffers))
                group.held.clear()

    import pipec.runtime.distributed.gpu_ranks as module

    net = chain(4)
    plan = pipec.compile(net, 2, 4, "gpipe")
    module.Wired = Careless  # type: ignore[misc]
    try:
        (calls,) = calls_of(rank, "wired", net, plan, rows=8)
    finally:
        module.Wired = Wired  # type: ignore[misc]
    return rank_problems(plan, calls, rank)


def test_memory_let_go_of_before_its_transfer_has_ended_is_found(crew2: Any) -> None:
    first, second = crew2(careless)
    assert any("takes back v1[0]:0>1 sent, which v1[0]:0>1 may still use" in text for text in first)
    assert any("takes back dv1[0]:1>0 sent, which dv1[0]:1>0 may still use" in text for text in second)


class Slow(Recorder):
    """Nothing has ended when one looks for the first time."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: set[str] = set()

    def past(self, event: str) -> bool:
        if event in self.asked:
            return super().past(event)
        self.asked.add(event)
        return False


def slow(rank: int) -> tuple[bool, list[str], int]:
    net, plan = chain(4), pipec.compile(chain(4), 2, 4, "gpipe")
    FakeGpus.recording = Slow
    try:
        (calls,) = calls_of(rank, "staged", net, plan, rows=8)
        with on_gpus("staged"):
            found = differences(lambda: chain(4), {"devices": 2, "schedule": "1f1b"}, [data(8), data(8, 1)], 4)
    finally:
        FakeGpus.recording = Recorder
    return found == [], rank_problems(plan, calls, rank), sum(c.kind == "wait" and c.stream == "host" for c in calls)


def test_a_copy_that_has_not_ended_is_waited_for_when_the_host_waits_anyhow(crew2: Any) -> None:
    found = crew2(slow)
    assert [(equal, problems) for equal, problems, _ in found] == [(True, [])] * 2
    assert 0 < sum(waits for *_, waits in found) < 8  # others were seen to have ended between two tasks


# -- orders that do not fit ------------------------------------------------------------------------------------------


def unordered(rank: int, how: str) -> list[str]:
    """Orders that do not fit together: found when the runner is made, by all ranks."""
    right, net = orders.orders_of, chain(4)
    plan = pipec.compile(net, 2, 4)
    orders.orders_of = lambda *args: [row[::-1] if me else row for me, row in enumerate(right(*args))]
    told = []
    try:
        for name, update in (("1f1b", None), ("pipemare", "stage")):
            plan = pipec.compile(net, 2, 4, name, update=update)
            optimizer = None if name == "1f1b" else (lambda p: torch.optim.SGD(p, 0.1))
            try:
                with on_gpus(how):
                    pipec.Runner(net, plan, optimizer=optimizer)
            except pipec.RunError as error:
                told.append(str(error))
    finally:
        orders.orders_of = right
    return told


@pytest.mark.parametrize("how", ["wired", "staged"])
def test_a_plan_that_cannot_be_ordered_is_an_error_before_the_first_step(how: str, crew2: Any) -> None:
    for told in crew2(unordered, how):
        assert len(told) == 2
        for text in told:
            assert text.startswith("the plan does not run on GPUs over several processes: the orders of the ranks' tr")
            assert "\n  rank 0 sends task" in text
            assert "\n  rank 1 " in text
