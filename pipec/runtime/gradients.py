"""Parameter gradients of one step, added onto what ``.grad`` held, microbatch by microbatch in ascending order.

Where a stage's backwards run in that order and its parameters are many and its own, autograd adds each gradient to
``.grad`` the moment it is made, still in the cache. Otherwise a private accumulator takes them: a microbatch that
finishes early waits for its turn, and a parameter that several stages use is added up per stage first, then over the
stages in ascending order.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from pipec.errors import note


class Accumulator:
    """The gradients of one stage's parameters over the microbatches of a step.

    Attributes:
        direct: autograd may add to ``.grad``; nothing needs :meth:`add`.
    """

    def __init__(self, parameters: list[Tensor], shared: set[int], microbatches: Sequence[int]) -> None:
        """``shared``: ids of parameters that other stages use as well; ``microbatches``: in the order of backwards."""
        self.parameters = parameters
        self._order = sorted(microbatches)
        self.direct = (
            _large(parameters) and self._order == list(microbatches)
            and not any(id(p) in shared or hooks_of(p) for p in parameters)
        )
        self.sums: list[Tensor | None] = [None if id(p) in shared else p.grad for p in parameters]
        self._own = [False] * len(parameters)  # a sum that is still the user's .grad must not be written
        self._plain = False  # every sum is this step's own and dense
        self._next = 0
        self._waiting: dict[int, Sequence[Tensor | None]] = {}

    def begin(self) -> None:
        """Before the first task: what ``.grad`` holds is the caller's, so additions go to a copy."""
        if self.direct:
            for parameter in self.parameters:
                if parameter.grad is not None:
                    parameter.grad = parameter.grad.clone()

    def add(self, microbatch: int, gradients: Sequence[Tensor | None]) -> None:
        """Add a microbatch's gradients when its turn comes."""
        if self._next >= len(self._order) or self._order[self._next] != microbatch:
            self._waiting[microbatch] = gradients
            return
        self._add(gradients)
        self._next += 1
        while self._waiting and self._next < len(self._order) and self._order[self._next] in self._waiting:
            self._add(self._waiting.pop(self._order[self._next]))
            self._next += 1

    @property
    def complete(self) -> bool:
        """Whether every microbatch has been added."""
        return self._next == len(self._order)

    def give(self, place: int, total: Tensor) -> None:
        """Put a sum that was made elsewhere, of all processes say, in the place of this stage's own."""
        self.sums[place], self._own[place], self._plain = total, True, False

    def _add(self, gradients: Sequence[Tensor | None]) -> None:
        sums, own = self.sums, self._own
        if self._plain and not any_odd(gradients):
            torch._foreach_add_(sums, gradients)  # type: ignore[arg-type]
            return
        into: list[Tensor] = []
        more: list[Tensor] = []
        for index, gradient in enumerate(gradients):
            if gradient is None:
                continue
            before = sums[index]
            if own[index] and before is not None:
                if gradient.is_sparse or before.is_sparse:
                    sums[index] = plus(before, gradient)
                else:
                    into.append(before)
                    more.append(gradient)
                continue
            # a fresh tensor in the parameter's layout: autograd may hand out views, or one tensor twice
            if before is not None:
                sums[index] = plus(before, gradient)
            elif gradient.is_sparse or gradient.stride() == self.parameters[index].stride():
                sums[index] = gradient.clone()
            else:
                sums[index] = torch.empty_like(self.parameters[index]).copy_(gradient)
            own[index] = True
        if into:
            torch._foreach_add_(into, more)
        self._plain = bool(sums) and all(own) and not any_odd(sums)


def plus(before: Tensor, more: Tensor) -> Tensor:
    """The sum, as a new tensor; torch adds a sparse one to a dense one only."""
    return more + before if before.is_sparse and not more.is_sparse else before + more


def any_odd(gradients: Sequence[Tensor | None]) -> bool:
    """Whether one of them is missing or sparse."""
    for gradient in gradients:  # noqa: SIM110 - a generator costs more than the loop
        if gradient is None or gradient.is_sparse:
            return True
    return False


def shared_parameters(parameters: Sequence[list[Tensor]]) -> set[int]:
    """Ids of parameters that more than one stage uses."""
    seen: set[int] = set()
    shared: set[int] = set()
    for own in parameters:
        for parameter in {id(p) for p in own}:
            (shared if parameter in seen else seen).add(parameter)
    return shared


@torch.no_grad()
def commit(accumulators: Sequence[Accumulator], shared: set[int]) -> None:
    """Make private sums the parameters' ``.grad``, then run their post-accumulate hooks, once."""
    totals: dict[int, Tensor] = {}
    changed: dict[int, Tensor] = {}
    for accumulator in accumulators:
        for parameter, total, own in zip(
            accumulator.parameters, accumulator.sums, accumulator._own, strict=True
        ):
            if not own or total is None:
                continue
            changed[id(parameter)] = parameter
            if id(parameter) in shared:
                before = totals.get(id(parameter), parameter.grad)
                total = total if before is None else plus(before, total)
            totals[id(parameter)] = total
    for key, parameter in changed.items():
        parameter.grad = totals[key]
    run_hooks(changed.values())


LARGE = 1 << 16  # elements: below, what autograd saves in memory traffic costs more in calls


def _large(parameters: Sequence[Tensor]) -> bool:
    total = 0
    for parameter in parameters:
        total += parameter.numel()
        if total >= LARGE:
            return True
    return False


def hooks_of(parameter: Tensor) -> list[Any]:
    """The post-accumulate hooks of a parameter. A step calls them once, when its gradient is complete."""
    hooks = getattr(parameter, "_post_accumulate_grad_hooks", None)
    return list(hooks.values()) if hooks else []


def run_hooks(parameters: Iterable[Tensor]) -> None:
    """Call every post-accumulate hook. What one raises gets a note, as it belongs to no task."""
    for parameter in parameters:
        for hook in hooks_of(parameter):
            try:
                hook(parameter)
            except BaseException as error:
                told = f"a post-accumulate hook of a parameter of shape {tuple(parameter.shape)}"
                note(error, f"pipec: raised in {told}, after the backwards")
                raise
