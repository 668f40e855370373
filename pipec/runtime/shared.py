"""Buffers that several stages hold: two methods of one module, or a module that both use.

Only one of the stages may use a buffer that changes, else its value would depend on the order in which devices run.
Holding is not using: which stages use one is seen in what their forwards compute with. A step in which such a buffer
changes is watched, and so is the first step of each mode; steps in which none changes cost nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from pipec.errors import RunError
from pipec.runtime.buffers import NOT_WATCHED, BufferKeeper
from pipec.runtime.stages import Stage


class Watch(TorchDispatchMode):
    """Finds which shared buffers a stage's forward computes with or puts in place. On the stage's thread only."""

    def __init__(self, keeper: BufferKeeper) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._keeper = keeper

    def __enter__(self) -> Any:
        self._before = {number: self._keeper.at(number) for number in self._keeper.shared}
        self._known = {storage(tensor): n for n, tensor in self._before.items() if tensor is not None}
        self._made: set[int] = set()
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for tensor in tensors((*args, *(kwargs or {}).values())):
            number = self._known.get(storage(tensor))
            if number is not None:
                self._keeper.used.add(number)
        out = func(*args, **(kwargs or {}))
        self._made.update(storage(tensor) for tensor in tensors((out,)))
        return out

    def __exit__(self, *error: Any) -> Any:
        for number, before in self._before.items():
            now = self._keeper.at(number)
            if now is not before and now is not None and storage(now) in self._made:
                self._keeper.used.add(number)
        self._before, self._known, self._made = {}, {}, set()
        return super().__exit__(*error)  # type: ignore[no-untyped-call]


def storage(tensor: Tensor) -> int:
    """Equal for tensors that share memory."""
    return tensor.untyped_storage()._cdata if tensor.layout is torch.strided else id(tensor)


def tensors(items: Iterable[Any]) -> Iterable[Tensor]:
    """Tensors among arguments of an operation and in lists of them."""
    for item in items:
        if isinstance(item, Tensor):
            yield item
        elif isinstance(item, list | tuple):
            yield from tensors(item)


class SharedBuffers:
    """The shared buffers of a pipeline during one step: their values at its begin, and who holds them."""

    def __init__(self, stages: Sequence[Stage], training: bool) -> None:
        holders: dict[Any, list[tuple[Stage, int]]] = {}
        for stage in stages:
            for number, (owner, name) in enumerate(stage.buffers.places):
                held = stage.buffers.at(number)
                holders.setdefault((id(owner), name) if held is None else id(held), []).append((stage, number))
        self._shared = [found for found in holders.values() if len(found) > 1]
        numbers: dict[int, set[int]] = {}
        for found in self._shared:
            for stage, number in found:
                numbers.setdefault(stage.index, set()).add(number)
        self._stages = [stages[index] for index in numbers]
        self._values = [_copy(found[0][0].buffers.at(found[0][1])) for found in self._shared]
        for stage in self._stages:
            keeper = stage.buffers
            if keeper.shared != numbers[stage.index]:
                keeper.shared, keeper.used, keeper.settled = numbers[stage.index], set(), set()
        self._mode = (training, *(m.training for stage in self._stages for own in stage.modules for m in own.modules()))
        self._watched = any(self._mode not in stage.buffers.settled for stage in self._stages)
        for stage in self._stages:
            stage.buffers.watch = Watch(stage.buffers) if self._watched else NOT_WATCHED

    def check(self) -> None:
        """After the forwards of a step.

        Raises:
            RunError: a buffer changed that two stages use.
        """
        changed = False
        for found, (source, value) in zip(self._shared, self._values, strict=True):
            now = found[0][0].buffers.at(found[0][1])
            if now is source and (now is None or value is None or torch.equal(now, value)):
                continue
            changed = True
            users = [(stage, number) for stage, number in found if number in stage.buffers.used]
            if self._watched and len(users) == 1:
                continue
            for stage in self._stages:
                stage.buffers.settled = set()
            told = " and ".join(f"{stage.name!r} (as {stage.buffers.names[n]!r})" for stage, n in users or found)
            if not self._watched:
                raise RunError(
                    f"stages {told} share a buffer that a forward changed for the first time now; run the step again: "
                    "pipec watches from now on that only one of them uses it"
                )
            raise RunError(
                f"stages {told} use one buffer that a forward changes, so its value would depend on the order in "
                "which the devices run; give each stage a module of its own, or use it in one stage only"
            )
        if not changed:
            for stage in self._stages:
                stage.buffers.settled.add(self._mode)


def _copy(tensor: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    return tensor, None if tensor is None else tensor.detach().clone()
