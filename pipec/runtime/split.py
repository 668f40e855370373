"""The two halves of a split backward, bit-equal together to the whole one.

Nodes of a stage's graph are of three kinds. Those on a way to what the stage read belong to the input half; those on
ways to parameters only belong to the weight half; a *join* is of the first kind with an edge to the second, as every
matrix product of activations and weights is.

BACKWARD_INPUT runs the engine to what the stage read and keeps the gradients that arrive at each join. What the other
nodes saved is dropped then. BACKWARD_WEIGHT asks each join for its gradients towards the weights alone and runs the
engine from there to the parameters, once, in the order of the whole backward: the sums are formed alike. The joins
are called by hand and not by the engine, which would follow the way from one join to the next a second time and run
the user's hooks on them twice.

A parameter that cannot be reached so gets its gradient in the input half, in the same run of the engine: one behind a
node that may run only once (a custom Function or a compiled graph, whose one backward gives all its gradients; a
node with hooks; tensors in a checkpoint), one with hooks of its own, and one whose uses would be added up in another
order. Where nothing is left for the weight half, the input half is the whole backward.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any

import torch
from attrs import field, frozen
from torch import Tensor
from torch._C import _FunctionBase as FunctionNode
from torch.autograd.graph import GradientEdge, get_gradient_edge

from pipec.runtime.engine import gradients
from pipec.runtime.stages import Stage

LOG = logging.getLogger("pipec")

Node = Any  # torch.autograd.graph.Node
OPAQUE = ("CppFunction", "CopySlices")  # types of nodes that Python cannot look into

INPUT = 1  # the bit of a mask that stands for what the stage read; the parameters have the bits above it


# -- the graph -----------------------------------------------------------------------------------------------------


@frozen(eq=False)
class Tree:
    """A graph seen from its roots: nodes from the outputs down, their edges, and what each of them leads to."""

    nodes: list[Node]
    edges: dict[Node, list[tuple[int, Node, int]]]  # (which of the node's edges, the node there, its input)
    masks: dict[Node, int]
    regular: bool  # every node was made after those it leads to, so the engine runs them in the order of ``nodes``

    def weight_only(self, node: Node) -> bool:
        mask = self.masks[node]
        return mask > INPUT and not mask & INPUT


def look_through(roots: Iterable[GradientEdge], leaves: Sequence[Node], parameters: Sequence[Tensor]) -> Tree:
    """All nodes below ``roots``; the walk ends at ``leaves`` and at parameters."""
    bits = {id(parameter): 2 << place for place, parameter in enumerate(parameters)}
    masks: dict[Node, int] = dict.fromkeys(leaves, INPUT)
    edges: dict[Node, list[tuple[int, Node, int]]] = {}
    numbered: list[tuple[int, Node]] = []
    stack = [edge.node for edge in roots]
    while stack:
        node = stack.pop()
        if node in edges or node in masks:
            continue
        following = node.next_functions
        if not following:
            masks[node] = bits.get(id(getattr(node, "variable", None)), 0)
            continue
        edges[node] = own = [(place, to, nr) for place, (to, nr) in enumerate(following) if to is not None]
        numbered.append((node._sequence_nr(), node))
        stack += [to for _, to, _ in own]
    numbered.sort(key=_number)
    order = {node: number for number, node in numbered}
    regular = len(set(order.values())) == len(numbered)
    for number, node in numbered:
        mask = 0
        for _, to, _ in edges[node]:
            regular &= order.get(to, -1) < number
            mask |= masks.get(to, 0)
        masks[node] = mask
    return Tree([node for _, node in reversed(numbered)], edges, masks, regular)


def _number(item: tuple[int, Node]) -> int:
    return item[0]


def reordered(tree: Tree, roots: Iterable[GradientEdge]) -> int:
    """The mask of parameters behind a sum of three or more whose order the weight half would change.

    The engine adds what arrives at a node in the order in which the nodes it comes from run: the roots, then the
    latest first. The weight half knows what comes from joins before anything else runs. The first two commute.
    """
    arriving: dict[tuple[Node, int], list[tuple[int, int]]] = {}
    for edge in roots:
        if tree.weight_only(edge.node):
            arriving.setdefault((edge.node, edge.output_nr), []).append((0, -1))
    for place, node in enumerate(tree.nodes):
        late = 2 if tree.weight_only(node) else 1
        for _, to, nr in tree.edges[node]:
            if tree.weight_only(to):
                arriving.setdefault((to, nr), []).append((late, place))
    found = 0
    for (node, _), whole in arriving.items():
        if len(whole) > 2:
            split = sorted(whole)
            if split[2:] != whole[2:] or set(split[:2]) != set(whole[:2]):
                found |= tree.masks[node]
    return found


def spread(tree: Tree, mask: int) -> int:
    """``mask`` and all parameters that share a node of the weight half with one in it: no node there runs twice."""
    before = -1
    while mask != before:
        before = mask
        for node in tree.nodes:
            own = tree.masks[node]
            if own & mask and not own & INPUT:
                mask |= own
    return mask


@cache
def saved_names(kind: Any) -> tuple[str, ...]:
    """Attributes of a type of nodes that hold what it saved for backward."""
    return tuple(name for name in dir(kind) if name.startswith("_raw_saved_"))


def saved_tensors(node: Node) -> list[Any]:
    found: list[Any] = []
    kind: Any = type(node)
    names = ("_raw_saved_tensors",) if isinstance(node, FunctionNode) else saved_names(kind)
    for name in names:
        saved = getattr(node, name)
        found += saved if isinstance(saved, tuple | list) else (saved,)
    return found


def drop_saved(node: Node) -> None:
    """Free what a node saved for backward. It cannot run again."""
    for saved in saved_tensors(node):
        try:
            saved.register_hooks(_forget, _gone)
        except RuntimeError:  # nothing in it, or hooks of its own: what these keep goes with the graph
            continue


def _forget(_: Tensor) -> None:
    return None


def _gone(_: Any) -> Tensor:
    raise RuntimeError("the input half of a split backward has run; what only it reads is freed")


# -- what the weight half cannot do --------------------------------------------------------------------------------


class Arrived:
    """The gradients that arrived at a join, kept by a hook. Apart from the join, as the node holds its hooks."""

    __slots__ = ("gradients",)

    def __init__(self) -> None:
        self.gradients: tuple[Any, ...] | None = None  # None: the engine has not come by

    def keep(self, _: Any, gradients: tuple[Any, ...]) -> None:
        """Called by the engine when the node has run, and after the user's hooks on these gradients."""
        self.gradients = gradients


