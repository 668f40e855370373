"""What travels between ranks: tensors as plain bytes, everything else as a description that is sent when it changes.

A message is looked at as *frame* and content. The frame holds what a receiver must know to rebuild the value: shapes,
strides, dtypes, which tensors require a gradient, the layout and the plain Python leaves. Sender and receiver both
remember the frames of the last step, so a receiver can make room before a message comes, and a message whose frame
is as expected carries bytes only.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

import torch
from attrs import field, frozen
from torch import Tensor

from pipec.errors import RunError
from pipec.runtime.borders import Packed, Parcel
from pipec.tree import LEAF, flatten, unflatten

SCALARS = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)
HEAD = 64  # bytes of the header; also the alignment of every tensor in a joint buffer
JOINT = 1 << 18  # bytes: up to here one buffer with a copy is cheaper than a message per tensor


@frozen
class Leaf:
    """A tensor's form. ``stride`` is kept, as kernels choose their path by it."""

    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    grad: bool

    @property
    def nbytes(self) -> int:
        """Bytes that travel: of every element once, whatever the strides."""
        return _count(self) * self.dtype.itemsize


def leaf_of(tensor: Tensor) -> Leaf:
    size, stride = tuple(tensor.shape), tensor.stride()
    if not tensor.is_contiguous() and _overlaps(size, stride):
        stride = torch.empty(size, device="meta").stride()
    return Leaf(tensor.dtype, size, stride, tensor.requires_grad)


def _overlaps(size: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    """True when elements share memory in another way than along dimensions of stride 0."""
    dims = sorted((s, n) for n, s in zip(size, stride, strict=True) if s and n > 1)
    reach = 0
    for step, number in dims:
        if step <= reach:
            return True
        reach += step * (number - 1)
    return False


def _count(leaf: Leaf) -> int:
    number = 1
    for size, stride in zip(leaf.size, leaf.stride, strict=True):
        number *= size if stride or not size else 1
    return number


@frozen(eq=False)
class Frame:
    """The form of a message: its tensors, and how they become the value again.

    Attributes:
        kind: "tensor", "packed", "sum" (a gradient that is one tensor), "parcel" (any other), "none".
        leaves: the tensors that travel.
        rest: layout, plain leaves and the like; compared only if ``steady``.
        steady: ``rest`` holds only what can be compared.
        dense, gaps: per tensor its strides without gaps, and whether it has any.
        plain: per tensor whether it has elements, each at a place of its own, and no gaps.
        offsets, span: where each tensor stands in one joint buffer behind a header, and all its bytes.
        room: bytes of the joint buffer; 0: the tensors travel one by one.
    """

    kind: str
    leaves: tuple[Leaf, ...]
    rest: Any = None
    steady: bool = True
    dense: tuple[tuple[int, ...], ...] = field(init=False)
    gaps: tuple[bool, ...] = field(init=False)
    plain: tuple[bool, ...] = field(init=False)
    offsets: tuple[int, ...] = field(init=False)
    span: int = field(init=False)
    room: int = field(init=False)

    def __attrs_post_init__(self) -> None:
        offsets, at = [], HEAD
        for leaf in self.leaves:
            offsets.append(at)
            at += -(-leaf.nbytes // HEAD) * HEAD
        object.__setattr__(self, "offsets", tuple(offsets))
        dense = tuple(map(dense_stride, self.leaves))
        object.__setattr__(self, "dense", dense)
        object.__setattr__(self, "gaps", tuple(
            any(mine != theirs and n > 1 for mine, theirs, n in zip(own, leaf.stride, leaf.size, strict=True))
            for own, leaf in zip(dense, self.leaves, strict=True)
        ))
        object.__setattr__(self, "plain", tuple(
            bool(leaf.nbytes) and not gap and 0 not in leaf.stride
            for leaf, gap in zip(self.leaves, self.gaps, strict=True)
        ))
        object.__setattr__(self, "span", at)
        object.__setattr__(self, "room", at if at - HEAD <= JOINT else 0)


def lone_of(expected: Frame, payload: Any) -> Tensor | None:
    """The one tensor of ``payload`` when it is a tensor, or a gradient that is a sum, of just the expected form."""
    if expected.kind == "sum":
        if type(payload) is not Parcel or payload.lone() is None or payload.taken()[0] != expected.rest:
            return None
        payload = payload.lone()
    elif expected.kind != "tensor":
        return None
    return payload if type(payload) is Tensor and _has_form(payload, expected.leaves[0]) else None


def _has_form(payload: Tensor, leaf: Leaf) -> bool:
    return bool(
        payload.dtype is leaf.dtype and not payload.is_nested and payload.shape == leaf.size
        and payload.requires_grad == leaf.grad and payload.layout is torch.strided and payload.stride() == leaf.stride
        and not payload.is_neg() and not payload.is_conj()
    )


def frame_of(payload: Any) -> tuple[Frame, list[Tensor]]:
    """The frame of what a COPY carries, and its tensors."""
    if isinstance(payload, Tensor) and _plain(payload):
        return Frame("tensor", (leaf_of(payload),)), [payload]
    if payload is None:
        return Frame("none", ()), []
    if isinstance(payload, Parcel) and (lone := payload.lone()) is not None and _plain(lone):
        return Frame("sum", (leaf_of(lone),), payload.taken()[0]), [lone]
    if isinstance(payload, Parcel):
        kind, head, value = "parcel", *payload.taken()
        leaves, layout = flatten(value)
    elif isinstance(payload, Packed):
        kind, head, leaves, layout = "packed", None, payload.leaves, payload.layout
    else:
        kind, head, leaves, layout = "packed", None, *flatten(payload)
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor) and _plain(leaf)]
    others = [leaf if not isinstance(leaf, Tensor) else HOLE if _plain(leaf) else Grown(leaf) if leaf.requires_grad
              else leaf for leaf in leaves]
    steady = all(leaf is HOLE or isinstance(leaf, SCALARS) for leaf in others)
    return Frame(kind, tuple(map(leaf_of, tensors)), (head, layout, others), steady), tensors


