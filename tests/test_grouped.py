"""What the host does once instead of at every task: orders for one thread, modules found without names, sums."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
from attrs import evolve
from torch import nn

import pipec
from pipec.ir import Kind
from pipec.runtime.backends import one_order
from pipec.runtime.buffers import BufferKeeper
from pipec.runtime.gradients import Accumulator
from pipec.runtime.grouped import grouped
from pipec.runtime.program import Op, build_program
from pipec.runtime.walk import modules_in, parameters_in

SYNCHRONOUS = ("gpipe", "1f1b", "interleaved-1f1b", "zb-h1", "zb-v", "dualpipe-v", "wave")


def changes(order: list[Op]) -> int:
    kinds = [op.kind for op in order if op.kind is not Kind.COPY]
    return sum(one is not other for one, other in pairwise(kinds))


@pytest.mark.parametrize("schedule", SYNCHRONOUS)
def test_a_grouped_order_keeps_every_devices_own_and_receives_only_what_was_sent(schedule: str) -> None:
    ops = build_program(pipec.compile(pipec.chain(8), 4, 6, schedule=schedule)).ops
    order = grouped(ops)
    assert order is not None
    assert tuple(tuple(op for op in order if op.device == device) for device in range(4)) == ops
    sent: Counter[Any] = Counter()
    for op in order:
        assert all(sent[route] >= count for route, count in op.receives)
        if op.kind is Kind.COPY:
            sent[op.route] += 1
    assert changes(order) <= changes(one_order(ops))


def test_forwards_and_backwards_of_1f1b_come_in_groups() -> None:
    ops = build_program(pipec.compile(pipec.chain(4), 4, 8, schedule="1f1b")).ops
    order = grouped(ops)
    assert order is not None
    assert (changes(order), changes(one_order(ops))) == (15, 35)  # one group of either kind per microbatch


def test_what_nobody_sends_leaves_the_order_to_the_plan() -> None:
    ops = build_program(pipec.compile(pipec.chain(4), 2, 2)).ops
    assert grouped([[op for op in row if op.kind is not Kind.COPY] for row in ops]) is None


class Shared(nn.Module):
    """A tree in which a module, a parameter and a buffer are met twice."""

    def __init__(self) -> None:
        super().__init__()
        twice = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
        self.first, self.again, self.empty = nn.ModuleList([nn.Linear(2, 2), twice]), twice, None
        self.register_module("nothing", None)
        self.own = nn.Parameter(torch.zeros(2))
        self.tied = nn.Linear(2, 2)
        self.tied.weight = twice[0].weight
        self.register_buffer("there", torch.zeros(2))
        self.register_buffer("later", None)


class Hides(nn.Linear):
    """A class that says itself what it holds."""

    def named_modules(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Module]]:
        yield "", self
        yield "beside", nn.Identity()

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        yield "bias", self.bias


def test_modules_and_parameters_are_found_in_torchs_order() -> None:
    model = Shared()
    assert modules_in(model) == list(model.modules())
    assert [id(p) for p in parameters_in(model)] == [id(p) for p in model.parameters()]


def test_a_class_with_names_of_its_own_is_asked() -> None:
    model = Hides(2, 2)
    assert [type(m) for m in modules_in(nn.Sequential(model))] == [nn.Sequential, Hides, nn.Identity]
    assert [id(p) for p in parameters_in(model)] == [id(model.bias)]


def test_buffers_keep_their_names_and_are_looked_for_anew() -> None:
    model = Shared()
    keeper = BufferKeeper(model, nn.BatchNorm1d(3))
    norm = ["running_mean", "running_var", "num_batches_tracked"]
    assert keeper.names == ["there", "later", *(f"first.1.1.{name}" for name in norm), *norm]
    model.first[1][1] = nn.Identity()
    keeper.refresh()
    assert keeper.names == ["there", "later", *norm]


def test_a_gradient_that_is_missing_or_sparse_among_later_ones_is_added_all_the_same() -> None:
    parameters = [nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(3))]
    sums = Accumulator(list(parameters), set(), range(5))
    ones = torch.ones(3)
    steps = [[ones, ones], [ones, ones], [None, ones], [ones.to_sparse(), ones], [ones, ones]]
    for number, gradients in enumerate(steps):
        sums.add(number, gradients)
    first, second = (total.to_dense() for total in sums.sums if total is not None)
    assert first.tolist() == [4.0] * 3
    assert second.tolist() == [5.0] * 3
    assert ones.tolist() == [1.0] * 3


def test_one_input_may_want_a_gradient_and_another_not() -> None:
    net = pipec.Pipeline("net")
    x, mask, y = net.input("x"), net.input("mask"), net.input("y")
    net.loss("mse", nn.functional.mse_loss, net.stage("a", lambda one, other: one * other["m"], x, mask), y)
    run = pipec.Runner(net, pipec.compile(net, 1, 2))
    given = torch.ones(4, 2, requires_grad=True)
    factor = torch.full((4, 2), 2.0)
    run.step(x=given, mask={"m": factor}, y=torch.zeros(4, 2))
    assert given.grad is not None
    assert torch.equal(given.grad, torch.full((4, 2), 1.0))
    assert factor.grad is None


def test_a_plan_knows_whether_it_trains_also_when_it_is_changed() -> None:
    plan = pipec.compile(pipec.chain(2), 2, 2)
    assert plan.training
    bare = pipec.compile(pipec.chain(2), 2, 2, forward_only=True)
    assert not bare.training
    assert not evolve(plan, table=bare.table, lanes=bare.lanes, waits=bare.waits, buffers=bare.buffers).training
