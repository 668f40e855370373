"""Polishing: orders only ever get shorter, within their caps, by the same search every time."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

import pipec
from pipec.ir import Chunk, Kind
from pipec.schedules import SCHEDULES, ZB2P, ZBV, Op, Problem
from pipec.schedules.greedy import Outcome
from pipec.schedules.played import play
from pipec.schedules.polish import length, lower_bound, polish, possible
from pipec.schedules.rhythm import SAFE, Rhythm, best_order, rules, run
from pipec.schedules.words import Machine, shortest

NUMBERS = st.sampled_from([0.25, 1.0, 1.5, 3.0])


def problem_of(devices: list[int], microbatches: int, costs: pipec.Costs, skips: Any = ()) -> Problem:
    chunks = tuple(Chunk(n, device, (n,)) for n, device in enumerate(devices))
    edges = tuple(sorted({*pairwise(range(len(devices))), *skips}))
    return Problem(chunks, max(devices) + 1, microbatches, edges, costs, tuple(f"s{n}" for n in range(len(devices))))


@st.composite
def problems(draw: st.DrawFn) -> tuple[Problem, list[int]]:
    """A chain in a line, a V or a loop with skips, unequal costs, and caps that it can run with."""
    P = draw(st.integers(1, 4))
    devices = draw(st.sampled_from([[*range(P)], [*range(P), *reversed(range(P))], [*range(P), *range(P)]]))
    kinds = ("forward", "backward_input", "backward_weight")
    costs = pipec.Costs(latency=draw(st.sampled_from([0.0, 0.3, 1.0])), stages={
        f"s{n}": {kind: draw(NUMBERS) for kind in kinds} for n in range(len(devices))
    })
    last = len(devices) - 1
    skips = draw(st.sets(st.tuples(st.integers(0, last), st.integers(0, last)).filter(lambda e: e[0] < e[1])))
    least = len(devices) // P
    caps = [draw(st.integers(least, least * 4)) for _ in range(P)]
    return problem_of(devices, draw(st.integers(1, 5)), costs, skips), caps


def outcomes(problem: Problem, caps: list[int]) -> list[Outcome]:
    wide, even = Rhythm((1, 3), (1, 2), (5, 6, 3), window=20), Rhythm((1,), (1,), (1, 1, 1), window=3, patience=0.5)
    made = [run(problem, caps, rules(problem, rhythm)) for rhythm in (SAFE, wide, even)]
    return sorted((outcome for outcome in made if outcome is not None), key=length)


def held(problem: Problem, lists: list[list[Op]]) -> list[int]:
    """The most activations that each device holds, by its list."""
    most = []
    for row in lists:
        now, peak = 0, 0
        for kind, *_ in row:
            now += {Kind.FORWARD: 1, Kind.BACKWARD_INPUT: 0, Kind.BACKWARD_WEIGHT: -1}[Kind(kind)]
            peak = max(peak, now)
        most.append(peak)
    return most


@given(problems())
@settings(max_examples=60, deadline=None)
def test_polishing_never_lengthens_an_order_and_keeps_the_caps(case: tuple[Problem, list[int]]) -> None:
    problem, caps = case
    made = outcomes(problem, caps)
    polished = polish(problem, caps, made[0], [outcome.lists for outcome in made], 600)
    assert length(polished) <= length(made[0])
    assert [sorted(row) for row in polished.lists] == [sorted(row) for row in made[0].lists]
    assert all(most <= cap for most, cap in zip(held(problem, polished.lists), caps, strict=True))
    again = play(problem, polished.lists)  # ends only if nothing deadlocks
    assert again.makespan == pytest.approx(polished.makespan)
    for row in polished.lists:
        for kind, chunk in {op[:2] for op in row}:
            assert [m for *stream, m in row if stream == [kind, chunk]] == list(range(problem.microbatches))
    assert lower_bound(problem)[0] <= polished.makespan + 1e-6
    assert lower_bound(problem)[1] <= polished.span + 1e-6


@given(problems())
@settings(max_examples=60, deadline=None)
def test_words_take_what_their_lists_take(case: tuple[Problem, list[int]]) -> None:
    """With hints as long as the lists they are of, or shorter; and the lists that come back take the same."""
    problem, caps = case
    machine = Machine(problem, caps)
    for outcome in outcomes(problem, caps):
        for hinted in (True, False):
            words = machine.words(outcome.lists, hinted)
            timed = machine.time(words, [machine.begin()])
            assert timed is not None
            if hinted:
                assert timed.makespan <= outcome.makespan + 1e-6
            played = play(problem, machine.lists(words, timed))
            assert (played.makespan, played.span) == pytest.approx((timed.makespan, timed.span))


def test_words_are_timed_alike_from_any_state_before_their_change() -> None:
    problem = problem_of([0, 1, 2, 3, 3, 2, 1, 0], 6, pipec.Costs(2.0, 1.0, 1.5, latency=0.5))
    machine = Machine(problem, [8] * 4)
    words = machine.words(outcomes(problem, [8] * 4)[0].lists, hinted=False)
    before = machine.time(words, [machine.begin()])
    assert before is not None
    assert len(before.states) > 3
    changed = 0
    for device, word in enumerate(words.letters):
        for i in range(len(word) - 1):
            made = [*word[:i], word[i + 1], word[i], *word[i + 2 :]]
            fresh = words.change(device, made, words.hints[device], machine.inputs(made))
            whole = machine.time(fresh, [machine.begin()])
            for known in range(1, len(before.states) + 1):
                if before.states[known - 1].at[device] <= i:
                    part = machine.time(fresh, before.states[:known])
                    assert (part is None) == (whole is None)
                    if part is not None and whole is not None:
                        assert part.last == whole.last
                        changed += part.makespan != before.makespan
    assert changed > 50


def test_what_cannot_be_a_word_is_told_without_timing_it() -> None:
    F0, F1, I0, I1 = 0, 1, 2, 3
    assert possible([F0, F1, I1, I0], 0, 3, 0, 2, 2)
    assert not possible([F0, F1, I1, I0], 0, 3, 0, 2, 1)  # two activations where one may be
    assert not possible([F1, I1, I0, F0], 0, 3, 0, 2, 2)  # an I before its F
    assert not possible([F0, F0, F1, F1, I1], 1, 3, 1, 2, 3)


def test_only_needed_edges_are_looked_at() -> None:
    assert shortest([(0, 1), (0, 2), (1, 2), (0, 3), (2, 3)], 4) == [(0, 1), (1, 2), (2, 3)]
    assert shortest([(0, 2), (1, 2), (2, 3), (1, 3)], 4) == [(0, 2), (1, 2), (2, 3)]  # two towers


def test_the_lower_bound_is_met_where_a_schedule_has_no_gap() -> None:
    for P, costs in ((4, pipec.Costs(0.5, 0.5, 0.5)), (3, pipec.Costs(0.5, 0.5, 0.5))):
        problem = problem_of([*range(P), *reversed(range(P))], 2 * P, costs)
        outcome = play(problem, [list(row) for row in ZBV(moves=0).order(problem)])
        assert lower_bound(problem) == (pytest.approx(outcome.makespan), pytest.approx(outcome.span))
    towers = evolve(problem_of([0, 0, 1], 4, pipec.Costs(latency=0.5)), edges=((0, 2), (1, 2)))
    assert lower_bound(towers) == (24, 24)
    assert lower_bound(problem_of([0, 1], 4, pipec.Costs(latency=0.5))) == (13.5, 12)


@pytest.mark.parametrize("policy", [ZB2P(), ZBV()])
def test_the_search_is_the_same_every_time_and_can_be_left_out(policy: Any) -> None:
    v = 2 if isinstance(policy, ZBV) else 1
    costs, limit = pipec.Costs(1.0, 2.0, 1.0), pipec.activations(3 if v == 1 else 2)
    problem = evolve(problem_of([*range(4), *reversed(range(4))][: 4 * v], 8, costs), memory_limit=limit)
    orders = [policy.order(problem) for _ in range(2)]
    assert orders[0] == orders[1]
    plain = play(problem, evolve(policy, moves=0).order(problem))
    assert play(problem, orders[0]).makespan < plain.makespan
    assert evolve(policy, moves=0).order(evolve(problem, memory_limit=None)) is not None


def test_limits_in_bytes_missing_costs_and_many_tasks_are_left_to_the_rhythms() -> None:
    problem = problem_of([0, 1, 2, 3], 8, pipec.Costs(4.0, 4.0, 4.0, latency=1.0))
    rhythms = (Rhythm((1,), (1,), (1, 1, 1), window=1.5),)
    plain = best_order(problem, 3, rhythms)
    assert best_order(problem, 3, rhythms, moves=6000) != plain
    assert best_order(evolve(problem, memory_limit=1e9), 3, rhythms, moves=6000) == plain
    given = evolve(problem, costs=pipec.Costs())  # as where none were given
    assert best_order(given, 3, rhythms, moves=6000) == best_order(given, 3, rhythms)
    many = evolve(problem, microbatches=300)
    assert best_order(many, 3, rhythms, moves=6000) == best_order(many, 3, rhythms)


@pytest.mark.parametrize(
    ("schedule", "cap"),
    [("zb-1p", 4), ("zb-2p", 8), ("zb-v", 4), ("v-half", 3), ("v-min", 2), ("interleaved-zero-bubble", 4)],
)
def test_a_plan_is_never_longer_for_it(schedule: str, cap: float) -> None:
    policy: Any = SCHEDULES[schedule]()
    stages = 4 if policy.placement == "linear" else 8
    for costs in (pipec.Costs(1.0, 2.0, 1.0, latency=0.25), pipec.Costs(1.0, 0.5, 0.75)):
        plain, polished = (
            pipec.compile(pipec.chain(stages), 4, 6, evolve(policy, moves=moves), costs=costs).simulate()
            for moves in (0, 1500)
        )
        assert polished.makespan <= plain.makespan + 1e-9
        assert max(polished.peak_share) <= cap
