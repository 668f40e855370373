"""Updates: optimizers, schedulers, clipping and loss scaling as one unpipelined training loop has them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import models
import pytest
import torch
from models import chain, data, gradients, kept_streams, parameters, runner, same, snapshot
from torch import Tensor, nn

import pipec

__all__ = ["kept_streams"]


def values(net: pipec.Pipeline) -> list[Tensor]:
    return [p.detach() for p in parameters(net)]


def trained_by_the_reference(
    steps: int, make: Callable[..., Any], schedule: Callable[..., Any] | None = None, count: int = 4
) -> tuple[list[Tensor], list[float]]:
    """Parameters, and the first learning rate in each step, of the plain loop with one optimizer."""
    net = chain(3)
    loop, optimizer = pipec.reference(net, count), make(parameters(net))
    scheduler = schedule(optimizer) if schedule else None
    rates = []
    for number in range(steps):
        rates.append(optimizer.param_groups[0]["lr"])
        loop.step(**data(8, number))
        optimizer.step()
        optimizer.zero_grad()
        if scheduler is not None:
            scheduler.step()
    return values(net), rates


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


def sgd(params: Any) -> torch.optim.SGD:
    return torch.optim.SGD(params, lr=0.1)


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


# -- clipping ----------------------------------------------------------------------------------------------------


def three_and_four() -> pipec.Pipeline:
    """Two stages whose gradients have the norms 3 and 4."""
    net = pipec.Pipeline("clip")
    x = net.input("x")
    one, two = (torch.zeros(1, requires_grad=True) for _ in range(2))
    a = net.stage("a", lambda p, x: x * p * 3.0, x, params=one)
    b = net.stage("b", lambda p, a, x: a + x * p * 4.0, a, x, params=two)
    net.loss("sum", lambda b: b.sum(), b, reduction="sum")
    return net


@pytest.mark.parametrize("update", ["stage", "all"])
@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_clipping_sees_the_global_norm(schedule: str, devices: int, update: str) -> None:
    net, norms = three_and_four(), []
    make = lambda p: torch.optim.SGD(p, lr=1.0)  # noqa: E731
    with runner(net, devices, 2, schedule, update=update,
                optimizer=make(parameters(net)) if update == "all" else make,
                before_update=lambda p: norms.append(float(nn.utils.clip_grad_norm_(p, 1.0)))) as run:
        run.step(x=torch.full((2, 1), 0.5))
    assert norms == [5.0]
    torch.testing.assert_close([float(p) for p in values(net)], [-0.6, -0.8])


def test_a_shared_parameter_counts_once_in_clipping() -> None:
    shared, seen = nn.Linear(8, 8), []
    net = models.of_modules(shared, nn.Tanh(), shared)
    with runner(net, 3, update="stage", optimizer=sgd, before_update=lambda p: seen.append([id(q) for q in p])) as run:
        run.step(**data())
    assert seen == [[id(p) for p in shared.parameters()]]


# -- loss scaling ------------------------------------------------------------------------------------------------


def scaler(scale: float = 1024.0) -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=2)


def test_scaling_by_hand() -> None:
    """loss 3 p, scale 1024: after unscaling and SGD with rate 0.5, p = 1 -> -0.5."""
    p = torch.ones(1, requires_grad=True)
    seen: list[float] = []
    net = pipec.Pipeline("scaled")
    out = net.stage("a", lambda p, x: x * p, net.input("x"), params=p)
    net.loss("sum", lambda h: h.sum(), out, reduction="sum")
    p.register_hook(lambda g: seen.append(float(g)))
    with runner(net, 1, 1, update="all", optimizer=torch.optim.SGD([p], lr=0.5), scaler=scaler()) as run:
        result = run.step(x=torch.full((1, 1), 3.0))
    assert seen == [3072.0]
    assert p.item() == -0.5
    assert result.loss == 3.0
    assert not result.skipped


@pytest.mark.parametrize("update", ["stage", "all"])
@pytest.mark.parametrize("devices", [1, 3])
@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_an_overflow_in_one_stage_updates_nobody_and_lowers_the_scale_once(
    bad: float, devices: int, update: str
) -> None:
    overflow, hooks = [True], []
    net = chain(3)
    own = scaler()
    parameters(net)[2].register_hook(lambda g: torch.full_like(g, bad) if overflow[0] else g)
    with runner(net, devices, update=update, optimizer=sgd(parameters(net)) if update == "all" else sgd, scaler=own,
                before_update=lambda p: hooks.append(len(p))) as run:
        before = snapshot(net)
        result = run.step(**data())
        assert result.skipped
        assert same(snapshot(net), before)
        assert own.get_scale() == 512.0
        assert hooks == []
        overflow[0] = False
        assert not run.step(**data()).skipped
        assert hooks == [6]
        run.step(**data(8, 2))
        assert own.get_scale() == 1024.0  # grown after two good steps, once per step and not per optimizer
    plain = chain(3)
    loop, other = pipec.reference(plain, 4), sgd(parameters(plain))
    for given in (data(), data(8, 2)):
        loop.step(**given)
        other.step()
        other.zero_grad()
    for mine, theirs in zip(values(net), values(plain), strict=True):
        torch.testing.assert_close(mine, theirs)


def test_a_step_that_fails_after_unscaling_does_not_block_the_next() -> None:
    broken = [True]

    def hook(_: Any) -> None:
        if broken.pop():
            raise ValueError("hook")

    net, own = chain(2), scaler()
    with runner(net, 2, update="stage", optimizer=sgd, scaler=own, before_update=hook) as run:
        with pytest.raises(ValueError, match="hook"):
            run.step(**data())
        broken.append(False)
        assert not run.step(**data()).skipped
    assert own.get_scale() == 1024.0


def test_the_scripts_own_scaler_and_optimizer() -> None:
    net, own = chain(2), scaler()
    optimizer = sgd(parameters(net))
    with runner(net, 2, scaler=own) as run:
        loss = run.step(**data()).loss
        raw = [g.clone() for g in gradients(net)]
        own.step(optimizer)
        own.update()
    plain = chain(2)
    assert pipec.reference(plain, 4).step(**data()).loss == loss
    for mine, theirs in zip(raw, gradients(plain), strict=True):
        assert torch.equal(mine, theirs * 1024.0)
    sgd(parameters(plain)).step()
    for mine, theirs in zip(values(net), values(plain), strict=True):
        torch.testing.assert_close(mine, theirs)


def test_a_disabled_scaler_does_nothing() -> None:
    net = chain(2)
    with runner(net, 2, update="stage", optimizer=sgd, scaler=torch.amp.GradScaler("cpu", enabled=False)) as run:
        run.step(**data())
    assert same(values(net), trained_by_two(sgd))


def trained_by_two(make: Any) -> list[Tensor]:
    net = chain(2)
    pipec.reference(net, 4).step(**data())
    make(parameters(net)).step()
    return values(net)


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
