"""What a value of a pipeline cannot do: it stands for a tensor while the pipeline is declared, and computes nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch

from pipec.errors import SpecError


class ValueAttributeError(SpecError, AttributeError):
    """An attribute of a tensor was asked of a value; ``hasattr`` and ``getattr`` with a default still answer."""


class NoTensor:
    """Arithmetic, comparisons in size and attributes of tensors, each refused with the stage that does the same."""

    __slots__ = ()

    def __getattr__(self, name: str) -> Any:
        # Private names are asked by copy, pickle and other protocols; fields are asked before they are set.
        if name.startswith("_") or name in getattr(type(self), "__match_args__", ()):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        if not hasattr(torch.Tensor, name):
            raise ValueAttributeError(f"a value of the pipeline has no attribute {name!r}")
        if callable(getattr(torch, name, None)):
            done = f"torch.{name}"
        else:
            done = f"lambda value: value.{name}" + ("(...)" if callable(getattr(torch.Tensor, name)) else "")
        raise ValueAttributeError(_told(name, done, self))

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        name = str(getattr(func, "__name__", func)).strip("_")
        values = ", ".join(repr(argument) for argument in args if isinstance(argument, NoTensor)) or "value"
        raise SpecError(
            f"a value of the pipeline is no tensor, so {name}() cannot run on it; pass the module or function itself "
            f'to a stage: net.stage("{name}", module, {values})'
        )


def _told(name: str, fn: str, *values: Any) -> str:
    shown = ", ".join(repr(v) if isinstance(v, NoTensor | int | float) else f"<{type(v).__name__}>" for v in values)
    return f'a value of the pipeline is no tensor; do it in a stage: net.stage("{name}", {fn}, {shown})'


def _refuse(name: str, swapped: bool = False) -> Callable[..., NoReturn]:
    def operator(self: NoTensor, *others: Any) -> NoReturn:
        values = (*others, self) if swapped else (self, *others)
        raise SpecError(_told(name, f"torch.{name}", *values))

    return operator


_BINARY = {
    "add": "add", "sub": "sub", "mul": "mul", "truediv": "div", "floordiv": "floor_divide", "mod": "remainder",
    "pow": "pow", "matmul": "matmul", "and": "bitwise_and", "or": "bitwise_or", "xor": "bitwise_xor",
}
for _method, _name in _BINARY.items():
    setattr(NoTensor, f"__{_method}__", _refuse(_name))
    setattr(NoTensor, f"__r{_method}__", _refuse(_name, swapped=True))
for _method, _name in {"neg": "neg", "abs": "abs", "invert": "bitwise_not", "lt": "lt", "le": "le", "gt": "gt",
                       "ge": "ge"}.items():
    setattr(NoTensor, f"__{_method}__", _refuse(_name))
