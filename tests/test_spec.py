"""The frozen spec: what travels between stages, where losses live, what depends on a loss."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

import pipec
from pipec.spec import InputSpec, LossSpec, Ref, Spec, StageSpec


def spec_of(*stages: tuple[Any, ...], **options: Any) -> Spec:
    made = tuple(StageSpec(f"s{i}", None, args) for i, args in enumerate(stages))
    return Spec("net", (InputSpec("x"),), made, **options)


X = Ref("input", 0)


def test_overlapping_selections_travel_as_one() -> None:
    """s1 reads the whole of s0, s2 a part of it: one value; parts that do not overlap are two."""
    whole = spec_of((X,), (Ref("stage", 0),), (Ref("stage", 0, ("h",)), Ref("stage", 0, ("h", 1))))
    assert [(p.producer, p.path, p.readers) for p in whole.ports] == [(0, (), (1, 2))]
    assert whole.port_of(Ref("stage", 0, ("h", 1))) == (0, ("h", 1))
    nested = spec_of((X,), (Ref("stage", 0, (0, "a")),), (Ref("stage", 0, (0,)),), (Ref("stage", 0, (1,)),))
    assert [(p.path, p.readers) for p in nested.ports] == [((0,), (1, 2)), ((1,), (3,))]
    assert nested.port_of(Ref("stage", 0, (0, "a"))) == (0, ("a",))
    assert [v.name for v in nested.graph.values] == ["s0[0]", "s0[1]"]


def test_a_value_nobody_reads_is_no_port() -> None:
    spec = spec_of((X,), (Ref("stage", 0, (0,)),))
    assert [(p.producer, p.path) for p in spec.ports] == [(0, (0,))]
    with pytest.raises(pipec.SpecError, match="no stage reads"):
        spec.port_of(Ref("stage", 0, (1,)))


def test_one_producer_many_readers_and_skips() -> None:
    net = pipec.Pipeline("net")
    x = net.input("x")
    a = net.stage("a", None, x)
    b = net.stage("b", None, a)
    c = net.stage("c", None, b, pipec.skip(a), pipec.skip(x))
    net.loss("l", None, c, a)
    graph = net.spec.graph
    assert [(v.name, v.producer, v.readers, v.skips) for v in graph.values] == [
        ("a", 0, (1, 2), (2,)),
        ("b", 1, (2,), ()),
    ]
    assert graph.inputs[0].readers == (0, 2)
    assert graph.stages[2].reads == (0, 1)
    assert graph.stages[0].gives == (0,)


def test_a_loss_lives_in_the_last_stage_it_reads() -> None:
    net = pipec.Pipeline("net")
    x, target = net.input("x"), net.input("target")
    a = net.stage("a", None, x)
    b = net.stage("b", None, a)
    net.loss("early", None, a, target)
    net.loss("both", None, b, a)
    graph = net.spec.graph
    assert [loss.home for loss in net.spec.losses] == [0, 1]
    assert [s.loss for s in graph.stages] == [True, True]
    assert graph.inputs[1].readers == (0,)
    assert graph.values[0].readers == (1,)


def test_stages_no_loss_depends_on_have_no_backward() -> None:
    net = pipec.Pipeline("net")
    x = net.input("x")
    a = net.stage("a", None, x)
    b = net.stage("b", None, a)
    net.output(net.stage("side", None, a))
    net.loss("l", None, b)
    graph = net.spec.graph
    assert [s.backward for s in graph.stages] == [True, True, False]
    assert graph.gradient_readers(0) == (1,)
    plan = pipec.compile(net, 1, 2)
    assert "2B0" not in str(plan)


def test_gradient_readers_of_a_stage_without_backward() -> None:
    net = pipec.Pipeline("net")
    x = net.input("x")
    a = net.stage("a", None, x)
    net.output(net.stage("side", None, a))
    net.loss("l", None, net.stage("b", None, x))
    assert net.spec.graph.gradient_readers(0) == ()


@dataclass
class Pair:
    left: Any
    right: Any


def test_arguments_may_be_containers_and_constants() -> None:
    net = pipec.Pipeline("net")
    x = net.input("x")
    a = net.stage("a", None, x, outputs=2)
    net.loss(
        "l",
        None,
        net.stage("b", None, [a[0], {"k": (a[1], None)}], Pair(x, 3), flag=True, aux=pipec.skip(a[1])),
    )
    stage = net.spec.stage("b")
    assert list(stage.refs()) == [
        Ref("stage", 0, (0,)),
        Ref("stage", 0, (1,)),
        Ref("input", 0),
        Ref("stage", 0, (1,)),
    ]
    assert stage.args == (
        [Ref("stage", 0, (0,)), {"k": (Ref("stage", 0, (1,)), None)}],
        Pair(Ref("input", 0), 3),
    )
    assert stage.kwargs == {"flag": True, "aux": Ref("stage", 0, (1,))}
    assert [(v.name, v.skips) for v in net.spec.graph.values] == [("a[0]", ()), ("a[1]", (1,))]


def test_pure_function_stages() -> None:
    net = pipec.Pipeline("net")
    x = net.input("x")
    weights = {"w": torch.ones(2)}
    made = net.stage("f", lambda params, x: x * params["w"], x, params=weights)
    net.loss("l", None, made)
    stage = net.spec.stage("f")
    assert stage.params is weights
    assert stage.args == (Ref("input", 0),)
    net = pipec.Pipeline("net")
    net.loss("l", None, net.stage("f", lambda x: x, net.input("x"), params=weights))
    with pytest.raises(pipec.SpecError, match="cannot be called so: too many positional arguments"):
        net.spec  # noqa: B018


def test_stages_with_buffers_are_ordered() -> None:
    net = pipec.Pipeline("net")
    a = net.stage("norm", torch.nn.BatchNorm1d(2), net.input("x"))
    net.loss("l", None, net.stage("plain", torch.nn.Linear(2, 2), a))
    assert [s.ordered for s in net.spec.graph.stages] == [True, False]


def test_edges_that_run_backwards_are_all_named() -> None:
    """What a spec made without the declaration language may get wrong."""
    loss = LossSpec("l", None, (Ref("stage", 9),), {}, "mean", None, 9)
    with pytest.raises(pipec.SpecError) as error:
        spec_of((Ref("stage", 1),), (Ref("stage", 1),), (Ref("stage", 7), Ref("input", 3)), losses=(loss,))
    assert str(error.value) == "\n".join(
        [
            "pipeline 'net': 5 problems",
            "  1. edge 's1' -> 's0' runs backwards or forms a cycle; a stage reads only stages declared before it",
            "  2. edge 's1' -> 's1' runs backwards or forms a cycle; a stage reads only stages declared before it",
            "  3. stage 's2' reads an unknown stage",
            "  4. stage 's2' reads an unknown input",
            "  5. loss 'l' reads no stage",
        ]
    )
    with pytest.raises(pipec.SpecError, match="the pipeline has no stage"):
        Spec("net", (), ())


def test_a_spec_prints_short() -> None:
    assert repr(pipec.chain(2).spec) == "<Spec 'chain': inputs x; 2 stages: s0, s1; losses loss; outputs none>"
    assert repr(pipec.chain(9).spec) == (
        "<Spec 'chain': inputs x; 9 stages: s0, s1, s2, s3, s4, s5, ...; losses loss; outputs none>"
    )


def test_unknown_stage() -> None:
    with pytest.raises(pipec.SpecError) as error:
        pipec.chain(2).spec.stage("mid")
    assert str(error.value) == "pipeline 'chain' has no stage 'mid'; its stages are s0, s1"
