"""Transfers in one order per rank, as NCCL needs it: the plan's order, and the same bits over real processes on GPUs
that are not there, with gloo in the place of NCCL."""

from __future__ import annotations

import time
from typing import Any, ClassVar

import pytest
import torch
from fake_gpus import on_gpus
from models import RUNS, chain, data
from ranks import crew
from test_ranks_asynchronous import trained
from test_ranks_failure import CASES
from test_ranks_numbers import differences, jumping, read_last
from test_slices import batch, language
from traps import doomed, survived

import pipec
from pipec.ir import Kind
from pipec.runtime.distributed.order import Transfer, check_orders, orders_of
from pipec.runtime.distributed.ordered import OrderedChannels
from pipec.runtime.program import build_program


def in_order() -> Any:
    """Runners made inside are on GPUs whose transfers go one after another."""
    return on_gpus("wired")


# -- orders ----------------------------------------------------------------------------------------------------------

PLACEMENTS: list[dict[str, Any]] = [
    {"schedule": "1f1b"}, {"schedule": "gpipe", "placement": "looped"}, {"schedule": "zb-v"}, {"schedule": "zb-h1"},
    {"schedule": "interleaved-1f1b"}, {"schedule": "dualpipe-v"}, {"schedule": "1f1b", "placement": "looped"},
]


def orders(how: dict[str, Any], devices: int = 4, microbatches: int = 8) -> Any:
    plan = pipec.compile(pipec.chain(2 * devices), devices, microbatches, **how)
    return plan, orders_of(build_program(plan).ops)


@pytest.mark.parametrize("how", PLACEMENTS, ids=lambda how: "-".join(how.values()))
def test_orders_are_those_of_the_plan_and_fit_together(how: dict[str, Any]) -> None:
    plan, made = orders(how)
    plan.verify()
    assert check_orders(made) is None
    copies = plan.table.kind == Kind.COPY
    for device, row in enumerate(made):
        ends = copies & ((plan.table.device == device) | (plan.table.peer == device))
        assert [one.task for group in row for one in group] == ends.nonzero()[0].tolist()
        for group in row:
            assert len(group) == 1 or group[0].route == group[1].route[::-1]
    pairs = [[{one.task for one in group} for group in row if len(group) == 2] for row in made]
    for device, row in enumerate(made):  # both ends make the same groups
        for group in row:
            if len(group) == 2:
                other = next(end for end in group[0].route if end != device)
                assert {one.task for one in group} in pairs[other]


def test_opposite_transfers_are_grouped() -> None:
    _, made = orders({"schedule": "1f1b"})
    assert sum(len(group) == 2 for row in made for group in row) > 0


def test_a_group_taken_apart_on_one_rank_or_an_exchanged_order_is_found() -> None:
    """What each rank waits for is told."""
    _, made = orders({"schedule": "1f1b"})
    found = 0
    for device, row in enumerate(made):
        for place in range(len(row) - 1):
            first, second = row[place], row[place + 1]
            if {one.route for one in first} & {one.route for one in second}:  # both wait in one direction
                broken = list(made)
                broken[device] = (*row[:place], second, first, *row[place + 2 :])
                story = check_orders(broken)
                assert story is not None
                assert f"rank {device} " in story
                found += 1
        for place, group in enumerate(row):
            if len(group) == 2:  # alone it still fits: the other end is at both
                broken = list(made)
                broken[device] = (*row[:place], (group[1],), (group[0],), *row[place + 1 :])
                assert check_orders(broken) is None
                other = next(end for end in group[0].route if end != device)
                there = made[other].index(group)
                broken[other] = (*made[other][:there], (group[0],), (group[1],), *made[other][there + 1 :])
                assert check_orders(broken) is not None  # each waits for the other
                found += 1
    assert found > 10
    missing = [*made[:1], made[1][1:], *made[2:]]
    assert check_orders(missing) is not None


def test_what_a_story_says() -> None:
    one, two = Transfer(3, (0, 1)), Transfer(4, (1, 0))
    assert check_orders([((one,), (two,)), ((two,), (one,))]) == (
        "the orders of the ranks' transfers do not fit together:\n"
        "  rank 0 sends task 3 to device 1\n  rank 1 sends task 4 to device 0"
    )


# -- numbers ---------------------------------------------------------------------------------------------------------


