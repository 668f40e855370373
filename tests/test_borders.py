"""What crosses a border: any value, any reader, in-place stages, the caller's own graph, shared parameters."""

from __future__ import annotations

from functools import partial
from typing import Any

import models
import pytest
import torch
from layers import linear
from models import WIDTH, data, equal_everywhere, gradients, kept_streams, runner, same
from torch import Tensor, nn
from torch.nn import functional as F

import pipec

__all__ = ["kept_streams"]


# -- readers -----------------------------------------------------------------------------------------------------


class Unet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, h: Tensor, skip: Tensor) -> Tensor:
        return self.net(torch.cat([h, skip], 1)).relu()


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "eager-1f1b", "interleaved-1f1b", "looped-bfs"])
def test_a_unet_with_skips_on_every_schedule(schedule: str) -> None:
    def build() -> pipec.Pipeline:
        torch.manual_seed(0)
        net = pipec.Pipeline("unet")
        x, y = net.input("x"), net.input("y")
        one = net.stage("s1", linear(), x)
        two = net.stage("s2", linear(), one)
        three = net.stage("s3", linear(), two)
        four = net.stage("s4", Unet(), three, pipec.skip(three))
        five = net.stage("s5", Unet(), four, pipec.skip(two))
        six = net.stage("s6", Unet(), five, pipec.skip(one))
        last = net.stage("s7", Unet(), six, pipec.skip(x))
        net.output(last)
        net.loss("mse", F.mse_loss, last, y)
        net.loss("again", lambda a, b: (a - b).pow(2).mean(), last, one)
        return net

    theirs = build()
    expected = pipec.reference(theirs, 5).step(**data(9))
    for devices in (1, 2, 3, 7):
        for recompute in ("never", "always"):
            mine = build()
            with runner(mine, devices, 5, schedule, recompute=recompute) as run:
                got = run.step(**data(9))
            assert same([got.losses, got.outputs, gradients(mine)],
                        [expected.losses, expected.outputs, gradients(theirs)])


def test_a_value_goes_once_to_each_device_that_reads_it_and_comes_back_as_one_gradient() -> None:
    net = pipec.Pipeline("wide")
    x, y = net.input("x"), net.input("y")
    a = net.stage("a", linear(), x)
    ends = [net.stage(f"r{n}", linear(), a) for n in range(4)]
    net.loss("sum", lambda *v: F.mse_loss(sum(v[:-1]), v[-1]), *ends, y)
    plan = pipec.compile(net, 3, 2, placement=[0, 1, 1, 2, 2])
    copies = [t for t in (plan.table.task(i) for i in range(len(plan))) if t.kind is pipec.Kind.COPY and
              net.spec.graph.values[t.value].name == "a"]
    assert sorted((t.device, t.peer, t.gradient) for t in copies if t.microbatch == 0) == [
        (0, 1, False), (0, 2, False), (1, 0, True), (2, 0, True)]
    with pipec.Runner(net, plan) as run:
        run.step(**data())


