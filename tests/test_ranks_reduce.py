"""Gradients added up over processes: shared parameters, replicas of the pipeline, clipping and loss scaling."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from models import WIDTH, chain, data, gradients, of_modules, parameters, same
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

import pipec


class Head(nn.Module):
    """Uses another module's weight."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


def tied(stages: int) -> pipec.Pipeline:
    """Two pairs of stages that share a weight: first and last, second and the one before last."""
    torch.manual_seed(11)
    one, two = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
    middle: list[nn.Module] = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(stages - 4)]
    return of_modules(one, two, *middle, Head(two.weight), Head(one.weight))


OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), "adam": lambda p: torch.optim.Adam(p, lr=0.01),
}


def train_tied(rank: int, size: int, schedule: str, name: str, update: Any, replicas: int = 1) -> list[str]:
    net, plain = tied(4), tied(4)
    plan = pipec.compile(net, size, 4, schedule, update=update, data_parallel=replicas)
    loop = pipec.reference(plain, 4)
    other = OPTIMIZERS[name](parameters(plain))
    make: Any = {None: None, "stage": OPTIMIZERS[name], "all": OPTIMIZERS[name](parameters(net))}[update]
    found = []
    with pipec.Runner(net, plan, optimizer=make) as run:
        mine = OPTIMIZERS[name](list(run.parameters())) if update is None else None
        for step in range(10):
            given = data(8, step)
            result, expected = run.step(**given), loop.step(**given)
            if not same(result.losses, expected.losses):
                found.append(f"step {step}: loss {result.loss} instead of {expected.loss}")
            if mine is not None:
                if not any(same(p.grad, q.grad) for p, q in zip(parameters(net), parameters(plain), strict=True)):
                    found.append(f"step {step}: no gradient is equal")
                mine.step()
                mine.zero_grad()
            other.step()
            other.zero_grad()
        own = {id(p) for p in run.parameters()}
        found += [
            f"parameter {number}" for number, (p, q) in enumerate(zip(parameters(net), parameters(plain), strict=True))
            if id(p) in own and not same(p, q)
        ]
    return found


@pytest.mark.parametrize(("schedule", "name", "update"), [
    ("1f1b", "sgd", "stage"), ("zb-h1", "adam", "all"), ("gpipe", "adam", None), ("zb-v", "sgd", "stage"),
])
def test_shared_parameters_are_one_on_two_ranks(schedule: str, name: str, update: Any, crew2: Any) -> None:
    assert crew2(train_tied, 2, schedule, name, update) == [[], []]


def test_shared_parameters_are_one_on_four_ranks(crew4: Any) -> None:
    assert crew4(train_tied, 4, "1f1b", "adam", "stage") == [[]] * 4


def times_w(params: Tensor, x: Tensor) -> Tensor:
    return params * x


def tiny(rank: int) -> list[float]:
    """w = 2; y = 3 w, z = y w: the gradient is 6 w = 12, twice that in two steps."""
    w = torch.tensor([[2.0]], requires_grad=True)
    net = pipec.Pipeline("tiny")
    x = net.input("x")
    y = net.stage("first", times_w, x, params=w)
    net.loss("z", lambda value: value.sum(), net.stage("second", times_w, y, params=w), reduction="sum")
    with pipec.Runner(net, pipec.compile(net, 2)) as run:
        seen = []
        for _ in range(2):
            run.step(x=torch.tensor([[3.0]]))
            assert w.grad is not None
            seen.append(float(w.grad))
    return seen


def test_the_gradient_of_a_shared_parameter_is_the_sum(crew2: Any) -> None:
    assert crew2(tiny) == [[12.0, 24.0]] * 2


