"""Ranks that do not have the same: an error on all of them, in words, before any waits for another."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import WIDTH, chain, data, of_modules, same, snapshot
from test_ranks_hosts import apart
from torch import nn
from torch.nn import functional as F

import pipec


def told(make: Callable[[], Any]) -> str:
    """What an attempt raises, "nothing" otherwise."""
    try:
        make()
        return "nothing"
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1)


def started(net: Any, plan: Any, **how: Any) -> None:
    pipec.Runner(net, plan, **how).close()


# -- before the ranks meet ------------------------------------------------------------------------------------------


def alone_wrong(rank: int) -> list[str]:
    """Rank 1 cannot make its runner, or would make other groups; then all can."""
    net, odd = chain(2), rank == 1
    plan = pipec.compile(net, 2, 4)
    replicas = pipec.compile(net, 1, 4, data_parallel=2)
    attempts: list[Callable[[], Any]] = [
        lambda: started(chain(3) if odd else net, plan),
        lambda: started(net, pipec.compile(net, 1, 4) if odd else plan),
        lambda: started(net, replicas if odd else plan),
        lambda: started(net, "a plan" if odd else plan),  # type: ignore[arg-type]
        lambda: started(net, plan, backend="nothing" if odd else None),
        lambda: started(net, plan, outputs="nowhere" if odd else "owner"),
        lambda: started(net, plan, devices=["cpu"] if odd else None),
        lambda: started(net, plan, delay=3 if odd else None),
        lambda: started(net, plan),
    ]
    return [told(attempt) for attempt in attempts]


def test_what_goes_wrong_on_one_rank_before_they_meet_is_told_to_all(crew2: Any) -> None:
    first, second = crew2(alone_wrong)
    differ = "RankError: the ranks do not run the same plan: 3 problems\n  1. devices: 2 on rank 0; 1 on rank 1"
    assert first.pop(2).startswith(differ)
    assert second.pop(2).startswith(differ)
    assert (first.pop(), second.pop()) == ("nothing", "nothing")
    parts = ("compiled for another pipeline", "the plan has 1 device", "Runner(pipeline, plan)", "unknown backend",
             "outputs must be", "the plan has 2 devices, got 1", "delay= takes")
    for other, own, part in zip(first, second, parts, strict=True):
        assert part in own
        assert other == f"RankError: rank 1 could not make its runner: {own}"


def never_made(rank: int) -> str:
    if rank == 1:
        return "nothing"
    net = chain(2)
    return told(lambda: started(net, pipec.compile(net, 2, 4), timeout=0.5))


def test_a_rank_that_makes_no_runner_is_named() -> None:
    from ranks import crew

    with crew(2) as made:
        first, _ = made(never_made)
    assert first.startswith("RankError: rank 1 made no runner within 0.5 s after this rank; every rank makes the same")


# -- what a plan and a pipeline are ---------------------------------------------------------------------------------


def wired(kind: int) -> pipec.Pipeline:
    """A pipeline that is put together in another way for every number."""
    torch.manual_seed(0)
    net = pipec.Pipeline("wired")
    x, y = net.input("x"), net.input("y")
    a = net.stage("a", lambda v: (v, v), x)
    b = net.stage("b", nn.Linear(WIDTH, WIDTH), a[1 if kind == 1 else 0])
    c = net.stage("c", torch.sub, *((b, x) if kind == 2 else (x, b)))
    d = net.stage("d", torch.add, c, b if kind == 3 else pipec.skip(b))
    net.output(a[1 if kind == 4 else 0], "first")
    net.output(d, "last", dim=None if kind == 5 else 0)
    net.loss("mse", F.mse_loss, *((y, d) if kind == 6 else (d, y)))
    return net


class Listed:
    """A schedule by a list of tasks, another one on every rank, with one name."""

    name = "listed"

    def __init__(self, late: bool) -> None:
        self.late = late

    def order(self, problem: Any) -> Any:
        from pipec.schedules import REGISTRY

        return REGISTRY["gpipe" if self.late else "1f1b"]().order(problem)


def put_together(rank: int) -> list[str]:
    nets = [wired(kind * rank) for kind in range(1, 7)]
    plans = [(net, pipec.compile(net, 2, 4)) for net in nets]
    net = chain(2)
    plans.append((net, pipec.compile(net, 2, 4, schedule=Listed(rank == 1))))
    return [told(lambda net=net, plan=plan: started(net, plan)) for net, plan in plans]


def test_pipelines_that_are_put_together_in_another_way(crew2: Any) -> None:
    first, second = crew2(put_together)
    assert first == second
    parts = (
        "stage 'b': reads a[0] on rank 0; reads a[1] on rank 1",
        "stage 'c': reads x, b on rank 0; reads b, x on rank 1",
        "value 'b': to c and d, skip to d on rank 0; to c and d on rank 1",
        "output 'first': a[0] joined along 0 on rank 0; a[1] joined along 0 on rank 1",
        "output 'last': d joined along 0 on rank 0; d joined along None on rank 1",
        "loss 'mse': reads d, y, reduction='mean' on rank 0; reads y, d, reduction='mean' on rank 1",
        "device 0, task 2: 0B0 on rank 0; 0F2 on rank 1\n  2. device 1, task 1: 1B0 on rank 0; 1F1 on rank 1",
    )
    for text, part in zip(first, parts, strict=True):
        assert text.startswith("RankError: the ranks do not run the same plan")
        assert part in text


# -- what several ranks hold ----------------------------------------------------------------------------------------


def changed(kind: str) -> nn.Module:
    layer: nn.Module = nn.Linear(WIDTH, WIDTH, bias=kind != "bias")
    if kind == "shape":
        layer = nn.Linear(WIDTH, WIDTH + 1)
    if kind == "dtype":
        layer.double()
    if kind == "frozen":
        layer.weight.requires_grad_(False)
    if kind == "order":
        bias = layer.bias
        del layer.bias
        weight = layer.weight
        del layer.weight
        layer.bias, layer.weight = bias, weight
    return layer


KINDS = ("shape", "dtype", "frozen", "bias", "order", "none")


def held(rank: int, shared: bool) -> list[str]:
    """Rank 1's copy of what both hold is another one."""
    def attempt(kind: str) -> None:
        layer = changed(kind if rank else "none")
        if shared:
            other = nn.Linear(WIDTH, WIDTH)
            other.weight = layer.weight
            net, how = of_modules(layer, other), {"devices": 2}
        else:
            net, how = of_modules(layer), {"devices": 1, "data_parallel": 2}
        with pipec.Runner(net, pipec.compile(net, microbatches=4, update="stage", **how), optimizer=sgd) as run:
            run.step(**data(seed=0 if shared else rank))

    return [told(lambda kind=kind: attempt(kind)) for kind in (KINDS[:3] if shared else KINDS)]


