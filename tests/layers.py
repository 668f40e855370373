"""Small layers for tests that look at what crosses a border."""

from __future__ import annotations

from typing import Any

from models import WIDTH
from torch import Tensor, nn


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
