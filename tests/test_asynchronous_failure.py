"""Asynchronous runs: what a failure leaves, and memory."""

from __future__ import annotations

import gc
import re
import threading
import weakref
from typing import Any

import pytest
import torch
from declared import Dense
from models import same
from test_asynchronous_runs import SCHEDULES, WIDTH, batches, runner, stages, state
from torch import Tensor, nn
from torch.nn import functional as F

import pipec

# -- failures ----------------------------------------------------------------------------------------------------


class Fails(Dense):
    def __init__(self) -> None:
        super().__init__()
        self.fuse = -1

    def forward(self, x: Tensor) -> Tensor:
        self.fuse -= 1
        if self.fuse == 0:
            raise ValueError("the stage failed")
        return super().forward(x)


@pytest.mark.parametrize("backend", ["replay", "threads"])
@pytest.mark.parametrize("name", SCHEDULES)
def test_a_failure_drops_what_is_in_flight(name: str, backend: str) -> None:
    modules: list[Any] = [Fails() for _ in range(3)]
    with runner(modules, SCHEDULES[name], backend=backend) as run:
        for batch in batches(4):
            run.step(**batch)
        waiting = run.in_flight
        modules[1].fuse = 2
        with pytest.raises(ValueError, match="the stage failed") as caught:
            run.step(**batches(1)[0])
        notes = "\n".join(caught.value.__notes__)
        assert "raised in stage 'b', microbatch" in notes
        lost = re.search(r"minibatches in flight are lost: ([\d, ]+)", notes)
        assert lost is not None
        numbers = [int(number) for number in lost[1].split(",")]
        assert numbers[-1] == 4
        assert set(numbers) <= {*waiting, 4}  # some were finished in this step, before the failure
        assert run.in_flight == ()
        assert all(p.grad is None for p in run.parameters())
        assert all(not own.kept for own in run._weights)
        # the next step works, and gives what a fresh runner with these weights and optimizer states gives
        saved = run.checkpoint()
        run.step(**batches(1)[0])
        run.flush()
        again = [Dense() for _ in range(3)]
        with runner(again, SCHEDULES[name]) as fresh:
            fresh.restore(saved)
            fresh.step(**batches(1)[0])
            fresh.flush()
    assert same(state(modules), state(again))
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("pipec chain")]


@pytest.mark.parametrize("backend", ["replay", "threads", "lanes"])
@pytest.mark.parametrize("name", ["pipedream", "pipemare"])
def test_a_buffer_that_is_used_again_while_it_is_read(name: str, backend: str) -> None:
    with runner([Dense() for _ in range(3)], SCHEDULES[name], backend=backend) as run:
        first, second = batches(2)
        run.step(**first)
        first["x"].copy_(second["x"])
        with pytest.raises(pipec.RunError, match="input 'x' of minibatch 0 was written into while") as caught:
            run.step(**second)
        assert "minibatches in flight are lost: 0, 1" in "\n".join(caught.value.__notes__)
        for batch in batches(5):  # tensors of every step's own, gone after it
            run.step(**{key: value.clone() for key, value in batch.items()})
        run.flush()
        first["x"].zero_()  # finished, or lost: nobody reads it any more
        run.step(**second)
        run.flush()


@pytest.mark.parametrize("backend", ["replay", "threads"])
def test_a_failure_names_the_microbatch_by_its_minibatch(backend: str) -> None:
    """As ``result.finished`` does, however long the run has been, and not by its place in the plan."""
    modules: list[Any] = [Fails() for _ in range(3)]
    with runner(modules, "pipedream", 2, backend=backend) as run:
        for batch in batches(11, rows=4):
            run.step(**batch)
        modules[0].fuse = 2
        with pytest.raises(ValueError, match="the stage failed") as caught:
            run.step(**batches(1, rows=4)[0])
        notes = "\n".join(caught.value.__notes__)
        assert re.search(r"raised in stage 'a', microbatch 1 of minibatch 11, FORWARD \(0F\d+ of the plan\)", notes)


def test_a_failed_update_names_the_stage_and_clears_gradients() -> None:
    with runner(stages(), "pipedream", 1) as run:
        run.step(**batches(1)[0])

        def fail(*_: Any) -> None:
            raise RuntimeError("no update today")

        handle = run.optimizers["b"].register_step_pre_hook(fail)
        with pytest.raises(RuntimeError, match="no update today") as caught:
            run.step(**batches(1)[0])
        notes = "\n".join(caught.value.__notes__)
        assert "UPDATE (1U0 of the plan) on device 1" in notes
        assert "updated already: c with minibatch 0" in notes
        assert all(p.grad is None for p in run.parameters())
        handle.remove()
        run.step(**batches(1)[0])
        assert run.flush().finished