class Join:
    """A node of both halves, with its edges to the weight half."""

    __slots__ = ("arrived", "edges", "node")

    def __init__(self, node: Node, arrived: Arrived, edges: list[tuple[int, GradientEdge]]) -> None:
        self.node, self.arrived, self.edges = node, arrived, edges


def only_once(node: Node) -> str | None:
    """Why a node must not run in both halves, None if it may."""
    if isinstance(node, FunctionNode):
        return "an autograd Function or a compiled graph, whose one backward makes all its gradients"
    if type(node).__name__ in OPAQUE:
        return "an operation whose backward gives all its gradients at once"
    if any(saved.unpack_hook is not None for saved in saved_tensors(node)):
        return "tensors saved through hooks (a checkpoint, an offload), which may be asked for once"
    return None


class Cut:
    """Where the graph of a stage is cut: its joins, and the parameters left to the input half.

    Attributes:
        early: their mask.
        reasons: why, for the notice.
        joins: with the hooks in place.
    """

    def __init__(self, tree: Tree, roots: Sequence[GradientEdge], parameters: Sequence[Tensor]) -> None:
        self.tree, self.early = tree, 0
        self.reasons: set[str] = set()
        hooked: list[tuple[Node, Arrived, Any]] = []
        if not tree.regular:
            self._leave(-1, "a graph that several threads have made")
        for place, parameter in enumerate(parameters):
            if parameter._backward_hooks:
                self._leave(2 << place, "hooks on parameters")
        for node in tree.nodes:
            self._look_at(node, hooked)
        self._leave(reordered(tree, roots), "a parameter used several times, in different ways")
        self.early = spread(tree, self.early)
        self.joins: list[Join] = []
        for node, arrived, handle in hooked:
            edges = [
                (place, GradientEdge(to, nr)) for place, to, nr in tree.edges[node] if self.late(to)
            ]
            if edges:
                self.joins.append(Join(node, arrived, edges))
            else:
                handle.remove()

    def late(self, node: Node) -> bool:
        """Whether a node runs in the weight half only."""
        return self.tree.weight_only(node) and not self.tree.masks[node] & self.early

    def _look_at(self, node: Node, hooked: list[tuple[Node, Arrived, Any]]) -> None:
        tree = self.tree
        own = tree.masks[node]
        if not own & INPUT:
            if own and isinstance(node, FunctionNode):  # it may draw random numbers: in the order of the whole
                self._leave(own, "an autograd Function of parameters alone")
            return
        towards = 0
        for _, to, _ in tree.edges[node]:
            if tree.weight_only(to):
                towards |= tree.masks[to]
        if not towards:
            return
        why = only_once(node)
        if why is None:
            arrived = Arrived()
            handle = node.register_hook(arrived.keep)
            if len(handle.hooks_dict_ref()) == 1:
                hooked.append((node, arrived, handle))
                return
            handle.remove()
            why = "hooks on an operation"
        self._leave(towards, why)

    def _leave(self, mask: int, why: str) -> None:
        if mask:
            self.early |= mask
            self.reasons.add(why)


