"""Values between ranks of one host: memory that both have mapped, and the records that say what is in it."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from models import chain, data, same
from pairs import pair
from ranks import crew
from test_wire import SHAPES, base, plain, strides

import pipec
from pipec.errors import RankError
from pipec.runtime.borders import Packed, pack
from pipec.runtime.channels import Stopped
from pipec.runtime.distributed import calls as calls_module
from pipec.runtime.distributed import lines as lines_module
from pipec.runtime.distributed.blocks import KEEP
from pipec.runtime.distributed.channels import PENDING
from pipec.runtime.distributed.lines import Lines
from pipec.runtime.distributed.records import KNOWN


@pytest.mark.parametrize("name", SHAPES)
def test_values_arrive_as_they_were(name: str) -> None:
    """In the first step with their form, in later ones without; strides, dtypes and gradients' need as sent."""
    with pair(3) as made:
        for step in range(3):
            sent = [pack(SHAPES[name](base(rows))) for rows in (4, 4, 4)]
            for a, b in zip(sent, made.step(sent), strict=True):
                assert same(plain(b), plain(a))
                if name not in ("windows", "sparse"):  # memory shared between elements is not kept
                    assert strides(b) == strides(a)
            steady = name not in ("sparse", "conjugate")  # others are pickled each time
            assert made.learned == [[]] * 2 if step and steady else made.learned[0] == made.learned[1] != []


@given(st.lists(st.sampled_from(list(SHAPES)), min_size=1, max_size=6), st.integers(1, 5))
@settings(max_examples=40)
def test_any_values_in_any_order(names: list[str], rows: int) -> None:
    with pair(len(names)) as made:
        for number in range(3):
            sent = [pack(SHAPES[name](base(rows + number % 2))) for name in names]
            for a, b in zip(sent, made.step(sent), strict=True):
                if not isinstance(b, Packed) or isinstance(a, Packed):
                    assert same(plain(b), plain(a)) or "sparse" in names


def test_memory_is_used_again_and_only_when_it_was_read() -> None:
    with pair(3 * PENDING) as made:
        for step in range(3):
            payloads = [torch.full((2, 3), float(100 * step + number)) for number in range(3 * PENDING)]
            for sent, got in zip(payloads, made.step(payloads), strict=True):
                assert torch.equal(got, sent)
        assert made.lines[0].pools[1]._made <= 2 * PENDING  # those with a form behind the values are larger


def test_a_value_that_was_received_is_the_readers_own() -> None:
    with pair(1) as made:
        first = made.step([torch.zeros(5)])[0]
        second = made.step([torch.ones(5)])[0]
        second += 1
        assert first.tolist() == [0.0] * 5
        assert made.step([torch.ones(5)])[0].tolist() == [1.0] * 5


def test_memory_that_is_not_used_any_more_is_given_back() -> None:
    with pair(1) as made:
        made.step([torch.zeros(100_000)])
        made.step([torch.zeros(100_000)])
        files = len(os.listdir("/proc/self/fd"))
        for number in range(KEEP + 3):
            made.step([torch.full((3,), float(number))])
        pool = made.lines[0].pools[1]
        blocks = [block for _, block in pool.held] + [block for own in pool._free.values() for block in own]
        assert {block.size for block in blocks if block is not None} == {4096}
        assert {one.size for one in made.lines[1]._seen[0].values()} == {4096}
        assert len(os.listdir("/proc/self/fd")) == files  # mapped memory needs no open file
        assert torch.equal(made.step([torch.ones(100_000)])[0], torch.ones(100_000))


def test_a_sender_waits_for_room() -> None:
    with pair(PENDING + 1, timeout=0.2) as made:
        one, two = made.channels()
        for number in range(PENDING):
            one.send((0, 1), 0, torch.tensor(float(number)))
        with pytest.raises(RankError, match=f"value 's0' of microbatch {PENDING} of 1: timed out"):
            one.send((0, 1), 0, torch.tensor(1.0))
        assert two.receive((0, 1))[1] == 0.0


