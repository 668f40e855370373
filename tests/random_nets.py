"""Any plan of any pipeline against the reference, bit by bit."""

from __future__ import annotations

from typing import Any

import models
import torch
from hypothesis import strategies as st
from models import buffers, gradients, parameters, same

import pipec


def optimizer(params: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, lr=0.01)


def start_from(net: pipec.Pipeline, dirty: bool) -> None:
    """Gradients of an earlier backward, of every size, so that the order of additions shows."""
    if dirty:
        for number, parameter in enumerate(parameters(net)):
            if parameter.requires_grad:
                make = torch.Generator().manual_seed(number)
                parameter.grad = torch.randn(parameter.shape, generator=make) * 3


def two_steps_equal_the_reference(draw: Any, recipe: models.Recipe, how: dict[str, Any]) -> None:
    """Two steps on batches of any size, on either backend, from gradients that are there already or none.

    ``how`` goes to compile. Losses, outputs, gradients, buffers and parameters after each step are the same bits.
    """
    rows = [draw.draw(st.integers(1, 9)) for _ in range(2)]
    backend = draw.draw(st.sampled_from(["threads", "replay"]))
    dirty = draw.draw(st.booleans())
    mine, theirs = recipe.build(), recipe.build()
    update = how["update"]
    plan = pipec.compile(mine, **how)
    loop = pipec.reference(theirs, plan.microbatches)
    trained = [p for p in parameters(theirs, backward=update == "stage") if p.requires_grad]
    own = optimizer(trained) if update else None
    made: Any = {None: None, "stage": optimizer, "all": None}[update]
    if update == "all":
        made = optimizer([p for p in parameters(mine) if p.requires_grad])
    for net in (mine, theirs):
        start_from(net, dirty)
    with pipec.Runner(mine, plan, optimizer=made, backend=backend) as run:
        for number, count in enumerate(rows):
            got, expected = run.step(**models.batch(count, number)), loop.step(**models.batch(count, number))
            if own is not None:
                own.step()
                for parameter in trained:
                    parameter.grad = None
            assert got.microbatches == expected.microbatches == min(count, plan.microbatches)
            assert same([got.losses, got.outputs], [expected.losses, expected.outputs])
            assert same(gradients(mine), gradients(theirs))
            assert same(buffers(mine), buffers(theirs))
            assert same([p.detach() for p in parameters(mine)], [p.detach() for p in parameters(theirs)])
