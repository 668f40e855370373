"""Everything else of a rank's run on GPUs that are not there: numbers, sums of gradients, checkpoints, failures.

Real processes, with gloo where NCCL would be; see fake_gpus.py.
"""

from __future__ import annotations

import os
import time
from typing import Any, ClassVar

import pytest
import torch
from fake_gpus import FakeGpus, on_gpus, there
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from models import WIDTH, chain, data, of_modules, options, recipes, same
from ranks import crew
from test_ranks_asynchronous import saved as saved_asynchronous
from test_ranks_asynchronous import trained
from test_ranks_numbers import differences, drawn, jumping, large
from test_ranks_reduce import clip_tied, replicated, scaled, train_tied
from test_ranks_saving import alone, resume, save, whole
from torch import nn
from traps import survived

import pipec
from pipec.runtime.distributed.streams import RankStreams
from pipec.runtime.stream_api import Recorder

HOW = ["wired", "staged"]


def numbers(rank: int, size: int) -> list[str]:
    """Large borders, values of every kind, batches of every size, evaluation in between."""
    if size == 2:
        return large(rank, 1 << 20, 2, "v", "zb-v")
    given = [data(rows, seed) | {"ids": torch.arange(rows), "scale": 0.5 + seed} for seed, rows in
             enumerate((16, 16, 7, 2))]
    return differences(jumping, {"devices": 4, "schedule": "1f1b"}, given, 4, evaluate=True)


@pytest.mark.parametrize("how", HOW)
def test_numbers_are_those_of_the_reference(how: str, crew2: Any, crew4: Any) -> None:
    assert crew2(there, how, numbers, 2) == [[]] * 2
    assert crew4(there, how, numbers, 4) == [[]] * 4


