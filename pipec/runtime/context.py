"""The caller's context inside worker threads: autocast, grad mode, intra-op threads, modes, hooks, contextvars.

A new thread starts with grad mode on, autocast off and an intra-op thread count of its own; a plan must compute in
a worker what it would compute in the caller.
"""

from __future__ import annotations

import contextvars
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from attrs import frozen
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack


@frozen
class Context:
    """What is taken from the caller's thread at the start of a step."""

    threads: int
    autocast: tuple[tuple[str, bool, torch.dtype], ...]
    autocast_cache: bool
    grad: bool
    inference: bool
    variables: contextvars.Context
    modes: tuple[Any, ...]  # function modes, then dispatch modes, outermost first
    saved_tensors: tuple[Any, Any] | None  # pack and unpack hooks

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
            (*_get_current_function_mode_stack(), *_get_current_dispatch_mode_stack()),  # type: ignore[no-untyped-call]
            torch._C._autograd._top_saved_tensors_default_hooks(False),
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
            if self.saved_tensors is not None:
                stack.enter_context(torch.autograd.graph.saved_tensors_hooks(*self.saved_tensors))
            for mode in self.modes:  # one object on several threads: its own state is the user's to guard
                stack.enter_context(mode)
            yield
