"""Names in state dicts and checkpoints, and what does not fit them."""

from __future__ import annotations

import copy
from typing import Any

import models
import pytest
import torch
from models import WIDTH, data, kept_streams, of_modules, parameters, runner, same
from resumed import adam, cut, everything, sgd, started, steps, through_a_file, whole
from torch import nn
from torch.nn import functional as F

import pipec

__all__ = ["kept_streams"]


def test_names_are_the_models_own_once_each() -> None:
    model = whole()
    with started("interleaved", adam, model) as run:
        steps(run, 0, 1)
        state = run.checkpoint()
        assert list(run.state_dict()) == list(model.state_dict()) == list(state["model"])
        assert same(dict(run.state_dict()), dict(model.state_dict()))
        trained = [name for name, _ in model.named_parameters()]
        assert [name for group in state["optimizer"]["groups"] for name in group["names"]] == trained
        assert list(state["optimizer"]["state"]) == trained
        assert state["random"]["step"] == 1
    other = whole(seed=5)
    other.load_state_dict(state["model"])  # into the plain model, without a pipeline
    assert same(dict(other.state_dict()), dict(model.state_dict()))
    with started("two stages", adam, whole(seed=6)) as run:
        run.load_state_dict(model.state_dict())  # and from it
        assert same(dict(run.state_dict()), dict(model.state_dict()))


def test_without_the_model_names_are_stage_and_key() -> None:
    net = models.chain(2)
    with runner(net, 2) as run:
        assert list(run.state_dict()) == ["s0.0.weight", "s0.0.bias", "s1.0.weight", "s1.0.bias"]
        before = {name: value.clone() for name, value in run.state_dict().items()}
        with torch.no_grad():
            for parameter in parameters(net):
                parameter.zero_()
        run.load_state_dict(before)
        assert same(dict(run.state_dict()), before)


def tied(width: int = WIDTH) -> tuple[nn.ModuleDict, pipec.Pipeline]:
    torch.manual_seed(2)
    model = nn.ModuleDict({
        "embedding": nn.Embedding(11, width), "middle": nn.Linear(width, width), "head": nn.Linear(width, 11),
    })
    model["head"].weight = model["embedding"].weight
    net = pipec.Pipeline("words")
    ids, y = net.input("ids"), net.input("y")
    value = net.stage("embedding", model["embedding"], ids)
    value = net.stage("head", model["head"], net.stage("middle", model["middle"], value))
    net.loss("loss", F.cross_entropy, value, y)
    return model, net


def words(step: int) -> dict[str, torch.Tensor]:
    make = torch.Generator().manual_seed(step)
    return {"ids": torch.randint(11, (8,), generator=make), "y": torch.randint(11, (8,), generator=make)}


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("update", ["stage", "all"])
def test_tied_parameters_are_one_and_stay_tied(update: str, named: bool) -> None:
    def start(devices: int) -> tuple[nn.ModuleDict, Any]:
        model, net = tied()
        plan = pipec.compile(net, devices, 4, update=update)
        made = adam(model.parameters()) if update == "all" else adam
        return model, pipec.Runner(net, plan, optimizer=made, model=model if named else None)

    model, run = start(2)
    with run:
        for step in range(2):
            run.step(**words(step))
        state = through_a_file(run.checkpoint())
        for step in range(2, 4):
            run.step(**words(step))
    assert same(state["model"]["embedding.weight"], state["model"]["head.weight"])
    assert state["model"]["embedding.weight"].data_ptr() == state["model"]["head.weight"].data_ptr()  # saved once
    assert list(state["optimizer"]["state"]) == ["embedding.weight", "middle.weight", "middle.bias", "head.bias"]
    del state["model"]["head.weight"]  # one of its names is enough
    other, run = start(1)
    with run:
        run.restore(state)
        for step in range(2, 4):
            run.step(**words(step))
    assert other["head"].weight is other["embedding"].weight
    assert same(dict(other.state_dict()), dict(model.state_dict()))


