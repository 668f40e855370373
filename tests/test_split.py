"""Backwards in two halves: the numbers are those of the whole backward, and what only the first half reads is freed."""

from __future__ import annotations

import gc
import random
import weakref
from typing import Any

import attrs
import models
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from models import buffers, gradients, kept_streams, parameters, recipes, same
from plans import any_order
from test_memory import CopyingChannels, Storages
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import pipec
from pipec.runtime import runner as runner_module
from pipec.runtime.borders import anchored
from pipec.runtime.executor import Device
from pipec.runtime.split import input_half
from pipec.runtime.stages import bind
from pipec.schedules import REGISTRY, tasks_of
from pipec.simulate import buffer_bytes, later_bytes

__all__ = ["kept_streams"]


def halves(schedule: str = "1f1b", seed: int | None = None, delay: int = 0) -> Any:
    """``schedule`` with every backward in halves; each W comes ``delay`` tasks later, or a random number of tasks."""
    policy = REGISTRY[schedule]()

    def split_in_halves(problem: Any) -> Any:
        rng, rows = random.Random(seed), []
        for row in policy.order(problem):
            made: list[Any] = []
            waiting: list[tuple[int, Any]] = []
            for place, (kind, chunk, m) in enumerate(tasks_of(row)):
                made += [w for due, w in waiting if due <= place]
                waiting = [(due, w) for due, w in waiting if due > place]
                made.append((3 if kind == 2 else kind, chunk, m))
                if kind == 2:
                    due = place + 1 + (delay if seed is None else rng.randrange(8))
                    waiting.append((due, (4, chunk, m)))
            if seed is not None:
                rng.shuffle(waiting)
            rows.append(made + [w for _, w in waiting])
        return rows

    split_in_halves.placement = policy.placement  # type: ignore[attr-defined]
    return split_in_halves


