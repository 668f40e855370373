"""Which saved tensors were computed from parameters alone, seen by following a stage's first forward.

A backward with other weights than its forward takes these in place of saved parameters. A tensor that was computed
from parameters and nothing else (a cast of autocast, the weight of weight_norm, ``w * scale``) would be stale without
a word, so the first forward of a stage runs under a dispatch mode that follows what comes from data and what does not.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.utils._python_dispatch import TorchDispatchMode

from pipec.errors import RunError
from pipec.runtime.asynchronous.saved import Saved
from pipec.runtime.asynchronous.weights import StageWeights
from pipec.runtime.split import is_compiled
from pipec.tree import flatten

EMPTY = ("empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "new_")


class Following(TorchDispatchMode):
    """Follows every operation: what it makes is data if it reads data, else derived if it reads a parameter."""

    def __init__(self, saved: Saved, data: Iterable[Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.saved = saved
        self.own_hooks = False  # whether the stage has saved-tensor hooks of its own
        self._held: list[Tensor] = []  # storages stay, so that no address is used twice
        self._data: set[int] = set()
        self._derived: set[int] = set()
        self._mark([leaf for value in data for leaf in flatten(value)[0]], self._data)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks(False)
        if hooks is not None and getattr(hooks[0], "__self__", None) is not self.saved:
            self.own_hooks = True
        reads = flatten((args, kwargs or {}))[0]
        places = {_place(leaf) for leaf in reads if isinstance(leaf, Tensor)}
        name = func.name().partition("::")[2]
        if places & self._data:
            self._mark(flatten(out)[0], self._data)
        elif not name.startswith(EMPTY) and (
            places & self._derived or any(place in self.saved.leaves.storages for place in places)
        ):
            self._mark(flatten(out)[0], self._derived)
        return out

    def _mark(self, leaves: Iterable[Any], where: set[int]) -> None:
        for leaf in leaves:
            place = _place(leaf) if isinstance(leaf, Tensor) else 0
            if place and place not in self.saved.leaves.storages:
                self._held.append(leaf)
                where.add(place)

    def derived(self, tensor: Tensor) -> bool:
        """Whether ``tensor`` was computed from parameters and from no data."""
        place = _place(tensor)
        return place in self._derived and place not in self._data


def _place(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr() if tensor.layout is torch.strided else 0


def check_saved(weights: StageWeights, saved: Saved, following: Following, roots: Iterable[Any], rule: str) -> None:
    """Look at what a followed forward saved.

    Raises:
        RunError: its backward could not be given the weights that its plan says.
    """
    stage = weights.stage
    if following.own_hooks:
        raise RunError(
            f"stage {stage.name!r} saves tensors in a way of its own (torch.utils.checkpoint, save_on_cpu or other "
            f"saved-tensor hooks inside the stage), so its backward would read newer weights than weight rule {rule!r} "
            "says; take it out and compile with recompute='always' for this stage"
        )
    holder = keeper(weights, roots)
    if holder is not None:
        raise RunError(
            f"stage {stage.name!r}: {holder} keeps a parameter as an attribute, where its backward would find newer "
            f"weights than weight rule {rule!r} says; keep it with ctx.save_for_backward"
        )
    if saved.exact:
        return
    compiled = [name for name, part in stage_parts(stage) if is_compiled(part)]
    if compiled:
        raise RunError(
            f"stage {stage.name!r}: {compiled[0]} is compiled by torch.compile, where the weights of its backward "
            f"cannot be exchanged as weight rule {rule!r} asks; use schedule='pipedream', which keeps the forward's "
            "weights, or do not compile it"
        )
    stale = next((tensor for tensor in saved.seen or () if following.derived(tensor)), None)
    if stale is not None:
        names = origins(weights, saved, stale)
        told = f" from {', '.join(names)}" if names else ""
        raise RunError(
            f"stage {stage.name!r} saves a tensor of shape {tuple(stale.shape)} and {stale.dtype} that it computed"
            f"{told} alone (a parametrization such as weight_norm, a cast, w * scale): weight rule {rule!r} has the "
            "backward read other weights than the forward, but this tensor would stay the forward's. Use "
            "schedule='pipedream', which keeps the forward's weights; or use the parameter as it is"
        )


def stage_parts(stage: Any) -> Iterable[tuple[str, Any]]:
    """The stage's function and every module in it, with names."""
    yield "its function", stage.fn
    for module in stage.modules:
        for name, part in module.named_modules():
            yield name or type(part).__name__, part


def keeper(weights: StageWeights, roots: Iterable[Any]) -> str | None:
    """The name of an autograd function in the graph that holds a parameter outside of ``save_for_backward``."""
    seen: set[Any] = set()
    stack = [edge.node for edge in roots]
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if isinstance(node, BackwardCFunction):
            for value in vars(node).values():
                for leaf in flatten(value)[0]:
                    if isinstance(leaf, Tensor) and leaf.layout is torch.strided and (
                        leaf.untyped_storage().data_ptr() in weights.live.storages
                    ):
                        return type(node).__name__.removesuffix("Backward")
        stack += [following for following, _ in node.next_functions]
    return None


def origins(weights: StageWeights, saved: Saved, tensor: Tensor) -> list[str]:
    """Names of the parameters that a tensor's graph begins at."""
    seen: set[Any] = set()
    stack: list[Any] = [tensor.grad_fn]
    names: list[str] = []
    position = {id(leaf): name for name, leaf in zip(weights.names, saved.leaves.tensors, strict=True)}
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        name = position.get(id(getattr(node, "variable", None)))
        if name is not None and name not in names:
            names.append(name)
        stack += [following for following, _ in node.next_functions]
    return sorted(names)