def test_shared_parameters_have_one_form(crew2: Any) -> None:
    first, second = crew2(held, True)
    assert first == second
    for text, form in zip(first, ("9x8 float32", "8x8 float64", "8x8 float32, not trained"), strict=True):
        assert f"the parameter of stages 'a' (weight) and 'b' (weight): 8x8 float32 on rank 0; {form} on rank 1" in text


def test_replicas_have_one_form(crew2: Any) -> None:
    first, second = crew2(held, False)
    assert first == second
    parts = (
        "stage 'a', weight: 8x8 float32 on rank 0; 9x8 float32 on rank 1",
        "stage 'a', bias: 8 float32 on rank 0; 8 float64 on rank 1",
        "stage 'a', weight: 8x8 float32 on rank 0; 8x8 float32, not trained on rank 1",
        "stage 'a', bias: 8 float32 on rank 0; nothing on rank 1",
        "stage 'a', order of parameters and buffers: weight, bias on rank 0; bias, weight on rank 1",
    )
    assert first.pop() == "nothing"
    for text, part in zip(first, parts, strict=True):
        assert part in text


def scaled(rank: int) -> list[str]:
    """Gradient scalers of other options, and one whose scale was changed later."""
    def attempt(later: bool = False, **how: Any) -> None:
        net = chain(2)
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0, **(how if rank else {}))
        plan = pipec.compile(net, 2, 4, update="stage")
        with pipec.Runner(net, plan, optimizer=sgd, scaler=scaler) as run:
            run.step(**data())
            if later and rank:
                scaler.update(512.0)
            before = snapshot(net)
            try:
                run.step(**data())
            finally:
                assert same(snapshot(net), before) == bool(later)

    return [told(lambda: attempt(growth_interval=7)), told(lambda: attempt(enabled=False)), told(lambda: attempt(True))]


def test_gradient_scalers_are_alike(crew2: Any) -> None:
    for interval, enabled, later in crew2(scaled):
        assert interval.endswith("1 problem\n  1. the scaler's growth_interval: 2000 on rank 0; 7 on rank 1")
        assert enabled.endswith("1 problem\n  1. scaler: scale 256 on rank 0; none on rank 1")
        assert later.startswith("RankError: the gradient scaler of rank 0 has scale 256, that of rank 1 512; make them")


# -- calls ----------------------------------------------------------------------------------------------------------


def without_grad(rank: int) -> list[str]:
    """Rank 1 steps where gradients are off; it tells the others, and the next step of all works."""
    found = []
    for how in ({}, {"schedule": "pipedream", "update": "stage"}):
        net = chain(2)
        plan = pipec.compile(net, 2, 4, **how)
        with pipec.Runner(net, plan, optimizer=sgd if how else None) as run, torch.set_grad_enabled(rank == 0):
            found.append(told(lambda run=run: run.step(**data())))
            with torch.enable_grad():
                run.step(**data())
                if how:
                    run.flush()
    return found


