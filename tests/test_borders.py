"""What crosses a border: any value, any reader, in-place stages, the caller's own graph, shared parameters."""

from __future__ import annotations

import collections
import dataclasses
from collections import OrderedDict, namedtuple
from functools import partial
from typing import Any

import models
import pytest
import torch
from models import WIDTH, data, equal_everywhere, gradients, kept_streams, parameters, runner, same
from torch import Tensor, nn
from torch.nn import functional as F

import pipec

__all__ = ["kept_streams"]
Pair = namedtuple("Pair", "h rest")  # a plain named tuple, as users write them


@dataclasses.dataclass(frozen=True)
class Frozen:
    h: Tensor
    flags: tuple[bool, str]


class Kind(dict):  # type: ignore[type-arg]
    """A user's own dict."""


def linear() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH)


class Gives(nn.Module):
    """A linear layer whose result is wrapped by ``make``."""

    def __init__(self, make: Any) -> None:
        super().__init__()
        self.net, self.make = linear(), make

    def forward(self, x: Tensor) -> Any:
        return self.make(self.net(x).tanh())


class Takes(nn.Module):
    """A linear layer behind ``get``; notes what it saw."""

    def __init__(self, get: Any) -> None:
        super().__init__()
        self.net, self.get, self.seen = linear(), get, []

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        self.seen.append((args, kwargs))
        return self.net(self.get(*args, **kwargs))


def pair_of(make: Any, get: Any) -> pipec.Pipeline:
    torch.manual_seed(0)
    return models.of_modules(Gives(make), Takes(get), linear())


SHAPES: list[Any] = [
    (lambda h: (h, (h * 2, None)), lambda v: v[0] + v[1][0]),
    (lambda h: [h, 3, None, True, "text", 2.5], lambda v: v[0] * v[1] * v[5] if v[3] is True and v[2] is None else 0),
    (lambda h: {"h": h, "aux": (h * h, None), "flag": True, "n": 3}, lambda v: v["h"] * v["n"] + v["aux"][0]),
    (lambda h: OrderedDict(b=h, a=h * 2), lambda v: next(iter(v.values()))),
    (lambda h: Pair(h, {"x": h}), lambda v: v.h + v.rest["x"]),
    (lambda h: Frozen(h, (True, "t")), lambda v: v.h if v.flags == (True, "t") else 0),
    (lambda h: Kind(h=h), lambda v: v["h"] if type(v) is Kind else 0),
    (lambda h: (h, torch.arange(len(h)), h > 0, torch.ones(2), h.detach().to(torch.complex64)),
     lambda v: v[0] + v[1][:, None] + v[2] + v[4].real),
    (lambda h: h.chunk(2, 1), lambda v: torch.cat(v, 1)),
    (lambda h: h.unbind(1), lambda v: torch.stack(v[::-1], 1)),
    (lambda h: (h, h), lambda v: v[0] * v[1]),
    (lambda h: (h, h.view(-1)), lambda v: v[0] + v[1].view(-1, WIDTH)),
    (lambda h: h[:, ::2], lambda v: v.repeat(1, 2)),
    (lambda h: h.T, lambda v: v.T),
    (lambda h: h.unsqueeze(0).expand(3, -1, -1), lambda v: v.sum(0)),
    (lambda h: (), lambda *v: torch.ones(2, WIDTH)),
    (lambda h: h.topk(3, 1), lambda v: F.pad(v.values, (0, 5)) + v.indices.sum()),
    (lambda h: h.double(), lambda v: v.float()),
    (lambda h: h.to(torch.bfloat16), lambda v: v.float()),
    (lambda h: torch.view_as_complex(h.view(-1, 4, 2)), lambda v: torch.view_as_real(v).flatten(1)),
]


@pytest.mark.parametrize("shape", range(len(SHAPES)))
def test_values_of_any_shape_arrive_as_they_are_and_carry_their_gradients(shape: int) -> None:
    make, get = SHAPES[shape]
    equal_everywhere(lambda: pair_of(make, get), data())


