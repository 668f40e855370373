"""Asynchronous runs: what is refused, and which modules cannot be given other weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from declared import Dense, chain
from models import same
from test_asynchronous_runs import SCHEDULES, WIDTH, batches, momentum, runner, stages, state
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import pipec

# -- refusals ----------------------------------------------------------------------------------------------------


def test_what_asynchronous_plans_cannot_do_is_told_at_once() -> None:
    shared = nn.Linear(WIDTH, WIDTH)
    modules = [nn.Sequential(shared), nn.Sequential(pipec.deferred_batch_norm(nn.BatchNorm1d(WIDTH)), shared)]
    with pytest.raises(pipec.RunError) as caught:
        runner(modules, before_update=lambda parameters: None, scaler=torch.amp.GradScaler("cpu"))
    told = str(caught.value)
    assert told.startswith("asynchronous schedule 'pipemare': 5 problems")
    for part in ("before_update sees all gradients at once", "optimizer.register_step_pre_hook(clip)",
                 "bfloat16, which needs no loss scaling",
                 "stages 'a' and 'b' share the parameter '0.weight' ('1.weight' there)", "deferred_batch_norm"):
        assert part in told


def test_a_bad_minibatch_loses_nothing() -> None:
    mine, other = stages(), stages()
    good = batches(5)
    with runner(mine) as run, runner(other) as plain:
        for k, batch in enumerate(good):
            run.step(**batch)
            plain.step(**batch)
            for bad, match in (
                ({"x": batch["x"][:2], "y": batch["y"][:2]}, "2 rows, fewer than its 3 microbatches"),
                ({"x": batch["x"]}, "input 'y' is missing"),
                ({**batch, "x": batch["x"].clone().requires_grad_()}, "input 'x' requires a gradient"),
            ):
                with pytest.raises(pipec.RunError, match=match):
                    run.step(**bad)
            with torch.no_grad(), pytest.raises(pipec.RunError, match="needs gradients"):
                run.step(**batch)
            assert run.in_flight == plain.in_flight
            assert k in run.in_flight
        assert run.flush().finished == plain.flush().finished
    assert same(state(mine), state(other))


def test_gradients_from_before_are_told() -> None:
    modules = stages()
    modules[1].weight.grad = torch.zeros(WIDTH, WIDTH)
    with runner(modules) as run, pytest.raises(pipec.RunError, match=r"b\.weight has a \.grad from before"):
        run.step(**batches(1)[0])


def test_parameters_are_frozen_between_flushes() -> None:
    modules = stages()
    with runner(modules) as run:
        run.step(**batches(1)[0])
        modules[0].bias.requires_grad_(False)
        with pytest.raises(pipec.RunError, match=r"(?s)call run.flush\(\), then change.*a\.bias does not require"):
            run.step(**batches(1)[0])
        modules[0].bias.requires_grad_(True)
        run.flush()
        modules[0].bias.requires_grad_(False)
        before = modules[0].bias.clone()
        for batch in batches(5):
            run.step(**batch)
        run.flush()
    assert torch.equal(modules[0].bias, before)
    assert modules[0].weight.grad is None


@pytest.mark.parametrize(("make", "told"), [
    (lambda params: torch.optim.SGD(params, lr=0.1), "SGD without momentum"),
    (lambda params: torch.optim.RMSprop(params, lr=0.1), "got RMSprop"),
])
def test_optimizers_that_cannot_be_predicted(make: Any, told: str) -> None:
    with pytest.raises(pipec.RunError, match=f"stage 'a': weight prediction needs .*{told}"):
        runner(stages(), "predicted", optimizer=make)


# -- modules whose backward cannot have other weights ----------------------------------------------------------


class Doubled(Dense):
    def forward(self, x: Tensor) -> Tensor:
        return x @ (self.weight * 2)


class Checkpointed(Dense):
    def forward(self, x: Tensor) -> Tensor:
        out = torch.utils.checkpoint.checkpoint(super().forward, x, use_reentrant=False)
        assert isinstance(out, Tensor)
        return out


class Keeps(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.w = w
        return x @ w

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0] @ ctx.w.t(), None


class Attribute(Dense):
    def forward(self, x: Tensor) -> Tensor:
        return Keeps.apply(x, self.weight) + self.bias  # type: ignore[no-any-return, no-untyped-call]


class Hidden(nn.Module):
    """Reads its parameter through a list, where nothing can stand in for it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.listed = [self.linear.weight]

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.listed[0]