def test_an_output_nobody_uses_or_only_for_some_microbatches() -> None:
    calls = [0]

    class Sometimes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.other = linear(), linear()

        def forward(self, v: Any) -> Tensor:
            a, b, _ = v
            calls[0] += 1
            return self.net(a) + self.other(b) if bool(a.sum() > 0) else self.net(a)

    def build() -> pipec.Pipeline:
        torch.manual_seed(0)

        class Three(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.a, self.b, self.c = linear(), linear(), linear()

            def forward(self, x: Tensor) -> Any:
                return self.a(x), self.b(x), self.c(x)

        return models.of_modules(Three(), Sometimes(), linear())

    x = data()["x"].abs() * torch.tensor([1, 1, -1, -1, 1, 1, -1, -1])[:, None]
    torch.manual_seed(0)
    equal_everywhere(build, {"x": x * 10, "y": data()["y"]})
    net = build()
    pipec.reference(net, 4).step(x=x * 10, y=data()["y"])
    stage = net.spec.stages[0].fn
    assert stage.b.weight.grad is not None
    assert stage.c.weight.grad is None


def test_a_stage_that_returns_what_it_reads() -> None:
    def build() -> pipec.Pipeline:
        torch.manual_seed(0)
        return models.of_modules(nn.Identity(), linear(), nn.Identity(), lambda v: v, linear(), nn.Identity())

    equal_everywhere(build, data())


def test_stages_without_parameters_and_with_buffers_only() -> None:
    class Shift(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("shift", torch.full((WIDTH,), 0.5))

        def forward(self, x: Tensor) -> Tensor:
            return x + self.shift

    def build() -> pipec.Pipeline:
        torch.manual_seed(0)
        return models.of_modules(linear(), nn.ReLU(), lambda v: v.flatten(1), Shift(), linear())

    equal_everywhere(build, data())


def test_bound_methods_and_partials_train_the_module_behind_them() -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = linear(), linear()

        def encode(self, x: Tensor) -> Tensor:
            return self.first(x).tanh()

        def decode(self, x: Tensor, scale: float) -> Tensor:
            return self.second(x) * scale

    torch.manual_seed(0)
    model = Both()
    net = models.of_modules(model.encode, partial(model.decode, scale=2.0))
    with runner(net, 2) as run:
        run.step(**data())
    mine = [p.grad for p in model.parameters()]
    model.zero_grad()
    F.mse_loss(model.decode(model.encode(data()["x"]), 2.0), data()["y"]).backward()
    for a, b in zip(mine, model.parameters(), strict=True):
        torch.testing.assert_close(a, b.grad)


# -- the caller's own graph --------------------------------------------------------------------------------------


@pytest.mark.parametrize("update", [None, "stage"])
@pytest.mark.parametrize("devices", [1, 3])
def test_an_encoder_in_front_gets_its_gradients_in_one_pass(update: str | None, devices: int) -> None:
    passes = [0]

    def outer() -> tuple[nn.Linear, Tensor]:
        torch.manual_seed(9)
        encoder = linear()
        return encoder, encoder(data()["x"]).tanh()

    encoder, x = outer()
    x.grad_fn.register_hook(lambda *_: passes.__setitem__(0, passes[0] + 1))  # type: ignore[union-attr]
    optimizer = (lambda p: torch.optim.SGD(p, lr=0.1)) if update else None
    with runner(models.chain(3), devices, 4, update=update, optimizer=optimizer) as run:
        run.step(x=x, y=data()["y"])
    assert passes == [1]
    theirs, x = outer()
    pipec.reference(models.chain(3), 4).step(x=x, y=data()["y"])
    assert same([p.grad for p in encoder.parameters()], [p.grad for p in theirs.parameters()])
    plain, x = outer()
    value = x
    for stage in models.chain(3).spec.stages:
        value = stage.fn(value)
    F.mse_loss(value, data()["y"]).backward()
    for mine, other in zip(encoder.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad)


def test_inputs_that_require_a_gradient_have_it_summed_over_their_readers() -> None:
    def build() -> pipec.Pipeline:
        torch.manual_seed(0)
        net = pipec.Pipeline("inputs")
        pair, scale, y = net.input("pair"), net.input("scale", split=None), net.input("y")
        a = net.stage("a", linear(), pair["left"])
        b = net.stage("b", torch.addcmul, a, pair["left"], scale)
        c = net.stage("c", torch.mul, b, pair["right"])
        net.loss("mse", F.mse_loss, c, y)
        return net

    def given() -> Any:
        values = data(7), data(7, 2)
        return {"pair": {"left": values[0]["x"].requires_grad_(), "right": values[1]["x"].requires_grad_(),
                         "ids": torch.arange(7)},
                "scale": torch.tensor(2.0, requires_grad=True), "y": values[0]["y"]}

    theirs = given()
    pipec.reference(build(), 3).step(**theirs)
    leaves = [theirs["pair"]["left"], theirs["pair"]["right"], theirs["scale"]]
    assert all(leaf.grad is not None for leaf in leaves)
    for devices, recompute in ((1, "never"), (3, "always")):
        mine = given()
        with runner(build(), devices, 3, recompute=recompute) as run:
            run.step(**mine)
            assert same([mine["pair"]["left"].grad, mine["pair"]["right"].grad, mine["scale"].grad],
                        [leaf.grad for leaf in leaves])
            run.step(**mine)
            torch.testing.assert_close(mine["scale"].grad, leaves[2].grad * 2)


def test_two_steps_on_one_graph_of_the_callers_fail_as_two_backwards_do() -> None:
    encoder = linear()
    x = encoder(data()["x"]).tanh()
    with runner(models.chain(2)) as run:
        run.step(x=x, y=data()["y"])
        with pytest.raises(RuntimeError, match="second time"):
            run.step(x=x, y=data()["y"])


def test_first_stage_on_token_ids_with_recompute() -> None:
    def build() -> pipec.Pipeline:
        torch.manual_seed(0)
        return models.of_modules(nn.Embedding(10, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))

    equal_everywhere(build, {"x": torch.arange(8) % 7, "y": data()["y"]})
    net = build()
    with runner(net, 2, recompute="always") as run:
        run.step(x=torch.arange(8) % 7, y=data()["y"])
    assert all(g is not None and g.any() for g in gradients(net))


def test_sparse_gradients() -> None:
    def build() -> pipec.Pipeline:
        torch.manual_seed(0)
        return models.of_modules(nn.Embedding(10, WIDTH, sparse=True), nn.Linear(WIDTH, WIDTH))

    mine, theirs = build(), build()
    given = {"x": torch.arange(8) % 5, "y": data()["y"]}
    loop = pipec.reference(theirs, 3)
    with runner(mine, 2, 3) as run:
        for _ in range(2):
            run.step(**given)
            loop.step(**given)
    assert gradients(mine)[0].is_sparse
    assert same([g.to_dense() for g in gradients(mine)], [g.to_dense() for g in gradients(theirs)])
