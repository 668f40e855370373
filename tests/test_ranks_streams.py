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

import pipec
from pipec.runtime.distributed import carriers, ordered
from pipec.runtime.distributed import order as orders
from pipec.runtime.distributed.carriers import Wired
from pipec.runtime.distributed.order import check_orders
from pipec.runtime.distributed.ordered import OrderedChannels
from pipec.runtime.distributed.stream_proof import rank_problems
from pipec.runtime.distributed.wires import MOST, Leg, batches
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
            FakeGpus.made.wires[0].issued.clear()
            run.step(**data(16))
    finally:
        module.OrderedChannels = before  # type: ignore[misc]
    return made[-1].issued, FakeGpus.made.wires[0].issued


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
    "a transfer twice": "runs 2 times on wire 0, not once",
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
    first, second = (n for n, c in enumerate(calls) if c.what in ("v1[0]:0>1", "v1[1]:0>1") and c.stream == "wire 0")
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
            for group in self._groups:
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


# -- what is built from: batches, memory, orders that do not fit -----------------------------------------------------


def leg(count: int, sends: bool) -> Leg:
    return Leg(1, "v0[0]:0>1", 1, 1, sends, None, [torch.empty(n + 1, dtype=torch.uint8) for n in range(count)])


def test_groups_are_bounded_and_both_ends_cut_them_alike() -> None:
    few, many = leg(3, True), leg(150, False)
    for legs in ([few], [many], [few, many], [many, few]):
        made = batches(legs)
        assert all(0 < len(batch) <= MOST for batch in made)
        for one in legs:
            assert [len(b) for batch in made for own, b in batch if own is one] == [len(b) for b in one.buffers]
        mirrored = batches([Leg(1, one.name, 0, 0, not one.sends, None, one.buffers) for one in legs])
        sizes = [[[b.numel() for _, b in batch] for batch in own] for own in (made, mirrored)]
        assert sizes[0] == sizes[1]
    assert batches([leg(0, True)]) == []


class Wire:
    """Notes what it is asked for."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def issue(self, legs: Any) -> str:
        self.calls.append("issue " + " ".join(one.name for one in legs))
        return legs[0].name

    def total(self, name: str, flat: torch.Tensor) -> str:
        raise AssertionError

    def wait(self, flight: str) -> None:
        self.calls.append(f"wait {flight}")

    def close(self) -> None:
        self.calls.append("close")


def test_what_was_sent_is_let_go_of_with_the_next_that_is_read_or_when_too_much_is_under_way() -> None:
    api, wire = Recorder(), Wire()
    cpu = torch.device("cpu")
    carrier = Wired(api, wire, api.caller(cpu), cpu)

    def send(number: int) -> None:
        buffer = torch.empty(4, dtype=torch.uint8)
        carrier.issue([Leg(number, f"v0[{number}]:0>1", 1, 1, True, None, [buffer])])

    def freed() -> list[str]:
        made = [call.what for call in api.calls if call.kind == "free"]
        api.calls.clear()
        return made

    expected = wired_frame()
    send(0)
    carrier.issue([Leg(1, "dv0[0]:1>0", 1, 1, False, expected, [])])
    send(2)
    assert freed() == []
    assert [b.numel() for b in carrier.take(1)] == [expected.room]
    assert freed() == ["v0[0]:0>1 sent"]
    assert wire.calls[-1] == "wait dv0[0]:1>0"
    for number in (3, 4, 5):
        send(number)
    carrier.over(2)
    assert freed() == ["v0[2]:0>1 sent", "v0[3]:0>1 sent"]
    carrier.issue([Leg(6, "dv0[1]:1>0", 1, 1, False, expected, [])])
    carrier.drop(6)
    carrier.over(0)
    assert freed() == ["v0[4]:0>1 sent", "v0[5]:0>1 sent", "dv0[1]:1>0 unread"]
    carrier.abandon()
    assert wire.calls[-1] == "close"


def wired_frame() -> Any:
    from pipec.runtime.distributed.wire import frame_of

    return frame_of(torch.ones(2, 3))[0]


@pytest.mark.parametrize("large", [False, True])
def test_buffers_of_a_message_have_the_sizes_that_the_other_end_makes_room_for(large: bool) -> None:
    from pipec.runtime.borders import pack
    from pipec.runtime.distributed.wire import frame_of
    from pipec.tree import flatten

    rows = 1 << 16 if large else 4
    tensors = {"dense": torch.randn(rows, 3), "turned": torch.randn(3, rows).t(), "expanded": torch.randn(1, 3).expand(
        rows, 3), "empty": torch.empty(0, 3), "gaps": torch.randn(rows, 6)[:, ::2], "half": torch.randn(rows).half()}
    frame, own = frame_of(pack(tensors))
    made = carriers.parts(frame, own, torch.device("cpu"))
    assert [buffer.numel() for buffer in made] == carriers.sizes(frame)
    assert all(buffer.dtype is torch.uint8 and buffer.is_contiguous() for buffer in made)
    value = ordered.opened(frame, [buffer.clone() for buffer in made])
    for one, other in zip(value.leaves, flatten(tensors)[0], strict=True):
        assert torch.equal(one, other)
        assert one.stride() == other.stride()
    assert len(made) == (5 if large else 1)


def unordered(rank: int) -> list[str]:
    """Orders that do not fit together: found when the runner is made, by all ranks."""
    right, net = orders.orders_of, chain(4)
    plan = pipec.compile(net, 2, 4)
    orders.orders_of = lambda *args: [row[::-1] if me else row for me, row in enumerate(right(*args))]
    told = []
    try:
        for name, how in (("1f1b", {}), ("pipemare", {"update": "stage"})):
            plan = pipec.compile(net, 2, 4, name, **how)
            optimizer = None if name == "1f1b" else (lambda p: torch.optim.SGD(p, 0.1))
            try:
                with on_gpus("wired"):
                    pipec.Runner(net, plan, optimizer=optimizer)
            except pipec.RunError as error:
                told.append(str(error))
    finally:
        orders.orders_of = right
    return told


def test_a_plan_that_cannot_be_ordered_is_an_error_before_the_first_step(crew2: Any) -> None:
    for told in crew2(unordered):
        assert len(told) == 2
        for text in told:
            assert text.startswith("the plan does not run over NCCL: the orders of the ranks' transfers do not fit")
            assert "\n  rank 0 sends task" in text
            assert "\n  rank 1 " in text
