"""Backwards in two halves: the numbers are those of the whole backward, and what only the first half reads is freed."""

from __future__ import annotations

from typing import Any

import models
import pytest
import torch
from halves import STAGES, halves, three
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from models import buffers, gradients, kept_streams, parameters, recipes, same
from plans import any_order
from random_nets import two_steps_equal_the_reference
from torch import Tensor, nn
from torch.nn import functional as F

import pipec

__all__ = ["kept_streams"]


@settings(max_examples=250, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(st.data())
def test_any_plan_with_split_backwards_gives_the_numbers_of_the_reference(draw: Any) -> None:
    recipe = draw.draw(recipes())
    how = draw.draw(models.options(recipe))
    if isinstance(how["schedule"], str):
        how["schedule"] = halves(how["schedule"], draw.draw(st.integers(0, 1000)))
    else:
        how["schedule"] = any_order(draw.draw(st.integers(0, 1000)), split=True)
    two_steps_equal_the_reference(draw, recipe, how)


def dense(tensors: Any) -> list[Any]:
    return [t.to_dense() if t is not None and t.is_sparse else t for t in tensors]


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
@pytest.mark.parametrize("kind", STAGES)
def test_every_kind_of_stage_has_the_numbers_of_its_whole_backward(kind: str) -> None:
    theirs = three(kind)
    loop = pipec.reference(theirs, 4)
    expected = [loop.step(**models.data(8, seed)) for seed in range(2)]
    calls = [getattr(stage.fn, "calls", 0) for stage in theirs.spec.stages]
    for devices, recompute, backend in ((1, "never", "replay"), (2, "always", "threads"), (4, "never", "threads")):
        mine = three(kind)
        schedule = halves("1f1b", devices)
        if kind == "mixed":  # a thread that leaves autocast clears the casts of all threads
            backend = "replay"
        with models.runner(mine, devices, 4, schedule, recompute=recompute, backend=backend) as run:
            got = [run.step(**models.data(8, seed)) for seed in range(2)]
        for one, other in zip(got, expected, strict=True):
            assert same([one.losses, one.outputs], [other.losses, other.outputs])
        assert same(dense(gradients(mine)), dense(gradients(theirs))), (devices, recompute)
        assert same(buffers(mine), buffers(theirs))
        assert [getattr(stage.fn, "calls", 0) for stage in mine.spec.stages] == calls


# -- failures, notices, checks -----------------------------------------------------------------------------------


class Failing(nn.Module):
    """A weight whose hook fails at its ``turn``-th call."""

    def __init__(self) -> None:
        super().__init__()
        self.line, self.turns, self.turn = nn.Linear(8, 8), 0, 0

    def forward(self, x: Tensor) -> Any:
        weight = self.line.weight * 1.0
        if weight.requires_grad:
            weight.register_hook(self.check)  # type: ignore[no-untyped-call]
        return F.linear(x, weight, self.line.bias)

    def check(self, _: Tensor) -> None:
        self.turns += 1
        if self.turns == self.turn:
            raise ZeroDivisionError("no more")


@pytest.mark.parametrize("backend", ["threads", "replay"])
@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("update", [None, "stage"])
def test_a_failure_in_a_weight_half_leaves_everything_as_before(stage: int, update: str | None, backend: str) -> None:
    def build() -> pipec.Pipeline:
        torch.manual_seed(1)
        return models.of_modules(*(Failing() if s == stage else nn.Linear(8, 8) for s in range(3)))

    mine, theirs = build(), build()
    how: Any = {"optimizer": lambda p: torch.optim.SGD(p, 0.1)} if update else {}
    with models.runner(mine, 3, 4, halves(delay=2), update=update, backend=backend, **how) as run, models.runner(
        theirs, 3, 4, "1f1b", update=update, backend=backend, **how
    ) as other:
        for net, own in ((mine, run), (theirs, other)):
            own.step(**models.data(8, 0))
            if net is mine:
                before = models.snapshot(mine)
                failing: Any = mine.spec.stages[stage].fn
                failing.turn = failing.turns + 3
                with pytest.raises(ZeroDivisionError) as error:
                    run.step(**models.data(8, 1))
                told = f"stage '{'abc'[stage]}', microbatch 2, BACKWARD_WEIGHT ({stage}W2)"
                assert told in str(error.value.__notes__)  # type: ignore[attr-defined]
                assert same(models.snapshot(mine), before)
            own.step(**models.data(8, 1))
        assert same(gradients(mine), gradients(theirs))
        assert same([p.detach() for p in parameters(mine)], [p.detach() for p in parameters(theirs)])


def notices(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "pipec"]


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        ("custom", "the gradients of 3 of 5 parameters come with the input half of its split backward, not with the "
         "weight half, because of an autograd Function or a compiled graph, whose one backward makes all its"),
        ("checkpointed", "because of tensors saved through hooks (a checkpoint, an offload), which may be asked"),
        ("hook on operation", "because of hooks on an operation; the numbers are the same"),
        ("reuse dtd", "because of a parameter used several times, in different ways"),
    ],
)
def test_a_backward_that_cannot_be_split_is_told_once_per_stage(
    kind: str, told: str, caplog: pytest.LogCaptureFixture
) -> None:
    net = three(kind)
    with models.runner(net, 2, 4, halves()) as run:
        for _ in range(2):
            run.step(**models.data(8))
    texts = notices(caplog)
    assert [text[:16] for text in sorted(texts)] == ["pipec: stage 'b'", "pipec: stage 'd'"]  # a reads no gradient
    if kind != "custom":
        assert told in texts[0]


