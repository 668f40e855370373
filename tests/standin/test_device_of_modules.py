"""Modules that a script has put on an accelerator itself, run by the backends that are not for accelerators."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from models import WIDTH, chain, data, kept_streams, of_modules, parameters, same
from torch import Tensor, nn

import pipec
import standin
from pipec.runtime import profile as profiling
from standin.training import at_home, deep, of, state

__all__ = ["kept_streams"]

BACKENDS = ["replay", "threads", "lanes", "adversarial", None]


def moved(net: pipec.Pipeline, device: str = "standin:1") -> pipec.Pipeline:
    for stage in net.spec.stages:
        stage.fn.to(device)
    return net


def there(seed: int = 1, device: str = "standin:1") -> dict[str, Tensor]:
    return {name: one.to(device) for name, one in data(8, seed).items()}


@pytest.mark.parametrize("recompute", ["never", "always"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_dropout_on_the_device_is_the_tasks_own(backend: str | None, recompute: str) -> None:
    """Each task draws from its own numbers, and RECOMPUTE what its FORWARD drew."""
    net, other = moved(deep()), deep()
    loop = pipec.reference(other, 4, seed=3)
    with pipec.Runner(net, pipec.compile(net, 4, 4, recompute=recompute), backend=backend, seed=3) as run:
        for step in range(2):
            assert same(of(run.step(**there(step))), of(loop.step(**data(8, step))))
    assert same(state(net), state(other))


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_callers_autocast_holds_in_the_workers(backend: str | None) -> None:
    net, other = moved(chain(3)), chain(3)
    with pipec.Runner(net, pipec.compile(net, 3, 4), backend=backend) as run, torch.autocast("standin", torch.bfloat16):
        got = run.step(**there())
    with torch.autocast("cpu", torch.bfloat16):
        expected = pipec.reference(other, 4).step(**data(8))
    assert same(of(got), of(expected))
    assert same(state(net), state(other))


def test_a_profile_takes_the_devices_time_and_leaves_its_random_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whenever it looks at the clock all that was queued has ended."""
    idle: list[bool] = []

    def look() -> float:
        idle.append(torch.accelerator.current_stream("standin:1").query())
        return float(len(idle))

    monkeypatch.setattr(profiling, "time", SimpleNamespace(perf_counter=look))
    net, given = moved(deep()), there()
    torch.manual_seed(4)
    expected = torch.rand(4, device="standin:1").cpu()
    torch.manual_seed(4)
    standin.slow(True)
    pipec.profile(net, repeats=1, **given)
    assert len(idle) > 100
    assert all(idle)
    assert torch.equal(torch.rand(4, device="standin:1").cpu(), expected)


class Where(nn.Module):
    """Makes a tensor on the current device, as ``device="cuda"`` in a stage does."""

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.ones(1, device="standin")


@pytest.mark.parametrize("backend", BACKENDS)
def test_workers_are_on_the_callers_stream_and_device(backend: str | None) -> None:
    """Inputs made just before on a side stream, results used just after, nobody waits."""
    device = torch.device("standin:2")
    net = moved(of_modules(nn.Linear(WIDTH, WIDTH), Where(), nn.Linear(WIDTH, WIDTH)), "standin:2")
    side = torch.Stream(device=device)
    side.wait_stream(torch.accelerator.current_stream(device))
    before = torch.accelerator.current_device_index()
    torch.accelerator.set_device_index(2)
    try:
        with pipec.Runner(net, pipec.compile(net, 3, 4), backend=backend) as run, side:
            for step in range(3):
                given = {name: one * 2 for name, one in there(step, "standin:2").items()}
                result = run.step(**given)
                used = result.loss + 1
                del given, result
            at_home([used, parameters(net)])
    finally:
        torch.accelerator.set_device_index(before)
    assert standin.problems() == []
