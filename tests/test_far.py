"""Values between ranks on several hosts: sockets that the ranks themselves write and read."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from models import same
from pairs import at_once, connected_sockets, pair
from test_wire import SHAPES, base, plain, strides
from torch import Tensor

from pipec.errors import RankError
from pipec.runtime.borders import Packed, pack
from pipec.runtime.channels import Stopped
from pipec.runtime.distributed.channels import PENDING
from pipec.runtime.distributed.far_lines import LARGE, FarLines
from pipec.runtime.distributed.records import KNOWN
from pipec.runtime.distributed.sockets import PARTS
from pipec.runtime.distributed.wire import as_bytes


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("pipec line")]


# -- two ranks in one process ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SHAPES)
def test_values_arrive_as_they_were(name: str) -> None:
    """In the first step with their form, in later ones without; strides, dtypes and gradients' need as sent."""
    with pair(3, far=True) as made:
        for step in range(3):
            sent = [pack(SHAPES[name](base(rows))) for rows in (4, 4, 4)]
            for a, b in zip(sent, made.step(sent), strict=True):
                assert same(plain(b), plain(a))
                if name not in ("windows", "sparse"):  # memory shared between elements is not kept
                    assert strides(b) == strides(a)
            steady = name not in ("sparse", "conjugate")  # others are pickled each time
            assert made.learned == [[]] * 2 if step and steady else made.learned[0] == made.learned[1] != []
        assert name == "large" or threads() == []  # small values need none


@given(st.lists(st.sampled_from(list(SHAPES)), min_size=1, max_size=6), st.integers(1, 5))
@settings(max_examples=40)
def test_any_values_in_any_order(names: list[str], rows: int) -> None:
    with pair(len(names), far=True) as made:
        for number in range(3):
            sent = [pack(SHAPES[name](base(rows + number % 2))) for name in names]
            for a, b in zip(sent, made.step(sent), strict=True):
                if not isinstance(b, Packed) or isinstance(a, Packed):
                    assert same(plain(b), plain(a)) or "sparse" in names


@pytest.mark.parametrize("nbytes", [1, 4096, LARGE, 1 << 20, 64 << 20])
def test_small_and_large_values(nbytes: int) -> None:
    count = 2 if nbytes > LARGE else 3
    with pair(count, timeout=30.0, far=True) as made:
        for step in range(3):
            sent = [torch.arange(nbytes, dtype=torch.int64).add_(step + n).to(torch.uint8) for n in range(count)]
            for a, b in zip(sent, made.step(sent), strict=True):
                assert torch.equal(a, b)
        assert len(threads()) <= 2
    assert threads() == []


def test_more_tensors_than_the_system_takes_at_once() -> None:
    with pair(2, far=True) as made:
        for step in range(2):
            sent = [pack([torch.full((2 + n % 3,), float(n + step)) for n in range(2 * PARTS + 3)]) for _ in range(2)]
            for a, b in zip(sent, made.step(sent), strict=True):
                assert same(plain(b), plain(a))


def test_a_value_whose_elements_share_memory_crosswise() -> None:
    """Its memory's order is not that of its elements."""
    with pair(1, far=True) as made:
        for step in range(2):
            sent = (torch.arange(1000.0) + step).as_strided((4, 300), (1, 2))
            assert torch.equal(made.step([sent])[0], sent)
    assert torch.equal(as_bytes(sent).view(torch.float32).view(4, 300), sent)  # where tensors travel one by one