def fits(expected: Frame | None, frame: Frame) -> bool:
    """Whether a message is what its receiver expects, so that bytes are all it needs."""
    if expected is None or expected.kind != frame.kind or expected.leaves != frame.leaves:
        return False
    if frame.rest is None or frame.kind == "sum":
        return bool(expected.rest == frame.rest)
    return frame.steady and expected.steady and _same(expected.rest, frame.rest)


def _same(one: Any, other: Any) -> bool:
    (head, layout, leaves), (head2, layout2, leaves2) = one, other
    return bool(
        head == head2 and layout == layout2 and len(leaves) == len(leaves2)
        and all(type(a) is type(b) and a == b for a, b in zip(leaves, leaves2, strict=True))
    )


class _Hole:
    """Stands for a tensor among plain leaves; one object, also after a pickle."""

    def __reduce__(self) -> str:
        return "HOLE"


HOLE = _Hole()


@frozen(eq=False)
class Grown:
    """A tensor that is pickled whole and requires a gradient, which a pickle of a sparse one forgets; a tensor again
    after it."""

    tensor: Tensor

    def __reduce__(self) -> tuple[Any, ...]:
        return Tensor.requires_grad_, (self.tensor,)


def _plain(tensor: Tensor) -> bool:
    """A tensor whose elements are all there is to it; others (sparse, nested, quantised, subclasses) are pickled
    whole."""
    return (
        type(tensor) in (Tensor, torch.nn.Parameter) and tensor.layout is torch.strided and not tensor.is_quantized
        and not tensor.is_nested and not tensor.is_conj() and not tensor.is_neg()
    )


def dumped(frame: Frame, what: str) -> Tensor:
    """The frame as bytes, shape (length,).

    Raises:
        RunError: a part of the value cannot leave the process.
    """
    try:
        data = pickle.dumps((frame.kind, frame.leaves, frame.rest, frame.steady))
    except Exception as error:
        raise RunError(
            f"{what} cannot be sent to another rank: {type(error).__name__}: {error}; stages on different ranks hand "
            "over tensors, containers of them and what pickle takes"
        ) from error
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def loaded(data: Tensor | bytes) -> Frame:
    """The frame that :func:`dumped` was given."""
    return Frame(*pickle.loads(data if isinstance(data, bytes) else data.numpy().tobytes()))


def as_bytes(tensor: Tensor) -> Tensor:
    """The elements of a tensor in the order of its memory, as bytes; a view where there are no gaps."""
    base = tensor.detach()
    if not base.is_contiguous() and _overlaps(tuple(base.shape), base.stride()):
        base = base.contiguous()  # as its leaf says
    for dim, stride in enumerate(base.stride()):
        if stride == 0 and base.shape[dim] > 1:
            base = base.narrow(dim, 0, 1)
    flat = base
    if not base.is_contiguous():
        order = sorted(range(base.dim()), key=lambda d: base.stride()[d], reverse=True)
        flat = base.permute(order).contiguous()
    flat = flat.reshape(-1)
    if flat.numel() == 1:  # one element may come with any stride, 0 where it was expanded
        flat = flat.as_strided((1,), (1,))
    return flat.view(torch.uint8)


