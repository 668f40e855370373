"""Parameters that stages on several GPUs of one process share, on streams that are written down."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from layers import linear
from models import WIDTH, data, gradients, kept_streams, parameters, same
from test_shared_parameters import tied
from test_streams import backend, needed_waits, recorded
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import pipec
from pipec.ir import Kind
from pipec.runtime.stream_lanes import StreamLanes
from pipec.runtime.stream_proof import problems

__all__ = ["kept_streams"]

WORDS: dict[str, Any] = {"ids": torch.arange(8) % 7, "y": torch.arange(8) % 10}


def trained(
    net: pipec.Pipeline, plan: pipec.Plan, streams: StreamLanes, make: Callable[[Any], Any], steps: int = 3,
    fed: dict[str, Any] = WORDS, **options: Any,
) -> list[Any]:
    """Losses of some steps; the calls of each are proved. Two evaluations stand between."""
    losses = []
    own = make(parameters(net)) if plan.update != "stage" else make
    with pipec.Runner(net, plan, backend=streams, optimizer=own if plan.update else None, **options) as run:
        assert streams.replicas is not None
        for _ in range(steps):
            losses.append(run.step(**fed).loss)
            calls = recorded(streams)
            if plan.update is None:
                assert problems(plan, calls) == []
                own.step()
                own.zero_grad()
            losses.append(run.evaluate(**fed).loss)
            recorded(streams)
        assert all(one.tensor.grad is None for one in streams.replicas.made)
    return losses


def looped(net: pipec.Pipeline, make: Callable[[Any], Any], steps: int = 3, fed: dict[str, Any] = WORDS,
           microbatches: int = 3) -> list[Any]:
    """The same by the plain loop."""
    losses, loop, own = [], pipec.reference(net, microbatches), make(parameters(net))
    whole = pipec.compile(net, 1, microbatches)
    for _ in range(steps):
        losses.append(loop.step(**fed).loss)
        own.step()
        own.zero_grad()
        with pipec.Runner(net, whole, backend="replay") as run:
            losses.append(run.evaluate(**fed).loss)
    return losses


@pytest.mark.parametrize("update", [None, "stage", "all"])
@pytest.mark.parametrize(("devices", "real", "schedule", "recompute"), [
    (2, 2, "1f1b", "always"), (2, 2, "zb-h1", "never"), (4, 4, "gpipe", "never"), (4, 2, "zb-h1", "always"),
    (4, 3, "1f1b", "except_last"),
])
def test_tied_weights_on_several_devices_train_as_one(
    devices: int, real: int, schedule: str, recompute: str, update: str | None
) -> None:
    mine, theirs = tied(), tied()
    plan = pipec.compile(mine, devices, 3, schedule, recompute=recompute, update=update)

    def make(params: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, lr=0.5, momentum=0.9)

    before = parameters(mine)
    assert trained(mine, plan, backend(devices, real), make) == looped(theirs, make)
    after = parameters(mine)
    assert len(after) == len(before)
    assert all(one is other for one, other in zip(before, after, strict=True))
    assert same([p.detach() for p in parameters(mine)], [p.detach() for p in parameters(theirs)])
    assert mine.spec.stages[0].fn.weight is mine.spec.stages[3].fn.weight


class Seen(nn.Module):
    """Applies a weight that others use too, and notes which tensor stood there, in forwards and in their checkpoint."""

    def __init__(self, weight: nn.Parameter, again: bool = False) -> None:
        super().__init__()
        self.weight, self.again, self.seen = weight, again, set[int]()

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.apply_it, x, use_reentrant=False) if self.again else self.apply_it(x)  # type: ignore

    def apply_it(self, x: Tensor) -> Tensor:
        self.seen.add(id(self.weight))
        return (x @ self.weight).tanh()


def three(again: bool = False, shared: tuple[int, ...] = (0, 2), frozen: bool = False) -> pipec.Pipeline:
    """Stages of which some share a weight."""
    torch.manual_seed(1)
    weight = nn.Parameter(torch.randn(WIDTH, WIDTH), requires_grad=not frozen)
    net = pipec.Pipeline("three")
    value = net.input("x")
    for number in range(3):
        value = net.stage(f"s{number}", Seen(weight, again) if number in shared else linear(), value)
    net.output(value)
    net.loss("mse", F.mse_loss, value, net.input("y"))
    return net


@pytest.mark.parametrize("again", [False, True])
def test_every_task_computes_with_its_own_devices_copy(again: bool) -> None:
    """The user's parameter on the owner's device, one replica on the other, also where a backward computes again."""
    mine, theirs = three(again), three(again)
    plan = pipec.compile(mine, 3, 2, recompute={"s2": "always"})
    streams = backend(3)
    with pipec.Runner(mine, plan, backend=streams) as run:
        run.step(**data(4))
        assert streams.replicas is not None
        (one,) = streams.replicas.made
        first, last = mine.spec.stages[0].fn, mine.spec.stages[2].fn
        assert first.seen == {id(first.weight)}
        assert last.seen == {id(one.tensor)}
        assert first.weight is last.weight is one.parameter
        assert one.tensor is not one.parameter
        assert one.tensor.untyped_storage().data_ptr() != one.parameter.untyped_storage().data_ptr()
    pipec.reference(theirs, 2).step(**data(4))
    assert same(gradients(mine), gradients(theirs))


def test_three_users_on_two_devices_share_one_replicas_memory() -> None:
    mine, theirs = three(shared=(0, 1, 2)), three(shared=(0, 1, 2))
    plan = pipec.compile(mine, 3, 2, placement=[0, 1, 2])
    streams = StreamLanes(backend(3).api, [torch.device("cpu:0"), torch.device("cpu:1"), torch.device("cpu:1")])
    with pipec.Runner(mine, plan, backend=streams) as run:
        run.step(**data(4))
        assert streams.replicas is not None
        first, second = streams.replicas.made
        assert [(one.owner, one.user, one.sent) for one in (first, second)] == [(0, 1, True), (0, 2, False)]
        assert first.tensor is not second.tensor
        assert first.tensor.data_ptr() == second.tensor.data_ptr() != first.parameter.data_ptr()
    assert problems(plan, recorded(streams)) == []
    pipec.reference(theirs, 2).step(**data(4))
    assert same(gradients(mine), gradients(theirs))


def test_a_frozen_parameter_is_sent_and_thaws_and_freezes() -> None:
    mine, theirs = three(frozen=True), three(frozen=True)
    plan, loop = pipec.compile(mine, 3, 2), pipec.reference(theirs, 2)
    with pipec.Runner(mine, plan, backend=backend(3)) as run:
        for train in (False, True, False):
            for net in (mine, theirs):
                net.spec.stages[0].fn.weight.requires_grad_(train)
            assert run.step(**data(4)).loss == loop.step(**data(4)).loss
    assert same(gradients(mine), gradients(theirs))


def test_whatever_the_script_does_to_a_parameter_reaches_the_replicas() -> None:
    """Also through ``.data``, which raises no version, and a new type for all of the model."""
    mine, theirs = three(), three()
    plan, loop = pipec.compile(mine, 3, 2), pipec.reference(theirs, 2)
    with pipec.Runner(mine, plan, backend=backend(3)) as run:
        for change in (
            lambda weight: weight.data.mul_(0.5), lambda weight: weight.data.clamp_(-0.1, 0.1),
            lambda weight: setattr(weight, "data", torch.ones(WIDTH, WIDTH)),
        ):
            for net in (mine, theirs):
                change(net.spec.stages[0].fn.weight)
            assert run.step(**data(4)).loss == loop.step(**data(4)).loss
        for net in (mine, theirs):
            for stage in net.spec.stages:
                stage.fn.zero_grad()  # type: ignore[union-attr]
                stage.fn.double()  # type: ignore[union-attr]
        with torch.inference_mode():
            run.evaluate(**{name: value.double() for name, value in data(4).items()})
        doubled = {name: value.double() for name, value in data(4).items()}
        assert run.step(**doubled).loss == loop.step(**doubled).loss
    assert same(gradients(mine), gradients(theirs))


def test_stages_that_are_functions_and_lists_of_weights() -> None:
    """``params=`` of two stages, one module in two stages, and an LSTM, which lists its weights a second time."""
    def build() -> pipec.Pipeline:
        torch.manual_seed(2)
        scale = torch.ones(WIDTH, requires_grad=True)
        whole, lstm = linear(), nn.LSTM(WIDTH, WIDTH, batch_first=True)
        net = pipec.Pipeline("mixed")
        value = net.stage("scale", lambda p, x: x * p["s"], net.input("x"), params={"s": scale})
        value = net.stage("first", whole, value)
        value = net.stage("run", Over(lstm), value)
        value = net.stage("again", Over(lstm), value)
        value = net.stage("last", whole, value)
        value = net.stage("rescale", lambda p, x: (x * p[0]).sin(), value, params=[scale])
        net.loss("mse", F.mse_loss, value, net.input("y"))
        return net

    mine, theirs = build(), build()
    plan, loop = pipec.compile(mine, 6, 2), pipec.reference(theirs, 2)
    streams = backend(6)
    with pipec.Runner(mine, plan, backend=streams) as run:
        for step in range(2):
            assert run.step(**data(4, step)).loss == loop.step(**data(4, step)).loss
            assert problems(plan, recorded(streams)) == []
        assert streams.replicas is not None
        assert len(streams.replicas.made) == 1 + 2 + 4
    assert same(gradients(mine), gradients(theirs))


class Over(nn.Module):
    def __init__(self, lstm: nn.LSTM) -> None:
        super().__init__()
        self.lstm = lstm

    def forward(self, x: Tensor) -> Tensor:
        return self.lstm(x[:, None])[0][:, 0]  # type: ignore[no-any-return]


def test_the_first_stage_that_trains_owns() -> None:
    """Not one that no loss depends on, which has no UPDATE."""
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
    net = pipec.Pipeline("probe")
    x = net.input("x")
    net.output(net.stage("probe", Seen(weight), x))
    net.loss("mse", F.mse_loss, net.stage("main", Seen(weight), x), net.input("y"))
    plan = pipec.compile(net, 2, 2, placement=[0, 1], update="stage")
    streams = backend(2)
    with pipec.Runner(net, plan, backend=streams, optimizer=lambda p: torch.optim.SGD(p, lr=0.1)) as run:
        before = weight.detach().clone()
        run.step(**data(4))
        assert streams.replicas is not None
        (one,) = streams.replicas.made
        assert (one.owner, one.user) == (1, 0)
        assert not (plan.table.kind == Kind.REDUCE).any()
    assert not torch.equal(weight, before)


def test_the_users_hooks_run() -> None:
    """A hook on a tensor per stage and microbatch, one after accumulation once."""
    counts: dict[str, list[int]] = {}
    for who in ("mine", "theirs"):
        net, seen = three(), [0, 0]
        counts[who] = seen
        weight = net.spec.stages[0].fn.weight

        def halve(gradient: Tensor, seen: list[int] = seen) -> Tensor:
            seen[0] += 1
            return gradient * 0.5

        def ended(parameter: Tensor, seen: list[int] = seen) -> None:
            seen[1] += 1

        hook = weight.register_hook(halve)
        weight.register_post_accumulate_grad_hook(ended)
        if who == "mine":
            with pipec.Runner(net, pipec.compile(net, 3, 2), backend=backend(3)) as run:
                run.step(**data(4))
                hook.remove()
                run.step(**data(4))
            mine = net
        else:
            loop = pipec.reference(net, 2)
            loop.step(**data(4))
            hook.remove()
            loop.step(**data(4))
            theirs = net
    assert counts["mine"] == counts["theirs"] == [4, 2]
    assert same(gradients(mine), gradients(theirs))


def test_a_failed_step_loses_nothing() -> None:
    mine, theirs = three(), three()
    plan, loop = pipec.compile(mine, 3, 2), pipec.reference(theirs, 2)
    first, last = mine.spec.stages[0].fn, mine.spec.stages[2].fn
    weight = first.weight

    def fail(gradient: Tensor) -> Tensor:
        raise ValueError("no")

    with pipec.Runner(mine, plan, backend=backend(3)) as run:
        run.step(**data(4))
        kept = weight.grad.clone()
        hook = weight.register_hook(fail)
        with pytest.raises(ValueError, match="no") as told:
            run.step(**data(4))
        assert "stage 's2', microbatch 0, BACKWARD (2B0) on device 2" in str(told.value.__notes__)
        hook.remove()
        assert first.weight is last.weight is weight
        assert torch.equal(weight.grad, kept)
        with pytest.raises(RuntimeError, match="mat1"):
            run.step(x=torch.zeros(4, WIDTH + 1), y=torch.zeros(4, WIDTH))
        assert first.weight is last.weight is weight
        run.step(**data(4))
    loop.step(**data(4))
    loop.step(**data(4))
    assert same(gradients(mine), gradients(theirs))


def test_clipping_scaling_and_checkpoints() -> None:
    """With names and numbers of a run on one device."""
    states: list[Any] = []
    for where in ("replay", backend(4), backend(4)):
        net, norms, held = tied(), [], []
        plan = pipec.compile(net, 4, 3, update="all")

        def clip(_: Any, norms: list[float] = norms, held: list[pipec.Runner] = held) -> None:
            norms.append(float(held[0].clip_grad_norm_(0.5)))

        with pipec.Runner(
            net, plan, backend=where, optimizer=torch.optim.Adam(parameters(net), lr=0.05), before_update=clip,
            scaler=torch.amp.GradScaler("cpu", init_scale=64.0),
        ) as run:
            held.append(run)
            for _ in range(2):
                run.step(**WORDS)
            if len(states) == 2:
                run.restore(states[0][0])
            state = run.checkpoint()
            run.step(**WORDS)
            states.append((state, norms[-1], [p.detach().clone() for p in parameters(net)]))
    assert list(states[0][0]["model"]) == list(states[1][0]["model"])
    for state, norm, values in states[1:]:
        assert same(state["model"], states[0][0]["model"])
        assert norm == states[0][1]
        assert same(values, states[0][2])


def test_every_wait_around_replicas_counts() -> None:
    """Without any one of its waits the proof fails, unless others imply it."""
    net = three()
    plan = pipec.compile(net, 3, 2)
    streams = backend(3)
    with pipec.Runner(net, plan, backend=streams) as run:
        run.step(**data(4))
    calls = recorded(streams)
    assert [call.what for call in calls if call.what.startswith("parameters")] == ["parameters of 0 for 2"]
    carried = next(call for call in calls if call.what == "2G0" and call.kind == "run")
    assert (carried.stream, carried.others) == ("out 2", ("in 0",))
    assert problems(plan, calls) == []
    assert needed_waits(plan, calls) > 20
    late = [call for call in calls if call.what != "parameters of 0 for 2"]
    at = next(number for number, call in enumerate(late) if call.what == "2F0")
    moved = [*late[: at + 1], next(c for c in calls if c.what == "parameters of 0 for 2"), *late[at + 1 :]]
    assert "2F0 does not wait for parameters of 0 for 2" in problems(plan, moved)
