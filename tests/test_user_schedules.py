"""Schedules that users write, as functions, objects and text, and what they are told of wrong ones."""

from __future__ import annotations

import pytest

import pipec
from pipec.schedules import B, F, I, W, find_schedule, format_schedule, parse_schedule


def my_gpipe(problem):
    rows = []
    for device in range(problem.devices):
        chunks, ms = problem.on(device), range(problem.microbatches)
        row = [F(c, m) for c in chunks for m in ms]
        row += [B(c, m) for c in reversed(chunks) for m in ms]
        rows.append(row)
    return rows


class Halves:
    """gpipe with split backwards, as an object."""

    name = "halves"
    placement = "looped"

    def order(self, problem):
        for row in my_gpipe(problem):
            yield [half for op in row for half in ([op] if op[0] == 0 else [I(*op[1:]), W(*op[1:])])]


def test_a_function_or_object_or_class_is_a_schedule():
    plan = pipec.compile(pipec.chain(3), devices=3, microbatches=4, schedule=my_gpipe)
    assert plan.schedule == "my_gpipe"
    assert plan.table == pipec.compile(pipec.chain(3), devices=3, microbatches=4, schedule="gpipe").table
    for schedule in (Halves, Halves()):
        plan = pipec.compile(pipec.chain(4), devices=2, microbatches=2, schedule=schedule)
        assert plan.schedule == "halves"
        assert [chunk.device for chunk in plan.chunks] == [0, 1, 0, 1]
        assert " ".join(map(str, plan.compute(1))) == "1F0 1F1 3F0 3F1 3I0 3W0 3I1 3W1 1I0 1W0 1I1 1W1"
        assert plan.simulate().makespan == 2 * 2 * 3 + 1 + 1  # the work, and (P - 1)(F + I) of one chunk


def test_unknown_schedules_are_named():
    with pytest.raises(pipec.ScheduleError, match=r"unknown schedule 'gpip' \(did you mean 'gpipe'\?\); known"):
        find_schedule("gpip")
    with pytest.raises(pipec.ScheduleError, match=r"a function of a problem, or an object .*, got 3"):
        find_schedule(3)


def refused(rows, told, devices=(0, 1), microbatches=2):
    """The whole message of a user schedule that answers ``rows``."""

    def mine(problem):
        return rows

    with pytest.raises(pipec.ScheduleError) as error:
        pipec.compile(pipec.chain(len(devices)), 2, microbatches, mine, placement=list(devices))
    assert str(error.value) == told


GOOD = [[F(0, 0), F(0, 1), B(0, 0), B(0, 1)], [F(1, 0), B(1, 0), F(1, 1), B(1, 1)]]


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ([F(1, 0), B(1, 0), F(1, 1)], ["1B1 is missing"]),
        ([B(1, 0), F(1, 1), B(1, 1)], ["1F0 is missing"]),
        ([*GOOD[1], F(1, 1)], ["1F1 is ordered 2 times"]),
        ([*GOOD[1], F(2, 0)], ["device 1: 2F0: there is no chunk 2, only 0..1"]),
        ([*GOOD[1], F(1, 2), B(1, -1)], ["device 1: 1F2: there is no microbatch 2, only 0..1",
                                         "device 1: 1B-1: there is no microbatch -1, only 0..1"]),
        ([*GOOD[1], B(0, 0)], ["device 1: 0B0: chunk 0 is on device 0"]),
        ([*GOOD[1], (5, 1, 0)], ["device 1: (5, 1, 0) has no kind that a schedule orders"]),
        ([*GOOD[1], "1B0"], ["device 1: '1B0' is no task; write F(chunk, microbatch) or B, I, W; text is read by "
                            "pipec.parse_schedule"]),
        ([*GOOD[1], (0, 1)], ["device 1: (0, 1) is no task; write F(chunk, microbatch) or B, I, W"]),
        ([*GOOD[1], (0, 1, .5)], ["device 1: (0, 1, 0.5) is no task; write F(chunk, microbatch) or B, I, W"]),
        ([*GOOD[1], None], ["device 1: None is no task; write F(chunk, microbatch) or B, I, W"]),
        ([*GOOD[1], (0, 1, 10**30)], [f"device 1: 1F{10**30}: there is no microbatch {10**30}, only 0..1"]),
        ([*GOOD[1], I(1, 0)], ["1B0 is ordered whole and in halves; choose one"]),
        ([F(1, 0), I(1, 0), F(1, 1), B(1, 1)], ["1W0 is missing, its other half is there"]),
        ([F(1, 0), W(1, 0), F(1, 1), B(1, 1)], ["1I0 is missing, its other half is there"]),
        ([], ["1F0 is missing", "1B0 is missing", "1F1 is missing", "1B1 is missing"]),
    ],
)
def test_wrong_answers_are_told_task_by_task(row, told):
    head = f"schedule 'mine': {len(told)} problem{'s' if len(told) > 1 else ''}"
    refused([GOOD[0], row], "\n".join([head, *(f"  {n}. {text}" for n, text in enumerate(told, 1))]))


def test_wrong_shapes_of_an_answer():
    refused([GOOD[0]], "schedule 'mine': 1 problem\n  1. it ordered 1 devices, but there are 2")
    refused(None, "schedule 'mine' must return one list of tasks per device, got None")
    refused("0F0", "schedule 'mine' must return one list of tasks per device, got '0F0'; text is read by "
                   "pipec.parse_schedule")
    refused(["0F0 0B0"], "schedule 'mine' must return one list of tasks per device, got ['0F0 0B0']; text is read by "
                         "pipec.parse_schedule")
    refused([3, 4], "schedule 'mine' must return one list of tasks per device, got [3, 4]")


