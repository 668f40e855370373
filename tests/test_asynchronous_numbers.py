"""Asynchronous runs are bit-equal to a one-thread replay of the versions that their plans declare."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from declared import Dense, Replay, chain
from models import same
from torch import Tensor, nn

import pipec
from pipec.rules import Live
from pipec.runtime.asynchronous.rules import Half

WIDTH = 4
Modules = Callable[[], list[nn.Module]]


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.norm = nn.MultiheadAttention(WIDTH, 2, batch_first=True), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        rows = x[:, None, :] * torch.linspace(0.5, 1.0, 3)[:, None]
        return self.norm(x + self.attention(rows, rows, rows)[0].mean(1))


class Convolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv1d(1, 2, 3, padding=1), nn.BatchNorm1d(2)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.norm(self.conv(x[:, None]))).mean(1)


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.embed((x[:, 0] * 10).abs().long() % 7) + x


MODELS: dict[str, Modules] = {
    "mlp": lambda: [Dense() for _ in range(4)],
    "conv": lambda: [nn.Linear(WIDTH, WIDTH), Convolution(), Convolution(), nn.Linear(WIDTH, WIDTH)],
    "text": lambda: [Words(), Attention(), nn.Sequential(nn.LayerNorm(WIDTH), nn.GELU()), nn.Linear(WIDTH, WIDTH)],
}
OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.2),
    "momentum": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "adam": lambda params: torch.optim.Adam(params, lr=0.02),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.02, weight_decay=0.1),
}
STASH = {"pipedream": pipec.PipeDream(), "vertical": pipec.PipeDream(vertical_sync=True)}


def made(model: str) -> list[nn.Module]:
    torch.manual_seed(3)
    return MODELS[model]()


def batches(count: int, rows: int = 4, seed: int = 5) -> list[dict[str, Tensor]]:
    make = torch.Generator().manual_seed(seed)
    return [{"x": torch.randn(rows, WIDTH, generator=make), "y": torch.randn(rows, WIDTH, generator=make)}
            for _ in range(count)]


def compiled(net: pipec.Pipeline, schedule: Any, microbatches: int, recompute: Any = "never", devices: int = 4) -> Any:
    return pipec.compile(net, devices, microbatches, schedule, update="stage", recompute=recompute)


def trained(
    modules: list[nn.Module], schedule: Any, microbatches: int, optimizer: Any, given: list[Any], *,
    recompute: Any = "never", backend: str = "replay", **how: Any,
) -> tuple[list[Tensor], pipec.Plan]:
    """Train ``modules`` in place; the losses of all microbatches in order, and the plan."""
    net = chain(modules)
    plan = compiled(net, schedule, microbatches, recompute)
    with pipec.Runner(net, plan, optimizer=optimizer, backend=backend, **how) as run:
        results = [run.step(**batch) for batch in given] + [run.flush()]
        assert run.flush().finished == ()
    finished = [item for result in results for item in result.finished]
    assert finished == [(k, m) for k in range(len(given)) for m in range(microbatches)]
    return [loss for result in results for loss in result.microbatch_losses.get("loss", ())], plan


def state(modules: list[nn.Module]) -> list[Tensor]:
    return [value.detach().clone() for module in modules for value in module.state_dict().values()]


def check(model: str, schedule: Any, microbatches: int, optimizer: str, **how: Any) -> None:
    """Threads and replay are bit-equal to plain autograd on copies of every version."""
    recompute = how.pop("recompute", "never")
    how["recompute"] = how.pop("recompute_weights", None)
    given = batches(7, rows=2 * microbatches + 1)
    modules = made(model)
    expected = Replay(modules, OPTIMIZERS[optimizer], **how)
    for backend in ("replay", "threads"):
        mine = copy.deepcopy(modules)
        losses, plan = trained(mine, schedule, microbatches, OPTIMIZERS[optimizer], given, recompute=recompute,
                               backend=backend)
        if backend == "replay":
            expected.run(plan, given)
        assert same(losses, expected.losses), backend
        assert same(state(mine), state(expected.modules)), backend
    assert not same(state(mine), state(modules))


@pytest.mark.parametrize("recompute", ["never", "always"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("model", MODELS)
def test_stashed_weights(model: str, optimizer: str, recompute: str) -> None:
    check(model, pipec.PipeDream(), 2, optimizer, recompute=recompute)


@pytest.mark.parametrize(("schedule", "microbatches"), [
    (pipec.PipeDream(), 1), (pipec.PipeDream(vertical_sync=True), 1), (pipec.PipeDream(vertical_sync=True), 3),
    (pipec.PipeDream2BW(), 4), (pipec.PipeDream2BW(), 5),
])
@pytest.mark.parametrize("model", ["mlp", "conv"])
def test_other_versions_in_the_forward(schedule: Any, microbatches: int, model: str) -> None:
    check(model, schedule, microbatches, "momentum")


# -- rules whose backward has other weights than its forward -----------------------------------------------------


def corrected(tau: Callable[[int], float], decay: Any) -> dict[str, Any]:
    """PipeMare's T2 as the paper writes it, on a Replay."""

    def backward(run: Replay, stage: int, version: int, _: int) -> list[Tensor]:
        deltas = run.deltas.get(stage)
        own = run.versions[stage][version]
        return own if deltas is None else [torch.sub(w, d, alpha=tau(stage)) for w, d in zip(own, deltas, strict=True)]

    def updated(run: Replay, stage: int, before: list[Tensor]) -> None:
        distance = tau(stage)
        if distance <= 0:
            return
        g = max(0.0, 1 - 2 / (distance + 1)) if decay == "optimal" else decay ** (1 / distance)
        change = [w - b for w, b in zip(run.weights(stage), before, strict=True)]
        old = run.deltas.get(stage, [torch.zeros_like(c) for c in change])
        run.deltas[stage] = [torch.add(g * d, c, alpha=1 - g) for d, c in zip(old, change, strict=True)]

    return {"backward": backward, "updated": updated}


