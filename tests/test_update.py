"""Updates: optimizers, schedulers, clipping and loss scaling as one unpipelined training loop has them."""

from __future__ import annotations

from typing import Any

import models
import pytest
import torch
from models import chain, data, gradients, kept_streams, parameters, runner, same, snapshot
from torch import nn
from training import sgd, trained_by_the_reference, values

import pipec

__all__ = ["kept_streams"]


OPTIMIZERS = [
    lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True), lambda p: torch.optim.AdamW(p, lr=0.01),
    lambda p: torch.optim.RMSprop(p, lr=0.01),
]


@pytest.mark.parametrize("make", OPTIMIZERS)
@pytest.mark.parametrize("devices", [1, 3])
@pytest.mark.parametrize("update", [None, "stage", "all", "early"])
def test_five_steps_of_every_way_to_update(update: str | None, devices: int, make: Any) -> None:
    expected, _ = trained_by_the_reference(5, make)
    for backend in ("threads", "replay"):
        net = chain(3)
        own = make(parameters(net)) if update in (None, "all") else make
        how = {"update": "stage", "update_early": True} if update == "early" else {"update": update}
        with runner(net, devices, backend=backend, optimizer=own if update else None, **how) as run:
            for number in range(5):
                run.step(**data(8, number))
                if update is None:
                    own.step()
                    own.zero_grad()
        assert same(values(net), expected)


def test_a_saved_plan_still_updates_early(tmp_path: Any) -> None:
    net = chain(3)
    pipec.compile(net, 3, 4, update="stage", update_early=True).save(tmp_path / "plan.json")
    with pipec.Runner(net, pipec.Plan.load(tmp_path / "plan.json"), optimizer=OPTIMIZERS[0]) as run:
        for number in range(2):
            run.step(**data(8, number))
    assert same(values(net), trained_by_the_reference(2, OPTIMIZERS[0])[0])


@pytest.mark.parametrize("update", [None, "stage", "all"])
@pytest.mark.parametrize("schedule", [
    lambda o: torch.optim.lr_scheduler.StepLR(o, 3, 0.5),
    lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.2, total_steps=25),
])
def test_schedulers_step_once_per_step(schedule: Any, update: str | None) -> None:
    make = OPTIMIZERS[0]
    expected, rates = trained_by_the_reference(20, make, schedule)
    net = chain(3)
    own = make(parameters(net)) if update != "stage" else make
    seen = []
    with runner(net, 2, update=update, optimizer=own if update else None) as run:
        optimizers = [own] if update is None else list(run.optimizers.values())
        schedulers = [schedule(optimizer) for optimizer in optimizers]
        for number in range(20):
            seen.append(optimizers[0].param_groups[0]["lr"])
            run.step(**data(8, number))
            if update is None:
                own.step()
                own.zero_grad()
            for scheduler in schedulers:
                scheduler.step()
    assert seen == rates
    assert same(values(net), expected)


def test_parameter_groups() -> None:
    def make(params: Any) -> torch.optim.Optimizer:
        own = list(params)
        return torch.optim.SGD([{"params": [p for p in own if p.dim() > 1], "lr": 0.1, "weight_decay": 0.1},
                                {"params": [p for p in own if p.dim() == 1], "lr": 0.01}])

    expected, _ = trained_by_the_reference(3, make)
    for update in ("stage", "all"):
        net = chain(3)
        with runner(net, 2, update=update, optimizer=make(parameters(net)) if update == "all" else make) as run:
            for number in range(3):
                run.step(**data(8, number))
            assert set(run.optimizers) == ({"all"} if update == "all" else {"s0", "s1", "s2"})
        assert same(values(net), expected)


@pytest.mark.parametrize(("update", "optimizer", "told"), [
    (None, sgd, "takes no optimizer"), ("stage", None, "got none"), ("all", None, "got none"),
    ("stage", torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0), "got SGD"), ("all", sgd, "got function"),
    ("stage", lambda params: 3, "must return a torch.optim.Optimizer, got int for stage 's0'"),
])
def test_an_optimizer_that_does_not_fit_the_plan(update: str | None, optimizer: Any, told: str) -> None:
    with pytest.raises(pipec.RunError, match=told):
        runner(chain(3), update=update, optimizer=optimizer)


