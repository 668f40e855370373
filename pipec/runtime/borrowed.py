"""Modules that a stage's function uses without being one: found in its closure, its defaults or its globals."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from torch import nn

from pipec.errors import RunError


def borrowed(fn: Any) -> Iterator[tuple[str, nn.Module]]:
    """(name, module) of every module that a plain Python function names itself."""
    while isinstance(fn, partial):
        yield from ((name, value) for name, value in fn.keywords.items() if isinstance(value, nn.Module))
        yield from ((f"argument {i}", value) for i, value in enumerate(fn.args) if isinstance(value, nn.Module))
        fn = fn.func
    code = getattr(fn, "__code__", None)
    if code is None or isinstance(fn, nn.Module):
        return
    outside = getattr(fn, "__globals__", {})
    named = {name: outside[name] for name in code.co_names if name in outside}
    for name, cell in zip(code.co_freevars, fn.__closure__ or (), strict=False):
        try:
            named[name] = cell.cell_contents
        except ValueError:  # not assigned yet
            continue
    for number, value in enumerate(fn.__defaults__ or ()):
        named[f"default {number}"] = value
    yield from ((name, value) for name, value in named.items() if isinstance(value, nn.Module))


def modules_of(stage: str, fn: Any) -> list[nn.Module]:
    """Modules whose train and eval mode a stage has to follow although it does not own them.

    Raises:
        RunError: one of them would change buffers that pipec does not keep in order.
    """
    found = []
    for name, module in borrowed(fn):
        changing = [sub for sub in module.modules() if sub.training and any(True for _ in sub.buffers(recurse=False))]
        if changing:
            raise RunError(
                f"stage {stage!r} uses the module {name!r} ({type(changing[0]).__name__}) from outside, in training "
                "mode and with buffers, which recompute and a failed step could not put back; pass the module as the "
                "stage, or a small nn.Module that holds it"
            )
        found.append(module)
    return found
