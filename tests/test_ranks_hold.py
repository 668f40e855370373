"""Over ranks, skips that wait in host memory: the same numbers, the calls of streams, failures.

Real processes, with gloo where NCCL would be; see fake_gpus.py.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fake_gpus import FakeGpus, on_gpus, there
from models import RUNS, WIDTH, data, same
from test_lanes import Join, skipping
from test_ranks_asynchronous import compare, pair
from test_ranks_hosts import apart
from test_ranks_numbers import differences
from test_ranks_streams import calls_of
from test_streams import order_of
from torch import nn

import pipec
from pipec.ir import FROM_HOST, TO_HOST
from pipec.runtime.distributed.channels import RankChannels
from pipec.runtime.distributed.gpu_ranks import routes_of
from pipec.runtime.distributed.near import NearChannels
from pipec.runtime.distributed.order import orders_of
from pipec.runtime.distributed.stream_proof import part_problems, rank_problems
from pipec.runtime.distributed.ways import SOCKETS
from pipec.runtime.program import build_program

FOLDED = [0, 1, 1, 0, 1, 0]  # one skip stays on device 0, the other goes from device 1 to device 0
HOW = ["wired", "staged"]


def held(**how: Any) -> Any:
    return pipec.compile(skipping(hold="host"), 2, 4, **{"placement": FOLDED, **how})


def far(rank: int, ways: tuple[str, ...], fn: Any, *args: Any) -> Any:
    """As ranks on several hosts: over sockets, or through gloo."""
    with apart(ways):
        return fn(rank, *args)


FAR: list[tuple[str, ...]] = [(SOCKETS,), ()]


def every_schedule(rank: int, names: list[str]) -> dict[str, list[str]]:
    """Batches of two sizes, evaluation in between."""
    return {
        name: differences(lambda: skipping(hold="host"), {"devices": 2, "placement": FOLDED, "schedule": name},
                          [data(8), data(8, 1), data(12, 2), data(8, 3)], 4, evaluate=True) for name in names
    }


FOLDABLE = [name for name in RUNS if name in ("gpipe", "1f1b", "zb-h1")]


def test_numbers_are_those_of_the_plain_loop(crew2: Any) -> None:
    assert crew2(every_schedule, FOLDABLE) == [{name: [] for name in FOLDABLE}] * 2
    for ways in FAR:
        assert crew2(far, ways, every_schedule, FOLDABLE) == [{name: [] for name in FOLDABLE}] * 2


def in_a_row(rank: int, schedule: str, recompute: str) -> list[str]:
    how = {"devices": 4, "schedule": schedule, "recompute": recompute, "update": "stage"}
    return differences(lambda: skipping(hold="host"), how, [data(8), data(8, 1), data(12, 2)], 4)


@pytest.mark.parametrize(("schedule", "recompute"), [("1f1b", "always"), ("zb-1p", "never")])
def test_four_ranks(schedule: str, recompute: str, crew4: Any) -> None:
    assert crew4(in_a_row, schedule, recompute) == [[]] * 4
    for how in HOW:
        assert crew4(there, how, in_a_row, schedule, recompute) == [[]] * 4


@pytest.mark.parametrize("how", HOW)
def test_on_gpus(how: str, crew2: Any) -> None:
    assert crew2(there, how, every_schedule, FOLDABLE) == [{name: [] for name in FOLDABLE}] * 2


class Spread(nn.Module):
    """A value in a container: with plain Python, gaps, elements that share memory, and too large to be joined."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, 1 << 14)

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        wide = self.layer(x)
        return {"wide": wide, "n": len(x), "every": wide[:, ::2], "one": wide[:, :1].expand(len(x), 8)}


class Gathers(nn.Module):
    def forward(self, x: torch.Tensor, late: dict[str, Any]) -> torch.Tensor:
        return x + late["wide"].mean() * late["n"] + late["every"][:, :WIDTH] + late["one"]


READERS = [0, 0, 1, 0, 0, 1]


def spread() -> pipec.Pipeline:
    torch.manual_seed(2)
    net = pipec.Pipeline("spread")
    x, y = net.input("x"), net.input("y")
    first = net.stage("first", Spread(), x)
    here = net.stage("here", nn.Linear(WIDTH, WIDTH), net.stage("begin", nn.Linear(WIDTH, WIDTH), x))
    again = net.stage("again", nn.Linear(WIDTH, WIDTH), here)
    own = net.stage("own", Gathers(), again, pipec.skip(first, hold="host"))
    out = net.stage("out", Gathers(), own, pipec.skip(first, hold="host"))
    net.output(out)
    net.loss("mse", nn.functional.mse_loss, out, y)
    return net


