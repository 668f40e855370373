"""What crosses a stage's border: detached values on the way there, gradients on the way back.

A lone tensor travels as itself; any other value as its leaves and its layout. Gradients of a value have the same
shape: one tensor or None, or a list with one entry per leaf.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from pipec.errors import RunError
from pipec.runtime.engine import edge_of
from pipec.tree import Layout, flatten, unflatten

Gradient = Any  # Tensor | None, or a list of these
Edges = Any  # GradientEdge | None, or a list of these


class Packed:
    """A value that is more than one tensor: its leaves, tensors detached, and its layout."""

    __slots__ = ("layout", "leaves")

    def __init__(self, leaves: list[Any], layout: Layout) -> None:
        self.leaves, self.layout = leaves, layout


def detach(tensor: Tensor) -> Tensor:
    """The tensor without its graph; it requires a gradient if the original did, so that a reader can tell."""
    bare = tensor.detach()
    return bare.requires_grad_() if tensor.requires_grad else bare


def pack(value: Any) -> Any:
    """What is handed over for ``value``."""
    if isinstance(value, Tensor):
        return value.detach().requires_grad_() if value.requires_grad else value.detach()
    leaves, layout = flatten(value)
    return Packed([detach(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves], layout)


def own(packet: Any) -> Any:
    """The packet with tensors of the reader's own where they require a gradient: leaves of the reader's graph."""
    if isinstance(packet, Tensor):
        return packet.detach().requires_grad_() if packet.requires_grad else packet
    if isinstance(packet, Packed):
        return Packed([own(leaf) if isinstance(leaf, Tensor) else leaf for leaf in packet.leaves], packet.layout)
    return packet


class Anchored(torch.autograd.Function):
    """A tensor to differentiate with respect to that its graph does not hold.

    A leaf is held by its own node, so for as long as any node above it lives. The weight half of a split backward
    keeps nodes when nobody reads the tensor any more.
    """

    @staticmethod
    def forward(ctx: Any, value: Tensor, anchor: Tensor) -> Tensor:
        return value.detach()  # as the value itself, in the same storage

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise RuntimeError("gradients end at what a stage has read")


def anchored(packet: Any, anchor: Tensor) -> Any:
    """As :func:`own` for a graph that is differentiated in two halves; ``anchor`` is any leaf."""
    if isinstance(packet, Tensor):
        return Anchored.apply(packet.detach(), anchor) if packet.requires_grad else packet  # type: ignore[no-untyped-call]
    if isinstance(packet, Packed):
        return Packed(
            [anchored(leaf, anchor) if isinstance(leaf, Tensor) else leaf for leaf in packet.leaves], packet.layout
        )
    return packet


def unpack(packet: Any) -> tuple[Any, Any]:
    """The value of a packet, and the tensors in it to differentiate with respect to (None where there is none)."""
    if isinstance(packet, Tensor):
        return packet, packet if packet.requires_grad else None
    if not isinstance(packet, Packed):
        return packet, None
    wanted = [leaf if isinstance(leaf, Tensor) and leaf.requires_grad else None for leaf in packet.leaves]
    return unflatten(packet.layout, packet.leaves), wanted


def version(packet: Any) -> int:
    """Grows with every write into a tensor of the packet."""
    if isinstance(packet, Tensor):
        return 0 if packet.is_inference() else packet._version
    if isinstance(packet, Packed):
        return sum(version(leaf) for leaf in packet.leaves if isinstance(leaf, Tensor))
    return 0


def versions(packets: Sequence[Any]) -> list[int]:
    """:func:`version` of each."""
    return [
        packet._version if type(packet) is Tensor and not packet.is_inference() else version(packet)
        for packet in packets
    ]


def differs(one: Any, other: Any) -> bool:
    """Whether two packets of one layout hold other numbers; NaN equals NaN."""
    if isinstance(one, Packed):
        return any(differs(a, b) for a, b in zip(one.leaves, other.leaves, strict=True))
    if not isinstance(one, Tensor) or one.layout is not torch.strided:
        return False
    unequal = (one != other) & ((one == one) | (other == other))
    return bool(unequal.any())


def private(packet: Any) -> Any:
    """The packet with a copy of every tensor, for a stage that writes into what it reads.

    Copies of tensors that require a gradient belong to the graph, so that autograd allows the write and the gradient
    arrives at the packet's own tensor.
    """
    if isinstance(packet, Tensor):
        return packet.clone()
    if isinstance(packet, Packed):
        return Packed([leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in packet.leaves], packet.layout)
    return packet


def edges(value: Any) -> Edges:
    """Where gradients of ``value`` enter the graph that made it; holds the graph, not the value."""
    if isinstance(value, Tensor):
        return edge_of(value) if value.requires_grad else None
    return [
        edge_of(leaf) if isinstance(leaf, Tensor) and leaf.requires_grad else None
        for leaf in flatten(value)[0]
    ]


def add(total: Gradient, more: Gradient) -> Gradient:
    """``total + more`` leaf by leaf; None counts as zero. Neither argument is changed."""
    if total is None:
        return more
    if more is None:
        return total
    if isinstance(total, list):
        return [add(a, b) for a, b in zip(total, more, strict=True)]
    return total + more


class Parcel:
    """Gradients of one value on one device, added up as far as autograd's own order allows.

    That order runs from the last reader to the first. A sum that starts at the last reader can be formed as soon as
    the next one is there; what comes before its turn waits. What other devices send stays apart until all is summed,
    as the plan has a buffer for each.
    """

    __slots__ = ("_left", "_others", "_readers", "_total", "_waiting")

    def __init__(self, readers: tuple[int, ...]) -> None:
        """``readers``: all that send a gradient, ascending, on whichever device."""
        self._readers, self._left = readers, len(readers)
        self._total: Gradient = None
        self._waiting: dict[int, Gradient] = {}
        self._others: list[Parcel] = []

    def add(self, reader: int, gradient: Gradient) -> None:
        """Take one reader's gradient; None where nothing flowed."""
        if self._left and self._readers[self._left - 1] == reader and not self._waiting:  # its turn, most often
            self._left -= 1
            self._total = gradient if self._total is None else add(self._total, gradient)
            return
        self._waiting[reader] = gradient
        while self._left and self._readers[self._left - 1] in self._waiting:
            self._left -= 1
            self._total = add(self._total, self._waiting.pop(self._readers[self._left]))

    def receive(self, other: Parcel) -> None:
        """Take what another device has collected."""
        self._others.append(other)

    def opened(self) -> Parcel:
        """What a device that this parcel arrived at keeps: room for its own gradients, this one beside them."""
        own = Parcel(self._readers)
        own.receive(self)
        return own

    def mapped(self, fn: Callable[[Gradient], Gradient]) -> Parcel:
        """The same parcel of what ``fn`` makes of each gradient in it."""
        made = Parcel(self._readers)
        made._left, made._total = self._left, fn(self._total)
        made._waiting = {reader: fn(gradient) for reader, gradient in self._waiting.items()}
        made._others = [other.mapped(fn) for other in self._others]
        return made

    def tensors(self) -> Iterator[Tensor]:
        """Every tensor in it."""
        for gradient in (self._total, *self._waiting.values()):
            yield from (one for one in (gradient if isinstance(gradient, list) else [gradient]) if one is not None)
        for other in self._others:
            yield from other.tensors()

    def lone(self) -> Tensor | None:
        """The sum, when it is one tensor and nothing waits for its turn."""
        return self._total if isinstance(self._total, Tensor) and not self._waiting else None

    def taken(self) -> tuple[Any, Any]:
        """What must be known beside the gradients, and the gradients: for a parcel that leaves the process."""
        return (self._readers, self._left, tuple(self._waiting)), [self._total, *self._waiting.values()]

    @staticmethod
    def given(head: Any, gradients: Any) -> Parcel:
        """The parcel of which :meth:`taken` gave both parts."""
        made = Parcel(head[0])
        made._left, made._total = head[1], gradients[0]
        made._waiting = dict(zip(head[2], gradients[1:], strict=True))
        return made

    def sum(self) -> Gradient:
        """All that arrived, as one gradient."""
        if not self._waiting and not self._others:
            return self._total
        if len(self._others) == 1 and not self._waiting and self._left == len(self._readers):
            return self._others[0].sum()  # all of it comes from one other device
        waiting, total = dict(self._waiting), self._total
        for other in self._others:  # only one of all holds the last reader, and so a sum
            waiting |= other._waiting
            total = add(total, other._total)
        for reader in sorted(waiting, reverse=True):
            total = add(total, waiting[reader])
        return total


