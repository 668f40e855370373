"""The declaration language: what it accepts, and every mistake told at once with the line that made it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from mistakes import Add, only, problems, started

import pipec


def test_every_mistake_in_one_error_with_its_line() -> None:
    net = pipec.Pipeline("net")
    x = net.input("x", split="rows")  # type: ignore[arg-type]
    a = net.stage("a", Add, x)
    b = net.stage("a", 3, a)  # type: ignore[arg-type]
    net.loss("mse", F.mse_loss, b, reduction="max")
    net.stage("alone", Add(), x)
    assert problems(net) == [
        (
            "input 'x': split must be a dimension or None, got 'rows'",
            'x = net.input("x", split="rows")  # type: ignore[arg-type]',
        ),
        ("stage 'a': got the class Add; pass an instance, Add(...)", 'a = net.stage("a", Add, x)'),
        (
            "stage 'a' is declared twice; give each stage a name of its own",
            'b = net.stage("a", 3, a)  # type: ignore[arg-type]',
        ),
        (
            "stage 'a': expected a module, a function or None, got int 3",
            'b = net.stage("a", 3, a)  # type: ignore[arg-type]',
        ),
        (
            "loss 'mse': reduction must be 'mean' or 'sum', got 'max'",
            'net.loss("mse", F.mse_loss, b, reduction="max")',
        ),
        (
            "loss 'mse': mse_loss"
            + str(__import__("inspect").signature(F.mse_loss))
            + " cannot be called so: missing a required argument: 'target'",
            'net.loss("mse", F.mse_loss, b, reduction="max")',
        ),
        (
            "stage 'alone': nothing reads its value; pass it to a stage or a loss, declare it with output(...), or "
            "remove the stage",
            'net.stage("alone", Add(), x)',
        ),
    ]


def test_no_stage() -> None:
    assert only(pipec.Pipeline("net")) == "it has no stage; add one with stage(name, module, value)"


@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        (lambda n, x, v: n.input("x"), "input 'x' is declared twice; give each input a name of its own"),
        (
            lambda n, x, v: n.stage("s", Add(), v, v, 1.0, 2.0),
            "stage 's': Add(x: 'Any', y: 'Any' = None, scale: 'float' = 1.0) -> 'Any' "
            "cannot be called so: too many positional "
            "arguments",
        ),
        (
            lambda n, x, v: n.stage("s", Add(), v, gain=2.0),
            "stage 's': Add(x: 'Any', y: 'Any' = None, scale: 'float' = 1.0) -> 'Any' "
            "cannot be called so: it has no "
            "argument 'gain'",
        ),
        (
            lambda n, x, v: n.stage("s", Add(), "first"),
            "stage 's': got the string 'first'; pass the value that stage('first', ...) returned",
        ),
        (
            lambda n, x, v: n.stage("s", Add(), 3),
            "stage 's' reads no value: pass an input or another stage's result",
        ),
        (
            lambda n, x, v: n.stage("s", Add(), v, pipec.skip("first")),
            "stage 's': skip: got the string 'first'; pass the value that stage('first', ...) returned",
        ),
        (
            lambda n, x, v: n.stage("s", Add(), v, pipec.skip("skips")),
            "stage 's': skip: expected a value of this pipeline, got the string 'skips'",
        ),
        (
            lambda n, x, v: n.stage("s", Add(), v, pipec.skip(7)),
            "stage 's': skip: expected what input(...) or stage(...) returned, got int 7",
        ),
        (
            lambda n, x, v: n.stage("s", Add(), v, pipec.Pipeline("other").input("y")),
            "stage 's': y belongs to another pipeline, 'other'",
        ),
        (lambda n, x, v: n.stage("", Add(), v), "stage: a name is a non-empty string, got ''"),
        (lambda n, x, v: n.stage(7, Add(), v), "stage: a name is a non-empty string, got 7"),
        (
            lambda n, x, v: n.stage("s", Add(), v, outputs=0),
            "stage 's': outputs must be a positive number, got 0",
        ),
        (
            lambda n, x, v: n.stage("s", Add(), v, device=-1),
            "stage 's': device is a logical index 0, 1, ..., got -1",
        ),
        (
            lambda n, x, v: n.stage("s", Add(), v, device="cuda:0"),
            "stage 's': device is a logical index 0, 1, ..., got 'cuda:0'",
        ),
        (
            lambda n, x, v: n.output("first"),
            "output: got the string 'first'; pass the value that stage('first', ...) returned",
        ),
        (
            lambda n, x, v: n.output(x),
            "output x is an input of the pipeline; only what a stage returns can be an output",
        ),
        (lambda n, x, v: n.output(v), "output 'first' is declared twice; give each output a name of its own"),
        (lambda n, x, v: n.loss("l", 3, v), "loss 'l': expected a function or a module, got int 3"),
        (lambda n, x, v: n.loss("l", None, x), "loss 'l' reads no stage: pass a stage's result"),
        (
            lambda n, x, v: n.loss("l", None, "first"),
            "loss 'l': got the string 'first'; pass the value that stage('first', ...) returned",
        ),
        (
            lambda n, x, v: n.loss("l", None, pipec.Pipeline("other").input("y")),
            "loss 'l': y belongs to another pipeline, 'other'",
        ),
        (
            lambda n, x, v: n.loss("l", None, v, reduction="none"),
            "loss 'l': reduction must be 'mean' or 'sum', got 'none'",
        ),
        (
            lambda n, x, v: n.loss("l", None, v, reduction="mean", count=lambda x: 1),
            "loss 'l': with count= the loss must be a sum; drop reduction='mean'",
        ),
        (
            lambda n, x, v: n.loss("l", None, v, count=lambda tokens: 1),
            "loss 'l': count takes 'tokens', which is no input; the inputs are x",
        ),
        (
            lambda n, x, v: n.loss("l", None, v, count=3),
            "loss 'l': count must be a function of the pipeline's inputs, got int 3",
        ),
        (
            lambda n, x, v: n.input("unused"),
            "input 'unused' is never read; pass it to a stage or a loss, or remove it; the pipeline declares no loss",
        ),
        (
            lambda n, x, v: n.output(v[0], name="first"),
            "output 'first' is declared twice; give each output a name of its own",
        ),
    ],
    ids=lambda case: case[:40] if isinstance(case, str) else "",
)
def test_one_mistake(mistake: Any, message: str) -> None:
    net, x, first = started()
    made = mistake(net, x, first)
    if made is not None and message.startswith("stage"):
        net.output(made, name="made")
    assert only(net) == message


def test_a_name_instead_of_a_value_is_one_problem() -> None:
    """The string takes the place of the value: neither "reads no value" nor "never read" is told beside it."""
    net = pipec.Pipeline("net")
    net.input("x")
    net.output(net.stage("a", Add(), "x"))
    assert only(net) == "stage 'a': got the string 'x'; pass the value that input('x') returned"
    net, _, first = started()
    net.input("y")
    net.loss("mse", F.mse_loss, first, "y")
    assert problems(net) == [
        (
            "loss 'mse': got the string 'y'; pass the value that input('y') returned",
            'net.loss("mse", F.mse_loss, first, "y")',
        )
    ]


def test_a_string_that_only_looks_like_a_name_is_a_constant() -> None:
    net, _, first = started()
    net.loss("l", None, net.stage("s", None, first, "x"))
    assert net.spec.stage("s").args[1] == "x"


def test_a_forgotten_name_is_one_problem() -> None:
    net = pipec.Pipeline("net")
    x, y = net.input("x"), net.input("y")
    a = net.stage(torch.nn.Linear(8, 8), x)  # type: ignore[arg-type]
    net.loss(torch.nn.MSELoss(), a, y)  # type: ignore[arg-type]
    assert [message for message, _ in problems(net)] == [
        "stage: the first argument is the stage's name, a string; got "
        "Linear(in_features=8, out_features=8, bias=True)",
        "loss: the first argument is the loss's name, a string; got MSELoss()",
    ]
    net = pipec.Pipeline("net")
    net.output(net.stage(torch.relu, pipec.skip(net.input("x"))), name="r")  # type: ignore[arg-type]
    assert only(net).startswith("stage: the first argument is the stage's name, a string; got ")


def test_a_loss_class_without_parentheses() -> None:
    net, _, first = started()
    net.loss("l", torch.nn.MSELoss, first, net.input("y"))
    assert only(net) == "loss 'l': got the class MSELoss; pass an instance, MSELoss(...)"


def test_a_pipeline_prints_short() -> None:
    net, _, first = started()
    assert repr(net) == "<Pipeline 'net': inputs x; 1 stage>"
    net.stage("second", None, first, net.input("y"))
    assert repr(net) == "<Pipeline 'net': inputs x, y; 2 stages>"


def test_two_losses_of_one_name() -> None:
    net, _, first = started()
    net.loss("l", None, first)
    net.loss("l", None, first)
    assert only(net) == "loss 'l' is declared twice; give each loss a name of its own"


def test_an_input_that_only_a_count_reads_is_read() -> None:
    net, _, first = started()
    net.input("lengths")
    net.loss("l", None, first, count=lambda lengths: lengths.sum())
    assert net.spec.losses[0].reduction == "sum"


def test_a_mended_declaration_compiles() -> None:
    """Problems belong to the declaration that made them: a good one has none left over."""
    net, _, first = started()
    net.spec  # noqa: B018
    net.loss("l", None, first)
    assert [loss.name for loss in net.spec.losses] == ["l"]
    assert net.spec is net.spec
    assert net.spec.spec is net.spec


@pytest.mark.parametrize(
    "name", ['say "hi"', "two\nlines", "héé→日本", " ", "a b", "%1", "F0:s1", "1", "{x}", "\\"]
)
def test_names_may_hold_any_characters(name: str) -> None:
    net = pipec.Pipeline(name)
    x = net.input(name)
    net.loss(name, None, net.stage(name, None, x))
    plan = pipec.compile(net, 1, 2)
    assert plan.graph.stages[0].name == name
    assert pipec.Plan.parse(str(plan)) == plan


def test_chain() -> None:
    net = pipec.chain(3)
    assert [s.name for s in net.spec.stages] == ["s0", "s1", "s2"]
    assert net.spec.losses[0].home == 2
    with pytest.raises(pipec.SpecError, match="no stage"):
        pipec.chain(0).spec  # noqa: B018


@pytest.mark.parametrize("dim", ["a", 1.5, True])
def test_an_outputs_dimension_is_a_number(dim: Any) -> None:
    net = pipec.Pipeline("net")
    net.output(net.stage("first", None, net.input("x")), dim=dim)
    with pytest.raises(pipec.SpecError, match="dim must be a dimension or None"):
        _ = net.spec


@pytest.mark.parametrize("chunks", ["a", 1.5, True])
def test_chunks_are_a_whole_number(chunks: Any) -> None:
    with pytest.raises(pipec.ScheduleError, match="chunks must be a whole number"):
        pipec.compile(pipec.chain(4), 2, chunks=chunks)
