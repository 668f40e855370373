"""Asynchronous runs in a training script: flushes, evaluation, checkpoints, schedulers, switches, random numbers."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from declared import Dense, Replay, chain
from models import same
from torch import Tensor, nn

import pipec
from pipec.runtime.randomness import Position

WIDTH = 4
SCHEDULES: dict[str, Any] = {
    "pipedream": pipec.PipeDream(), "vertical": pipec.PipeDream(vertical_sync=True), "2bw": pipec.PipeDream2BW(),
    "pipemare": pipec.PipeMare(), "1f1b": pipec.PipeMare(inflight="1f1b"), "live": pipec.LiveWeights(every=1),
    "predicted": pipec.Predicted(), "nesterov": pipec.Nesterov(momentum=0.5),
}


def adam(params: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, lr=0.05)


def momentum(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def stages(count: int = 3, dropout: float = 0.0) -> list[nn.Module]:
    torch.manual_seed(3)
    if not dropout:
        return [Dense() for _ in range(count)]
    return [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(dropout), nn.BatchNorm1d(WIDTH)) for _ in range(count)]


def batches(count: int, rows: int = 6) -> list[dict[str, Tensor]]:
    make = torch.Generator().manual_seed(5)
    return [{"x": torch.randn(rows, WIDTH, generator=make), "y": torch.randn(rows, WIDTH, generator=make)}
            for _ in range(count)]


def runner(modules: list[nn.Module], schedule: Any = "pipemare", microbatches: int = 3, **how: Any) -> pipec.Runner:
    compiled = {key: how.pop(key) for key in ("recompute",) if key in how}
    net = chain(modules)
    plan = pipec.compile(net, len(modules), microbatches, schedule, update="stage", **compiled)
    return pipec.Runner(net, plan, **{"optimizer": momentum, "backend": "replay", "seed": 1} | how)


def state(modules: list[nn.Module]) -> list[Tensor]:
    return [value.detach().clone() for module in modules for value in module.state_dict().values()]


def test_results_hold_what_was_finished() -> None:
    given = batches(6)
    with runner(stages(), "pipedream", 1) as run:
        results = [run.step(**batch) for batch in given]
        assert [result.finished for result in results[:4]] == [(), (), ((0, 0),), ((1, 0),)]
        assert run.in_flight == (4, 5)
        assert repr(results[0]) == "Result(nothing finished: the pipeline is still filling)"
        with pytest.raises(pipec.RunError, match="still filling"):
            _ = results[0].loss
        with pytest.raises(pipec.RunError, match=r"no output here.*still filling; .*the output of run\.flush"):
            _ = results[0].output
        assert results[2].minibatches == (0,)
        assert results[2].loss == results[2].microbatch_losses["loss"][0]
        assert results[2].output.shape == (6, WIDTH)
        last = run.flush()
        assert last.finished == ((4, 0), (5, 0))
        assert last.output.shape == (12, WIDTH)
        assert torch.isclose(last.loss, sum(last.microbatch_losses["loss"]) / 2)
        assert run.in_flight == ()


@pytest.mark.parametrize("name", SCHEDULES)
def test_drained_and_continued(name: str) -> None:
    """A run of 5 minibatches, a flush, 4 more: the replay of a plan of 5, then of one of 4."""
    given, modules = batches(9), stages()
    mine = copy.deepcopy(modules)
    if name in ("pipedream", "vertical", "2bw"):
        expected = Replay(modules, adam)
        with runner(mine, SCHEDULES[name], optimizer=adam) as run:
            for k, batch in enumerate(given):
                run.step(**batch)
                if k == 4:
                    run.flush()
            run.flush()
            expected.run(run.plan, given[:5])
            expected.run(run.plan, given[5:])
        assert same(state(mine), state(expected.modules))
    # and flushing after every step leaves only what overlaps inside a minibatch
    found = []
    for backend in ("replay", "threads"):
        mine = copy.deepcopy(modules)
        with runner(mine, SCHEDULES[name], backend=backend) as run:
            for batch in given[:3]:
                run.step(**batch)
                assert {k for k, _ in run.flush().finished} <= {0, 1, 2}
        found.append(state(mine))
    assert same(*found)


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("recompute", ["never", "always"])
def test_dropout_is_repeatable_on_both_backends(name: str, recompute: str) -> None:
    found = []
    for backend in ("replay", "threads", "threads"):
        mine = stages(dropout=0.5)
        before = torch.get_rng_state()
        with runner(mine, SCHEDULES[name], backend=backend, recompute=recompute) as run:
            losses = [run.step(**batch).microbatch_losses for batch in batches(5)] + [run.flush().microbatch_losses]
        assert torch.equal(torch.get_rng_state(), before)
        found.append([losses, state(mine)])
    assert same(found[0], found[1])
    assert same(found[1], found[2])


def test_recompute_changes_no_bit_with_stashed_weights() -> None:
    found = []
    for recompute in ("never", "always", {"b": "always"}):
        mine = stages(dropout=0.5)
        with runner(mine, "pipedream", recompute=recompute) as run:
            losses = [run.step(**batch).microbatch_losses for batch in batches(6)] + [run.flush().microbatch_losses]
        found.append([losses, state(mine)])
    assert same(found[0], found[1])
    assert same(found[0], found[2])


def test_dropout_masks_are_those_of_a_synchronous_run() -> None:
    """Minibatch k, microbatch m draws what step k of a synchronous run draws, so its first outputs are equal."""
    mine, other = stages(dropout=0.5), stages(dropout=0.5)
    net = chain(other)
    with pipec.Runner(net, pipec.compile(net, 3, 3, "gpipe", update="stage"), optimizer=momentum, seed=1) as run:
        expected = run.step(**batches(1)[0]).output
    with runner(mine, "pipedream") as run:
        results = [run.step(**batches(1)[0]), run.flush()]
    assert torch.equal(torch.cat([result.output for result in results]), expected)


@pytest.mark.parametrize("name", SCHEDULES)
def test_saved_and_resumed_mid_run(name: str) -> None:
    given = batches(8)
    how = {"rescheduling": pipec.Rescheduling(steps=20), "optimizer": adam}
    mine, flushed = stages(dropout=0.3), stages(dropout=0.3)
    with runner(flushed, SCHEDULES[name], **how) as run:  # never saved, drained at the same place
        results = [run.step(**batch) for batch in given[:4]] + [run.flush()]
        drained = run.checkpoint()
        results += [run.step(**batch) for batch in given[4:]] + [run.flush()]
        assert [pair for own in results for pair in own.finished] == [(k, m) for k in range(8) for m in range(3)]
    with runner(mine, SCHEDULES[name], **how) as run:
        for batch in given[:4]:
            run.step(**batch)
        saved = io.BytesIO()
        torch.save(run.checkpoint(), saved)
        assert run.in_flight == ()
        assert same(run.checkpoint(), drained)
        finished = [item for batch in given[4:] for item in run.step(**batch).finished] + list(run.flush().finished)
        assert finished[-1] == (7, 2)
    saved.seek(0)
    torch.manual_seed(99)
    again = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.3), nn.BatchNorm1d(WIDTH)) for _ in range(3)]
    with runner(again, SCHEDULES[name], **{**how, "seed": 7}) as run:
        run.step(**given[0])  # what is in flight is dropped
        run.restore(torch.load(saved, weights_only=True))
        for batch in given[4:]:
            run.step(**batch)
        last = run.flush()
    assert last.finished[-1] == (7, 2)
    assert same(state(mine), state(again))
    assert same(state(mine), state(flushed))


def test_evaluation_drains_first_and_says_so() -> None:
    given = batches(5)
    mine, other = stages(), stages()
    with runner(mine) as run, runner(other) as flushed:
        for batch in given[:4]:
            run.step(**batch)
            flushed.step(**batch)
        waiting = run.in_flight
        result = run.evaluate(**given[4])
        first = flushed.flush()
        assert same(state(mine), state(other))
        assert result.drained == waiting
        assert len(waiting) > 0
        assert f"minibatches {', '.join(map(str, waiting))} finished first" in repr(result)
        assert same(result.losses, flushed.evaluate(**given[4]).losses)
        assert run.evaluate(**given[4]).drained == ()
        told = run.step(**given[4])  # the drained losses come with the next result
        assert told.finished[: len(first.finished)] == first.finished


def test_synchronous_warm_up_then_asynchronous() -> None:
    """T3: the same weights and optimizer state go on in another plan, and back."""
    given, modules = batches(8), stages()
    mine = copy.deepcopy(modules)
    net = chain(mine)
    warm = pipec.compile(net, 2, 3, "1f1b", update="stage")
    overlapping = pipec.compile(net, 3, 3, pipec.PipeDream(), update="stage")
    expected = Replay(modules, adam)
    for backend in ("threads", None):
        own = copy.deepcopy(modules)
        net = chain(own)
        with pipec.Runner(net, warm, optimizer=adam, backend=backend) as run:
            for batch in given[:2]:
                run.step(**batch)
            run.switch(overlapping)
            for batch in given[2:6]:
                run.step(**batch)
            run.switch(warm)
            assert run.flush().finished == ((5, 1), (5, 2))  # what the switch flushed
            for batch in given[6:]:
                run.step(**batch)
        if backend == "threads":
            first = state(own)
    # the same with loops of its own: each synchronous step is a flushed plan of one minibatch
    for batch in given[:2]:
        expected.run(overlapping, [batch])
    expected.run(overlapping, given[2:6])
    for batch in given[6:]:
        expected.run(overlapping, [batch])
    assert same(first, state(own))
    assert same(state(own), state(expected.modules))


def test_switching_is_refused_before_anything_changes() -> None:
    mine = stages()
    with runner(mine) as run:
        run.step(**batches(1)[0])
        before = run.plan
        with pytest.raises(pipec.RunError, match="update=None, the runner's plan with update='stage'"):
            run.switch(pipec.compile(chain(mine), 3, 3, "1f1b"))
        with pytest.raises(pipec.RunError, match="another pipeline"):
            run.switch(pipec.compile(chain(stages(4)), 3, 3, "1f1b", update="stage"))
        with pytest.raises(pipec.RunError, match="expected a Plan"):
            run.switch("1f1b")  # type: ignore[arg-type]
        assert run.plan is before
        assert run.in_flight == (0,)


def test_rescheduled_rates_over_a_scheduler_and_groups() -> None:
    """T1: update k of stage i runs with lr(k) / tau^(1 - k/K), lr(k) what the scheduler set for minibatch k."""
    def groups(params: Any) -> torch.optim.Optimizer:
        weight, bias = list(params)
        return torch.optim.SGD([{"params": [weight], "lr": 0.1}, {"params": [bias], "lr": 0.02}])

    used: dict[str, list[list[float]]] = {"a": [], "b": [], "c": []}
    with runner(stages(), "pipemare", 1, optimizer=groups, rescheduling=pipec.Rescheduling(steps=8)) as run:
        assert run.staleness == {"a": 5.0, "b": 3.0, "c": 1.0}
        for name, optimizer in run.optimizers.items():
            def noted(made: Any, args: Any, kwargs: Any, name: str = name) -> None:
                used[name].append([group["lr"] for group in made.param_groups])

            optimizer.register_step_pre_hook(noted)
        schedulers = [torch.optim.lr_scheduler.ExponentialLR(made, 0.9) for made in run.optimizers.values()]
        for batch in batches(12):
            run.step(**batch)
            for scheduler in schedulers:
                scheduler.step()
        run.flush()
        assert {name: rates[-1] for name, rates in used.items()} == run.learning_rates
        assert [group["lr"] for group in run.optimizers["a"].param_groups] == pytest.approx(
            [0.1 * 0.9**12, 0.02 * 0.9**12])
    for name, tau in (("a", 5.0), ("b", 3.0), ("c", 1.0)):
        expected = [[lr * 0.9**k / tau ** (1 - min(k / 8, 1)) for lr in (0.1, 0.02)] for k in range(12)]
        assert [rate for rates in used[name] for rate in rates] == pytest.approx(
            [rate for rates in expected for rate in rates])


def test_rates_are_never_above_the_optimizers_own() -> None:
    rule = pipec.Rescheduling(steps=10)
    assert rule.factor(0, 0.25) == rule.factor(3, 0.0) == rule.factor(12, 9.0) == 1.0
    assert rule.factor(0, 4.0) == 0.25
    assert rule.factor(5, 4.0) == 0.5
    with pytest.raises(pipec.RunError, match="whole number of updates"):
        pipec.Rescheduling(steps=0)


def test_deltas_and_rates_can_be_read() -> None:
    mine = stages()
    with runner(mine, "pipemare", 2) as run:
        assert run.deltas == {}
        assert run.staleness == {"a": 2.5, "b": 1.5, "c": 0.5}
        for batch in batches(4):
            run.step(**batch)
        run.flush()
        assert list(run.deltas) == ["a", "b", "c"]
        assert {key: value.shape for key, value in run.deltas["a"].items()} == {
            "weight": (WIDTH, WIDTH), "bias": (WIDTH,)}
        assert run.learning_rates == {"a": [0.1], "b": [0.1], "c": [0.1]}


def test_random_delays() -> None:
    delay = pipec.TruncatedExponential(mean=2.0, max=6.0)
    points = [delay.quantile((n + 0.5) / 20_000) for n in range(20_000)]
    assert sum(points) / len(points) == pytest.approx(delay.expected, abs=1e-3)
    assert max(points) <= 6.0
    drawn = [delay.draw(Position(1, step), stage, 0) for step in range(200) for stage in range(20)]
    assert sum(drawn) / len(drawn) == pytest.approx(delay.expected, abs=0.1)  # whole numbers, rounded to the nearest
    assert max(drawn) <= delay.longest
    assert sum(map(round, points)) / len(points) == pytest.approx(delay.average, abs=1e-3)
    found = []
    for backend in ("replay", "replay"):
        mine = stages(dropout=0.2)
        with runner(mine, "live-weights", 2, backend=backend, delay=delay) as run:
            for batch in batches(10):
                run.step(**batch)
            run.flush()
            assert all(len(own.kept) <= 6 + 2 + 1 for own in run._weights)
        found.append(state(mine))
    assert same(*found)
    with pytest.raises(pipec.RunError, match="backend='replay'"):
        runner(stages(), delay=delay, backend="threads")


def test_random_delays_are_those_drawn() -> None:
    """The replay reads, per forward, the version that the drawn delay says."""
    delay, modules, given = pipec.TruncatedExponential(mean=1.5, max=4.0), stages(), batches(9)
    mine = copy.deepcopy(modules)

    def older(run: Replay, stage: int, version: int, microbatch: int) -> list[Tensor]:
        drawn = delay.draw(Position(1, microbatch // 2), stage, microbatch % 2)
        return run.versions[stage][max(0, version - drawn)]

    with runner(mine, pipec.LiveWeights(), 2, delay=delay) as run:
        for batch in given:
            run.step(**batch)
        run.flush()
        expected = Replay(modules, momentum, byhand=True, forward=older,
                          backward=lambda run, stage, version, _: run.versions[stage][version])
        expected.run(run.plan, given)
    assert same(state(mine), state(expected.modules))


@pytest.mark.parametrize("backend", ["replay", "threads"])
def test_trace_shows_the_last_step(backend: str, tmp_path: Any) -> None:
    with runner(stages(), "pipemare", 2, backend=backend) as run:
        with pytest.raises(pipec.RunError, match="nothing was measured yet"):
            run.trace()
        for batch in batches(8):
            run.step(**batch)
        timeline = run.trace()
        assert timeline.plan.behind == ()  # one step leaves nothing to a next one
        tasks = [str(task) for device in range(3) for task in timeline.plan.compute(device)]
        # a steady step: two forwards and backwards and one update of every stage
        assert sorted(task[1] for task in tasks) == ["B"] * 6 + ["F"] * 6 + ["U"] * 3
        assert (timeline.end >= timeline.start).all()
        assert timeline.end.max() > 0
        timeline.draw(tmp_path / "step.svg")
        timeline.to_chrome_trace(tmp_path / "step.json")
        assert (tmp_path / "step.svg").stat().st_size > 0


def test_tasks_show_in_the_profiler() -> None:
    with runner(stages()) as run, torch.profiler.profile() as profiler:
        for batch in batches(3):
            run.step(**batch)
    names = {event.name for event in profiler.events()}
    assert {"pipec 0F0 a", "pipec 2B0 c", "pipec 2U0 c"} <= names
