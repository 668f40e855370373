"""A rank that raises or runs something else: every rank hears of it, by name, and none waits for ever."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from models import chain, data, of_modules, parameters
from test_ranks_reduce import tied
from traps import Trap, memory, survived, value_error

import pipec

# -- failures that all ranks survive --------------------------------------------------------------------------------


CASES = [  # what, stage, which of its calls in the step, in backward, schedule
    ("value", 1, 1, False, "1f1b"), ("value", 0, 3, False, "gpipe"), ("quarrel", 1, 4, True, "1f1b"),
    ("leave", 0, 2, True, "1f1b"), ("memory", 1, 2, False, "zb-h1"),
]


@pytest.mark.parametrize("case", CASES, ids=lambda c: "-".join(map(str, c)))
def test_a_raised_error_reaches_every_rank_and_changes_nothing(case: Any, crew2: Any) -> None:
    what, stage, number, backward, schedule = case
    answers = crew2(survived, what, stage, number, backward, 2, {"schedule": schedule})
    for rank, (told, unchanged, equal, spent) in enumerate(answers):
        kind, text, culprit, notes = told
        task = "I" if schedule == "zb-h1" and backward else "B" if backward else "F"
        where = f"({stage}{task}{number - 1})"
        if rank == stage:
            assert kind == {"value": "ValueError", "quarrel": "QuarrelError", "leave": "SystemExit",
                            "memory": "RuntimeError"}[what]
            assert any(where in note and f"stage {'ab'[stage]!r}" in note for note in notes)
        else:
            assert kind == "RankError"
            assert culprit == stage
            assert text.startswith(f"rank {stage} failed: ")
            assert where in text
            assert f"stage {'ab'[stage]!r}, microbatch {number - 1}" in text
        assert unchanged
        assert equal
        assert spent < 5.0


def test_four_ranks_hear_of_one(crew4: Any) -> None:
    answers = crew4(survived, "value", 2, 2, True, 4, {"schedule": "1f1b"})
    assert [told[2] for told, *_ in answers] == [2, 2, None, 2]
    assert all(unchanged and equal for _, unchanged, equal, _ in answers)


def both_fail(rank: int) -> Any:
    net = of_modules(Trap(value_error, 2), Trap(memory, 1))
    with pipec.Runner(net, pipec.compile(net, 2, 4)) as run:
        try:
            run.step(**data())
        except Exception as error:
            first = type(error).__name__
        return first, float(run.step(**data()).loss) > 0


def test_two_ranks_that_fail_at_once_each_keep_their_own(crew2: Any) -> None:
    (one, alive), (two, also) = crew2(both_fail)
    assert {one, two} <= {"ValueError", "RuntimeError", "RankError"}
    assert {one, two} != {"RankError"}
    assert alive
    assert also


def wrong_input(rank: int) -> Any:
    """Bad inputs on one rank only, another number of rows, and another call."""
    net = chain(2)
    found = []
    with pipec.Runner(net, pipec.compile(net, 2, 4)) as run:
        given = data()
        tries: list[Any] = [
            lambda: run.step(**given) if rank else run.step(x=given["x"], z=given["y"]),
            lambda: run.step(**data(8 - 2 * rank)),
            lambda: run.step(**given) if rank else run.evaluate(**given),
        ]
        for attempt in tries:
            try:
                attempt()
                found.append("nothing")
            except pipec.PipecError as error:
                found.append(f"{type(error).__name__}: {error}")
            given = data()
        assert float(run.step(**data()).loss) > 0
    return found


def test_calls_that_differ_between_ranks(crew2: Any) -> None:
    first, second = crew2(wrong_input)
    assert "no input 'z'" in first[0]
    assert "RankError: rank 0 failed" in second[0]
    assert "no input 'z'" in second[0]
    assert first[1] == second[1]
    assert "8 rows on rank 0, 6 rows on rank 1" in first[1]
    assert first[2] == second[2]
    assert "rank 0 is in evaluate() before step 0, rank 1 in step 0" in first[2]


def update_fails(rank: int) -> Any:
    """An optimizer that fails in UPDATE on rank 1; the others hear of it."""

    class Broken(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            raise ValueError("no step today")

    net = chain(2)
    plan = pipec.compile(net, 2, 4, update="stage")
    with pipec.Runner(net, plan, optimizer=lambda p: (Broken if rank else torch.optim.SGD)(p, lr=0.1)) as run:
        try:
            run.step(**data())
        except Exception as error:
            return type(error).__name__, str(error)
    return None


def test_a_failing_update_is_told_to_all(crew2: Any) -> None:
    first, second = crew2(update_fails)
    assert second == ("ValueError", "no step today")
    assert first[0] == "RankError"
    assert "rank 1 failed: ValueError: no step today" in first[1]
    assert "1U0" in first[1]
    assert "may have been updated" in first[1]


def skipped(rank: int, evaluate: bool) -> list[str]:
    """Rank 1 leaves out a batch: its next one would be paired with the one before it on rank 0."""
    net = chain(2)
    found = []
    with pipec.Runner(net, pipec.compile(net, 2, 4)) as run:
        run.step(**data(8))
        for seed in ((1, 2), (2, 3))[rank]:
            try:
                (run.evaluate if evaluate else run.step)(**data(8, seed))
            except pipec.RankError as error:
                found.append(str(error))
        run.step(**data(8, 4))
        mine = data(8, 5)
        run.step(**{"xy"[rank]: mine["xy"[rank]]})  # only what its stage reads
    return found


@pytest.mark.parametrize("evaluate", [False, True])
def test_a_rank_that_skips_a_batch_is_told(evaluate: bool, crew2: Any) -> None:
    for found in crew2(skipped, evaluate):
        where = "evaluate() before step 1" if evaluate else "step 1"
        told = f"input 'x' is not the same on ranks 0 and 1 (rank 0 in {where}, rank 1 in {where}); all ranks of a"
        assert [text.startswith(told) for text in found] == [True, True]


# -- ranks that do not run the same plan ----------------------------------------------------------------------------


def another_plan(rank: int, key: str) -> None:
    net = chain(2 + (key == "stages" and rank == 1))
    how: dict[str, Any] = {"schedule": "1f1b", "microbatches": 4}
    if rank == 1 and key in ("schedule", "microbatches", "recompute", "update"):
        how[key] = {"schedule": "gpipe", "microbatches": 8, "recompute": "always", "update": "stage"}[key]
    plan = pipec.compile(net, 2, **how)
    optimizer = (lambda p: torch.optim.SGD(p, lr=0.1)) if plan.update else None
    pipec.Runner(net, plan, optimizer=optimizer)


@pytest.mark.parametrize(("key", "text"), [
    ("schedule", "schedule: 1f1b on rank 0; gpipe on rank 1"),
    ("microbatches", "microbatches: 4 on rank 0; 8 on rank 1"),
    ("recompute", "recompute: never on rank 0; always on rank 1"),
    ("update", "update: None on rank 0; stage on rank 1"),
    ("stages", "stages: s0, s1 on rank 0; s0, s1, s2 on rank 1"),
])
def test_ranks_with_another_plan_are_an_error_on_all(key: str, text: str, crew2: Any) -> None:
    for word, told in crew2.answers(another_plan, key):
        assert word == "raised"
        assert told[0] == "RankError"
        assert text in told[1]


def no_fit(rank: int) -> list[str]:
    """Plans that do not fit the processes, and a runner that only rank 1 cannot make."""
    found = []
    net = chain(4)
    for make in (
        lambda: pipec.Runner(net, pipec.compile(net, 4, 4)),
        lambda: pipec.Runner(net, pipec.compile(net, 2, 4), optimizer=(torch.optim.SGD if rank else None)),
        lambda: pipec.Runner(net, pipec.compile(net, 2, 4), outputs="everywhere"),
        lambda: pipec.Runner(net, pipec.compile(net, 1, 4)),
    ):
        try:
            make()
            found.append("nothing")
        except pipec.RunError as error:
            found.append(str(error))
    return found


def test_plans_that_do_not_fit(crew2: Any) -> None:
    first, second = crew2(no_fit)
    assert "the plan has 4 devices, so the number of processes must be 4; torch.distributed was initialised" in first[0]
    assert "rank 1 could not make its runner: RunError: the plan has no UPDATE" in first[1]
    assert second[1].startswith("the plan has no UPDATE")
    assert "outputs must be 'owner' or 'all'" in first[2]
    assert "compile with data_parallel=2" in first[3]


# -- what is added up is trained on all ranks ---------------------------------------------------------------------


def frozen_on_one(rank: int, replicas: int) -> list[Any]:
    """A script freezes a parameter on one rank only, before a step, then on all."""
    net = tied(4) if replicas == 1 else chain(4)
    weight = parameters(net)[0]
    with pipec.Runner(net, pipec.compile(net, 2, 4, data_parallel=replicas), timeout=10) as run:
        run.step(**data())
        weight.requires_grad_(rank != 2 * (replicas - 1))
        with pytest.raises(pipec.RankError) as error:
            run.step(**data())
        run.evaluate(**data())
        weight.requires_grad_(False)
        run.step(**data())
    return [str(error.value), error.value.rank]


def test_a_parameter_that_one_rank_has_frozen_is_told(crew2: Any, crew4: Any) -> None:
    shared = ("the parameter that stages 'a' (as 'weight') and 'd' (as 'weight') share is trained on rank 1 and frozen "
              "on rank 0; freeze and unfreeze it on all ranks alike, before the same step")
    assert crew2(frozen_on_one, 1) == [[shared, 0]] * 2
    other = ("ranks 0 and 2 do not train the same parameters; freeze and unfreeze them on all replicas alike, before "
             "the same step")
    assert crew4(frozen_on_one, 2) == [[other, 2]] * 4
