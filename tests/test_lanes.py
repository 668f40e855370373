"""Lanes on the CPU: a worker per lane, real copies, and the numbers of the plain loop."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import RUNS, WIDTH, buffers, chain, data, gradients, kept_streams, parameters, runner, same
from torch import Tensor, nn
from torch.nn import functional as F

import pipec
from pipec.runtime.lanes import submit_all, turns
from pipec.runtime.program import build_program
from pipec.runtime.stream_api import Recorder
from pipec.runtime.stream_lanes import StreamLanes
from pipec.runtime.transfer import copied, duplicate

__all__ = ["kept_streams"]


class Join(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor, skip: Tensor) -> Tensor:
        return self.line(torch.cat([x, skip], 1)).tanh()


def skipping(dropout: float = 0.3, hold: str | None = None) -> pipec.Pipeline:
    """Six stages with a skip from the first to the last and one in the middle, dropout, and batch norm."""
    torch.manual_seed(11)
    net = pipec.Pipeline("skipping")
    x, y = net.input("x"), net.input("y")
    a = net.stage("a", nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()), x)
    b = net.stage("b", nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(dropout)), a)
    c = net.stage("c", nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()), b)
    d = net.stage("d", Join(), c, pipec.skip(b, hold=hold))
    e = net.stage("e", nn.Sequential(nn.LayerNorm(WIDTH), nn.Dropout(dropout)), d)
    f = net.stage("f", Join(), e, pipec.skip(a, hold=hold))
    net.output(f)
    net.loss("mse", F.mse_loss, f, y)
    return net


@pytest.mark.parametrize("recompute", ["never", "always"])
@pytest.mark.parametrize("schedule", RUNS)
def test_every_schedule_gives_the_numbers_of_the_plain_loop(schedule: str, recompute: str) -> None:
    mine, theirs = skipping(), skipping()
    loop = pipec.reference(theirs, 4, seed=3)
    plan = pipec.compile(mine, 3, 4, schedule, recompute=recompute)
    with pipec.Runner(mine, plan, backend="lanes", seed=3) as run:
        for step in range(2):
            got, expected = run.step(**data(8, step)), loop.step(**data(8, step))
            assert same([got.losses, got.outputs], [expected.losses, expected.outputs])
        assert same(gradients(mine), gradients(theirs))
        assert same(buffers(mine), buffers(theirs))
        run.evaluate(**data(8))


@pytest.mark.parametrize("update", ["stage", "early"])
def test_updates_run_on_the_lanes(update: str) -> None:
    how: dict[str, Any] = {"update": "stage", "update_early": update == "early"}
    results = []
    for backend in ("replay", "lanes"):
        net = chain(3)
        with runner(net, 3, 4, optimizer=lambda p: torch.optim.Adam(p, 0.1), backend=backend, **how) as run:
            losses = [run.step(**data(8, step)).loss for step in range(4)]
        results.append([losses, parameters(net)])
    assert same(*results)


def test_a_copy_is_the_readers_own_memory() -> None:
    places: dict[str, set[int]] = {"here": set(), "there": set()}

    class Note(nn.Module):
        def __init__(self, name: str) -> None:
            super().__init__()
            self.name, self.line = name, nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            out = self.line(x)
            places[self.name].add((x if self.name == "there" else out).data_ptr())
            return out

    net = pipec.Pipeline("two")
    x, y = net.input("x"), net.input("y")
    out = net.stage("b", Note("there"), net.stage("a", Note("here"), x))
    net.loss("mse", F.mse_loss, out, y)
    with runner(net, 2, 2, "gpipe", backend="lanes") as run:
        run.step(**data(4))
    assert places["here"]
    assert not places["here"] & places["there"]


LAYOUTS = {
    "dense": torch.randn(4, 6), "transposed": torch.randn(4, 6).t(), "expanded": torch.randn(4, 1).expand(4, 6),
    "scalar expanded": torch.tensor(2.0).expand(3, 5), "channels last": torch.randn(2, 3, 4, 5).contiguous(
        memory_format=torch.channels_last), "scalar": torch.tensor(3.0), "empty": torch.empty(0, 3),
    "integers": torch.arange(6).view(2, 3), "flags": torch.tensor([True, False]),
    "complex": torch.randn(3, dtype=torch.complex64),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_duplicates_keep_values_and_strides_and_share_nothing(name: str) -> None:
    tensor = LAYOUTS[name]
    made = duplicate(tensor)
    assert torch.equal(made, tensor)
    assert (made.stride(), made.dtype) == (tensor.stride(), tensor.dtype)
    assert not tensor.numel() or made.data_ptr() != tensor.data_ptr()
    assert made.untyped_storage().nbytes() <= tensor.untyped_storage().nbytes()


def test_duplicates_of_a_part_do_not_carry_the_whole() -> None:
    part = torch.randn(4, 100)[:, :2]
    assert torch.equal(duplicate(part), part)
    assert duplicate(part).untyped_storage().nbytes() == part.numel() * 4


def test_copies_know_whether_they_require_a_gradient() -> None:
    assert copied(torch.ones(2, requires_grad=True), duplicate).requires_grad
    assert not copied(torch.ones(2), duplicate).requires_grad


def test_autocast_holds_on_every_lane() -> None:
    seen: list[torch.dtype] = []

    class Note(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.line = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            out = self.line(x)
            seen.append(out.dtype)
            return out

    net = pipec.Pipeline("cast")
    x, y = net.input("x"), net.input("y")
    net.loss("mse", F.mse_loss, net.stage("b", Note(), net.stage("a", Note(), x)), y)
    with runner(net, 2, 2, backend="lanes", recompute="always") as run, torch.autocast("cpu", torch.bfloat16):
        run.step(**data(4))
    assert set(seen) == {torch.bfloat16}


def streams() -> StreamLanes:
    return StreamLanes(Recorder(), [torch.device(f"cpu:{number}") for number in range(3)])


BACKENDS: dict[str, Callable[[], Any]] = {
    "lanes": lambda: "lanes", "adversarial": lambda: "adversarial", "streams": streams,
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_failure_stops_all_lanes_and_the_next_step_works(stage: int, backend: str) -> None:
    net, armed = chain(3), [True]

    def fail(module: nn.Module, args: Any) -> None:
        if armed and armed.pop():
            raise ValueError("wrong")

    handle = net.spec.stages[stage].fn.register_forward_pre_hook(fail)
    before = threading.active_count()
    with runner(net, 3, 4, backend=BACKENDS[backend]()) as run:
        with pytest.raises(ValueError, match="wrong") as caught:
            run.step(**data())
        assert f"stage 's{stage}'" in str(caught.value.__notes__ if hasattr(caught.value, "__notes__") else caught)
        assert gradients(net) == [None] * 6
        handle.remove()
        got, other = run.step(**data()), chain(3)
        assert same(got.losses, pipec.reference(other, 4).step(**data()).losses)
        assert same(gradients(net), gradients(other))
    assert threading.active_count() == before


@pytest.mark.parametrize("backend", BACKENDS)
def test_nothing_grows_and_steps_leave_no_tensor_behind(backend: str) -> None:
    borders: list[weakref.ref[Tensor]] = []
    net = chain(3)
    hook = net.spec.stages[0].fn.register_forward_hook(lambda m, i, out: borders.append(weakref.ref(out)))
    gc.collect()
    gc.disable()
    try:
        with runner(net, 3, 4, backend=BACKENDS[backend]()) as run:
            for _ in range(5):
                run.step(**data())
            assert len(borders) == 20
            assert not [ref for ref in borders if ref() is not None]
    finally:
        gc.enable()
    hook.remove()


def test_turns_put_a_copy_at_the_head_of_two_lanes() -> None:
    """Three works per COPY: the copy-in lane is ready, the copy, the copy-in lane goes on."""
    plan = pipec.compile(chain(2), 2, 1)
    log: list[tuple[int, str, tuple[int, ...]]] = []

    class Noted:
        def __init__(self, number: int) -> None:
            self.number = number

        def submit(self, work: Any, after: Any) -> int:
            log.append((self.number, work or "-", tuple(after)))
            return len(log) - 1

    every = turns(plan, build_program(plan).ops)
    submit_all(every, [Noted(i) for i in range(6)], lambda op: str(plan.table.task(op.task)))
    assert log == [
        (0, "0F0", ()), (5, "-", ()), (1, "v0[0]:0>1", (0, 1)), (5, "-", (2,)), (3, "1F0", (3,)), (3, "1B0", ()),
        (2, "-", ()), (4, "dv0[0]:1>0", (5, 6)), (2, "-", (7,)), (0, "0B0", (8,)),
    ]
