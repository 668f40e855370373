"""One training run through pipec: a network, a method, a learning rate and a seed, in; figures out."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import nets
import sets
import torch
import torch.nn.functional as F
from methods import Method
from torch import Tensor

import pipec

Rows = sets.Rows


@dataclass(frozen=True)
class Task:
    """A network and its data. ``epoch``: how many updates are called one; the learning rate rises in the first."""

    name: str
    parts: Callable[[], list[nets.Part]]
    inputs: tuple[str, ...]
    data: Callable[[], dict[str, Rows]]
    batch: int
    epoch: int

    def pipeline(self) -> pipec.Pipeline:
        return nets.pipeline(self.name, self.parts(), self.inputs, "target", score_loss)


def score_loss(scores: Tensor, target: Tensor) -> Tensor:
    """Cross entropy of images or of rows of letters."""
    return F.cross_entropy(scores.flatten(0, -2), target.flatten())


DIGITS = Task("digits", nets.digits_resnet, ("image",), cache(sets.digits), 40, 24)
LETTERS = Task("letters", lambda: nets.char_transformer(len(sets.LETTERS), length=sets.LENGTH), ("text",),
               cache(sets.text), 40, 50)
SMALL = {  # for --quick
    "digits": replace(DIGITS, parts=lambda: nets.digits_resnet(4, (1, 1)), epoch=8),
    "letters": replace(LETTERS, parts=lambda: nets.char_transformer(len(sets.LETTERS), 16, 1, 2, sets.LENGTH), epoch=8),
}


def rate(update: int, updates: int, rise: int) -> float:
    """The part of the learning rate at an update: a linear rise in the first updates, then half a cosine to zero."""
    if update < rise:
        return (update + 1) / rise
    return 0.5 * (1.0 + math.cos(math.pi * (update - rise) / (updates - rise)))


def optimizer(method: Method, lr: float) -> Callable[[Any], torch.optim.Optimizer]:
    momentum = 0.0 if method.schedule == "nesterov" else method.momentum  # its rule brings the momentum
    betas = (momentum, 0.999)
    if method.optimizer == "adamw":
        return lambda own: torch.optim.AdamW(own, lr=lr, betas=betas, weight_decay=0.0)
    if method.optimizer == "nadam":
        return lambda own: torch.optim.NAdam(own, lr=lr, betas=betas)
    return lambda own: torch.optim.SGD(own, lr=lr, momentum=momentum)


def train(task: Task, method: Method, lr: float, seed: int, epochs: float, use: str = "test") -> dict[str, Any]:
    """Train and evaluate.

    Returns:
        ``accuracy`` and ``loss`` on the rows of ``use``, ``losses``: the training loss of each minibatch, ``seconds``,
        ``asynchronous``: the part of the updates that were. A run whose loss explodes stops there: ``diverged`` is the
        update, the accuracy 0.
    """
    torch.manual_seed(seed)
    net, data, updates = task.pipeline(), task.data(), round(epochs * task.epoch)
    devices, began = method.devices or len(net.spec.stages), time.perf_counter()
    calm = pipec.compile(net, devices, method.microbatches, schedule="1f1b", update="stage")
    plan = pipec.compile(net, devices, method.microbatches, schedule=method.policy(), update="stage")
    first = round(method.warm * updates) if method.asynchronous else updates
    steps = pipec.Rescheduling(steps=round(method.reschedule * updates)) if method.reschedule else None
    rows = sets.batches(data["train"], task.batch, torch.Generator().manual_seed(1000 + seed))
    losses: list[float] = []
    with pipec.Runner(net, calm if first else plan, ["cpu"] * devices, optimizer(method, lr), backend="replay",
                      rescheduling=steps, seed=seed) as run:
        groups = [group for own in run.optimizers.values() for group in own.param_groups]
        for update in range(updates):
            if update == first and first:
                run.switch(plan)
            for group in groups:
                group["lr"] = lr * rate(update, updates, min(task.epoch, updates // 4))
            losses += finished(run.step(*next(rows)))
            if losses and not losses[-1] < 50.0:
                return {"accuracy": 0.0, "loss": None, "losses": losses[:-1], "diverged": update,
                        "seconds": time.perf_counter() - began, "asynchronous": 1.0 - first / updates}
        if method.asynchronous:
            losses += finished(run.flush())
        x, y = (part[:500] for part in data[use])
        result = run.evaluate(x, y)
        right = (result.output.argmax(-1) == y).float().mean()
    return {"accuracy": float(right), "loss": float(result.loss), "losses": losses,
            "seconds": time.perf_counter() - began, "asynchronous": 1.0 - first / updates}


def finished(result: Any) -> list[float]:
    """The training losses of the minibatches that a step finished: none while a pipeline fills."""
    return [float(result.loss)] if result.losses else []