# -- the halves ----------------------------------------------------------------------------------------------------


@frozen(eq=False)
class Weights:
    """What the input half leaves for the weight half."""

    parameters: list[Tensor]
    late: list[int]  # which of ``parameters`` have no gradient yet
    found: list[Tensor | None]  # per parameter
    joins: list[Join] = field(factory=list)
    roots: list[GradientEdge] = field(factory=list)
    seeds: list[Tensor] = field(factory=list)

    def run(self) -> list[Tensor | None]:
        """Gradients of all parameters, None where nothing flows. Frees the graph as it goes; to be called once."""
        roots, seeds = list(self.roots), list(self.seeds)
        self.roots.clear()
        self.seeds.clear()
        for edges, made in self._called():
            for place, edge in edges:
                if made[place] is not None:
                    roots.append(edge)
                    seeds.append(made[place])
        if roots:
            wanted = [self.parameters[place] for place in self.late]
            for place, gradient in zip(self.late, gradients(roots, seeds, wanted), strict=True):
                self.found[place] = gradient
        return self.found

    def tensors(self) -> list[Tensor]:
        """All that is kept for :meth:`run`."""
        stack = [edge.node for edge in self.roots]
        stack += [edge.node for join in self.joins for _, edge in join.edges]
        nodes = {join.node for join in self.joins}
        while stack:
            node = stack.pop()
            if node not in nodes:
                nodes.add(node)
                stack += [to for to, _ in node.next_functions if to is not None]
        kept: list[Any] = [saved.data for node in nodes for saved in saved_tensors(node)]
        kept += [gradient for join in self.joins for gradient in join.arrived.gradients or ()]
        return [tensor for tensor in [*kept, *self.seeds, *self.found] if isinstance(tensor, Tensor)]

    def _called(self) -> list[tuple[list[tuple[int, GradientEdge]], Any]]:
        """Per join its edges, and what it makes of the gradients that arrived: None where an edge is not wanted.

        A node asks the engine's run in which it is called for which edges it is to make gradients. So the joins are
        called from a hook in a run that has all edges to the weight half, and no others, as its targets.
        """
        joins = [join for join in self.joins if join.arrived.gradients is not None]
        self.joins.clear()
        if not joins:
            return []
        targets = [edge for join in joins for _, edge in join.edges]
        made: list[tuple[list[tuple[int, GradientEdge]], Any]] = []
        joins.reverse()

        def call(_: Tensor) -> None:
            while joins:
                join = joins.pop()
                made.append((join.edges, join.node(*(join.arrived.gradients or ()))))

        start = torch.zeros((), requires_grad=True)
        start.register_hook(call)  # type: ignore[no-untyped-call]
        gradients([get_gradient_edge(start)], [torch.ones(())], [start, *targets])
        return made


