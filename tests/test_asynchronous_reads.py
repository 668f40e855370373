"""Who looks on sees the weights that every task of an asynchronous plan computes with."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from declared import chain
from models import same
from test_asynchronous_runs import SCHEDULES, adam, batches, momentum, runner, stages, state
from torch import Tensor

import pipec
from pipec.ir import Kind

Seen = dict[tuple[Kind, str, int, int], tuple[int, list[Tensor]]]


def noted(seen: Seen) -> Any:
    def on_read(read: pipec.WeightsRead) -> None:
        key = read.kind, read.stage, read.minibatch, read.microbatch
        assert key not in seen
        assert list(read.weights) == ["weight", "bias"]
        assert not any(value.requires_grad for value in read.weights.values())
        seen[key] = read.age, [value.clone() for value in read.weights.values()]

    return on_read


@pytest.mark.parametrize("backend", ["replay", "threads"])
@pytest.mark.parametrize("name", SCHEDULES)
def test_every_task_is_seen_and_nothing_changes(name: str, backend: str) -> None:
    seen: Seen = {}
    mine, other = stages(), stages()
    with runner(mine, SCHEDULES[name], backend=backend) as run, runner(other, SCHEDULES[name]) as plain:
        run.watch_weights(noted(seen))
        for batch in batches(6):
            run.step(**batch)
            plain.step(**batch)
        run.flush()
        plain.flush()
        assert same(state(mine), state(other))
        assert set(seen) == {(kind, stage, k, m) for kind in (Kind.FORWARD, Kind.BACKWARD) for stage in "abc"
                             for k in range(6) for m in range(3)}
        for (kind, stage, k, m), (_, weights) in seen.items():
            if kind is Kind.BACKWARD and name in ("pipedream", "vertical", "2bw", "nesterov"):
                assert same(weights, seen[Kind.FORWARD, stage, k, m][1])
        run.watch_weights(None)
        count = len(seen)
        run.step(**batches(1)[0])
        assert len(seen) == count


def test_ages_are_those_of_the_plan() -> None:
    for name, wanted in (
        ("pipedream", {Kind.FORWARD: (0, 0, 0), Kind.BACKWARD: (2, 1, 0)}),
        ("vertical", {Kind.FORWARD: (0, 1, 2), Kind.BACKWARD: (2, 2, 2)}),
        ("live-weights", {Kind.FORWARD: (0, 0, 0), Kind.BACKWARD: (0, 0, 0)}),
        (pipec.Delayed((3, 2, 1), (1, 0, 1)), {Kind.FORWARD: (3, 2, 1), Kind.BACKWARD: (1, 0, 1)}),
    ):
        seen: Seen = {}
        with runner(stages(), SCHEDULES.get(name, name) if isinstance(name, str) else name, 1) as run:
            run.watch_weights(noted(seen))
            for batch in batches(10):
                run.step(**batch)
            run.flush()
        for kind, ages in wanted.items():
            assert [seen[kind, stage, 7, 0][0] for stage in "abc"] == list(ages), name


def test_a_read_prints_shapes() -> None:
    seen: list[pipec.WeightsRead] = []
    with runner(stages(), "pipedream", 1) as run:
        run.watch_weights(seen.append)
        run.step(**batches(1)[0])
        run.flush()
    told = repr(seen[0])
    assert "microbatch=0" in told
    assert f"weights={{{', '.join(f'{name!r}: {tuple(w.shape)}' for name, w in seen[0].weights.items())}}}" in told
    assert "tensor(" not in told


def test_corrected_and_predicted_weights_are_seen_as_they_were_read() -> None:
    run: pipec.Runner
    moved = []

    def corrected(read: pipec.WeightsRead) -> None:
        if read.kind is Kind.BACKWARD:
            own = dict(run.stages["abc".index(read.stage)].named_parameters())
            for name, value in read.weights.items():
                delta = run.deltas[read.stage][name] if read.stage in run.deltas else torch.zeros_like(value)
                assert torch.equal(value, torch.sub(own[name], delta, alpha=run.staleness[read.stage]))
                moved.append(not torch.equal(value, own[name]))

    with runner(stages(), "pipemare", 1) as run:
        run.watch_weights(corrected)
        for batch in batches(8):
            run.step(**batch)
    assert any(moved)
    seen: Seen = {}
    with runner(stages(), "predicted", 1, optimizer=adam) as run:
        run.watch_weights(noted(seen))
        for batch in batches(8):
            run.step(**batch)
        run.flush()
    now = [p.detach() for p in run.stages[0].trainable()]
    assert seen[Kind.FORWARD, "a", 7, 0][0] == seen[Kind.BACKWARD, "a", 7, 0][0] == 0
    assert not same(seen[Kind.FORWARD, "a", 7, 0][1], seen[Kind.BACKWARD, "a", 5, 0][1])
    assert not same(seen[Kind.FORWARD, "a", 7, 0][1], now)


@pytest.mark.parametrize("recompute", ["never", "always"])
def test_stashed_weights_under_random_delays_are_those_of_the_forward(recompute: str) -> None:
    seen: Seen = {}
    delay = pipec.TruncatedExponential(mean=2.0, max=4.0)
    with runner(stages(), "pipedream", 1, delay=delay, recompute=recompute) as run:
        run.watch_weights(noted(seen))
        for batch in batches(12):
            run.step(**batch)
        run.flush()
    ages = {seen[Kind.FORWARD, "a", k, 0][0] for k in range(12)}
    assert len(ages) > 1
    for k in range(12):
        assert same(seen[Kind.FORWARD, "a", k, 0][1], seen[Kind.BACKWARD, "a", k, 0][1])
        assert seen[Kind.BACKWARD, "a", k, 0][0] >= seen[Kind.FORWARD, "a", k, 0][0]


def test_it_goes_on_after_a_switch_and_fails_as_its_task_does() -> None:
    net = chain(stages())
    warm = pipec.compile(net, 3, 3, "1f1b", update="stage")
    seen: Seen = {}

    def fails(read: pipec.WeightsRead) -> None:
        raise ValueError("seen enough")

    with pipec.Runner(net, warm, optimizer=momentum) as run:
        run.watch_weights(noted(seen))
        run.step(**batches(1)[0])
        assert not seen
        run.switch(pipec.compile(net, 3, 3, "pipemare", update="stage"))
        run.step(**batches(1)[0])
        assert seen
        with pytest.raises(pipec.RunError, match=r"takes a function of a pipec\.WeightsRead, or None; got 3"):
            run.watch_weights(3)  # type: ignore[arg-type]
        run.watch_weights(fails)
        with pytest.raises(ValueError, match="seen enough") as caught:
            run.step(**batches(1)[0])
        assert "raised in stage" in "\n".join(caught.value.__notes__)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("pipec chain")]
