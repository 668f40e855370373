"""The race detector finds every wait that is missing and every early free, and accuses no plan that is right."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from mutate import edges_of, row, set_buffer, without_wait
from plans import ancestors, needs, pipelines, plans, unet

import pipec
from pipec.errors import RaceError
from pipec.ir import Buffer, Kind, Lane, Plan
from pipec.races import check_races, find_races, orders_needed
from pipec.runtime.adversary import Memory, Remains, Traps, held_back, legal_order, what_slots_hold
from pipec.runtime.lanes import Turn, turns
from pipec.runtime.program import build_program
from pipec.schedules import REGISTRY

CASES = [(schedule, recompute) for schedule in REGISTRY for recompute in ("never", "always")]


def net(depth: int = 2) -> pipec.Pipeline:
    """A U-Net with one more skip, so that a value goes to two devices and is read at home as well."""
    made = pipec.Pipeline("unet")
    x, y = made.input("x"), made.input("y")
    kept = []
    for level in range(depth):
        x = made.stage(f"enc{level}", None, x)
        kept.append(x)
    x = made.stage("middle", None, x, pipec.skip(kept[0]))
    for level in reversed(range(depth)):
        x = made.stage(f"dec{level}", None, x, pipec.skip(kept[level]))
    made.loss("mse", None, made.stage("head", None, x), y)
    return made


@pytest.mark.parametrize(("schedule", "recompute"), CASES)
def test_every_wait_that_is_needed_is_missed_when_it_is_gone(schedule: str, recompute: str) -> None:
    plan = pipec.compile(net(), 3, 3, schedule, recompute=recompute, update="stage")
    assert find_races(plan) == []
    found = 0
    for task, need in edges_of(plan):
        mutant = without_wait(plan, task, need)
        implied = need in ancestors(needs(mutant), task)
        races = find_races(mutant)
        assert bool(races) is not implied, f"{plan.table.task(task)} without {plan.table.task(need)}"
        found += bool(races)
        for race in races:
            is_a_legal_order_without_the_first(mutant, race)
    assert found


@pytest.mark.parametrize("make", [
    lambda: pipec.compile(pipec.chain(3), 3, 1, pipec.PipeMare(segments=2), update="stage"),
    lambda: pipec.compile(pipec.chain(2), 2, 1, "pipedream", update="stage"),
    lambda: pipec.compile(pipec.chain(3, carry=True), 3, 2, "seq-1f1b", slices=2, update="stage"),
], ids=["segments", "stashed", "slices"])
def test_so_is_every_wait_of_segments_asynchronous_plans_and_slices(make: Any) -> None:
    plan = make()
    assert find_races(plan) == []
    for task, need in edges_of(plan):
        mutant = without_wait(plan, task, need)
        implied = need in ancestors(needs(mutant), task)
        assert bool(find_races(mutant)) is not implied, f"{plan.table.task(task)} without {plan.table.task(need)}"


def is_a_legal_order_without_the_first(plan: Plan, race: Any) -> None:
    before, done = needs(plan), set()
    for task in race.order:
        assert before[task] <= done
        done.add(task)
    assert race.order[-1] == race.second
    assert race.first not in done


@pytest.mark.parametrize(("schedule", "recompute"), CASES)
def test_every_buffer_that_is_freed_a_reader_early_is_found(schedule: str, recompute: str) -> None:
    plan = pipec.compile(net(), 3, 2, schedule, recompute=recompute)
    before, tried = needs(plan), 0
    for buffer in range(len(plan.buffers)):
        free, writer = int(plan.buffers.free[buffer]), int(plan.buffers.writer[buffer])
        name = f"{plan.buffers.token(buffer)} on device {plan.buffers.device[buffer]} "
        users = {first for first, second, what in orders_needed(plan) if second == free and f"frees {name}" in what}
        for reader in sorted(users - {writer, free}):
            if free in ancestors(before, reader):
                continue
            tried += 1
            races = find_races(set_buffer(plan, "free", buffer, reader))
            assert (free, reader) in {(race.first, race.second) for race in races}
    assert tried


@given(plans(most=4, host=True))
@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow])
def test_no_compiled_plan_is_accused(plan: Plan) -> None:
    assert find_races(plan) == []


def every_order(plan: Plan) -> list[list[int]]:
    """All legal orders of a small plan, one task after another."""
    before, orders, stack = needs(plan), [], [([], frozenset())]
    while stack:
        order, done = stack.pop()
        if len(order) == len(plan):
            orders.append(order)
        for task in range(len(plan)):
            if task not in done and before[task] <= done:
                stack.append(([*order, task], done | {task}))
    return orders


def test_holding_tasks_back_finds_what_all_orders_find() -> None:
    """Exhaustive for a small plan: over all legal orders the same pairs come in the wrong order."""
    made = pipec.Pipeline("small")
    x = made.input("x")
    made.loss("loss", None, made.stage("b", None, a := made.stage("a", None, x), pipec.skip(a)))
    plan = pipec.compile(made, 2, 1)
    plans_ = [plan, *(without_wait(plan, *edge) for edge in edges_of(plan))]
    for mutant in plans_:
        orders = every_order(mutant)
        late = set()
        for order in orders:
            place = {task: at for at, task in enumerate(order)}
            late |= {(first, second) for first, second, _ in orders_needed(mutant) if place[first] > place[second]}
        assert late == {(race.first, race.second) for race in find_races(mutant)}
    assert len(every_order(plan)) < len(every_order(plans_[1]))


def test_the_message_names_both_tasks_their_lanes_and_an_order() -> None:
    plan = pipec.compile(pipec.chain(2), 2, 2, "gpipe")
    copy, reader = row(plan, "v0[1]:0>1"), row(plan, "1F1")
    with pytest.raises(RaceError) as caught:
        check_races(without_wait(plan, reader, copy))
    assert str(caught.value).splitlines()[1] == (
        "  1. 1F1 (compute lane of device 1) reads v0[1] on device 1 before it is written by v0[1]:0>1 (copy-out lane "
        "of device 0): no lane and no wait keeps them in order; let 1F1 wait for v0[1]:0>1. It may run first, as in "
        "the legal order 0F0 v0[0]:0>1 1F0 1F1"
    )


def test_an_update_that_does_not_wait_for_the_other_devices_is_a_race() -> None:
    plan = pipec.compile(pipec.chain(2), 2, 2, update="stage")
    update, backward = row(plan, "1U0"), row(plan, "0B1")
    races = find_races(without_wait(plan, update, backward))
    assert [(race.first, race.second) for race in races] == [(backward, update)]
    early = pipec.compile(pipec.chain(2), 2, 2, update="stage", update_early=True)
    assert find_races(early) == []


def test_a_plan_that_cannot_run_is_told_so() -> None:
    plan = pipec.compile(pipec.chain(2), 2, 2)
    lanes = list(plan.lanes)
    lanes[0] = (lanes[0][Lane.COMPUTE][::-1].copy(), *lanes[0][1:])
    from attrs import evolve

    with pytest.raises(pipec.PlanError, match="deadlocks"):
        find_races(evolve(plan, lanes=tuple(lanes)))


def test_large_plans_take_time_in_proportion() -> None:
    plan = pipec.compile(pipec.chain(16), 8, 64, "1f1b")
    assert check_races(plan) > len(plan)


# -- orders at run time ------------------------------------------------------------------------------------------


def all_turns(plan: Plan) -> list[Turn]:
    return turns(plan, build_program(plan).ops)


@given(pipelines(least=2, most=4))
@settings(max_examples=20)
def test_adversaries_choose_legal_orders_only(made: pipec.Pipeline) -> None:
    plan = pipec.compile(made, 2, 2)
    before, every = needs(plan), all_turns(plan)
    for victim in range(len(every)):
        done: set[int] = set()
        for turn in legal_order(every, held_back(victim)):
            assert before[turn.op.task] <= done
            done.add(turn.op.task)
        assert len(done) == len(every)


def test_a_task_that_is_held_back_runs_when_nothing_else_can() -> None:
    plan = pipec.compile(unet(), 2, 2, "gpipe")
    before = needs(plan)
    order = [turn.op.task for turn in legal_order(all_turns(plan), held_back(3))]
    after = {task for task in range(len(plan)) if 3 in ancestors(before, task)}
    assert set(order[order.index(3) + 1 :]) == after


def test_traps_are_set_on_values_and_gradients() -> None:
    plan = pipec.compile(pipec.chain(2), 2, 1)
    held = what_slots_hold(plan)[1]
    assert sorted(one.name for one in held.values()) == ["dv0[0]", "v0[0]"]
    traps = Traps(Memory(plan), 1, len(held) + 1)
    value = next(slot for slot, one in held.items() if one.value)
    with pytest.raises(RaceError, match=r"reads v0\[0\] before it was written by v0\[0\]:0>1"):
        traps[value]
    kept = torch.ones(3)
    traps[value] = kept
    assert traps[value] is kept
    traps[value] = None
    assert torch.equal(kept, torch.ones(3)), "memory that others hold was filled"
    with pytest.raises(RaceError, match=r"touches v0\[0\], which was given back"):
        traps[value]
    with pytest.raises(RaceError, match=r"writes v0\[0\], which was given back"):
        traps[value] = kept


def test_what_a_slot_held_is_filled_when_it_is_given_back() -> None:
    plan = pipec.compile(pipec.chain(2), 2, 1)
    held = what_slots_hold(plan)[0]
    slot = next(slot for slot, own in held.items() if own.value)
    traps = Traps(Memory(plan), 0, 1 + max(held))
    memory = np.ones(3)
    traps[slot] = torch.from_numpy(memory)
    traps[slot] = None
    assert np.isnan(memory).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64])
def test_memory_that_nobody_else_holds_is_filled(dtype: torch.dtype) -> None:
    made = [torch.ones(3, dtype=dtype)]
    remains = Remains(made[0])
    assert remains.poison() == 0, "the tensor is still there"
    made.clear()
    assert remains.poison() == 1
    storage, _ = remains._storages[0]
    flat = torch.empty(0, dtype=dtype).set_(storage)
    least = {torch.int64: torch.iinfo(torch.int64).min, torch.bool: True}
    assert bool((flat == least[dtype] if dtype in least else flat.isnan()).all())
    assert Remains(None).poison() == 0


# -- the command -------------------------------------------------------------------------------------------------


def test_check_on_the_command_line(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    from pipec.cli import main

    assert main(["check", "--stages", "4", "--devices", "2", "--races"]) == 0
    told = capsys.readouterr().out
    assert re.search(r"waits: holds", told)
    assert re.search(r"races: none; \d+ pairs of tasks", told)
    plan = pipec.compile(pipec.chain(2), 2, 2)
    copy = int(np.flatnonzero(plan.table.kind == Kind.COPY)[0])
    reader = next(task for task, need in edges_of(plan) if need == copy)
    without_wait(plan, reader, copy).save(tmp_path / "bad.json")
    assert main(["check", str(tmp_path / "bad.json"), "--races"]) == 1
    assert "waits" in capsys.readouterr().err
    assert Buffer.VALUE.letter == "v"
