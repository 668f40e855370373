"""Casts of weights that autocast keeps: the same numbers on every backend under one autocast around a whole loop."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import pipec

WIDE = 16


class Layer(nn.Module):
    def __init__(self, uses: int = 1) -> None:
        super().__init__()
        self.line, self.uses = nn.Linear(WIDE, WIDE), uses

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.uses):
            x = torch.tanh(self.line(x))
        return x


def build(uses: int = 1) -> tuple[pipec.Pipeline, nn.Sequential]:
    torch.manual_seed(1)
    net, model = pipec.Pipeline("net"), nn.Sequential(*(Layer(uses) for _ in range(4)))
    value, y = net.input("x"), net.input("y")
    for place, module in enumerate(model):
        value = net.stage(f"s{place}", module, value)
    net.output(value)
    net.loss("mse", lambda out, y: F.mse_loss(out.float(), y), value, y)
    return net, model


def batches(count: int = 4) -> list[dict[str, Tensor]]:
    draw = torch.Generator().manual_seed(0)
    return [{name: torch.randn(8, WIDE, generator=draw) for name in "xy"} for _ in range(count)]


def around(enabled: bool) -> Any:
    return torch.autocast("cpu", torch.bfloat16, enabled=enabled)


def losses(runs: Any, model: nn.Module, *, whole: bool, evaluate: bool = False) -> list[float]:
    """Of a loop with the script's own optimizer, in one autocast around all of it or one around each step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    found = []
    with around(whole):
        for batch in batches():
            with around(True):
                found.append(float(runs.step(**batch).loss))
            optimizer.step()
            optimizer.zero_grad()
            if evaluate:
                with around(True):
                    found.append(float(runs.evaluate(**batch).loss))
    return found


def expected() -> list[float]:
    """A loop without pipec: an autocast for each microbatch, so that nothing is kept."""
    _, model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    found = []
    for batch in batches():
        total = torch.zeros(())
        for x, y in zip(batch["x"].split(2), batch["y"].split(2), strict=True):
            with around(True):
                loss = F.mse_loss(model(x).float(), y)
            (loss * 0.25).backward()
            total = total + loss.detach() * 0.25
        found.append(float(total))
        optimizer.step()
        optimizer.zero_grad()
    return found


@pytest.mark.parametrize("whole", [False, True])
def test_the_reference_sees_new_weights_in_every_step(whole: bool) -> None:
    net, model = build()
    assert losses(pipec.reference(net, 4), model, whole=whole) == expected()


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
@pytest.mark.parametrize("backend", [None, "threads", "replay", "lanes", "adversarial"])
def test_every_backend_sees_new_weights_in_every_step(backend: str | None, schedule: str) -> None:
    for evaluate in (False, True):
        found = []
        for whole in (False, True):
            net, model = build()
            with pipec.Runner(net, pipec.compile(net, 2, 4, schedule), backend=backend) as run:
                found.append(losses(run, model, whole=whole, evaluate=evaluate))
        assert found[0] == found[1]
        assert found[0][:: 1 + evaluate] == expected()


@pytest.mark.parametrize("backend", ["threads", "replay", "lanes"])
@pytest.mark.parametrize("early", [False, True])
def test_updates_inside_one_autocast(backend: str, early: bool) -> None:
    net, _ = build()
    plan = pipec.compile(net, 2, 4, update="stage", update_early=early)
    with pipec.Runner(net, plan, optimizer=lambda p: torch.optim.SGD(p, lr=0.5), backend=backend) as run, around(True):
        found = [float(run.step(**batch).loss) for batch in batches()]
    assert found == expected()


def test_the_script_itself_sees_new_weights_after_a_step() -> None:
    net, model = build()
    plan = pipec.compile(net, 2, 4, update="all")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    batch = batches(1)[0]
    with pipec.Runner(net, plan, optimizer=optimizer, backend="replay") as run, around(True):
        model(batch["x"])
        run.step(**batch)
        inside = model(batch["x"])
    with around(True):
        assert torch.equal(inside, model(batch["x"]))


@pytest.mark.parametrize("schedule", ["pipedream", "pipemare", "live-weights", "pipedream-2bw"])
def test_asynchronous_plans_see_new_weights_at_every_update(schedule: str) -> None:
    found = []
    for backend in ("replay", "threads"):
        for whole in (False, True):
            net, model = build(uses=3)  # a cast is shared by the uses in one forward, or is not: alike on all backends
            plan = pipec.compile(net, 4, 4, schedule, update="stage")
            own = []
            with pipec.Runner(net, plan, optimizer=lambda p: torch.optim.SGD(p, lr=0.1), backend=backend) as run:
                with around(whole):
                    for batch in batches(6):
                        with around(True):
                            own.append({n: v.tolist() for n, v in run.step(**batch).losses.items()})
                            kept = torch.is_autocast_cache_enabled()
                    with around(True):
                        run.flush()
                assert kept
            found.append((own, [p.tolist() for p in model.parameters()]))
    assert found[0] == found[1] == found[2] == found[3]
