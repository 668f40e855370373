"""Asynchronous plans over real processes: bit-equal to the same plan in one process, results and weights alike."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from declared import chain
from models import same
from test_asynchronous_runs import SCHEDULES, WIDTH, adam, batches, momentum
from test_ranks_reduce import Head
from torch import Tensor, nn

import pipec


def modules(count: int) -> list[nn.Module]:
    torch.manual_seed(3)
    return [
        nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.3), nn.BatchNorm1d(WIDTH)) if number % 2
        else nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for number in range(count)
    ]


def build(count: int, skips: bool = True) -> pipec.Pipeline:
    """A chain whose first value jumps to the last stage."""
    made = modules(count)
    if not skips:
        return chain(made)
    net = pipec.Pipeline("chain")
    x, y = net.input("x"), net.input("y")
    value = first = net.stage("a", made[0], x)
    for letter, module in zip("bcdefghij", made[1:], strict=False):
        value = net.stage(letter, module, value)
    value = net.stage("last", lambda one, other: one + other, value, pipec.skip(first))
    net.output(value)
    net.output(first, "first")
    net.loss("mse", nn.functional.mse_loss, value, y)
    return net


def state(run: pipec.Runner) -> list[Any]:
    """What this rank's stages hold."""
    return [dict(stage.fn.state_dict()) for stage in run.stages if isinstance(stage.fn, nn.Module)]


def mine(run: pipec.Runner, other: pipec.Runner) -> list[Any]:
    """The same of a run in one process, of the stages that ``run`` has."""
    return [dict(two.fn.state_dict()) for one, two in zip(run.stages, other.stages, strict=True)
            if isinstance(one.fn, nn.Module)]


def told(result: Any) -> list[Any]:
    rest = (getattr(result, "finished", ()), getattr(result, "microbatch_losses", {}), result.microbatches)
    return [result.losses, result.outputs, *rest]


def pair(rank: int, make: Any, plan: Any, **how: Any) -> tuple[pipec.Runner, pipec.Runner]:
    """The plan over ranks, and in this process alone."""
    net, plain = make(), make()
    options = {"optimizer": momentum, "seed": 1} | how
    return (pipec.Runner(net, plan(net), outputs="all", **options),
            pipec.Runner(plain, plan(plain), backend="replay", **options))


def compare(run: pipec.Runner, other: pipec.Runner, call: Any) -> list[str]:
    found = [] if same(told(call(run)), told(call(other))) else ["the result"]
    found += [] if same(state(run), mine(run, other)) else ["the weights"]
    return found + ([] if run.in_flight == other.in_flight else [f"{run.in_flight} instead of {other.in_flight}"])


def trained(rank: int, size: int, name: str, how: dict[str, Any]) -> list[str]:
    """Steps, a flush between, evaluation, and steps again."""
    def plan(net: pipec.Pipeline) -> Any:
        return pipec.compile(net, size, 4, SCHEDULES[name], update="stage", **how)

    optimizer = adam if name == "predicted" else momentum
    found = []
    one, two = pair(rank, lambda: build(2 * size - 1), plan, optimizer=optimizer,
                    rescheduling=pipec.Rescheduling(steps=10))
    with one as run, two as other:
        given = batches(9, 10)
        for number, batch in enumerate(given):
            if number == 6:
                found += compare(run, other, lambda r: r.flush())
            if number == 8:
                found += compare(run, other, lambda r: r.evaluate(**given[0]))
            found += compare(run, other, lambda r, batch=batch: r.step(**batch))
        found += compare(run, other, lambda r: r.flush())
        own = [name for name, stage in zip(other.staleness, run.stages, strict=True) if stage.fn is not None]
        found += [] if run.staleness == other.staleness else ["staleness"]
        for words in ("learning_rates", "deltas"):
            a, b = getattr(run, words), getattr(other, words)
            found += [] if same(a, {key: b[key] for key in b if key in own}) else [words]
    return found


@pytest.mark.parametrize("name", SCHEDULES)
def test_two_ranks(name: str, crew2: Any) -> None:
    assert crew2(trained, 2, name, {}) == [[]] * 2


@pytest.mark.parametrize(("name", "how"), [
    ("pipemare", {"recompute": "always"}), ("pipedream", {"placement": [0, 1, 2, 3, 3, 2, 1, 0]}), ("2bw", {}),
    ("nesterov", {"placement": "looped"}),
])
def test_four_ranks(name: str, how: dict[str, Any], crew4: Any) -> None:
    assert crew4(trained, 4, name, how) == [[]] * 4


