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
from test_asynchronous_runs import SCHEDULES, batches, runner, stages, state
from torch import Tensor
from torch.nn import functional as F

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


def test_a_failed_update_names_the_stage_and_clears_gradients() -> None:
    with runner(stages(), "pipedream", 1) as run:
        run.step(**batches(1)[0])

        def fail(*_: Any) -> None:
            raise RuntimeError("no update today")

        handle = run.optimizers["b"].register_step_pre_hook(fail)
        with pytest.raises(RuntimeError, match="no update today") as caught:
            run.step(**batches(1)[0])
        notes = "\n".join(caught.value.__notes__)
        assert "UPDATE (1U0) on device 1" in notes
        assert "updated already: c with minibatch 0" in notes
        assert all(p.grad is None for p in run.parameters())
        handle.remove()
        run.step(**batches(1)[0])
        assert run.flush().finished


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
