"""Values as pytrees: flatten, rebuild and map nested Python containers.

Leaves are everything that is not a tuple, list, dict, named tuple, dataclass or a container type registered
with ``torch.utils._pytree``; ``None`` is a leaf. Unlike the general pytree of torch, dataclasses are containers
without registration, attributes that a script adds to a dataclass, a named tuple or its own kind of dict are children
too, and a lone tensor costs one type check.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from attrs import frozen
from torch import Size, Tensor
from torch.utils import _pytree as torch_pytree

from pipec.errors import PipecError

Path = tuple[Any, ...]


@frozen
class Layout:
    """The containers of a value without its leaves. ``children`` is ``None`` for a leaf."""

    kind: Any = None
    meta: Any = None
    children: tuple[Layout, ...] | None = None

    @property
    def size(self) -> int:
        """Number of leaves."""
        return 1 if self.children is None else sum(child.size for child in self.children)


LEAF = Layout()


def _children(value: Any) -> tuple[Any, Any, list[Any]] | None:
    """(kind, meta, children) of a container, or None for a leaf."""
    kind = type(value)
    if kind is tuple or kind is list:
        return kind, None, list(value)
    if kind is Size:  # a plain value, which torch's own trees turn into a tuple
        return None
    if kind is dict:
        return dict, tuple(value), list(value.values())
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        more = getattr(value, "__dict__", None)
        return ("named", (kind, tuple(more)), [*value, *more.values()]) if more else (kind, None, list(value))
    if kind in torch_pytree.SUPPORTED_NODES:
        children, context = torch_pytree.SUPPORTED_NODES[kind].flatten_fn(value)
        return "registered", (kind, context), list(children)
    if isinstance(value, dict):
        more = dict(getattr(value, "__dict__", {}))
        if isinstance(value, defaultdict):
            more["default_factory"] = value.default_factory
        return "dict", (kind, tuple(more), tuple(value)), [*more.values(), *value.values()]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [f.name for f in dataclasses.fields(value)]
        names += [name for name in getattr(value, "__dict__", ()) if name not in names]
        names = [name for name in names if hasattr(value, name)]  # a field may be declared and never set
        return "dataclass", (kind, tuple(names)), [getattr(value, name) for name in names]
    return None


def flatten(value: Any) -> tuple[list[Any], Layout]:
    """All leaves of ``value`` from left to right, and the layout that rebuilds it.

    Raises:
        PipecError: a container holds itself, or is nested too deep for Python.
    """
    if type(value) is Tensor:
        return [value], LEAF
    leaves: list[Any] = []
    try:
        return leaves, _flatten(value, leaves)
    except RecursionError:
        raise PipecError(
            "a container holds itself, or is nested too deep to be taken apart into its tensors; hand "
            "over the parts that are needed"
        ) from None


def _flatten(value: Any, leaves: list[Any]) -> Layout:
    found = _children(value)
    if found is None:
        leaves.append(value)
        return LEAF
    kind, meta, children = found
    return Layout(kind, meta, tuple(_flatten(child, leaves) for child in children))


def unflatten(layout: Layout, leaves: list[Any]) -> Any:
    """The value whose :func:`flatten` gave ``layout`` and ``leaves``."""
    return _unflatten(layout, iter(leaves))


def _unflatten(layout: Layout, leaves: Any) -> Any:
    if layout.children is None:
        return next(leaves)
    items = [_unflatten(child, leaves) for child in layout.children]
    kind, meta = layout.kind, layout.meta
    if kind is tuple or kind is list:
        return kind(items)
    if kind is dict:
        return dict(zip(meta, items, strict=True))
    if kind == "dict":  # as pickle does it: no __init__, attributes first
        cls, names, keys = meta
        made = cls.__new__(cls)
        for name, item in zip(names, items, strict=False):
            object.__setattr__(made, name, item)
        for key, item in zip(keys, items[len(names) :], strict=True):
            made[key] = item
        return made
    if kind == "named":
        cls, names = meta
        made = cls._make(items[: -len(names)])
        made.__dict__.update(zip(names, items[-len(names) :], strict=True))
        return made
    if kind == "dataclass":
        cls, names = meta
        made = object.__new__(cls)
        for name, item in zip(names, items, strict=True):
            object.__setattr__(made, name, item)
        return made
    if kind == "registered":
        cls, context = meta
        return torch_pytree.SUPPORTED_NODES[cls].unflatten_fn(items, context)
    return kind._make(items)  # a named tuple


def tree_map(fn: Callable[[Any], Any], value: Any) -> Any:
    """``value`` with ``fn`` applied to every leaf; containers are made anew."""
    leaves, layout = flatten(value)
    return unflatten(layout, [fn(leaf) for leaf in leaves])


def select(value: Any, path: Path) -> Any:
    """``value[path[0]][path[1]]...``; a string also selects an attribute where item access does not apply."""
    for key in path:
        if isinstance(key, str) and not isinstance(value, dict) and hasattr(value, key):
            value = getattr(value, key)
        else:
            value = value[key]
    return value


def show_path(path: Path) -> str:
    """``[0]["h"]`` as Python writes it."""
    return "".join(f"[{key!r}]" for key in path)
