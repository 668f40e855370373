"""Minibatches: cut into microbatches, and microbatch results joined again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from pipec.errors import Problem, RunError, raise_all
from pipec.runtime.borders import Packed, pack
from pipec.spec import InputSpec, Spec
from pipec.tree import LEAF, flatten, unflatten


def bind_inputs(spec: Spec, args: Sequence[Any], kwargs: Mapping[str, Any], optional: Sequence[int] = ()) -> list[Any]:
    """One value per input of the pipeline; ``MISSING`` for those in ``optional`` that were not given.

    Raises:
        RunError: listing inputs that are unknown, missing or given twice.
    """
    names = [item.name for item in spec.inputs]
    if len(args) == 1 and not kwargs and isinstance(args[0], Mapping) and args[0] and set(args[0]) <= set(names):
        raise RunError(
            f"pipeline {spec.name!r}: got one dict with the inputs {', '.join(args[0])}; pass it as step(**batch)"
        )
    problems = [Problem(f"it has no input {name!r}; its inputs are {', '.join(names)}") for name in kwargs
                if name not in names]
    if len(args) > len(names):
        problems.append(Problem(f"{len(args)} positional inputs were given, but it has {len(names)}"))
    values = list(args[: len(names)]) + [MISSING] * (len(names) - len(args))
    for index, name in enumerate(names):
        if name in kwargs:
            if values[index] is not MISSING:
                problems.append(Problem(f"input {name!r} was given twice"))
            values[index] = kwargs[name]
        if values[index] is MISSING and index not in optional:
            problems.append(Problem(f"input {name!r} is missing"))
    raise_all(f"pipeline {spec.name!r}", problems, RunError)
    return values


class _Missing:
    def __repr__(self) -> str:
        return "<not given>"


MISSING = _Missing()


def row_count(spec: Spec, values: Sequence[Any]) -> int | None:
    """Rows of the minibatch, None when no input is split.

    Raises:
        RunError: inputs disagree, or an input that is to be split cannot be.
    """
    counts: dict[int, list[str]] = {}
    problems = []
    for item, value, dim in _given(spec, values, [item.split for item in spec.inputs]):
        tensors = [leaf for leaf in flatten(value)[0] if isinstance(leaf, Tensor)]
        if not tensors:
            problems.append(
                Problem(f"input {item.name!r} holds no tensor to split, got {type(value).__name__}; give it as "
                        "a tensor, or declare it with input(name, split=None) if it is the same for all microbatches",
                        item.location)
            )
        for tensor in tensors:
            if tensor.is_nested or tensor.layout is not torch.strided:
                problems.append(
                    Problem(f"input {item.name!r} is a {'nested' if tensor.is_nested else tensor.layout} tensor, which "
                            "cannot be split into rows; pad it or make it dense, or declare it with split=None if it "
                            "is the same for all", item.location)
                )
                continue
            if not -tensor.dim() <= dim < tensor.dim():
                problems.append(
                    Problem(f"input {item.name!r} of shape {tuple(tensor.shape)} cannot be split along dimension "
                            f"{dim}; declare it with split=None if it is the same for all", item.location)
                )
                continue
            rows = counts.setdefault(tensor.shape[dim], [])
            if item.name not in rows:
                rows.append(item.name)
    disagree = "inputs that are split disagree on the number of rows"
    return _agreed(spec, counts, problems, disagree, "the minibatch has no row")


def sequence_length(spec: Spec, values: Sequence[Any]) -> int | None:
    """Length of the minibatch's sequences, None when no input is cut into slices.

    Raises:
        RunError: inputs disagree, or an input that is to be cut cannot be.
    """
    counts: dict[int, list[str]] = {}
    problems = []
    for item, value, dim in _given(spec, values, [item.slice_dim for item in spec.inputs]):
        for tensor in (leaf for leaf in flatten(value)[0] if isinstance(leaf, Tensor)):
            if not -tensor.dim() <= dim < tensor.dim():
                problems.append(Problem(f"input {item.name!r} of shape {tuple(tensor.shape)} cannot be cut into slices "
                                        f"along dimension {dim}", item.location))
            elif item.name not in (names := counts.setdefault(tensor.shape[dim], [])):
                names.append(item.name)
    disagree = "inputs that are cut into slices disagree on the length of the sequence"
    return _agreed(spec, counts, problems, disagree, "the sequences have no position")


def _given(spec: Spec, values: Sequence[Any], dims: Sequence[int | None]) -> Iterator[tuple[InputSpec, Any, int]]:
    """The inputs that are cut along a dimension, but for those left out (a mask, say)."""
    for item, value, dim in zip(spec.inputs, values, dims, strict=True):
        if dim is not None and value is not MISSING and value is not None:
            yield item, value, dim


def _agreed(
    spec: Spec, counts: Mapping[int, list[str]], problems: list[Problem], disagree: str, none: str
) -> int | None:
    """The one size that inputs have, None without any.

    Args:
        counts: the names of the inputs of each size.
        problems: found so far.

    Raises:
        RunError: listing these, and that inputs disagree or are empty.
    """
    if len(counts) > 1:
        told = ", ".join(f"{'/'.join(names)}: {size}" for size, names in counts.items())
        problems.append(Problem(f"{disagree} ({told})"))
    if 0 in counts:
        problems.append(Problem(f"{none} (input {', '.join(counts[0])})"))
    raise_all(f"pipeline {spec.name!r}", problems, RunError)
    return next(iter(counts)) if counts else None


def sizes(rows: int, microbatches: int) -> list[int]:
    """Rows per microbatch: they differ by at most one, the larger ones first (10 rows in 4: 3, 3, 2, 2)."""
    return [rows // microbatches + (m < rows % microbatches) for m in range(microbatches)]


def split(
    item: InputSpec, value: Any, parts: Sequence[int] | None, count: int, tokens: Sequence[int] | None = None
) -> list[Any]:
    """The pieces of one input as packets (see borders), the slices of each microbatch in a row.

    Pieces are views cut off from the caller's graph.

    Args:
        parts: rows per microbatch, None when no input has any.
        tokens: positions per slice, None without slices.
    """
    slices = 1 if tokens is None else len(tokens)
    if value is MISSING:
        return [MISSING] * (count * slices)
    rows = None if item.split is None else parts
    columns = None if item.slice_dim is None else tokens
    if rows is None and columns is None:
        return [pack(value)] * (count * slices)
    leaves, layout = flatten(value)
    cut: list[list[Any]] = []
    for leaf in leaves:
        if not isinstance(leaf, Tensor):
            cut.append([leaf] * (count * slices))
            continue
        whole = leaf.detach()
        of_rows = [whole] if rows is None else torch.split(whole, list(rows), item.split or 0)
        made: list[list[Tensor]] = []
        for row in of_rows:
            own = [row] if columns is None else torch.split(row, list(columns), item.slice_dim or 0)
            pieces = [piece.requires_grad_() if leaf.requires_grad else piece for piece in own]
            made.append(pieces * slices if columns is None else pieces)
        cut.append([piece for pieces in (made * count if rows is None else made) for piece in pieces])
    if layout is LEAF:
        return cut[0]
    return [Packed([column[m] for column in cut], layout) for m in range(count * slices)]


def join(values: Sequence[Any], dim: int | None) -> Any:
    """One result from those of the microbatches.

    Tensors are concatenated along ``dim``, scalars stacked; other leaves must agree or become a list. ``dim=None``
    keeps the list.
    """
    if dim is None:
        return list(values)
    flat = [flatten(value) for value in values]
    layout = flat[0][1]
    if any(other != layout for _, other in flat):
        return list(values)
    return unflatten(layout, [_join_leaf(column, dim) for column in zip(*(leaves for leaves, _ in flat), strict=True)])


def _join_leaf(column: Sequence[Any], dim: int) -> Any:
    if all(isinstance(leaf, Tensor) for leaf in column):
        if all(leaf.dim() == 0 for leaf in column):
            return torch.stack(list(column))
        return torch.cat(list(column), dim) if len(column) > 1 else column[0]
    first = column[0]
    same = all(type(leaf) is type(first) and not isinstance(leaf, Tensor) and _equal(leaf, first) for leaf in column)
    return first if same else list(column)


def _equal(one: Any, other: Any) -> bool:
    """``==`` where that is a truth; arrays of other libraries compare to arrays."""
    found = one is other or one == other
    return found if isinstance(found, bool) else False