def test_tied_here_but_not_there_is_an_error() -> None:
    _, net = tied()
    with runner(net) as run:
        state = {name: value.clone() for name, value in run.state_dict().items()}
        state["head.weight"] += 1
        with pytest.raises(pipec.RunError, match=r"embedding\.weight and head\.weight are one tensor here, but two"):
            run.load_state_dict(state)


def test_everything_that_does_not_fit_is_told_at_once_and_nothing_is_loaded() -> None:
    model = whole()
    with started("two devices", adam, model) as run:
        steps(run, 0, 1)
        before = copy.deepcopy(everything(model, run))
        state = run.checkpoint()
        steps(run, 1, 2)
        now = copy.deepcopy(everything(model, run))
        del state["model"]["0.weight"], state["model"]["1.running_var"]
        state["model"]["9.weight"] = torch.zeros(1)
        state["model"]["5.bias"] = torch.zeros(3)
        state["model"]["7.bias"] = "lost"
        state["optimizer"]["groups"][0]["names"][0] = "0.gone"
        state["scaler"] = {"scale": 8.0}
        with pytest.raises(pipec.RunError) as error:
            run.restore(state)
        told = str(error.value)
        assert told.startswith("checkpoint: 7 problems")
        for line in (
            "missing: 0.weight, 1.running_var", "5.bias has shape (3,), expected (8,)",
            "7.bias is a str, expected a tensor of (8,)", "optimizer 'a': missing state of 0.weight",
            "no optimizer here has 0.gone", "it has the state of a gradient scaler; give Runner(scaler=...)",
            "unknown: 9.weight; names are stage.key, or those of the module given as Runner(model=...)",
        ):
            assert line in told
        assert same(everything(model, run), now)
        assert not same(now, before)
        with pytest.raises(pipec.RunError, match="2 problems"):
            run.load_state_dict({"0.weight": model[0].weight.detach() + 1, "0.bias": torch.zeros(2)})
        assert same(everything(model, run), now)


def test_optimizers_that_do_not_fit_are_told() -> None:
    with started("two devices", adam, whole()) as run:
        steps(run, 0, 1)
        state = run.checkpoint()
    with started("two devices", sgd, whole()) as run, pytest.raises(pipec.RunError) as error:
        run.restore(state)
    assert "optimizer 'a' is SGD, the checkpoint's is Adam" in str(error.value)
    model = whole()
    net = cut(model, 4)
    with pipec.Runner(net, pipec.compile(net, 2, 4), model=model) as run, pytest.raises(pipec.RunError) as error:
        run.restore(state)
    assert "this plan has no UPDATE; load only the model with load_state_dict(checkpoint['model'])" in str(error.value)
    state["optimizer"]["groups"][1]["options"]["lr"] = 0.5
    with started("two stages", adam, whole()) as run, pytest.raises(pipec.RunError) as error:
        run.restore(state)
    assert "optimizer 'b': 3.bias and 4.weight are in one group here, but had different lr" in str(error.value)


@pytest.mark.parametrize(("state", "told"), [
    ({}, "got an empty dict"), (None, "got a NoneType"),
    ({"0.weight": 1, "0.bias": 2}, "got a dict with 0.weight, 0.bias; a model's state dict is loaded with"),
    ({"format": 7, "model": 0, "optimizer": 0, "scaler": 0, "random": 0}, "it has format 7, this version of pipec"),
])
def test_what_is_no_checkpoint_is_refused(state: Any, told: str) -> None:
    with runner(models.chain(2)) as run, pytest.raises(pipec.RunError) as error:
        run.restore(state)
    assert told in str(error.value)


def test_a_model_that_lacks_a_stages_tensor_is_refused() -> None:
    model = whole()
    net = cut(copy.deepcopy(model), 4)
    with pytest.raises(pipec.RunError) as error:
        pipec.Runner(net, pipec.compile(net, 2, 2), model=model)
    assert str(error.value).startswith("a.0.weight, a.0.bias, a.1.weight, ")
    assert "a.3.bias and 9 more are not in model=; make the stages from the model's own modules" in str(error.value)


