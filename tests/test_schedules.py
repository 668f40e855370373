"""Every schedule on every shape of pipeline, placements, and the table of schedules."""

from __future__ import annotations

import random
from itertools import product

import pytest
from attrs import evolve
from plans import problem_of

import pipec
from pipec.ir import BACKWARDS, Kind
from pipec.passes.order import check_order
from pipec.schedules import (
    REGISTRY,
    SCHEDULES,
    InterleavedOneFOneB,
    find_schedule,
    format_schedule,
    list_schedules,
    parse_schedule,
)

CLASSIC = ["gpipe", "1f1b", "eager-1f1b", "interleaved-1f1b", "looped-bfs"]
ANYWHERE = [name for name in CLASSIC if name != "interleaved-1f1b"]


# Pipelines that are no chain.


def two_towers():
    p = pipec.Pipeline("towers")
    image, text = p.input("image"), p.input("text")
    a = p.stage("image2", None, p.stage("image1", None, image))
    b = p.stage("text2", None, p.stage("text1", None, text))
    p.loss("contrast", None, p.stage("join", None, a, b))
    return p


def encoder_decoder():
    p = pipec.Pipeline("encdec")
    memory = p.stage("enc2", None, p.stage("enc1", None, p.input("source")))
    x = p.input("target")
    for number in range(4):
        x = p.stage(f"dec{number}", None, x, memory)
    p.loss("tokens", None, x)
    return p


def diamond():
    p = pipec.Pipeline("diamond")
    stem = p.stage("stem", None, p.input("x"))
    left, right = p.stage("left", None, stem), p.stage("right", None, stem)
    p.loss("main", None, p.stage("head", None, p.stage("merge", None, left, right)))
    p.loss("side", None, left)
    p.output(p.stage("report", None, stem))  # no loss depends on it
    return p


def unet():
    p = pipec.Pipeline("unet")
    e1 = p.stage("enc1", None, p.input("x"))
    e2 = p.stage("enc2", None, e1)
    mid = p.stage("mid", None, e2)
    d2 = p.stage("dec2", None, mid, pipec.skip(e2))
    p.loss("mse", None, p.stage("dec1", None, d2, pipec.skip(e1)))
    return p


GRAPHS = [two_towers, encoder_decoder, diamond, unet]


def relaxed(plan, costs):
    """Makespan, and activations per device at their most, worked out from order lists and graph alone.

    Shares no code with the simulator: passes over all tasks until no end moves any more.
    """
    graph = plan.graph
    where = {s: chunk.device for chunk in plan.chunks for s in chunk.stages}
    rows = [list(plan.compute(d)) for d in range(plan.devices)]
    needs = {}
    for row in rows:
        for before, task in zip([None, *row], row, strict=False):
            found = needs[task.kind, task.stage, task.microbatch] = []
            if before is not None:
                found.append(((before.kind, before.stage, before.microbatch), 0.0))
            for value in graph.values:
                if task.kind is Kind.FORWARD and task.stage in value.readers:
                    away = where[value.producer] != where[task.stage]
                    found.append(((Kind.FORWARD, value.producer, task.microbatch), away * costs.latency))
                if task.kind is Kind.BACKWARD and task.stage == value.producer:
                    found += [
                        ((Kind.BACKWARD, r, task.microbatch), (where[r] != where[task.stage]) * costs.latency)
                        for r in value.readers if graph.stages[r].backward
                    ]
            if task.kind is Kind.BACKWARD:
                found.append(((Kind.FORWARD, task.stage, task.microbatch), 0.0))
    ends, moved = dict.fromkeys(needs, 0.0), True
    while moved:
        moved = False
        for key, before in needs.items():
            end = max([0.0, *(ends[need] + delay for need, delay in before)])
            end += costs.duration(key[0], graph.stages[key[1]].name)
            moved |= end > ends[key]
            ends[key] = end
    peaks = []
    for device, row in enumerate(rows):
        chunks = [chunk for chunk in plan.chunks if chunk.device == device]
        weight = {s: 1 / len(chunks) / len(chunk.stages) for chunk in chunks for s in chunk.stages}
        level = peak = 0.0
        for task in row:
            if graph.stages[task.stage].backward:
                level += weight[task.stage] * (1 if task.kind is Kind.FORWARD else -1)
            peak = max(peak, level)
        peaks.append(peak)
    return max(ends.values()), peaks


def check_plan(plan, costs):
    """Complete, in microbatch order, and simulated as the independent relaxation says."""
    for stage, info in enumerate(plan.graph.stages):
        tasks = [task for d in range(plan.devices) for task in plan.compute(d) if task.stage == stage]
        forwards = [task.microbatch for task in tasks if task.kind is Kind.FORWARD]
        backwards = [task.microbatch for task in tasks if task.kind in BACKWARDS]
        assert forwards == list(range(plan.microbatches))
        assert backwards == (forwards if info.backward else [])
    line = plan.simulate(costs)
    makespan, peaks = relaxed(plan, costs)
    assert line.makespan == pytest.approx(makespan)
    assert line.peak_share == pytest.approx(peaks)


