"""Slices of a sequence: whatever the plan, the numbers are those of the reference; what cannot be cut is refused."""

from __future__ import annotations

import gc
import re
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from models import gradients, kept_streams, parameters, same
from plans import any_order
from torch import Tensor, nn
from torch.nn import functional as F

import pipec
from pipec.ir import Buffer, Kind
from pipec.schedules import REGISTRY

__all__ = ["kept_streams"]

WIDTH, WORDS = 8, 13
BACKENDS = ["threads", "replay", "lanes", "adversarial"]


class Embed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(64, WIDTH)

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        return self.words(tokens) + self.places(positions)


class Attention(nn.Module):
    """A pre-norm block with causal attention; carries the keys and values of every earlier slice."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(dropout))

    def forward(self, x: Tensor, carry: Any = None) -> tuple[Tensor, Any]:
        q, k, v = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, -1))
        carry = [*(carry or []), (k, v)]
        keys, values = (torch.cat(parts, 2) for parts in zip(*carry, strict=True))
        ahead = keys.shape[2] - q.shape[2]
        mask = torch.ones(q.shape[2], keys.shape[2], dtype=torch.bool).tril(ahead)
        read = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask)
        x = x + self.out(read.transpose(1, 2).flatten(2))
        return x + self.mlp(x), carry


class Recurrent(nn.Module):
    """A GRU whose state is carried on; the state of the first slice is its own."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.GRU(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: Tensor, carry: Any = None) -> tuple[Tensor, Any]:
        out, state = self.net(x, None if carry is None else carry["state"])
        return x + out, {"state": state, "seen": x.shape[1] + (0 if carry is None else carry["seen"])}