def of_all_kinds(rank: int, schedule: str) -> list[str]:
    how = {"devices": 2, "placement": READERS, "schedule": schedule}
    return differences(spread, how, [data(12), data(12, 1), data(9, 2), data(9, 3)], 3)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_values_of_every_kind_for_two_readers(schedule: str, crew2: Any) -> None:
    carried = pipec.compile(spread(), 2, 3, schedule, placement=READERS).table
    assert {(0, 0, TO_HOST), (0, 0, FROM_HOST), (0, 1, FROM_HOST)} <= set(
        zip(carried.device.tolist(), carried.peer.tolist(), carried.gradient.tolist(), strict=True))
    assert crew2(of_all_kinds, schedule) == [[]] * 2
    for ways in FAR:
        assert crew2(far, ways, of_all_kinds, schedule) == [[]] * 2
    for how in HOW:
        assert crew2(there, how, of_all_kinds, schedule) == [[]] * 2


# -- asynchronous plans ----------------------------------------------------------------------------------------------


def jumping() -> pipec.Pipeline:
    torch.manual_seed(3)
    net = pipec.Pipeline("jumping")
    x, y = net.input("x"), net.input("y")
    a = net.stage("a", nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()), x)
    b = net.stage("b", nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(0.3)), a)
    c = net.stage("c", nn.Linear(WIDTH, WIDTH), b)
    d = net.stage("d", torch.add, c, pipec.skip(a, hold="host"))
    out = net.stage("f", Join(), net.stage("e", nn.Linear(WIDTH, WIDTH), d), pipec.skip(b, hold="host"))
    net.output(out)
    net.loss("mse", nn.functional.mse_loss, out, y)
    return net


def overlapped(rank: int, schedule: Any, placement: Any) -> list[str]:
    found = []
    one, two = pair(rank, jumping, lambda net: pipec.compile(
        net, 2, 4, schedule, placement=placement, update="stage"))
    with one as run, two as other:
        for number in range(6):
            given = data(8, number)
            found += compare(run, other, lambda r, given=given: r.step(**given))
            if number == 3:
                found += compare(run, other, lambda r: r.flush())
        return found + compare(run, other, lambda r: r.flush())


@pytest.mark.parametrize("placement", [None, [0, 1, 0, 0, 1, 1]])
@pytest.mark.parametrize("schedule", ["pipedream", "pipemare"])
def test_asynchronous(schedule: str, placement: Any, crew2: Any) -> None:
    plan = pipec.compile(jumping(), 2, 4, schedule, placement=placement, update="stage")
    assert (plan.table.gradient == FROM_HOST).any()
    assert crew2(overlapped, schedule, placement) == [[]] * 2
    assert crew2(far, FAR[0], overlapped, schedule, placement) == [[]] * 2
    for how in HOW:
        assert crew2(there, how, overlapped, schedule, placement) == [[]] * 2


def asynchronous_calls(rank: int, how: str) -> list[str]:
    net, found = jumping(), []
    plan = pipec.compile(net, 2, 4, "pipedream", placement=[0, 1, 0, 0, 1, 1], update="stage")
    with on_gpus(how), pipec.Runner(net, plan, optimizer=lambda p: torch.optim.SGD(p, 0.1)) as run:
        for step in range(5):
            FakeGpus.made.calls()
            run.step(**data(8, step))
            found += part_problems(FakeGpus.made.calls()) if step > 2 else []
    return found


@pytest.mark.parametrize("how", HOW)
def test_the_calls_of_asynchronous_steps(how: str, crew2: Any) -> None:
    assert crew2(asynchronous_calls, how) == [[]] * 2


# -- streams ---------------------------------------------------------------------------------------------------------


def proved(rank: int, how: str, cases: list[dict[str, Any]]) -> list[list[str]]:
    made = []
    for case in cases:
        net = skipping(hold="host")
        plan = pipec.compile(net, 2, 6, **{"placement": FOLDED, **case})
        made.append([text for calls in calls_of(rank, how, net, plan) for text in rank_problems(plan, calls, rank)])
    return made


@pytest.mark.parametrize("how", HOW)
def test_the_calls_of_every_rank_are_right(how: str, crew2: Any) -> None:
    """Values come back from host memory after the task that the plan says, whatever else has come."""
    cases = [{"schedule": "gpipe"}, {"schedule": "1f1b", "recompute": "always"}, {"schedule": "zb-h1"}, {
        "placement": None}]
    assert crew2(proved, how, cases) == [[[]] * len(cases)] * 2


def mutants(rank: int, how: str) -> tuple[int, list[str]]:
    net = skipping(hold="host")
    plan = pipec.compile(net, 2, 2, "1f1b", placement=FOLDED)
    (calls,) = calls_of(rank, how, net, plan, rows=4)
    assert rank_problems(plan, calls, rank) == []
    calls = [call for call in calls if not call.what.startswith("receives for ")]  # several waits at one place
    needed, left = 0, []
    for number, call in enumerate(calls):
        if call.kind == "wait":
            mutant = calls[:number] + calls[number + 1 :]
            if rank_problems(plan, mutant, rank):
                needed += 1
            elif order_of(mutant) != order_of(calls):
                left.append(str(call))
    return needed, left