def recurrent(kind: Any) -> nn.Module:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = kind(WIDTH, WIDTH, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.cell(x[:, None].expand(-1, 3, -1))[0]
            return out.mean(1)

    return Recurrent()


def steps(module: nn.Module, schedule: Any, count: int = 6, autocast: bool = False, **how: Any) -> Any:
    with runner([Dense(), module, Dense()], schedule, 3, **how) as run:
        for batch in batches(count):
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                run.step(**batch)
        return run.flush()


@pytest.mark.parametrize(("module", "told"), [
    (lambda: parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)), "that it computed .*alone"),
    (lambda: parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH)), "that it computed .*alone"),
    (lambda: parametrizations.orthogonal(nn.Linear(WIDTH, WIDTH)), "that it computed .*alone"),
    (Doubled, r"shape \(4, 4\) and torch.float32 that it computed from weight alone .* Use schedule='pipedream'"),
    (Checkpointed, "saves tensors in a way of its own .* compile with recompute='always'"),
    (Attribute, "Keeps keeps a parameter as an attribute"),
    (lambda: torch.compile(Dense(), backend="eager"), "is compiled by torch.compile"),
])
def test_modules_that_live_rules_refuse(module: Any, told: str) -> None:
    made = module()
    before = state([made])
    with pytest.raises(pipec.RunError, match=f"(?s)stage 'b'.*{told}"):
        steps(made, "pipemare")
    assert same(state([made])[: len(list(made.parameters()))], before[: len(list(made.parameters()))])


@pytest.mark.parametrize("module", [
    lambda: parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)), Doubled,
    lambda: parametrizations.orthogonal(nn.Linear(WIDTH, WIDTH)), lambda: torch.compile(Dense(), backend="eager"),
])
def test_stashed_weights_take_them(module: Any) -> None:
    """Derived tensors are those of the forward, as they must be: a copy per version gives the same bits."""
    torch.manual_seed(0)
    hooked, swapped = module(), module()
    swapped.load_state_dict(hooked.state_dict())
    # with vertical_sync forwards run on copies, without any hook; at the first stage both read the same versions
    found = []
    for made, schedule in ((hooked, pipec.PipeDream()), (swapped, pipec.PipeDream(vertical_sync=True))):
        torch.manual_seed(1)
        modules = [made, Dense(), Dense()]
        with runner(modules, schedule, 1) as run:
            for batch in batches(3):
                run.step(**batch)
        found.append(state([made]))
    assert same(*found)


@pytest.mark.parametrize("module", [Checkpointed, Attribute])
def test_what_stashed_weights_refuse_too(module: Any) -> None:
    with pytest.raises(pipec.RunError, match="stage 'b'"):
        steps(module(), "pipedream")


@pytest.mark.parametrize("schedule", ["2bw", "predicted"])
def test_parameters_read_behind_the_modules_back(schedule: str) -> None:
    with pytest.raises(pipec.RunError, match=r"stage 'b' reads its parameter 'linear\.weight' in another way"):
        steps(Hidden(), SCHEDULES[schedule])


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_modules(kind: Any, name: str) -> None:
    """Fused kernels and the lists of weights that these modules keep are recognised."""
    torch.manual_seed(0)
    fused = recurrent(kind)
    before = state([fused])
    assert steps(fused, SCHEDULES[name]).finished
    assert not same(state([fused]), before)


@pytest.mark.parametrize("name", ["pipemare", "live", "pipedream", "2bw", "predicted"])
def test_casts_of_autocast_are_recognised(name: str) -> None:
    """Under live rules the backward has casts of its own weights: as if the stage cast them by hand each time."""
    class Cast(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
            ctx.save_for_backward(x.bfloat16(), w)
            return x.bfloat16() @ w.bfloat16().t()

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> Any:
            x, w = ctx.saved_tensors
            gradient = gradients[0].bfloat16()
            return (gradient @ w.bfloat16()).to(torch.float32), (x.t() @ gradient).t().to(torch.float32)

    class ByHand(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", enabled=False):
                return Cast.apply(x, self.weight)  # type: ignore[no-any-return, no-untyped-call]

    found = []
    for kind in (nn.Linear, ByHand):
        torch.manual_seed(0)
        made = [kind(WIDTH, WIDTH, bias=False) for _ in range(3)]
        net = chain([nn.Sequential(layer, Float()) for layer in made])
        plan = pipec.compile(net, 3, 3, SCHEDULES[name], update="stage")
        with pipec.Runner(net, plan, optimizer=momentum, backend="threads") as run:
            for batch in batches(5):
                with torch.autocast("cpu", torch.bfloat16):
                    run.step(**batch)
        found.append(state(list(made)))
    assert same(*found)


class Float(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.float()


def test_writes_into_what_was_saved_are_still_seen() -> None:
    class Writes(Dense):
        def forward(self, x: Tensor) -> Tensor:
            out = torch.sigmoid(x @ self.weight)
            again = out * 2
            out.add_(1)
            return again

    with pytest.raises(RuntimeError, match="was modified in place after the forward had saved it"):
        steps(Writes(), "pipemare")


def test_the_callers_saved_tensor_hooks_hold() -> None:
    packed: list[torch.Size] = []

    def pack(tensor: Tensor) -> Tensor:
        packed.append(tensor.shape)
        return tensor.detach()

    with runner(stages(), "pipemare", 3, backend="threads") as run, torch.autograd.graph.saved_tensors_hooks(
        pack, lambda tensor: tensor
    ):
        run.step(**batches(1)[0])
    assert packed
