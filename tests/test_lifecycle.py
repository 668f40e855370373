"""A runner from its first step to its end: its workers, its tensors, one call at a time."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Iterator
from typing import Any

import models
import pytest
import torch
from fragile import fragile, minibatch, workers
from models import gradients, kept_streams
from torch import Tensor, nn

import pipec

__all__ = ["kept_streams"]


@pytest.fixture
def no_gc() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_gc")
@pytest.mark.parametrize("backend", ["threads", "replay"])
@pytest.mark.parametrize("place", ["forward", "backward"])
def test_once_the_exception_is_gone_so_are_the_tensors(backend: str, place: str) -> None:
    """No cycle through a traceback keeps them: a smaller retry after running out of memory has a chance."""
    alive: list[weakref.ref[Tensor]] = []
    net, bomb, stages = fragile()
    for stage in stages:
        stage.register_forward_hook(lambda _m, args, out: alive.extend((weakref.ref(out), weakref.ref(args[0]))))
    with models.runner(net, 3, 4, "gpipe", backend=backend) as run:
        bomb.arm(place, "second", 3, MemoryError())
        try:
            run.step(**minibatch())
        except MemoryError:
            bomb.error = None
        deadline = time.monotonic() + 5  # a worker needs a moment to leave its last frame
        while any(ref() is not None for ref in alive) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert len(alive) > 6
        assert [ref() is None for ref in alive] == [True] * len(alive)


@pytest.mark.usefixtures("no_gc")
def test_a_runner_that_is_dropped_ends_its_workers_without_the_collector() -> None:
    net, _, _ = fragile()
    before = workers()
    run = models.runner(net, 3, 4)
    run.step(**minibatch())
    run.evaluate(**minibatch())
    started = workers() - before
    assert len(started) == 3
    gone = weakref.ref(run)
    del run
    assert gone() is None
    for thread in started:
        thread.join(5)
    assert not any(thread.is_alive() for thread in started)


def test_close_ends_the_workers_and_a_closed_runner_says_so() -> None:
    net, _, _ = fragile()
    before = workers()
    run = models.runner(net, 3, 4)
    run.step(**minibatch())
    assert len(workers() - before) == 3
    run.close()
    assert not workers() - before
    run.close()
    with pytest.raises(pipec.RunError, match="closed"):
        run.step(**minibatch())


def test_workers_persist_over_steps() -> None:
    net, _, _ = fragile()
    before = workers()
    with models.runner(net, 3, 4) as run:
        run.step(**minibatch())
        first = workers() - before
        run.evaluate(**minibatch())
        run.step(**minibatch())
        assert workers() - before == first


def test_one_runner_does_one_call_at_a_time() -> None:
    inside, go = threading.Event(), threading.Event()

    def wait(x: Tensor) -> Tensor:
        inside.set()
        assert go.wait(30)
        return x

    net = models.of_modules(nn.Linear(models.WIDTH, models.WIDTH), wait)
    with models.runner(net) as run:
        other = threading.Thread(target=lambda: run.step(**models.data()))
        other.start()
        assert inside.wait(30)
        try:
            with pytest.raises(pipec.RunError, match="busy with another step"):
                run.step(**models.data())
        finally:
            go.set()
            other.join()
        found = gradients(net)
        run.step(**models.data())  # free again
    assert all(torch.allclose(twice, 2 * once) for once, twice in zip(found, gradients(net), strict=True))


@pytest.mark.parametrize("backend", ["threads", "replay"])
def test_a_stage_that_calls_its_own_runner_fails_and_does_not_hang(backend: str) -> None:
    runs: list[Any] = []
    net = models.of_modules(nn.Linear(models.WIDTH, models.WIDTH), lambda x: runs[0].evaluate(**models.data()).output)
    with models.runner(net, backend=backend) as run:
        runs.append(run)
        with pytest.raises(pipec.RunError, match="busy with another"):
            run.step(**models.data())
