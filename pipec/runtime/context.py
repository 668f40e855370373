"""The caller's context inside worker threads: autocast, grad mode, intra-op threads, modes, hooks, contextvars.

A new thread starts with grad mode on, autocast off and an intra-op thread count of its own; a plan must compute in
a worker what it would compute in the caller. Where modules are on GPUs it also starts on their default streams, which
know nothing of what the caller queues on another.

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

from pipec.runtime.accelerator import Current


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
    streams: tuple[torch.Stream, ...] = ()  # those of the GPUs there are
    gpu: int = -1  # the current one

    @staticmethod
    def capture() -> Context:
        """The calling thread's context."""
        gpus = torch.accelerator.current_accelerator(check_available=True)
        devices = ("cpu",) if gpus is None else ("cpu", gpus.type)
        count = 0 if gpus is None else torch.accelerator.device_count()
        return Context(
            torch.get_num_threads(),
            tuple((d, torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in devices),
            torch.is_autocast_cache_enabled(),
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            contextvars.copy_context(),
            (*_get_current_function_mode_stack(), *_get_current_dispatch_mode_stack()),  # type: ignore[no-untyped-call]
            torch._C._autograd._top_saved_tensors_default_hooks(False),
            tuple(torch.accelerator.current_stream(number) for number in range(count)),
            torch.accelerator.current_device_index() if count else -1,
        )

    @contextmanager
    def active(self) -> Iterator[None]:
        """Hold this context on the current thread."""
        with ExitStack() as stack:
            if torch.get_num_threads() != self.threads:
                torch.set_num_threads(self.threads)
            self._on_streams(stack)
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

    def _on_streams(self, stack: ExitStack) -> None:
        """Queue what follows where the caller would. A stream that is current already is left alone: setting it would
        wake up a GPU that nobody may be using."""
        if self.gpu < 0:
            return
        others = [one for number, one in enumerate(self.streams) if one != torch.accelerator.current_stream(number)]
        if others:
            stack.enter_context(Current(tuple(others)))
        if torch.accelerator.current_device_index() != self.gpu:
            stack.callback(torch.accelerator.set_device_index, torch.accelerator.current_device_index())
            torch.accelerator.set_device_index(self.gpu)
