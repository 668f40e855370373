"""Module buffers: snapshots for recompute and for failed steps."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from pipec.runtime.batchnorm import Deferred
from pipec.runtime.walk import modules_in

Mark = tuple[Any, Any]  # a buffer and a copy of its values, or None twice
SAME = object()  # in place of a buffer that need not be exchanged
OTHERS = object()  # in place of one that another stage uses
NOT_WATCHED = nullcontext()


class BufferKeeper:
    """Snapshots of one stage's buffers.

    A buffer that did not change since the last snapshot is not copied again, so constant buffers cost one copy and no
    memory per microbatch. Values are compared: batch norm moves its statistics without raising their version.
    A place whose buffer is None (a cache that the first forward makes) is kept as None.

    Attributes:
        shared: numbers of places that another stage holds too; ``used`` those of them that this stage uses,
            ``watch`` a context for its forwards that finds them, ``settled`` the modes in which none changes. See
            :mod:`pipec.runtime.shared`.
        deferred: layers of :func:`pipec.deferred_batch_norm` among the modules.
    """

    def __init__(self, *modules: nn.Module) -> None:
        self._modules = modules
        self.places: list[tuple[dict[str, Any], str]] = []
        self.names: list[str] = []
        self._last: list[Mark] = []
        self.shared: set[int] = set()
        self.used: set[int] = set()
        self.settled: set[Any] = set()
        self.watch: Any = NOT_WATCHED
        self.deferred: list[Deferred] = []
        self.refresh()

    def refresh(self) -> None:
        """Look for the buffers anew: between steps a script may exchange a part of its model."""
        found = [sub for module in self._modules for sub in modules_in(module)]
        places: list[tuple[dict[str, Any], str]] = []
        owners: list[int] = []  # per place its module's number in ``found``
        seen: set[int] = set()
        for number, sub in enumerate(found):
            for name, buffer in sub._buffers.items():
                if id(buffer) not in seen:
                    if buffer is not None:
                        seen.add(id(buffer))
                    places.append((sub._buffers, name))
                    owners.append(number)
        if [(id(owner), name) for owner, name in places] != [(id(owner), name) for owner, name in self.places]:
            prefixes = [prefix for module in self._modules for prefix, _ in module.named_modules()]
            self.names = [
                f"{prefixes[number]}.{name}" if prefixes[number] else name
                for number, (_, name) in zip(owners, places, strict=True)
            ]
            self.places, self._last = places, []
            self.deferred = [sub for sub in found if isinstance(sub, Deferred)]
            self.shared, self.watch = set(), NOT_WATCHED

    def appeared(self) -> list[str]:
        """Names of buffers that a forward registered since :meth:`refresh`."""
        known = set(self.names)
        return [
            name for module in self._modules for name, _ in module.named_buffers(remove_duplicate=False)
            if name not in known
        ]

    def __bool__(self) -> bool:
        return bool(self.places)

    def at(self, number: int) -> Tensor | None:
        """What stands in a place now."""
        owner, name = self.places[number]
        return owner[name]  # type: ignore[no-any-return]

    def snapshot(self) -> list[Any]:
        """Copies of all buffers as they are now."""
        return [copy for _, copy in self.mark()]

    @torch.no_grad()
    def mark(self) -> list[Mark]:
        """The buffers as they are now, for :meth:`exchange`."""
        if not self.places:
            return []
        taken = []
        for number, (owner, name) in enumerate(self.places):
            now = owner[name]
            last = self._last[number] if self._last else None
            if now is None:
                taken.append((None, None))
            elif last is not None and last[0] is now and _equal(now, last[1]):
                taken.append(last)
            else:
                taken.append((now, now.detach().clone()))
        self._last = taken
        return taken

    @torch.no_grad()
    def exchange(self, marks: list[Mark], whole: bool = False) -> list[Any]:
        """Put copies of what was marked into the module; returns what stood there, SAME where nothing differs.

        A buffer that did not change since stays: the forward that is run again will hardly change it either, and
        other stages may be reading it. One that only another stage uses stays as well: that one may be running.
        Exchanging instead of writing leaves the versions that autograd remembers alone.

        ``whole``: exchange what did not change too, where a graph has saved it and must not find it written into.
        """
        before: list[Any] = []
        others = self.shared - self.used
        for number, ((owner, name), (source, copy)) in enumerate(zip(self.places, marks, strict=True)):
            now = owner[name]
            if number in others:
                before.append(OTHERS)
            elif not whole and now is source and (now is None or _equal(now, copy)):
                before.append(SAME)
            else:
                before.append(now)
                owner[name] = None if copy is None else copy.clone()
        return before

    def put_back(self, before: list[Any], marks: list[Mark]) -> None:
        """Undo an exchange, and what a forward did since to buffers that were not exchanged."""
        for (owner, name), tensor, (source, copy) in zip(self.places, before, marks, strict=True):
            if tensor is OTHERS:
                continue
            owner[name] = source if tensor is SAME else tensor
            if tensor is SAME:
                _write(source, copy)

    def go_back(self, marks: list[Mark]) -> None:
        """Put what was marked back, tensors and values, except what only another stage uses."""
        others = self.shared - self.used
        for number, ((owner, name), (source, copy)) in enumerate(zip(self.places, marks, strict=True)):
            if number not in others:
                owner[name] = source
                _write(source, copy)

    def changed(self, numbers: Iterable[int]) -> bool:
        """Whether one of these places is not as it was when last marked, or was never marked."""
        if not self._last:
            return True
        return any(
            self._last[number][0] is not (now := self.at(number)) or (now is not None and not torch.equal(
                now, self._last[number][1])) for number in numbers
        )

    def originals(self) -> list[Any]:
        """The tensors that stand in the module now."""
        return [owner[name] for owner, name in self.places]

    def restore(self, originals: list[Any], values: list[Any]) -> None:
        """Put ``originals`` back into the module, holding ``values`` again."""
        for (owner, name), tensor, value in zip(self.places, originals, values, strict=True):
            owner[name] = tensor
            _write(tensor, value)


@torch.no_grad()
def _write(tensor: Tensor | None, value: Tensor | None) -> None:
    if tensor is not None and value is not None and not _equal(tensor, value):
        tensor.copy_(value)


def _equal(one: Tensor, other: Tensor) -> bool:
    """Whether the host knows that both hold the same: it does not wait for a GPU to find out."""
    return one.device.type == "cpu" and torch.equal(one, other)
