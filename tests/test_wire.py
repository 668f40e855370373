"""What travels between ranks: forms and bytes of values, and the channels' protocol over a group without a network."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from attrs import frozen
from hypothesis import given, settings
from hypothesis import strategies as st
from models import FORMS, WIDTH, same
from torch import Tensor

import pipec
from pipec.errors import RankError
from pipec.ir import Kind
from pipec.runtime.borders import Packed, Parcel, pack
from pipec.runtime.channels import Stopped
from pipec.runtime.distributed.backend import traffic
from pipec.runtime.distributed.channels import AHEAD, PENDING, SMALL, RankChannels
from pipec.runtime.distributed.wire import JOINT, Frame, as_bytes, fits, frame_of
from pipec.runtime.program import build_program


class Post:
    """Letters between two ranks in one process: a receive that is waited for must have been sent."""

    def __init__(self) -> None:
        self.letters: dict[Any, list[Tensor]] = defaultdict(list)
        self.open: dict[int, int] = defaultdict(int)
        self.most = 0
        self.sent = 0
        self.addresses: list[int] = []  # of what was sent

    def end(self, me: int) -> Any:
        return End(self, me)


@frozen(eq=False)
class End:
    post: Post
    me: int

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> Any:
        queue, letter = self.post.letters[self.me, peer, tag], as_bytes(tensors[0])
        self.post.addresses.append(letter.data_ptr())
        queue.append(letter)  # the sender's own memory until it has waited: what it writes there before, arrives
        self.post.sent += tensors[0].nbytes

        def wait() -> None:
            place = next((n for n, other in enumerate(queue) if other is letter), None)
            if place is not None:
                queue[place] = letter.clone()

        return Work(wait)

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> Any:
        post = self.post
        post.open[self.me] += 1
        post.most = max(post.most, post.open[self.me])

        def wait() -> None:
            post.open[self.me] -= 1
            queue = post.letters[peer, self.me, tag]
            if not queue:
                raise RuntimeError("Timed out: nothing was sent")
            letter = queue.pop(0)
            assert letter.nbytes == tensors[0].nbytes, "a receive of another size than what was sent"
            as_bytes(tensors[0]).copy_(letter)

        return Work(wait)


@frozen(eq=False)
class Work:
    run: Callable[[], None]

    def wait(self, timeout: Any = None) -> None:
        self.run()


def lost(peer: int, what: str, error: BaseException) -> RankError:
    return RankError(f"{what} of {peer}: {error}", peer)


class Pair:
    """The two ends of one route 0 -> 1, over as many steps as wanted."""

    def __init__(self, count: int) -> None:
        plan = pipec.compile(pipec.chain(2), 2, count, forward_only=True)
        program = build_program(plan)
        self.ends = [traffic(plan, program.ops, rank) for rank in (0, 1)]
        self.frames: list[dict[Any, Frame]] = [{}, {}]
        self.post = Post()
        self.count = count

    def channels(self) -> list[RankChannels]:
        return [
            RankChannels(self.post.end(rank), rank, own.incoming, own.outgoing, self.frames[rank], None, 5.0,
                         torch.device("cpu"), lost)
            for rank, own in enumerate(self.ends)
        ]

    def step(self, payloads: list[Any]) -> list[Any]:
        """Send, receive, and keep the forms as after a step that succeeded."""
        one, two = self.channels()
        for payload in payloads:
            one.send((0, 1), 0, payload)
        two.begin()
        got = [two.receive((0, 1))[1] for _ in payloads]
        one.finish()
        for frames, channels in zip(self.frames, (one, two), strict=True):
            frames.update(channels.learned)
        return got


def plain(packet: Any) -> Any:
    if isinstance(packet, Tensor):
        return packet.to_dense() if packet.is_sparse else packet
    return (packet.leaves, str(packet.layout)) if isinstance(packet, Packed) else packet


def strides(packet: Any) -> list[Any]:
    leaves = packet.leaves if isinstance(packet, Packed) else [packet]
    return [(leaf.stride(), leaf.requires_grad, leaf.dtype) for leaf in leaves if isinstance(leaf, Tensor)]


def base(rows: int) -> Tensor:
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(rows)).requires_grad_()


SHAPES: dict[str, Callable[[Tensor], Any]] = {
    "turned": lambda h: h.t(), "every second": lambda h: h[:, ::2], "wide": lambda h: h[:, :1].expand(-1, 5),
    "both": lambda h: h[:, None, ::2].expand(-1, 3, -1), "channels last": lambda h: h.view(-1, 2, 2, 2).contiguous(
        memory_format=torch.channels_last), "scalar": lambda h: h.sum(),
    "one row": lambda h: h[:1].expand(len(h), -1), "empty": lambda h: h[:0],
    "windows": lambda h: h.detach().flatten().unfold(0, 4, 2), "booleans": lambda h: h.detach() > 0,
    "complex": lambda h: torch.complex(h, h), "conjugate": lambda h: torch.complex(h, h).conj(),
    "half": lambda h: h.detach().to(torch.bfloat16), "sparse": lambda h: h.to_sparse(), "large": lambda h: (
        h.repeat(1, 20_000), [h, None]),
    **{f"form {name}": make for name, (make, _) in FORMS.items()},
}


@pytest.mark.parametrize("name", SHAPES)
def test_values_arrive_as_they_were(name: str) -> None:
    """In the first step with their form, in later ones as bytes only; strides, dtypes and gradients' need as sent."""
    pair = Pair(3)
    for step in range(3):
        sent = [pack(SHAPES[name](base(rows))) for rows in (4, 4, 4)]
        before = pair.post.sent
        got = pair.step(sent)
        for a, b in zip(sent, got, strict=True):
            assert same(plain(b), plain(a))
            if name == "sparse":
                assert b.requires_grad
            elif name != "windows":  # memory shared between elements is not kept
                assert strides(b) == strides(a)
        spent = pair.post.sent - before
        if step == 1:
            usual = spent
        if step == 2:
            assert spent == usual


