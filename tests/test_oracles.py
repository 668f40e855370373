"""Published figures of the synchronous schedules must come out of policy and simulator together.

Units: with v chunks per device a chunk costs 1/v of its device's forward F and backward halves B and W; a
hand-over between devices costs c. Activations are counted in shares, one being all of a device for a
microbatch.
"""

from __future__ import annotations

from itertools import product

import pytest

import pipec
from pipec.schedules import EagerOneFOneB, InterleavedOneFOneB, LoopedBFS

UNIT = (1.0, 1.0, 1.0)
PAPER = (18.522, 18.086, 9.337)  # arXiv 2401.10241, table 9: 1.5B model, 8 devices
RATIOS = [UNIT, PAPER, (1.0, 0.3, 2.0)]


def timeline(schedule, P, M, v=1, durations=UNIT, c=0.0):
    """A chain of P x v equal stages on P devices, simulated at ``durations`` per device."""
    costs = pipec.Costs(*(part / v for part in durations), latency=c)
    plan = pipec.compile(pipec.chain(P * v), devices=P, microbatches=M, schedule=schedule)
    assert [len([k for k in plan.chunks if k.device == d]) for d in range(P)] == [v] * P
    return plan.simulate(costs)


def close(value, digits=9):
    return pytest.approx(value, rel=10.0**-digits)


# Closed forms where they are stated to hold.


@pytest.mark.parametrize("durations", RATIOS)
@pytest.mark.parametrize("P", [1, 2, 3, 4, 6, 8])
def test_gpipe_1f1b_and_eager_for_any_devices_and_microbatches(P, durations):
    work = sum(durations)
    for M, c in product([1, 2, 3, 5, 8, 17], [0.0, 0.1, work / 2]):
        bubble = (P - 1) * work + 2 * (P - 1) * c
        gpipe = timeline("gpipe", P, M, durations=durations, c=c)
        assert gpipe.bubble_time == close(bubble)
        assert gpipe.peak_share == [M] * P
        eager = timeline("eager-1f1b", P, M, durations=durations, c=c)
        assert eager.bubble_time == close(bubble)
        assert eager.peak_share == [min(M, 2 * (P - s) - 1) for s in range(P)]
        plain = timeline("1f1b", P, M, durations=durations, c=c)
        assert plain.peak_share == [min(M, P - s) for s in range(P)]
        if c == 0:
            assert plain.bubble_time == close(bubble)
        else:
            assert plain.bubble_time >= bubble - 1e-9


def test_eager_hides_hand_overs_up_to_half_a_microbatch_and_no_further():
    assert timeline(EagerOneFOneB(), 4, 16, c=1.5).bubble_time == close(3 * 3 + 2 * 3 * 1.5)
    assert timeline(EagerOneFOneB(), 4, 16, c=1.6).bubble_time > 3 * 3 + 2 * 3 * 1.6 + 0.01


@pytest.mark.parametrize("durations", RATIOS)
@pytest.mark.parametrize(("P", "v"), [(1, 3), (2, 1), (2, 2), (2, 4), (3, 2), (4, 2), (4, 3), (8, 2)])
def test_interleaved_where_devices_divide_microbatches(P, v, durations):
    for groups in (1, 2, 3, 5):
        line = timeline("interleaved-1f1b", P, P * groups, v, durations)
        assert line.bubble_time == close((P - 1) * sum(durations) / v)
        assert line.makespan == line.span
        assert max(line.peak_share) == close(min(P * groups, P + (P - 1) / v))


@pytest.mark.parametrize("durations", RATIOS)
@pytest.mark.parametrize(("P", "v"), [(1, 3), (2, 1), (2, 2), (2, 4), (3, 2), (4, 2), (4, 3), (8, 2)])
def test_looped_breadth_first(P, v, durations):
    chunk = min(durations[0], durations[1] + durations[2]) / v
    for M, c in product([P, P + 1, 2 * P, 3 * P + 1], [0.0, 0.01, 0.3]):
        if M * chunk < P * (chunk + c):
            continue
        line = timeline("looped-bfs", P, M, v, durations, c)
        assert line.bubble_time == close((P - 1) * sum(durations) / v + 2 * (P - 1) * c)
        assert line.peak_share == close([M] * P)


def test_looped_breadth_first_waits_for_the_loop_when_hand_overs_are_long():
    assert timeline("looped-bfs", 4, 4, 2, c=0.1).bubble_time > 3 * 3 / 2 + 2 * 3 * 0.1 + 0.05


# The best published schedulers on the same costs: makespan, span, activations.


@pytest.mark.parametrize(
    ("schedule", "P", "M", "v", "durations", "c", "makespan", "span", "peak"),
    [
        ("1f1b", 4, 8, 1, UNIT, 0.0, 33, 33, 4),
        ("interleaved-1f1b", 4, 8, 2, UNIT, 0.0, 28.5, 28.5, 5.5),
        ("1f1b", 8, 16, 1, UNIT, 0.0, 69, 69, 8),
        ("interleaved-1f1b", 8, 16, 2, UNIT, 0.0, 58.5, 58.5, 11.5),
        ("1f1b", 4, 8, 1, UNIT, 0.1, 34.6, None, None),
        ("interleaved-1f1b", 4, 8, 2, UNIT, 0.1, 29.9, None, None),
        ("1f1b", 8, 32, 1, [d / 18.522 for d in PAPER], 0.601 / 18.522, 98.95, None, None),
        ("interleaved-1f1b", 8, 32, 2, [d / 18.522 for d in PAPER], 0.601 / 18.522, 89.03, None, None),
    ],
)
def test_figures_of_published_schedulers(schedule, P, M, v, durations, c, makespan, span, peak):
    line = timeline(schedule, P, M, v, durations, c)
    assert round(line.makespan, 2) == makespan
    if span is not None:
        assert line.span == span
        assert max(line.peak_share) == peak