def test_leaves_keep_type_dtype_and_whether_they_require_a_gradient() -> None:
    given = (True, 3, "text", None, 2.5, torch.arange(3), torch.tensor([True]), torch.ones(2),
             torch.ones(2, dtype=torch.complex64))

    def get(first: Any, *, second: Any) -> Tensor:
        h, rest = first["h"], second
        assert h.requires_grad
        for mine, sent in zip(rest, given, strict=True):
            assert type(mine) is type(sent)
            if isinstance(sent, Tensor):
                assert mine.dtype == sent.dtype
                assert torch.equal(mine, sent)
                assert not mine.requires_grad
            else:
                assert mine == sent
        return h

    net = pipec.Pipeline("typed")
    x, y = net.input("x"), net.input("y")
    a = net.stage("a", Gives(lambda h: {"h": h, "rest": given}), x)
    b = net.stage("b", Takes(lambda first, second: get(first, second=second)), a, second=a["rest"])
    net.loss("mse", F.mse_loss, net.stage("c", linear(), b), y)
    taken = net.spec.stages[1].fn
    with runner(net, 3) as run:
        run.step(**data())
    assert len(taken.seen) == 4
    assert gradients(net)[0] is not None


def test_keyword_arguments_constants_and_inputs_of_later_stages() -> None:
    class Late(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = linear()

        def forward(self, h: Tensor, *, scale: Tensor, mask: Any, power: int, names: list[str]) -> Tensor:
            assert mask is None
            assert power == 2
            assert names == ["a", "b"]
            return self.net(h * scale) ** power

    def build() -> pipec.Pipeline:
        torch.manual_seed(0)
        net = pipec.Pipeline("late")
        x, scale = net.input("x"), net.input("scale", split=None)
        mask, labels = net.input("mask"), net.input("labels")
        a = net.stage("a", linear(), x)
        b = net.stage("b", Late(), h=a, scale=scale, mask=mask, power=2, names=["a", "b"])
        c = net.stage("c", torch.addcmul, b, x, labels, value=0.5)
        net.output(c)
        net.loss("l", lambda out, *, target: F.mse_loss(out, target), c, target=labels)
        return net

    given = data()
    equal_everywhere(build, {"x": given["x"], "labels": given["y"], "scale": 2.0, "mask": None})
    equal_everywhere(build, {"x": given["x"], "labels": given["y"], "scale": torch.tensor(2.0), "mask": None})


@pytest.mark.parametrize(("wrong", "told"), [
    ({"x": 1, "y": 1, "z": 1}, "no input 'z'"), ({"x": data()["x"]}, "'y' is missing"),
])
def test_an_argument_no_stage_takes_or_one_that_is_missing(wrong: dict[str, Any], told: str) -> None:
    with runner(models.chain(2)) as run, pytest.raises(pipec.RunError, match=told):
        run.step(**wrong)


def test_a_part_that_the_result_lacks_is_named() -> None:
    net = pipec.Pipeline("lacking")
    x, y = net.input("x"), net.input("y")
    a = net.stage("a", Gives(lambda h: {"h": h}), x)
    net.loss("mse", F.mse_loss, net.stage("b", linear(), a["H"]), y)
    with runner(net) as run, pytest.raises(
        pipec.RunError, match=r"result of stage 'a' has no \['H'\]; it is a dict with the keys 'h'"
    ):
        run.step(**data())


@pytest.mark.parametrize("made", [lambda h: (h, h, h), lambda h: h, lambda h: [h], lambda h: {"a": h, "b": h}])
def test_a_result_of_another_number_of_parts_than_declared(made: Any) -> None:
    net = pipec.Pipeline("parts")
    x, y = net.input("x"), net.input("y")
    first, second = net.stage("a", Gives(made), x, outputs=2)
    net.loss("mse", F.mse_loss, net.stage("b", torch.add, first, second), y)
    with runner(net) as run, pytest.raises(pipec.RunError, match="stage 'a' was declared with outputs=2 but returned"):
        run.step(**data())


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


@pytest.mark.parametrize("recompute", ["never", "always"])
def test_a_gradient_that_would_be_lost_is_an_error(recompute: str) -> None:
    hidden, listed = linear(), [linear()]

    class Opaque:
        def __init__(self, h: Tensor) -> None:
            self.h = h

    closure = models.of_modules(linear(), lambda v: hidden(v), linear())
    unregistered = models.of_modules(linear(), Gives(lambda h: listed[0](h)), linear())
    carried = models.of_modules(Gives(Opaque), Takes(lambda v: v.h), linear())
    for build, stage in ((closure, "b"), (unregistered, "b")):
        with runner(build, 2, recompute=recompute) as run, pytest.raises(
            pipec.RunError, match=rf"stage '{stage}' computes with a tensor of shape .* params="
        ):
            run.step(**data())
        assert set(gradients(build)) == {None}
    with runner(carried, 1) as run, pytest.raises(
        pipec.RunError, match=r"stage 'b' computes with the parameter 'net\.\w+' of stage 'a'.*dataclasses"
    ):
        run.step(**data())
    for build in (closure, unregistered):
        with pytest.raises(pipec.RunError, match="does not own it"):
            pipec.reference(build, 2).step(**data())


# -- writing in place --------------------------------------------------------------------------------------------


def block() -> list[nn.Module]:
    return [nn.Conv1d(2, 2, 3, padding=1), nn.BatchNorm1d(2), nn.ReLU(inplace=True), nn.Conv1d(2, 2, 1),
            nn.InstanceNorm1d(2, affine=True), nn.LeakyReLU(inplace=True), nn.Sigmoid(), nn.Hardtanh(-0.4, 0.7, True)]


@pytest.mark.parametrize("cut", range(1, 8))
@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("recompute", ["never", "always"])
def test_a_chain_with_in_place_activations_may_be_cut_anywhere(cut: int, devices: int, recompute: str) -> None:
    """Equal to the uncut model, where that can be differentiated; else to the model without the write."""
    given = {"x": data()["x"].view(-1, 2, 4), "y": data()["y"].view(-1, 2, 4)}
    kept = given["x"].clone()
    torch.manual_seed(0)
    layers = block()
    net = models.of_modules(nn.Sequential(*layers[:cut]), nn.Sequential(*layers[cut:]))
    torch.manual_seed(0)
    plain = block()
    plain[-1].inplace = False  # the uncut model may not write into what the sigmoid saved
    uncut = models.of_modules(nn.Sequential(*plain))
    models.whole(uncut, 2, given)
    with runner(net, devices, 2, recompute=recompute) as run:
        if cut <= 6:  # within one stage autograd itself finds the write into what the sigmoid saved
            with pytest.raises(RuntimeError, match="modified by an inplace operation") as caught:
                run.step(**given)
            assert "stage 'b'" in caught.value.__notes__[0]
            layers[-1].inplace = False
        run.step(**given)
        first = [g.clone() for g in gradients(net)]
        run.step(**given)
    assert torch.equal(given["x"], kept)
    for mine, theirs in zip(first, gradients(uncut), strict=True):
        assert torch.equal(mine, theirs)


class Writes(nn.Module):
    """Writes into what it reads before its linear layer."""

    def __init__(self, write: Any) -> None:
        super().__init__()
        self.net, self.write = linear(), write

    def forward(self, *values: Tensor) -> Tensor:
        return self.net(self.write(*values))


@pytest.mark.parametrize("backend", ["threads", "replay"])
@pytest.mark.parametrize("recompute", ["never", "always"])
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("write", [
    lambda x: x.relu_(), lambda x: x.mul_(2.0), lambda x: x.view(-1).add_(1).view(-1, WIDTH),
    lambda x: F.dropout(x, 0.0, inplace=True).add_(1), lambda x: x.detach().clamp_(0) + x,
])
def test_the_callers_own_input_is_never_written_into(write: Any, grad: bool, recompute: str, backend: str) -> None:
    given = data()
    kept, x = given["x"].clone(), given["x"].requires_grad_(grad)
    torch.manual_seed(0)
    net = models.of_modules(Writes(write), linear())
    torch.manual_seed(0)
    clean = models.of_modules(Writes(lambda x: write(x.clone())), linear())
    with runner(net, 2, recompute=recompute, backend=backend) as run:
        run.evaluate(**given)
        with torch.inference_mode():
            run.evaluate(**given)
        run.step(**given)
        assert torch.equal(x, kept)
        got = run.evaluate(**given).output
    other = kept.clone().requires_grad_(grad)
    loop = pipec.reference(clean, 4)
    loop.step(x=other, y=given["y"])
    assert same([gradients(net), x.grad], [gradients(clean), other.grad])
    with runner(clean, 1, 1) as run:
        torch.testing.assert_close(got, run.evaluate(x=kept, y=given["y"]).output)


def test_writing_into_a_value_that_others_see_later_names_both() -> None:
    def build(source: str) -> pipec.Pipeline:
        net = pipec.Pipeline("contested")
        x, y = net.input("x"), net.input("y")
        a = net.stage("a", linear(), x)
        b = net.stage("b", Writes(lambda v, w: v.add_(1) + w), *((x, a) if source == "x" else (a, x)))
        c = net.stage("c", torch.add, b, {"a": a, "x": x}[source])
        net.loss("mse", F.mse_loss, c, y)
        return net

    for source in ("a", "x"):
        told = f"stage 'b' writes in place into '{source}', which stage 'c' reads later"
        for devices in (1, 2, 3):
            given = data()
            kept = given["x"].clone()
            with runner(build(source), devices) as run, pytest.raises(pipec.RunError, match=told):
                run.step(**given)
            assert torch.equal(given["x"], kept)
        with pytest.raises(pipec.RunError, match=told):
            pipec.reference(build(source), 2).step(**data())


def test_writing_into_an_output_is_refused() -> None:
    net = pipec.Pipeline("seen")
    x, y = net.input("x"), net.input("y")
    a = net.stage("a", linear(), x)
    net.output(a)
    net.loss("mse", F.mse_loss, net.stage("b", Writes(lambda v: v.mul_(2)), a), y)
    told = "stage 'b' writes in place into 'a', which is the output"
    with runner(net) as run, pytest.raises(pipec.RunError, match=told):
        run.step(**data())


def test_adding_to_a_received_skip_in_place() -> None:
    def build(write: Any) -> pipec.Pipeline:
        torch.manual_seed(0)
        net = pipec.Pipeline("residual")
        x, y = net.input("x"), net.input("y")
        a = net.stage("a", linear(), x)
        b = net.stage("b", linear(), a)
        c = net.stage("c", Writes(write), b, pipec.skip(a))
        net.loss("mse", F.mse_loss, c, y)
        return net

    equal_everywhere(lambda: build(lambda b, a: a.add_(b)), data())
    mine, theirs = build(lambda b, a: a.add_(b)), build(lambda b, a: a + b)
    for net in (mine, theirs):
        pipec.reference(net, 3).step(**data())
    assert same(gradients(mine), gradients(theirs))


@pytest.mark.parametrize("first", ["step", "evaluate"])
def test_a_stage_that_writes_in_train_mode_only(first: str) -> None:
    """What a stage writes into is learnt in each mode: an evaluation before the first step hides nothing."""

    class Drops(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = linear()

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x.mul_(2.0) if self.training else x * 2.0)

    net = models.of_modules(Drops(), Drops())
    given = data()
    kept = given["x"].clone()
    with runner(net, 2) as run:
        if first == "evaluate":
            run.evaluate(**given)
        run.step(**given)
        run.evaluate(**given)
        run.step(**given)
    assert torch.equal(given["x"], kept)


@pytest.mark.parametrize("backend", ["threads", "replay"])
@pytest.mark.parametrize("grad", [False, True])
def test_a_stage_that_begins_to_write_later_fails_and_says_so(grad: bool, backend: str) -> None:
    writes = [False]

    def write(x: Tensor) -> Tensor:
        with torch.no_grad():
            return x.mul_(2.0) if writes[0] else x

    net = models.of_modules(Writes(write), linear())
    with runner(net, 2, backend=backend) as run:
        given = data()
        given["x"].requires_grad_(grad)
        run.step(**given)
        writes[0] = True
        with pytest.raises(pipec.RunError, match="stage 'a' wrote in place into 'x'"):
            run.step(**given)


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


# -- shared parameters -------------------------------------------------------------------------------------------


def test_one_weight_in_two_stages_by_hand() -> None:
    """w = 2, y = 3 w, z = y w: dz/dw = 12."""
    w = torch.tensor(2.0, requires_grad=True)
    net = pipec.Pipeline("tiny")
    x = net.input("x", split=None)
    y = net.stage("first", lambda p, x: x * p, x, params=w)
    net.loss("z", lambda z: z, net.stage("second", lambda p, y: y * p, y, params=w), reduction="sum")
    for devices in (1, 2):
        w.grad = None
        with runner(net, devices, 1) as run:
            assert run.step(x=torch.tensor(3.0)).loss == 12.0
        assert w.grad == 12.0


def tied() -> pipec.Pipeline:
    torch.manual_seed(0)
    net = pipec.Pipeline("tied")
    ids, y = net.input("ids"), net.input("y")
    embedding, out = nn.Embedding(10, WIDTH), nn.Linear(WIDTH, 10, bias=False)
    out.weight = embedding.weight
    left, right = linear(), linear()
    right.bias = left.bias
    a = net.stage("embed", embedding, ids)
    b = net.stage("left", left, a)
    c = net.stage("right", right, b)
    d = net.stage("out", out, c)
    net.output(d)
    net.loss("ce", lambda logits, y: F.cross_entropy(logits, y, reduction="sum"), d, y, count=lambda y: y.numel())
    return net


@pytest.mark.parametrize("update", [None, "stage", "all"])
@pytest.mark.parametrize("make", [
    lambda p: torch.optim.SGD(p, lr=0.5, momentum=0.9), lambda p: torch.optim.Adam(p, lr=0.05),
])
@pytest.mark.parametrize(("devices", "schedule", "recompute"), [
    (1, "gpipe", "never"), (2, "1f1b", "always"), (4, "1f1b", "never"), (4, "gpipe", "always"),
])
def test_tied_weights_stay_tied_and_train_as_one(
    devices: int, schedule: str, recompute: str, make: Any, update: str | None
) -> None:
    given = {"ids": torch.arange(8) % 7, "y": torch.arange(8) % 10}
    mine, theirs = tied(), tied()
    plain = make(parameters(theirs))
    loop = pipec.reference(theirs, 3)
    own = make(parameters(mine)) if update != "stage" else make
    with runner(mine, devices, 3, schedule, recompute=recompute, update=update,
                optimizer=None if update is None else own) as run:
        for _ in range(10):
            got = run.step(**given)
            expected = loop.step(**given)
            plain.step()
            plain.zero_grad()
            if update is None:
                own.step()
                own.zero_grad()
    assert got.loss == expected.loss
    assert same([p.detach() for p in parameters(mine)], [p.detach() for p in parameters(theirs)])
    assert mine.spec.stages[0].fn.weight is mine.spec.stages[3].fn.weight


def test_frozen_and_unused_parameters_have_no_gradient() -> None:
    class Unused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = linear(), linear()

        def forward(self, x: Tensor) -> Tensor:
            return self.used(x)

    def build() -> pipec.Pipeline:
        torch.manual_seed(0)
        frozen = linear()
        frozen.weight.requires_grad_(False)
        return models.of_modules(frozen, Unused(), linear().requires_grad_(False), linear())

    equal_everywhere(build, data())
    net = build()
    with runner(net) as run:
        run.step(**data())
        assert net.spec.stages[0].fn.weight.grad is None
        assert net.spec.stages[1].fn.unused.weight.grad is None
        net.spec.stages[0].fn.weight.requires_grad_(True)  # thawed between two steps
        run.step(**data())
        assert net.spec.stages[0].fn.weight.grad is not None


def test_a_counter_keeps_its_values_and_arrays_may_be_outputs() -> None:
    net = pipec.Pipeline("net")
    x, y = net.input("x"), net.input("y")
    made = net.stage("count", lambda x: (collections.Counter({"a": 3}), x.numpy()), x, outputs=2)
    value = net.stage("layer", nn.Linear(8, 8), x)
    net.loss("loss", F.mse_loss, net.stage("scale", lambda v, c: v * c["a"], value, made[0]), y)
    net.output(made[1], "arrays")
    batch = {"x": torch.randn(4, 8), "y": torch.randn(4, 8)}
    with pipec.Runner(net, pipec.compile(net, 2, 2)) as run:
        arrays = run.step(**batch).outputs["arrays"]
    assert [a.shape for a in arrays] == [(2, 8), (2, 8)]
    assert pipec.check(net, batch, devices=2, microbatches=2)