UNEVEN = pipec.Costs(forward=1.0, backward_input=0.75, backward_weight=1.5, latency=0.125)


@pytest.mark.parametrize("schedule", CLASSIC)
def test_every_number_of_stages_microbatches_and_devices(schedule):
    for S, M in product(range(1, 6), range(1, 7)):
        for D in sorted({1, 2, S}):
            if D > S:
                with pytest.raises(pipec.ScheduleError, match=f"{S} stages, too few for {D} devices"):
                    pipec.compile(pipec.chain(S), devices=D, microbatches=M, schedule=schedule)
            else:
                check_plan(pipec.compile(pipec.chain(S), D, M, schedule), UNEVEN)


@pytest.mark.parametrize("schedule", CLASSIC)
def test_one_stage_is_plain_accumulation(schedule):
    plan = pipec.compile(pipec.chain(1), devices=1, microbatches=3, schedule=schedule)
    assert plan.simulate().copies == 0
    assert plan.simulate().makespan == 9


@pytest.mark.parametrize("schedule", CLASSIC)
@pytest.mark.parametrize("graph", GRAPHS)
def test_graphs_that_are_no_chain(schedule, graph):
    placements = [None] if schedule == "interleaved-1f1b" else [None, "linear", "looped", "v"]
    for placement, D, M in product(placements, [1, 2], [1, 2, 3, 5]):
        plan = pipec.compile(graph(), devices=D, microbatches=M, schedule=schedule, placement=placement)
        check_plan(plan, UNEVEN)
    stages = len(graph().spec.stages)
    for M in (1, 4, 7):
        check_plan(pipec.compile(graph(), devices=stages, microbatches=M, schedule=schedule), UNEVEN)


@pytest.mark.parametrize("graph", GRAPHS)
def test_interleaved_with_fewer_chunks_than_stages(graph):
    plan = pipec.compile(graph(), devices=2, microbatches=5, schedule=InterleavedOneFOneB(chunks=2))
    assert [chunk.device for chunk in plan.chunks] == [0, 1, 0, 1]
    check_plan(plan, UNEVEN)


@pytest.mark.parametrize("schedule", ANYWHERE)
@pytest.mark.parametrize(
    ("placement", "devices"),
    [("linear", [0, 1, 2]), ("looped", [0, 1, 2, 0, 1, 2]), ("v", [0, 1, 2, 2, 1, 0]),
     ([0, 1, 2, 2, 0, 1], [0, 1, 2, 0, 1]), ([2, 1, 1, 0, 0, 2], [2, 1, 0, 2])],
)
def test_placements_that_any_schedule_but_interleaved_serves(schedule, placement, devices):
    for M in (1, 2, 3, 4, 8):
        plan = pipec.compile(pipec.chain(6), 3, M, schedule, placement=placement)
        assert [chunk.device for chunk in plan.chunks] == devices
        check_plan(plan, UNEVEN)


@pytest.mark.parametrize("schedule", CLASSIC)
@pytest.mark.parametrize(
    ("devices", "chunks"), [("aab", 2), ("aba", 3), ("abab", 4), ("aabb", 2), ("a", 1), ("aaa", 1)]
)
def test_repeated_devices(schedule, devices, chunks):
    """Neighbours on one device form one chunk and exchange no copy."""
    placement = ["ab".index(letter) for letter in devices]
    for M in (1, 2, 3, 6):
        plan = pipec.compile(pipec.chain(len(devices)), len(set(devices)), M, schedule, placement=placement)
        assert len(plan.chunks) == chunks
        assert plan.simulate().copies == 2 * (chunks - 1) * M
        check_plan(plan, UNEVEN)


@pytest.mark.parametrize(("placement", "wrong"), [("v", 2), ([1, 0, 1, 0], 0), ([0, 1, 1, 1], None)])
def test_interleaved_refuses_chunks_that_do_not_loop(placement, wrong):
    def compiled():
        return pipec.compile(pipec.chain(4), 2, 4, "interleaved-1f1b", placement=placement)

    if wrong is None:  # two chunks in turn, one of them longer
        check_plan(compiled(), UNEVEN)
        return
    with pytest.raises(pipec.ScheduleError) as error:
        compiled()
    assert str(error.value) == (
        "schedule 'interleaved-1f1b' needs chunks that loop over the devices, chunk c on device c mod 2, but "
        f"chunk {wrong} (stage 's{wrong}') is on device 1 instead of 0; use placement='looped', or a "
        "schedule for any placement: '1f1b', 'eager-1f1b', 'gpipe', 'looped-bfs'"
    )


def test_looped_schedules_take_as_many_chunks_as_stages_per_device():
    for stages, chunks in ((4, 2), (5, 2), (6, 3), (3, 1)):
        plan = pipec.compile(pipec.chain(stages), devices=2, microbatches=2, schedule="interleaved-1f1b")
        assert len(plan.chunks) == 2 * chunks
    plan = pipec.compile(pipec.chain(6), devices=2, microbatches=2, schedule="looped-bfs", chunks=1)
    assert len(plan.chunks) == 2
    with pytest.raises(pipec.ScheduleError, match="6 stages, too few for 2 devices with 4 chunks each"):
        pipec.compile(pipec.chain(6), devices=2, microbatches=2, schedule=InterleavedOneFOneB(chunks=4))