def test_names_of_a_dict_of_tensors_serve_functional_stages() -> None:
    def build(seed: int) -> tuple[dict[str, torch.Tensor], pipec.Pipeline]:
        torch.manual_seed(seed)
        own = {f"w{n}": (torch.randn(WIDTH, WIDTH) / 3).requires_grad_() for n in range(3)}
        net = pipec.Pipeline("functions")
        x, y = net.input("x"), net.input("y")
        layer = lambda params, h: torch.tanh(h @ params["w"])  # noqa: E731
        value = net.stage("one", layer, x, params={"w": own["w0"]})
        value = net.stage("two", layer, value, params={"w": own["w1"]})
        value = net.stage("three", layer, value, params={"w": own["w2"]})
        net.loss("loss", F.mse_loss, value, y)
        return own, net

    own, net = build(0)
    with pipec.Runner(net, pipec.compile(net, 3, 4, update="stage"), optimizer=adam, model=own) as run:
        run.step(**data(8, 0))
        state = through_a_file(run.checkpoint())
        run.step(**data(8, 1))
    other, again = build(1)
    with pipec.Runner(again, pipec.compile(again, 1, 4, update="stage"), optimizer=adam, model=other) as run:
        run.restore(state)
        run.step(**data(8, 1))
    assert list(state["model"]) == ["w0", "w1", "w2"]
    assert same(list(own.values()), list(other.values()))


def test_a_parameter_outside_of_the_pipeline_needs_a_name() -> None:
    def start(named: bool) -> tuple[nn.ModuleDict, Any]:
        torch.manual_seed(0)
        outer, model = nn.Linear(WIDTH, WIDTH), whole()
        net = cut(model, 4)
        everything = nn.ModuleDict({"outer": outer, "model": model})
        plan = pipec.compile(net, 2, 4, update="all")
        own = {"model": everything} if named else {}
        return everything, pipec.Runner(net, plan, optimizer=adam(everything.parameters()), **own)

    def train(model: nn.ModuleDict, run: Any, first: int, last: int) -> None:
        for step in range(first, last):
            given = data(8, step)
            run.step(x=model["outer"](given["x"]), y=given["y"])

    model, run = start(named=True)
    with run:
        train(model, run, 0, 2)
        state = through_a_file(run.checkpoint())
        train(model, run, 2, 4)
    other, run = start(named=True)
    with run:
        run.restore(state)
        train(other, run, 2, 4)
    assert same(dict(other.state_dict()), dict(model.state_dict()))
    _, run = start(named=False)
    with run, pytest.raises(pipec.RunError) as error:
        run.checkpoint()
    assert "group 0 has a parameter of shape (8, 8) that is in no stage; give Runner(model=...)" in str(error.value)


def test_compiled_stages_leave_no_trace_in_names() -> None:
    model = whole()
    parts = [model[:4], model[4:]]
    net = of_modules(torch.compile(parts[0], backend="eager"), parts[1])
    plain = of_modules(*parts)
    with runner(net, 1, 2) as run, runner(plain, 1, 2) as other:
        assert list(run.state_dict()) == list(other.state_dict())
        state = {name: value + 1 for name, value in run.state_dict().items()}
        run.load_state_dict(state)
        assert same(dict(other.state_dict()), state)


def test_two_tensors_of_one_name_are_refused() -> None:
    net = pipec.Pipeline("net")
    x, y = net.input("x"), net.input("y")
    inner = nn.ModuleDict({"b": nn.Linear(WIDTH, WIDTH)})
    inner.forward = lambda x: inner["b"](x)  # type: ignore[method-assign]
    value = net.stage("a.b", nn.Linear(WIDTH, WIDTH), net.stage("a", inner, x))
    net.loss("loss", F.mse_loss, value, y)
    with pytest.raises(pipec.RunError, match=r"two tensors are named 'a\.b\.weight'; rename a stage, or give Runner"):
        pipec.Runner(net, pipec.compile(net, 1, 2))