def test_a_hook_without_updates_and_what_needs_all_gradients_with_early_ones() -> None:
    with pytest.raises(pipec.RunError, match="before_update needs a plan with UPDATE tasks"):
        runner(chain(3), before_update=lambda p: None)
    early = {"update": "stage", "update_early": True, "optimizer": sgd}
    with pytest.raises(pipec.RunError, match=r"before_update needs all gradients.*update_early"):
        runner(chain(3), before_update=lambda p: None, **early)
    with pytest.raises(pipec.RunError, match=r"scaler needs all gradients.*update_early"):
        runner(chain(3), scaler=torch.amp.GradScaler("cpu"), **early)
    shared = nn.Linear(8, 8)
    with pytest.raises(pipec.RunError, match="stages 'a' and 'b' share the parameter 'weight'"):
        runner(models.of_modules(shared, shared), **early)


def test_no_optimizer_is_made_for_stages_without_trainable_parameters() -> None:
    net = models.of_modules(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8).requires_grad_(False), lambda v: v * 2)
    made: list[int] = []

    def optimizer(params: Any) -> torch.optim.Optimizer:
        made.append(len(list(params)))
        return sgd(params)

    with runner(net, 2, update="stage", optimizer=optimizer) as run:
        before = snapshot(net)[0]
        run.step(**data())
        assert list(run.optimizers) == ["a"]
    assert made == [2]
    after = snapshot(net)[0]
    assert [torch.equal(a, b) for a, b in zip(before, after, strict=True)] == [False, False, True, True]


def test_gradients_are_spent_by_an_update_and_those_before_it_count() -> None:
    """What .grad held when the step began takes part in its update, as in a plain loop; then it is gone."""
    mine, theirs = chain(2), chain(2)
    for net in (mine, theirs):
        for parameter in parameters(net):
            parameter.grad = torch.ones_like(parameter)
    with runner(mine, 2, update="stage", optimizer=sgd) as run:
        run.step(**data())
    pipec.reference(theirs, 4).step(**data())
    sgd(parameters(theirs)).step()
    assert same(values(mine), values(theirs))
    assert set(gradients(mine)) == {None}


def test_one_optimizer_for_the_pipeline_and_an_encoder_in_front() -> None:
    """Its gradients are there before the update, take part in clipping and are spent by it."""
    torch.manual_seed(4)
    encoder = nn.Linear(8, 8)
    start = [p.detach().clone() for p in encoder.parameters()]
    net, seen = chain(2), []
    optimizer = sgd([*encoder.parameters(), *parameters(net)])
    with runner(net, 2, update="all", optimizer=optimizer, before_update=lambda p: seen.append(len(p))) as run:
        for number in range(2):
            run.step(x=encoder(data(8, number)["x"]), y=data(8, number)["y"])
            assert [p.grad for p in encoder.parameters()] == [None, None]
    assert seen == [6, 6]
    torch.manual_seed(4)
    other, plain = nn.Linear(8, 8), chain(2)
    loop, own = pipec.reference(plain, 4), sgd([*other.parameters(), *parameters(plain)])
    for number in range(2):
        loop.step(x=other(data(8, number)["x"]), y=data(8, number)["y"])
        own.step()
        own.zero_grad()
    assert same([p.detach() for p in encoder.parameters()], [p.detach() for p in other.parameters()])
    assert not same([p.detach() for p in encoder.parameters()], start)


def test_gradient_accumulation_over_steps_with_the_scripts_optimizer() -> None:
    mine, theirs = chain(2), chain(2)
    with runner(mine, 2) as run:
        for number in range(3):
            run.step(**data(8, number))
    loop = pipec.reference(theirs, 4)
    for number in range(3):
        loop.step(**data(8, number))
    assert same(gradients(mine), gradients(theirs))
    assert gradients(mine)[0].any()