class Cut(nn.Module):
    """Carries a detached mean: the gradient ends at the border of a slice."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, carry: Tensor | None = None) -> tuple[Tensor, Tensor]:
        x = self.net(x if carry is None else x + carry)
        return x, x.mean(1, keepdim=True).detach()


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(WIDTH, WORDS)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


def decay(params: dict[str, Tensor], x: Tensor, carry: Any = None) -> tuple[Tensor, Any]:
    """A moving sum as a function of its parameters."""
    rate = params["rate"].sigmoid()
    state = x.new_zeros(x.shape[0], x.shape[2]) if carry is None else carry
    made = []
    for place in range(x.shape[1]):
        state = state * rate + x[:, place]
        made.append(state)
    return torch.stack(made, 1), state


def entropy(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def summed(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum", ignore_index=0)


LAYERS = {
    "attention": Attention, "dropout": lambda: Attention(0.5), "gru": Recurrent, "cut": Cut,
    "plain": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()),
}


def language(layers: tuple[str, ...], reduction: str = "mean") -> pipec.Pipeline:
    """A causal language model of any layers."""
    torch.manual_seed(3)
    net = pipec.Pipeline("language")
    tokens, targets = net.input("tokens", slice_dim=1), net.input("targets", slice_dim=1)
    positions = net.input("positions", split=None, slice_dim=0)
    x = first = net.stage("embed", Embed(), tokens, positions)
    for number, layer in enumerate(layers):
        if layer == "decay":
            params = {"rate": torch.randn(WIDTH, requires_grad=True)}
            x = net.stage(f"layer{number}", decay, x, params=params, carry=True)
        else:
            x = net.stage(f"layer{number}", LAYERS[layer](), x, carry=layer != "plain")
    x = net.stage("join", lambda a, b: a + b, x, pipec.skip(first))
    logits = net.stage("head", Head(), x)
    net.output(logits, slice_dim=1)
    if reduction == "mean":
        net.loss("entropy", entropy, logits, targets)
    else:
        net.loss("entropy", summed, logits, targets, count=lambda targets: (targets != 0).sum())
    return net


def batch(rows: int, length: int, seed: int = 0) -> dict[str, Tensor]:
    make = torch.Generator().manual_seed(seed)
    words = torch.randint(WORDS, (rows, length + 1), generator=make)
    return {"tokens": words[:, :-1], "targets": words[:, 1:], "positions": torch.arange(length)}


# -- numbers -------------------------------------------------------------------------------------------------------


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_every_plan_gives_the_numbers_of_the_reference(data: Any) -> None:
    layers = tuple(data.draw(st.lists(st.sampled_from([*LAYERS, "decay"]), min_size=1, max_size=3)))
    reduction = data.draw(st.sampled_from(["mean", "count"]))
    stages = len(layers) + 3
    schedule: Any = data.draw(st.sampled_from([*REGISTRY, "seq-1f1b", "random"]))
    devices = data.draw(st.integers(1, min(4, stages // 2 if schedule == "dualpipe-v" else stages)))
    if schedule == "random":
        schedule = any_order(data.draw(st.integers(0, 500)), data.draw(st.booleans()))
    mine, theirs = language(layers, reduction), language(layers, reduction)
    slices, microbatches = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 3))
    plan = pipec.compile(
        mine, devices, microbatches, schedule, slices=slices, recompute=data.draw(st.sampled_from(["never", "always"]))
    )
    loop = pipec.reference(theirs, microbatches, seed=5, slices=slices)
    with pipec.Runner(mine, plan, backend=data.draw(st.sampled_from(BACKENDS)), seed=5) as run:
        for step in range(2):  # the second adds to .grad
            given_ = batch(data.draw(st.integers(1, 4)), data.draw(st.integers(1, 7)), step)
            got, wanted = run.step(**given_), loop.step(**given_)
            assert same(got.losses, wanted.losses)
            assert same(got.outputs, wanted.outputs)
            assert same(gradients(mine), gradients(theirs))
            assert got.slices == min(slices, given_["tokens"].shape[1])


@pytest.mark.parametrize("reduction", ["mean", "count"])
@pytest.mark.parametrize(("rows", "length"), [(4, 12), (3, 7)])
def test_slices_change_nothing_but_rounding(reduction: str, rows: int, length: int) -> None:
    """Against the whole sequence at once, which needs no carry."""
    layers = ("attention", "gru", "decay", "attention")
    wanted = None
    for slices in (1, 2, 3, 5):
        net = language(layers, reduction)
        result = pipec.reference(net, 2, slices=slices).step(**batch(rows, length))
        assert result.output.shape == (rows, length, WORDS)
        found = [result.loss, result.output, *(p.grad for p in parameters(net))]
        if wanted is None:
            wanted = found
        for mine, theirs in zip(found, wanted, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6)


def test_gradients_flow_through_what_is_carried() -> None:
    """Without the carried gradient, later slices would not teach the earlier ones' keys."""
    whole, cut = language(("gru",)), language(("gru",))
    pipec.reference(whole).step(**batch(2, 8))

    def deaf(self: Recurrent, x: Tensor, carry: Any = None) -> Any:
        return Recurrent.forward(self, x, carry and {"state": carry["state"].detach(), "seen": 0})

    layer = cut.spec.stages[1].fn
    assert isinstance(layer, Recurrent)
    layer.forward = lambda x, carry=None: deaf(layer, x, carry)  # type: ignore[method-assign]
    pipec.reference(cut, slices=4).step(**batch(2, 8))
    far = [not torch.allclose(a.grad, b.grad, rtol=1e-3) for a, b in
           zip(parameters(whole), parameters(cut), strict=True) if a.grad is not None and b.grad is not None]
    assert any(far)


def test_inputs_that_require_a_gradient_get_it_from_all_slices() -> None:
    def build() -> pipec.Pipeline:
        torch.manual_seed(0)
        net = pipec.Pipeline("net")
        x, shift, y = net.input("x", slice_dim=1), net.input("shift"), net.input("y", slice_dim=1)
        h = net.stage("add", lambda x, shift: x + shift[:, None], x, shift)
        h = net.stage("block", Attention(), h, carry=True)
        net.loss("mse", F.mse_loss, h, y)
        return net

    x, shift = torch.randn(3, 7, WIDTH, requires_grad=True), torch.randn(3, WIDTH, requires_grad=True)
    y = torch.randn(3, 7, WIDTH)
    found = []
    for slices in (1, 3):
        net = build()
        plan = pipec.compile(net, 2, 2, "seq-1f1b", slices=slices)
        x.grad = shift.grad = None
        with pipec.Runner(net, plan) as run:
            run.step(x=x, shift=shift, y=y)
        found.append((x.grad, shift.grad))
        mine = found[-1]
        x.grad = shift.grad = None
        pipec.reference(build(), 2, slices=slices).step(x=x, shift=shift, y=y)
        assert same(mine, (x.grad, shift.grad))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