def full(microbatches: int) -> Callable[[int], float]:
    """tau of the paper's fine-grained pipeline of 4 stages."""
    return lambda stage: (2 * (3 - stage) + 1) / microbatches


@pytest.mark.parametrize("decay", [0.135, 0.5, "optimal"])
@pytest.mark.parametrize("microbatches", [1, 2, 3])
def test_discrepancy_correction_by_hand(microbatches: int, decay: Any) -> None:
    check("mlp", pipec.PipeMare(correction=decay), microbatches, "momentum", byhand=True,
          **corrected(full(microbatches), decay))


@pytest.mark.parametrize("microbatches", [1, 2])
def test_discrepancy_correction_in_1f1b_order(microbatches: int) -> None:
    # stage s of 4 has 3 - s further microbatches under way: with N=2 of 3, 2, 1, 0 updates some lie between
    tau = {1: [3.0, 2.0, 1.0, 0.0], 2: [1.5, 1.0, 0.5, 0.0]}[microbatches]
    check("mlp", pipec.PipeMare(inflight="1f1b", correction=0.3), microbatches, "adam", byhand=True,
          **corrected(tau.__getitem__, 0.3))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("model", ["conv", "text"])
def test_discrepancy_correction_of_other_modules(model: str, optimizer: str) -> None:
    check(model, "pipemare", 2, optimizer, mixed=True, **corrected(full(2), 0.135))


@pytest.mark.parametrize("every", [None, 1, 2])
def test_live_weights(every: int | None) -> None:
    check("mlp", pipec.LiveWeights(every=every), 4, "momentum", byhand=True)


@pytest.mark.parametrize("model", MODELS)
def test_live_weights_with_recompute_and_more_in_flight(model: str) -> None:
    check(model, pipec.LiveWeights(inflight="full"), 2, "adam", recompute="always", mixed=True)


def ahead(run: Replay, stage: int, microbatch: int, letter: str = "F") -> int:
    return run.reads["B", stage, microbatch] - run.reads[letter, stage, microbatch]


def predicted(run: Replay, stage: int, version: int, microbatch: int) -> list[Tensor]:
    """SpecTrain: w - s * lr * v; PipeOptim: w - s * lr * m_hat / (sqrt(v_hat) + eps), weight decay included."""
    made = []
    optimizer = run.optimizers[stage]
    assert optimizer is not None
    group = optimizer.param_groups[0]
    for p, w in zip(run.modules[stage].parameters(), run.versions[stage][version], strict=True):
        s, old = ahead(run, stage, microbatch), optimizer.state.get(p, {})
        if s == 0 or not old:
            made.append(w)
        elif "momentum_buffer" in old:
            made.append(torch.sub(w, old["momentum_buffer"], alpha=s * group["lr"]))
        else:
            step, (beta1, beta2) = float(old["step"]), group["betas"]
            scale = (old["exp_avg_sq"].sqrt() / (1 - beta2**step) ** 0.5) + group["eps"]
            moved = w.clone()
            if isinstance(optimizer, torch.optim.AdamW):
                moved = torch.sub(moved, w, alpha=s * group["lr"] * group["weight_decay"])
            made.append(torch.addcdiv(moved, old["exp_avg"], scale, value=-s * group["lr"] / (1 - beta1**step)))
    return made


@pytest.mark.parametrize("optimizer", ["momentum", "adam", "adamw"])
@pytest.mark.parametrize("microbatches", [1, 2])
def test_predicted_weights(microbatches: int, optimizer: str) -> None:
    check("mlp", "predicted", microbatches, optimizer, byhand=True, forward=predicted,
          backward=lambda run, stage, version, _: run.versions[stage][version])


@pytest.mark.parametrize("model", ["conv", "text"])
def test_predicted_weights_of_other_modules(model: str) -> None:
    check(model, pipec.Predicted(inflight="full"), 2, "adamw", mixed=True, forward=predicted)