def test_long_lists_of_problems_are_cut():
    with pytest.raises(pipec.ScheduleError, match=r"40 problems\n(.|\n)*\n  12\. .*\n  and 28 more$"):
        pipec.compile(pipec.chain(2), 2, 10, lambda problem: [[], []])


def test_errors_inside_a_user_schedule_stay_their_own():
    def mine(problem):
        yield [F(0, "two" + 2)]

    with pytest.raises(TypeError, match="concatenate"):
        pipec.compile(pipec.chain(1), 1, 1, mine)


def test_a_deadlock_says_where_every_device_stands():
    def mine(problem):
        return [[F(0, 0), B(0, 0), F(0, 1), B(0, 1)], [F(1, 0), F(1, 1), B(1, 0), B(1, 1)]]

    with pytest.raises(pipec.PlanError) as error:
        pipec.compile(pipec.chain(2), devices=2, microbatches=2, schedule=mine)
    assert str(error.value) == (
        "schedule 'mine' deadlocks:\n"
        "  device 0 stands at 0B0, which waits for 1B0 (device 1)\n"
        "  device 1 stands at 1F1, which waits for 0F1 (device 0)"
    )


def test_a_deadlock_of_chunks_of_several_stages_names_both():
    def mine(problem):
        return [[F(0, 0), B(0, 0), F(0, 1), B(0, 1)], [F(1, 1), B(1, 1), F(1, 0), B(1, 0)]]

    with pytest.raises(pipec.PlanError) as error:
        pipec.compile(pipec.chain(4), devices=2, microbatches=2, schedule=mine)
    assert str(error.value) == (
        "schedule 'mine' deadlocks:\n"
        "  device 0 stands at 1B0 (chunk task 0B0), which waits for 2B0 (chunk task 1B0, device 1)\n"
        "  device 1 stands at 2F1 (chunk task 1F1), which waits for 1F1 (chunk task 0F1, device 0)"
    )


def test_policies_that_cannot_be_called_with_a_problem():
    def two(problem, other):
        return []

    class Given:
        def __init__(self, depth):
            self.depth = depth

        def order(self, problem):
            return [[]]

    class Wide:
        def order(self, problem, other):
            return [[]]

    for policy, told in (
        (two, r"schedule 'two' is called with one argument, the problem, but takes \(problem, other\)"),
        (Wide, r"schedule 'Wide' is called with one argument.*but takes \(problem, other\)"),
        (Given, "schedule 'Given' is a class that takes arguments .*'depth'.*pass an instance"),
        (dict, "got <class 'dict'>"),
    ):
        with pytest.raises(pipec.ScheduleError, match=told):
            pipec.compile(pipec.chain(2), 2, 2, policy)
    assert len(pipec.compile(pipec.chain(1), 1, 1, lambda problem, depth=1: [[F(0, 0), B(0, 0)]]))


def test_options_that_would_do_nothing_are_refused():
    for options, told in (
        ({"chunks": 0}, "chunks must be at least 1 per device, got 0"),
        ({"forward_only": True, "update": "stage"}, "forward_only=True has no backward, so update='stage' would"),
        ({"forward_only": True, "recompute": "always"}, "so recompute='always' would do nothing; leave it out"),
        ({"forward_only": True, "recompute": {"s0": "always"}, "update_early": True}, "leave them out"),
    ):
        with pytest.raises(pipec.ScheduleError, match=told):
            pipec.compile(pipec.chain(4), 2, 2, "interleaved-1f1b", **options)
    assert not pipec.compile(pipec.chain(4), 2, 2, forward_only=True, recompute={"s0": "never"}).training


# Schedules as text.


def test_text_schedules():
    text = """
    # two devices, the backward of microbatch 0 early
    device 0: 0F0 0F1, 0B0 0B1
    1: 1F0 1B0 1F1 1I1 1W1   # the last in halves
    """
    schedule = parse_schedule(text, name="handmade")
    plan = pipec.compile(pipec.chain(2), devices=2, microbatches=2, schedule=schedule)
    assert plan.schedule == "handmade"
    assert " ".join(map(str, plan.compute(1))) == "1F0 1B0 1F1 1I1 1W1"
    assert parse_schedule(format_schedule(schedule.rows), name="handmade") == schedule
    looped = parse_schedule("0F0 2F0 2B0 0B0\n1F0 3F0 3B0 1B0", placement="looped")
    assert len(pipec.compile(pipec.chain(4), devices=2, schedule=looped).chunks) == 4


def test_text_schedules_tell_every_token_they_cannot_read():
    with pytest.raises(pipec.ScheduleError) as error:
        parse_schedule("0F0 F1\n\n1X0 1B0 1.5F2", name="handmade")
    assert str(error.value) == (
        "schedule 'handmade': line 1: 'F1' is no task; line 3: '1X0' is no task; line 3: '1.5F2' is no task. "
        "A task is written chunk, letter, microbatch: 0F3, 1B0"
    )
    with pytest.raises(pipec.ScheduleError, match="1 rows, but there are 2 devices; write one row per"):
        pipec.compile(pipec.chain(2), devices=2, schedule=parse_schedule("0F0 0B0"))