def test_evaluation_and_training_steps_share_slices() -> None:
    net = language(("attention", "dropout"))
    plan = pipec.compile(net, 3, 2, "seq-1f1b", slices=3, update="all")
    with pipec.Runner(net, plan, optimizer=torch.optim.SGD(parameters(net), lr=0.1)) as run:
        before = run.evaluate(**batch(4, 9)).loss
        for _ in range(5):
            run.step(**batch(4, 9))
        after = run.evaluate(**batch(4, 9))
        assert after.loss < before
        short = run.forward(tokens=batch(4, 2)["tokens"], positions=torch.arange(2))
        assert (short.slices, short.output.shape) == (2, (4, 2, WORDS))
    assert repr(after).endswith("2 microbatches of 3 slices)")


def test_check_and_profile_know_slices() -> None:
    net = language(("attention", "gru"))
    report = pipec.check(net, batch(3, 6), devices=2, microbatches=2, schedule="seq-1f1b", slices=3)
    assert report, str(report)
    costs = pipec.profile(net, **batch(3, 6), repeats=1)
    assert costs.carry_bytes("layer0") == 3 * 3 * 6 * WIDTH * 4  # keys and values are views of what holds queries too
    assert costs.carry_bytes("embed") is None
    plan = pipec.compile(net, 2, 2, "seq-1f1b", slices=3, costs=costs)
    assert plan.simulate().peak_bytes is not None


def test_a_failure_names_the_slice() -> None:
    net = language(("attention",))

    class Sour(nn.Module):
        def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
            if int(targets[0, 0]) == 12:
                raise ValueError("sour")
            return entropy(logits, targets)

    net.loss("sour", Sour(), *_ends(net))
    plan = pipec.compile(net, 2, 1, "seq-1f1b", slices=3)
    given_ = batch(1, 6)
    given_["targets"] = torch.tensor([[1, 1, 12, 1, 1, 1]])
    with pipec.Runner(net, plan) as run, pytest.raises(ValueError, match="sour") as error:
        run.step(**given_)
    assert "stage 'head', microbatch 0.1, FORWARD (3F0.1) on device 1" in str(error.value.__notes__)


def _ends(net: pipec.Pipeline) -> tuple[Any, Any]:
    """Values that stand for the head and the targets."""
    return net._value("stage", 3), net._value("input", 1)


# -- what is refused -----------------------------------------------------------------------------------------------


def test_what_cannot_be_cut_is_refused_all_at_once() -> None:
    net = pipec.Pipeline("net")
    x = net.input("x")
    h = net.stage("attend", nn.TransformerEncoderLayer(WIDTH, 2), x)
    h = net.stage("count", nn.LSTM(WIDTH, WIDTH), h)[0]
    net.output(h)
    net.loss("loss", lambda h: h.mean(), h)
    with pytest.raises(pipec.ScheduleError) as error:
        pipec.compile(net, 2, 2, slices=2)
    lines = str(error.value).splitlines()
    assert lines[0] == "pipeline 'net' cannot be cut into 2 slices: 4 problems"
    assert lines[1] == (
        "  1. no input says which dimension is the sequence; declare it, as in input('tokens', slice_dim=1)"
    )
    assert lines[2].startswith(
        "  2. stage 'attend' holds TransformerEncoderLayer, MultiheadAttention, which looks at the whole sequence; let "
        "the stage take carry= of the slice before and return (result, carry), and declare it with carry=True"
    )
    assert "test_slices.py" in lines[3]
    assert lines[4].startswith("  3. stage 'count' holds LSTM")
    assert lines[6].startswith("  4. output 'count[0]' does not say along which dimension its slices are joined")
    pipec.compile(net, 2, 2)  # as a whole it is fine
    for wrong in (0, 1.5, True, "2"):
        with pytest.raises(pipec.ScheduleError, match="slices must be a whole number of at least 1, got"):
            pipec.compile(net, 2, 2, slices=wrong)  # type: ignore[arg-type]


