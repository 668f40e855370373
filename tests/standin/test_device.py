"""The stand-in itself: it computes as the CPU does, and it finds what no event orders."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import standin

DEVICE = torch.device("standin:1")


def streams(count: int = 2, device: torch.device = DEVICE) -> list[torch.Stream]:
    return [standin.named(torch.Stream(device=device), "abc"[number]) for number in range(count)]


def test_it_is_torchs_accelerator() -> None:
    assert torch.accelerator.current_accelerator() == torch.device("standin")
    assert torch.accelerator.device_count() == standin.COUNT == 4
    assert torch.empty(1, device="standin").device == torch.device("standin:0")


def test_a_network_computes_the_cpus_bits() -> None:
    def net() -> nn.Module:
        torch.manual_seed(3)
        return nn.Sequential(
            nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.GELU(), nn.Flatten(), nn.Linear(144, 8), nn.LayerNorm(8)
        )

    x, target = torch.randn(5, 3, 8, 8), torch.arange(5)
    found = []
    for device in ("cpu", "standin:2"):
        made = net().to(device)
        optimizer = torch.optim.AdamW(made.parameters(), foreach=False)
        for _ in range(2):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(made(x.to(device)), target.to(device))
            loss.backward()
            optimizer.step()
        found.append([loss.detach().cpu(), *(t.cpu() for t in made.state_dict().values())])
        found[-1] += [parameter.grad.cpu() for parameter in made.parameters()]
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(*found, strict=True))


def test_parameters_move_and_stay_the_same_objects() -> None:
    line = nn.Linear(2, 2)
    before = list(line.parameters())
    line.to(DEVICE)
    assert [id(p) for p in line.parameters()] == [id(p) for p in before]
    assert {p.device for p in line.parameters()} == {DEVICE}


@pytest.mark.parametrize("other", ["standin:2", "cpu"])
def test_a_kernel_takes_tensors_of_one_device(other: str) -> None:
    with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
        torch.ones(2, device=DEVICE) + torch.ones(2, device=other)


def write_then_read(x: Tensor, y: Tensor) -> list[Callable[[], object]]:
    return [lambda: x.add_(1), lambda: y.copy_(x)]


def read_then_write(x: Tensor, y: Tensor) -> list[Callable[[], object]]:
    return [lambda: y.copy_(x), lambda: x.add_(1)]


def write_twice(x: Tensor, y: Tensor) -> list[Callable[[], object]]:
    return [lambda: x.add_(1), lambda: x.mul_(2)]


@pytest.mark.parametrize("ordered", ["event", "stream", "host", "device", "no"])
@pytest.mark.parametrize("works", [write_then_read, read_then_write, write_twice])
def test_two_streams_without_an_event_race(works: Callable[..., list[Callable[[], object]]], ordered: str) -> None:
    x, y = torch.ones(4, device=DEVICE), torch.ones(4, device=DEVICE)
    torch.accelerator.synchronize(DEVICE)
    first, second = works(x, y)
    a, b = streams()
    with a:
        first()
    event = a.record_event()
    if ordered == "event":
        b.wait_event(event)
    elif ordered == "stream":
        b.wait_stream(a)
    elif ordered == "host":
        event.synchronize()
    elif ordered == "device":
        torch.accelerator.synchronize(DEVICE)
    with b:
        second()
    found = standin.problems()
    assert len(found) == (ordered == "no")
    if found:
        told = {
            write_then_read: "reads what add_ [4] on a has written",
            read_then_write: "writes what copy [4] on a still reads",
            write_twice: "writes what add_ [4] on a has written",
        }
        assert told[works] in found[0]


def test_reading_on_two_streams_and_writing_disjoint_parts_are_no_race() -> None:
    x = torch.ones(4, device=DEVICE)
    torch.accelerator.synchronize(DEVICE)
    a, b = streams()
    kept = []
    for stream in (a, b):
        with stream:
            kept.append(x + 1)
    torch.accelerator.synchronize(DEVICE)
    for stream, part in ((a, x[:2]), (b, x[2:])):
        with stream:
            part.add_(1)
    assert standin.problems() == []


def test_an_event_orders_what_was_queued_before_it_only() -> None:
    x = torch.ones(4, device=DEVICE)
    torch.accelerator.synchronize(DEVICE)
    a, b = streams()
    event = a.record_event()
    with a:
        x.add_(1)
    b.wait_event(event)
    with b:
        x.add_(1)
    assert len(standin.problems()) == 1


def freed(waits: str) -> list[str]:
    """Memory of stream a, read by stream b, dropped; then a asks for memory again."""
    a, b = streams()
    with a:
        x = torch.ones(4, device=DEVICE)
    b.wait_stream(a)
    with b:
        y = x + 1
    if waits == "before":
        a.wait_stream(b)
    elif waits == "record_stream":
        x.record_stream(b)
    del x
    if waits == "after":  # nobody has asked for the memory yet
        a.wait_stream(b)
    with a:
        z = torch.ones(4, device=DEVICE)
    del y, z
    return standin.problems()


@pytest.mark.parametrize("waits", ["before", "after", "record_stream", "no"])
def test_memory_that_goes_back_while_another_stream_uses_it_is_found(waits: str) -> None:
    found = freed(waits)
    assert len(found) == (waits == "no")
    assert all("early free: a takes 16 bytes" in text and "which add [4] on b still reads" in text for text in found)


def test_new_memory_may_still_be_used_by_what_its_stream_did_before() -> None:
    a, b = streams()
    with a:
        x = torch.empty(4, device=DEVICE)
    with b:
        x.fill_(1)
    assert "fill_ [4] on b writes what the allocation on a has written" in standin.problems()[0]


def test_a_copy_between_devices_waits_for_both_current_streams() -> None:
    there, here = torch.device("standin:0"), torch.device("standin:1")
    x = torch.ones(4, device=there)
    y = x.to(here)
    assert torch.equal((y + 1).cpu(), torch.full((4,), 2.0))
    [side] = streams(1, there)
    x.add_(1)
    with side:  # the copy runs on it, and nothing makes it wait for the add
        y.copy_(x)
    assert len(standin.problems()) == 1


def test_what_is_copied_to_pinned_memory_arrives_when_the_host_waits() -> None:
    x = torch.arange(4.0, device=DEVICE)
    host = torch.zeros(4).pin_memory()
    assert host.is_pinned()
    assert not torch.zeros(4).is_pinned()
    host.copy_(x, non_blocking=True)
    assert host.isnan().all(), "read too early"
    torch.accelerator.current_stream(DEVICE).synchronize()
    assert torch.equal(host, torch.arange(4.0))


def test_pinned_memory_must_not_change_while_it_is_read() -> None:
    host = torch.zeros(4).pin_memory()
    for wait in (True, False):
        x = host.to(DEVICE, non_blocking=True)
        if wait:
            torch.accelerator.synchronize(DEVICE)
        host.add_(1)
        torch.accelerator.synchronize(DEVICE)
        assert len(standin.problems()) == (not wait)
    assert torch.equal(x.cpu(), torch.ones(4))


def test_a_slow_device_has_not_ended_what_nobody_waited_for() -> None:
    standin.slow(True)
    x = torch.ones(4, device=DEVICE).add_(1)
    event = torch.accelerator.current_stream(DEVICE).record_event()
    assert not event.query()
    assert x.sum().item() == 8  # the host waits
    assert event.query()


def test_generators_are_the_devices_own() -> None:
    torch.manual_seed(7)
    expected = torch.rand(3, generator=torch.Generator().manual_seed(7))
    assert torch.equal(torch.rand(3, device=DEVICE).cpu(), expected)
    torch.rand(5)
    torch.rand(5, device="standin:2")
    state = torch.standin.get_rng_state(DEVICE)
    first = nn.functional.dropout(torch.ones(64, device=DEVICE)).cpu()
    assert not torch.equal(first, nn.functional.dropout(torch.ones(64, device=DEVICE)).cpu())
    torch.standin.set_rng_state(state, DEVICE)
    assert torch.equal(first, nn.functional.dropout(torch.ones(64, device=DEVICE)).cpu())


def test_backward_runs_on_the_streams_of_forward_and_waits_where_it_must() -> None:
    """PyTorch's own threads for backward: a graph over two devices and two streams, gradients on the caller's."""
    w, v = (torch.ones(4, device=f"standin:{n}", requires_grad=True) for n in (0, 1))
    [side] = streams(1, torch.device("standin:0"))
    side.wait_stream(torch.accelerator.current_stream("standin:0"))
    with side:
        y = w * 3
    torch.accelerator.current_stream("standin:0").wait_stream(side)
    (y.to("standin:1") * v).sum().backward()
    assert torch.equal(w.grad.cpu(), torch.full((4,), 3.0))
    assert torch.equal(v.grad.cpu(), torch.full((4,), 3.0))


def test_without_a_compiler_the_tests_say_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(RuntimeError, match="need a C\\+\\+ compiler: no-such-compiler cannot be run"):
        standin.build(tmp_path)
    monkeypatch.setenv("CXX", "false")
    with pytest.raises(RuntimeError, match="cannot be built"):
        standin.build(tmp_path)
