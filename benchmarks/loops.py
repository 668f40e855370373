"""What pipec is measured against: the plain loop on one thread, and a two-thread 1F1B loop written by hand."""

from __future__ import annotations

import threading
from collections import deque
from queue import SimpleQueue
from typing import Any

import torch
from models import Model, Section
from torch import Tensor

import pipec


class Plain:
    """Microbatch by microbatch on one thread: forward, whole-model backward, gradients added up in ``.grad``."""

    def __init__(self, model: Model, microbatches: int) -> None:
        self.model, self.microbatches, self.whole = model, microbatches, model.whole()

    def __call__(self) -> Tensor:
        x, y = self.model.batch
        clear(self.model)
        total = torch.zeros(())
        for xs, ys in zip(x.chunk(self.microbatches), y.chunk(self.microbatches), strict=True):
            loss = self.model.loss(*self.whole(xs), ys) / self.microbatches
            loss.backward()
            total += loss.detach()
        return total


class ByHand:
    """1F1B for exactly two devices, as one would write it for one model and no other.

    Two persistent threads, two queues, autograd once per half and microbatch, borders detached, skips handed straight
    over with the border; no checks, no trace, no failure handling, no random streams.
    """

    def __init__(self, model: Model, microbatches: int) -> None:
        self.model, self.microbatches = model, microbatches
        self.ahead: SimpleQueue[list[Tensor]] = SimpleQueue()
        self.back: SimpleQueue[list[Tensor | None]] = SimpleQueue()
        self.done: SimpleQueue[Tensor] = SimpleQueue()
        self.jobs: tuple[SimpleQueue[Any], SimpleQueue[Any]] = (SimpleQueue(), SimpleQueue())
        first, second = model.halves()
        for work, half, jobs in ((self.first, first, self.jobs[0]), (self.second, second, self.jobs[1])):
            threading.Thread(target=self.serve, args=(work, half, jobs), daemon=True).start()

    def __call__(self) -> Tensor:
        clear(self.model)
        for jobs, data in zip(self.jobs, self.model.batch, strict=True):
            jobs.put(data.chunk(self.microbatches))
        return self.done.get() + self.done.get()

    def serve(self, work: Any, half: Section, jobs: SimpleQueue[Any]) -> None:
        torch.set_num_threads(1)
        while (pieces := jobs.get()) is not None:
            work(half, pieces)
            del pieces

    def first(self, half: Section, pieces: tuple[Tensor, ...]) -> None:
        graphs: deque[tuple[Tensor, ...]] = deque()

        def forward(piece: Tensor) -> None:
            border = half(piece)
            self.ahead.put([tensor.detach().requires_grad_() for tensor in border])
            graphs.append(border)

        def backward() -> None:
            torch.autograd.backward(graphs.popleft(), self.back.get())

        forward(pieces[0])
        for piece in pieces[1:]:
            forward(piece)
            backward()
        backward()
        self.done.put(torch.zeros(()))  # the loss is the other thread's

    def second(self, half: Section, pieces: tuple[Tensor, ...]) -> None:
        total = torch.zeros(())
        for piece in pieces:
            border = self.ahead.get()
            loss = self.model.loss(*half(*border), piece) / self.microbatches
            loss.backward()
            total += loss.detach()
            self.back.put([tensor.grad for tensor in border])
            del border, loss
        self.done.put(total)

    def close(self) -> None:
        for jobs in self.jobs:
            jobs.put(None)


class WithoutFlush(ByHand):
    """The same two threads without a flush: from step to step the first keeps two microbatches in flight and the second
    is one behind, so that both begin and end a step with work of their own; each half updates by itself.

    Backwards read whatever weights there are, and autograd's check for that is passed by: no training, but the same
    work, which tells what an asynchronous pipeline can gain on this machine.
    """

    def __init__(self, model: Model, microbatches: int, optimizer: Any) -> None:
        self.optimizer = optimizer
        self.graphs: deque[tuple[Tensor, ...]] = deque()
        self.targets: deque[Tensor] = deque()
        self.backwards = [0, 0]
        super().__init__(model, microbatches)

    def __call__(self) -> Tensor:
        for jobs, data in zip(self.jobs, self.model.batch, strict=True):
            jobs.put(data.chunk(self.microbatches))
        return self.done.get() + self.done.get()

    def serve(self, work: Any, half: Section, jobs: SimpleQueue[Any]) -> None:
        half.update = self.optimizer(half.parameters())
        super().serve(work, half, jobs)

    def first(self, half: Section, pieces: tuple[Tensor, ...]) -> None:
        for piece in pieces:
            if len(self.graphs) == 2:
                torch.autograd.backward(self.graphs.popleft(), self.back.get())
                self.count(0, half)
            border = half(piece)
            self.ahead.put([tensor.detach().requires_grad_() for tensor in border])
            self.graphs.append(border)
        self.done.put(torch.zeros(()))

    def second(self, half: Section, pieces: tuple[Tensor, ...]) -> None:
        self.targets.extend(pieces)
        total = torch.zeros(())
        while len(self.targets) > 1:
            border = self.ahead.get()
            loss = self.model.loss(*half(*border), self.targets.popleft()) / self.microbatches
            loss.backward()
            total += loss.detach()
            self.back.put([tensor.grad for tensor in border])
            del border, loss
            self.count(1, half)
        self.done.put(total)

    def count(self, device: int, half: Section) -> None:
        """After a backward: every ``microbatches`` an optimizer step, unseen by graphs in flight."""
        self.backwards[device] += 1
        if self.backwards[device] % self.microbatches == 0:
            with torch.autograd._unsafe_preserve_version_counter(tuple(half.parameters())):
                half.update.step()
            half.update.zero_grad()


class Pipec:
    """A pipec runner on the model's own split, a stage per part."""

    def __init__(self, model: Model, microbatches: int, schedule: str = "1f1b", devices: int = 2) -> None:
        self.model = model
        net = model.pipeline()
        self.plan = pipec.compile(net, devices, microbatches, schedule, placement=model.placement(devices))
        self.run = pipec.Runner(net, self.plan)

    def __call__(self) -> Tensor:
        clear(self.model)
        x, y = self.model.batch
        return self.run.step(x, y).loss

    def close(self) -> None:
        self.run.close()


def clear(model: Model) -> None:
    """What ``optimizer.zero_grad()`` does, the same for every contender."""
    for parameter in model.parameters():
        parameter.grad = None


def check(contender: Any, model: Model, plain: Plain) -> None:
    """One step of each gives the same loss and gradients within rounding, else the comparison means nothing.

    Raises:
        RuntimeError: they differ.
    """
    loss, expected = contender(), plain()
    pairs = [(loss, expected)] + [
        (own.grad, theirs.grad) for own, theirs in zip(model.parameters(), plain.model.parameters(), strict=True)
    ]
    for own, theirs in pairs:
        if own is None or theirs is None or not torch.allclose(own, theirs, rtol=1e-3, atol=1e-5):
            raise RuntimeError(f"{type(contender).__name__} does not compute what the plain loop does on {model.name}")
