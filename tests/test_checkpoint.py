"""State dicts and checkpoints: the user's own names, bit-equal continuation, errors that name everything at once."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import models
import pytest
import torch
from models import WIDTH, buffers, data, kept_streams, of_modules, parameters, runner, same
from resumed import adam, cut, everything, sgd, started, steps, through_a_file, whole
from torch import nn
from torch.nn import functional as F

import pipec

__all__ = ["kept_streams"]


@pytest.mark.parametrize("optimizer", [adam, sgd])
@pytest.mark.parametrize(("before", "after"), [
    ("one device", "one device"), ("interleaved", "interleaved"), ("two devices", "interleaved"),
    ("interleaved", "two stages"), ("two stages", "two devices"), ("all at once", "three stages"),
    ("two devices", "all at once"), ("all at once", "interleaved"), ("three stages", "uncut"), ("uncut", "one device"),
])
def test_a_run_goes_on_bit_equal_in_any_arrangement(before: str, after: str, optimizer: Callable[..., Any]) -> None:
    straight = whole()
    with started(before, optimizer, straight) as run:
        steps(run, 0, 3)
        expected = steps(run, 3, 6)
        ended = everything(straight, run)
    with started(before, optimizer, whole()) as run:
        steps(run, 0, 3)
        state = through_a_file(run.checkpoint())
    fresh = whole(seed=99)
    with started(after, optimizer, fresh) as run:
        run.restore(state)
        assert same(steps(run, 3, 6), expected)
        assert same(everything(fresh, run), ended)


def test_dropout_goes_on_where_it_was() -> None:
    def build() -> pipec.Pipeline:
        torch.manual_seed(8)
        layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.4)) for _ in range(4)]
        return of_modules(*layers)

    def train(net: pipec.Pipeline, devices: int, **how: Any) -> Any:
        return runner(net, devices, optimizer=sgd, update="stage", **how)

    with train(build(), 2) as run:
        torch.manual_seed(123)
        steps(run, 0, 3)
        state = through_a_file(run.checkpoint())
        expected = steps(run, 3, 6)
    with train(build(), 4, schedule="gpipe", recompute="always") as run:
        torch.manual_seed(77)  # another process, another seed: the checkpoint's own one counts
        run.restore(state)
        assert same(steps(run, 3, 6), expected)
        again = run.checkpoint()
    assert again["random"] == {"seed": 123, "step": 6}


def test_later_steps_do_not_change_a_checkpoint_and_it_restores_twice() -> None:
    model = whole()
    with started("two devices", adam, model) as run:
        steps(run, 0, 2)
        state = run.checkpoint()
        kept = copy.deepcopy(state)
        expected = steps(run, 2, 4)
        assert same(state, kept)
        for _ in range(2):
            run.restore(state)
            assert same(steps(run, 2, 4), expected)
            assert same(state, kept)


def test_a_scaler_goes_on() -> None:
    def start() -> tuple[pipec.Pipeline, Any, Any]:
        net = models.chain(2)
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)
        return net, scaler, runner(net, optimizer=sgd, update="stage", scaler=scaler)

    net, scaler, run = start()
    with run:
        steps(run, 0, 3)
        state = through_a_file(run.checkpoint())
        assert scaler.get_scale() == 128.0
        expected = steps(run, 3, 6)
    other, again, run = start()
    with run:
        run.restore(state)
        assert again.get_scale() == 128.0
        assert same(steps(run, 3, 6), expected)
    assert again.get_scale() == scaler.get_scale() == 512.0
    assert same(parameters(other), parameters(net))


@pytest.mark.parametrize("update", ["stage", "all"])
@pytest.mark.parametrize("kind", ["StepLR", "OneCycleLR"])
def test_schedulers_go_on_with_their_own_state(kind: str, update: str) -> None:
    def start() -> tuple[nn.Sequential, Any, list[Any]]:
        model = whole()
        run = started("two devices" if update == "stage" else "all at once", sgd, model)
        make = {
            "StepLR": lambda o: torch.optim.lr_scheduler.StepLR(o, 2, 0.5),
            "OneCycleLR": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, max_lr=0.2, total_steps=8),
        }[kind]
        return model, run, [make(o) for o in run.optimizers.values()]

    def train(run: Any, schedulers: list[Any], first: int, last: int) -> list[Any]:
        rates = []
        for step in range(first, last):
            run.step(**data(10, step))
            for scheduler in schedulers:
                scheduler.step()
            rates.append([(g["lr"], g["momentum"]) for o in run.optimizers.values() for g in o.param_groups])
        return rates

    model, run, schedulers = start()
    with run:
        train(run, schedulers, 0, 3)
        state = through_a_file(run.checkpoint() | {"schedulers": [s.state_dict() for s in schedulers]})
        expected = train(run, schedulers, 3, 6)
    other, run, schedulers = start()
    with run:
        run.restore(state)
        for scheduler, own in zip(schedulers, state["schedulers"], strict=True):
            scheduler.load_state_dict(own)
        assert train(run, schedulers, 3, 6) == expected
    assert same(dict(other.state_dict()), dict(model.state_dict()))


def test_parameter_groups_keep_their_options() -> None:
    def start(order: int) -> tuple[nn.Sequential, Any]:
        model = whole()
        net = cut(model, 4)
        weights = [p for p in model.parameters() if p.dim() > 1]
        rest = [p for p in model.parameters() if p.dim() == 1]
        groups = [{"params": weights, "lr": 0.05, "weight_decay": 0.1}, {"params": rest, "lr": 0.01}]
        made = torch.optim.AdamW(groups[::order])
        return model, pipec.Runner(net, pipec.compile(net, 2, 4, update="all"), optimizer=made, model=model)

    model, run = start(1)
    with run:
        steps(run, 0, 2)
        state = through_a_file(run.checkpoint())
        steps(run, 2, 4)
    other, run = start(-1)  # groups in another order
    for group in run.optimizers["all"].param_groups:
        group["lr"] = 99.0
    with run:
        run.restore(state)
        assert [group["lr"] for group in run.optimizers["all"].param_groups] == [0.01, 0.05]
        steps(run, 2, 4)
    assert same(dict(other.state_dict()), dict(model.state_dict()))


class Counting(nn.Module):
    """A module with state that is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(WIDTH, WIDTH)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.line(x)

    def get_extra_state(self) -> dict[str, int]:
        return {"calls": self.calls}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.calls = state["calls"]