@pytest.mark.parametrize("update", ["stage", "all"])
def test_what_no_loss_depends_on_has_no_update_and_the_rest_trains(update: str) -> None:
    """Its .grad stays, and a parameter it shares belongs to the stage that has an UPDATE."""

    def build() -> tuple[pipec.Pipeline, nn.Linear, nn.Linear]:
        torch.manual_seed(0)
        net = pipec.Pipeline("side")
        x, y = net.input("x"), net.input("y")
        shared, alone = nn.Linear(8, 8), nn.Linear(8, 8)
        net.output(net.stage("side", nn.Sequential(shared, alone), x), "side")
        net.loss("mse", nn.functional.mse_loss, net.stage("main", shared, x), y)
        return net, shared, alone

    net, shared, alone = build()
    alone.weight.grad = torch.ones(8, 8)
    kept, before = alone.weight.grad, alone.weight.detach().clone()
    own = sgd(shared.parameters()) if update == "all" else sgd
    with runner(net, 2, update=update, optimizer=own) as run:
        if update == "stage":
            assert list(run.optimizers) == ["main"]
        run.step(**data())
    assert alone.weight.grad is kept
    assert torch.equal(alone.weight, before)
    theirs, other, _ = build()
    pipec.reference(theirs, 4).step(**data())
    sgd(other.parameters()).step()
    assert torch.equal(shared.weight, other.weight)


def test_the_gradients_of_an_encoder_are_there_when_the_hook_runs() -> None:
    encoder, net, seen = nn.Linear(8, 8), chain(2), []
    with runner(net, 2, update="stage", optimizer=sgd,
                before_update=lambda p: seen.append(encoder.weight.grad is not None)) as run:
        run.step(x=encoder(data()["x"]), y=data()["y"])
    assert seen == [True]


def two_lines() -> pipec.Pipeline:
    net = pipec.Pipeline("net")
    x, y = net.input("x"), net.input("y")
    net.loss("mse", nn.functional.mse_loss, net.stage("b", nn.Linear(4, 4), net.stage("a", nn.Linear(4, 4), x)), y)
    return net


@pytest.mark.parametrize(
    ("update", "optimizer", "example"),
    [
        ("all", lambda params: params, "torch.optim.SGD(model.parameters(), lr=0.1); got function"),
        ("stage", None, "lambda params: torch.optim.SGD(params, lr=0.1); got none"),
    ],
)
def test_an_optimizer_of_the_other_kind_is_answered_with_an_example(
    update: str, optimizer: Any, example: str
) -> None:
    net = two_lines()
    with pytest.raises(pipec.RunError) as error:
        pipec.Runner(net, pipec.compile(net, 2, 2, update=update), optimizer=optimizer)
    assert f"update={update!r}" in str(error.value)
    assert f"such as {example}" in str(error.value)


def test_an_optimizer_of_other_parameters_is_refused() -> None:
    net = two_lines()
    other = list(nn.Linear(2, 2).parameters())
    with pytest.raises(pipec.RunError, match="the optimizer holds no parameter of the pipeline"):
        pipec.Runner(net, pipec.compile(net, 2, 2, update="all"), optimizer=torch.optim.SGD(other, lr=1.0))
    with pytest.raises(pipec.RunError, match="for stage 'a' that holds none of the stage's parameters"):
        pipec.Runner(net, pipec.compile(net, 2, 2, update="stage"), optimizer=lambda _: torch.optim.SGD(other, lr=1.0))


def test_parameters_that_no_optimizer_holds_are_told() -> None:
    net = two_lines()
    some = list(net.spec.stages[0].fn.parameters())  # type: ignore[union-attr]
    plan = pipec.compile(net, 2, 2, update="all")
    with pytest.warns(UserWarning, match=r"no optimizer holds b\.weight, b\.bias"):
        pipec.Runner(net, plan, optimizer=torch.optim.SGD(some, lr=1.0)).close()