@settings(max_examples=5, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_any_pipeline(data: Any, crew2: Any) -> None:
    recipe = data.draw(recipes().filter(lambda r: len(r.nodes) >= 2))
    how = data.draw(options(recipe).filter(lambda o: o["devices"] == 2))
    if callable(how["schedule"]):
        how["schedule"] = data.draw(st.integers(0, 1000))
    microbatches = how.pop("microbatches")
    for transport in HOW:
        assert crew2(there, transport, drawn, recipe, how, microbatches) == [[]] * 2


def by_torch(rank: int) -> list[str]:
    """The calls that NCCL gets, on gloo, whose works hold the host where NCCL's let a stream wait."""
    FakeGpus.torchs = True
    try:
        with on_gpus("wired"):
            found = differences(lambda: chain(8), {"devices": 4, "schedule": "zb-v"}, [data(8), data(8, 1)], 4)
            return found + replicated(rank, "1f1b", [8, 8], "tied", False, False)
    finally:
        FakeGpus.torchs = False


def test_torchs_own_calls_on_a_wire(crew4: Any) -> None:
    assert crew4(by_torch) == [[]] * 4


@pytest.mark.parametrize("how", HOW)
def test_gradients_of_shared_parameters_and_of_replicas(how: str, crew2: Any, crew4: Any) -> None:
    assert crew2(there, how, train_tied, 2, "zb-h1", "adam", "all") == [[], []]
    for kind, early, mesh in (("chain", True, False), ("tied", False, True)):
        assert crew4(there, how, replicated, "1f1b", [6, 10], kind, early, mesh) == [[]] * 4


@pytest.mark.parametrize("how", HOW)
def test_clipping_loss_scaling_and_checkpoints(how: str, crew2: Any, tmp_path: Any) -> None:
    assert all(all(equal) and equal for equal in crew2(there, how, clip_tied, 2))
    assert crew2(there, how, scaled, True) == [(True, 512.0, [1.0])] * 2
    crew2(there, how, save, 2, 4, str(tmp_path / how))
    assert same(whole(crew2(there, how, resume, 2, 4, str(tmp_path / how))), alone(2, 4, None, range(6)))


@pytest.mark.parametrize("how", HOW)
def test_asynchronous_plans(how: str, crew2: Any, tmp_path: Any) -> None:
    assert crew2(there, how, trained, 2, "pipedream", {}) == [[]] * 2
    assert same(crew2(there, how, saved_asynchronous, str(tmp_path / how)),
                crew2(saved_asynchronous, str(tmp_path / "cpu")))


@pytest.mark.parametrize("how", HOW)
def test_failures_end_every_rank_and_change_nothing(how: str, crew4: Any) -> None:
    for rank, (told, unchanged, equal, _) in enumerate(crew4(there, how, survived, "value", 2, 2, True, 4,
                                                               {"schedule": "1f1b"})):
        assert told[0] == ("ValueError" if rank == 2 else "RankError")
        assert unchanged
        assert equal


def failed_replica(rank: int) -> Any:
    """One replica fails in a backward: the sums of the other go to their end, in one order, and the next is right."""
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.line, self.armed = nn.Linear(WIDTH, WIDTH), rank == 1

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.armed:
                x.register_hook(self.spring)
            return self.line(x)

        def spring(self, gradient: torch.Tensor) -> None:
            if self.armed:
                self.armed = False
                raise ValueError("once")

    torch.manual_seed(5)
    net = of_modules(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), Odd(), nn.Linear(WIDTH, WIDTH))
    with pipec.Runner(net, pipec.compile(net, 2, 4, data_parallel=2)) as run:
        try:
            run.step(**data(8, rank // 2))
        except (ValueError, pipec.RankError) as error:
            told = type(error).__name__
        clean = all(p.grad is None for p in run.parameters())
        run.step(**data(8, rank // 2))
        return told, clean, [p.grad for p in run.parameters()]


@pytest.mark.parametrize("how", HOW)
def test_a_failure_in_one_replica(how: str, crew4: Any) -> None:
    found = crew4(there, how, failed_replica)
    assert [told for told, _, _ in found] == ["RankError", "ValueError", "RankError", "RankError"]
    assert all(clean for _, clean, _ in found)
    for device in (0, 1):
        assert same(found[device][2], found[device + 2][2])
        assert all(gradient is not None for gradient in found[device][2])


class Stuck(Recorder):
    """A device that ends nothing from the second step on."""

    steps: ClassVar[int] = 0

    def past(self, event: str) -> bool:
        return self.steps < 2 and super().past(event)


def stuck(rank: int, dies: bool) -> list[str]:
    """Rank 0's device never ends what was queued in the second step; rank 1 lives, or is gone by then."""
    net, told = chain(4), []
    FakeGpus.recording = Stuck if rank == 0 else Recorder
    with on_gpus("wired"), pipec.Runner(net, pipec.compile(net, 2, 4), timeout=20.0 if dies else 2.0) as run:
        for step in range(3):
            Stuck.steps = step + 1
            if dies and rank and step:
                RankStreams.ended = lambda *_: os._exit(3)  # type: ignore[method-assign,assignment]
            try:
                run.step(**data(8))
            except pipec.RankError as error:
                told.append(str(error))
    return told


def test_a_device_that_does_not_end_is_given_up_after_the_timeout() -> None:
    with crew(2) as made:
        first, second = made(stuck, False)
    assert len(first) == len(second) == 2
    lines = first[0].splitlines()
    assert lines[0] == "cuda:0 of rank 0 has not ended its tasks within 2 s after they were queued"
    assert [line.split(" stands at ")[0].strip() for line in lines[1:]] == ["the host of rank 0", "the host of rank 1"]
    assert "rank 0" in second[0]
    assert all("have lost each other" in told[1] for told in (first, second))


def test_a_rank_that_is_gone_while_a_device_waits_for_it_is_named() -> None:
    begin = time.monotonic()
    with crew(2) as made:
        first, second = made.answers(stuck, True)
    assert second == ("gone", 3)
    assert first[0] == "done"
    assert first[1][0].splitlines()[0] == "rank 1 has ended; rank 0 waits for cuda:0 to end its tasks"
    assert time.monotonic() - begin < 15


class Lost(Recorder):
    """A device that does nothing any more, once lost."""

    lost: ClassVar[bool] = False

    def on(self, *streams: Any, what: str) -> Any:
        if self.lost:
            raise RuntimeError("the device is lost")
        return super().on(*streams, what=what)


def loses(rank: int, how: str) -> list[str]:
    """A task raises on rank 1 and takes its device with it, so that it can send nothing more."""
    net, told = chain(4), []
    Lost.lost, FakeGpus.recording = False, Lost

    def trap(module: Any, args: Any) -> None:
        if rank and len(told) == 0 and run.plan.training and armed:
            Lost.lost = True
            raise ValueError("with the device")

    armed: list[bool] = []
    net.spec.stages[2].fn.register_forward_pre_hook(trap)
    try:
        with on_gpus(how), pipec.Runner(net, pipec.compile(net, 2, 4), timeout=20.0) as run:
            run.step(**data(8))
            armed.append(True)
            for _ in range(2):
                try:
                    run.step(**data(8))
                except (pipec.RankError, ValueError) as error:
                    told.append(f"{type(error).__name__}: {error}")
    finally:
        FakeGpus.recording = Recorder
    return told


@pytest.mark.parametrize("how", HOW)
def test_a_device_that_is_lost_with_a_task_is_told_to_all_at_once(how: str) -> None:
    begin = time.monotonic()
    with crew(2) as made:
        first, second = made(loses, how)
    assert second[0] == "ValueError: with the device"
    assert first[0].startswith("RankError: rank 1 failed: ValueError: with the device")
    assert "have lost each other" in first[1]
    assert "have lost each other" in second[1]
    assert time.monotonic() - begin < 15


def traced(rank: int) -> tuple[list[int], bool]:
    net = chain(4)
    with on_gpus("wired"), pipec.Runner(net, pipec.compile(net, 2, 4, "gpipe")) as run:
        for _ in range(2):
            run.step(**data(8))
        line = run.trace()
    ends = {(one.device, str(one.task)): one.end for one in line.intervals}
    starts = {(one.device, str(one.task)): one.start for one in line.intervals}
    devices = [sum(device == d for device, _ in ends) for d in (0, 1)]
    return devices, ends[0, "1F0"] <= starts[1, "2F0"] + 1.0


def test_the_trace_has_the_tasks_of_all_devices(crew2: Any) -> None:
    for devices, ordered_in_time in crew2(traced):
        assert min(devices) >= 16
        assert ordered_in_time
