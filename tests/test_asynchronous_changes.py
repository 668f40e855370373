"""Asynchronous runs whose parameters, options or plans change on the way: nothing is lost or silently wrong."""

from __future__ import annotations

import contextlib
import copy
import io
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from declared import Dense, chain
from models import data, same
from test_asynchronous_runs import SCHEDULES, WIDTH, adam, batches, momentum, runner, stages, state
from torch import Tensor, nn

import pipec
from pipec.rules import Rule
from pipec.schedules import overlap
from pipec.schedules.slots import by_slot, slots_of


def _frozen(modules: list[nn.Module]) -> Callable[[], Any]:
    modules[0].bias.requires_grad_(False)
    return lambda: modules[0].bias.requires_grad_(True)


def _replaced(modules: list[nn.Module]) -> Callable[[], Any]:
    before = dict(modules[0].named_parameters())
    modules[0].load_state_dict(copy.deepcopy(modules[0].state_dict()), assign=True)
    return lambda: [setattr(modules[0], name, own) for name, own in before.items()]


def _moved(modules: list[nn.Module]) -> Callable[[], Any]:
    before = modules[0].bias.data
    modules[0].bias.data = before.clone()
    return lambda: setattr(modules[0].bias, "data", before)


@pytest.mark.parametrize(("change", "told"), [
    (_frozen, "a.bias does not require a gradient any more"),
    (_replaced, "a.bias was replaced by another parameter"),
    (_moved, "a.bias lies in other memory now"),
])
@pytest.mark.parametrize("name", ["pipedream", "pipemare"])
def test_parameters_changed_in_mid_flight_lose_nothing(change: Any, told: str, name: str) -> None:
    """Whatever would go on with them is refused until the change is undone."""
    given = batches(6)
    mine, plain = stages(), stages()
    with runner(mine, SCHEDULES[name]) as run, runner(plain, SCHEDULES[name]) as other:
        for batch in given[:5]:
            run.step(**batch)
            other.step(**batch)
        under_way = run.in_flight
        undo = change(mine)
        for call in (lambda: run.step(**given[5]), run.flush, lambda: run.evaluate(**given[5]), run.checkpoint,
                     lambda: run.switch(run.plan)):
            with pytest.raises(pipec.RunError, match=told):
                call()
            assert run.in_flight == under_way
        undo()
        assert run.flush().finished == other.flush().finished
    assert same(state(mine), state(plain))


@pytest.mark.parametrize("optimizer", [momentum, adam])
def test_prediction_goes_on_from_a_checkpoint_with_the_last_learning_rates(optimizer: Any) -> None:
    """A forward is predicted with the rate of the last update, which a scheduler or T1 has moved on from."""
    given = batches(9)
    how = {"optimizer": optimizer, "rescheduling": pipec.Rescheduling(steps=30), "microbatches": 1}
    mine, again = stages(), stages()

    def train(run: pipec.Runner, decay: list[Any], rows: list[Any]) -> None:
        for batch in rows:
            run.step(**batch)
            for scheduler in decay:
                scheduler.step()

    def schedulers(run: pipec.Runner) -> list[Any]:
        return [torch.optim.lr_scheduler.ExponentialLR(own, 0.7) for own in run.optimizers.values()]

    saved = io.BytesIO()
    with runner(mine, pipec.Predicted(inflight="full"), **how) as run:
        decay = schedulers(run)
        train(run, decay, given[:4])
        torch.save([run.checkpoint(), [own.state_dict() for own in decay]], saved)
        rates = run.learning_rates
        train(run, decay, given[4:])
        run.flush()
    saved.seek(0)
    with runner(again, pipec.Predicted(inflight="full"), **how) as run:
        decay = schedulers(run)
        taken, moved = torch.load(saved, weights_only=True)
        run.restore(taken)
        for own, before in zip(decay, moved, strict=True):
            own.load_state_dict(before)
        assert run.learning_rates == rates
        train(run, decay, given[4:])
        run.flush()
    assert same(state(mine), state(again))


def test_a_switch_to_a_synchronous_plan_keeps_what_it_finished() -> None:
    given, modules = batches(4), stages()
    net = chain(modules)
    synchronous = pipec.compile(net, 3, 3, "1f1b", update="stage")
    with runner(modules) as run, runner(stages()) as other:
        for batch in given:
            run.step(**batch)
            other.step(**batch)
        overlapping, expected = run.plan, other.flush()
        run.switch(synchronous)
        found = run.flush()
        assert found.finished == expected.finished
        assert torch.equal(found.loss, expected.loss)
        assert run.flush().finished == ()
        run.step(**given[0])
        run.switch(overlapping)
        assert run.flush().finished == ()