def test_lines_do_not_fill_with_what_nobody_waits_for() -> None:
    """A sender that never waits is told all the same what was read."""
    with pair(PENDING, timeout=2.0) as made:
        for _ in range(300):
            one, two = made.channels()
            for number in range(PENDING):
                one.send((0, 1), 0, torch.tensor(float(number)))
            assert [two.receive((0, 1))[1].item() for _ in range(PENDING)] == [*range(PENDING)]


def test_a_rank_that_does_not_read_its_line_is_given_up() -> None:
    def fill(lines: Lines) -> None:
        for _ in range(10_000):
            lines.tell(1, KNOWN)

    with pair(1, timeout=0.2) as made, pytest.raises(RuntimeError, match="timed out: the line is full"):
        fill(made.lines[0])


def test_many_bytes_wait_for_room_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipec.runtime.distributed.recorded.ROOM", 1 << 16)
    with pair(6) as made:
        payloads = [torch.full((5_000,), float(number)) for number in range(6)]
        for _ in range(2):
            for sent, got in zip(payloads, made.step(payloads), strict=True):
                assert torch.equal(got, sent)
        assert made.lines[0].pools[1]._made <= 4


def test_what_inference_mode_made_serves_training() -> None:
    with pair(1) as made:
        for _ in range(2):
            one, two = made.channels()
            with torch.inference_mode():
                one.send((0, 1), 0, torch.zeros(3))
                two.receive((0, 1))
            made.frames[0].update(one.learned)
            made.frames[1].update(two.learned)
        assert made.step([base(4)])[0].requires_grad
        assert made.step([torch.ones(3)])[0].tolist() == [1.0] * 3


def test_memory_that_could_not_be_filled_is_not_lost() -> None:
    with pair(1) as made:
        made.step([torch.zeros(3)])
        one, _ = made.channels()
        files = len(os.listdir("/proc/self/fd"))
        for _ in range(3):
            with pytest.raises(NotImplementedError, match="meta"):
                one.send((0, 1), 0, torch.zeros(3, device="meta"))
        assert made.step([torch.ones(3)])[0].tolist() == [1.0] * 3
        assert made.lines[0].pools[1]._made == 1
        assert len(os.listdir("/proc/self/fd")) == files


class Odd:
    """Cannot be made again."""

    def __reduce__(self) -> Any:
        return _refuse, ()


def _refuse() -> None:
    raise ValueError("not here")


def test_what_cannot_be_read_is_an_error_where_it_is_asked_for() -> None:
    with pair(2) as made:
        one, two = made.channels()
        one.send((0, 1), 0, pack([Odd()]))
        one.send((0, 1), 0, torch.ones(2))
        with pytest.raises(ValueError, match="not here"):
            two.receive((0, 1))
        assert two.receive((0, 1))[1].tolist() == [1.0, 1.0]


def test_after_a_failure_both_ends_come_to_the_end() -> None:
    with pair(2 * PENDING) as made:
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


def test_a_rank_that_gives_up_or_is_gone_is_told_to_whoever_waits() -> None:
    with pair(3) as made:
        one, two = made.channels()
        one.send((0, 1), 0, torch.ones(1))
        one.farewell((7, "rank 7 has ended"))
        assert two.receive((0, 1))[1] == 1.0
        with pytest.raises(RankError, match="rank 7 has ended") as caught:
            two.receive((0, 1))
        assert caught.value.rank == 7
        assert two.broken is caught.value
        with pytest.raises(RankError, match="rank 0 has ended or does not answer"):
            made.lines[1].exchange([1.0], 5.0)
    with pair(3) as made:
        one, two = made.channels()
        made.lines[0].close()
        with pytest.raises(RankError, match="of microbatch 0 of 0: device 0 has closed its line"):
            two.receive((0, 1))
    with pair(3) as made:
        one, two = made.channels()
        made.lines[1].close()
        with pytest.raises(RankError, match="of microbatch 0 of 1: device 1 has closed its line"):
            one.send((0, 1), 0, torch.ones(1))


