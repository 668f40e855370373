"""Skips that wait in host memory, run: the numbers of the plain loop, calls of streams, memory, hostile orders."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from live_bytes import HOST, live_bytes
from models import RUNS, buffers, data, gradients, kept_streams, parameters, same
from mutate import edges_of, without_wait
from plans import ancestors, needs
from test_adversary import Adversarial, held_back
from test_lanes import skipping
from test_memory import MICROBATCHES, WIDTH, Join, batch
from test_streams import backend, order_of, recorded
from torch import nn
from torch.nn import functional as F

import pipec
from pipec.errors import RaceError
from pipec.ir import TO_HOST, Buffer
from pipec.runtime import gradients as gradients_module
from pipec.runtime.stream_proof import problems
from pipec.simulate import buffer_bytes

__all__ = ["kept_streams"]
FOLDED = [0, 1, 2, 1, 2, 0]  # the first skip stays on device 0, the second goes from device 1 to 1
OWN_MEMORY = ("lanes", "adversarial", "streams")
CASES = [(schedule, None, backend) for schedule in RUNS for backend in OWN_MEMORY]
CASES += [(schedule, FOLDED, backend) for schedule in ("gpipe", "1f1b", "zb-h1")
          for backend in (*OWN_MEMORY, "threads", "replay")]


def compiled(net: pipec.Pipeline, schedule: str, placement: Any, recompute: str = "never") -> pipec.Plan:
    plan = pipec.compile(net, 3, 4, schedule, placement=placement, recompute=recompute)
    assert (plan.table.gradient == TO_HOST).any()
    return plan


@pytest.mark.parametrize(("schedule", "placement", "run_on"), CASES)
def test_numbers_are_those_of_the_plain_loop(schedule: str, placement: Any, run_on: str) -> None:
    mine, theirs = skipping(hold="host"), skipping()
    loop = pipec.reference(theirs, 4, seed=3)
    plan = compiled(mine, schedule, placement, "always" if schedule == "eager-1f1b" else "never")
    streams = backend(3, real=2)
    with pipec.Runner(mine, plan, backend=streams if run_on == "streams" else run_on, seed=3) as run:
        for step in range(2):
            got, expected = run.step(**data(8, step)), loop.step(**data(8, step))
            assert same([got.losses, got.outputs], [expected.losses, expected.outputs])
            if run_on == "streams":
                assert problems(plan, recorded(streams)) == []
        assert same(gradients(mine), gradients(theirs))
        assert same(buffers(mine), buffers(theirs))
        run.evaluate(**data(8))
        run.evaluate(**data(3))  # fewer rows: another plan, with copies to the host as well


def test_training_with_updates_gives_the_same_parameters() -> None:
    made = []
    for hold in (None, "host"):
        net = skipping(hold=hold)
        plan = pipec.compile(net, 3, 4, placement=FOLDED, update="stage", recompute="always")
        with pipec.Runner(net, plan, backend="lanes", seed=3, optimizer=lambda p: torch.optim.Adam(p, 0.01)) as run:
            made.append([[run.step(**data(8, step)).loss for step in range(3)], parameters(net)])
    assert same(*made)


def test_check_compares_a_held_plan() -> None:
    net = skipping(hold="host")
    pipec.check(net, data(8), compiled(net, "1f1b", FOLDED))


# -- streams -----------------------------------------------------------------------------------------------------


def test_every_wait_of_the_recorded_calls_counts() -> None:
    net = skipping(hold="host")
    plan = pipec.compile(net, 3, 2, "1f1b", placement=FOLDED)
    streams = backend(3)
    with pipec.Runner(net, plan, backend=streams) as run:
        run.step(**data(4))
    calls = recorded(streams)
    assert problems(plan, calls) == []
    for number, call in enumerate(calls):
        if call.kind == "wait":
            mutant = calls[:number] + calls[number + 1 :]
            assert problems(plan, mutant) or order_of(mutant) == order_of(calls), f"nobody misses {call}"


def test_copies_of_the_host_run_on_one_stream_each() -> None:
    net = skipping(hold="host")
    plan = compiled(net, "gpipe", FOLDED)
    streams = backend(3)
    with pipec.Runner(net, plan, backend=streams) as run:
        run.step(**data(8))
    calls = {call.what: call for call in recorded(streams) if call.kind == "run"}
    out, back = calls["v0[0]:0>host"], calls["v0[0]:host>0"]
    assert (out.stream, out.others, out.device) == ("out 0", (), "cpu:0")
    assert (back.stream, back.others, back.device) == ("in 0", (), "cpu:0")
    assert "takes over v0[0]:host>0" in " ".join(calls)


# -- memory ------------------------------------------------------------------------------------------------------


def net(hold: str | None) -> pipec.Pipeline:
    torch.manual_seed(0)
    made = pipec.Pipeline("net")
    x, y = made.input("x"), made.input("y")
    a = made.stage("a", nn.Linear(WIDTH, WIDTH), x)
    b = made.stage("b", nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH)), a)
    c = made.stage("c", nn.Sequential(nn.LayerNorm(WIDTH), nn.GELU()), b)
    d = made.stage("d", Join(), c, pipec.skip(b, hold=hold))
    made.loss("mse", F.mse_loss, made.stage("e", Join(), d, pipec.skip(a, hold=hold)), y)
    return made


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_live_bytes_are_those_of_the_plan_on_devices_and_in_host_memory(
    monkeypatch: pytest.MonkeyPatch, schedule: str
) -> None:
    made, given = net("host"), batch()
    costs = pipec.profile(made, microbatches=MICROBATCHES, repeats=1, **given)
    plan = pipec.compile(made, 3, MICROBATCHES, schedule, placement=[0, 1, 2, 1, 0], costs=costs)
    sizes, held = buffer_bytes(plan, costs), plan.buffers
    assert sizes is not None
    monkeypatch.setattr(gradients_module, "LARGE", 0)  # as for large stages, whose gradients autograd adds up
    begun: set[int] = set()
    in_host = []
    for task, device, got in live_bytes(monkeypatch, made, plan, given):
        row = plan.table.task(task)
        if row.kind is pipec.Kind.BACKWARD:
            begun.add(row.stage)
        alive = (held.writer <= task) & (held.free > task)
        of_host = held.kind == Buffer.HOST
        alive &= of_host if device == HOST else ~of_host & (held.device == device)
        expected = float(sizes[alive].sum())
        expected += sum(costs.weight_bytes("abcde"[s]) or 0 for s in begun if plan.stage_device(s) == device)
        assert got == pytest.approx(expected, rel=0.02, abs=600), (str(row), device)
        in_host += [got] if device == HOST else []
    assert max(in_host) > 0
    assert in_host[-1] == 0


def test_the_devices_live_bytes_go_down_when_values_wait_in_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that runs its first stage for all microbatches, and its last one when all others are through."""
    peaks = []
    for hold in (None, "host"):
        made, given = net(hold), batch()
        plan = pipec.compile(made, 3, MICROBATCHES, "gpipe", placement=[0, 1, 2, 1, 0], recompute="always")
        with monkeypatch.context() as patch:
            seen = live_bytes(patch, made, plan, given)
        last = next(i for i in range(len(plan)) if str(plan.table.task(i)) == f"0F{MICROBATCHES - 1}")
        peaks.append([got for task, device, got in seen if device == 0 and task > last][:40])
    assert max(peaks[1][:12]) < max(peaks[0][:12])


# -- hostile orders ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_every_wait_that_keeps_memory_apart_is_missed_at_run_time(schedule: str) -> None:
    plan = pipec.compile(skipping(hold="host"), 3, 2, schedule, placement=FOLDED)
    tried = 0
    for task, need in edges_of(plan):
        mutant = without_wait(plan, task, need)
        hosted = plan.table.gradient[task] >= TO_HOST or plan.table.gradient[need] >= TO_HOST
        ahead = plan.table.gradient[task] > TO_HOST and plan.table.kind[need] != pipec.Kind.COPY  # not yet its turn
        if not hosted or ahead or need in ancestors(needs(mutant), task):
            continue
        tried += 1
        held = Adversarial(choose=held_back(need))
        with pipec.Runner(skipping(hold="host"), mutant, backend=held) as run, pytest.raises(RaceError):
            run.step(**data(4))
    assert tried >= 4