def test_wrong_declarations() -> None:
    net = pipec.Pipeline("net")
    x = net.input("x", split=1, slice_dim=1)
    y = net.input("y", slice_dim="time")  # type: ignore[arg-type]
    h = net.stage("a", nn.Linear(2, 2), x, carry=True)
    h = net.stage("b", nn.Linear(2, 2), h, carry=y)  # type: ignore[arg-type]
    net.output(h, slice_dim=1.5)  # type: ignore[arg-type]
    with pytest.raises(pipec.SpecError) as error:
        _ = net.spec
    text = str(error.value)
    for told in (
        "input 'x': split and slice_dim are both 1; one is cut into microbatches, the other into slices of a sequence",
        "input 'y': slice_dim must be a dimension or None, got 'time'",
        "stage 'a': Linear(input: torch.Tensor) -> torch.Tensor cannot be called so: it has no argument 'carry'",
        "stage 'b': carry is True or False, got Value y; what a stage carries on comes from the stage itself",
        "output b: slice_dim must be a dimension or None, got 1.5",
    ):
        assert told in text.replace("(self, ", "("), text


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"targets": torch.zeros(2, 5, dtype=torch.long)},
         "inputs that are cut into slices disagree on the length of the sequence (tokens/positions: 6, targets: 5)"),
        ({"tokens": torch.zeros(2, dtype=torch.long)},
         "input 'tokens' of shape (2,) cannot be cut into slices along dimension 1"),
        ({"tokens": torch.zeros(2, 0, dtype=torch.long), "targets": torch.zeros(2, 0, dtype=torch.long),
          "positions": torch.arange(0)}, "the sequences have no position (input tokens, targets, positions)"),
    ],
)
def test_batches_that_do_not_fit(change: dict[str, Tensor], told: str) -> None:
    net = language(("attention",))
    with pipec.Runner(net, pipec.compile(net, 2, 2, slices=2)) as run:
        with pytest.raises(pipec.RunError, match=re.escape(told)):
            run.step(**(batch(2, 6) | change))
        run.step(**batch(2, 6))


def test_what_a_stage_returns_is_looked_at() -> None:
    net = pipec.Pipeline("net")
    x = net.input("x", slice_dim=1)
    net.loss("loss", lambda h: h.mean(), net.stage("a", lambda x, carry: x * 2, x, carry=True))
    with pipec.Runner(net, pipec.compile(net, 1, 1)) as run, pytest.raises(pipec.RunError) as error:
        run.step(x=torch.ones(2, 3, requires_grad=True))
    assert str(error.value) == (
        "stage 'a' was declared with carry=True, so it returns (result, carry), but it returned a tensor of shape "
        "(2, 3)"
    )
    net = language(("attention",))
    net.output(net._value("stage", 3), "again", slice_dim=4)
    with pipec.Runner(net, pipec.compile(net, 1, 1, slices=2)) as run, pytest.raises(pipec.RunError) as error:
        run.step(**batch(2, 6))
    assert str(error.value) == (
        "output 'again' cannot be joined along dimension 4: its slices have the shapes (2, 3, 13); give another "
        "slice_dim="
    )


# -- memory -------------------------------------------------------------------------------------------------------


class Mark:
    """Something in what is carried whose life can be watched."""


class Marked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(WIDTH, WIDTH)
        self.alive: weakref.WeakSet[Mark] = weakref.WeakSet()
        self.seen: list[int] = []

    def forward(self, x: Tensor, carry: Any = None) -> tuple[Tensor, Any]:
        self.seen.append(len(self.alive))
        x = self.net(x if carry is None else x + carry[0])
        mark = Mark()
        self.alive.add(mark)
        return x, (x.mean(1, keepdim=True), mark)


@pytest.mark.parametrize("recompute", ["never", "always"])
def test_what_is_carried_lives_as_long_as_the_plan_says(recompute: str) -> None:
    torch.manual_seed(0)
    net = pipec.Pipeline("net")
    marked = Marked()
    h = net.stage("first", nn.Linear(WIDTH, WIDTH), net.input("x", slice_dim=1))
    h = net.stage("marked", marked, h, carry=True)
    net.loss("loss", lambda h: h.square().mean(), h)
    plan = pipec.compile(net, 2, 3, "seq-1f1b", slices=3, recompute=recompute)
    carries = plan.buffers.kind == Buffer.CARRY
    with pipec.Runner(net, plan, backend="replay") as run:
        for _ in range(2):
            marked.seen.clear()
            gc.disable()
            try:
                run.step(x=torch.randn(3, 6, WIDTH))
            finally:
                gc.enable()
            tasks = np.flatnonzero((plan.table.stage == 1) & np.isin(plan.table.kind, (Kind.FORWARD, Kind.RECOMPUTE)))
            planned = [
                int((carries & (plan.buffers.writer < task) & (plan.buffers.free >= task)).sum()) for task in tasks
            ]
            assert marked.seen == planned
            assert not marked.alive
