"""Autograd's engine, called once per backward task.

``torch.autograd.grad`` spends as long in Python on checking its arguments as a tiny stage's whole backward takes.
The executor's arguments are right by construction (one gradient per edge, of the value's own shape), so it calls the
engine as that function does, after its checks.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._C import _FunctionBase as FunctionNode
from torch.autograd.graph import GradientEdge, _engine_run_backward, get_gradient_edge

from pipec.errors import RunError

ADVICE = (
    "which counts the gradients of one backward() of the whole model, but a step has a backward for each stage and "
    "microbatch; use parameter.register_post_accumulate_grad_hook, which runs once per step, or tensor.register_hook "
    "or mode='any', which run once per microbatch"
)


def waits(tensor: Tensor) -> bool:
    """Whether a hook on the tensor waits for the gradients of others, see :mod:`pipec.runtime.group_hooks`."""
    return any(
        getattr(hook, "__module__", "") == "torch.autograd.graph"
        and getattr(hook, "__qualname__", "").startswith("register_multi_grad_hook.")
        for hook in (tensor._backward_hooks or {}).values()
    )


def refusal() -> RunError:
    """The error for such a hook that was set since the step began."""
    return RunError(
        f"a stage calls torch.autograd.graph.register_multi_grad_hook on what it reads or on a parameter, {ADVICE}"
    )


def edge_of(tensor: Tensor) -> GradientEdge:
    """Where a tensor's gradient enters its graph. Holds the graph and not the tensor."""
    node = tensor.grad_fn
    if node is None or isinstance(node, FunctionNode):  # a leaf, or a node that Python does not keep alive
        return get_gradient_edge(tensor)
    return GradientEdge(node, tensor.output_nr)


def accumulate(
    roots: Sequence[GradientEdge], seeds: Sequence[Tensor], parameters: Sequence[Tensor], leaves: Sequence[Tensor]
) -> list[Tensor | None]:
    """Add vector-Jacobian products to ``.grad`` of ``parameters``, each as soon as it is there and still in the cache.

    Returns:
        Those of ``leaves``, as autograd made them. ``.grad`` would hold some of them in another layout (the expanded
        gradient of a mean, made dense), and kernels that read them next might add up in another order.
    """
    odd: dict[int, Tensor] = {}
    for place, leaf in enumerate(leaves):
        if leaf._backward_hooks and waits(leaf):
            raise refusal()  # as gradients() would, so that it does not depend on the size of a stage
        leaf.register_hook(partial(_keep, odd, place, leaf.stride()))  # type: ignore[no-untyped-call]
    _engine_run_backward(
        tuple(roots), tuple(seeds), False, False, (*leaves, *parameters), allow_unreachable=True, accumulate_grad=True
    )
    return [odd.get(place, leaf.grad) for place, leaf in enumerate(leaves)]


def _keep(odd: dict[int, Tensor], place: int, stride: tuple[int, ...], gradient: Tensor) -> None:
    """Keep a gradient of another layout. Any other is left to autograd, which only takes over what nobody holds."""
    if gradient.layout is not torch.strided or gradient.stride() != stride:
        odd[place] = gradient


def gradients(
    roots: Sequence[GradientEdge], seeds: Sequence[Tensor], wanted: Sequence[Tensor | GradientEdge],
    keep_graph: bool = False,
) -> tuple[Tensor | None, ...]:
    """Vector-Jacobian products of ``roots`` with ``seeds`` with respect to ``wanted``, None where nothing flows.

    With ``keep_graph`` the nodes keep what they saved and may run again.
    """
    try:
        found: Any = _engine_run_backward(
            tuple(roots), tuple(seeds), keep_graph, False, tuple(wanted), allow_unreachable=True, accumulate_grad=False
        )
    except RuntimeError as error:
        if "_will_engine_execute_node" not in str(error):
            raise
        raise refusal() from error
    return found  # type: ignore[no-any-return]