def test_a_restore_forgets_results_of_minibatches_that_come_again() -> None:
    given = batches(4)
    with runner(stages()) as run:
        run.step(**given[0])
        early = run.checkpoint()
        for batch in given[1:]:
            run.step(**batch)
        run.evaluate(**given[0])
        run.restore(early)
        run.step(**given[1])
        finished = run.flush().finished
    assert finished == ((1, 0), (1, 1), (1, 2))


def test_options_of_other_types_are_refused() -> None:
    with pytest.raises(pipec.RunError, match=r"rescheduling= takes pipec\.Rescheduling\(.*, got 2000"):
        runner(stages(), rescheduling=2000)
    with pytest.raises(pipec.RunError, match=r"delay= takes pipec\.TruncatedExponential\(.*, got 2\.0"):
        runner(stages(), delay=2.0)
    with pytest.raises(pipec.ScheduleError, match="D lies between 0 and 1, or is 'optimal'; got 'best'"):
        runner(stages(), pipec.PipeMare(correction="best"))
    with pytest.raises(pipec.ScheduleError, match=r"nesterov: the momentum lies in \[0, 1\); got 'high'"):
        runner(stages(), pipec.Nesterov(momentum="high"))  # type: ignore[arg-type]
    with runner(stages()) as run, pytest.raises(pipec.RunError, match=r"clip per stage.*register_step_pre_hook"):
        run.clip_grad_norm_(1.0)
    assert pipec.TruncatedExponential(0.001, 4.0).expected == pytest.approx(0.001)


class Newest(Rule):
    """A rule without options is a plain class."""

    name = "my-newest"

    def versions(self, reads: Any) -> Any:
        return reads.newest


class Nameless(Rule):
    pass


def policy(rule: Any) -> Any:
    def order(self: Any, problem: Any) -> Any:
        return by_slot(problem, slots_of("full", len(problem.chunks)))

    return type("Own", (), {"asynchronous": True, "weights": rule, "order": order, "name": "own"})()


def test_rules_of_ones_own() -> None:
    found = []
    for schedule in (policy(Newest()), pipec.PipeMare(correction=None)):
        modules = stages()
        with runner(modules, schedule) as run:
            for batch in batches(5):
                run.step(**batch)
            run.flush()
        found.append(state(modules))
    assert same(*found)
    assert modules[0].weight.shape == (WIDTH, WIDTH)


@pytest.mark.parametrize(("rule", "told"), [
    (None, "it has none"), ("stash", "it has 'stash'"), (Newest, "it has <class"),
    (Nameless(), "Nameless needs a class"),
])
def test_what_is_no_rule_is_told(rule: Any, told: str) -> None:
    with pytest.raises(pipec.ScheduleError, match=f"schedule 'own'.*{told}"):
        runner(stages(), policy(rule))


def test_closing_with_minibatches_in_flight_is_told() -> None:
    given = batches(3)
    told = r"minibatches 1, 2 in flight when the runner was closed: .* run.flush\(\)"
    run = runner(stages(), "pipedream", 1)
    for batch in given:
        run.step(**batch)
    assert run.in_flight == (1, 2)
    with pytest.warns(UserWarning, match=told):
        run.__exit__(None, None, None)
    for leave in ("flush", "failure"):
        with warnings.catch_warnings(), contextlib.suppress(KeyError):
            warnings.simplefilter("error")
            with runner(stages(), "pipedream", 1) as run:
                run.step(**given[0])
                if leave == "failure":
                    raise KeyError(leave)
                run.flush()


def test_overlaps_in_an_asynchronous_order_are_refused() -> None:
    class Fused(pipec.LiveWeights):
        def order(self, problem: Any) -> Any:
            first, *rows = super().order(problem)
            return [[overlap(first[0], first[1]), *first[2:]], *rows]

    with pytest.raises(pipec.ScheduleError, match=r"'live-weights' is asynchronous, but orders 0F0&0F1 as one; .*Order "
                                                  "the tasks one after another"):
        runner(stages(), Fused())