@settings(max_examples=250, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(st.data())
def test_any_plan_with_split_backwards_gives_the_numbers_of_the_reference(draw: Any) -> None:
    recipe = draw.draw(recipes())
    how = draw.draw(models.options(recipe))
    if isinstance(how["schedule"], str):
        how["schedule"] = halves(how["schedule"], draw.draw(st.integers(0, 1000)))
    else:
        how["schedule"] = any_order(draw.draw(st.integers(0, 1000)), split=True)
    backend = draw.draw(st.sampled_from(["threads", "replay"]))
    dirty = draw.draw(st.booleans())
    mine, theirs = recipe.build(), recipe.build()
    update = how["update"]
    plan = pipec.compile(mine, **how)
    loop = pipec.reference(theirs, plan.microbatches)

    def optimizer(params: Any) -> torch.optim.Optimizer:
        return torch.optim.Adam(params, lr=0.01)

    own = optimizer([p for p in parameters(theirs) if p.requires_grad]) if update else None
    made: Any = {None: None, "stage": optimizer, "all": None}[update]
    if update == "all":
        made = optimizer([p for p in parameters(mine) if p.requires_grad])
    for net in (mine, theirs):
        for number, parameter in enumerate(parameters(net)):
            if dirty and not update and parameter.requires_grad:
                make = torch.Generator().manual_seed(number)
                parameter.grad = torch.randn(parameter.shape, generator=make) * 3
    with pipec.Runner(mine, plan, optimizer=made, backend=backend) as run:
        for number in range(2):
            count = draw.draw(st.integers(1, 9))
            got, expected = run.step(**models.batch(count, number)), loop.step(**models.batch(count, number))
            if own is not None:
                own.step()
                own.zero_grad()
            assert same([got.losses, got.outputs], [expected.losses, expected.outputs])
            assert same(gradients(mine), gradients(theirs))
            assert same(buffers(mine), buffers(theirs))
            assert same([p.detach() for p in parameters(mine)], [p.detach() for p in parameters(theirs)])


class Scale(nn.Module):
    """Parameters of several shapes that broadcast: their gradients are summed on the way."""

    def __init__(self) -> None:
        super().__init__()
        self.gain, self.shift = nn.Parameter(torch.randn(8)), nn.Parameter(torch.randn(1))
        self.unused = nn.Parameter(torch.randn(3))

    def forward(self, x: Tensor) -> Any:
        return (x * self.gain + self.shift).tanh() * self.gain.double().exp().float()


class Reuse(nn.Module):
    """One weight used in many ways: through a transpose, a product with itself, and directly."""

    def __init__(self, sequence: str) -> None:
        super().__init__()
        self.sequence = sequence
        self.weight = nn.Parameter(torch.randn(8, 8) / 3)

    def forward(self, x: Tensor) -> Any:
        half = None
        for letter in self.sequence:
            if letter == "d":
                x = x @ self.weight
            elif letter == "t":
                x = F.linear(x, self.weight)
            elif letter == "e":
                x = x * self.weight[0]
            elif letter == "h":  # one derived weight for all uses of this kind
                half = self.weight.tanh() if half is None else half
                x = x @ half
            elif letter == "w":
                x = x + (self.weight @ self.weight).sum(0)
            x = x.sin()
        return x


class Chunks(nn.Module):
    """Operations with several outputs before, at and after the parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.line, self.norm = nn.Linear(4, 8), nn.LayerNorm(4)

    def forward(self, x: Tensor) -> Any:
        a, b = x.chunk(2, 1)
        gate, value, rest = self.line(self.norm(a) * b).split((4, 3, 1), 1)
        top, _ = torch.cat([value, rest], 1).sort(1)
        return torch.cat([gate.sigmoid() * top, self.line.weight.unbind(0)[2] + b], 1)


class Attention(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout, batch_first=True)

    def forward(self, x: Tensor) -> Any:
        return self.layer(x.unsqueeze(0) * torch.ones(3, 1, 1)).mean(0)


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.net = kind(8, 8, 2, dropout=0.3)

    def forward(self, x: Tensor) -> Any:
        return self.net(x.unsqueeze(1))[0].squeeze(1)


class Convolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.PReLU(), nn.GroupNorm(2, 4),
                                 nn.ConvTranspose2d(4, 2, 1), nn.MaxPool2d(1))

    def forward(self, x: Tensor) -> Any:
        return self.net(x.reshape(-1, 2, 2, 2)).flatten(1)


class Table(nn.Module):
    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.net = nn.Embedding(11, 8, sparse=sparse)

    def forward(self, x: Tensor) -> Any:
        ids = (x.detach()[:, 0] * 3).long().clamp(-5, 5) + 5
        return x * self.net(ids) + self.net(ids.flip(0))


class Product(torch.autograd.Function):
    """x @ w whose backward draws a number and counts its calls."""

    calls = 0

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Any:
        ctx.save_for_backward(x, w)
        return x @ w

    @staticmethod
    def backward(ctx: Any, *given: Any) -> Any:
        Product.calls += 1
        x, w = ctx.saved_tensors
        return given[0] @ w.t() + torch.randn(()), x.t() @ given[0]


class Rounded(torch.autograd.Function):
    """Of a weight alone: noise forward and backward."""

    @staticmethod
    def forward(ctx: Any, w: Tensor) -> Any:
        return w + torch.randn_like(w) / 10

    @staticmethod
    def backward(ctx: Any, *given: Any) -> Any:
        return given[0] * torch.rand_like(given[0])


class Custom(nn.Module):
    def __init__(self, rounded: bool = False) -> None:
        super().__init__()
        self.first, self.last, self.rounded = nn.Linear(8, 8), nn.Linear(8, 8), rounded
        self.weight = nn.Parameter(torch.randn(8, 8))

    def forward(self, x: Tensor) -> Any:
        weight = Rounded.apply(self.weight) if self.rounded else self.weight  # type: ignore[no-untyped-call]
        return self.last(Product.apply(self.first(x), weight))  # type: ignore[no-untyped-call]


class Hooked(nn.Module):
    """Hooks on tensors, operations, parameters and modules; some change gradients, and all draw numbers."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where, self.calls = where, 0
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
        if where == "parameter":
            self.first.weight.register_hook(self.noise)  # type: ignore[no-untyped-call]
        if where == "module":
            self.first.register_full_backward_hook(self.changed)
            self.last.register_full_backward_pre_hook(self.changed)

    def noise(self, gradient: Tensor) -> Tensor:
        self.calls += 1
        return gradient * torch.rand_like(gradient)

    def changed(self, _: nn.Module, given: Any, made: Any = None) -> Any:
        return tuple(None if g is None else self.noise(g) for g in given)

    def edited(self, given: Any, _: Any) -> Any:
        self.calls += 1
        return tuple(None if g is None else g * 2 for g in given)

    def forward(self, x: Tensor) -> Any:
        middle = self.first(x)
        if self.where == "tensor" and middle.requires_grad:
            middle.register_hook(self.noise)
        if self.where == "operation" and middle.grad_fn is not None:
            middle.grad_fn.register_hook(self.edited)
        if self.where == "before operation" and middle.grad_fn is not None:
            middle.grad_fn.register_prehook(lambda given: tuple(self.noise(g) for g in given))
        return self.last(middle.relu())


class Draws(nn.Module):
    """Numbers are drawn in the backward of both halves, so only one order of all draws is right."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where, self.calls = where, 0
        self.weight, self.other = nn.Parameter(torch.randn(8, 8)), nn.Parameter(torch.randn(8, 8))
        if where == "parameter":
            self.weight.register_hook(self.noise)  # type: ignore[no-untyped-call]

    def noise(self, gradient: Tensor) -> Tensor:
        self.calls += 1
        return gradient * torch.rand_like(gradient)

    def forward(self, x: Tensor) -> Any:
        h = torch.tanh(x @ self.other)
        if h.requires_grad:
            h.register_hook(self.noise)  # type: ignore[no-untyped-call]
        weight: Any = self.weight
        if self.where == "function":
            weight = Rounded.apply(weight)  # type: ignore[no-untyped-call]
        return (h @ weight).sin() @ self.other.cos()


class Derived(nn.Module):
    """A weight made of two parameters, of which one has a hook: what makes it must run once."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.calls = nn.Parameter(torch.randn(8, 8)), nn.Parameter(torch.randn(8, 8)), 0
        self.a.register_hook(self.count)  # type: ignore[no-untyped-call]

    def count(self, _: Tensor) -> None:
        self.calls += 1

    def forward(self, x: Tensor) -> Any:
        weight = self.a * self.b
        if weight.requires_grad:
            weight.register_hook(self.count)  # type: ignore[no-untyped-call]
        return x @ weight + self.b[0]


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.4), nn.Tanh(), nn.Linear(8, 8))
        self.last = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Any:
        return self.last(checkpoint(self.inner, x, use_reentrant=False))


