"""Any pipeline whose stages share parameters in any way, on any number of GPUs: its calls and numbers are right."""

from __future__ import annotations

from typing import Any

from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st
from models import Recipe, batch, gradients, kept_streams, options, recipes, same
from test_streams import backend, recorded
from torch import nn

import pipec
from pipec.runtime.stream_proof import problems

__all__ = ["kept_streams"]


def tie(net: pipec.Pipeline, which: list[bool]) -> int:
    """Let stages use a parameter of an earlier one where it has the same shape, as ``which`` says in turn."""
    known: dict[tuple[Any, bool], nn.Parameter] = {}
    turns, count = iter(which), 0
    for stage in net._stages:  # before the spec is made, which notes who shares what
        modules = stage.fn.modules() if isinstance(stage.fn, nn.Module) else ()
        for held, name, own in [(m._parameters, n, p) for m in modules for n, p in m._parameters.items()]:
            other = known.setdefault((own.shape, own.requires_grad), own)
            if other is not own and next(turns, False):
                held[name], count = other, count + 1
    return count


ALIKE = {"conv": "linear", "none": "linear", "embedding": "linear", "params": "layernorm"}


def alike(recipe: Recipe) -> Recipe:
    """With stages whose parameters have the same shapes, so that they can be shared."""
    return evolve(recipe, nodes=tuple(evolve(node, kind=ALIKE.get(node.kind, node.kind)) for node in recipe.nodes))


@given(recipes(most=6).map(alike), st.data())
@settings(max_examples=40)
def test_any_pipeline_with_any_ties(recipe: Any, draw: st.DataObject) -> None:
    how = draw.draw(options(recipe)) | {"update": None}
    which = draw.draw(st.lists(st.booleans(), min_size=12, max_size=12))
    mine, theirs = recipe.build(), recipe.build()
    assert tie(mine, which) == tie(theirs, which)
    plan = pipec.compile(mine, **how)
    streams = backend(plan.devices, real=draw.draw(st.integers(min(2, plan.devices), plan.devices)))
    loop = pipec.reference(theirs, plan.microbatches)
    with pipec.Runner(mine, plan, backend=streams) as run:
        for step in range(2):
            got, expected = run.step(**batch(6, step)), loop.step(**batch(6, step))
            assert same([got.losses, got.outputs], [expected.losses, expected.outputs])
            assert problems(plan, recorded(streams)) == []
    assert same(gradients(mine), gradients(theirs))
