"""Training on the stand-in accelerator as scripts do it: what the caller may queue before, after and beside a step."""

from __future__ import annotations

import threading
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from models import WIDTH, batch, chain, data, kept_streams, of_modules, options, parameters, recipes, same
from test_lanes import skipping
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import pipec
import standin
from standin.training import REAL, at_home, compare, deep, of, state

__all__ = ["kept_streams"]


def adam(params: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, lr=0.05, foreach=False)


@given(recipes(most=5), st.data())
@settings(max_examples=20)
def test_any_pipeline_gives_the_bits_of_the_plain_loop(recipe: Any, draw: st.DataObject) -> None:
    how = draw.draw(options(recipe)) | {"update": None}
    mine, theirs = recipe.build(), recipe.build()
    plan = pipec.compile(mine, **how)
    real = draw.draw(st.sampled_from(["one", "two", "several"]))
    with pipec.Runner(mine, plan, devices=REAL[real](plan.devices)) as run:
        got = run.step(**batch(6))
    expected = pipec.reference(theirs, plan.microbatches).step(**batch(6))
    assert same(of(got), of(expected))
    assert same(state(mine), state(theirs))
    assert standin.problems() == []


@pytest.mark.parametrize("update", ["stage", "all"])
@pytest.mark.parametrize("real", ["one", "several"])
def test_updates_evaluation_and_plain_forwards_in_turns(update: str, real: str) -> None:
    found = []
    for devices in (None, REAL[real](4)):
        net = deep()
        plan = pipec.compile(net, 4, 4, "zb-h1", update=update)
        clip = lambda params: nn.utils.clip_grad_norm_(params, 0.1, foreach=False)  # noqa: E731
        how: dict[str, Any] = {"devices": devices} if devices else {"backend": "replay"}
        with pipec.Runner(net, plan, optimizer=adam if update == "stage" else adam(parameters(net)), seed=1,
                          before_update=clip if not devices or real == "one" else None, **how) as run:
            seen = []
            for step in range(3):
                seen += [of(run.step(**data(8, step))), of(run.evaluate(**data(5, 9))), of(run.forward(x=data()["x"]))]
        found.append([seen, at_home([parameters(net)])])
        if real == "several":  # clipping over devices is the script's
            found[0] = found[-1] if devices else found[0]
    assert same(*found)


def test_a_script_that_never_waits() -> None:
    """Inputs made on a side stream just before, results and gradients used on it just after, the optimizer too."""
    found = []
    for where in ("cpu", "standin"):
        net = deep(dropout=0.0)
        plan = pipec.compile(net, 4, 4)
        how: dict[str, Any] = {"devices": ["standin:1"] * 4} if where == "standin" else {"backend": "replay"}
        device = torch.device("standin:1" if where == "standin" else "cpu")
        side = torch.Stream(device=device) if where == "standin" else nullcontext()
        with pipec.Runner(net, plan, seed=1, **how) as run:
            if where == "standin":
                side.wait_stream(torch.accelerator.current_stream(device))
            kept = []
            with side:
                optimizer = adam(parameters(net))
                base = {name: one.to(device) for name, one in data(8).items()}
                for step in range(3):
                    given_ = {name: one * (step + 1) for name, one in base.items()}
                    result = run.step(**given_)
                    kept.append(result.output * 2 + result.loss)
                    del given_, result
                    optimizer.step()
                    optimizer.zero_grad(set_to_none=step != 1)
                found.append(at_home([kept, parameters(net)]))
    assert same(*found)


def test_callers_that_change_their_stream() -> None:
    net = deep()
    plan = pipec.compile(net, 4, 4, "1f1b", recompute="always")
    streams = [torch.Stream(device="standin:0") for _ in range(3)]
    with pipec.Runner(net, plan, devices=["standin:0"] * 4, optimizer=None, seed=1) as run:
        for stream, before in zip(streams, (torch.accelerator.current_stream("standin:0"), *streams), strict=False):
            stream.wait_stream(before)
            with stream:
                result = run.step(**data(8))
                result.loss.add(1)
                del result
    torch.accelerator.synchronize("standin:0")