def in_segments(rank: int) -> list[str]:
    """Values are recomputed on one rank for another."""
    one, two = pair(rank, lambda: build(4, False), lambda net: pipec.compile(
        net, 4, 4, pipec.PipeMare(segments=2), update="stage"))
    found = []
    with one as run, two as other:
        for batch in batches(6, 8):
            found += compare(run, other, lambda r, batch=batch: r.step(**batch))
        return found + compare(run, other, lambda r: r.flush())


def test_recompute_in_segments(crew4: Any) -> None:
    assert crew4(in_segments) == [[]] * 4


def warmed(rank: int) -> list[str]:
    """T3: a synchronous warm-up, then asynchronous, then back; what the switch finished comes with flush()."""
    def plan(net: Any, schedule: Any = "1f1b") -> Any:
        return pipec.compile(net.spec, 2, 4, schedule, update="stage")

    found = []
    one, two = pair(rank, lambda: build(3), plan, rescheduling=pipec.Rescheduling(steps=5))
    with one as run, two as other:
        given = batches(8, 8)
        parts = {None: given[:2], "pipemare": given[2:5], "gpipe": given[5:6], "pipedream": given[6:]}
        for schedule, part in parts.items():
            if schedule is not None:
                for each in (run, other):
                    each.switch(plan(each, schedule))
                found += compare(run, other, lambda r: r.flush()) if schedule == "gpipe" else []
            for batch in part:
                found += compare(run, other, lambda r, batch=batch: r.step(**batch))
        return found + compare(run, other, lambda r: r.flush())


def test_switching_between_synchronous_and_asynchronous(crew2: Any) -> None:
    assert crew2(warmed) == [[]] * 2


def refused(rank: int) -> list[str]:
    """Plans that ranks cannot go on with, then a step as if nothing had been asked."""
    net = build(3)
    plan = pipec.compile(net, 2, 4, "pipemare", update="stage", placement=[0, 0, 1, 1])
    found = []
    with pipec.Runner(net, plan, optimizer=momentum) as run:
        run.step(**batches(1, 8)[0])
        how = {"schedule": "1f1b", "update": "stage"}
        tries = [
            lambda: pipec.compile(net, 2, 4, placement=[0, 1, 1, 1], **how),
            lambda: pipec.compile(net, 3, 4, **how),
            lambda: pipec.compile(net, 2, 4, placement=[0, 0, 1, 1], **(how if rank else how | {"update": None})),
            lambda: pipec.compile(net, 2, 4 + rank, placement=[0, 0, 1, 1], **how),
        ]
        for make in tries:
            with pytest.raises(pipec.PipecError) as error:
                run.switch(make())
            found.append(f"{type(error.value).__name__}: {error.value}")
        assert run.plan is plan
        assert run.in_flight == (0,)
        run.step(**batches(1, 8)[0])
        run.flush()
    return found


def test_plans_that_ranks_cannot_switch_to(crew2: Any) -> None:
    first, second = crew2(refused)
    assert "stage 'b' is on device 1, but its module and optimizer are on rank 0's" in first[0]
    assert "compile it with placement=[0, 0, 1, 1]" in first[0]
    assert "it has 3 devices and 1 replicas, there are processes for 2 and 1" in second[1]
    assert "compiled with update=None" in first[2]
    assert "rank 0 failed" in second[2]
    assert "microbatches: 4 on rank 0; 5 on rank 1" in first[3]


def tied(rank: int) -> str:
    layer = nn.Linear(WIDTH, WIDTH)
    net = chain([layer, Head(layer.weight)])
    with pytest.raises(pipec.RunError) as error:
        pipec.Runner(net, pipec.compile(net, 2, 2, "pipedream", update="stage"), optimizer=momentum)
    return str(error.value)


def test_shared_parameters_are_refused(crew2: Any) -> None:
    for text in crew2(tied):
        assert "stages 'a' (as 'weight') and 'b' (as 'weight') share a parameter, whose versions would differ" in text


# -- checkpoints ----------------------------------------------------------------------------------------------------


def saved(rank: int, path: str) -> list[Any]:
    net = build(3)
    with pipec.Runner(net, pipec.compile(net, 2, 4, "pipemare", update="stage"), optimizer=adam, seed=1) as run:
        given = batches(8, 8)
        for batch in given[:4]:
            run.step(**batch)
        run.save(path)
        for batch in given[4:]:
            run.step(**batch)
        run.flush()
        return state(run)


def resumed(rank: int, path: str) -> list[Any]:
    torch.manual_seed(9)
    net = build(3)
    with pipec.Runner(net, pipec.compile(net, 2, 4, "pipemare", update="stage"), optimizer=adam, seed=7) as run:
        run.step(**batches(1, 8)[0])  # in flight: dropped
        run.load(path)
        for batch in batches(8, 8)[4:]:
            run.step(**batch)
        run.flush()
        return state(run)