def test_what_can_be_split_is_not_told(caplog: pytest.LogCaptureFixture) -> None:
    kinds = "attention", "convolution", "lstm", "reuse ddd", "reuse hhh", "parametrised", "mixed", "hook on tensor"
    for kind in kinds:
        with models.runner(three(kind), 2, 4, halves(), backend="replay") as run:
            run.step(**models.data(8))
        assert not notices(caplog), kind


def test_compiled_stages_are_told_before_anything_runs(caplog: pytest.LogCaptureFixture) -> None:
    def build(compiled: bool) -> pipec.Pipeline:
        torch.manual_seed(2)
        middle = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
        return models.of_modules(
            nn.Linear(8, 8), torch.compile(middle, backend="aot_eager") if compiled else middle, nn.Linear(8, 8)
        )

    mine, theirs = build(True), build(False)
    pipec.reference(theirs, 4).step(**models.data(8))
    with models.runner(mine, 2, 4, halves(delay=2)) as run:
        told = notices(caplog)
        assert len(told) == 1
        assert told[0].startswith("pipec: stage 'b' is compiled by torch.compile: the gradients of what is compiled")
        run.step(**models.data(8))
        assert notices(caplog) == told
    with models.runner(build(True), 2, 4, "1f1b"):
        assert notices(caplog) == told
    for one, two in zip(gradients(mine), gradients(theirs), strict=True):
        torch.testing.assert_close(one, two)


def test_check_compares_the_gradients_of_both_halves() -> None:
    net = models.chain(3)
    plan = pipec.compile(net, 2, 4, halves(delay=1))
    report = pipec.check(net, models.data(8), plan)
    assert report
    assert report.compared == pipec.check(net, models.data(8), pipec.compile(net, 2, 4, "1f1b")).compared


def test_weight_halves_in_any_order_add_in_the_order_of_the_microbatches() -> None:
    def policy(problem: Any) -> Any:
        forwards = [(0, 0, m) for m in range(4)]
        return [[*forwards, (3, 0, 1), (3, 0, 0), (4, 0, 1), (3, 0, 3), (3, 0, 2), (4, 0, 3), (4, 0, 0), (4, 0, 2)]]

    mine, theirs = models.chain(1), models.chain(1)
    data = models.data(8)
    data["x"][2:4] *= 1e4  # so that the order of additions shows
    pipec.reference(theirs, 4).step(**data)
    with models.runner(mine, 1, 4, policy) as run:
        run.step(**data)
    assert same(gradients(mine), gradients(theirs))
