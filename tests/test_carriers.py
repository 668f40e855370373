"""What carries values between ranks on GPUs, piece by piece: batches of transfers, memory, buffers of every form."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pipec.runtime.borders import pack
from pipec.runtime.distributed import carriers, ordered
from pipec.runtime.distributed.carriers import Wired
from pipec.runtime.distributed.hosting import HostMemory
from pipec.runtime.distributed.wire import frame_of
from pipec.runtime.distributed.wires import MOST, Leg, batches
from pipec.runtime.stream_api import Recorder
from pipec.runtime.stream_lanes import StreamLane
from pipec.tree import flatten


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

    def issue(self, legs: Any, behind: Any = None) -> str:
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
    compute, out = api.caller(cpu), api.stream(cpu, "out 0")
    hosts = HostMemory(api, compute, out, StreamLane(api, cpu, "in 0"), cpu)
    carrier = Wired(api, {1: wire}, compute, cpu, hosts)

    def send(number: int) -> None:
        buffer = torch.empty(4, dtype=torch.uint8)
        carrier.issue([Leg(number, f"v0[{number}]:0>1", 1, 1, True, None, [buffer])])

    def freed() -> list[str]:
        made = [call.what for call in api.calls if call.kind == "free"]
        api.calls.clear()
        return made

    expected, _ = frame_of(torch.ones(2, 3))
    send(0)
    carrier.issue([Leg(1, "dv0[0]:1>0", 1, 1, False, expected, [])])
    send(2)
    assert freed() == []
    assert [b.numel() for b in carrier.take(1)] == [expected.room]
    assert freed() == ["v0[0]:0>1 sent"]
    assert wire.calls[-2:] == ["wait v0[0]:0>1", "wait dv0[0]:1>0"]
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


@pytest.mark.parametrize("large", [False, True])
def test_buffers_of_a_message_have_the_sizes_that_the_other_end_makes_room_for(large: bool) -> None:
    rows = 1 << 16 if large else 4
    tensors = {
        "dense": torch.randn(rows, 3), "turned": torch.randn(3, rows).t(), "gaps": torch.randn(rows, 6)[:, ::2],
        "expanded": torch.randn(1, 3).expand(rows, 3), "one number": torch.randn(()).expand(rows, 3),
        "empty": torch.empty(0, 3), "half": torch.randn(rows).half(),
    }
    frame, own = frame_of(pack(tensors))
    made = carriers.parts(frame, own, torch.device("cpu"))
    assert [buffer.numel() for buffer in made] == carriers.sizes(frame)
    assert all(buffer.dtype is torch.uint8 and buffer.is_contiguous() for buffer in made)
    value = ordered.opened(frame, [buffer.clone() for buffer in made])
    for one, other in zip(value.leaves, flatten(tensors)[0], strict=True):
        assert torch.equal(one, other)
        assert one.stride() == other.stride()
    assert len(made) == (6 if large else 1)