def test_a_step_without_gradients_on_one_rank_is_told_to_all(crew2: Any) -> None:
    first, second = crew2(without_grad)
    for other, own in zip(first, second, strict=True):
        assert own == "RunError: step() needs gradients but runs under no_grad or inference_mode; use evaluate()"
        assert other.startswith(f"RankError: rank 1 failed: {own}")


def traced_by_one(rank: int) -> list[str]:
    """Only rank 1 looks at the trace; and after the end nobody can."""
    net = chain(2)
    with pipec.Runner(net, pipec.compile(net, 2, 4)) as run:
        run.step(**data())
        run.trace()
        found = [told(lambda: run.trace() if rank else run.step(**data()))]
    return [*found, *(told(call) for call in (run.trace, lambda: run.clip_grad_norm_(1.0)))]


def test_a_trace_is_a_call_of_all(crew2: Any) -> None:
    for found, *closed in crew2(traced_by_one):
        assert "trace(); all ranks make the same calls" in found or "at trace(), rank" in found
        assert all(text.startswith("RunError: this runner was closed, and has left the other ranks") for text in closed)


def hook_fails(rank: int, both: bool) -> tuple[str, bool, bool]:
    """A hook of rank 1 that fails after it clipped; rank 0 has one as well, or none: nobody updates."""
    net = chain(2)
    broken = [False, True, False]

    def hook(_: Any) -> None:
        if both:
            run.clip_grad_norm_(1.0)
        if broken.pop() and rank:
            raise ValueError("not today")

    plan = pipec.compile(net, 2, 4, update="stage")
    run = pipec.Runner(net, plan, optimizer=sgd, before_update=hook if both or rank else None)
    with run:
        run.step(**data())
        before = snapshot(net)
        found = told(lambda: run.step(**data()))
        unchanged = same(snapshot(net), before)
        run.step(**data())
        return found, unchanged, not same(snapshot(net), before)


@pytest.mark.parametrize("both", [True, False])
def test_a_hook_that_fails_on_one_rank_leaves_all_as_they_were(both: bool, crew2: Any) -> None:
    first, second = crew2(hook_fails, both)
    assert second == ("ValueError: not today", True, True)
    assert first[0].startswith("RankError: rank 1 failed: ValueError: not today (raised in before_update")
    assert first[1:] == (True, True)


# -- results --------------------------------------------------------------------------------------------------------


def odd_outputs(rank: int, outputs: str, kind: str) -> tuple[str, bool]:
    """The second step's output cannot be joined, or not be sent; parameters and gradients stay as they were."""
    torch.manual_seed(0)
    net = pipec.Pipeline("odd")
    x, y = net.input("x"), net.input("y")
    value = net.stage("b", nn.Linear(WIDTH, WIDTH), net.stage("a", nn.Linear(WIDTH, WIDTH), x))
    count = [0]

    def odd(value: torch.Tensor) -> Any:
        count[0] += 1
        if not 4 < count[0] <= 8:
            return value.detach()
        return torch.zeros(2, count[0]) if kind == "shape" else {"value": value.detach(), "function": lambda: 1}

    net.output(net.stage("odd", odd, value), "o")
    net.loss("mse", F.mse_loss, value, y)
    plan = pipec.compile(net, 2, 4, placement=[0, 1, 1], update="stage")
    with pipec.Runner(net, plan, optimizer=sgd, outputs=outputs) as run:
        run.step(**data())
        before = snapshot(net)
        found = told(lambda: run.step(**data()))
        unchanged = same(snapshot(net), before)
        run.step(**data())
    return found, unchanged


@pytest.mark.parametrize(("outputs", "kind", "text"), [
    ("owner", "shape", "output 'o' cannot be joined"), ("all", "shape", "output 'o' cannot be joined"),
    ("all", "lambda", "an output cannot be sent to the other ranks"),
])
def test_an_output_that_cannot_be_had_fails_on_all_before_any_update(
    outputs: str, kind: str, text: str, crew2: Any
) -> None:
    for rank, (found, unchanged) in enumerate(crew2(odd_outputs, outputs, kind)):
        assert text in found
        assert found.startswith("RankError: rank 1 failed: RunError" if rank == 0 else "RunError")
        assert unchanged


@pytest.mark.parametrize("ways", [("sockets",), ()], ids=["sockets", "gloo"])
def test_between_hosts_too(ways: Any, crew2: Any) -> None:
    first, second = crew2(wrong_apart, ways)
    assert first[-1] == second[-1] == "nothing"
    assert "could not make its runner" in first[0]
    assert "trace(); all ranks make the same calls" in first[-2] or "at trace(), rank" in first[-2]


def wrong_apart(rank: int, ways: tuple[str, ...]) -> list[str]:
    with apart(ways):
        net = chain(2)
        return [*alone_wrong(rank), traced_by_one(rank)[0], told(lambda: started(net, pipec.compile(net, 2, 4)))]