class Written(nn.Module):
    """In-place operations, on parts of a tensor too."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Any:
        h = self.a(x).relu_()
        h = h.clone()
        h[:, :4] = self.b(h[:, 4:].clone())
        h[:, 4:].mul_(self.a.bias[:4])
        return h.add_(1)


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.line, self.norm = nn.Linear(8, 8), nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return self.norm(self.line(self.line(self.line(x)).relu())).float()


class Alone(nn.Module):
    """What it gives depends on parameters only; the loss of the pipeline reaches it all the same."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8))

    def forward(self, x: Tensor) -> Any:
        return self.weight.exp().expand(len(x), 8)


def frozen() -> nn.Module:
    made = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    made[0].weight.requires_grad_(False)
    made[2].bias.requires_grad_(False)
    return made


def weight_normed() -> nn.Module:
    line = nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))
    return nn.Sequential(line, nn.Tanh(), line, nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8)))


STAGES: dict[str, Any] = {
    "scale": Scale, "chunks": Chunks, "attention": Attention, "attention with dropout": lambda: Attention(0.3),
    "lstm": lambda: Recurrent(nn.LSTM), "gru": lambda: Recurrent(nn.GRU), "convolution": Convolution,
    "table": lambda: Table(False), "sparse table": lambda: Table(True), "custom": Custom,
    "rounded": lambda: Custom(True), "checkpointed": Checkpointed, "written": Written, "mixed": Mixed, "alone": Alone,
    "frozen": frozen, "parametrised": weight_normed, "none": nn.Tanh,
    "all frozen": lambda: nn.Linear(8, 8).requires_grad_(False),
    "bilinear": lambda: Both(), "derived": Derived, "draws in a function": lambda: Draws("function"),
    "draws in a parameter's hook": lambda: Draws("parameter"),
}
STAGES |= {f"reuse {uses}": lambda uses=uses: Reuse(uses) for uses in
           ("dd", "ddd", "ttt", "tdt", "dtd", "hhh", "dhd", "hdhdt", "ewd", "wdwd", "dew")}
