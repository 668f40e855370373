"""The caller's context inside worker threads: autocast, grad mode, intra-op threads, contextvars.

A new thread starts with grad mode on, autocast off and an intra-op thread count of its own; a plan must compute in
a worker what it would compute in the caller.
"""

from __future__ import annotations

import contextvars
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from attrs import frozen


@frozen
class Context:
    """What is taken from the caller's thread at the start of a step."""

    threads: int
    autocast: tuple[tuple[str, bool, torch.dtype], ...]
    autocast_cache: bool
    grad: bool
    inference: bool
    variables: contextvars.Context

    @staticmethod
    def capture() -> Context:
        """The calling thread's context."""
        devices = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)
        return Context(
            torch.get_num_threads(),
            tuple((d, torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in devices),
            torch.is_autocast_cache_enabled(),
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            contextvars.copy_context(),
        )

    @contextmanager
    def active(self) -> Iterator[None]:
        """Hold this context on the current thread."""
        with ExitStack() as stack:
            if torch.get_num_threads() != self.threads:
                torch.set_num_threads(self.threads)
            stack.enter_context(torch.set_grad_enabled(self.grad))
            if self.inference:
                stack.enter_context(torch.inference_mode())
            for device, enabled, dtype in self.autocast:
                if enabled:
                    stack.enter_context(torch.autocast(device, dtype, enabled, self.autocast_cache))
            yield
