"""Weight sequences worked out by hand, and how large a step a quadratic bears at a given staleness."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import pipec


class Square(nn.Module):
    """w^2 x."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.w.pow(2) * x


class Scale(Square):
    """w x."""

    def forward(self, x: Tensor) -> Tensor:
        return self.w * x


def pipeline(*modules: nn.Module, square: bool = False) -> pipec.Pipeline:
    net = pipec.Pipeline("one number")
    value = net.input("x")
    for number, module in enumerate(modules):
        value = net.stage(f"s{number}", module, value)
    net.loss("loss", (lambda v: v.pow(2).sum() / 2) if square else torch.sum, value, reduction="sum")
    return net


ONE = torch.ones(1, dtype=torch.float64)


@pytest.mark.parametrize("backend", ["replay", "threads"])
@pytest.mark.parametrize(("schedule", "expected"), [
    ("pipedream", [(0.8, 0.9), (0.62, 0.8), (0.492, 0.736)]),
    ("live-weights", [(0.8, 0.9), (0.656, 0.8), (0.55104, 0.736)]),
])
def test_two_stages_by_hand(schedule: str, expected: list[tuple[float, float]], backend: str) -> None:
    first, second = Square(), Scale()
    net = pipeline(first, second)
    plan = pipec.compile(net, 2, 1, schedule, update="stage")
    ones, twos = [], []
    with pipec.Runner(net, plan, optimizer=lambda params: torch.optim.SGD(params, lr=0.1), backend=backend) as run:
        for _ in range(5):
            run.step(x=ONE)
            ones.append(first.w.item())
            twos.append(second.w.item())
    # a step of the second stage ends with the forward of its minibatch, and one of the first with what that brings
    assert ones[2:] == pytest.approx([w1 for w1, _ in expected], abs=1e-12)
    assert twos[1:4] == pytest.approx([w2 for _, w2 in expected], abs=1e-12)


def test_one_at_a_time_is_sequential_sgd() -> None:
    first, second = Square(), Scale()
    net = pipeline(first, second)
    plan = pipec.compile(net, 2, 1, "pipedream", update="stage")
    with pipec.Runner(net, plan, optimizer=lambda params: torch.optim.SGD(params, lr=0.1)) as run:
        found = []
        for _ in range(3):
            run.step(x=ONE)
            run.flush()
            found += [first.w.item(), second.w.item()]
    assert found == pytest.approx([0.8, 0.9, 0.656, 0.836, 0.546317, 0.792966], abs=1e-6)


def spread(run: pipec.Runner, weight: Tensor, steps: int) -> bool:
    """Whether the weight swings further at the end of a run than in its middle."""
    seen = []
    for _ in range(steps):
        run.step(x=ONE)
        seen.append(abs(weight.item()))
    part = steps // 5
    return max(seen[-part:]) > max(seen[2 * part : 3 * part])


# tau, momentum, the largest stable lr: (2/lambda) sin(pi/(4 tau + 2)) without momentum
LIMITS = [(0, 0.0, 2.0), (1, 0.0, 1.0), (2, 0.0, 0.618034), (5, 0.0, 0.284630), (10, 0.0, 0.149460),
          (10, 0.5, 0.06962), (10, 0.9, 0.01139)]


@pytest.mark.parametrize(("tau", "momentum", "limit"), LIMITS)
def test_the_quadratics_limit(tau: int, momentum: float, limit: float) -> None:
    """The first of tau + 1 stages holds the one weight, stashed: its gradient is tau updates late."""
    for factor, grows in ((0.97, False), (1.03, True)):
        weight = Scale()
        net = pipeline(weight, *(nn.Identity() for _ in range(tau)), square=True)
        plan = pipec.compile(net, tau + 1, 1, "pipedream", update="stage")
        make: Any = lambda params, lr=limit * factor: torch.optim.SGD(params, lr=lr, momentum=momentum)  # noqa: E731
        with pipec.Runner(net, plan, optimizer=make, backend="replay") as run:
            assert run.staleness["s0"] == tau
            assert spread(run, weight.w, 200 if momentum < 0.9 else 500) == grows, factor


DISCREPANCY = 5.0


