"""What crosses a border: any value, as it is and with its gradients, or an error that names it."""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections import OrderedDict, namedtuple
from typing import Any

import models
import pytest
import torch
from layers import Gives, Takes, linear
from models import WIDTH, data, equal_everywhere, gradients, kept_streams, runner, same
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import pipec

__all__ = ["kept_streams"]

Pair = namedtuple("Pair", "h rest")  # a plain named tuple, as users write them


@dataclasses.dataclass(frozen=True)
class Frozen:
    h: Tensor
    flags: tuple[bool, str]


class Kind(dict):  # type: ignore[type-arg]
    """A user's own dict."""


class Strict(dict):  # type: ignore[type-arg]
    """A dict that cannot be made from a dict alone."""

    def __init__(self, h: Tensor, more: Tensor) -> None:
        super().__init__(h=h)
        self.more = more


class Named(Pair):  # a named tuple with room for attributes
    pass


@dataclasses.dataclass
class Loose:
    h: Tensor
    later: Any = dataclasses.field(init=False)  # declared and perhaps never set

    @functools.cached_property
    def double(self) -> Tensor:
        return self.h * 2


def with_attributes(value: Any, **more: Any) -> Any:
    for name, item in more.items():
        setattr(value, name, item)
    return value


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
    (lambda h: with_attributes(Loose(h), more=h * 3, flag="f"), lambda v: v.h + v.more if v.flag == "f" else 0),
    (lambda h: with_attributes(Loose(h), seen=Loose(h).double), lambda v: v.h + v.seen + v.double),
    (lambda h: with_attributes(Kind(h=h), more=h * 3), lambda v: v["h"] + v.more),
    (lambda h: Strict(h, h * 3), lambda v: v["h"] + v.more if type(v) is Strict else 0),
    (lambda h: with_attributes(Named(h, 2), more=(h * 3, None)), lambda v: v.h * v.rest + v.more[0]),
    (lambda h: collections.defaultdict(list, h=h), lambda v: v["h"] if v["new"] == [] else 0),
    (lambda h: collections.Counter(h=2), lambda v: torch.ones(2, WIDTH) * v["h"]),
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


class Force(nn.Module):
    """Differentiates inside, to a tensor of its own: the input of the first stage requires no gradient."""

    def __init__(self, keep: bool = False) -> None:
        super().__init__()
        self.net, self.keep = linear(), keep

    def forward(self, x: Tensor) -> Tensor:
        place = x.detach().requires_grad_()
        energy = torch.tanh(self.net(place)).square().sum()
        (force,) = torch.autograd.grad(energy, place, create_graph=True)
        if self.keep:
            self.place = place
        return x - force


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_a_stage_may_differentiate_to_a_tensor_of_its_own(schedule: str) -> None:
    def built(keep: bool = False) -> pipec.Pipeline:
        torch.manual_seed(4)
        return models.of_modules(Force(keep), linear(), Force())

    net, plain = built(), built()
    with runner(net, 2, 3, schedule) as run:
        for seed in range(2):
            run.step(**data(7, seed))
    for seed in range(2):
        rows = data(7, seed)
        for x, y in zip(rows["x"].split([3, 2, 2]), rows["y"].split([3, 2, 2]), strict=True):
            value = x
            for stage in plain.spec.stages:
                value = stage.fn(value)
            F.mse_loss(value, y).backward(torch.tensor(len(x) / 7, dtype=value.dtype))
    assert same(gradients(net), gradients(plain))
    with runner(built(keep=True), 2, 3, schedule) as run, pytest.raises(  # now somebody could ask for its gradient
        pipec.RunError, match=r"stage 'a' computes with a tensor of shape .* does not own it"
    ):
        run.step(**data(7))


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


class Node:
    """A list that holds itself, a tree of dicts too deep for Python, two dataclasses that hold each other."""

    @staticmethod
    def ring(h: Tensor) -> Any:
        ring: list[Any] = [h]
        ring.append(ring)
        return ring

    @staticmethod
    def deep(h: Tensor) -> Any:
        value: Any = h
        for _ in range(5000):
            value = {"in": value}
        return value

    @staticmethod
    def pair(h: Tensor) -> Any:
        left, right = Loose(h), Loose(h)
        left.later, right.later = right, left
        return left


@pytest.mark.parametrize("make", [Node.ring, Node.deep, Node.pair])
@pytest.mark.parametrize("backend", ["threads", "replay"])
def test_a_container_that_holds_itself_is_told(make: Any, backend: str) -> None:
    net = models.of_modules(Gives(make), Takes(lambda v: v[0]))
    with runner(net, 2, backend=backend) as run:
        with pytest.raises(pipec.PipecError, match="a container holds itself, or is nested too deep") as caught:
            run.step(**data())
        assert "stage 'a', microbatch 0, FORWARD" in caught.value.__notes__[0]
        assert set(gradients(net)) == {None}
        with pytest.raises(pipec.PipecError, match="a container holds itself"):
            run.step(x=Node.ring(data()["x"]), y=data()["y"])
    declared = pipec.Pipeline("net")
    ring = Node.ring(declared.input("x"))
    with pytest.raises(pipec.PipecError, match="a container holds itself"):
        declared.stage("a", linear(), ring)


@pytest.mark.parametrize("recompute", ["never", "always"])
@pytest.mark.parametrize("stage", [0, 1])
def test_a_re_entrant_checkpoint_inside_a_stage_is_told_with_what_to_do(stage: int, recompute: str) -> None:
    class Inner(nn.Module):
        def __init__(self, reentrant: bool) -> None:
            super().__init__()
            self.net, self.reentrant = linear(), reentrant

        def forward(self, x: Tensor) -> Any:
            return checkpoint(self.net, x * 1, use_reentrant=self.reentrant)

    layers: list[Any] = [linear(), linear()]
    layers[stage] = Inner(True)
    net = models.of_modules(*layers)
    x = data()["x"].requires_grad_()  # else the checkpoint itself gives no gradient
    with runner(net, 2, recompute=recompute) as run:
        with pytest.raises(pipec.RunError, match=f"stage '{'ab'[stage]}' uses .*checkpoint.*reentrant=False"):
            run.step(x=x, y=data()["y"])
        assert set(gradients(net)) == {None}
        layers[stage].reentrant = False
        run.step(x=x, y=data()["y"])
    layers[stage].reentrant = True
    with pytest.raises(pipec.RunError, match="use_reentrant=True"):
        pipec.reference(net, 2).step(x=x, y=data()["y"])


def test_shapes_stay_shapes() -> None:
    """What a stage hands on beside its tensors keeps its type."""
    from pipec.tree import flatten, unflatten

    leaves, layout = flatten([torch.Size((1, 2)), (3, torch.Size(()))])
    made = unflatten(layout, leaves)
    assert [type(made[0]), type(made[1][1])] == [torch.Size, torch.Size]