@pytest.mark.parametrize("how", HOW)
def test_every_wait_counts(how: str, crew2: Any) -> None:
    for needed, left in crew2(mutants, how):
        assert needed >= 6
        assert all("in " in text for text in left), left


def streams_of(rank: int, how: str) -> list[str]:
    net = skipping(hold="host")
    plan = pipec.compile(net, 2, 4, "gpipe", placement=FOLDED)
    (calls,) = calls_of(rank, how, net, plan, rows=8)
    wanted = ("v0[0]:0>host", "v0[0]:host>0", "v1[0]:1>host", "fetches v1[0]:host>0", "v1[0]:host>0",
              "brings v1[0]:host>0")
    return [f"{call.what} on {call.stream}" for call in calls if call.kind == "run" and call.what in wanted
            and not call.stream.startswith("caller")]


def test_what_each_stream_does(crew2: Any) -> None:
    here, there_ = crew2(streams_of, "wired")
    assert set(here) == {"v0[0]:0>host on out 0", "v0[0]:host>0 on in 0", "v1[0]:host>0 on wire 0-1"}
    assert there_ == ["v1[0]:1>host on out 1", "fetches v1[0]:host>0 on in 1", "v1[0]:host>0 on wire 1-0"]
    assert crew2(streams_of, "staged")[1] == ["v1[0]:1>host on out 1"]  # from there it leaves


def test_what_stays_on_a_device_is_no_transfer() -> None:
    plan = held()
    assert {(0, 0), (1, 0)} <= set(zip(*(column[plan.table.gradient == FROM_HOST].tolist() for column in (
        plan.table.device, plan.table.peer)), strict=True))
    assert routes_of(plan, [], []) == {(0, 1), (1, 0)}
    rows = orders_of(build_program(plan).ops)
    assert all(one.route[0] != one.route[1] for row in rows for group in row for one in group)
    hosted = [one for group in rows[0] for one in group if one.hosted]
    assert len(hosted) == 4
    assert all(len(group) == 1 for row in rows for group in row if group[0].hosted)


# -- failures --------------------------------------------------------------------------------------------------------


class Fragile(nn.Module):
    """Raises at its third microbatch, once."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.layer, self.left = nn.Linear(WIDTH, WIDTH), at

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.left -= 1
        if self.left == 0:
            raise ValueError("once")
        return self.layer(x)


def failing(at: int) -> pipec.Pipeline:
    torch.manual_seed(4)
    net = pipec.Pipeline("failing")
    x, y = net.input("x"), net.input("y")
    a = net.stage("a", nn.Linear(WIDTH, WIDTH), x)
    b = net.stage("b", Fragile(at), a)
    c = net.stage("c", nn.Linear(WIDTH, WIDTH), b)
    d = net.stage("d", torch.add, c, pipec.skip(a, hold="host"))
    out = net.stage("e", torch.add, d, pipec.skip(b, hold="host"))
    net.loss("mse", nn.functional.mse_loss, out, y)
    return net


def survived(rank: int) -> Any:
    net = failing(7)  # in the second step
    with pipec.Runner(net, pipec.compile(net, 2, 4, placement=[0, 1, 1, 0, 0])) as run:
        run.step(**data(8))
        before, told = [p.grad.clone() for p in run.parameters()], ""
        try:
            run.step(**data(8, 1))
        except (ValueError, pipec.RankError) as error:
            told = type(error).__name__
        unchanged = same(before, [p.grad for p in run.parameters()])
        run.step(**data(8, 2))
        return told, unchanged, [p.grad for p in run.parameters()]


@pytest.mark.parametrize("how", ["near", *FAR, *HOW])
def test_a_failure_leaves_nothing_behind(how: Any, crew2: Any) -> None:
    if how == "near":
        found = crew2(survived)
    else:
        found = crew2(there, how, survived) if how in HOW else crew2(far, how, survived)
    assert [told for told, _, _ in found] == ["RankError", "ValueError"]
    assert all(unchanged for _, unchanged, _ in found)
    net = failing(-1)
    loop = pipec.reference(net, 4)
    loop.step(**data(8))
    loop.step(**data(8, 2))
    of = {stage.name: [p.grad for p in stage.fn.parameters()] for stage in net.spec.stages
          if isinstance(stage.fn, nn.Module)}
    assert same([gradients for _, _, gradients in found], [of["a"], [*of["b"], *of["c"]]])


def test_a_rank_on_the_cpu_holds_the_value_itself() -> None:
    for kind in (RankChannels, NearChannels):
        payload = torch.ones(2)
        made = kind.__new__(kind)
        assert made.to_host(payload) is payload