class Norm(nn.Module):
    """Batch norm that fails where it is told, and knows its statistics after any number of microbatches."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)
        self.seen: dict[int, Tensor] = {}
        self.fuse = -1

    def forward(self, x: Tensor) -> Tensor:
        self.note()
        out: Tensor = self.norm(self.linear(x))
        self.note()
        self.fuse -= 1
        if self.fuse == 0:
            raise ValueError("after the statistics have moved")
        return Late.apply(out, self)  # type: ignore[no-any-return, no-untyped-call]

    def note(self) -> None:
        assert self.norm.running_mean is not None
        self.seen.setdefault(self.count(), self.norm.running_mean.clone())  # a RECOMPUTE comes later

    def count(self) -> int:
        assert self.norm.num_batches_tracked is not None
        return int(self.norm.num_batches_tracked)


class Late(torch.autograd.Function):
    """Counts backwards too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, owner: Norm) -> Tensor:
        ctx.owner = owner
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        ctx.owner.fuse -= 1
        if ctx.owner.fuse == 0:
            raise ValueError("in the middle of the backward")
        return gradients[0], None


def train(run: pipec.Runner, given: list[Any]) -> None:
    for batch in given:
        run.step(**batch)


@pytest.mark.parametrize("backend", ["replay", "threads"])
@pytest.mark.parametrize("recompute", ["never", "always"])
@pytest.mark.parametrize("name", SCHEDULES)
def test_statistics_are_those_of_the_updates_after_a_failure(name: str, recompute: str, backend: str) -> None:
    """Every stage has the buffers that the microbatches of its updates left, wherever the task failed."""
    for stage, fuse in ((0, 1), (1, 3), (2, 4), (2, 9)):
        torch.manual_seed(0)
        modules = [Norm() for _ in range(3)]
        with runner([*modules], SCHEDULES[name], recompute=recompute, backend=backend) as run:
            given = batches(9)
            train(run, given[:6])
            modules[stage].fuse = fuse
            with pytest.raises(ValueError, match=r"after the statistics|in the middle"):
                train(run, given[6:])
            for module, weights in zip(modules, run._weights, strict=True):
                assert module.count() == weights.updates * run.plan.update_every > 0
                assert torch.equal(module.norm.running_mean, module.seen[module.count()])  # type: ignore[arg-type]
            train(run, given[:2])
            run.flush()
            assert len({module.count() - weights.updates * run.plan.update_every
                        for module, weights in zip(modules, run._weights, strict=True)}) == 1


def test_statistics_that_another_stage_may_be_moving_are_left_alone() -> None:
    """A stage that only holds a module puts none of its buffers back."""
    norm = nn.BatchNorm1d(WIDTH)

    class Holds(Fails):
        def __init__(self) -> None:
            super().__init__()
            self.norm = norm

    class Uses(Dense):
        def __init__(self) -> None:
            super().__init__()
            self.norm = norm

        def forward(self, x: Tensor) -> Tensor:
            return norm(super().forward(x))  # type: ignore[no-any-return]

    for parameter in norm.parameters():
        parameter.requires_grad_(False)
    modules = [Uses(), Dense(), Holds()]
    with runner([*modules], "pipedream", 1) as run:
        for batch in batches(5):
            run.step(**batch)
        modules[2].fuse = 1
        with pytest.raises(ValueError, match="the stage failed"):
            run.step(**batches(1)[0])
        assert norm.num_batches_tracked == run._weights[0].updates