@pytest.mark.parametrize("pinned", [False, True])
def test_inputs_from_host_memory_may_be_written_again_after_the_step(pinned: bool) -> None:
    net, other = deep(), deep()
    loop = pipec.reference(other, 4, seed=3)
    place = {name: one.pin_memory() if pinned else one for name, one in data(8).items()}
    standin.slow(True)
    with pipec.Runner(net, pipec.compile(net, 4, 4), devices=REAL["two"](4), seed=3) as run:
        for step in range(3):
            for name, one in data(8, step).items():
                place[name].copy_(one)
            assert same(of(run.step(**place)), of(loop.step(**data(8, step))))
    assert same(state(net), state(other))


@pytest.mark.parametrize("slow", [False, True])
def test_skips_on_the_host_reuse_pinned_memory(slow: bool) -> None:
    standin.slow(slow)
    compare(lambda: deep(hold="host"), 4, "gpipe", "several", steps=4, recompute="always")
    standin.slow(slow)
    compare(lambda: deep(hold="host"), 4, "1f1b", "one", steps=4)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zb-v"])
def test_a_failed_task_leaves_everything_as_it_was(schedule: str) -> None:
    net, other, armed = deep(), deep(), [True]

    def fail(module: nn.Module, args: Any) -> None:
        if armed and armed.pop():
            raise ValueError("wrong")

    handle = net.spec.stages[5].fn.register_forward_pre_hook(fail)
    loop = pipec.reference(other, 4, seed=3)
    with pipec.Runner(net, pipec.compile(net, 4, 4, schedule), devices=REAL["several"](4), seed=3) as run:
        before = state(net)
        with pytest.raises(ValueError, match="wrong"):
            run.step(**data(8))
        assert same(state(net), before)
        handle.remove()
        assert same(of(run.step(**data(8))), of(loop.step(**data(8))))
    assert same(state(net), state(other))


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_autocast(schedule: str) -> None:
    net, other = skipping(dropout=0.5), skipping(dropout=0.5)
    loop = pipec.reference(other, 4, seed=3)
    with pipec.Runner(net, pipec.compile(net, 3, 4, schedule), devices=REAL["several"](3), seed=3) as run:
        for step in range(2):
            with torch.autocast("standin", torch.bfloat16):
                got = run.step(**data(8, step))
            with torch.autocast("cpu", torch.bfloat16):
                expected = loop.step(**data(8, step))
            assert same(of(got), of(expected))
    assert same(state(net), state(other))


def test_a_shared_parameter_under_autocast_on_one_device() -> None:
    def net() -> pipec.Pipeline:
        torch.manual_seed(2)
        line = nn.Linear(WIDTH, WIDTH)
        return of_modules(line, nn.Tanh(), line)

    mine, theirs = net(), net()
    run = pipec.Runner(mine, pipec.compile(mine, 3, 4), devices=["standin:1"] * 3)
    with run, torch.autocast("standin", torch.bfloat16):
        got = run.step(**data(8))
    with torch.autocast("cpu", torch.bfloat16):
        expected = pipec.reference(theirs, 4).step(**data(8))
    assert same(of(got), of(expected))
    assert same(state(mine), state(theirs))


@pytest.mark.parametrize("update", [None, "stage", "all"])
@pytest.mark.parametrize("real", ["one", "several"])
def test_loss_scaling_and_an_overflow(update: str | None, real: str) -> None:
    found = []
    for devices in (None, REAL[real](3)):
        net, overflow = chain(3), [True]
        scaler = torch.amp.GradScaler("standin" if devices else "cpu", init_scale=1024.0, growth_interval=2)
        parameters(net)[2].register_hook(lambda g, on=overflow: torch.full_like(g, float("inf")) if on[0] else g)
        how: dict[str, Any] = {"devices": devices} if devices else {"backend": "replay"}
        optimizer = None if update is None else adam if update == "stage" else adam(parameters(net))
        own = adam(parameters(net)) if update is None else None
        seen = []
        plan = pipec.compile(net, 3, 4, update=update)
        with pipec.Runner(net, plan, optimizer=optimizer, scaler=scaler, **how) as run:
            for step in range(3):
                overflow[0] = step == 0
                seen.append(of(run.step(**data(8, step))))
                if own is not None:
                    scaler.step(own)
                    scaler.update()
                    own.zero_grad()
                seen.append(scaler.get_scale())
        found.append([seen, at_home(parameters(net))])
    assert same(*found)