STAGES |= {f"hook on {where}": lambda where=where: Hooked(where) for where in
           ("parameter", "module", "tensor", "operation", "before operation")}


class Both(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Bilinear(8, 8, 8)

    def forward(self, x: Tensor) -> Any:
        return self.net(x, x.cos()) + torch.einsum("bi,ijk,bj->bk", x, self.net.weight, x)


def dense(tensors: Any) -> list[Any]:
    return [t.to_dense() if t is not None and t.is_sparse else t for t in tensors]


def three(kind: str) -> pipec.Pipeline:
    """The stage first, between two others, and last."""
    torch.manual_seed(3)
    return models.of_modules(STAGES[kind](), STAGES[kind](), nn.Linear(8, 8), STAGES[kind]())


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
@pytest.mark.parametrize("kind", STAGES)
def test_every_kind_of_stage_has_the_numbers_of_its_whole_backward(kind: str) -> None:
    theirs = three(kind)
    loop = pipec.reference(theirs, 4)
    expected = [loop.step(**models.data(8, seed)) for seed in range(2)]
    calls = [getattr(stage.fn, "calls", 0) for stage in theirs.spec.stages]
    for devices, recompute, backend in ((1, "never", "replay"), (2, "always", "threads"), (4, "never", "threads")):
        mine = three(kind)
        schedule = halves("1f1b", devices)
        if kind == "mixed":  # a thread that leaves autocast clears the casts of all threads
            backend = "replay"
        with models.runner(mine, devices, 4, schedule, recompute=recompute, backend=backend) as run:
            got = [run.step(**models.data(8, seed)) for seed in range(2)]
        for one, other in zip(got, expected, strict=True):
            assert same([one.losses, one.outputs], [other.losses, other.outputs])
        assert same(dense(gradients(mine)), dense(gradients(theirs))), (devices, recompute)
        assert same(buffers(mine), buffers(theirs))
        assert [getattr(stage.fn, "calls", 0) for stage in mine.spec.stages] == calls


# -- memory ------------------------------------------------------------------------------------------------------


class Marked(nn.Module):
    """Keeps weak references to the storages that its graph saves."""

    def __init__(self) -> None:
        super().__init__()
        self.line, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
        self.seen: list[dict[str, Any]] = []

    def forward(self, x: Tensor) -> Any:
        first = x.exp()
        into = first.sin()  # saves first; is saved by the product
        tanh = self.line(into).tanh()
        made = self.last(tanh.cos())
        values = {"read": x, "first": first, "into": into, "tanh": tanh, "made": made}
        self.seen.append({name: weakref.ref(value.untyped_storage()) for name, value in values.items()})
        return made.sigmoid().clone()


def watched(monkeypatch: pytest.MonkeyPatch, look: Any) -> None:
    """Call ``look(op)`` after every task."""

    class Watched(Device):
        def run(self, ops: Any) -> None:
            for op in ops:
                super().run([op])
                look(op)

    monkeypatch.setattr(runner_module, "Device", Watched)


@pytest.mark.parametrize("recompute", ["never", "always"])
def test_what_only_the_input_half_reads_is_gone_after_it(monkeypatch: pytest.MonkeyPatch, recompute: str) -> None:
    module = Marked()
    net = models.of_modules(nn.Linear(8, 8), module, nn.Linear(8, 8))
    checked = {"I": 0, "W": 0}

    def look(op: Any) -> None:
        if op.stage != 1 or op.kind.letter not in checked:
            return
        number = op.microbatch if recompute == "never" else -1  # the last forward is this microbatch's RECOMPUTE
        alive = {name for name, ref in module.seen[number].items() if ref() is not None}
        if op.kind.letter == "I":
            assert alive == {"into"}, op.microbatch
        else:
            assert not alive, op.microbatch
        checked[op.kind.letter] += 1

    watched(monkeypatch, look)

    def policy(problem: Any) -> Any:
        forwards, inputs = [(0, 0, m) for m in range(3)], [(3, 0, m) for m in range(3)]
        if recompute == "always":  # one graph at a time
            return [forwards + [half for m in range(3) for half in (inputs[m], (4, 0, m))]]
        return [forwards + inputs + [(4, 0, m) for m in (2, 0, 1)]]

    gc.collect()
    gc.disable()
    try:
        with models.runner(net, 1, 3, policy, recompute=recompute, backend="replay") as run:
            run.step(**models.data(6))
    finally:
        gc.enable()
    assert checked == {"I": 3, "W": 3}


def test_a_tensor_that_a_product_reads_lives_until_the_weight_half_and_no_longer() -> None:
    """The halves by themselves, where only the product's own operands are left between them."""
    line, value = nn.Linear(8, 8), torch.randn(4, 8, requires_grad=True)
    stage = bind(models.of_modules(line).spec)[0]
    x = anchored(value, torch.zeros((), requires_grad=True))
    made = line(x)
    root, seed = get_gradient_edge(made), torch.ones(4, 8)
    left = [weakref.ref(t.untyped_storage()) for t in (value, seed)]
    found, weights = input_half(stage, [root], [seed], [x], list(line.parameters()))
    torch.testing.assert_close(found[0], torch.ones(4, 8) @ line.weight)
    del x, made, root, value, seed
    assert [ref() is not None for ref in left] == [True, True]
    assert same(weights.run()[1], torch.full((8,), 4.0))
    assert [ref() is not None for ref in left] == [False, False]


@pytest.mark.parametrize("backend", ["threads", "replay"])
@pytest.mark.parametrize("kind", ["attention", "checkpointed", "reuse tdt", "custom"])
def test_nothing_grows_over_steps_without_the_garbage_collector(kind: str, backend: str) -> None:
    net, counts = three(kind), []
    with models.runner(net, 2, 4, halves(delay=3), backend=backend) as run:
        for number in range(12):
            run.step(**models.data(8))
            if number in (3, 11):
                gc.collect()
                gc.disable() if number == 3 else gc.enable()
                counts.append(sum(1 for item in gc.get_objects() if issubclass(type(item), Tensor)))
    assert counts[0] == counts[1]


# -- failures, notices, checks -----------------------------------------------------------------------------------


class Failing(nn.Module):
    """A weight whose hook fails at its ``turn``-th call."""

    def __init__(self) -> None:
        super().__init__()
        self.line, self.turns, self.turn = nn.Linear(8, 8), 0, 0

    def forward(self, x: Tensor) -> Any:
        weight = self.line.weight * 1.0
        if weight.requires_grad:
            weight.register_hook(self.check)  # type: ignore[no-untyped-call]
        return F.linear(x, weight, self.line.bias)

    def check(self, _: Tensor) -> None:
        self.turns += 1
        if self.turns == self.turn:
            raise ZeroDivisionError("no more")


@pytest.mark.parametrize("backend", ["threads", "replay"])
@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("update", [None, "stage"])
def test_a_failure_in_a_weight_half_leaves_everything_as_before(stage: int, update: str | None, backend: str) -> None:
    def build() -> pipec.Pipeline:
        torch.manual_seed(1)
        return models.of_modules(*(Failing() if s == stage else nn.Linear(8, 8) for s in range(3)))

    mine, theirs = build(), build()
    how: Any = {"optimizer": lambda p: torch.optim.SGD(p, 0.1)} if update else {}
    with models.runner(mine, 3, 4, halves(delay=2), update=update, backend=backend, **how) as run, models.runner(
        theirs, 3, 4, "1f1b", update=update, backend=backend, **how
    ) as other:
        for net, own in ((mine, run), (theirs, other)):
            own.step(**models.data(8, 0))
            if net is mine:
                before = models.snapshot(mine)
                failing: Any = mine.spec.stages[stage].fn
                failing.turn = failing.turns + 3
                with pytest.raises(ZeroDivisionError) as error:
                    run.step(**models.data(8, 1))
                told = f"stage '{'abc'[stage]}', microbatch 2, BACKWARD_WEIGHT ({stage}W2)"
                assert told in str(error.value.__notes__)  # type: ignore[attr-defined]
                assert same(models.snapshot(mine), before)
            own.step(**models.data(8, 1))
        assert same(gradients(mine), gradients(theirs))
        assert same([p.detach() for p in parameters(mine)], [p.detach() for p in parameters(theirs)])


def notices(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "pipec"]


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        ("custom", "the gradients of 3 of 5 parameters come with the input half of its split backward, not with the "
         "weight half, because of an autograd Function or a compiled graph, whose one backward makes all its"),
        ("checkpointed", "because of tensors saved through hooks (a checkpoint, an offload), which may be asked"),
        ("hook on operation", "because of hooks on an operation; the numbers are the same"),
        ("reuse dtd", "because of a parameter used several times, in different ways"),
    ],
)
def test_a_backward_that_cannot_be_split_is_told_once_per_stage(
    kind: str, told: str, caplog: pytest.LogCaptureFixture
) -> None:
    net = three(kind)
    with models.runner(net, 2, 4, halves()) as run:
        for _ in range(2):
            run.step(**models.data(8))
    texts = notices(caplog)
    assert [text[:16] for text in sorted(texts)] == ["pipec: stage 'b'", "pipec: stage 'd'"]  # a reads no gradient
    if kind != "custom":
        assert told in texts[0]