def test_forms_are_sent_when_they_change_only() -> None:
    pair, quiet = Pair(2), Pair(2)
    spent = []
    for rows in (4, 4, 6, 6, 4):
        before = pair.post.sent
        value = base(rows)
        for got in pair.step([pack(value), pack({"h": value, "n": rows})]):
            assert same((got.leaves[0] if isinstance(got, Packed) else got).detach(), value.detach())
        spent.append(pair.post.sent - before)
    quiet.step([pack(base(4))] * 2)
    assert spent[1] < spent[0]
    assert spent[3] < spent[2]
    assert spent[4] > spent[1]


@given(st.lists(st.sampled_from(list(SHAPES)), min_size=1, max_size=6), st.integers(1, 5))
@settings(max_examples=40)
def test_any_values_in_any_order(names: list[str], rows: int) -> None:
    pair = Pair(len(names))
    for number in range(3):
        sent = [pack(SHAPES[name](base(rows + number % 2))) for name in names]
        for a, b in zip(sent, pair.step(sent), strict=True):
            assert same(plain(b), plain(a))


def test_a_buffer_is_filled_again_only_when_its_message_is_gone() -> None:
    pair = Pair(3 * PENDING)
    for step in range(2):
        pair.post.addresses.clear()
        payloads = [torch.full((2, 3), float(100 * step + number)) for number in range(pair.count)]
        for sent, got in zip(payloads, pair.step(payloads), strict=True):
            assert torch.equal(got, sent)
    assert len(pair.post.addresses) == pair.count  # a message each
    assert len(set(pair.post.addresses)) == PENDING + 1  # those under way, and the one that is filled meanwhile


def test_gradients_arrive_with_what_is_waiting() -> None:
    parcel = Parcel((1, 2, 4))
    parcel.add(4, torch.ones(3))
    parcel.add(1, [torch.ones(2), None])
    got = Pair(1).step([parcel])[0]
    assert got.taken()[0] == parcel.taken()[0] == ((1, 2, 4), 2, (1,))
    assert same(got.taken()[1], parcel.taken()[1])
    assert Pair(1).step([None]) == [None]


def test_receives_are_posted_for_what_is_in_flight() -> None:
    """A few per sender ahead of what has arrived, fewer of large ones, however many microbatches there are."""
    pair = Pair(32)
    pair.step([pack(base(4))] * 32)
    assert pair.post.most == AHEAD + 1  # the form that follows the first messages
    pair.post.most = 0
    pair.step([pack(base(4))] * 32)
    assert pair.post.most == SMALL
    large = torch.ones(JOINT // 4 + 1)
    pair.step([large] * 32)
    pair.post.most = 0
    pair.step([large] * 32)
    assert pair.post.most == 2 * AHEAD  # header and content each


def test_after_a_failure_both_ends_come_to_the_end() -> None:
    pair = Pair(6)
    pair.step([pack(base(4))] * 6)
    one, two = pair.channels()
    ops = [[op for op in row if op.kind is not Kind.UPDATE] for row in build_program(
        pipec.compile(pipec.chain(2), 2, 6, forward_only=True)).ops]
    one.send((0, 1), 0, pack(base(4)))
    one.drain(ops[0], (0, "rank 0 failed: a story"))
    two.begin()
    assert same(two.receive((0, 1))[1].detach(), base(4).detach())
    with pytest.raises(Stopped):
        two.receive((0, 1))
    assert two.failure == (0, "rank 0 failed: a story")
    two.drain(ops[1], two.failure)
    assert all(not letters for letters in pair.post.letters.values())
    assert same(pair.step([pack(base(4))] * 6)[5].detach(), base(4).detach())


def test_a_silent_sender_is_named() -> None:
    pair = Pair(2)
    _, two = pair.channels()
    two.begin()
    with pytest.raises(RankError, match=r"value 's0' of microbatch 0 of 0: Timed out"):
        two.receive((0, 1))


def test_what_cannot_leave_the_process_is_named() -> None:
    with pytest.raises(pipec.RunError, match=r"value 's0' of microbatch 0 cannot be sent to another rank"):
        Pair(1).step([pack({"h": base(2), "fn": lambda: 3})])


def test_plain_values_that_compare_badly_are_always_sent() -> None:
    import numpy as np

    frame, _ = frame_of(pack({"a": np.ones(3)}))
    assert not fits(frame, frame_of(pack({"a": np.ones(3)}))[0])
    frame, _ = frame_of(pack({"a": 1, "b": True}))
    assert fits(frame, frame_of(pack({"a": 1, "b": True}))[0])
    assert not fits(frame, frame_of(pack({"a": 1, "b": 1}))[0])
    assert not fits(frame, frame_of(pack({"a": 2, "b": True}))[0])
