"""Weights as old as a schedule says and not as its order makes them, and versions that are read for a long time."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from declared import Dense, Replay, chain
from models import same
from test_asynchronous_runs import adam, batches, momentum, runner, state
from torch import Tensor, nn

import pipec
from pipec.footprint import versions_kept
from pipec.ir import Kind, Plan
from pipec.periods import periods


def delayed(forward: Any, backward: Any = 0, correction: Any = None, stages: int = 3, minibatch: int = 2) -> Plan:
    policy = pipec.Delayed(forward, backward, correction)
    return pipec.compile(pipec.chain(stages), stages, minibatch, policy, update="stage")


@pytest.mark.parametrize("minibatch", [1, 3])
def test_every_task_reads_as_old_weights_as_is_said(minibatch: int) -> None:
    forward, backward = (5, 3, 0), (2, 3, 0)
    plan = delayed(forward, backward, minibatch=minibatch)
    for stage in range(3):
        for task in plan.compute(stage):
            if task.kind in (Kind.FORWARD, Kind.BACKWARD):
                old = (forward if task.kind is Kind.FORWARD else backward)[stage]
                assert task.version == max(0, task.microbatch // minibatch - old)
    assert versions_kept(plan) == [6, 4, 1]
    assert plan.weights == "delayed forward=5,3,0 backward=2,3,0"
    assert Plan.parse(str(plan)) == plan
    assert plan.minibatches - periods(plan).steady == 6  # as long as its last reader takes


@pytest.mark.parametrize("longest", [0, 40])
def test_delays_of_any_length_settle(longest: int) -> None:
    plan = delayed(longest, stages=1, minibatch=1)
    assert periods(plan).steady == longest
    assert Plan.parse(str(plan)) == plan


@pytest.mark.parametrize(("make", "told"), [
    (lambda: pipec.Delayed(-1), "whole numbers of updates, at least 0: one, or one per stage; got -1"),
    (lambda: pipec.Delayed(1.5), r"got 1\.5"),
    (lambda: pipec.Delayed([]), r"got \[\]"),
    (lambda: pipec.Delayed(True), "got True"),
    (lambda: pipec.Delayed("many"), "got 'many'"),
    (lambda: pipec.Delayed(3, 4), "weights 4 updates old and its forward 3; a backward comes later"),
    (lambda: pipec.Delayed((4, 1), 2), r"2 updates old and its forward 1 \(stage 1\)"),
    (lambda: pipec.Delayed((4, 1), (1, 1, 1)), "delays of 2 stages forward, but of 3 backward"),
    (lambda: pipec.Delayed(4, 1, 2.0), "D lies between 0 and 1"),
    (lambda: delayed((1, 2)), "delayed: 2 delays are given for 3 stages; give one per stage, or one for all"),
])
def test_delays_that_cannot_be(make: Any, told: str) -> None:
    with pytest.raises(pipec.ScheduleError, match=told):
        make()


def test_a_plan_with_too_few_delays_is_told() -> None:
    text = str(delayed((2, 2, 2))).replace("forward=2,2,2", "forward=2,2")
    with pytest.raises(pipec.PlanError, match="2 delays are given for 3 stages"):
        Plan.parse(text).verify()


@pytest.mark.parametrize("correction", [None, 0.3, "optimal"])
@pytest.mark.parametrize(("forward", "backward", "microbatches"), [(4, 2, 1), ((3, 2, 0), (0, 2, 0), 2)])
def test_given_delays_by_hand(forward: Any, backward: Any, microbatches: int, correction: Any) -> None:
    """u = w(t - tau_b) - (tau_f - tau_b) delta(t - tau_b), with the delta of that version."""
    deltas: dict[tuple[int, int], list[Tensor]] = {}
    given, modules = batches(14), [Dense() for _ in range(3)]

    def distance(stage: int) -> int:
        both = [own if isinstance(own, int) else own[stage] for own in (forward, backward)]
        return both[0] - both[1]

    def read(run: Replay, stage: int, version: int, _: int) -> list[Tensor]:
        weights = run.versions[stage][version]
        if correction is None or distance(stage) == 0 or version == 0:
            return weights
        return [w.sub(d, alpha=distance(stage)) for w, d in zip(weights, deltas[stage, version], strict=True)]

    def updated(run: Replay, stage: int, before: list[Tensor]) -> None:
        if correction is None or distance(stage) == 0:
            return
        g = 1 - 2 / (distance(stage) + 1) if correction == "optimal" else correction ** (1 / distance(stage))
        change = [w - b for w, b in zip(run.weights(stage), before, strict=True)]
        version = max(run.versions[stage])
        old = deltas.get((stage, version), [w * 0 for w in change])
        deltas[stage, version + 1] = [(g * d).add(c, alpha=1 - g) for d, c in zip(old, change, strict=True)]

    mine = copy.deepcopy(modules)
    net = chain(mine)
    plan = pipec.compile(net, 2, microbatches, pipec.Delayed(forward, backward, correction), update="stage")
    expected = Replay(modules, momentum, byhand=True, backward=read, updated=updated)
    expected.run(plan, given)
    with pipec.Runner(net, plan, optimizer=momentum, backend="replay") as run:
        results = [run.step(**batch) for batch in given] + [run.flush()]
        assert list(run.staleness.values()) == [forward if isinstance(forward, int) else forward[s] for s in range(3)]
    assert same([loss for own in results for loss in own.microbatch_losses.get("loss", ())], expected.losses)
    assert same(state(mine), state(expected.modules))


@pytest.mark.parametrize("recompute", ["never", "always"])
def test_given_delays_are_drained_and_resumed(recompute: str) -> None:
    given, found = batches(12), []
    for resumed in (False, True):
        modules: list[nn.Module] = [Dense() for _ in range(3)]
        for number, module in enumerate(modules):
            module.load_state_dict({key: value * 0 + number / 5 for key, value in module.state_dict().items()})
        how = {"schedule": pipec.Delayed(4, 1, 0.2), "microbatches": 2, "optimizer": adam, "recompute": recompute}
        with runner(modules, **how) as first:
            for batch in given[:7]:
                first.step(**batch)
            if not resumed:
                first.flush()
                for batch in given[7:]:
                    first.step(**batch)
            saved = first.checkpoint()
        if resumed:
            with runner([Dense() for _ in range(3)], **how) as second:
                second.restore(saved)
                for batch in given[7:]:
                    second.step(**batch)
                saved = second.checkpoint()
        found.append(saved)
    assert same(*found)


def test_techniques_count_on_the_average_of_random_delays() -> None:
    delay = pipec.TruncatedExponential(mean=2.0, max=6.0)
    how = {"delay": delay, "rescheduling": pipec.Rescheduling(steps=10**6)}
    with runner([Dense() for _ in range(3)], pipec.Delayed(1, 0, 0.5), 1, **how) as run:
        assert list(run.staleness.values()) == pytest.approx([1 + delay.average] * 3)
        corrected: list[float] = []

        def seen(read: pipec.WeightsRead) -> None:
            if read.stage == "a" and read.kind is Kind.BACKWARD and "a" in run.deltas:
                own, delta = run.stages[0].trainable()[0].detach(), run.deltas["a"]["weight"]
                corrected.append(float(((own - read.weights["weight"]) / delta).median()))

        run.watch_weights(seen)
        for batch in batches(5):
            run.step(**batch)
        run.flush()
        assert corrected == pytest.approx([1 + delay.average] * 4, rel=1e-2)
        assert run.learning_rates["a"] == pytest.approx([0.1 / (1 + delay.average)], rel=1e-4)
    with runner([Dense() for _ in range(3)], "pipedream", 1, delay=delay) as run:  # its backwards follow forwards
        assert run.staleness == pytest.approx({"a": 2 + delay.average, "b": 1 + delay.average, "c": delay.average})
        assert [own.forward for own in run._flow.steps.half.delays] == [0, 0, 0]  # type: ignore[union-attr]


@pytest.mark.parametrize(("count", "minibatch"), [(5, 1), (6, 1), (6, 2)])
def test_vertical_sync_over_many_steps(count: int, minibatch: int) -> None:
    """The last stage reads a version until long after the step that replaces it."""
    given, modules = batches(4 * count, rows=4), [Dense() for _ in range(count)]
    mine = copy.deepcopy(modules)
    with runner(mine, pipec.PipeDream(vertical_sync=True), minibatch) as run:
        results = [run.step(**batch) for batch in given] + [run.flush()]
        expected = Replay(modules, momentum)
        expected.run(run.plan, given)
    assert same([loss for own in results for loss in own.microbatch_losses.get("loss", ())], expected.losses)
    assert same(state(mine), state(expected.modules))


def test_a_plan_that_ends_before_the_last_reader_of_a_version_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipec.passes.settle.last_reader", lambda *given: 0)
    with pytest.raises(pipec.PlanError, match=(
        r"periods.* a weight version is read until 3 minibatches after the step that replaces it; the steady period "
        "begins at step 10, but only 13 minibatches are laid out"
    )):
        pipec.compile(pipec.chain(6), 6, 1, pipec.PipeDream(vertical_sync=True), update="stage")


def test_rules_with_little_memory_lay_out_no_more_than_they_need() -> None:
    for schedule in ("pipedream", "pipedream-2bw", "pipemare", "predicted", "live-weights", "nesterov"):
        for minibatch in (6, 1):
            if minibatch == 1 and schedule == "pipedream-2bw":
                continue
            plan = pipec.compile(pipec.chain(6), 6, minibatch, schedule, update="stage")
            assert plan.minibatches - periods(plan).steady == 3