def test_what_can_be_split_is_not_told(caplog: pytest.LogCaptureFixture) -> None:
    kinds = "attention", "convolution", "lstm", "reuse ddd", "reuse hhh", "parametrised", "mixed", "hook on tensor"
    for kind in kinds:
        with models.runner(three(kind), 2, 4, halves(), backend="replay") as run:
            run.step(**models.data(8))
        assert not notices(caplog), kind


def test_compiled_stages_are_told_before_anything_runs(caplog: pytest.LogCaptureFixture) -> None:
    def build(compiled: bool) -> pipec.Pipeline:
        torch.manual_seed(2)
        middle = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
        return models.of_modules(
            nn.Linear(8, 8), torch.compile(middle, backend="aot_eager") if compiled else middle, nn.Linear(8, 8)
        )

    mine, theirs = build(True), build(False)
    pipec.reference(theirs, 4).step(**models.data(8))
    with models.runner(mine, 2, 4, halves(delay=2)) as run:
        told = notices(caplog)
        assert len(told) == 1
        assert told[0].startswith("pipec: stage 'b' is compiled by torch.compile: the gradients of what is compiled")
        run.step(**models.data(8))
        assert notices(caplog) == told
    with models.runner(build(True), 2, 4, "1f1b"):
        assert notices(caplog) == told
    for one, two in zip(gradients(mine), gradients(theirs), strict=True):
        torch.testing.assert_close(one, two)