@pytest.mark.parametrize("schedule", CLASSIC)
def test_recompute_updates_and_forward_only_go_with_every_schedule(schedule):
    plan = pipec.compile(pipec.chain(4), 2, 3, schedule, recompute="except_last", update="stage")
    assert (plan.table.kind == Kind.RECOMPUTE).sum() == 4 * 2
    assert (plan.table.kind == Kind.UPDATE).sum() == 4
    assert plan.simulate().makespan > 0
    forward = pipec.compile(pipec.chain(4), 2, 3, schedule, forward_only=True)
    assert not forward.training
    assert (forward.table.kind == Kind.FORWARD).sum() == 4 * 3


# The orders themselves.


def rows_of(schedule, P, M, v=1):
    plan = pipec.compile(pipec.chain(P * v), devices=P, microbatches=M, schedule=schedule)
    return [" ".join(map(str, plan.compute(d))) for d in range(P)]


def test_orders_in_print():
    assert rows_of("gpipe", 2, 2) == ["0F0 0F1 0B0 0B1", "1F0 1F1 1B0 1B1"]
    assert rows_of("1f1b", 2, 3) == ["0F0 0F1 0B0 0F2 0B1 0B2", "1F0 1B0 1F1 1B1 1F2 1B2"]
    assert rows_of("eager-1f1b", 2, 4) == [
        "0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3",
        "1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3",
    ]
    assert rows_of("looped-bfs", 2, 2, 2) == [
        "0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1",
        "1F0 1F1 3F0 3F1 3B0 3B1 1B0 1B1",
    ]
    assert rows_of("interleaved-1f1b", 2, 4, 2) == [
        "0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 2B2 2B3 0B2 0B3",
        "1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3",
    ]


def test_interleaved_warms_up_as_megatron_does():
    P, M, v = 4, 8, 2
    for device, row in enumerate(rows_of("interleaved-1f1b", P, M, v)):
        tokens = row.split()
        first = next(number for number, token in enumerate(tokens) if "B" in token)
        assert first == 2 * (P - 1 - device) + (v - 1) * P + 1  # the first pair puts its forward first
        halves, own = (range(4), range(4, 8)), (device, device + P)
        up = [f"{chunk}F{m}" for half in halves for chunk in own for m in half]
        down = [f"{chunk}B{m}" for half in halves for chunk in reversed(own) for m in half]
        assert [token for token in tokens if "F" in token] == up
        assert [token for token in tokens if "B" in token] == down


@pytest.mark.parametrize("schedule", CLASSIC)
def test_every_schedule_survives_its_text(schedule):
    policy = find_schedule(schedule)
    plan = pipec.compile(pipec.chain(4), devices=2, microbatches=3, schedule=policy)
    problem = evolve(problem_of([chunk.device for chunk in plan.chunks], 3), chunks=plan.chunks)
    text = parse_schedule(format_schedule(policy.order(problem)), policy.name, policy.placement)
    assert pipec.compile(pipec.chain(4), devices=2, microbatches=3, schedule=text) == plan


def test_the_quick_check_agrees_with_the_close_look():
    """Random damage to a right answer is refused, whatever it is, and the answer itself is not."""
    problem = problem_of([0, 1, 0], 3)
    good = [list(row) for row in find_schedule("1f1b").order(problem)]
    check_order(problem, good, "mine")
    rnd = random.Random(3)
    for _ in range(200):
        rows = [list(row) for row in good]
        row = rows[rnd.randrange(2)]
        at = rnd.randrange(len(row))
        damage = rnd.randrange(3)
        if damage == 0:
            del row[at]
        elif damage == 1:
            row.append(row[at])
        else:
            old = row[at]
            row[at] = (rnd.choice([0, 2, 3, 4, 7]), rnd.randrange(-1, 5), rnd.randrange(-1, 5))
            if row[at] == old:
                continue
        with pytest.raises(pipec.ScheduleError):
            check_order(problem, rows, "mine")


# The table.


def test_the_table_of_schedules():
    table = list_schedules()
    assert [row.name for row in table] == list(SCHEDULES)
    assert set(CLASSIC) <= set(REGISTRY)
    for row in table:
        assert find_schedule(row.name).name == row.name
        for text in (row.bubble, row.peak, row.source, row.summary):
            assert text
        assert row.placement in ("linear", "looped", "v")
    lines = str(table).splitlines()
    assert lines[0].split() == ["name", "placement", "bubble", "peak", "source", "summary"]
    for column in lines[0].split():  # every cell stands under its heading
        at = lines[0].index(column)
        for row, line in zip(table, lines[1:], strict=False):
            assert line[at:].startswith(getattr(row, column))
    assert repr(table) == str(table)
