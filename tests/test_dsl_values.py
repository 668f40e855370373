"""Values of a declaration: what may be done with one before there is a tensor."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from mistakes import only, started

import pipec


def test_unpacking_needs_the_number_of_outputs() -> None:
    net, x, _ = started()
    left, right = net.stage("pair", None, x)
    net.output(left)
    assert only(net) == "pair is unpacked: declare the stage with outputs=2 to unpack its result"
    assert right is not None
    net, x, _ = started()
    pair = net.stage("pair", None, x, outputs=2)
    net.output(pair[2])
    assert only(net) == "pair[2]: the stage was declared with outputs=2"


def test_unpacking_into_another_number_of_names() -> None:
    """Python's own error about the number would come before every problem of the declaration."""
    net, x, _ = started()
    h, _, _ = net.stage("pair", None, x, outputs=2)
    net.output(h)
    assert only(net) == "pair is unpacked into 3 names, but the stage was declared with outputs=2"
    net, x, _ = started()
    (h,) = net.stage("pair", None, x, outputs=2)
    net.output(h)
    assert only(net) == "pair is unpacked into 1 names, but the stage was declared with outputs=2"
    net, x, _ = started()
    h, _, _ = net.stage("three", None, x)
    net.output(h)
    assert only(net) == "three is unpacked: declare the stage with outputs=3 to unpack its result"
    net, x, _ = started()
    first, *rest = net.stage("four", None, x, outputs=4)
    for made in (first, *rest, *list(net.stage("two", None, x, outputs=2))):
        net.output(made, name=f"{made}")
    assert len(net.spec.outputs) == 7


@pytest.mark.parametrize(
    ("mistake", "stage"),
    [
        (lambda a, x: a + x, 'net.stage("add", torch.add, first, x)'),
        (lambda a, x: 2 - a, 'net.stage("sub", torch.sub, 2, first)'),
        (lambda a, x: a[0] / 2, 'net.stage("div", torch.div, first[0], 2)'),
        (lambda a, x: -a, 'net.stage("neg", torch.neg, first)'),
        (lambda a, x: a > x, 'net.stage("gt", torch.gt, first, x)'),
        (lambda a, x: a.mean(), 'net.stage("mean", torch.mean, first)'),
        (lambda a, x: a.shape, 'net.stage("shape", lambda value: value.shape, first)'),
        (lambda a, x: a.view(2, 3), 'net.stage("view", lambda value: value.view(...), first)'),
    ],
)
def test_a_value_is_no_tensor(mistake: Any, stage: str) -> None:
    _, x, first = started()
    with pytest.raises(pipec.SpecError) as error:
        mistake(first, x)
    assert str(error.value) == f"a value of the pipeline is no tensor; do it in a stage: {stage}"


@pytest.mark.parametrize(
    ("mistake", "name", "values"),
    [
        (lambda a, x: torch.nn.Linear(2, 2)(a), "linear", "first"),
        (lambda a, x: F.mse_loss(a, x), "mse_loss", "first, x"),
        (lambda a, x: torch.cat([a, x]), "cat", "value"),
        (lambda a, x: torch.ones(2) @ a, "matmul", "first"),
    ],
)
def test_a_layer_called_on_a_value(mistake: Any, name: str, values: str) -> None:
    _, x, first = started()
    with pytest.raises(pipec.SpecError) as error:
        mistake(first, x)
    assert str(error.value) == (
        f"a value of the pipeline is no tensor, so {name}() cannot run on it; pass the module or function itself to a "
        f'stage: net.stage("{name}", module, {values})'
    )


def test_values_answer_protocols() -> None:
    """What copies, prints or asks for attributes goes on working."""
    net, x, first = started()
    with pytest.raises(pipec.SpecError, match="a value of the pipeline has no attribute 'wieght'"):
        first.wieght  # noqa: B018 - asking for it raises
    assert not hasattr(first, "mean")
    assert not hasattr(first, "_private")
    assert getattr(first, "shape", None) is None
    assert copy.copy(first).ref == first.ref
    twin, value = copy.deepcopy((net, first))
    assert value.pipeline is twin
    assert pickle.loads(pickle.dumps(first)).ref == first.ref
    assert (first == x, first != x, len({first, x})) == (False, True, 2)


def test_values_select_and_print() -> None:
    net = pipec.Pipeline("net")
    x = net.input("x")
    pair = net.stage("pair", None, x, outputs=2)
    left, right = pair
    assert (repr(x), repr(left), repr(right), repr(pair["h"][0])) == (
        "x",
        "pair[0]",
        "pair[1]",
        "pair['h'][0]",
    )
    assert repr(pair[-1]) == "pair[1]"
    assert len(pair) == 2
    assert bool(net.stage("one", None, x))


@pytest.mark.parametrize("key", [slice(0, 2), (slice(None), 0), [0, 1], {}])
def test_a_key_that_names_no_single_part(key: Any) -> None:
    net = pipec.Pipeline("net")
    net.output(net.stage("last", None, net.stage("first", None, net.input("x"))[key]))
    with pytest.raises(pipec.SpecError, match=r"first.*cut it inside a stage") as error:
        _ = net.spec
    assert "test_dsl_values.py" in str(error.value)
