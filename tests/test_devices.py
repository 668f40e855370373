"""Real devices without any: which are chosen, what moves, whose random numbers, and the thin mapping to torch."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from models import WIDTH, chain, data, gradients, kept_streams, parameters, same
from torch import nn
from torch.nn import functional as F

import pipec
from pipec.runtime import means, placement
from pipec.runtime.accelerator import Accelerator, Current
from pipec.runtime.placement import homes, place_stages, real_devices
from pipec.runtime.randomness import DeviceGenerator, Position, Purpose, Randomness, Streams
from pipec.runtime.stages import bind

__all__ = ["kept_streams"]


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with two GPUs, as far as choosing goes."""
    monkeypatch.setattr(placement, "accelerators", lambda: ("cuda", 2))


def test_devices_by_name(gpus: None) -> None:
    assert real_devices(None, None, 2) is None
    assert real_devices(["cpu", "cpu:0"], None, 2) is None
    cuda = [torch.device("cuda", 0), torch.device("cuda", 1)]
    assert real_devices(["cuda:0", "cuda:1"], None, 2) == cuda
    assert real_devices([torch.device("cuda:1"), "cuda:0", "cuda:1"], "cuda", 3) == [cuda[1], cuda[0], cuda[1]]
    assert real_devices(None, "cuda", 3) == [cuda[0], cuda[1], cuda[0]]


@pytest.mark.parametrize(("given", "backend", "told"), [
    (["cuda:0", "cuda:2"], None, "devices cuda:2 are not here; torch finds cuda:0 to cuda:1"),
    (["cuda:0", "cpu"], None, "devices must be of one kind, got cpu and cuda"),
    (["cpu", "cpu"], "cuda", "backend='cuda' runs on GPUs, got the devices cpu, cpu"),
    (["cuda:0", "cuda:1"], "threads", "backend='threads' runs on the CPU; leave backend= out, or give 'cuda', for"),
])
def test_devices_that_do_not_fit(gpus: None, given: Any, backend: Any, told: str) -> None:
    with pytest.raises(pipec.RunError, match=told):
        real_devices(given, backend, 2)


def test_without_a_gpu_the_answer_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "accelerators", lambda: ("cuda", 0))
    plan = pipec.compile(net := chain(2), 2, 2)
    with pytest.raises(pipec.RunError, match="needs a GPU, but torch finds none here; leave backend= out"):
        pipec.Runner(net, plan, backend="cuda")
    with pytest.raises(pipec.RunError, match="devices cuda:0, cuda:1 are not here; torch finds no GPU, only the CPU"):
        pipec.Runner(net, plan, devices=["cuda:0", "cuda:1"])


def test_stages_move_to_their_devices_and_parameters_stay_the_same_objects() -> None:
    net = pipec.Pipeline("net")
    params = {"w": torch.randn(WIDTH, requires_grad=True)}
    value = net.stage("a", nn.BatchNorm1d(WIDTH), net.input("x"))
    value = net.stage("b", lambda p, x: x * p["w"], value, params=params)
    net.loss("mse", nn.MSELoss(), value, net.input("y"))
    plan = pipec.compile(net, 2, 1)
    before = [id(p) for p in parameters(net)]
    params["w"].grad = torch.ones(WIDTH)
    first, second = torch.device("cpu", 0), torch.device("cpu", 1)  # never equal to where tensors are: all move
    where = homes(plan, [first, second])
    assert where == [first, second]
    stages = bind(net.spec)
    place_stages(stages, where)
    assert [id(p) for p in parameters(net)] == before
    assert torch.equal(params["w"].grad, torch.ones(WIDTH))
    module = net.spec.stages[0].fn
    meta = torch.device("meta")
    place_stages(stages[:1], [meta])
    assert {t.device for t in (*module.parameters(), *module.buffers())} == {meta}


def test_what_stages_on_two_devices_share_is_refused_with_both_named() -> None:
    net = pipec.Pipeline("tied")
    embed, head = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
    head.weight = embed.weight
    value = net.stage("head", head, net.stage("embed", embed, net.input("x")))
    net.loss("mse", F.mse_loss, value, net.input("y"))
    stages = bind(net.spec)
    with pytest.raises(pipec.RunError, match=r"stages 'embed' and 'head' share 'weight'.*run on cpu and meta"):
        place_stages(stages, [torch.device("cpu"), torch.device("meta")])
    assert embed.weight.device.type == "cpu"
    place_stages(stages, [torch.device("cpu")] * 2)


# -- random numbers ----------------------------------------------------------------------------------------------


