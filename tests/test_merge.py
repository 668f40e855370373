"""Merging the chunks' own orders into one list per device: of all that can start, what starts first."""

from __future__ import annotations

import random

import pytest
from plans import problem_of

import pipec
from pipec.ir import Kind
from pipec.schedules import B, F, I, W, merge


def slow_merge(problem, sequences):
    """What merge promises, step by step: of all ops the one that can start first, ranked on a tie."""
    lists = [[] for _ in range(problem.devices)]
    ends, free = {}, [0.0] * problem.devices
    left = [list(ops) for ops in sequences]
    while any(left):
        able = []
        for c, ops in enumerate(left):
            if not ops:
                continue
            kind, _, m = ops[0]
            back = kind in (Kind.BACKWARD, Kind.BACKWARD_INPUT)
            needs = [("F", a) for a, b in problem.edges if b == c and kind == Kind.FORWARD]
            needs += [("B", b) for a, b in problem.edges if a == c and back] + [("F", c)] * back
            needs += [("B", c)] * (kind == Kind.BACKWARD_WEIGHT)
            if all((*need, m) in ends for need in needs):
                here = problem.chunks[c].device
                delays = [problem.costs.latency * (problem.chunks[o].device != here) for _, o in needs]
                when = max([free[here], *(ends[(*n, m)] + d for n, d in zip(needs, delays, strict=True))])
                able.append((when, -kind, -c if kind else c, c))
        when, _, _, c = min(able)
        op = left[c].pop(0)
        device = problem.chunks[c].device
        free[device] = when + problem.cost(Kind(op[0]), c)
        lists[device].append(op)
        letter = {Kind.FORWARD: "F", Kind.BACKWARD_WEIGHT: "W"}.get(op[0], "B")
        ends[letter, c, op[2]] = free[device]
    return lists


def test_merge_runs_what_is_ready_first():
    rnd = random.Random(7)
    for _ in range(80):
        count, M = rnd.randint(2, 7), rnd.randint(1, 5)
        devices = [0, *(rnd.randrange(3) for _ in range(count - 1))]
        devices = [sorted(set(devices)).index(d) for d in devices]
        pairs = [(a, b) for a in range(count) for b in range(a + 1, count)]
        edges = [(a, b) for a, b in pairs if b == a + 1 or rnd.random() < 0.3]
        costs = pipec.Costs(1.0, 0.5, rnd.choice([0.5, 0.7]), latency=rnd.choice([0.0, 0.2]))
        problem = problem_of(devices, M, edges, costs)
        split = rnd.random() < 0.5
        sequences = []
        for c in range(count):
            ahead = min(count - c, M)
            ops = [F(c, m) for m in range(ahead)]
            for m in range(M):
                ops += [I(c, m), W(c, m)] if split else [B(c, m)]
                ops += [F(c, m + ahead)] if m + ahead < M else []
            sequences.append(ops)
        assert merge(problem, sequences) == slow_merge(problem, sequences)


def test_merge_terminates_where_tasks_cost_nothing_and_where_nothing_can_run():
    free = problem_of([0, 1, 0, 1], 3, costs=pipec.Costs(0, 0, 0))
    rows = merge(free, [[F(c, m) for m in range(3)] + [B(c, m) for m in range(3)] for c in range(4)])
    assert [len(row) for row in rows] == [12, 12]
    stuck = merge(problem_of([0, 1], 1), [[B(0, 0), F(0, 0)], [F(1, 0), B(1, 0)]])
    assert stuck == [[B(0, 0), F(0, 0)], [F(1, 0), B(1, 0)]]
    with pytest.raises(pipec.ScheduleError, match="one sequence per chunk: got 1 for 4 chunks"):
        merge(free, [[]])
