"""Pipelines, batches and results that cannot be cut along a sequence, refused in the user's words."""

from __future__ import annotations

import re

import pytest
import torch
from sliced import WIDTH, batch, language
from torch import Tensor, nn

import pipec


def test_what_cannot_be_cut_is_refused_all_at_once() -> None:
    net = pipec.Pipeline("net")
    x = net.input("x")
    h = net.stage("attend", nn.TransformerEncoderLayer(WIDTH, 2), x)
    h = net.stage("count", nn.LSTM(WIDTH, WIDTH), h)[0]
    net.output(h)
    net.loss("loss", lambda h: h.mean(), h)
    with pytest.raises(pipec.ScheduleError) as error:
        pipec.compile(net, 2, 2, slices=2)
    lines = str(error.value).splitlines()
    assert lines[0] == "pipeline 'net' cannot be cut into 2 slices: 4 problems"
    assert lines[1] == (
        "  1. no input says which dimension is the sequence; declare it, as in input('tokens', slice_dim=1)"
    )
    assert lines[2].startswith(
        "  2. stage 'attend' holds TransformerEncoderLayer, MultiheadAttention, which looks at the whole sequence; let "
        "the stage take carry= of the slice before and return (result, carry), and declare it with carry=True"
    )
    assert "test_slice_refusals.py" in lines[3]
    assert lines[4].startswith("  3. stage 'count' holds LSTM")
    assert lines[6].startswith("  4. output 'count[0]' does not say along which dimension its slices are joined")
    pipec.compile(net, 2, 2)  # as a whole it is fine
    for wrong in (0, 1.5, True, "2"):
        with pytest.raises(pipec.ScheduleError, match="slices must be a whole number of at least 1, got"):
            pipec.compile(net, 2, 2, slices=wrong)  # type: ignore[arg-type]


def test_wrong_declarations() -> None:
    net = pipec.Pipeline("net")
    x = net.input("x", split=1, slice_dim=1)
    y = net.input("y", slice_dim="time")  # type: ignore[arg-type]
    h = net.stage("a", nn.Linear(2, 2), x, carry=True)
    h = net.stage("b", nn.Linear(2, 2), h, carry=y)  # type: ignore[arg-type]
    net.output(h, slice_dim=1.5)  # type: ignore[arg-type]
    with pytest.raises(pipec.SpecError) as error:
        _ = net.spec
    text = str(error.value)
    for told in (
        "input 'x': split and slice_dim are both 1; one is cut into microbatches, the other into slices of a sequence",
        "input 'y': slice_dim must be a dimension or None, got 'time'",
        "stage 'a': Linear(input: torch.Tensor) -> torch.Tensor cannot be called so: it has no argument 'carry'",
        "stage 'b': carry is True or False, got Value y; what a stage carries on comes from the stage itself",
        "output b: slice_dim must be a dimension or None, got 1.5",
    ):
        assert told in text.replace("(self, ", "("), text


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"targets": torch.zeros(2, 5, dtype=torch.long)},
         "inputs that are cut into slices disagree on the length of the sequence (tokens/positions: 6, targets: 5)"),
        ({"tokens": torch.zeros(2, dtype=torch.long)},
         "input 'tokens' of shape (2,) cannot be cut into slices along dimension 1"),
        ({"tokens": torch.zeros(2, 0, dtype=torch.long), "targets": torch.zeros(2, 0, dtype=torch.long),
          "positions": torch.arange(0)}, "the sequences have no position (input tokens, targets, positions)"),
    ],
)
def test_batches_that_do_not_fit(change: dict[str, Tensor], told: str) -> None:
    net = language(("attention",))
    with pipec.Runner(net, pipec.compile(net, 2, 2, slices=2)) as run:
        with pytest.raises(pipec.RunError, match=re.escape(told)):
            run.step(**(batch(2, 6) | change))
        run.step(**batch(2, 6))


def test_what_a_stage_returns_is_looked_at() -> None:
    net = pipec.Pipeline("net")
    x = net.input("x", slice_dim=1)
    net.loss("loss", lambda h: h.mean(), net.stage("a", lambda x, carry: x * 2, x, carry=True))
    with pipec.Runner(net, pipec.compile(net, 1, 1)) as run, pytest.raises(pipec.RunError) as error:
        run.step(x=torch.ones(2, 3, requires_grad=True))
    assert str(error.value) == (
        "stage 'a' was declared with carry=True, so it returns (result, carry), but it returned a tensor of shape "
        "(2, 3)"
    )
    net = language(("attention",))
    net.output(net._value("stage", 3), "again", slice_dim=4)
    with pipec.Runner(net, pipec.compile(net, 1, 1, slices=2)) as run, pytest.raises(pipec.RunError) as error:
        run.step(**batch(2, 6))
    assert str(error.value) == (
        "output 'again' cannot be joined along dimension 4: its slices have the shapes (2, 3, 13); give another "
        "slice_dim="
    )