def schedules(rank: int, size: int, names: list[str]) -> dict[str, Any]:
    with in_order():
        return {
            name: differences(lambda: chain(2 * size), {"devices": size, "schedule": name}, [data(9), data(9, 2)], 4)
            for name in names
        }


def placed(rank: int, placement: str) -> list[str]:
    how = {"devices": 4, "schedule": "1f1b", "placement": placement, "recompute": "always"}
    with in_order():
        return differences(lambda: chain(8), how, [data(9), data(9, 2), data(3), data(9)], 4, evaluate=True)


def test_every_schedule_on_two_ranks(crew2: Any) -> None:
    for found in crew2(schedules, 2, list(RUNS)):
        assert found == {name: [] for name in RUNS}


def test_schedules_on_four_ranks(crew4: Any) -> None:
    names = ["1f1b", "interleaved-1f1b", "zb-v", "dualpipe-v"]
    for found in crew4(schedules, 4, names):
        assert found == {name: [] for name in names}


@pytest.mark.parametrize("placement", ["linear", "looped", "v"])
def test_every_placement(placement: str, crew4: Any) -> None:
    assert crew4(placed, placement) == [[]] * 4


def kinds(rank: int) -> list[str]:
    """Values of every kind that jump over ranks, large ones, ones that are read late, slices."""
    given = [data(rows, seed) | {"ids": torch.arange(rows), "scale": 0.5 + seed} for seed, rows in
             enumerate((16, 16, 7, 2))]
    with in_order():
        found = differences(jumping, {"devices": 4, "schedule": "1f1b"}, given, 4, evaluate=True)
        found += read_last(rank, "gpipe")
        how = {"devices": 4, "slices": 3, "schedule": "seq-1f1b"}
        layers = ("attention", "gru", "plain")
        return found + differences(lambda: language(layers), how, [batch(4, 9), batch(4, 9, 1), batch(2, 5, 2)], 2)


def test_values_of_every_kind(crew4: Any) -> None:
    assert crew4(kinds) == [[]] * 4


def overlapping(rank: int) -> list[str]:

    with in_order():
        return trained(rank, 2, "pipemare", {})


def test_asynchronous_steps(crew2: Any) -> None:
    assert crew2(overlapping) == [[]] * 2


def fails(rank: int, case: Any) -> Any:
    what, stage, number, backward, schedule = case
    with in_order():
        return survived(rank, what, stage, number, backward, 2, {"schedule": schedule})


@pytest.mark.parametrize("case", CASES[:3], ids=lambda c: "-".join(map(str, c)))
def test_failures_end_every_rank_and_change_nothing(case: Any, crew2: Any) -> None:
    for rank, (told, unchanged, equal, _) in enumerate(crew2(fails, case)):
        assert told[0] == "RankError" or rank == case[1]
        assert unchanged
        assert equal


def dies(rank: int, stage: int) -> None:
    with in_order():
        doomed(rank, "kill", stage, 2, False, 3, 20.0)


def test_a_rank_that_dies_is_named_by_all() -> None:
    with crew(3) as made:
        begin = time.monotonic()
        answers = made.answers(dies, 1)
        assert time.monotonic() - begin < 18
    assert answers[1] == ("gone", -9)
    for word, told in (answers[0], answers[2]):
        assert word == "raised"
        assert told[:1] + told[2:3] == ["RankError", 1]
        assert "rank 1 has ended" in told[1]


# -- what is issued --------------------------------------------------------------------------------------------------


class Noted(OrderedChannels):
    made: ClassVar[list[OrderedChannels]] = []

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.made.append(self)


def issued(rank: int) -> Any:
    """The order in which transfers were issued, per step."""
    import pipec.runtime.distributed.gpu_ranks as module

    net = chain(4)
    plan = pipec.compile(net, 2, 8, "1f1b")
    before, module.OrderedChannels = module.OrderedChannels, Noted  # type: ignore[misc]
    Noted.made.clear()
    try:
        with in_order(), pipec.Runner(net, plan) as run:
            for _ in range(3):
                run.step(**data(16))
    finally:
        module.OrderedChannels = before  # type: ignore[misc]
    expected = orders_of(build_program(plan).ops)[rank]
    return [tuple(own.issued) == expected for own in Noted.made], [len(own.learned) for own in Noted.made]


def test_the_order_of_issue_is_that_of_the_plan(crew2: Any) -> None:
    for equal, learned in crew2(issued):
        assert equal == [True] * 3
        assert learned[0] > 0
        assert learned[1:] == [0, 0]  # no description travels again