class Discrepant(torch.autograd.Function):
    """A gradient (1 + D) u_fwd - D u_bkwd."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        out = x * w
        ctx.save_for_backward(out, w)
        return out.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        out, w = ctx.saved_tensors
        return None, gradients[0].sum() * ((1 + DISCREPANCY) * out.sum() - DISCREPANCY * w)


class Loose(Square):
    def forward(self, x: Tensor) -> Tensor:
        return Discrepant.apply(x, self.w)  # type: ignore[no-any-return, no-untyped-call]


def radius(step: float, late: int, back: int, gamma: float | None) -> float:
    """How much w(t+1) = w(t) - step * ((1+D) w(t-late) - D u(t-back)) grows per update.

    u = w without correction, else w - (late - back) delta, delta(t+1) = gamma delta + (1-gamma) (w(t+1) - w(t)).
    """
    now = late + 1  # the state: w(t), ..., w(t-late), delta(t), ..., delta(t-back)
    matrix = np.zeros((late + back + 2, late + back + 2))
    matrix[range(1, now), range(late)] = 1
    matrix[range(now + 1, now + back + 1), range(now, now + back)] = 1
    matrix[0, 0] = 1
    matrix[0, late] -= step * (1 + DISCREPANCY)
    matrix[0, back] += step * DISCREPANCY
    if gamma is not None:
        matrix[0, now + back] -= step * DISCREPANCY * (late - back)
        matrix[now] = (1 - gamma) * matrix[0]
        matrix[now, 0] -= 1 - gamma
        matrix[now, now] += gamma
    return float(abs(np.linalg.eigvals(matrix)).max())


def limit(late: int, back: int, gamma: float | None) -> float:
    """The largest stable step."""
    low, high = 1e-4, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if radius(middle, late, back, gamma) <= 1 + 1e-9 else (low, middle)
    return low


def test_limits_with_discrepancy() -> None:
    assert limit(10, 6, None) == pytest.approx(0.03807, abs=1e-5)
    assert limit(10, 6, 1 - 2 / 5) == pytest.approx(0.11394, abs=1e-5)


@pytest.mark.parametrize(("correction", "wanted"), [(None, 0.03807), ("optimal", 0.11394)])
def test_limits_with_given_delays(correction: Any, wanted: float) -> None:
    """A forward 10 updates old, a backward 6: no pipeline has these, so the plan is given them."""
    for factor, grows in ((0.97, False), (1.03, True)):
        weight = Loose()
        net = pipeline(weight)
        plan = pipec.compile(net, 1, 1, pipec.Delayed(10, 6, correction), update="stage")
        make: Any = lambda params, lr=wanted * factor: torch.optim.SGD(params, lr=lr)  # noqa: E731
        with pipec.Runner(net, plan, optimizer=make, backend="replay") as run:
            assert run.staleness["s0"] == 10
            assert spread(run, weight.w, 700) == grows, factor


@pytest.mark.parametrize("tau", [1, 2, 5, 10])
def test_the_slowest_root_at_the_fastest_step(tau: int) -> None:
    """With lr tau^tau/(tau+1)^(tau+1) the weight falls as (a + b t) r^t with the double root r = tau/(tau+1)."""
    weight, root = Scale(), tau / (tau + 1)
    net = pipeline(weight, square=True)
    plan = pipec.compile(net, 1, 1, pipec.Delayed(tau), update="stage")
    rate = tau**tau / (tau + 1) ** (tau + 1)
    seen = []
    with pipec.Runner(net, plan, optimizer=lambda p: torch.optim.SGD(p, lr=rate), backend="replay") as run:
        for step in range(20 * tau + 20):
            run.step(x=ONE)
            seen.append(weight.w.item() / root**step)
    bends = np.diff(seen[10 * tau :], 2)  # of a straight line
    assert abs(bends).max() < 1e-6 * abs(np.diff(seen[10 * tau :])).min()


@pytest.mark.parametrize("correction", [None, "optimal", 0.135])
def test_discrepancy_limits_the_step_and_correction_frees_it(correction: Any) -> None:
    """The first of 11 stages reads weights 10 updates old in its forward and the newest in its backward."""
    gamma = {None: None, "optimal": 1 - 2 / 11, 0.135: 0.135**0.1}[correction]
    for factor, grows in ((0.97, False), (1.03, True)):
        weight = Loose()
        net = pipeline(weight, *(nn.Identity() for _ in range(10)))
        plan = pipec.compile(net, 11, 1, pipec.PipeMare(inflight="1f1b", correction=correction), update="stage")
        rate = limit(10, 0, gamma) * factor
        make: Any = lambda params, lr=rate: torch.optim.SGD(params, lr=lr)  # noqa: E731
        with pipec.Runner(net, plan, optimizer=make, backend="replay") as run:
            assert run.staleness["s0"] == 10
            assert spread(run, weight.w, 300) == grows, factor
