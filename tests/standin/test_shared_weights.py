"""Parameters that stages on several GPUs share: equal to the plain loop on the CPU to the bit, and without a race."""

from __future__ import annotations

import gc
import warnings
from typing import Any

import pytest
import torch
from models import WIDTH, data, gradients, parameters, same
from test_replicas import WORDS, Seen, three
from test_shared_parameters import tied
from torch import Tensor, nn
from torch.nn import functional as F

import pipec
import standin
from pipec.runtime.stream_lanes import StreamLane
from pipec.runtime.stream_replicas import ReplicaStreams


def devices(count: int, real: int) -> list[str]:
    return [f"standin:{number % real}" for number in range(count)]


def host(tensors: list[Any]) -> list[Tensor | None]:
    return [None if tensor is None else tensor.detach().cpu() for tensor in tensors]


@pytest.mark.parametrize("update", [None, "stage", "all"])
@pytest.mark.parametrize(("count", "real", "schedule", "recompute"), [
    (2, 2, "gpipe", "never"), (4, 2, "1f1b", "always"), (4, 4, "zb-h1", "never"), (4, 3, "zb-h1", "except_last"),
])
def test_tied_weights_train_as_on_one_device(
    count: int, real: int, schedule: str, recompute: str, update: str | None
) -> None:
    def make(params: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, lr=0.5, momentum=0.9)

    mine, theirs = tied(), tied()
    loop, plain, objects = pipec.reference(theirs, 3), make(parameters(theirs)), list(map(id, parameters(mine)))
    plan = pipec.compile(mine, count, 3, schedule, recompute=recompute, update=update)
    own: Any = make if update == "stage" else make(parameters(mine))
    with pipec.Runner(mine, plan, devices=devices(count, real), optimizer=own if update else None) as run:
        for _ in range(3):
            assert run.step(**WORDS).loss.cpu() == loop.step(**WORDS).loss
            if update is None:
                assert same(host(gradients(mine)), gradients(theirs))
                own.step()
                own.zero_grad()
            plain.step()
            plain.zero_grad()
            run.evaluate(**WORDS)
        assert list(map(id, parameters(mine))) == objects
        saved = {name: value.cpu() for name, value in run.state_dict().items()}
    assert same(host(parameters(mine)), host(parameters(theirs)))
    embed, out = mine.spec.stages[0].fn, mine.spec.stages[3].fn
    assert embed.weight is out.weight
    assert embed.weight.device == torch.device("standin:0")
    assert same([saved["embed.weight"], saved["out.weight"]], [theirs.spec.stages[0].fn.weight.detach()] * 2)


def mixed() -> pipec.Pipeline:
    """``params=`` of two stages, one module in two stages, something frozen, a checkpoint within a stage."""
    torch.manual_seed(2)
    scale, whole = torch.ones(WIDTH, requires_grad=True), nn.Linear(WIDTH, WIDTH)
    fixed, weight = (nn.Parameter(torch.randn(WIDTH, WIDTH), requires_grad=trains) for trains in (False, True))
    net = pipec.Pipeline("mixed")
    value = net.stage("scale", lambda p, x: x * p["s"], net.input("x"), params={"s": scale})
    value = net.stage("first", whole, value)
    value = net.stage("run", Seen(weight), value)
    value = net.stage("fixed", Seen(fixed), value)
    value = net.stage("again", Seen(weight, again=True), value)
    value = net.stage("fixed too", Seen(fixed, again=True), value)
    value = net.stage("last", whole, value)
    value = net.stage("rescale", lambda p, x: (x * p[0]).sin(), value, params=[scale])
    net.loss("mse", F.mse_loss, value, net.input("y"))
    return net


@pytest.mark.parametrize("real", [2, 3, 4])
def test_whatever_is_shared(real: int) -> None:
    mine, theirs = mixed(), mixed()
    loop, plan = pipec.reference(theirs, 2), pipec.compile(mine, 8, 2, recompute={"again": "always"})
    with pipec.Runner(mine, plan, devices=devices(8, real)) as run:
        for step in range(3):
            assert run.step(**data(4, step)).loss.cpu() == loop.step(**data(4, step)).loss
            for net in (mine, theirs):
                net.spec.stages[1].fn.weight.data.mul_(0.9)  # type: ignore[union-attr]
    assert same(host(gradients(mine)), gradients(theirs))


@pytest.mark.parametrize("where", [["standin:0"] * 4, ["standin:0", "standin:1", "standin:1", "standin:0"]])
def test_each_logical_device_has_a_leaf_of_its_own(where: list[str]) -> None:
    """In the memory that its GPU has. Of a leaf in common autograd warns that its streams wait for one another."""
    net = tied()
    plan = pipec.compile(net, 4, 3)
    torch.set_warn_always(True)
    try:
        with warnings.catch_warnings(), pipec.Runner(net, plan, devices=where) as run:
            warnings.simplefilter("error")
            run.step(**WORDS)
            for stage in net.spec.stages:
                for parameter in stage.fn.parameters():  # type: ignore[union-attr]
                    parameter.data = parameter.data.clone()
            run.step(**WORDS)
            replicas = run._backend.replicas.made
    finally:
        torch.set_warn_always(False)
    one = next(one for one in replicas if one.owner == 0)
    assert not one.apart
    assert one.tensor is not one.parameter
    assert one.tensor.data_ptr() == one.parameter.data_ptr()
    if where[1] == "standin:1":
        assert sorted(other.owner for other in replicas if not other.apart) == [0, 1]