@pytest.mark.parametrize(
    ("P", "M", "durations", "c", "rate"),
    [
        (8, 24, (18.522, 18.086, 9.337), 0.601, 0.2431),
        (8, 64, (18.546, 18.097, 9.321), 0.762, 0.1240),
        (8, 32, (29.802, 29.428, 19.53), 0.577, 0.1898),
        (16, 48, (11.347, 11.248, 8.132), 0.377, 0.2552),
        (32, 96, (10.419, 10.207, 7.715), 0.408, 0.2646),
        (32, 256, (10.402, 10.248, 7.698), 0.46, 0.1352),
    ],
)
def test_bubble_rates_of_1f1b_in_the_zero_bubble_paper(P, M, durations, c, rate):
    """arXiv 2401.10241, table 5 with the costs of its table 9; rate = 1 - M(F + B + W)/span."""
    line = timeline("1f1b", P, M, durations=durations, c=c)
    assert 1 - M * sum(durations) / line.span == pytest.approx(rate, abs=5.1e-5)


# Beyond the stated range.


@pytest.mark.parametrize("durations", RATIOS)
@pytest.mark.parametrize(("P", "v"), [(2, 2), (2, 4), (3, 2), (4, 3), (5, 2), (8, 2)])
def test_interleaved_keeps_its_bubble_for_any_number_of_microbatches(P, v, durations):
    work = sum(durations)
    for M in range(1, 3 * P + 2):
        line = timeline("interleaved-1f1b", P, M, v, durations)
        if M >= P:
            assert line.bubble_time == close((P - 1) * work / v)
        else:  # one group: M microbatches through a chain of P x v
            assert line.makespan == close((P * v + M - 1) * work / v)
        largest = -(-M // max(1, M // P))
        assert max(line.peak_share) == close(min(M, (2 * P - 1 + (v - 1) * largest) / v))


@pytest.mark.parametrize(
    ("policy", "v"),
    [("gpipe", 1), ("1f1b", 1), ("eager-1f1b", 1), (InterleavedOneFOneB(2), 2), (InterleavedOneFOneB(3), 3),
     (LoopedBFS(2), 2), (LoopedBFS(3), 3)],
)
def test_lower_bounds(policy, v):
    """The last device starts after P - 1 forwards; after its last backward P - 1 more follow elsewhere."""
    for P, M, c in product([1, 2, 3, 4, 5], [1, 2, 3, 4, 5, 7, 9], [0.0, 0.25]):
        F, BW = 1.0, 2.0
        line = timeline(policy, P, M, v, c=c)
        across = (P - 1) * ((F + BW) / v + 2 * c)
        one = v * P * (F + BW) / v + 2 * (v * P - 1) * c * (P > 1)
        assert line.makespan >= max(M * (F + BW) + across, one) - 1e-9
        assert line.span <= line.makespan + 1e-9
        assert sum(line.useful) == close(P * M * (F + BW))


def best_makespan(P, M, F, BW, c):
    """Least makespan of a linear pipeline over all orders that keep microbatches ascending."""

    def rows(forwards, backwards):
        if backwards == M:
            yield ()
        if forwards < M:
            yield from (("F", *rest) for rest in rows(forwards + 1, backwards))
        if backwards < forwards:
            yield from (("B", *rest) for rest in rows(forwards, backwards + 1))

    best = float("inf")
    for orders in product(list(rows(0, 0)), repeat=P):
        at, free, end = [0] * P, [0.0] * P, {}
        moved = True
        while moved:
            moved = False
            for d, row in enumerate(orders):
                while at[d] < 2 * M:
                    kind = row[at[d]]
                    m = row[: at[d]].count(kind)
                    needs = [("F", d - 1, m)] if kind == "F" and d else []
                    needs += [("B", d + 1, m)] if kind == "B" and d + 1 < P else []
                    if any(need not in end for need in needs):
                        break
                    begin = max([free[d]] + [end[need] + c for need in needs])
                    free[d] = end[kind, d, m] = begin + (F if kind == "F" else BW)
                    at[d] += 1
                    moved = True
        if len(end) == 2 * M * P:
            best = min(best, max(free))
    return best


@pytest.mark.parametrize(("P", "M"), [(1, 4), (2, 1), (2, 2), (2, 3), (2, 4), (3, 1), (3, 2), (3, 3)])
@pytest.mark.parametrize("c", [0.0, 0.4])
def test_no_order_beats_eager_1f1b_and_gpipe(P, M, c):
    best = best_makespan(P, M, 1.0, 2.5, c)
    for schedule in ("gpipe", "eager-1f1b", *(["1f1b"] if c == 0 else [])):
        assert timeline(schedule, P, M, durations=(1.0, 1.5, 1.0), c=c).makespan == close(best)


def test_bytes_over_a_bandwidth_queue_on_the_copy_lane():
    """Copies take 2 units, a forward takes 1: the lane, not the compute, sets the pace."""
    costs = pipec.Costs(bandwidth=1.0, values={"s0": 2})
    plan = pipec.compile(pipec.chain(2), devices=2, microbatches=4, schedule="gpipe", costs=costs)
    # Device 1 starts microbatch m when its copy arrives, at 3 + 2m. Its last forward ends at 10, its
    # backwards at 12, 14, 16, 18; the last gradient arrives at 20, and device 0 ends at 22.
    assert plan.simulate().makespan == 22