class Centred(nn.Module):
    """A loss with a buffer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("level", torch.zeros(()))

    def forward(self, h: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        error = F.mse_loss(h, y)
        self.level.lerp_(error.detach(), 0.1)
        return error * (1 + self.level.clone())


def test_extra_state_and_the_state_of_losses_are_kept() -> None:
    def start() -> tuple[Counting, Any]:
        torch.manual_seed(0)
        counting = Counting()
        return counting, runner(of_modules(counting, nn.Tanh(), loss=Centred()), optimizer=sgd, update="stage")

    counting, run = start()
    with run:
        steps(run, 0, 2)
        state = through_a_file(run.checkpoint())
        expected = steps(run, 2, 4)
    assert state["model"].keys() == {"a.line.weight", "a.line.bias", "a._extra_state", "loss.level"}
    other, run = start()
    with run:
        run.restore(state)
        assert other.calls == 8
        assert same(steps(run, 2, 4), expected)
    assert other.calls == counting.calls


def test_an_optimizer_that_keeps_state_of_its_own() -> None:
    class Counted(torch.optim.SGD):
        """Keeps the number of its steps outside of any parameter's state."""

        count = 0

        def step(self, closure: Any = None) -> Any:
            self.count += 1
            return super().step(closure)

        def state_dict(self) -> dict[str, Any]:
            return super().state_dict() | {"count": self.count}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            super().load_state_dict(state_dict)
            self.count = state_dict["count"]

    made = lambda params: Counted(params, lr=0.1)  # noqa: E731
    with started("two stages", made, whole()) as run:
        steps(run, 0, 3)
        state = through_a_file(run.checkpoint())
    with started("two stages", made, whole()) as run:
        run.restore(state)
        assert [optimizer.count for optimizer in run.optimizers.values()] == [3, 3]
    with started("three stages", made, whole()) as run, pytest.raises(pipec.RunError) as error:
        run.restore(state)
    assert "optimizer 'a' had a state that belongs to no single parameter, and is not here" in str(error.value)


def test_deferred_batch_norm_keeps_the_models_names_and_goes_on() -> None:
    def start() -> tuple[nn.Sequential, Any]:
        model = pipec.deferred_batch_norm(whole())
        return model, started("two devices", sgd, model)

    model, run = start()
    with run:
        assert list(run.state_dict()) == list(whole().state_dict())
        steps(run, 0, 2)
        state = through_a_file(run.checkpoint())
        expected = steps(run, 2, 4)
    other, run = start()
    with run:
        run.restore(state)
        assert same(steps(run, 2, 4), expected)
    assert same(buffers(cut(other, 4)), buffers(cut(model, 4)))


def test_a_closed_runner_takes_no_checkpoint(tmp_path: Path) -> None:
    run = runner(models.chain(2))
    run.close()
    with pytest.raises(pipec.RunError, match="closed"):
        run.checkpoint()
