"""The caller's context inside worker threads: autocast, grad mode, intra-op threads, modes, hooks, contextvars.

A new thread starts with grad mode on, autocast off and an intra-op thread count of its own; a plan must compute in
a worker what it would compute in the caller.

Autocast keeps the casts of weights that it has made, in one cache for all threads, until a thread leaves its outermost
autocast. Under one autocast around a training loop it would go on with the weights of the loop's first step. So every
step begins and ends with an empty cache, whoever runs it, see :func:`fresh_casts`.
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


@contextmanager
def fresh_casts() -> Iterator[None]:
    """Around a step or an evaluation: no cast of a weight is older than it, or outlives it."""
    torch.clear_autocast_cache()
    try:
        yield
    finally:
        torch.clear_autocast_cache()


@contextmanager
def no_kept_casts() -> Iterator[None]:
    """Cast weights anew wherever they are used.

    Around asynchronous steps, where one device updates its weights while others compute: emptying the cache then could
    come between two uses of a weight in a forward of theirs, whose gradients are summed in another precision for two
    casts than for one. So the sum would depend on the timing.
    """
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


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