def input_half(
    stage: Stage, roots: list[GradientEdge], seeds: list[Tensor], leaves: list[Tensor], parameters: list[Tensor]
) -> tuple[Sequence[Tensor | None], Weights]:
    """Gradients of ``leaves``, which :func:`pipec.runtime.borders.anchored` made, and what is left to do."""
    everything = list(range(len(parameters)))
    nothing: list[Tensor | None] = [None] * len(parameters)
    if not leaves:
        return (), Weights(parameters, everything, nothing, roots=roots, seeds=seeds)
    tree = look_through(roots, [leaf.grad_fn for leaf in leaves], parameters)
    if not any(tree.masks[edge.node] & INPUT for edge in roots):
        return [None] * len(leaves), Weights(parameters, everything, nothing, roots=roots, seeds=seeds)
    cut = Cut(tree, roots, parameters)
    early = [place for place in everything if cut.early & 2 << place]
    late = [place for place in everything if not cut.early & 2 << place]
    if cut.reasons:
        tell(stage, len(early), len(parameters), cut.reasons)
    found = gradients(roots, seeds, [*leaves, *(parameters[place] for place in early)], keep_graph=bool(late))
    for place, gradient in zip(early, found[len(leaves) :], strict=True):
        nothing[place] = gradient
    weights = Weights(parameters, late, nothing, cut.joins if late else [])
    if late:
        kept = {join.node for join in cut.joins}
        for node in tree.nodes:
            if node not in kept and not cut.late(node):
                drop_saved(node)
        for edge, seed in zip(roots, seeds, strict=True):
            if cut.late(edge.node):
                weights.roots.append(edge)
                weights.seeds.append(seed)
    return found[: len(leaves)], weights


# -- notices -------------------------------------------------------------------------------------------------------


def tell(stage: Stage, early: int, count: int, reasons: Iterable[str]) -> None:
    """Say once per stage that its backward cannot be split, or not all of it."""
    if not stage.told_split:
        stage.told_split = True
        which = "all parameters" if early == count else f"{early} of {count} parameters"
        LOG.warning(
            "pipec: stage %r: the gradients of %s come with the input half of its split backward, not with the "
            "weight half, because of %s; the numbers are the same", stage.name, which, " and ".join(sorted(reasons))
        )


def tell_compiled(stages: Iterable[Stage]) -> None:
    """Say, before anything runs, which stages are compiled by torch.compile: their backward is one graph."""
    for stage in stages:
        parts: list[Any] = [stage.fn, *(module for own in stage.modules for module in own.modules())]
        if any(is_compiled(part) for part in parts):
            stage.told_split = True
            LOG.warning(
                "pipec: stage %r is compiled by torch.compile: the gradients of what is compiled come with the input "
                "half of its split backward, not with the weight half; the numbers are the same", stage.name
            )


def is_compiled(part: Any) -> bool:
    own = getattr(part, "__dict__", {})
    return "_orig_mod" in own.get("_modules", {}) or "_torchdynamo_orig_callable" in own or (
        own.get("_compiled_call_impl") is not None
    )