def compact(gradient: Gradient) -> Gradient:
    """The gradient in storage of its own size: a part of a larger one would keep all of that alive."""
    if isinstance(gradient, list):
        return [compact(one) for one in gradient]
    if gradient is None or gradient.layout is not torch.strided:
        return gradient
    if gradient.untyped_storage().nbytes() > gradient.numel() * gradient.element_size() > 0:
        return gradient.clone()
    return gradient


OTHER_FORM = (
    "the stage's RECOMPUTE returned another form (other containers, or another number of tensors) than its FORWARD, "
    "whose readers have given gradients; let the form not depend on numbers, or use recompute='never' for this stage"
)


def collect(edge: Edges, gradient: Gradient, roots: list[GradientEdge], seeds: list[Tensor]) -> None:
    """Append every edge that has a gradient to ``roots`` and the gradient to ``seeds``.

    Raises:
        RunError: they are not of one form.
    """
    if isinstance(edge, list):
        if gradient is not None:
            if not isinstance(gradient, list) or len(gradient) != len(edge):
                raise RunError(OTHER_FORM)
            for one, own in zip(edge, gradient, strict=True):
                collect(one, own, roots, seeds)
    elif edge is not None and gradient is not None:
        if isinstance(gradient, list):
            raise RunError(OTHER_FORM)
        roots.append(edge)
        seeds.append(gradient)


class Discard(torch.autograd.graph.saved_tensors_hooks):
    """Build the graph, save nothing: outputs know whether they need a gradient, memory stays free.

    Running a forward that will be recomputed in the same grad mode as one that will not keeps kernels that look
    at ``requires_grad`` (attention) on the same path, so that recompute changes no bit.
    """

    def __init__(self) -> None:
        super().__init__(_forget, _missing)


def _forget(_: Tensor) -> None:
    return None


def _missing(_: Any) -> Tensor:
    raise RuntimeError(
        "a forward that is recomputed later saves nothing, so the stage cannot call autograd inside it; compile with "
        "recompute='never' for this stage"
    )
