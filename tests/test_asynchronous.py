"""Asynchronous plans: order, staleness and versions come out as the papers give them, counted from the tasks."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plans import unet

import pipec
from pipec import LiveWeights, Nesterov, PipeDream, PipeDream2BW, PipeMare, Predicted
from pipec.footprint import activation_slots, versions_kept
from pipec.ir import BACKWARDS, Buffer, Kind, Plan
from pipec.periods import periods
from pipec.schedules import ALIASES, B, F, U

SIZES = [(1, 1), (2, 1), (3, 2), (4, 3), (5, 5), (6, 4), (7, 2)]


def compiled(net: Any, devices: int, microbatches: int, schedule: Any, **options: Any) -> Plan:
    return pipec.compile(net, devices, microbatches, schedule, update="stage", **options)


def chain(devices: int, microbatches: int, schedule: Any, **options: Any) -> Plan:
    return compiled(pipec.chain(devices), devices, microbatches, schedule, **options)


def updates_between(plan: Plan, stage: int, opens: Kind = Kind.FORWARD) -> dict[int, int]:
    """Per microbatch the UPDATEs of the stage that stand between its task of kind ``opens`` and its backward."""
    made, begun = {}, {}
    count = 0
    for task in plan.compute(plan.stage_device(stage)):
        if task.stage != stage:
            continue
        if task.kind is Kind.UPDATE:
            count += 1
        elif task.kind is opens:
            begun[task.microbatch] = count
        elif task.kind in BACKWARDS:
            made[task.microbatch] = count - begun[task.microbatch]
    return made


def steady(plan: Plan, counts: dict[int, int]) -> list[int]:
    """The counts of one minibatch whose forwards, and so backwards, are beyond the prologue."""
    first = periods(plan).steady * plan.minibatch
    return [counts[m] for m in range(first, first + plan.minibatch)]


@given(st.integers(1, 8), st.integers(1, 6))
@settings(max_examples=15, deadline=None)
def test_delays_of_pipemare(count: int, minibatch: int) -> None:
    plan = chain(count, minibatch, "pipemare")
    for stage in range(count):
        exact = Fraction(2 * (count - 1 - stage) + 1, minibatch)
        found = steady(plan, updates_between(plan, stage))
        assert Fraction(sum(found), len(found)) == exact
        assert set(found) <= {int(exact), -int(-exact // 1)}
        for task in plan.compute(stage):
            if task.kind is Kind.FORWARD:
                delay = 2 * (count - 1 - stage) + 1
                assert task.version == max(0, (task.microbatch - delay) // minibatch)
            elif task.kind is Kind.BACKWARD:
                assert task.version == task.microbatch // minibatch


@given(st.integers(1, 8), st.integers(1, 6), st.sampled_from(["pipedream", PipeMare("1f1b"), Predicted(), Nesterov()]))
@settings(max_examples=15, deadline=None)
def test_delays_of_one_forward_one_backward(count: int, minibatch: int, schedule: Any) -> None:
    plan = chain(count, minibatch, schedule)
    for stage in range(count):
        found = steady(plan, updates_between(plan, stage))
        assert Fraction(sum(found), len(found)) == Fraction(count - 1 - stage, minibatch)
        if minibatch == 1:
            assert set(found) == {count - 1 - stage}


@given(st.integers(1, 9), st.integers(1, 4), st.integers(1, 4), st.sampled_from(["full", "1f1b"]))
@settings(max_examples=15, deadline=None)
def test_delays_of_recompute_by_segments(count: int, minibatch: int, size: int, inflight: str) -> None:
    plan = chain(count, minibatch, PipeMare(inflight, segments=size))
    for stage in range(count):
        end = min(stage // size * size + size, count) - 1
        found = steady(plan, updates_between(plan, stage, Kind.RECOMPUTE))
        if inflight == "full":
            assert Fraction(sum(found), len(found)) == Fraction(2 * (end - stage) + 1, minibatch)
        for task in plan.compute(stage):
            if task.kind is Kind.RECOMPUTE:
                assert plan.table.version[row(plan, Kind.BACKWARD, stage, task.microbatch)] - task.version \
                    == updates_between(plan, stage, Kind.RECOMPUTE)[task.microbatch]


def row(plan: Plan, kind: Kind, stage: int, microbatch: int) -> int:
    table = plan.table
    return int(np.flatnonzero((table.kind == kind) & (table.stage == stage) & (table.microbatch == microbatch))[0])


@pytest.mark.parametrize(("count", "minibatch"), SIZES)
def test_forwards_before_the_first_backward(count: int, minibatch: int) -> None:
    for schedule, wanted in (("pipedream", lambda s: count - s), ("pipemare", lambda s: 2 * (count - 1 - s) + 1),
                             (PipeMare("1f1b"), lambda s: count - s)):
        plan = chain(count, minibatch, schedule)
        for stage in range(count):
            kinds = [task.kind for task in plan.compute(stage)]
            assert kinds.index(Kind.BACKWARD) == wanted(stage)
        assert activation_slots(plan) == [wanted(stage) for stage in range(count)]
        assert plan.simulate().peak_share == activation_slots(plan)


def test_an_update_follows_its_last_backward_and_in_pipemare_the_forward_of_that_tick() -> None:
    for schedule, after in (("pipedream", [B(0, 3), U(0, 1)]), ("pipemare", [B(0, 3), F(0, 6), U(0, 1)])):
        plan = chain(2, 2, schedule)
        ops = [(int(t.kind), t.stage, t.microbatch) for t in plan.compute(0)]
        assert ops[ops.index(B(0, 3)) :][: len(after)] == after


@pytest.mark.parametrize(("count", "minibatch"), SIZES)
def test_versions_kept(count: int, minibatch: int) -> None:
    stages = range(count)
    stash = [1 + -(-(count - 1 - stage) // minibatch) for stage in stages]
    assert versions_kept(chain(count, minibatch, "pipedream")) == stash
    assert versions_kept(chain(count, minibatch, PipeDream(vertical_sync=True))) == [stash[0]] * count
    assert versions_kept(chain(count, minibatch, Nesterov())) == stash
    if minibatch == 1:
        assert stash == [count - stage for stage in stages]
    for schedule in (PipeMare(), Predicted(), LiveWeights(), Nesterov(stash=False)):
        assert versions_kept(chain(count, minibatch, schedule)) == [1] * count
    enough = max(count, minibatch)
    assert versions_kept(chain(count, enough, "pipedream-2bw")) == [2] * count


def reads(plan: Plan) -> list[tuple[Kind, int, int, int]]:
    kinds = (Kind.FORWARD, *BACKWARDS)
    return [(t.kind, t.stage, t.microbatch, t.version) for d in range(plan.devices) for t in plan.compute(d)
            if t.kind in kinds]


def test_which_version_a_task_reads() -> None:
    plan = chain(4, 2, PipeDream())
    read = {(kind, stage, m): version for kind, stage, m, version in reads(plan)}
    assert all(read[Kind.FORWARD, stage, m] == read[Kind.BACKWARD, stage, m] for _, stage, m, _ in reads(plan))
    synced = {(stage, m): version for _, stage, m, version in reads(chain(4, 2, PipeDream(vertical_sync=True)))}
    assert all(version == read[Kind.FORWARD, 0, m] for (_, m), version in synced.items())
    assert read[Kind.FORWARD, 3, 7] > read[Kind.FORWARD, 0, 7]
    for _, _, m, version in reads(chain(3, 4, PipeDream2BW())):
        assert version == max(0, m // 4 - 1)


@pytest.mark.parametrize(("every", "minibatch"), [(1, 4), (2, 4), (4, 4), (None, 4)])
def test_live_weights_update_after_every_few_backwards(every: int | None, minibatch: int) -> None:
    plan = chain(5, minibatch, LiveWeights(every))
    each = every or minibatch
    assert plan.update_every == each
    for stage in range(5):
        found = steady(plan, updates_between(plan, stage))
        assert Fraction(sum(found), len(found)) == Fraction(4 - stage, each)
        last = None
        for task in plan.compute(stage):
            if task.kind is Kind.UPDATE:
                assert last == (Kind.BACKWARD, (task.microbatch + 1) * each - 1)
                assert task.version == task.microbatch
            last = (task.kind, task.microbatch)


def test_activation_slots_of_the_fine_grained_pipelines() -> None:
    assert sum(activation_slots(chain(107, 1, "pipemare"))) == 107**2 == 11449
    assert sum(activation_slots(chain(107, 1, PipeMare(segments=10)))) == 2292
    slots = sum(activation_slots(chain(93, 4, PipeMare(segments=10))))
    assert round(slots / 93**2, 3) == 0.215


def test_activation_slots_are_fewest_near_the_square_root() -> None:
    slots = {size: sum(activation_slots(chain(25, 2, PipeMare(segments=size)))) for size in (1, 2, 5, 12, 25)}
    assert min(slots, key=slots.__getitem__) == 5
    assert abs(slots[5] - (25**2 / 5 + 25 * 5)) <= 25


def test_a_segment_keeps_its_first_input_and_hands_on_what_it_recomputes() -> None:
    plan = compiled(unet(2), 5, 2, PipeMare(segments=3))
    assert plan.recompute == "segments 0,3"
    buffers, table = plan.buffers, plan.table
    copies = {str(table.task(i)) for i in np.flatnonzero(table.gradient == 2).tolist()}
    # enc0 enc1 mid | dec1 dec0; inside a segment: enc0 > enc1 > mid, dec1 > dec0
    assert {c for c in copies if "[4]" in c} == {"rv0[4]:0>1", "rv1[4]:1>2", "rv3[4]:3>4"}
    made = {(buffers.token(i), int(buffers.device[i])): str(table.task(int(buffers.free[i])))
            for i in range(len(buffers))}
    assert made["v0[4]", 1] == "1F4"  # inside a segment the first value is dropped at once
    assert made["v0[4]", 4] == "4B4"  # a skip that enters the other segment is kept
    assert made["v2[4]", 3] == "3B4"
    assert made["rv0[4]", 1] == "1B4"


def test_segments_inside_chunks_of_several_stages() -> None:
    plan = compiled(pipec.chain(6), 3, 1, PipeMare(segments=2))
    assert plan.recompute == "segments 0,4"
    again = [str(t) for t in plan.compute(1) if t.microbatch == 2]
    assert again == ["2F2", "3F2", "2R2", "3R2", "3B2", "2B2", "3U2", "2U2"]


def test_aliases() -> None:
    flush = pipec.compile(pipec.chain(3), 3, 4, "pipedream-flush")
    assert flush == pipec.compile(pipec.chain(3), 3, 4, "1f1b")
    assert chain(3, 2, "paci") == chain(3, 2, LiveWeights())
    assert chain(3, 2, "spectrain") == chain(3, 2, "pipeoptim") == chain(3, 2, Predicted())
    assert set(ALIASES) == {"pipedream-flush", "paci", "spectrain", "pipeoptim"}


def test_what_asynchronous_schedules_refuse() -> None:
    for options, words in (
        ({"update": None}, "'pipemare' is asynchronous.*compile it with update='stage'.*got update=None"),
        ({"update": "all"}, "got update='all'"),
        ({"update": "stage", "update_early": True}, "got update_early=True"),
        ({"update": "stage", "recompute": "except_last"}, "its microbatches never end; choose 'always'"),
        ({"update": "stage", "schedule": PipeMare(segments=2), "recompute": "always"}, "recomputes by segments itself"),
        ({"update": "stage", "schedule": LiveWeights(3)},
         r"every 3 backwards, which does not divide the 2 .*\. Feed 3 minibatches as one of 6 microbatches, or let"),
        ({"update": "stage", "schedule": LiveWeights(4)}, "Feed 2 minibatches as one of 4 microbatches"),
        ({"update": "stage", "schedule": "pipedream-2bw"}, "3 chunks, but microbatches=2; compile with microbatches=3"),
        ({"update": "stage", "schedule": PipeMare("some")}, "inflight must be '1f1b' or 'full', got 'some'"),
        ({"update": "stage", "schedule": PipeMare(correction=2.0)}, "the decay D lies between 0 and 1"),
        ({"update": "stage", "schedule": Nesterov(momentum=1)}, r"the momentum lies in \[0, 1\); got 1"),
    ):
        given = {"schedule": "pipemare"} | options
        with pytest.raises(pipec.ScheduleError, match=words):
            pipec.compile(pipec.chain(3), 3, 2, **given)
    for make, words in ((lambda: PipeMare(segments=0), "segments must be a whole number"),
                        (lambda: LiveWeights(0), "every must be a whole number")):
        with pytest.raises(pipec.ScheduleError, match=words):
            make()


def test_a_method_of_ones_own_is_an_order_and_a_rule() -> None:
    class Slow:
        """Every backward ends before the next forward begins."""

        name, asynchronous, weights = "slow", True, LiveWeights().weights

        def order(self, problem: Any) -> Any:
            for device in range(problem.devices):
                row: list[Any] = []
                for m in range(problem.microbatches):
                    row += [F(c, m) for c in problem.on(device)] + [B(c, m) for c in problem.on(device)[::-1]]
                    if (m + 1) % problem.minibatch == 0:
                        row += [U(c, m // problem.minibatch) for c in problem.on(device)]
                yield row

    plan = chain(3, 2, Slow())
    assert (plan.schedule, plan.weights, plan.minibatches) == ("slow", "live", 3)
    assert versions_kept(plan) == activation_slots(plan) == [1, 1, 1]


def test_orders_that_do_not_hold_are_told() -> None:
    def without(kind: Kind) -> Any:
        class Policy(PipeDream):  # type: ignore[misc]
            def order(self, problem: Any) -> Any:
                return [[op for op in r if op != (kind, 1, 1)] for r in super().order(problem)]
        return Policy()

    with pytest.raises(pipec.ScheduleError, match="1U1 is missing"):
        chain(2, 2, without(Kind.UPDATE))
    with pytest.raises(pipec.ScheduleError, match="1B1 is missing"):
        chain(2, 2, without(Kind.BACKWARD))
    with pytest.raises(pipec.ScheduleError, match="0U0: only asynchronous schedules order updates"):
        pipec.compile(pipec.chain(1), 1, 1, lambda problem: [[F(0, 0), B(0, 0), U(0, 0)]])

    class Growing(PipeDream):  # type: ignore[misc]
        def order(self, problem: Any) -> Any:
            return [sorted(r, key=lambda op: (op[0] == 7, op[0], op[2])) for r in super().order(problem)]

    with pytest.raises(pipec.ScheduleError, match="no step repeats the one before"):
        chain(2, 1, Growing())


def test_forwards_of_an_asynchronous_schedule_are_those_of_one_minibatch() -> None:
    plan = pipec.compile(pipec.chain(3), 3, 4, "pipemare", forward_only=True)
    assert (plan.microbatches, plan.minibatches, plan.asynchronous) == (4, 1, False)
    from pipec.compiler import forward_plan

    assert forward_plan(chain(3, 4, "pipemare")).microbatches == 4


def test_stashed_weights_live_from_their_update_to_their_last_reader() -> None:
    plan = chain(3, 1, "pipedream")
    buffers = plan.buffers
    own = [i for i in range(len(buffers)) if buffers.kind[i] == Buffer.WEIGHT]
    told = {buffers.token(i): (str(plan.table.task(int(buffers.writer[i]))), str(plan.table.task(int(buffers.free[i]))))
            for i in own}
    assert told["w0[0]"] == ("0U0", "0B2")
    assert told["w0[2]"] == ("0U2", "0B4")
    assert told["w1[3]"] == ("1U3", "1B4")
    assert not [token for token in told if token.startswith("w2")]


def test_a_plan_reads_the_same_from_text_and_json(tmp_path: Any) -> None:
    for schedule in ("pipedream", PipeMare(segments=3)):
        plan = chain(6, 2, schedule)
        assert Plan.parse(str(plan)) == plan
        plan.save(tmp_path / "plan.json")
        loaded = Plan.load(tmp_path / "plan.json")
        assert loaded == plan
        loaded.verify()
        assert f"minibatches={plan.minibatches} rule=" in str(plan)