def dense_stride(leaf: Leaf) -> tuple[int, ...]:
    """The strides of a tensor without gaps whose dimensions follow each other in memory as those of ``leaf`` do."""
    strides: tuple[int, ...] = leaf.stride
    order = sorted(range(len(strides)), key=lambda d: strides[d])
    dense, step = [0] * len(strides), 1
    for dim in order:
        if strides[dim] or not leaf.size[dim]:
            dense[dim] = step
            step *= max(leaf.size[dim], 1)
    return tuple(dense)


def placed(frame: Frame, number: int, data: Tensor, offset: int = 0) -> Tensor:
    """The memory at ``offset`` of ``data`` as the tensor ``number`` of ``frame``, without the gaps it may have.

    A tensor of its own: it shares no version counter with others in the same memory.
    """
    leaf = frame.leaves[number]
    made = torch.empty(0, dtype=leaf.dtype, device=data.device)
    made.set_(data.untyped_storage(), (data.storage_offset() + offset) // leaf.dtype.itemsize, leaf.size,
              frame.dense[number])
    return made


class Envelope:
    """A buffer to send messages of one form from: views of it are made once, and serve every message that follows.

    Attributes:
        buffer: header and tensors, at least ``frame.span`` bytes.
        head: the header's memory.
    """

    __slots__ = ("_places", "buffer", "frame", "head")

    def __init__(self, frame: Frame, buffer: Tensor) -> None:
        self.frame, self.buffer = frame, buffer
        self.head = self.buffer[:HEAD].numpy().data
        self._places: list[tuple[Tensor, list[int] | None]] = []
        for number, (leaf, offset) in enumerate(zip(frame.leaves, frame.offsets, strict=True)):
            there, once = placed(frame, number, self.buffer, offset), None
            if 0 in leaf.stride:  # elements that share memory travel once
                once = [1 if stride == 0 else n for n, stride in zip(leaf.size, leaf.stride, strict=True)]
                there = there.as_strided(once, frame.dense[number])
            self._places.append((there, once))

    def fill(self, tensors: Sequence[Tensor]) -> None:
        """Write the elements of the frame's tensors."""
        for (there, once), tensor in zip(self._places, tensors, strict=True):
            bare = tensor.detach()
            there.copy_(bare if once is None else bare.as_strided(once, bare.stride()))


def rebuilt(frame: Frame, number: int, data: Tensor, offset: int = 0) -> Tensor:
    """The tensor ``number`` of ``frame`` whose bytes begin at ``offset`` of ``data``."""
    return _finished(frame, number, placed(frame, number, data, offset))


def sole_room(frame: Frame, device: torch.device) -> Tensor:
    """Room for a message of one tensor, header in front, that :func:`sole` makes into that tensor."""
    leaf = frame.leaves[0]
    return torch.empty(frame.room // leaf.dtype.itemsize, dtype=leaf.dtype, device=device)


def sole(frame: Frame, data: Tensor) -> Tensor:
    """``data`` of :func:`sole_room` itself as the one tensor of ``frame``: no second tensor is made for its memory."""
    leaf = frame.leaves[0]
    return _finished(frame, 0, data.as_strided_(leaf.size, frame.dense[0], HEAD // leaf.dtype.itemsize))


def _finished(frame: Frame, number: int, made: Tensor) -> Tensor:
    leaf = frame.leaves[number]
    if frame.gaps[number]:
        made = _spread(made, leaf)
    return made.requires_grad_() if leaf.grad else made


def _spread(dense: Tensor, leaf: Leaf) -> Tensor:
    """The same elements with the gaps between them that the sender's tensor has."""
    size = [1 if stride == 0 else n for n, stride in zip(leaf.size, leaf.stride, strict=True)]
    made = torch.empty_strided(size, leaf.stride, dtype=leaf.dtype, device=dense.device)
    made.copy_(dense.as_strided(size, dense.stride()))
    return made.as_strided(leaf.size, leaf.stride)


def payload_of(frame: Frame, tensors: Sequence[Tensor]) -> Any:
    """The value of a frame with its tensors filled in."""
    if frame.kind == "tensor":
        return tensors[0]
    if frame.kind == "none":
        return None
    if frame.kind == "sum":
        return Parcel.given(frame.rest, [tensors[0]])
    head, layout, others = frame.rest
    rest = iter(tensors)
    leaves = [next(rest) if leaf is HOLE else leaf for leaf in others]
    if frame.kind == "packed":
        return leaves[0] if layout == LEAF else Packed(leaves, layout)
    return Parcel.given(head, unflatten(layout, leaves))
