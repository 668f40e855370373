"""A failure reaches the caller as it is, says where it happened, undoes the step and leaves the runner usable."""

from __future__ import annotations

import queue
import signal
import threading
import time
from typing import Any

import models
import pytest
import torch
from fragile import fragile, minibatch, notes, workers
from models import gradients, kept_streams, parameters, same, snapshot
from torch import Tensor, nn
from torch.nn import functional as F

import pipec
from pipec.runtime.channels import Stopped

__all__ = ["kept_streams"]


class DemandingError(Exception):
    """Its constructor needs arguments, so nobody can make it again from its message."""

    def __init__(self, code: int, *, where: str) -> None:
        super().__init__(code, where)
        self.code, self.where = code, where


ERRORS: list[Any] = [
    lambda: ValueError("wrong"), lambda: StopIteration("stop"), lambda: SystemExit(3), lambda: KeyboardInterrupt(),
    lambda: DemandingError(7, where="here"), lambda: RuntimeError("out of memory"), lambda: GeneratorExit(),
    lambda: StopAsyncIteration("no more"),
]


STAGES = ("first", "second", "third")
PLACES = [
    (place, stage, m) for place in ("forward", "recompute", "backward", "hook") for stage in STAGES for m in range(4)
] + [("loss", "third", m) for m in range(4)]
TASKS = {"forward": "FORWARD", "recompute": "RECOMPUTE", "backward": "BACKWARD", "hook": "BACKWARD", "loss": "FORWARD"}


@pytest.fixture(scope="module")
def expected() -> list[Any]:
    net, _, _ = fragile()
    pipec.reference(net, 4).step(**minibatch())
    return snapshot(net)


@pytest.mark.parametrize("backend", ["threads", "replay"])
@pytest.mark.parametrize("recompute", ["never", "always"])
def test_every_place_stage_and_microbatch(backend: str, recompute: str, expected: list[Any]) -> None:
    """One runner survives all of them; after each the step counts as not done, and the next one is right."""
    net, bomb, stages = fragile()
    before_threads = workers()
    start = snapshot(net)
    with models.runner(net, 3, 4, recompute=recompute, backend=backend) as run:
        for number, (place, stage, m) in enumerate(PLACES):
            if place == "recompute" and recompute == "never":
                continue
            error = bomb.arm(place, stage, m, ERRORS[number % len(ERRORS)]())
            with pytest.raises(type(error)) as caught:
                run.step(**minibatch())
            for module in stages:
                module.runs.clear()
            assert caught.value is error
            told = f"stage {stage!r}, microbatch {m}, {TASKS[place]} ("
            assert told in notes(error), notes(error)
            assert same(snapshot(net), start)
            assert len(workers() - before_threads) <= 3
        run.step(**minibatch())
    assert same(snapshot(net), expected)


@pytest.mark.parametrize("backend", ["threads", "replay"])
@pytest.mark.parametrize("make", ERRORS)
@pytest.mark.parametrize("place", ["forward", "backward"])
def test_every_kind_of_exception_keeps_its_type_and_traceback(place: str, make: Any, backend: str) -> None:
    net, bomb, _ = fragile()
    with models.runner(net, 3, 4, backend=backend) as run:
        error = bomb.arm(place, "second", 2, make())
        with pytest.raises(type(error)) as caught:
            run.step(**minibatch())
    assert caught.value is error
    assert "check" in [entry.name for entry in caught.traceback]
    assert error.__cause__ is None
    assert error.__context__ is None


@pytest.mark.parametrize("internal", [Stopped, queue.Empty, StopIteration, GeneratorExit, RecursionError])
@pytest.mark.parametrize("backend", ["threads", "replay"])
@pytest.mark.parametrize("place", ["forward", "backward"])
def test_exceptions_that_pipec_itself_uses_are_the_users_when_a_stage_raises_them(
    internal: type[BaseException], backend: str, place: str
) -> None:
    net, fuse = models.chain(3), [True]

    def fail(*_: Any) -> None:
        if fuse[0]:
            raise internal("of a stage")

    layer = net.spec.stages[1].fn
    handle = layer.register_forward_hook(fail) if place == "forward" else layer[0].weight.register_hook(fail)
    with models.runner(net, 3, 4, backend=backend) as run:
        before = models.snapshot(net)
        with pytest.raises(internal, match="of a stage") as caught:
            run.step(**models.data())
        assert "stage 's1', microbatch 0" in notes(caught.value)
        assert models.same(models.snapshot(net), before)
        fuse[0] = False
        run.step(**models.data())
    handle.remove()


def test_two_stages_fail_at_once() -> None:
    barrier = threading.Barrier(2, timeout=20)

    def failing(params: Tensor, x: Tensor, *_: Any) -> Tensor:
        barrier.wait()
        time.sleep(0.05)
        raise ValueError("both")

    net = pipec.Pipeline("two")
    x, y = net.input("x"), net.input("y")
    parts = [net.stage(n, failing, x, params=torch.ones(8, requires_grad=True)) for n in ("left", "right")]
    net.loss("mse", F.mse_loss, net.stage("join", torch.add, *parts), y)
    with models.runner(net, 3, 1) as run, pytest.raises(ValueError, match="both") as caught:
        run.step(**models.data())
    told = [f"stage {s!r}, microbatch 0, FORWARD ({n}F0) on device {n}" for n, s in enumerate(("left", "right"))]
    either = [f"pipec: raised in {a}\npipec: {b} failed as well: ValueError: both" for a, b in (told, told[::-1])]
    assert notes(caught.value) in either


