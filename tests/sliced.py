"""A causal language model whose layers carry keys, values or states from slice to slice of its sequence."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import pipec

WIDTH, WORDS = 8, 13


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
