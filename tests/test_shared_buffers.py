"""Buffers of a module that several stages hold: one stage may use a buffer that changes, others may hold it."""

from __future__ import annotations

from typing import Any

import models
import pytest
import torch
from models import WIDTH, buffers, data, gradients, kept_streams, runner, same
from torch import Tensor, nn

import pipec

__all__ = ["kept_streams"]


class Auto(nn.Module):
    """``encode`` uses the norm, the counters and the cache; ``decode`` what ``also`` says."""

    def __init__(self, also: str = "", **norm: Any) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm, self.also = nn.BatchNorm1d(WIDTH, **norm), also
        self.register_buffer("replaced", torch.zeros(()))
        self.register_buffer("made", None)
        self.register_buffer("fixed", torch.ones(WIDTH))

    def encode(self, x: Tensor) -> Tensor:
        self.replaced = self.replaced + 1
        self.made = torch.ones(WIDTH) if self.made is None else self.made + 1
        return self.norm(self.first(x)) * self.fixed * self.replaced * self.made

    def decode(self, h: Tensor) -> Tensor:
        h = self.second(h) * self.fixed
        if self.also == "norm":
            return self.norm(h)
        if self.also == "reads":
            return h - self.norm.running_mean
        if self.also == "view":
            return h + self.norm.running_mean.data[:1]
        if self.also in ("replaced", "made"):
            return h * getattr(self, self.also)
        if self.also == "counter":
            self.norm.num_batches_tracked += 1
        if self.also == "assigns":
            self.made = torch.zeros(WIDTH)
        return h


def methods(also: str = "", **norm: Any) -> pipec.Pipeline:
    torch.manual_seed(0)
    module = Auto(also, **norm)
    net = pipec.Pipeline("auto")
    x, y = net.input("x"), net.input("y")
    h = net.stage("encode", module.encode, x)
    h = net.stage("between", nn.Tanh(), h)
    h = net.stage("decode", module.decode, h)
    net.loss("mse", nn.functional.mse_loss, h, y)
    net.output(h)
    return net


def module_of(net: pipec.Pipeline) -> Any:
    return net.spec.stages[0].fn.__self__


def state(net: pipec.Pipeline) -> list[Tensor]:
    module = module_of(net)
    return [*module.norm.buffers(), module.replaced, module.made, *(p.grad for p in module.parameters())]


@pytest.mark.parametrize("backend", ["threads", "replay"])
@pytest.mark.parametrize("recompute", ["never", "always", "except_last"])
@pytest.mark.parametrize("devices", [1, 3])
def test_methods_of_one_module_are_two_stages_if_one_uses_its_batch_norm(
    devices: int, recompute: str, backend: str
) -> None:
    plain, net = methods(), methods()
    reference = pipec.reference(plain, 4)
    with runner(net, devices, 4, recompute=recompute, backend=backend) as run:
        for number in range(3):
            expected, result = reference.step(**data(8 + number)), run.step(**data(8 + number))
            assert torch.equal(result.loss, expected.loss)
            assert same(state(net), state(plain))
    assert module_of(net).norm.num_batches_tracked == 12
    assert module_of(net).made[0] == 12


@pytest.mark.parametrize("also", ["norm", "reads", "view", "counter", "replaced", "made", "assigns"])
@pytest.mark.parametrize("backend", ["threads", "replay"])
def test_a_changing_buffer_that_two_stages_use_is_refused_and_undone(also: str, backend: str) -> None:
    net = methods(also)
    module = module_of(net)
    with runner(net, 3, 4, backend=backend) as run:
        before, made = [b.clone() for b in module.buffers()], module.made
        for _ in range(2):
            with pytest.raises(pipec.RunError, match=r"stages 'encode' \(as '[\w.]+'\) and 'decode' .* use one buffer"):
                run.step(**data())
            assert same(list(module.buffers()), before)
            assert module.made is made
            assert {p.grad for p in module.parameters()} == {None}


def test_a_failure_later_in_the_step_puts_shared_buffers_back() -> None:
    net = methods()
    module = module_of(net)
    with runner(net, 3, 4, recompute="always") as run:
        run.step(**data())
        before = [b.clone() for b in module.buffers()]
        with pytest.raises(ValueError, match="more than 1 value"):
            run.step(**data(5))
        assert same(list(module.buffers()), before)


@pytest.mark.parametrize("order", [("eval", "step", "eval", "step"), ("step", "eval", "step")])
def test_evaluation_before_and_between_training(order: tuple[str, ...]) -> None:
    def build() -> pipec.Pipeline:
        torch.manual_seed(0)
        trunk = nn.Sequential(nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH))
        holder = nn.ModuleDict({"norm": trunk, "linear": nn.Linear(WIDTH, WIDTH)})

        class First(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.all = holder

            def forward(self, x: Tensor) -> Tensor:
                return self.all["norm"](x)  # type: ignore[no-any-return]

        class Second(First):
            def forward(self, x: Tensor) -> Tensor:
                return self.all["linear"](x)  # type: ignore[no-any-return]

        return models.of_modules(First(), Second())

    plain, net = build(), build()
    reference = pipec.reference(plain, 4)
    with runner(net, 2, 4, recompute="always") as run:
        for what in order:
            if what == "eval":
                before = buffers(net)
                run.evaluate(**data(6))
                assert same(buffers(net), before)
            else:
                reference.step(**data())
                run.step(**data())
    assert same(buffers(net), buffers(plain))
    assert same(gradients(net), gradients(plain))


def test_buffers_that_never_change_are_watched_in_one_step_only() -> None:
    """Watching costs time in every operation, and a table that all stages hold is common."""
    table = nn.Module()
    table.register_buffer("positions", torch.arange(float(WIDTH)))

    class Uses(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.table, self.watched = nn.Linear(WIDTH, WIDTH), table, list[int]()

        def forward(self, x: Tensor) -> Tensor:
            self.watched.append(torch._C._len_torch_dispatch_stack())
            return self.linear(x) + self.table.positions  # type: ignore[no-any-return]

    stages = Uses(), Uses()
    with runner(models.of_modules(*stages), 2, 2) as run:
        run.step(**data())
        least = min(stages[0].watched)
        assert least > 0
        for stage in stages:
            stage.watched.clear()
        run.step(**data())
        assert max(n for stage in stages for n in stage.watched) < least


def test_a_buffer_that_changes_for_the_first_time_in_a_later_step_is_never_half_seen() -> None:
    class Late(nn.Module):
        def __init__(self, holder: nn.Module, writes: bool) -> None:
            super().__init__()
            self.linear, self.holder, self.writes, self.now = nn.Linear(WIDTH, WIDTH), holder, writes, False

        def forward(self, x: Tensor) -> Tensor:
            if self.writes and self.now:
                self.holder.seen += 1
            return self.linear(x)  # type: ignore[no-any-return]

    holder = nn.Module()
    holder.register_buffer("seen", torch.zeros(()))
    first, second = Late(holder, True), Late(holder, False)
    with runner(models.of_modules(first, second), 2, 4, recompute="always") as run:
        run.step(**data())
        first.now = True
        with pytest.raises(pipec.RunError, match="for the first time now; run the step again"):
            run.step(**data())
        assert holder.seen == 0
        run.step(**data())
        assert holder.seen == 4