def test_check_compares_the_gradients_of_both_halves() -> None:
    net = models.chain(3)
    plan = pipec.compile(net, 2, 4, halves(delay=1))
    report = pipec.check(net, models.data(8), plan)
    assert report
    assert report.compared == pipec.check(net, models.data(8), pipec.compile(net, 2, 4, "1f1b")).compared


def test_weight_halves_in_any_order_add_in_the_order_of_the_microbatches() -> None:
    def policy(problem: Any) -> Any:
        forwards = [(0, 0, m) for m in range(4)]
        return [[*forwards, (3, 0, 1), (3, 0, 0), (4, 0, 1), (3, 0, 3), (3, 0, 2), (4, 0, 3), (4, 0, 0), (4, 0, 2)]]

    mine, theirs = models.chain(1), models.chain(1)
    data = models.data(8)
    data["x"][2:4] *= 1e4  # so that the order of additions shows
    pipec.reference(theirs, 4).step(**data)
    with models.runner(mine, 1, 4, policy) as run:
        run.step(**data)
    assert same(gradients(mine), gradients(theirs))


class Steps(nn.Module):
    """Saves results of exp and tanh for the input half and what three joins read; what it gives it does not save."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(32, 32), nn.LayerNorm(32), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Any:
        return self.last(self.norm(self.first(x.exp().sin().exp().sin()).tanh().cos()).tanh().cos())


@pytest.mark.parametrize("recompute", ["never", "always"])
@pytest.mark.parametrize("delay", [0, 4])
def test_live_bytes_between_the_halves_are_those_of_the_simulator(
    monkeypatch: pytest.MonkeyPatch, delay: int, recompute: str
) -> None:
    torch.manual_seed(0)
    net = pipec.Pipeline("steps")  # without an output, which a step would keep
    value, y = net.input("x"), net.input("y")
    for name in "abc":
        value = net.stage(name, Steps(), value)
    net.loss("mse", F.mse_loss, value, y)
    data = {"x": torch.randn(5 * 64, 32), "y": torch.randn(5 * 64, 32)}
    costs = pipec.profile(net, microbatches=5, repeats=1, **data)
    own = costs.stages["b"]
    unit = 64 * 32 * 4
    # exp and tanh, each twice, the operands of two products and a norm, two numbers per row; then, of the three, the
    # operands and the gradients that arrived
    assert own.activation_bytes == 7 * unit + 2 * 64 * 4
    assert own.weight_activation_bytes == 6 * unit + 2 * 64 * 4
    plan = pipec.compile(net, 3, 5, halves("1f1b", delay=delay), recompute=recompute, costs=costs)
    sizes = buffer_bytes(plan, costs)
    assert sizes is not None
    half, later = later_bytes(plan, costs, sizes)
    storages = Storages()
    seen: list[tuple[int, int, int]] = []

    class Watched(Device):
        def run(self, ops: Any) -> None:
            for op in ops:
                storages.device = self.index
                super().run([op])
                seen.extend((op.task, d, storages.live[d]) for d in range(3))

    class Copying(CopyingChannels):
        pass

    Copying.storages = storages
    monkeypatch.setattr(runner_module, "Device", Watched)
    monkeypatch.setattr(runner_module, "Channels", Copying)
    run = pipec.Runner(net, plan, backend="replay")
    run.step(**data)
    for parameter in run.parameters():
        parameter.grad = None
    seen.clear()
    gc.collect()
    storages.live.clear()
    storages.known.clear()
    gc.disable()
    try:
        with storages:
            run.step(**data)
    finally:
        gc.enable()
    begun: set[int] = set()
    for task, device, got in seen:
        row = plan.table.task(task)
        if row.kind is pipec.Kind.BACKWARD_WEIGHT:
            begun.add(row.stage)
        alive = (plan.buffers.writer <= task) & (plan.buffers.free > task) & (plan.buffers.device == device)
        expected = float(np.where((half >= 0) & (half <= task), later, sizes)[alive].sum())
        expected += sum(costs.weight_bytes("abc"[s]) or 0 for s in begun if plan.stage_device(s) == device)
        assert got == pytest.approx(expected, rel=0.02, abs=600), (str(row), device)
    peaks = plan.simulate().peak_bytes
    assert peaks is not None
    without = plan.simulate(attrs.evolve(costs, stages={
        name: attrs.evolve(own, weight_activation_bytes=None) for name, own in costs.stages.items()
    })).peak_bytes
    assert without is not None
    if delay:  # with W right after I, what the seeds of the first stage add shows more
        assert sum(peaks) < sum(without)