@pytest.mark.parametrize("kind", [
    lambda t: 0.5, lambda t: {"by": t}, lambda t: (t, 3), lambda t: None, torch.Tensor.int,
], ids=["number", "dict", "tuple", "nothing", "integers"])
def test_inputs_may_be_anything(kind: Callable[[Any], Any]) -> None:
    """A later stage reads an input that is not one tensor: it arrives, and nothing asks for its gradient."""

    class Reader(Dense):
        def forward(self, h: Any, given: Any = None) -> Any:
            assert same(given, kind(torch.ones(3)))
            return super().forward(h)

    found = []
    for reads in (False, True):
        first, second = stages(2)
        if reads:
            second.__class__ = Reader
        net = pipec.Pipeline("net")
        x, y = net.input("x"), net.input("y")
        more = (net.input("given", split=None),) if reads else ()
        out = net.stage("b", second, net.stage("a", first, x), *more)
        net.output(out)
        net.loss("mse", nn.functional.mse_loss, out, y)
        named = {"given": kind(torch.ones(3))} if reads else {}
        with pipec.Runner(net, pipec.compile(net, 2, 3, "pipemare", update="stage"), optimizer=momentum,
                          backend="replay", seed=1) as run:
            losses = [run.step(**batch, **named).losses for batch in batches(4)]
            found.append([losses, run.flush().losses, state([first, second])])
    assert same(*found)


class Turning(nn.Module):
    """Saves one tensor more in some microbatches, in a stage whose batch norm has moved before that is noticed."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        h = self.norm(h)
        return h.sin() * h if bool(h[0, 0] > 0) else h.tanh()


def test_a_second_look_at_what_a_forward_saves_leaves_its_graph_and_statistics_alone() -> None:
    found = []
    for backend in ("replay", "threads"):
        torch.manual_seed(3)
        modules = [Turning(), Dense(), Turning()]
        with runner(modules, "pipemare", 3, backend=backend) as run:
            for batch in batches(6):
                run.step(**batch)
            run.evaluate(**batches(1)[0])
            losses = [run.step(**batch).losses for batch in batches(6)]
            found.append([losses, run.flush().losses, state(modules)])
        assert [int(module.norm.num_batches_tracked) for module in modules[::2]] == [36, 36]
    assert same(*found)


def scaled(params: dict[str, Any], x: Tensor) -> Tensor:
    return x * params["gain"][0] + params["shift"]


@pytest.mark.parametrize("schedule", ["pipemare", pipec.PipeMare("1f1b"), "pipedream", "predicted"])
@pytest.mark.parametrize("recompute", ["never", "always"])
def test_stages_with_params_go_on_from_a_checkpoint(schedule: Any, recompute: str) -> None:
    """The first task of a fresh runner may compute with corrected weights at once."""
    def start() -> pipec.Runner:
        torch.manual_seed(3)
        net = pipec.Pipeline("net")
        x, y = net.input("x"), net.input("y")
        params = {"gain": [torch.randn(8, requires_grad=True)], "shift": torch.zeros(8, requires_grad=True)}
        first = net.stage("first", nn.Linear(8, 8), x)
        scale = net.stage("scale", scaled, first, params=params)
        net.loss("mse", nn.functional.mse_loss, net.stage("last", nn.Linear(8, 8), scale), y)
        plan = pipec.compile(net, 2, 4, schedule, update="stage", recompute=recompute)
        return pipec.Runner(net, plan, optimizer=lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), backend="replay")

    with start() as run, start() as again:
        for number in range(4):
            run.step(**data(8, number))
        run.flush()
        again.restore(run.checkpoint())
        for number in range(4, 7):
            for one in (run, again):
                one.step(**data(8, number))
        run.flush()
        again.flush()
        assert same(run.state_dict(), again.state_dict())


class Moody(nn.Module):
    """What it returns depends on its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(8) * 0.05)

    def forward(self, x: Tensor) -> Any:
        out = x * self.gain
        return (out, out) if float(self.gain.detach().sum()) > 0 else [out]


def test_a_recompute_of_another_form_than_its_forward_is_told() -> None:
    net = pipec.Pipeline("net")
    x = net.input("x")
    mood = net.stage("mood", Moody(), x)
    net.loss("sum", lambda own: own[0].sum(), net.stage("last", nn.Identity(), mood), reduction="sum")
    plan = pipec.compile(net, 2, 2, "pipemare", update="stage", recompute="always")
    run = pipec.Runner(net, plan, optimizer=lambda p: torch.optim.SGD(p, lr=0.1), backend="replay")
    for _ in range(3):
        run.step(x=torch.ones(8, 8))
    with pytest.raises(pipec.RunError, match="the stage's RECOMPUTE returned another form") as error:
        run.step(x=torch.ones(8, 8))
    assert "raised in stage 'mood'" in "".join(error.value.__notes__)