def test_saved_and_gone_on_with(crew2: Any, tmp_path: Path) -> None:
    """By two ranks and by one process: deltas, numbers of updates and random numbers included."""
    expected = crew2(saved, str(tmp_path))
    assert same(crew2(resumed, str(tmp_path)), expected)
    net = build(3)
    plan = pipec.compile(net, 2, 4, "pipemare", update="stage")
    with pipec.Runner(net, plan, optimizer=adam, backend="replay", seed=5) as run:
        run.load(tmp_path)
        for batch in batches(8, 8)[4:]:
            run.step(**batch)
        run.flush()
        assert same(state(run), [own for part in expected for own in part])


# -- failures -------------------------------------------------------------------------------------------------------


class Fuse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.left = nn.Linear(WIDTH, WIDTH), 10_000

    def forward(self, x: Tensor) -> Tensor:
        self.left -= self.training
        if self.left < 0:
            raise ValueError("burnt")
        return self.layer(x)


def burnt(rank: int, stage: int) -> list[Any]:
    """A stage fails in the fourth step; then ranks begin with an empty pipeline, as one process would."""
    torch.manual_seed(2)
    parts = [Fuse() for _ in range(3)]
    net = chain(parts)
    found = []
    with pipec.Runner(net, pipec.compile(net, 2, 4, "pipemare", update="stage"), optimizer=momentum, seed=1) as run:
        for number, batch in enumerate(batches(4, 8)):
            if number == 3 and run.stages[stage].fn is not None:
                parts[stage].left = 1
            try:
                run.step(**batch)
            except (ValueError, pipec.RankError) as error:
                found += [type(error).__name__, str(error), getattr(error, "__notes__", [])]
        parts[stage].left = 10_000
        assert run.in_flight == ()
        for batch in batches(3, 8):
            run.step(**batch)
        assert run.flush().finished[-1] == (5, 3)
    return found


@pytest.mark.parametrize("stage", [0, 2])
def test_a_failure_reaches_every_rank_and_drops_what_is_in_flight(stage: int, crew2: Any) -> None:
    for rank, (kind, text, notes) in enumerate(crew2(burnt, stage)):
        assert kind == ("ValueError" if rank == (stage == 2) else "RankError")
        assert "burnt" in text
        assert any("minibatches in flight are lost: " in note and note.endswith("The next step begins with an empty "
                                                                              "pipeline") for note in notes)


def apart(rank: int) -> list[str]:
    """Calls that differ, batches that do not fit or differ, parameters that change: nothing in flight is lost."""
    net = build(3)
    found = []
    with pipec.Runner(net, pipec.compile(net, 2, 4, "pipemare", update="stage"), optimizer=momentum) as run:
        given = batches(4, 8)
        for batch in given[:2]:
            run.step(**batch)
        weight = next(iter(run.parameters()))

        def frozen() -> None:
            weight.requires_grad_(rank == 1)
            try:
                run.flush()
            finally:
                weight.requires_grad_()

        few = {key: value[:3] for key, value in given[2].items()}
        for attempt in (
            lambda: run.flush() if rank else run.step(**given[2]), lambda: run.step(**few),
            lambda: run.step(**given[2 + rank]), frozen, lambda: run.step(z=1) if rank else run.step(**given[2]),
        ):
            with pytest.raises(pipec.PipecError) as error:
                attempt()
            found.append(str(error.value))
            assert run.in_flight
        assert run.flush().finished[-1] == (1, 3)
    return found


def test_ranks_that_are_not_together_lose_nothing(crew2: Any) -> None:
    first, second = crew2(apart)
    assert first[0] == second[0]
    assert first[0] == "rank 0 is in step 2, rank 1 in a flush before step 2; all ranks make the same calls"
    assert "3 rows, fewer than its 4 microbatches" in first[1] + second[1]
    assert "input 'x' is not the same on ranks 0 and 1 (rank 0 in step 2, rank 1 in step 2)" in first[2]
    assert "does not require a gradient any more" in first[3]
    assert "rank 0 failed" in second[3]
    assert "no input 'z'" in second[4]
    assert "rank 1 failed" in first[4]


def traced(rank: int) -> Any:
    net = build(3)
    with pipec.Runner(net, pipec.compile(net, 2, 4, "pipemare", update="stage"), optimizer=momentum) as run:
        for batch in batches(3, 8):
            run.step(**batch)
        return sorted({(item.device, str(item.task)) for item in run.trace().intervals})


def test_the_trace_is_that_of_all_ranks(crew2: Any) -> None:
    first, second = crew2(traced)
    assert first == second
    assert {device for device, _ in first} == {0, 1}
