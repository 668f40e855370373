"""What a forward saves for its backward, when the weights have changed in between.

Autograd saves parameters themselves, and an optimizer writes into them. So the graph is built under saved-tensor
hooks: a saved parameter, or a view of one, is kept as a name and a place, and the backward is given the weights
that its plan says. Everything else is kept as autograd would. Hooks switch off autograd's own check for writes into
what was saved, so it is made here.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pipec.errors import RunError
from pipec.runtime.asynchronous.weights import Leaves

Outer = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]] | None
STRIDED = torch.strided
OTHER, GROWN = -1, -2  # in a signature: a tensor without, with a gradient
VIEWS = {
    f"{name}Backward{number}" for number in (0, 1) for name in (
        "Alias", "AsStrided", "Expand", "Permute", "Select", "Slice", "Squeeze", "T", "Transpose", "UnsafeView",
        "Unsqueeze", "View",
    )
}


class Saved:
    """What forwards with the same leaves save, and what a backward reads; apart from the hooks, against a cycle.

    A stage runs one task at a time. So what is said here of a forward and of a backward is of the one that runs now,
    and graphs that wait for their backward hold nothing of their own here.

    Attributes:
        give: while a backward runs: index of a parameter to the weights that the backward reads, without a gradient.
        signature: what a forward has saved, in order: the index of a parameter, OTHER or GROWN.
        seen: tensors that are no parameters, where a list is given for them.
    """

    __slots__ = ("_places", "_slow", "casts", "exact", "give", "leaves", "outer", "seen", "signature")

    def __init__(
        self, leaves: Leaves, exact: bool, casts: bool, outer: Outer = None, seen: list[Tensor] | None = None
    ) -> None:
        """``exact``: the backward reads the weights of its forward; ``casts``: autocast may have made copies of some;
        ``outer``: the caller's own hooks."""
        leaves.look()
        self.leaves, self.exact, self.casts, self.outer, self.seen = leaves, exact, casts, outer, seen
        self._slow = casts or outer is not None or seen is not None
        self.signature: list[int] = []
        self.give: Callable[[int], Tensor] | None = None
        self._places: dict[Any, Any] = {}  # one tuple for each view, not one for each graph

    def hooks(self) -> torch.autograd.graph.saved_tensors_hooks:
        """The context of a forward; it may be entered again."""
        return torch.autograd.graph.saved_tensors_hooks(self.pack, self.unpack)

    def pack(self, tensor: Tensor) -> Any:
        """Called by autograd with each tensor that it saves, between two kernels that leave no cache warm: so it does
        little.

        Returns:
            The index of a parameter, a tensor that nothing was ever written into, or a tuple: what else there is to
            know. Python's collector looks at each object for as long as the graph waits, so there are few.
        """
        if tensor.layout is not STRIDED:
            return tensor.detach(), None, None
        address, leaves = tensor.data_ptr(), self.leaves
        place = bisect_right(leaves.begins, address) - 1
        if place >= 0 and address < leaves.ends[place]:
            return self._parameter(tensor, leaves.find(tensor, place))
        if self._slow:
            return self._other(tensor)
        grown = tensor.requires_grad
        self.signature.append(GROWN if grown else OTHER)
        kept = tensor if not grown or tensor.is_leaf else tensor.detach()  # its graph would make a cycle
        return kept if tensor._version == 0 and type(kept) is Tensor else (kept, tensor._version, None)

    def _other(self, tensor: Tensor) -> Any:
        """What is kept of a tensor that is no parameter, where autocast, the caller's hooks or a first look count."""
        if self.casts and tensor.requires_grad:
            cast = self.cast_of(tensor)
            if cast is not None:
                self.signature.append(cast)
                return cast, tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype
        self.signature.append(GROWN if tensor.requires_grad else OTHER)
        if self.seen is not None:
            self.seen.append(tensor)
        if self.outer is not None:
            return self.outer[0](tensor), None, self.outer[1]
        return tensor.detach(), tensor._version, None

    def _parameter(self, tensor: Tensor, index: int) -> Any:
        """What is kept of a view of a parameter."""
        if index < 0:
            if not self.exact:
                raise RunError(
                    f"a parameter is used through a view of shape {tuple(tensor.shape)} as {tensor.dtype}, conjugated "
                    "or across several parameters, where a backward cannot be given other weights than the forward; "
                    "use schedule='pipedream', which keeps the forward's weights"
                )
            self.signature.append(OTHER)
            return tensor.detach().clone(), None, None
        self.signature.append(index)
        own = self.leaves.tensors[index]
        if own is tensor:
            return index
        place = index, tensor.shape, tensor.stride(), tensor.storage_offset() - own.storage_offset(), None
        return self._places.setdefault(place, place)

    def cast_of(self, tensor: Tensor) -> int | None:
        """The parameter that ``tensor`` is autocast's copy of in another dtype, or a view of such a copy."""
        node: Any = tensor.grad_fn
        while node is not None and type(node).__name__ in VIEWS:
            node = node.next_functions[0][0]
        if type(node).__name__ != "ToCopyBackward0":
            return None
        leaf = getattr(node.next_functions[0][0], "variable", None)
        return next((index for index, own in enumerate(self.leaves.tensors) if own is leaf), None)

    def unpack(self, packed: Any) -> Tensor:
        """Called by autograd's backward for each of them."""
        if type(packed) is Tensor:
            if packed._version:
                raise written(packed, 0)
            return packed
        if type(packed) is int:
            return self.leaves.bare[packed] if self.give is None else self.give(packed)
        if len(packed) == 5:
            index, size, stride, offset, dtype = packed
            weights = self.leaves.bare[index] if self.give is None else self.give(index)
            if dtype is not None:
                return weights.to(dtype).as_strided(size, stride, offset)
            return weights.as_strided(size, stride, weights.storage_offset() + offset)
        kept, version, outer = packed
        if outer is not None:
            return outer(kept)  # type: ignore[no-any-return]
        if version is not None and kept._version != version:
            raise written(kept, version)
        return kept  # type: ignore[no-any-return]


def written(kept: Tensor, version: int) -> RuntimeError:
    """The error for a saved tensor that was written into."""
    return RuntimeError(
        "a tensor needed for the gradient was modified in place after the forward had saved it: a "
        f"{kept.dtype} of shape {tuple(kept.shape)}, now at version {kept._version}, expected {version}; "
        "use an operation that does not write in place, or clone before writing"
    )


def outer_hooks() -> Outer:
    """The saved-tensor hooks that hold on this thread now."""
    found: Any = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return tuple(found) if found is not None else None