def test_the_callers_random_numbers_go_on_as_if_there_had_been_no_step() -> None:
    device = torch.device("standin:1")
    net = deep()
    torch.manual_seed(4)
    expected = torch.rand(4, device=device).cpu()
    torch.manual_seed(4)
    with pipec.Runner(net, pipec.compile(net, 4, 4, recompute="always"), devices=[device] * 4, seed=3) as run:
        run.step(**data(8))
    assert torch.equal(torch.rand(4, device=device).cpu(), expected)


def test_a_checkpoint_goes_on_bit_for_bit() -> None:
    found = []
    for split in (False, True):
        net = deep()
        plan = pipec.compile(net, 4, 4, update="stage")
        run = pipec.Runner(net, plan, devices=REAL["several"](4), optimizer=adam, seed=3)
        seen = [of(run.step(**data(8, 0)))]
        if split:
            kept = run.checkpoint()
            run.close()
            net = deep()
            run = pipec.Runner(net, plan, devices=REAL["two"](4), optimizer=adam, seed=0)
            run.restore(kept)
        seen.append(of(run.step(**data(8, 1))))
        run.close()
        found.append([seen, at_home(parameters(net))])
    assert same(*found)


def test_a_trace_and_a_check() -> None:
    net = deep()
    plan = pipec.compile(net, 4, 4)
    with pipec.Runner(net, plan, devices="standin") as run:
        run.step(**data(8))
        timeline = run.trace()
    assert (timeline.end >= timeline.start).all()


def test_devices_by_name() -> None:
    net = chain(3)
    plan = pipec.compile(net, 3, 2)
    for how in ({"devices": "standin"}, {"backend": "cuda"}, {"devices": ["standin:0"] * 3, "backend": "cuda"}):
        with pipec.Runner(net, plan, **how) as run:
            run.step(**data(4))
        assert {p.device.type for p in parameters(net)} == {"standin"}


def test_a_runner_in_another_thread() -> None:
    net, other, seen = deep(), deep(), list[Any]()

    def work() -> None:
        with pipec.Runner(net, pipec.compile(net, 4, 4), devices=REAL["several"](4), seed=3) as run:
            seen.append(of(run.step(**data(8))))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert same(seen[0], of(pipec.reference(other, 4, seed=3).step(**data(8))))
    assert same(state(net), state(other))


class Waits(nn.Module):
    """A stage that waits for its device in the middle."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.line(x) * float(x.sum().item() > 0)


class Keeps(nn.Module):
    """A stage that keeps what it was given, and hands it on as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(WIDTH, WIDTH)
        self.kept: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.kept = [x.detach()]
        return x + 0 * self.line(x)


class Checkpointed(nn.Module):
    """Computes again in backward by itself, with PyTorch's own means for the random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5), nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Any:
        return checkpoint(self.net, x, use_reentrant=False)


class Beside(nn.Module):
    """Computes half of its work on a stream of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        if x.device.type == "cpu":
            return self.one(x) + self.other(x)
        own, side = torch.accelerator.current_stream(x.device), torch.Stream(device=x.device)
        side.wait_stream(own)
        with side:
            half = self.one(x)
        rest = self.other(x)
        own.wait_stream(side)
        x.record_stream(side)
        half.record_stream(own)
        return half + rest


@pytest.mark.parametrize(("schedule", "recompute"), [("1f1b", "never"), ("1f1b", "always"), ("zb-h1", "never")])
def test_stages_with_a_checkpoint_or_a_stream_of_their_own(schedule: str, recompute: str) -> None:
    def net() -> pipec.Pipeline:
        torch.manual_seed(1)
        return of_modules(Checkpointed(), Beside(), nn.Tanh(), Checkpointed(), Beside())

    compare(net, 4, schedule, "several", recompute=recompute)
    compare(net, 4, schedule, "one", recompute=recompute)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zb-h1"])
def test_stages_that_wait_and_stages_that_keep(schedule: str) -> None:
    def net() -> pipec.Pipeline:
        torch.manual_seed(1)
        return of_modules(nn.Linear(WIDTH, WIDTH), Keeps(), Waits(), nn.Identity(), Keeps(), nn.Linear(WIDTH, WIDTH))

    compare(net, 4, schedule, "several", steps=3)
    compare(net, 4, schedule, "one", steps=3)
