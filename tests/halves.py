"""Schedules with backwards in two halves, and stages whose backward is hard to cut."""

from __future__ import annotations

import random
from typing import Any

import models
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import pipec
from pipec.schedules import REGISTRY, tasks_of


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


def three(kind: str) -> pipec.Pipeline:
    """The stage first, between two others, and last."""
    torch.manual_seed(3)
    return models.of_modules(STAGES[kind](), STAGES[kind](), nn.Linear(8, 8), STAGES[kind]())