def test_a_parameter_unfrozen_later_is_not_lost_without_a_word() -> None:
    net = two_lines()
    first = net.spec.stages[0].fn
    assert isinstance(first, nn.Linear)
    first.weight.requires_grad_(False)
    plan = pipec.compile(net, 2, 2, update="stage")
    data = {"x": torch.randn(4, 4), "y": torch.randn(4, 4)}
    with pipec.Runner(net, plan, optimizer=lambda p: torch.optim.SGD(p, lr=0.1)) as run:
        run.step(**data)
        first.weight.requires_grad_(True)
        with pytest.raises(pipec.RunError, match=r"no optimizer holds a\.weight, unfrozen or replaced"):
            run.step(**data)
        run.optimizers["a"].add_param_group({"params": [first.weight]})
        before = first.weight.detach().clone()
        run.step(**data)
        assert not torch.equal(before, first.weight)


def test_a_failed_hook_leaves_the_gradients_in_front_of_the_pipeline_as_they_were() -> None:
    net = two_lines()
    encoder = nn.Linear(4, 4)
    y = torch.randn(4, 4)
    leaf = torch.randn(4, 4, requires_grad=True)

    def fail(_: Any) -> None:
        raise KeyError("hook")

    own = [p for stage in net.spec.stages for p in stage.fn.parameters()]  # type: ignore[union-attr]
    optimizer = torch.optim.SGD([*own, *encoder.parameters()], lr=0.1)
    plan = pipec.compile(net, 2, 2, update="all")
    for parameter in encoder.parameters():
        parameter.grad = torch.ones_like(parameter)
    leaf.grad = torch.ones_like(leaf)
    with pipec.Runner(net, plan, optimizer=optimizer, before_update=fail) as run:
        with pytest.raises(KeyError):
            run.step(x=encoder(torch.randn(4, 4)), y=y)
        assert all(torch.equal(p.grad, torch.ones_like(p)) for p in encoder.parameters() if p.grad is not None)
        with pytest.raises(KeyError):
            run.step(x=leaf, y=y)
        assert torch.equal(leaf.grad, torch.ones_like(leaf))


def test_optimizers_that_step_what_belongs_to_other_stages_are_refused() -> None:
    """One made from the whole model would update every stage as often as there are stages."""
    net = chain(3)
    shared = torch.optim.SGD(parameters(net), lr=0.1)
    extra = nn.Parameter(torch.zeros(2))
    for make, told in (
        (lambda p: torch.optim.SGD(parameters(net), lr=0.1), r"that of stage '\w+' holds \w+\.\S+ and \d+ more"),
        (lambda p: shared, r"that of stage '\w+' holds \w+\.\S+ and \d+ more"),
        (lambda p: torch.optim.SGD([*p, extra], lr=0.1), r"that of stage '\w+' holds what that of '\w+' holds"),
    ):
        with pytest.raises(pipec.RunError, match=told) as caught:
            runner(net, 2, update="stage", optimizer=make)
        assert "make it from params alone, such as lambda params: torch.optim.SGD(params, lr=0.1)" in str(caught.value)
    seen: list[Any] = []

    def first_with_more(params: Any) -> Any:
        seen.append(params)
        return torch.optim.SGD([*params, *([extra] if len(seen) == 1 else [])], lr=0.1)

    with runner(net, 2, update="stage", optimizer=first_with_more) as run:  # an encoder in front, say
        run.step(**data(8, 0))


def test_results_say_what_was_finished() -> None:
    net = chain(3)
    reference = pipec.reference(net, microbatches=4)
    with runner(net, 2) as run:
        for number in range(2):
            result = run.step(**data(8, number))
            assert result.finished == tuple((number, m) for m in range(result.microbatches))
            assert result.minibatches == (number,)
            assert reference.step(**data(8, number)).minibatches == (number,)
        found = run.evaluate(**data(8, 0))
        assert (found.finished, found.minibatches) == ((), ())
        assert run.step(**data(3, 0)).finished == ((2, 0), (2, 1), (2, 2))