def test_the_caller_hears_of_it_within_a_second() -> None:
    """The others wait for values that never come; nobody waits for them."""
    net = models.of_modules(*[nn.Linear(8, 8) for _ in range(6)])

    def fail(*_: Any) -> None:
        raise ValueError("stop")

    handle = net.spec.stages[0].fn.register_forward_hook(fail)
    with models.runner(net, 6) as run:
        begin = time.monotonic()
        with pytest.raises(ValueError, match="stop"):
            run.step(**models.data())
        assert time.monotonic() - begin < 1.0
        handle.remove()
        run.step(**models.data())


@pytest.mark.parametrize("backend", ["threads", "replay"])
def test_an_interrupt_while_waiting_stops_the_workers_first(backend: str) -> None:
    net = models.of_modules(nn.Linear(8, 8), nn.Linear(8, 8))
    entered, slow = threading.Event(), [True]

    def sleep(*_: Any) -> None:
        entered.set()
        for _ in range(20 if slow[0] else 0):
            time.sleep(0.02)

    net.spec.stages[1].fn.register_forward_hook(sleep)
    start = snapshot(net)

    def interrupt() -> None:
        entered.wait(20)
        time.sleep(0.05)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    with models.runner(net, 2, backend=backend) as run:
        helper = threading.Thread(target=interrupt)
        helper.start()
        with pytest.raises(KeyboardInterrupt):
            run.step(**models.data())
        helper.join()
        assert same(snapshot(net), start)
        slow[0] = False
        run.step(**models.data())
    theirs = models.of_modules(nn.Linear(8, 8), nn.Linear(8, 8))
    for mine, other in zip(parameters(net), parameters(theirs), strict=True):
        other.data.copy_(mine.detach())
    pipec.reference(theirs, 4).step(**models.data())
    assert same(gradients(net), gradients(theirs))


class Picky(torch.optim.SGD):
    """An optimizer that fails once, after it has updated nothing."""

    def __init__(self, params: Any, name: str, broken: set[str]) -> None:
        super().__init__(params, lr=0.1)
        self.name, self.broken = name, broken

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        if self.name in self.broken:
            self.broken.clear()
            raise ArithmeticError(self.name)
        return super().step(closure)


@pytest.mark.parametrize("backend", ["threads", "replay"])
@pytest.mark.parametrize("broken", ["0", "1", "2"])
def test_a_failing_update_names_the_stages_that_were_updated(backend: str, broken: str) -> None:
    net, told, made = models.chain(3), {broken}, []

    def optimizer(params: Any) -> Picky:
        made.append(Picky(params, str(len(made)), told))
        return made[-1]

    with models.runner(net, 1, update="stage", optimizer=optimizer, backend=backend) as run:
        before = [p.detach().clone() for p in parameters(net)]
        with pytest.raises(ArithmeticError) as caught:
            run.step(**models.data())
        changed = [f"s{n // 2}" for n, p in enumerate(parameters(net)) if n % 2 == 0 and not torch.equal(p, before[n])]
        assert f"raised in stage 's{broken}', UPDATE ({broken}U0)" in notes(caught.value)
        assert set(gradients(net)) == {None}
        if changed:
            assert f"updated before: {', '.join(changed)}" in notes(caught.value)
        else:
            assert "updated before" not in notes(caught.value)
            after = [p.detach().clone() for p in parameters(net)]
            assert same(after, before)
        again = models.chain(3)
        for mine, other in zip(parameters(net), parameters(again), strict=True):
            other.data.copy_(mine.detach())
        run.step(**models.data())
    pipec.reference(again, 4).step(**models.data())
    torch.optim.SGD(parameters(again), lr=0.1).step()
    assert same([p.detach() for p in parameters(net)], [p.detach() for p in parameters(again)])


def test_a_failing_hook_updates_nobody_and_says_so() -> None:
    broken = [True]

    def hook(_: Any) -> None:
        if broken[0]:
            raise LookupError("clip")

    net = models.chain(3)
    with models.runner(net, 3, update="stage", before_update=hook,
                       optimizer=lambda p: torch.optim.SGD(p, lr=0.1)) as run:
        start = snapshot(net)
        with pytest.raises(LookupError, match="clip") as caught:
            run.step(**models.data())
        assert "before_update" in notes(caught.value)
        assert same(snapshot(net), start)
        broken[0] = False
        run.step(**models.data())
        assert not same(snapshot(net), start)


class SealedError(Exception):
    def add_note(self, note: str) -> None:
        raise RuntimeError("no notes")


@pytest.mark.parametrize("backend", ["threads", "replay"])
def test_an_exception_that_takes_no_note_still_arrives_as_itself(backend: str) -> None:
    def fail(_: Tensor) -> Tensor:
        raise SealedError

    with models.runner(models.of_modules(nn.Identity(), fail), backend=backend) as run, pytest.raises(SealedError):
        run.step(**models.data())


def test_microbatches_of_an_output_that_do_not_fit_together_change_nothing() -> None:
    layer, widths = nn.Linear(models.WIDTH, models.WIDTH), iter(range(1, 9))
    net = pipec.Pipeline("net")
    x, y = net.input("x"), net.input("y")
    value = net.stage("layer", layer, x)
    net.output(net.stage("ragged", lambda v: v.detach()[:, : next(widths)], value), "pieces")
    net.loss("loss", F.mse_loss, value, y)
    before = layer.weight.detach().clone()
    how = {"update": "stage", "optimizer": lambda own: torch.optim.SGD(own, lr=0.1)}
    with models.runner(net, **how) as run, pytest.raises(pipec.RunError, match=r"output 'pieces'.*\(2, 1\)"):
        run.step(**models.data())
    assert torch.equal(layer.weight, before)
    assert layer.weight.grad is None
