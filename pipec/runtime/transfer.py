"""What crosses from device to device as memory of its own: values and gradients, tensor by tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from pipec.runtime.borders import Packed, Parcel

Copy = Callable[[Tensor], Tensor]
Pairs = list[tuple[Tensor, Tensor]]  # (memory to write, what to write there)


def copied(payload: Any, copy: Copy) -> Any:
    """The payload (a packet, a parcel, or None) with every tensor in it made anew by ``copy``."""
    if isinstance(payload, Tensor):
        made = copy(payload.detach())
        return made.requires_grad_() if payload.requires_grad else made
    if isinstance(payload, Packed):
        return Packed([copied(leaf, copy) for leaf in payload.leaves], payload.layout)
    if isinstance(payload, Parcel):
        return payload.mapped(lambda gradient: _gradient(gradient, copy))
    return payload


def _gradient(gradient: Any, copy: Copy) -> Any:
    if isinstance(gradient, list):
        return [_gradient(one, copy) for one in gradient]
    return None if gradient is None else copy(gradient)


def tensors(payload: Any) -> Iterator[Tensor]:
    """Every tensor in a payload."""
    if isinstance(payload, Tensor):
        yield payload
    elif isinstance(payload, Packed):
        yield from (leaf for leaf in payload.leaves if isinstance(leaf, Tensor))
    elif isinstance(payload, Parcel):
        yield from payload.tensors()


def duplicate(tensor: Tensor, device: torch.device | None = None) -> Tensor:
    """A copy on ``device`` (by default the tensor's own) with the same strides, in memory of its own size."""
    where = tensor.device if device is None else device
    if tensor.layout is not torch.strided:
        return tensor.detach().to(where, copy=True, non_blocking=True)
    pairs: Pairs = []
    made = prepared(tensor, lambda core: torch.empty_like(core, device=where), pairs)
    fill(pairs)
    return made


def prepared(tensor: Tensor, empty: Copy, pairs: Pairs) -> Tensor:
    """Memory for a copy of a strided tensor; what :func:`fill` is to write there is appended to ``pairs``.

    ``empty`` makes memory for a tensor like the one given; dense tensors keep their strides in it.

    Strides stay because kernels that add up may do it in another order for another layout. An expanded tensor is
    copied once and expanded again. A tensor with gaps becomes dense: copying them would move memory nobody reads.
    """
    core = tensor.detach()
    for dim, stride in enumerate(tensor.stride()):
        if stride == 0 and tensor.shape[dim] > 1:
            core = core.narrow(dim, 0, 1)
    made = empty(core)
    pairs.append((made, core))
    return made if core.shape == tensor.shape else made.expand(tensor.shape)


@torch.no_grad()
def fill(pairs: Pairs) -> None:
    """Write the tensors into the memory prepared for them; on a GPU the host does not wait."""
    for made, core in pairs:
        made.copy_(core, non_blocking=True)