def test_what_was_sent_is_read_though_the_sender_has_left() -> None:
    with pair(2) as made:
        one, two = made.channels()
        one.send((0, 1), 0, torch.ones(1))
        one.send((0, 1), 0, torch.zeros(1))
        made.lines[1].tell(0, KNOWN)  # nobody reads that
        made.lines[0].close()
        assert [two.receive((0, 1))[1].item() for _ in range(2)] == [1.0, 0.0]


class Deaf:
    """A poll that never hears anything, and notes what it was asked for."""

    def __init__(self) -> None:
        self.asked: list[float] = []

    def poll(self, milliseconds: float) -> list[Any]:
        self.asked.append(milliseconds)
        return []


@pytest.mark.parametrize("awake", [0.0, 1e-3])
def test_a_rank_looks_for_records_before_it_sleeps_where_it_may(awake: float) -> None:
    one, two = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with one, two:
        lines: Any = Lines(0, {1: one}, 1.0, awake)
        lines._poll = deaf = Deaf()
        assert not lines._look(0.25)
        *looks, slept = deaf.asked
        assert slept == 250.0
        assert set(looks) == ({0} if awake else set())
        lines.close()


def test_ranks_that_take_turns_on_the_cores_sleep_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    assert lines_module.awake(2, 2) > 0
    assert lines_module.awake(8, 2) > 0
    assert lines_module.awake(2, 3) == 0
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    assert lines_module.here() == 3


def test_tables() -> None:
    with pair(1) as made:
        other: list[Any] = []
        beside = threading.Thread(target=lambda: other.append(made.lines[0].exchange([1.0, -2.5], 5.0)))
        beside.start()
        assert made.lines[1].exchange([3.0, float("inf")], 5.0) == [[1.0, -2.5], [3.0, float("inf")]]
        beside.join()
        assert other == [[[1.0, -2.5], [3.0, float("inf")]]]
        with pytest.raises(RankError, match="timed out"):
            made.lines[1].exchange([0.0], 0.05)


# -- real processes -------------------------------------------------------------------------------------------------


def transport(rank: int) -> list[str]:
    """What carries values when all can be reached, and when rank 1 finds that it cannot."""
    found = []
    for refused in ((), (lines_module,), (lines_module, calls_module)):
        for module in refused if rank == 1 else ():
            module.MOST = 1
        try:
            net = chain(2)
            with pipec.Runner(net, pipec.compile(net, 2, 4)) as run:
                run.step(**data())
                party: Any = run._party
                found.append(f"{type(party._lines).__name__}: {run.transport}")
        finally:
            for module in refused:
                module.MOST = 64
    return found


def test_all_ranks_choose_alike(crew2: Any) -> None:
    assert crew2(transport) == [[
        "Lines: shared memory", "FarLines: sockets",
        "NoneType: gloo, as there are no sockets between all ranks: device 1: 2 ranks are more than the 1 that get a "
        "socket for each pair",
    ]] * 2


def forks_and_dies(rank: int) -> None:
    """Rank 1 leaves a child behind that holds all its sockets."""
    net = chain(2)
    with pipec.Runner(net, pipec.compile(net, 2, 4), timeout=20.0) as run:
        run.step(**data())
        if rank == 1:
            if os.fork() == 0:
                time.sleep(9)
                os._exit(0)
            os.kill(os.getpid(), signal.SIGKILL)
        run.step(**data())


def test_a_rank_that_dies_is_named_at_once_whatever_its_children_hold() -> None:
    with crew(2) as made:
        begin = time.monotonic()
        ((word, told),) = made.answers(forks_and_dies, of=1)
        assert time.monotonic() - begin < 8
    assert (word, told[0], told[2]) == ("raised", "RankError", 1)
    assert "rank 1 has ended" in told[1]
