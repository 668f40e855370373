"""Stages whose module is made only where it runs."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from pipec.errors import SpecError, note


class Lazy:
    """A module to be made later: see :func:`lazy`."""

    def __init__(self, make: Callable[..., nn.Module], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._make, self._args, self._kwargs = make, args, kwargs
        self._made: nn.Module | None = None
        self._sketch: nn.Module | None = None

    @property
    def made(self) -> nn.Module | None:
        """The module, if it was made in this process."""
        return self._made

    @property
    def sketch(self) -> nn.Module:
        """The module on the meta device: its names, shapes and signature, without memory."""
        if self._made is not None:
            return self._made
        if self._sketch is None:
            try:
                with torch.random.fork_rng(devices=[]), torch.device("meta"):
                    self._sketch = self._call()
            except Exception as error:
                note(error, f"pipec: raised while lazy({self}) was looked at on the meta device, where tensors have "
                            "shapes and no values; a constructor that needs values (item(), numpy, weights from a "
                            "file, a move to a device) cannot be lazy: give such a stage a module that is made already")
                raise
        return self._sketch

    def build(self, place: int) -> nn.Module:
        """The module, made at the first call. Its random numbers depend on ``torch.initial_seed()`` and ``place``.

        So a stage begins with the same weights whatever else the process makes before it.
        """
        if self._made is None:
            seed = zlib.crc32(f"{torch.initial_seed()} {place}".encode())
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                self._made = self._call()
            self._sketch = None
        return self._made

    def _call(self) -> nn.Module:
        module = self._make(*self._args, **self._kwargs)
        if not isinstance(module, nn.Module):
            raise SpecError(f"lazy({self}) must make an nn.Module, got {type(module).__name__}")
        return module

    @property
    def forward(self) -> Any:
        """The module's forward, for its signature."""
        return self.sketch.forward

    def buffers(self) -> Iterator[Tensor]:
        """The module's buffers, without values."""
        return self.sketch.buffers()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise SpecError(f"lazy({self}) is made by a Runner; it cannot be called before")

    def __repr__(self) -> str:
        return getattr(self._make, "__name__", type(self._make).__name__)


def lazy(make: Callable[..., nn.Module], *args: Any, **kwargs: Any) -> Lazy:
    """A stage's module that only the process that runs the stage makes, as ``make(*args, **kwargs)``.

    Elsewhere it is looked at on the meta device, where it takes no memory.

    >>> net.stage("enc1", pipec.lazy(Encoder, 3, 16), image)

    The weights are drawn from a generator of their own, seeded by ``torch.initial_seed()`` and the place of the stage:
    they are the same in one process and in many. They differ from those of ``Encoder(3, 16)`` made by the script.

    Raises:
        SpecError: an argument is a module or a tensor that requires a gradient, which every process would hold.
    """
    held = [a for a in (*args, *kwargs.values()) if isinstance(a, nn.Module) or
            (isinstance(a, Tensor) and a.requires_grad)]
    if held:
        raise SpecError(
            f"lazy({getattr(make, '__name__', make)}, ...): an argument is a {type(held[0]).__name__} that is made "
            "already; give plain values, or declare a stage that shares parameters without lazy"
        )
    return Lazy(make, args, kwargs)