class LookAhead:
    """SGD as the Nesterov rule writes it: w(t+1) = w(t) + g*(w(t) - w(t-1)) - lr*(1-g)*grad."""

    def __init__(self, params: Any) -> None:
        self.params = list(params)
        self.changes = [torch.zeros_like(p) for p in self.params]

    @torch.no_grad()
    def step(self) -> None:
        for place, p in enumerate(self.params):
            before, g = p.clone(), 0.9
            p.add_(p.grad, alpha=-0.2 * (1 - g)).add_(self.changes[place], alpha=g)
            self.changes[place] = p - before


@pytest.mark.parametrize("stash", [False, True])
def test_nesterov_look_ahead(stash: bool) -> None:
    given, modules = batches(7, rows=2), made("mlp")
    mine = copy.deepcopy(modules)
    losses, plan = trained(mine, pipec.Nesterov(momentum=0.9, stash=stash), 1, OPTIMIZERS["sgd"], given)
    expected = Replay(modules, lambda params: LookAhead(list(params)), byhand=True)  # type: ignore[arg-type]
    expected.run(plan, given)
    assert same(losses, expected.losses)
    assert same(state(mine), state(expected.modules))


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("inflight", ["full", "1f1b"])
def test_recompute_by_segments(inflight: str, size: int) -> None:
    schedule = pipec.PipeMare(inflight, correction=None, segments=size)
    check("mlp", schedule, 2, "momentum", byhand=True)


@pytest.mark.parametrize("model", MODELS)
def test_recompute_by_segments_of_other_modules(model: str) -> None:
    check(model, pipec.PipeMare(correction=None, segments=2), 3, "adam", mixed=True)


@pytest.mark.parametrize("placement", ["looped", "v", [0, 1, 0, 1]])
@pytest.mark.parametrize("schedule", [pipec.PipeDream(), pipec.PipeMare(correction=None, segments=2)])
def test_several_chunks_a_device_are_flushed_after_any_number_of_minibatches(schedule: Any, placement: Any) -> None:
    for count in (1, 2, 3, 6):
        given, modules = batches(count), made("mlp")
        expected = Replay(modules, OPTIMIZERS["momentum"], byhand=True)
        net = chain(modules)
        plan = pipec.compile(net, 2, 2, schedule, placement=placement, update="stage")
        expected.run(plan, given)
        with pipec.Runner(net, plan, optimizer=OPTIMIZERS["momentum"], backend="replay") as run:
            results = [run.step(**batch) for batch in given] + [run.flush()]
        losses = [loss for result in results for loss in result.microbatch_losses.get("loss", ())]
        assert same(losses, expected.losses)
        assert same(state(modules), state(expected.modules))


@pytest.mark.parametrize(("microbatches", "size"), [(1, 2), (3, 2), (2, 4)])
def test_recompute_by_segments_is_corrected_for_its_own_delay(microbatches: int, size: int) -> None:
    own = corrected(full(microbatches), 0.135)

    def recompute(run: Replay, stage: int, version: int, _: int) -> list[Tensor]:
        end = min(stage // size * size + size, 4) - 1
        factor = full(microbatches)(stage) - (2 * (end - stage) + 1) / microbatches
        weights, deltas = run.versions[stage][version], run.deltas.get(stage)
        if deltas is None or factor == 0:
            return weights
        return [torch.sub(w, d, alpha=factor) for w, d in zip(weights, deltas, strict=True)]

    check("mlp", pipec.PipeMare(segments=size), microbatches, "sgd", byhand=True, recompute_weights=recompute, **own)


# -- a rule of one's own -------------------------------------------------------------------------------------------


class AveragedHalf(Half):
    """Forwards read the mean of the newest weights and those before the last update."""

    def makes(self, stage: int) -> bool:
        return True

    def forward(self, weights: Any, version: int, ahead: int, optimizer: Any) -> Any:
        newest, old = weights.of(version).tensors, weights.buffers.get("old")
        return weights.of(version) if old is None else weights.leaves(
            [torch.lerp(w.detach(), o, 0.5) for w, o in zip(newest, old, strict=True)])

    def update(self, weights: Any, advance: Any) -> None:
        weights.buffers["old"] = [p.detach().clone() for p in weights.parameters]
        advance(1.0)


class Averaged(Live):
    name = "averaged"
    half = AveragedHalf


class AveragedSchedule:
    name, asynchronous, weights = "averaged", True, Averaged()

    def order(self, problem: Any) -> Any:
        return pipec.LiveWeights().order(problem)


def test_a_rule_of_ones_own() -> None:
    def averaged(run: Replay, stage: int, version: int, _: int) -> list[Tensor]:
        own = run.versions[stage]
        return own[version] if version == 0 else [
            torch.lerp(w, o, 0.5) for w, o in zip(own[version], own[version - 1], strict=True)]

    given, modules = batches(6, rows=4), made("mlp")
    mine = copy.deepcopy(modules)
    losses, plan = trained(mine, AveragedSchedule(), 2, OPTIMIZERS["sgd"], given)
    expected = Replay(modules, OPTIMIZERS["sgd"], mixed=True, forward=averaged,
                      backward=lambda run, stage, version, _: run.versions[stage][version])
    expected.run(plan, given)
    assert same(losses, expected.losses)
    assert same(state(mine), state(expected.modules))
