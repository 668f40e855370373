"""Load: batches of every size, pipelines beside and behind each other, many runners, many steps; nothing grows."""

from __future__ import annotations

import gc
import random
import resource
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import models
import pytest
import torch
from models import WIDTH, buffers, data, gradients, kept_streams, of_modules, parameters, runner, same  # noqa: F401
from torch import Tensor, nn
from torch.nn import functional as F

import pipec

WORDS = 13


@pytest.fixture(scope="module", autouse=True)
def one_thread_an_operation() -> Iterator[None]:
    """Tiny operations wait for each other's threads when the machine is busy; many steps would take minutes."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Words(nn.Module):
    """Embedding of a whole sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(WORDS, WIDTH)

    def forward(self, ids: Tensor) -> Tensor:
        return self.table(ids)


class Attention(nn.Module):
    """One block over sequences of any length, with a skip from the embedding and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.MultiheadAttention(WIDTH, 2, batch_first=True, dropout=0.1)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, h: Tensor, skip: Tensor | None = None) -> Tensor:
        mixed = h + self.mix(h, h, h, need_weights=False)[0]
        return self.norm(mixed if skip is None else mixed + skip)


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)
        self.line = nn.Linear(WIDTH, WORDS)

    def forward(self, h: Tensor) -> Tensor:
        return self.line(self.norm(h.transpose(1, 2)).transpose(1, 2))


def likelihood(logits: Tensor, ids: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), ids.flatten())


def language() -> pipec.Pipeline:
    torch.manual_seed(6)
    net = pipec.Pipeline("language")
    ids, target = net.input("ids"), net.input("target")
    words = net.stage("words", Words(), ids)
    value = net.stage("second", Attention(), net.stage("first", Attention(), words), pipec.skip(words))
    value = net.stage("head", Head(), value)
    net.output(value)
    net.loss("loss", likelihood, value, target)
    return net


def sentences(rows: int, length: int, seed: int) -> dict[str, Tensor]:
    make = torch.Generator().manual_seed(seed)
    return {name: torch.randint(WORDS, (rows, length), generator=make) for name in ("ids", "target")}


@pytest.mark.parametrize(("devices", "how"), [
    (2, {"recompute": "except_last"}), (4, {"schedule": "gpipe"}), (2, {"schedule": "interleaved-1f1b"}),
], ids=str)
def test_batches_and_sequences_of_any_size(devices: int, how: dict[str, Any]) -> None:
    draw = random.Random(devices)
    mine, theirs = language(), language()
    loop = pipec.reference(theirs, 4, seed=1)
    own = torch.optim.Adam(parameters(theirs), lr=0.01)
    plan = pipec.compile(mine, devices, 4, update="stage", **how)
    counts = set()
    with pipec.Runner(mine, plan, optimizer=lambda p: torch.optim.Adam(p, lr=0.01), seed=1) as run:
        for step in range(50):
            given = sentences(step + 1 if step < 3 else draw.randint(1, 14), draw.randint(2, 20), step)
            got, expected = run.step(**given), loop.step(**given)
            own.step()
            own.zero_grad()
            assert same([got.losses, got.outputs], [expected.losses, expected.outputs]), step
            counts.add(got.microbatches)
            if step % 10 == 3:
                size = draw.randint(1, 30)
                assert len(run.evaluate(**sentences(size, draw.randint(1, 9), step)).output) == size
    assert same([p.detach() for p in parameters(mine)], [p.detach() for p in parameters(theirs)])
    assert same(buffers(mine), buffers(theirs))
    assert counts == {1, 2, 3, 4}


@pytest.mark.parametrize("how", [{"recompute": "always"}, {"schedule": "gpipe"}], ids=str)
def test_two_pipelines_step_at_once_from_two_threads(how: dict[str, Any]) -> None:
    def noisy(seed: int) -> pipec.Pipeline:
        torch.manual_seed(seed)
        return of_modules(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.3), nn.Tanh()) for _ in range(3)))

    count, start, trouble = 40, threading.Barrier(2, timeout=60), []
    nets = [noisy(1), noisy(2)]
    results: list[list[Any]] = [[], []]

    def train(which: int) -> None:
        try:
            torch.set_num_threads(1)
            with pipec.Runner(nets[which], pipec.compile(nets[which], 2 + which, 4, **how), seed=which) as run:
                start.wait()
                for step in range(count):
                    result = run.step(**data(9 + which, step))
                    results[which].append([result.losses, result.outputs])
        except BaseException as error:
            trouble.append(error)
            start.abort()

    callers = [threading.Thread(target=train, args=(which,)) for which in range(2)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert trouble == []
    for which in range(2):
        alone = noisy(1 + which)
        loop = pipec.reference(alone, 4, seed=which)
        for step in range(count):
            expected = loop.step(**data(9 + which, step))
            assert same(results[which][step], [expected.losses, expected.outputs])
        assert same(gradients(nets[which]), gradients(alone))


def test_one_pipeline_feeds_another() -> None:
    """The second's input carries the gradient back to the first's output, as a loss of the first."""

    def halves() -> tuple[pipec.Pipeline, pipec.Pipeline]:
        torch.manual_seed(3)
        layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)]
        front = pipec.Pipeline("front")
        value = front.stage("b", layers[1], front.stage("a", layers[0], front.input("x")))
        front.output(value)
        front.loss("along", lambda h, g: (h * g).sum(), value, front.input("g"), reduction="sum")
        return front, of_modules(*layers[2:])

    front, back = halves()
    with runner(front, 2, 4) as one, runner(back, 2, 3) as two:
        for step in range(5):
            given = data(12, step)
            between = one.forward(x=given["x"]).output.requires_grad_()
            result = two.step(x=between, y=given["y"])
            again = one.step(x=given["x"], g=between.grad)
            assert same(again.output, between.detach())
    plain_front, plain_back = halves()
    modules = [stage.fn for net in (plain_front, plain_back) for stage in net.spec.stages]
    for step in range(5):
        given = data(12, step)
        value = given["x"]
        for module in modules:
            value = module(value)
        loss = F.mse_loss(value, given["y"])
        loss.backward()
    torch.testing.assert_close(result.loss, loss.detach())
    for mine, theirs in zip(
        gradients(front) + gradients(back), gradients(plain_front) + gradients(plain_back), strict=True
    ):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6)


def test_the_callers_graph_reaches_through_an_input_that_requires_grad() -> None:
    """An outer module in front: one backward pass through its graph per step, into its own gradients."""
    torch.manual_seed(0)
    outer, net = nn.Linear(WIDTH, WIDTH), models.chain(3)
    passes: list[int] = []
    with runner(net, 3, 4) as run:
        for step in range(20):
            given = data(4 + step % 5, step)
            value = torch.tanh(outer(given["x"]))
            value.register_hook(lambda gradient: passes.append(1))
            run.step(x=value, y=given["y"])
    assert len(passes) == 20
    torch.manual_seed(0)
    plain, other = nn.Linear(WIDTH, WIDTH), models.chain(3)
    for step in range(20):
        given = data(4 + step % 5, step)
        value = torch.tanh(plain(given["x"]))
        for stage in other.spec.stages:
            value = stage.fn(value)
        F.mse_loss(value, given["y"]).backward()
    torch.testing.assert_close(outer.weight.grad, plain.weight.grad, rtol=1e-4, atol=1e-6)


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def live_tensors() -> int:
    return sum(1 for found in gc.get_objects() if issubclass(type(found), Tensor))


def resident() -> int:
    """Bytes of this process that lie in memory; where only their peak can be had, the peak."""
    if Path("/proc/self/statm").exists():
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


@pytest.mark.parametrize("closed", [True, False])
def test_fifty_runners_come_and_go(closed: bool, no_collector: None) -> None:
    def once(number: int) -> None:
        net = of_modules(*(nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU()) for _ in range(3)))
        made = lambda params: torch.optim.Adam(params)  # noqa: E731
        run = runner(net, 3, 4, ("gpipe", "1f1b")[number % 2], update="stage", optimizer=made)
        run.step(**data(16, number, 64))
        run.evaluate(x=data(8, number, 64)["x"])
        if closed:
            run.close()

    for number in range(3):
        once(number)
    settle()
    threads, tensors = threading.active_count(), live_tensors()
    for number in range(50):
        once(number)
    settle()
    assert threading.active_count() <= threads
    assert live_tensors() <= tensors


def settle() -> None:
    """Wait until worker threads that were told to end have ended."""
    deadline = time.monotonic() + 10
    for thread in threading.enumerate():
        if thread.name.startswith("pipec ") and "device" in thread.name:
            thread.join(timeout=max(0.0, deadline - time.monotonic()))


def mixed() -> pipec.Pipeline:
    torch.manual_seed(9)
    net = pipec.Pipeline("mixed")
    x, y = net.input("x"), net.input("y")
    a = net.stage("a", pipec.deferred_batch_norm(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH))), x)
    b = net.stage("b", nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.2), nn.Tanh()), a)
    c = net.stage("c", nn.Bilinear(WIDTH, WIDTH, WIDTH), b, pipec.skip(a))
    net.output(c)
    net.loss("loss", F.mse_loss, c, y)
    return net


@pytest.mark.parametrize(("backend", "how"), [
    ("threads", {"recompute": "except_last"}), ("replay", {"schedule": "gpipe", "recompute": "always"}),
    ("threads", {"schedule": "interleaved-1f1b", "update": None}),
], ids=str)
def test_steps_leave_no_tensors(backend: str, how: dict[str, Any], no_collector: None) -> None:
    net = mixed()
    how = {"update": "stage"} | how
    own = {"optimizer": lambda params: torch.optim.Adam(params)} if how["update"] else {}
    if how.get("schedule") == "interleaved-1f1b":  # as many chunks for every device
        net = models.chain(4)
    given = [data(8 + size, size) for size in range(4)]
    with runner(net, 2, 4, backend=backend, **own, **how) as run:
        counts = []
        for step in range(201):
            run.step(**given[step % 4])
            if step % 9 == 1:
                run.evaluate(**given[step % 4])
            if step in (5, 200):
                counts.append((live_tensors(), threading.active_count(), len(gc.get_objects())))
    before, after = counts
    assert after[:2] == before[:2]
    assert after[2] <= before[2] + 200  # objects: caches of torch and Python may fill, one a step may not


@pytest.mark.parametrize("keep", ["results", "errors"])
def test_what_the_caller_keeps_holds_nothing_else(keep: str, no_collector: None) -> None:
    fail = [False]

    def loss(h: Tensor, y: Tensor) -> Tensor:
        if fail[0]:
            raise OSError("no")
        return F.mse_loss(h, y)

    net = models.chain(3, loss=loss)
    kept: list[Any] = []
    with runner(net, 3, 4) as run:
        counts = []
        for step in range(61):
            fail[0] = keep == "errors" and step % 2 == 1
            try:
                kept.append(run.step(**data(8)))
            except OSError as error:
                kept.append(str(error))
            if step in (10, 60):
                counts.append(live_tensors())
        assert sum(isinstance(one, str) for one in kept) == (30 if keep == "errors" else 0)
    results = 50 if keep == "results" else 25
    assert counts[1] - counts[0] == 2 * results  # a loss and an output each


def small() -> pipec.Pipeline:
    torch.manual_seed(9)
    return of_modules(
        nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.2)),
        pipec.deferred_batch_norm(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH))),
    )


def test_a_soak_of_two_thousand_steps_is_bit_equal() -> None:
    mine, theirs = small(), small()
    loop = pipec.reference(theirs, 2, seed=4)
    own = torch.optim.SGD(parameters(theirs), lr=0.01, momentum=0.9)
    plan = pipec.compile(mine, 2, 2, update="all", recompute={"a": "always"})
    made = torch.optim.SGD(parameters(mine), lr=0.01, momentum=0.9)
    given = [data(6 + size, size) for size in range(4)]
    with pipec.Runner(mine, plan, optimizer=made, seed=4) as run:
        for step in range(2000):
            got, expected = run.step(**given[step % 4]), loop.step(**given[step % 4])
            own.step()
            own.zero_grad()
            assert torch.equal(got.loss, expected.loss), step
    assert same([p.detach() for p in parameters(mine)], [p.detach() for p in parameters(theirs)])
    assert same(buffers(mine), buffers(theirs))
    assert bool(torch.isfinite(got.loss))


def test_resident_memory_comes_back(no_collector: None) -> None:
    def once() -> None:
        net = of_modules(*(nn.Linear(512, 512) for _ in range(3)))
        with runner(net, 3, 4) as run:
            run.step(**data(512, width=512))

    for _ in range(5):
        once()
    before = resident()
    for _ in range(30):
        once()
    assert resident() - before < 24 * 2**20  # one runner's weights and gradients are 6 MiB, its batch 2 MiB
