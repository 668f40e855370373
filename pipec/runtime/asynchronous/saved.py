"""What a forward saves for its backward, when the weights have changed in between.

Autograd saves parameters themselves, and an optimizer writes into them. So the graph is built under saved-tensor
hooks: a saved parameter, or a view of one, is kept as a name and a place, and the backward is given the weights
that its plan says. Everything else is kept as autograd would. Hooks switch off autograd's own check for writes into
what was saved, so it is made here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pipec.errors import RunError
from pipec.runtime.asynchronous.weights import Leaves

Outer = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]] | None
OTHER, GROWN = -1, -2  # in a signature: a tensor without, with a gradient
VIEWS = {
    f"{name}Backward{number}" for number in (0, 1) for name in (
        "Alias", "AsStrided", "Expand", "Permute", "Select", "Slice", "Squeeze", "T", "Transpose", "UnsafeView",
        "Unsqueeze", "View",
    )
}


class Saved:
    """What one forward saves, and what its backward reads. Apart from the hooks, which would make a cycle with it.

    Attributes:
        give: set before the backward: index of a parameter to the weights that the backward reads.
        signature: what was saved, in order: the index of a parameter, OTHER or GROWN.
        seen: tensors that are no parameters, where a list is given for them.
    """

    def __init__(self, leaves: Leaves, exact: bool, outer: Outer = None, seen: list[Tensor] | None = None) -> None:
        """``exact``: the backward reads the weights of this forward; ``outer``: the caller's own hooks."""
        self.leaves, self.exact, self.outer, self.seen = leaves, exact, outer, seen
        self.storages = leaves.storages
        self.casts = not exact and torch.is_autocast_enabled("cpu")
        self.signature: list[int] = []
        self.give: Callable[[int], Tensor] | None = None

    def hooks(self) -> torch.autograd.graph.saved_tensors_hooks:
        """The context of the forward."""
        return torch.autograd.graph.saved_tensors_hooks(self.pack, self.unpack)

    def pack(self, tensor: Tensor) -> Any:
        """Called by autograd with each tensor that it saves."""
        if tensor.layout is not torch.strided:
            return tensor.detach(), None, None
        index = None
        if tensor.untyped_storage().data_ptr() in self.storages:
            index = self.leaves.find(tensor)
        if index is None and self.casts and tensor.requires_grad:
            cast = self.cast_of(tensor)
            if cast is not None:
                self.signature.append(cast)
                return cast, tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype
        if index is None:
            self.signature.append(GROWN if tensor.requires_grad else OTHER)
            if self.seen is not None:
                self.seen.append(tensor)
            if self.outer is not None:
                return self.outer[0](tensor), None, self.outer[1]
            return tensor.detach(), tensor._version, None
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
        offset = tensor.storage_offset() - self.leaves.tensors[index].storage_offset()
        return index, tensor.shape, tensor.stride(), offset, None

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
        if len(packed) == 5:
            index, size, stride, offset, dtype = packed
            weights = self.leaves.tensors[index].detach() if self.give is None else self.give(index)
            if dtype is not None:
                return weights.to(dtype).as_strided(size, stride, offset)
            return weights.as_strided(size, stride, weights.storage_offset() + offset)
        kept, version, outer = packed
        if outer is not None:
            return outer(kept)  # type: ignore[no-any-return]
        if version is not None and kept._version != version:
            raise RuntimeError(
                "a tensor needed for the gradient was modified in place after the forward had saved it: a "
                f"{kept.dtype} of shape {tuple(kept.shape)}, now at version {kept._version}, expected {version}; "
                "use an operation that does not write in place, or clone before writing"
            )
        return kept  # type: ignore[no-any-return]


def outer_hooks() -> Outer:
    """The saved-tensor hooks that hold on this thread now."""
    found: Any = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return tuple(found) if found is not None else None