def test_a_task_sets_the_devices_generator_and_puts_it_back() -> None:
    own = DeviceGenerator(torch.Generator().manual_seed(7))
    before = own.generator.get_state()
    with Streams() as streams:
        random = Randomness(streams, Position(3, 5), generators={0: own, 1: own})

        def draw(stage: int, m: int, purpose: Purpose = Purpose.FORWARD) -> torch.Tensor:
            with random.task(stage, m, purpose):
                return torch.rand(4, generator=own.generator)

        first = draw(0, 0)
        assert torch.equal(own.generator.get_state(), before)
        assert torch.equal(draw(0, 0), first), "a recompute draws the same"
        others = [draw(0, 1), draw(1, 0), draw(0, 0, Purpose.BACKWARD)]
        assert not any(torch.equal(first, other) for other in others)
        halves = random.task(0, 0, Purpose.BACKWARD)
        with halves:
            one = torch.rand(2, generator=own.generator)
        draw(1, 1)
        with halves:  # the weight half goes on where the input half was
            two = torch.rand(2, generator=own.generator)
        assert torch.equal(torch.cat([one, two]), others[2])
        with pytest.raises(ValueError, match="wrong"), random.task(0, 0, Purpose.FORWARD):
            raise ValueError("wrong")
        assert torch.equal(own.generator.get_state(), before)


def test_two_threads_take_turns_at_a_devices_generator() -> None:
    own = DeviceGenerator(torch.Generator())
    results: dict[int, list[torch.Tensor]] = {0: [], 1: []}
    with Streams() as streams:
        random = Randomness(streams, Position(3), generators={0: own, 1: own})

        def work(stage: int) -> None:
            for m in range(50):
                with random.task(stage, m, Purpose.FORWARD):
                    results[stage].append(torch.rand(3, generator=own.generator))

        work(0)
        alone, results[0] = results[0], []
        threads = [threading.Thread(target=work, args=(stage,)) for stage in (0, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert same(results[0], alone)


# -- what the host must not wait for -----------------------------------------------------------------------------


def test_uneven_means_on_a_device_are_found_at_the_end_of_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(means, "on_host", lambda tensor: False)
    net = pipec.Pipeline("words")
    out = net.stage("b", nn.Linear(WIDTH, 5), net.stage("a", nn.Linear(WIDTH, WIDTH), net.input("x")))
    net.loss("cross entropy", F.cross_entropy, out, net.input("target"))
    x, target = data()["x"], torch.arange(8) % 5
    with pipec.Runner(net, pipec.compile(net, 2, 4), backend="lanes") as run:
        run.step(x, target)
        kept = [g.clone() for g in gradients(net) if g is not None]
        with pytest.raises(pipec.RunError, match="loss 'cross entropy' of stage 'b' meets targets equal to its"):
            run.step(x, target.masked_fill(target == 3, -100))
        assert same(gradients(net), kept), "the step was not undone"
        run.step(x, target)
        with pytest.raises(pipec.RunError, match="ignore_index"):
            run.evaluate(x, target.masked_fill(target == 3, -100))
    with pytest.raises(pipec.RunError, match="ignore_index"):
        pipec.reference(net, 4).step(x, target.masked_fill(target == 3, -100))


# -- the mapping to torch ----------------------------------------------------------------------------------------


class FakeAccelerator:
    """``torch.accelerator`` of a machine with two GPUs, as far as the mapping uses it."""

    def __init__(self) -> None:
        self.device = 0
        self.streams = {0: FakeStream(0, "default 0"), 1: FakeStream(1, "side 1")}

    def current_stream(self, device: torch.device) -> FakeStream:
        return self.streams[device.index]

    def set_stream(self, stream: FakeStream) -> None:
        self.device, self.streams[stream.device.index] = stream.device.index, stream

    def current_device_index(self) -> int:
        return self.device

    def set_device_index(self, index: int) -> None:
        self.device = index


class FakeStream:
    def __init__(self, index: int, name: str) -> None:
        self.device, self.name, self.calls = torch.device("cuda", index), name, []  # type: ignore[var-annotated]

    def record_event(self, event: Any = None) -> Any:
        return event or f"after {self.name}"

    def wait_event(self, event: str) -> None:
        self.calls.append(event)


def test_streams_are_current_on_their_devices_and_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeAccelerator()
    monkeypatch.setattr(torch, "accelerator", fake)
    out, into, compute = FakeStream(0, "out 0"), FakeStream(1, "in 1"), FakeStream(0, "compute 0")
    caller = dict(fake.streams)
    with Current((compute,)):
        with Current((into, out)):
            assert (fake.device, fake.streams) == (0, {0: out, 1: into})
        assert (fake.device, fake.streams) == (0, {0: compute, 1: caller[1]})
        with Current((into,)):
            assert (fake.device, fake.streams) == (1, {0: compute, 1: into})
    assert (fake.device, fake.streams) == (0, caller)
    with Current((into, FakeStream(1, "out 1"))):  # both on one GPU: the last one is current
        assert fake.streams[1].name == "out 1"
    assert (fake.device, fake.streams) == (0, caller)
    api = Accelerator([])
    assert api.caller(torch.device("cuda", 1)) is caller[1]
    api.wait(compute, api.record(into))
    assert compute.calls == ["after in 1"]
    payload: list[Any] = [torch.ones(1)]
    api.free(compute, "v0[0]", payload)
    assert payload == []