@pytest.mark.parametrize("schedule", ["pipedream", "pipemare"])
def test_every_minibatch_is_finished_or_lost(schedule: str) -> None:
    """What a failed step had finished comes with the next result, bit-equal to what it would have been."""
    late = early = 0
    with runner(stages(), schedule, 1) as plain:
        results = [plain.step(**batch) for batch in batches(8)] + [plain.flush()]
    losses = [loss for result in results for loss in result.microbatch_losses.get("loss", ())]
    for stage in range(3):
        modules: list[Any] = [Fails() for _ in range(3)]
        for module, other in zip(modules, stages(), strict=True):
            module.load_state_dict(other.state_dict())
        with runner(modules, schedule, 1) as run:
            found = [run.step(**batch) for batch in batches(7)]
            modules[stage].fuse = 1
            with pytest.raises(ValueError, match="the stage failed") as caught:
                run.step(**batches(8)[-1])
            last = run.flush()
        late += len(last.finished)
        lost = re.search(r"lost: ([\d, ]+)", "\n".join(caught.value.__notes__))
        assert lost is not None
        numbers = [k for result in [*found, last] for k in result.minibatches]
        gone = [int(number) for number in lost[1].split(",")]
        assert sorted({*numbers, *gone}) == list(range(8))
        assert not {*numbers} & {*gone}  # a minibatch is one or the other
        # in pipemare the last update comes with the step after the last backward, whose loss is told already
        behind = re.search(r"; finished before: (\d+), but not updated everywhere", "\n".join(caught.value.__notes__))
        early += behind is not None
        assert behind is None or int(behind[1]) == max(numbers)
        assert same([loss for result in [*found, last] for loss in result.microbatch_losses.get("loss", ())],
                    losses[: len(numbers)])
    assert (late > 0) == (schedule == "pipedream")
    assert (early > 0) == (schedule == "pipemare")


def test_a_minibatch_whose_microbatches_were_finished_in_part_is_lost_in_part() -> None:
    """Half of its losses are in a result, as the step ends in the middle of it."""
    modules: list[Any] = [Fails() for _ in range(3)]
    with runner(modules, "pipedream", 4) as run:
        for batch in batches(6, rows=8):
            found = run.step(**batch).finished
        partly = [microbatch for minibatch, microbatch in found if minibatch == found[-1][0]]
        assert 0 < len(partly) < 4
        modules[0].fuse = 1
        with pytest.raises(ValueError, match="the stage failed") as caught:
            run.step(**batches(1, rows=8)[0])
    notes, number = "\n".join(caught.value.__notes__), found[-1][0]
    assert re.search(rf"lost: {number}, .*; finished before: {len(partly)} of 4 microbatches of {number};", notes)


# -- memory ------------------------------------------------------------------------------------------------------


def tensors() -> int:
    return sum(1 for item in gc.get_objects() if issubclass(type(item), Tensor))  # no property of a lazy object is read


@pytest.mark.parametrize("name", SCHEDULES)
def test_nothing_grows_over_300_steps(name: str) -> None:
    batch = batches(1)[0]
    with runner(stages(2, dropout=0.1), SCHEDULES[name], 2, recompute={"b": "always"}) as run:
        for _ in range(20):
            run.step(**batch)
        gc.collect()
        gc.disable()
        try:
            before = tensors()
            for _ in range(300):
                run.step(**batch)
            assert tensors() == before
            run.flush()
            assert tensors() < before
        finally:
            gc.enable()


def test_versions_kept_and_gone_after_their_last_reader() -> None:
    with runner(stages(4), "pipedream", 1) as run:
        most = [0] * 4
        for batch in batches(12):
            run.step(**batch)
            most = [max(count, len(own.kept)) for count, own in zip(most, run._weights, strict=True)]
        # with the live one at most 4, 3, 2, 1 versions; between steps one of them has been read for the last time
        assert [count + 1 <= 4 - s for s, count in enumerate(most)] == [True] * 4
        assert most[0] >= 2
        old = [weakref.ref(leaf) for own in run._weights for kept in own.kept.values() for leaf in kept.tensors]
        assert old
        gc.disable()
        try:
            for batch in batches(4):
                run.step(**batch)
            assert all(ref() is None for ref in old)
        finally:
            gc.enable()


def test_a_failure_keeps_no_tensor() -> None:
    modules: list[Any] = [Fails() for _ in range(3)]
    with runner(modules, "pipedream") as run:
        gc.collect()
        gc.disable()
        try:
            before = tensors()
            for _ in range(3):
                run.step(**batches(1)[0])
            modules[2].fuse = 2
            with pytest.raises(ValueError, match="the stage failed"):
                run.step(**batches(1)[0])
            assert run.flush().finished  # by the failed step
            states = sum(len(own) for made in run.optimizers.values() for own in made.state.values())
            assert tensors() - before == states
        finally:
            gc.enable()


def test_losses_of_one_device() -> None:
    """One stage on one device: no staleness, plain SGD."""
    module, other = Dense(), Dense()
    other.load_state_dict(module.state_dict())
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1, momentum=0.9)
    with runner([module], "pipedream", 1) as run:
        for batch in batches(4):
            result = run.step(**batch)
            loss = F.mse_loss(other(batch["x"]), batch["y"])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            assert result.loss == loss.detach()
    assert same(state([module]), state([other]))
