"""Trainable tensors that a stage's graph reaches although the stage does not own them.

A stage's gradients are taken with respect to its own parameters and to what it reads. A tensor that it reaches in any
other way (a closure, a plain list of modules, an object that carries another stage's graph) would be left without a
gradient and without a word, so each stage's graph is looked through once, after its first forward.

A tensor that the stage made itself is none of these: that to which it differentiates inside (a gradient penalty, a
force from an energy). Once the forward has returned only the graph holds it, and nobody can ask for its gradient.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from pipec.errors import RunError
from pipec.runtime.engine import edge_of
from pipec.runtime.gradients import hooks_of
from pipec.runtime.stages import Stage, named_leaves

REENTRANT = "CheckpointFunctionBackward"


def check_strays(stage: Stage, stages: Sequence[Stage], roots: Iterable[Any], leaves: Iterable[Any]) -> None:
    """Look through the graph below ``roots`` (edges, lists of them or None).

    Raises:
        RunError: it reaches a leaf that is neither in ``leaves`` nor a parameter of the stage, or it holds a
            re-entrant checkpoint.
    """
    known = {id(leaf) for leaf in flat(leaves)} | {id(p) for p in stage.trainable()}
    known |= {id(leaf) for _, leaf in named_leaves(stage.params)}  # or the versions that stand in for them now
    found = leaves_below(flat(roots), stage.name)
    strange = [place for place, leaf in enumerate(found) if id(leaf) not in known]
    if not strange:
        return
    made_inside = held_by_graph(found)
    for place in strange:
        leaf = found[place]
        if not made_inside[place]:
            owner = next(
                (f"{name!r} of stage {other.name!r}" for other in stages for name, p in other.named_parameters()
                 if p is leaf), None
            )
            if owner is None:
                told, advice = f"a tensor of shape {tuple(leaf.shape)} that requires a gradient", (
                    "make it a parameter of the stage's module, pass it with params=, or as an input or a value"
                )
            else:
                told, advice = f"the parameter {owner}", (
                    "hand values over in tensors, tuples, lists, dicts, dataclasses or types registered with "
                    "torch.utils._pytree, and pass a parameter to every stage that uses it"
                )
            raise RunError(
                f"stage {stage.name!r} computes with {told} but does not own it, so its gradient would be lost; "
                f"{advice}"
            )


def held_by_graph(leaves: list[Tensor]) -> list[bool]:
    """Per tensor whether nothing but its graph holds it, and no hook waits for its gradient."""
    graph = edge_of(torch.zeros((), requires_grad=True, device="cpu") * 1)  # for what such a tensor counts
    (fewest,) = references(leaves_below([graph], ""))
    return [
        count <= fewest and not leaf._backward_hooks and not hooks_of(leaf)
        for count, leaf in zip(references(leaves), leaves, strict=True)
    ]


def references(tensors: list[Tensor]) -> list[int]:
    return [sys.getrefcount(tensors[place]) for place in range(len(tensors))]


def flat(tree: Any) -> list[Any]:
    """Entries of nested lists that are not None."""
    found: list[Any] = []
    for item in tree:
        if isinstance(item, list):
            found += flat(item)
        elif item is not None:
            found.append(item)
    return found


def leaves_below(roots: Iterable[Any], stage: str) -> list[Tensor]:
    """Every tensor that the graph accumulates into.

    Raises:
        RunError: a node is a re-entrant ``torch.utils.checkpoint``, which runs a backward of its own into ``.grad``.
    """
    seen: set[Any] = set()
    stack = [edge.node for edge in roots]
    found = []
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if node.name() == REENTRANT:
            raise RunError(
                f"stage {stage!r} uses torch.utils.checkpoint with use_reentrant=True, which works with a "
                "backward() of the whole model only; pass use_reentrant=False, or drop it and compile with "
                "recompute='always'"
            )
        variable = getattr(node, "variable", None)
        if isinstance(variable, Tensor):
            found.append(variable)
        stack += [following for following, _ in node.next_functions]
    return found