def test_clipping_scaling_and_going_on_from_a_checkpoint() -> None:
    found, saved = [], None
    for where in (None, devices(3, 3), devices(3, 2)):
        net, held = three(), []
        plan = pipec.compile(net, 3, 2, update="all")

        def clip(_: Any, held: list[pipec.Runner] = held) -> None:
            held[0].clip_grad_norm_(0.1)

        kind = "cpu" if where is None else "standin"
        with pipec.Runner(
            net, plan, devices=where, optimizer=torch.optim.SGD(parameters(net), lr=0.5, momentum=0.9),
            before_update=clip, scaler=torch.amp.GradScaler(kind, init_scale=64.0),
        ) as run:
            held.append(run)
            run.step(**data(4))
            if saved is None:
                saved = run.checkpoint()
            else:
                run.step(**data(4, 5))
                run.restore(saved)
            run.step(**data(4, 1))
        found.append(host(parameters(net)))
    assert same(found[0], found[1])
    assert same(found[0], found[2])


def test_a_failed_step_loses_nothing() -> None:
    mine, theirs = three(), three()
    loop = pipec.reference(theirs, 2)
    weight = mine.spec.stages[0].fn.weight
    with pipec.Runner(mine, pipec.compile(mine, 3, 2), devices=devices(3, 3)) as run:
        for fails in (False, True, False):
            hook = weight.register_hook(lambda gradient: 1 // 0) if fails else None
            if hook is None:
                assert run.step(**data(4)).loss.cpu() == loop.step(**data(4)).loss
            else:
                with pytest.raises(ZeroDivisionError):
                    run.step(**data(4))
                hook.remove()
            assert mine.spec.stages[2].fn.weight is weight is mine.spec.stages[0].fn.weight
            assert same(host(gradients(mine)), gradients(theirs))


def test_memory_does_not_grow_from_step_to_step() -> None:
    gc.collect()  # what other tests have left
    net = three()
    with pipec.Runner(net, pipec.compile(net, 3, 2), devices=devices(3, 3)) as run:
        seen = []
        for step in range(4):
            run.step(**data(4, step))
            run.evaluate(**data(4, step))
            for parameter in parameters(net):
                parameter.grad = None
            seen.append([standin.live(device) for device in range(3)])
    assert seen[1] == seen[2] == seen[3]


def towers() -> None:
    """Train and evaluate two stages that read nothing of each other."""
    torch.manual_seed(3)
    weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
    net = pipec.Pipeline("towers")
    x = net.input("x")
    left, right = (net.stage(name, Seen(weight), x) for name in ("left", "right"))
    net.loss("mse", F.mse_loss, net.stage("both", torch.add, left, right), net.input("y"))
    with pipec.Runner(net, pipec.compile(net, 3, 2), devices=devices(3, 3)) as run:
        for step in range(2):
            run.step(**data(4, step))
            run.evaluate(**data(4, step))


def test_a_reader_that_does_not_wait_for_the_values_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    towers()
    assert standin.problems() == []
    monkeypatch.setattr(ReplicaStreams, "arrived", lambda self, stage: [])
    towers()
    assert any(problem.startswith("race: mm") for problem in standin.problems())


def test_a_sum_that_does_not_wait_for_its_memory_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    towers()
    assert standin.problems() == []
    waits, reduces, within = StreamLane.after, ReplicaStreams.reduce, [False]

    def during(self: ReplicaStreams, *given: Any) -> Any:
        within[0] = True
        try:
            return reduces(self, *given)
        finally:
            within[0] = False

    def after(self: StreamLane, events: Any) -> None:
        if not (within[0] and self.name.startswith("out")):
            waits(self, events)

    monkeypatch.setattr(ReplicaStreams, "reduce", during)
    monkeypatch.setattr(StreamLane, "after", after)
    towers()
    assert standin.problems()


def test_shared_buffers_are_refused_and_nothing_is_moved() -> None:
    shared = nn.BatchNorm1d(WIDTH)
    net = pipec.Pipeline("net")
    value = net.stage("b", shared, net.stage("a", shared, net.input("x")))
    net.loss("mse", F.mse_loss, value, net.input("y"))
    plan = pipec.compile(net, 2, 1)
    with pytest.raises(pipec.RunError, match=r"stages 'a' and 'b' share 'running_mean'.*give each its own"):
        pipec.Runner(net, plan, devices=devices(2, 2))
    assert shared.weight.device.type == "cpu"
    with pipec.Runner(net, plan, devices=devices(2, 1)):
        assert shared.weight.device.type == "standin"
