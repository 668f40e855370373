"""The backend with one wait or one hold left out: what is found at run time, beside the proof of the calls."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from models import data, kept_streams, parameters
from test_lanes import skipping
from test_streams import backend, recorded

import pipec
import standin
from pipec.ir import Plan
from pipec.runtime import stream_lanes
from pipec.runtime.accelerator import Accelerator
from pipec.runtime.stream_api import Call
from pipec.runtime.stream_lanes import StreamLanes
from pipec.runtime.stream_proof import problems
from standin.training import deep, of, state

__all__ = ["kept_streams"]


class Forgetful(Accelerator):
    """Leaves one wait of a stream out, counted from zero when ``begin`` is called."""

    def __init__(self, devices: Iterable[torch.device], forget: int | None) -> None:
        super().__init__(devices)
        self._forget, self._count = forget, -1

    def begin(self) -> None:
        self._count = 0

    def stream(self, device: torch.device, name: str) -> torch.Stream:
        return standin.named(super().stream(device, name), name)

    def wait(self, stream: torch.Stream, event: torch.Event) -> None:
        if self._count < 0 or self._count != self._forget:
            super().wait(stream, event)
        self._count += self._count >= 0


def found(plan: Plan, build: Any, forget: int | None, inputs: str = "cpu") -> list[str]:
    """The problems of two steps on one device, with an optimizer on the caller's stream; forgets in the second."""
    net, devices = build(), [torch.device("standin:1")] * plan.devices
    api = Forgetful(devices, forget)
    standin.reset()
    given = [{name: one.to(inputs) for name, one in data(6, step).items()} for step in range(2)]
    with pipec.Runner(net, plan, devices=devices, backend=StreamLanes(api, devices), seed=3) as run:
        optimizer = torch.optim.SGD(parameters(net), 0.1, foreach=False)
        for step in range(2):
            if step:
                api.begin()
            of(run.step(**given[step]))
            optimizer.step()
            optimizer.zero_grad()
        state(net)
    return standin.problems()


def second_step(plan: Plan, build: Any) -> list[Call]:
    streams = backend(plan.devices, real=1)
    with pipec.Runner(build(), plan, backend=streams) as run:
        for step in range(2):
            run.step(**data(6, step))
            calls = recorded(streams)
    return calls


ONLY_ORDER = (
    "on the copy-in lane of device",  # one copy before another, as the plan says, though they share no memory
    "sent, which",  # memory that autograd still holds does not go back yet
    "does not wait for its caller first",  # but for inputs, which have
)


@pytest.mark.parametrize(("schedule", "recompute"), [("1f1b", "never"), ("zb-h1", "never"), ("gpipe", "always")])
def test_every_wait_counts_at_run_time(schedule: str, recompute: str) -> None:
    """What it finds the proof of the calls finds too; what only the proof finds is order without memory."""
    plan = pipec.compile(skipping(), 3, 2, schedule, recompute=recompute)
    assert found(plan, skipping, None) == []
    calls = second_step(plan, skipping)
    assert problems(plan, calls) == []
    at = [place for place, call in enumerate(calls) if call.kind == "wait" and call.stream != "host"]
    both = 0
    for number, place in enumerate(at):
        told, proved = found(plan, skipping, number), problems(plan, calls[:place] + calls[place + 1 :])
        both += bool(told)
        assert proved or not told, f"a false alarm for {calls[place]}: {told[:1]}"
        if proved and not told:
            assert all(any(why in text for why in ONLY_ORDER) for text in proved), (calls[place], proved)
    assert both >= 0.4 * len(at)


def test_whoever_does_not_wait_for_the_caller_reads_what_it_still_writes() -> None:
    plan = pipec.compile(skipping(), 3, 2)
    assert found(plan, skipping, None, "standin:1") == []
    told = found(plan, skipping, 0, "standin:1")
    assert any("on compute 0 reads what" in text and "on default stream of 1 has written" in text for text in told)


def test_memory_that_goes_back_at_once_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    class Careless(stream_lanes.StreamLane):
        def hold(self, name: str, payload: Any, event: Any) -> None:
            self.api.free(self.stream, name, [payload])

    monkeypatch.setattr(stream_lanes, "StreamLane", Careless)
    plan = pipec.compile(deep(), 4, 3)
    told = found(plan, deep, None)
    assert any(text.startswith("early free: in ") for text in told)


def test_memory_of_the_copy_in_stream_that_stages_use_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """What arrives is handed to the stages as it is: it goes back to its pool while they still read it."""
    monkeypatch.setattr(stream_lanes, "duplicate", lambda tensor: tensor)
    plan = pipec.compile(deep(), 4, 3)
    assert any(text.startswith("early free: in ") for text in found(plan, deep, None))