def test_values_of_changing_size_large_ones_too() -> None:
    with pair(4, far=True) as made:
        for step in range(6):
            sent = [torch.rand(LARGE // 4 * (1 + 7 * ((step + n) % 3)) - 5 * n) for n in range(4)]
            for a, b in zip(sent, made.step(sent), strict=True):
                assert torch.equal(a, b)


def test_two_ranks_that_send_much_to_each_other() -> None:
    """More than all buffers hold, both at once, and nobody reads before it has sent."""
    one, two = connected_sockets()
    ends = [FarLines(0, {1: one}), FarLines(1, {0: two})]
    size = 64 << 20
    found: list[Any] = [None, None]

    def talk(me: int) -> None:
        lines, value = ends[me], torch.full((size,), me, dtype=torch.uint8)
        for task in range(2):
            lines.give(1 - me, 0, task, 0, b"", [value.numpy().data], [value])
        while len(lines.inbox[1 - me]) < 2:
            lines.wait(1 - me, time.monotonic() + 20)
        found[me] = [bool((own.content[0] == 1 - me).all()) and own.task for own in lines.inbox[1 - me]]

    at_once(ends, talk)
    assert found == [[0, 1], [0, 1]]


def test_what_was_sent_is_free_at_the_end_of_a_run() -> None:
    """A large value that a thread still writes is waited for; what happens to it afterwards arrives nowhere."""
    with pair(2, timeout=20.0, far=True) as made:
        for _ in range(3):
            one, two = made.channels()
            got: list[Any] = []

            def read(two: Any = two, got: list[Any] = got) -> None:
                time.sleep(0.05)
                got.extend(two.receive((0, 1))[1] for _ in range(2))

            reader = threading.Thread(target=read)
            reader.start()
            sent = [torch.ones(4 << 20, dtype=torch.uint8) for _ in range(2)]
            for value in sent:
                one.send((0, 1), 0, value)
            one.finish()
            for value in sent:
                value.zero_()
            reader.join()
            assert all(bool((value == 1).all()) for value in got)


def test_what_nobody_else_holds_lives_until_it_is_written() -> None:
    with pair(4, timeout=20.0, far=True) as made:
        one, two = made.channels()
        for number in range(4):
            one.send((0, 1), 0, torch.full((8 << 20,), number, dtype=torch.uint8))
        for number in range(4):
            assert bool((two.receive((0, 1))[1] == number).all())
        one.finish()


def test_a_value_that_was_received_is_the_readers_own() -> None:
    with pair(1, far=True) as made:
        first = made.step([torch.zeros(5)])[0]
        second = made.step([torch.ones(5)])[0]
        second += 1
        assert first.tolist() == [0.0] * 5


def test_a_sender_waits_for_room() -> None:
    with pair(PENDING + 1, timeout=0.2, far=True) as made:
        one, two = made.channels()
        for number in range(PENDING):
            one.send((0, 1), 0, torch.tensor(float(number)))
        with pytest.raises(RankError, match=f"value 's0' of microbatch {PENDING} of 1: timed out"):
            one.send((0, 1), 0, torch.tensor(1.0))
        assert two.receive((0, 1))[1] == 0.0


def test_many_bytes_wait_for_room_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipec.runtime.distributed.recorded.ROOM", 1 << 16)
    with pair(6, timeout=0.2, far=True) as made:
        one, two = made.channels()
        for _ in range(4):  # 20,000 bytes each
            one.send((0, 1), 0, torch.zeros(5_000))
        with pytest.raises(RankError, match="timed out"):
            one.send((0, 1), 0, torch.zeros(5_000))
        assert two.receive((0, 1))[1].shape == (5_000,)


def test_what_inference_mode_made_serves_training() -> None:
    with pair(1, far=True) as made:
        for _ in range(2):
            one, two = made.channels()
            with torch.inference_mode():
                one.send((0, 1), 0, torch.zeros(3))
                made.lines[1].wait(0, time.monotonic() + 5)
                assert two.receive((0, 1))[1].tolist() == [0.0] * 3
            made.frames[0].update(one.learned)
            made.frames[1].update(two.learned)
        one, two = made.channels()
        one.send((0, 1), 0, torch.ones(3))
        with torch.inference_mode():
            made.lines[1].wait(0, time.monotonic() + 5)
        got = two.receive((0, 1))[1]
        assert not got.is_inference()
        assert got.requires_grad_().sum().backward() is None


def test_after_a_failure_both_ends_come_to_the_end() -> None:
    with pair(2 * PENDING, far=True) as made:
        one, two = made.channels()
        one.send((0, 1), 0, pack(base(4)))
        sender = threading.Thread(target=one.drain, args=(made.ops[0], (0, "rank 0 failed: " + 9000 * "a")))
        sender.start()
        assert same(two.receive((0, 1))[1].detach(), base(4).detach())
        with pytest.raises(Stopped):
            two.receive((0, 1))
        two.drain(made.ops[1], (0, "again"))
        sender.join()
        assert two.failure is not None
        assert two.failure[1].startswith("rank 0 failed: aaaa")
        assert len(made.step([torch.ones(2)] * 2 * PENDING)) == 2 * PENDING


def several(channels: Any, value: Tensor) -> None:
    """Send three; the first one may be under way before this end knows that nobody reads it."""
    for _ in range(3):
        channels.send((0, 1), 0, value)
        time.sleep(0.05)


@pytest.mark.parametrize("size", [3, LARGE])
def test_a_rank_that_gives_up_or_is_gone_is_told_to_whoever_waits(size: int) -> None:
    with pair(3, far=True) as made:
        made.step([torch.ones(size)] * 3)  # with large values a thread reads from now on
        one, two = made.channels()
        two.begin()
        one.send((0, 1), 0, torch.ones(size))
        one.farewell((7, "rank 7 has ended"))
        assert two.receive((0, 1))[1].sum() == size
        with pytest.raises(RankError, match="rank 7 has ended") as caught:
            two.receive((0, 1))
        assert caught.value.rank == 7
        assert two.broken is caught.value
        with pytest.raises(RankError, match="rank 0 has ended or does not answer"):
            made.lines[1].exchange([1.0], 5.0)
    with pair(3, far=True) as made:
        made.step([torch.ones(size)] * 3)
        one, two = made.channels()
        two.begin()
        made.lines[0].close()
        with pytest.raises(RankError, match="of microbatch 0 of 0: device 0 has closed its line"):
            two.receive((0, 1))
    with pair(3, far=True) as made:
        one, two = made.channels()
        made.lines[1].close()
        with pytest.raises(RankError, match=r"of microbatch \d of 1: device 1 has closed its line"):
            several(one, torch.ones(size))
    assert threads() == []


def test_a_host_that_is_gone_is_no_late_answer() -> None:
    """What the kernel says after its own time-out has nothing to do with the runner's."""
    with pair(1, far=True) as made:
        _, two = made.channels()
        made.lines[1]._lines[0]._came.append(TimeoutError(110, "Connection timed out"))
        made.lines[1]._bell.ring()
        made.lines[1]._fetched.add(0)
        made.lines[1]._poll.unregister(made.lines[1]._lines[0].number)
        with pytest.raises(RankError, match="of microbatch 0 of 0: the host of device 0 cannot be reached"):
            two.receive((0, 1))


def test_what_was_sent_is_read_though_the_sender_has_left() -> None:
    with pair(2, far=True) as made:
        one, two = made.channels()
        one.send((0, 1), 0, torch.ones(1))
        one.send((0, 1), 0, torch.zeros(1))
        made.lines[1].tell(0, KNOWN)  # nobody reads that
        made.lines[0].close()
        assert [two.receive((0, 1))[1].item() for _ in range(2)] == [1.0, 0.0]


def test_tables() -> None:
    with pair(1, far=True) as made:
        other: list[Any] = []
        beside = threading.Thread(target=lambda: other.append(made.lines[0].exchange([1.0, -2.5], 5.0)))
        beside.start()
        assert made.lines[1].exchange([3.0, float("inf")], 5.0) == [[1.0, -2.5], [3.0, float("inf")]]
        beside.join()
        assert other == [[[1.0, -2.5], [3.0, float("inf")]]]
        with pytest.raises(RankError, match="timed out"):
            made.lines[1].exchange([0.0], 0.05)
