"""The caller's context holds inside the workers; a standstill is told."""

from __future__ import annotations

import contextvars
import logging
import threading
from typing import Any

import models
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import pipec

VARIABLE: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="unset")


class Observe(nn.Module):
    """Notes what it sees of its thread in forward, and through a hook in backward."""

    def __init__(self, seen: list[Any]) -> None:
        super().__init__()
        self.line = nn.Linear(4, 4)
        self.seen = seen

    def look(self) -> tuple[Any, ...]:
        return (
            torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"), torch.get_num_threads(),
            torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled(), VARIABLE.get(),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append((self.look(), torch.is_grad_enabled(), threading.current_thread().name))
        out = self.line(x)
        if out.requires_grad:
            out.register_hook(lambda _: self.seen.append((self.look(), None, threading.current_thread().name)))
        return out.float()


def observed(recompute: str = "never") -> tuple[list[Any], pipec.Runner]:
    seen: list[Any] = []
    net = pipec.Pipeline("net")
    x, y = net.input("x"), net.input("y")
    net.loss("mse", F.mse_loss, net.stage("b", Observe(seen), net.stage("a", Observe(seen), x)), y)
    return seen, pipec.Runner(net, pipec.compile(net, 2, 2, recompute=recompute), backend="threads")


def batch() -> dict[str, torch.Tensor]:
    return {"x": torch.randn(4, 4), "y": torch.randn(4, 4)}


@pytest.mark.parametrize("recompute", ["never", "always"])
def test_autocast_threads_flags_and_context_variables_reach_every_task(recompute: str) -> None:
    seen, run = observed(recompute)
    token = VARIABLE.set("mine")
    torch.use_deterministic_algorithms(True)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with run, torch.autocast("cpu", torch.bfloat16):
            run.step(**batch())
    finally:
        torch.set_num_threads(before)
        torch.use_deterministic_algorithms(False)
        VARIABLE.reset(token)
    forwards = 4 if recompute == "never" else 8
    assert len(seen) == forwards + 4
    assert {look for look, _, _ in seen} == {(True, torch.bfloat16, 1, torch.float32, True, "mine")}
    assert {grad for _, grad, _ in seen} == {True, None}
    assert len({name for _, _, name in seen}) == 2


def test_a_later_step_without_autocast_has_none() -> None:
    seen, run = observed()
    with run:
        with torch.autocast("cpu", torch.bfloat16):
            run.step(**batch())
        seen.clear()
        run.step(**batch())
    assert {look[0] for look, _, _ in seen} == {False}


def test_evaluation_under_inference_mode_makes_no_graph() -> None:
    seen, run = observed()
    with run, torch.inference_mode():
        run.evaluate(**batch())
    assert {grad for _, grad, _ in seen} == {False}


def test_default_device_and_modes_of_the_caller_see_the_operations_of_all_workers() -> None:
    class Count(TorchFunctionMode):
        names: set[str] = set()  # noqa: RUF012

        def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            self.names.add(threading.current_thread().name)
            return func(*args, **(kwargs or {}))

    class Dispatch(TorchDispatchMode):
        names: set[str] = set()  # noqa: RUF012

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            self.names.add(threading.current_thread().name)
            return func(*args, **(kwargs or {}))

    _, run = observed()
    data = batch()
    with run, Count(), Dispatch():
        run.step(**data)
        workers = {t.name for t in threading.enumerate() if t.name.startswith("pipec net")}
    assert len(workers & Count.names) == 2
    assert len(workers & Dispatch.names) == 2


@pytest.mark.parametrize("recompute", ["never", "always"])
def test_saved_tensor_hooks_of_the_caller_pack_what_the_workers_save(recompute: str) -> None:
    _, run = observed(recompute)
    threads: list[str] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        threads.append(threading.current_thread().name)
        return tensor.clone()

    data = batch()
    with run:
        run.step(**data)
        expected = [p.grad.clone() for p in run.parameters() if p.grad is not None]
        for parameter in run.parameters():
            parameter.grad = None
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            run.step(**data)
        assert len(set(threads)) == 2
        got = [p.grad for p in run.parameters() if p.grad is not None]
    assert len(got) == 4
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def _standing(net: pipec.Pipeline) -> pipec.Runner:
    return pipec.Runner(net, pipec.compile(net, 2, 2), backend="threads", watchdog=0.2)


def test_a_standstill_is_told_with_the_place_of_every_device(caplog: pytest.LogCaptureFixture) -> None:
    gate = threading.Event()

    class Stuck(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if not gate.wait(30):
                raise AssertionError("the watchdog never spoke")
            return x

    class Open(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            gate.set()

    net = pipec.Pipeline("net")
    x, y = net.input("x"), net.input("y")
    value = net.stage("first", nn.Linear(4, 4), x)
    value = net.stage("stuck", Stuck(), value)
    net.loss("mse", F.mse_loss, value, y)
    handler = Open()
    logger = logging.getLogger("pipec")
    logger.addHandler(handler)
    try:
        with caplog.at_level("WARNING", "pipec"), _standing(net) as run:
            run.step(**batch())
    finally:
        logger.removeHandler(handler)
    assert caplog.messages[0].splitlines() == [
        "pipec: no task has ended for 0.2 s",
        "  device 0 waits to begin stage 'first', microbatch 0, BACKWARD (0B0) on device 0",
        "  device 1 runs stage 'stuck', microbatch 0, FORWARD (1F0) on device 1",
    ]


def test_two_intra_op_threads_are_bit_equal_to_the_reference_with_two() -> None:
    torch.manual_seed(0)
    net = pipec.Pipeline("wide")
    x, y = net.input("x"), net.input("y")
    value = net.stage("b", nn.Conv2d(8, 8, 3, padding=1), net.stage("a", nn.Conv2d(3, 8, 3, padding=1), x))
    net.loss("mse", F.mse_loss, net.stage("c", nn.LayerNorm([8, 24, 24]), value), y)
    data = {"x": torch.randn(8, 3, 24, 24), "y": torch.randn(8, 8, 24, 24)}
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        report = pipec.check(net, data, devices=3, microbatches=2, backend="threads")
    finally:
        torch.set_num_threads(before)
    assert report, str(report)


@pytest.mark.parametrize("backend", ["threads", "replay"])
def test_inference_mode_holds_in_every_stage(backend: str) -> None:
    seen: list[tuple[bool, bool]] = []
    net = models.chain(3)
    for stage in net.spec.stages:
        stage.fn.register_forward_hook(
            lambda _m, _a, out: seen.append((torch.is_inference_mode_enabled(), out.is_inference()))
        )
    with models.runner(net, 3, 4, backend=backend) as run:
        with torch.inference_mode():
            inside = run.evaluate(**models.data())
        assert seen == [(True, True)] * 12
        seen.clear()
        outside = run.evaluate(**models.data())
        assert seen == [(False, False)] * 12
    assert torch.equal(inside.loss, outside.loss)


class Twice(nn.Module):
    """Uses one weight three times under its own autocast."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            for _ in range(3):
                x = torch.tanh(self.line(x))
        return x.float()


@pytest.mark.parametrize("around", [False, True])
def test_casts_of_a_weight_are_shared_within_a_stage_whatever_other_threads_do(around: bool) -> None:
    torch.manual_seed(0)
    net = pipec.Pipeline("net")
    value, y = net.input("x"), net.input("y")
    for name in "abcd":
        value = net.stage(name, Twice(), value)
    net.loss("mse", F.mse_loss, value, y)
    data = {"x": torch.randn(16, 16), "y": torch.randn(16, 16)}
    plan = pipec.compile(net, 4, 8, "gpipe")
    with torch.autocast("cpu", torch.bfloat16, enabled=around):
        for _ in range(12):
            report = pipec.check(net, data, plan, backend="threads")
            assert report, str(report)


def test_casts_do_not_outlive_the_weights_they_were_made_of() -> None:
    net = pipec.Pipeline("net")
    x, y = net.input("x"), net.input("y")
    net.loss("mse", F.mse_loss, net.stage("b", Twice(), net.stage("a", Twice(), x)), y)
    data = {"x": torch.randn(8, 16), "y": torch.randn(8, 16)}
    plan = pipec.compile(net, 2, 2, update="stage")
    with pipec.Runner(net, plan, optimizer=lambda p: torch.optim.SGD(p, lr=0.5), backend="threads") as run:
        losses = [float(run.step(**data).loss) for _ in range(4)]
        assert float(run.evaluate(**data).loss) not in losses
    assert len(set(losses)) == 4
