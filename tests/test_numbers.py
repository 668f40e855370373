"""Whatever the plan and the backend: losses, outputs, gradients, buffers and updates are those of the reference."""

from __future__ import annotations

import itertools
from typing import Any

import models
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from models import WIDTH, buffers, gradients, kept_streams, recipes, same
from random_nets import start_from, two_steps_equal_the_reference
from torch import Tensor, nn

import pipec

__all__ = ["kept_streams"]


@settings(max_examples=250, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(st.data())
def test_every_plan_gives_the_numbers_of_the_reference(draw: Any) -> None:
    recipe = draw.draw(recipes())
    how = draw.draw(models.options(recipe))
    two_steps_equal_the_reference(draw, recipe, how)


@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(recipes(), st.integers(1, 4), st.integers(4, 9))
def test_reference_agrees_with_one_backward_of_the_uncut_model(recipe: Any, count: int, rows: int) -> None:
    cut, uncut = recipe.build(), recipe.build()
    given = models.batch(rows)
    result = pipec.reference(cut, count).step(**given)
    total = models.whole(uncut, count, given)
    torch.testing.assert_close(result.loss, total)
    for mine, theirs in zip(gradients(cut), gradients(uncut), strict=True):
        if mine is None or theirs is None:  # nothing flows: both say so, one of them perhaps with zeros
            assert mine is None or not mine.any()
            assert theirs is None or not theirs.any()
        else:
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
    assert same(buffers(cut), buffers(uncut))


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_on_a_chain_the_uncut_model_gives_the_same_bits(count: int) -> None:
    cut, uncut = models.chain(4), models.chain(4)
    given = models.data(10)
    for _ in range(2):
        with models.runner(cut, 2, count) as run:
            run.step(**given)
        models.whole(uncut, count, given)
    assert same(gradients(cut), gradients(uncut))


@pytest.mark.parametrize("devices", [1, 2, 4])
@pytest.mark.parametrize("backend", ["threads", "replay"])
def test_a_second_step_without_zero_grad_doubles_the_gradient(devices: int, backend: str) -> None:
    net = models.chain(4)
    with models.runner(net, devices, backend=backend) as run:
        run.step(**models.data())
        once = [g.clone() for g in gradients(net) if g is not None]
        run.step(**models.data())
    for one, two in zip(once, gradients(net), strict=True):
        torch.testing.assert_close(two, one * 2)


def test_gradients_of_an_earlier_step_are_not_written_into() -> None:
    net = models.chain(2)
    start_from(net, dirty=True)
    kept = gradients(net)
    before = [g.clone() for g in kept if g is not None]
    with models.runner(net) as run:
        run.step(**models.data())
    assert same(kept, before)
    assert not same(gradients(net), before)


@pytest.mark.parametrize("order", [(3, 2, 1, 0), (0, 2, 1, 3), (2, 0, 3, 1)])
@pytest.mark.parametrize("recompute", ["never", "always"])
def test_microbatches_keep_their_targets_and_their_place_in_any_order(order: tuple[int, ...], recompute: str) -> None:
    """Targets name the microbatch; the backwards of a hand-written schedule run in ``order``."""

    def policy(problem: Any) -> Any:
        forwards = [[(0, c, m) for m in range(4) for c in problem.on(d)] for d in range(problem.devices)]
        backwards = [[(2, c, m) for m in order for c in reversed(problem.on(d))] for d in range(problem.devices)]
        return [f + b for f, b in zip(forwards, backwards, strict=True)]

    seen: list[float] = []

    def loss(h: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        seen.append(float(y[0, 0]))
        return (h - y).pow(2).mean()

    given = {"x": models.data()["x"], "y": torch.arange(4.0).repeat_interleave(2)[:, None].expand(8, 8).contiguous()}
    mine, theirs = models.chain(3, loss=loss), models.chain(3)
    with models.runner(mine, 2, 4, policy, recompute=recompute) as run:
        got = run.step(**given)
    expected = pipec.reference(theirs, 4).step(**given)
    assert seen[:4] == [0.0, 1.0, 2.0, 3.0]
    assert same(got.outputs, expected.outputs)
    assert same(gradients(mine), gradients(theirs))
    torch.testing.assert_close(got.loss, expected.loss)


@pytest.mark.parametrize(("mode", "calls"), [("never", 4), ("always", 8), ("except_last", 7)])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_recompute_runs_each_forward_as_often_as_its_mode_says(mode: str, calls: int, schedule: str) -> None:
    counts = {"a": 0, "b": 0}

    def counted(name: str) -> Any:
        def fn(params: Any, x: torch.Tensor) -> torch.Tensor:
            counts[name] += 1
            return x * params
        return fn

    net = pipec.Pipeline("counted")
    value, y = net.input("x"), net.input("y")
    for name in counts:
        value = net.stage(name, counted(name), value, params=torch.ones(8, requires_grad=True))
    net.loss("mse", torch.nn.functional.mse_loss, value, y)
    plan = pipec.compile(net, 2, 4, schedule, recompute=mode)
    planned = [sum(task.kind is pipec.Kind.RECOMPUTE for task in row) for row in plan.tasks]
    with pipec.Runner(net, plan) as run:
        run.step(**models.data())
        assert counts == {"a": calls, "b": calls}
        assert planned == [calls - 4, calls - 4]
        run.evaluate(**models.data())
    assert counts == {"a": calls + 4, "b": calls + 4}


def test_one_microbatch_with_except_last_recomputes_nothing() -> None:
    calls = []
    net = models.of_modules(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    for stage in net.spec.stages:
        stage.fn.register_forward_hook(lambda *_: calls.append(1))
    with models.runner(net, 2, 1, recompute="except_last") as run:
        run.step(**models.data())
    assert len(calls) == 2


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 6])
@pytest.mark.parametrize("stages", [1, 2, 5])
def test_any_number_of_stages_and_microbatches(stages: int, count: int) -> None:
    theirs = models.chain(stages)
    given = models.data(7)
    expected = pipec.reference(theirs, count).step(**given)
    for devices in sorted({1, min(2, stages), stages}):
        mine = models.chain(stages)
        with models.runner(mine, devices, count) as run:
            got = run.step(**given)
        assert same([got.losses, got.outputs, gradients(mine)],
                    [expected.losses, expected.outputs, gradients(theirs)])


@pytest.mark.parametrize("placement", [[0, 0, 1], [0, 1, 0], [0, 0, 0], [1, 0, 1]])
def test_neighbours_on_one_device_and_devices_that_come_again(placement: list[int]) -> None:
    mine, theirs = models.chain(3), models.chain(3)
    plan = pipec.compile(mine, max(placement) + 1, 4, placement=placement)
    with pipec.Runner(mine, plan) as run:
        got = run.step(**models.data())
    expected = pipec.reference(theirs, 4).step(**models.data())
    assert same([got.losses, got.outputs, gradients(mine)], [expected.losses, expected.outputs, gradients(theirs)])
    borders = sum(a != b for a, b in itertools.pairwise(placement))
    copies = sum(task.kind is pipec.Kind.COPY for task in (plan.table.task(i) for i in range(len(plan))))
    assert copies == 2 * 4 * borders


def test_autocast_gives_the_same_dtypes_and_numbers_in_forward_recompute_and_backward() -> None:
    seen: dict[str, list[Any]] = {}

    def build(name: str) -> pipec.Pipeline:
        net = models.chain(3, loss=lambda h, y: (h.float() - y).pow(2).mean())
        for stage in net.spec.stages:
            def see(_: Any, args: Any, out: torch.Tensor, stage: str = stage.name) -> None:
                note = seen.setdefault(name, []).append
                note((stage, args[0].dtype, out.dtype))
                out.register_hook(lambda grad: note((stage, "backward", grad.dtype)))

            stage.fn.register_forward_hook(see)
        return net

    theirs = build("reference")
    with torch.autocast("cpu", torch.bfloat16):
        expected = pipec.reference(theirs, 4).step(**models.data())
    assert ("s1", torch.bfloat16, torch.bfloat16) in seen["reference"]
    for backend in ("threads", "replay"):
        for recompute in ("never", "always"):
            mine = build(f"{backend} {recompute}")
            with models.runner(mine, 3, recompute=recompute, backend=backend) as run, \
                    torch.autocast("cpu", torch.bfloat16):
                got = run.step(**models.data())
            assert set(seen[f"{backend} {recompute}"]) == set(seen["reference"])
            assert got.output.dtype == torch.bfloat16
            assert same([got.losses, got.outputs, gradients(mine)],
                        [expected.losses, expected.outputs, gradients(theirs)])


@pytest.mark.parametrize("backend", ["threads", "replay"])
def test_evaluation_and_training_under_one_autocast(backend: str) -> None:
    mine, theirs = models.chain(3), models.chain(3)
    with models.runner(mine, 3, backend=backend) as run, torch.autocast("cpu", torch.bfloat16):
        run.evaluate(**models.data())
        run.step(**models.data())
    with torch.autocast("cpu", torch.bfloat16):
        pipec.reference(theirs, 4).step(**models.data())
    assert same(gradients(mine), gradients(theirs))


class Penalised(nn.Module):
    """Differentiates inside its own forward, as a gradient penalty or a force field does."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        energy = self.layer(x).tanh().sum()
        (force,) = torch.autograd.grad(energy, x, create_graph=True)
        return x + force


def test_a_stage_may_differentiate_inside_its_forward_unless_it_is_recomputed() -> None:
    def build() -> pipec.Pipeline:
        torch.manual_seed(0)
        return models.of_modules(nn.Linear(WIDTH, WIDTH), Penalised(), nn.Linear(WIDTH, WIDTH))

    theirs = build()
    expected = pipec.reference(theirs, 4).step(**models.data())
    for devices, recompute in ((1, "never"), (3, {"a": "always", "c": "always"})):
        mine = build()
        with models.runner(mine, devices, recompute=recompute) as run:
            assert torch.equal(run.step(**models.data()).loss, expected.loss)
        assert same(gradients(mine), gradients(theirs))
    told = "recompute='never' for this stage"
    with models.runner(build(), 3, recompute="always") as run, pytest.raises(RuntimeError, match=told) as caught:
        run.step(**models.data())
    assert "stage 'b'" in caught.value.__notes__[0]


def test_an_expanded_gradient_crosses_a_border_as_autograd_made_it() -> None:
    for seed in range(8):  # dense copies of it add up in another order, in about half of these
        torch.manual_seed(seed)
        first, last = nn.Linear(8, 8), nn.Linear(8, 8)
        net = models.of_modules(first, lambda h: h.sum(1, keepdim=True).expand(-1, 8), last)
        x, y = torch.randn(7, 8), torch.randn(7, 8)
        nn.functional.mse_loss(last(first(x).sum(1, keepdim=True).expand(-1, 8)), y).backward()
        expected = [first.weight.grad, first.bias.grad, last.weight.grad, last.bias.grad]
        first.zero_grad()
        last.zero_grad()
        with models.runner(net, 2, 1) as run:
            run.step(x=x, y=y)
        assert same([first.weight.grad, first.bias.grad, last.weight.grad, last.bias.grad], expected)
