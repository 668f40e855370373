"""The modules of a model without their names: looked for at every step, so quickly."""

from __future__ import annotations

from torch import Tensor, nn


def modules_in(root: nn.Module) -> list[nn.Module]:
    """As ``root.modules()``, in the same order; a class with a ``named_modules`` of its own is asked."""
    found: dict[int, nn.Module] = {}
    stack: list[nn.Module | None] = [root]
    while stack:
        module = stack.pop()
        if module is None or id(module) in found:
            continue
        if type(module).named_modules is not nn.Module.named_modules:
            return list(root.modules())
        found[id(module)] = module
        if module._modules:
            stack += reversed(module._modules.values())
    return list(found.values())


def parameters_in(root: nn.Module) -> list[Tensor]:
    """As ``root.parameters()``, in the same order; a class with a ``named_parameters`` of its own is asked."""
    kind = type(root)
    if kind.named_parameters is not nn.Module.named_parameters or kind._named_members is not nn.Module._named_members:
        return [parameter for _, parameter in root.named_parameters()]
    found = {id(p): p for module in modules_in(root) for p in module._parameters.values() if p is not None}
    return list(found.values())