def tied_failure(rank: int) -> Any:
    """A failure before the sums are there: nothing has changed, and the next step is right."""
    net, plain = tied(4), tied(4)
    armed = [True]

    def trap(module: Any, grad_input: Any, grad_output: Any) -> None:
        if armed[0]:
            raise ValueError("a hook")

    net.spec.stages[0].fn.register_full_backward_hook(trap)
    with pipec.Runner(net, pipec.compile(net, 2, 4)) as run:
        with pytest.raises((ValueError, pipec.RankError)):
            run.step(**data())
        clean = all(g is None for g in gradients(net))
        armed[0] = False
        run.step(**data())
        pipec.reference(plain, 4).step(**data())
        own = {id(p) for p in run.parameters()}
        return clean, [
            same(p.grad, q.grad) for p, q in zip(parameters(net), parameters(plain), strict=True) if id(p) in own
        ]


def test_a_failure_leaves_no_sum_behind(crew2: Any) -> None:
    for clean, equal in crew2(tied_failure):
        assert clean
        assert all(equal)
        assert equal


# -- replicas ---------------------------------------------------------------------------------------------------------


def replicated(rank: int, schedule: str, sizes: list[int], how: str, early: bool, with_mesh: bool) -> list[str]:
    """dp=2, pp=2: the same as one process with both parts of the data, within rounding."""
    torch.set_default_dtype(torch.float64)
    try:
        build = {"chain": lambda: chain(4), "tied": lambda: tied(4), "count": counted}[how]
        net, plain = build(), build()
        if rank >= 2:  # replicas begin with the values of the first
            with torch.no_grad():
                for p in parameters(net):
                    p.add_(1.0)
        update: Any = {"update": "stage", "update_early": True} if early else {}
        plan = pipec.compile(net, 2, 4, schedule, data_parallel=2, **update)
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp")) if with_mesh else None
        loop = pipec.reference(plain, 1)
        optimizer = OPTIMIZERS["sgd"] if early else None
        other = OPTIMIZERS["sgd"](parameters(plain))
        found = []
        with pipec.Runner(net, plan, mesh=mesh, optimizer=optimizer) as run:
            own = {id(p) for p in run.parameters()}
            for step in range(3):
                parts = [{k: v.double() for k, v in data(rows, 10 * step + n).items()} for n, rows in enumerate(sizes)]
                whole = {k: torch.cat([part[k] for part in parts]) for k in parts[0]}
                result, expected = run.step(**parts[rank // 2]), loop.step(**whole)
                if not torch.allclose(result.loss, expected.loss, rtol=1e-12):
                    found.append(f"step {step}: loss {result.loss} instead of {expected.loss}")
                if early:
                    other.step()
                    other.zero_grad()
                for number, (p, q) in enumerate(zip(parameters(net), parameters(plain), strict=True)):
                    a, b = (p, q) if early else (p.grad, q.grad)
                    if id(p) in own and not torch.allclose(a, b, rtol=1e-10):
                        found.append(f"step {step}: parameter {number}")
        return found
    finally:
        torch.set_default_dtype(torch.float32)


def counted() -> pipec.Pipeline:
    """A sum divided by how many targets are positive."""
    return chain(4, loss=lambda h, y: (((h - y) ** 2) * (y > 0)).sum(), count=lambda y: float((y > 0).sum()))


@pytest.mark.parametrize(("schedule", "sizes", "how", "early", "with_mesh"), [
    ("1f1b", [8, 8], "chain", False, False), ("zb-h1", [10, 6], "chain", False, True),
    ("gpipe", [8, 12], "count", False, False), ("1f1b", [8, 8], "tied", False, True),
    ("1f1b", [8, 6], "chain", True, False),
])
def test_replicas_add_up_to_the_whole(
    schedule: str, sizes: list[int], how: str, early: bool, with_mesh: bool, crew4: Any
) -> None:
    assert crew4(replicated, schedule, sizes, how, early, with_mesh) == [[]] * 4


def stay_equal(rank: int) -> list[Tensor]:
    net = tied(4)
    plan = pipec.compile(net, 2, 4, update="stage", data_parallel=2)
    with pipec.Runner(net, plan, optimizer=OPTIMIZERS["adam"]) as run:
        for step in range(4):
            run.step(**data(8, 7 * step + rank // 2))
        return [p.detach() for p in run.parameters()]


def test_replicas_stay_bit_equal(crew4: Any) -> None:
    first, second, third, fourth = crew4(stay_equal)
    assert same(first, third)
    assert same(second, fourth)


def traced(rank: int) -> dict[str, tuple[float, float]]:
    """The second replica is late with the sum of its last stage; the first goes on meanwhile."""
    net = chain(2)
    if rank:
        net.spec.stages[1].fn.register_full_backward_hook(lambda *_: time.sleep(0.1))
    with pipec.Runner(net, pipec.compile(net, 1, 4, data_parallel=2)) as run:
        run.step(**data(8, rank))
        return {str(item.task): (item.start, item.end) for item in run.trace().intervals}


def test_the_trace_shows_what_runs_beside_a_reduce(crew2: Any) -> None:
    first, _ = crew2(traced)
    assert first["1G0"][0] >= first["1B3"][1]
    assert first["1G0"][0] < first["0B3"][0] < first["0B3"][1] < first["1G0"][1]


def test_a_plan_with_replicas_needs_their_processes() -> None:
    net = chain(4)
    plan = pipec.compile(net, 2, 4, data_parallel=2)
    with pytest.raises(pipec.RunError, match=r"data_parallel=2 .* 4 processes"):
        pipec.Runner(net, plan)
    with pytest.raises(pipec.ScheduleError, match="data_parallel must be a whole number"):
        pipec.compile(net, 2, data_parallel=0)


# -- what needs all gradients ---------------------------------------------------------------------------------------


class Fixed(nn.Module):
    """A scalar parameter whose gradient is ``slope`` for every row."""

    def __init__(self, slope: float) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(()))
        self.slope = slope

    def forward(self, x: Tensor) -> Tensor:
        return x + self.slope * self.w


def sloped(*slopes: float) -> pipec.Pipeline:
    return of_modules(*(Fixed(slope) for slope in slopes), loss=lambda h, y: h.mean())


def clipped(rank: int) -> tuple[float, list[float]]:
    """Gradients 3 and 4: their norm is 5."""
    net = sloped(3.0, 4.0)
    with pipec.Runner(net, pipec.compile(net, 2, 2)) as run:
        run.step(**data())
        norm = run.clip_grad_norm_(1.0)
        return float(norm), [float(p.grad) for p in run.parameters()]


def test_the_norm_is_that_of_all_ranks(crew2: Any) -> None:
    (one, first), (two, second) = crew2(clipped)
    assert one == two == 5.0
    assert first == [pytest.approx(0.6, rel=1e-5)]
    assert second == [pytest.approx(0.8, rel=1e-5)]


def clip_tied(rank: int, size: int) -> list[Any]:
    """Shared parameters are counted once, and the numbers are those of one process, by hook and by hand."""
    found: list[Any] = []
    net, plain, hooked = tied(4), tied(4), tied(4)
    with pipec.Runner(net, pipec.compile(net, size, 4)) as run:
        run.step(**data())
        norm = run.clip_grad_norm_(0.05)
        pipec.reference(plain, 4).step(**data())
        expected = torch.nn.utils.clip_grad_norm_(parameters(plain), 0.05)
        own = {id(p) for p in run.parameters()}
        found.append(same(norm, expected))
        found += [same(p.grad, q.grad) for p, q in zip(parameters(net), parameters(plain), strict=True) if id(p) in own]
    plan = pipec.compile(hooked, size, 4, update="stage")
    made = pipec.Runner(hooked, plan, optimizer=OPTIMIZERS["sgd"], before_update=lambda _: made.clip_grad_norm_(0.05))
    with made:
        made.step(**data())
        own = {id(p) for p in made.parameters()}
    OPTIMIZERS["sgd"](parameters(plain)).step()
    return found + [same(p, q) for p, q in zip(parameters(hooked), parameters(plain), strict=True) if id(p) in own]


@pytest.mark.parametrize("size", [2, 4])
def test_clipping_has_the_numbers_of_one_process(size: int, crew2: Any, crew4: Any) -> None:
    for found in (crew2 if size == 2 else crew4)(clip_tied, size):
        assert found
        assert all(found)


def hook_fails(rank: int) -> str:
    """A hook that fails on one rank before it joins the others in clipping."""
    net = chain(2)

    def hook(_: Any) -> None:
        if rank:
            raise ValueError("no clipping today")
        run.clip_grad_norm_(1.0)

    run = pipec.Runner(net, pipec.compile(net, 2, 2, update="stage"), optimizer=OPTIMIZERS["sgd"], before_update=hook)
    with run, pytest.raises((ValueError, pipec.RankError)) as error:
        run.step(**data())
    return f"{error.value}"


def test_a_hook_that_fails_on_one_rank_ends_the_wait_of_the_others(crew2: Any) -> None:
    first, second = crew2(hook_fails)
    assert second == "no clipping today"
    assert "rank 1 failed: ValueError: no clipping today" in first


def scaled(rank: int, broken: bool) -> tuple[bool, float, list[float]]:
    """An inf in stage 2 only: no stage steps, every rank's scale is halved once."""
    net = sloped(3.0, float("inf") if broken else 4.0)
    plan = pipec.compile(net, 2, 2, update="stage")
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    with pipec.Runner(net, plan, optimizer=lambda p: torch.optim.SGD(p, lr=0.5), scaler=scaler) as run:
        skipped = run.step(**data()).skipped
        return skipped, scaler.get_scale(), [float(p) for p in run.parameters()]


def test_an_inf_anywhere_skips_every_stage(crew2: Any) -> None:
    assert crew2(scaled, True) == [(True, 512.0, [1.0])] * 2
    assert crew2(scaled, False) == [(False, 1024.0, [-0.5]), (False, 1024.0, [-1.0])]


def scaled_by_the_script(rank: int, size: int, replicas: int) -> Any:
    """The script's own optimizer and scaler, with clipping, and an inf in the gradient of one stage in two of six
    steps; beside one process with one optimizer for all."""
    found = []
    for many in (True, False):
        net, armed = tied(4), [False]
        weight = net.spec.stages[3].fn.weight
        weight.register_hook(lambda g, armed=armed: g * (torch.inf if armed[0] else 1.0))
        plan = pipec.compile(net, size, 4, data_parallel=replicas if many else 1)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
        with pipec.Runner(net, plan, backend=None if many else "replay", scaler=scaler) as run:
            mine, scales = torch.optim.SGD(list(run.parameters()), lr=0.5), []
            for step in range(6):
                armed[0] = step in (1, 4) and (not many or rank // size == 0)
                run.step(**data(8, step))
                scaler.unscale_(mine)
                run.clip_grad_norm_(0.1)
                scaler.step(mine)
                scaler.update()
                mine.zero_grad()
                scales.append(scaler.get_scale())
            found.append((scales, {id(p) for p in run.parameters()}, parameters(net)))
    (scales, own, mine), (expected, _, theirs) = found
    assert expected == [1024.0, 512.0, 512.0, 1024.0, 512.0, 512.0]
    return scales == expected, [torch.allclose(p, q) for p, q in zip(mine, theirs, strict=True) if id(p) in own]


def test_the_scripts_own_scaler_skips_on_every_rank(crew2: Any, crew4: Any) -> None:
    for answers in (crew2(scaled_by_the_script, 2, 1), crew4(scaled_by_the_script, 2, 2)):
        assert all(scales and equal and all(equal) for scales, equal in answers)


def other_scales(rank: int) -> list[str]:
    told = []
    for scaler in (torch.amp.GradScaler("cpu", init_scale=8.0 * (rank + 1)),
                   torch.amp.GradScaler("cpu", init_scale=8.0, enabled=rank == 0)):
        net = chain(2)
        with pytest.raises(pipec.RankError) as error:
            pipec.Runner(net, pipec.compile(net, 2), scaler=scaler)
        told.append(str(error.value).split(". ")[-1])
    return told


def test_ranks_scale_alike(crew2: Any) -> None:
    assert crew2(other_scales) == [["scaler: scale 8 on rank 0; scale 16 on rank 1",
                                    "scaler: scale 8 on rank 0; none on rank 1"]] * 2
