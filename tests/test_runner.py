"""The runner: batches of any size, the caller's context, traces, state, and what does not fit."""

from __future__ import annotations

import contextvars
import itertools
import threading
from typing import Any

import models
import pytest
import torch
from models import WIDTH, chain, data, gradients, kept_streams, parameters, runner, same
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import pipec

__all__ = ["kept_streams"]


@pytest.mark.parametrize("backend", ["threads", "replay"])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "eager-1f1b", "interleaved-1f1b", "looped-bfs"])
def test_batches_of_any_size_in_any_step(schedule: str, backend: str) -> None:
    """One runner over 16, 16, 6, 3, 1, 64 rows, an evaluation between: each step is that of a fresh pipeline."""
    mine, theirs = chain(4), chain(4)
    with runner(mine, 2, 4, schedule, backend=backend, recompute="except_last") as run:
        for number, rows in enumerate((16, 16, 6, 3, 1, 10, 16)):
            got = run.step(**data(rows, number))
            expected = pipec.reference(theirs, 4).step(**data(rows, number))
            assert got.microbatches == min(rows, 4)
            assert got.output.shape == (rows, WIDTH)
            assert same([got.losses, got.outputs], [expected.losses, expected.outputs])
            assert same(gradients(mine), gradients(theirs))
            if number == 2:
                assert run.evaluate(**data(64)).output.shape == (64, WIDTH)


def test_sizes_differ_by_at_most_one_and_rows_keep_their_order() -> None:
    seen: list[list[int]] = []

    def note(x: Tensor) -> Tensor:
        seen.append(x[:, 0].int().tolist())
        return x

    x = torch.arange(10.0)[:, None].expand(10, WIDTH).contiguous()
    net = models.of_modules(note, nn.Linear(WIDTH, WIDTH), nn.Identity())
    with runner(net, 1, 4) as run:
        result = run.step(x=x, y=x)
        assert seen[:4] == [[0, 1, 2], [3, 4, 5], [6, 7], [8, 9]]
        torch.testing.assert_close(result.output, net.spec.stages[1].fn(x).detach())


def test_a_handwritten_schedule_and_fewer_rows_than_its_microbatches() -> None:
    text = "0F0 0F1 0B1 0B0\n1F0 1F1 1B1 1B0"
    with runner(chain(2), 2, 2, pipec.parse_schedule(text)) as run:
        run.step(**data(2))
        with pytest.raises(pipec.PipecError, match="microbatch"):
            run.step(**data(1))
        run.step(**data(3))


def test_rows_that_disagree_and_inputs_that_cannot_be_split() -> None:
    with runner(chain(2)) as run:
        with pytest.raises(pipec.RunError, match=r"disagree on the number of rows.*x: 8.*y: 6"):
            run.step(x=data(8)["x"], y=data(6)["y"])
        with pytest.raises(pipec.RunError, match=r"'y' of shape .* cannot be split along dimension 0.*split=None"):
            run.step(x=data(8)["x"], y=torch.tensor(1.0))
        for odd in (data(8)["y"].to_sparse(), torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])):
            with pytest.raises(pipec.RunError, match=r"'y' is a (torch.sparse_coo|nested) tensor, .* make it dense"):
                run.step(x=data(8)["x"], y=odd)
        with pytest.raises(pipec.RunError, match="'y' holds no tensor to split, got str; give it as a tensor"):
            run.step(x=data(8)["x"], y="text")
        with pytest.raises(pipec.RunError, match="no row"):
            run.step(x=data(0)["x"], y=data(0)["y"])
        with pytest.raises(pipec.RunError, match="3 positional inputs were given"):
            run.step(1, 2, 3)
        run.step(*data().values())
        with pytest.raises(pipec.RunError, match=r"got one dict with the inputs x, y; pass it as step\(\*\*batch\)"):
            run.step(data())


def test_another_dimension_is_split_and_joined() -> None:
    net = pipec.Pipeline("time first")
    x, y = net.input("x", split=1), net.input("y", split=-1)
    h = net.stage("a", nn.Linear(4, 4), x)
    net.output(h, "h", dim=1)
    net.output(net.stage("list", lambda v: (v.mean(), "text"), h), "list", dim=None)
    net.loss("l", lambda h, y: (h.mean((0, 2)) - y).pow(2).mean(), h, y)
    given = {"x": torch.randn(3, 7, 4), "y": torch.randn(7)}
    with runner(net, 2, 3) as run:
        result = run.step(**given)
    assert result.microbatches == 3
    assert result.outputs["h"].shape == (3, 7, 4)
    torch.testing.assert_close(result.outputs["h"], net.spec.stages[0].fn(given["x"]).detach())
    assert len(result.outputs["list"]) == 3


@pytest.mark.parametrize(("change", "told"), [
    (lambda n: chain(3), r"its stages are s0, s1, s2, the plan's are s0, s1"),
    (lambda n: models.of_modules(nn.Linear(8, 8), nn.Linear(8, 8)), "its stages are a, b"),
])
def test_a_plan_of_another_pipeline(change: Any, told: str) -> None:
    net = chain(2)
    plan = pipec.compile(net, 2, 2)
    with pytest.raises(pipec.RunError, match=told):
        pipec.Runner(change(net), plan)


@pytest.mark.parametrize(("how", "told"), [
    ({"devices": ["cpu"]}, "the plan has 2 devices, got 1"), ({"backend": "mpi"}, "unknown backend 'mpi'"),
])
def test_devices_and_backends_that_do_not_fit(how: Any, told: str) -> None:
    net = chain(2)
    with pytest.raises(pipec.RunError, match=told):
        pipec.Runner(net, pipec.compile(net, 2, 2), **how)


def test_arguments_in_the_wrong_order() -> None:
    net = chain(2)
    plan = pipec.compile(net, 2)
    with pytest.raises(pipec.RunError, match=r"Runner\(pipeline, plan\): got Plan and Pipeline; swap them"):
        pipec.Runner(plan, net)  # type: ignore[arg-type]
    with pytest.raises(pipec.RunError, match=r"Runner\(pipeline, plan\): got Pipeline and Timeline$"):
        pipec.Runner(net, plan.simulate())  # type: ignore[arg-type]


def test_placeholders_cannot_run() -> None:
    net = pipec.chain(3)
    with pytest.raises(pipec.RunError, match="s0, s1, s2"):
        pipec.Runner(net, pipec.compile(net, 2, 2))


def test_tasks_of_different_devices_overlap_in_time() -> None:
    """Forwards of two devices wait for each other in the middle; each device's own tasks never overlap."""
    meet = threading.Barrier(2)

    class Meets(nn.Linear):
        """All forwards but the ``alone``-th: those of the first stage meet those of the second, a microbatch later."""

        seen, alone = 0, 0

        def forward(self, x: Tensor) -> Tensor:
            if self.seen != self.alone:
                meet.wait(60)
            self.seen += 1
            return super().forward(x)

    net = models.of_modules(Meets(WIDTH, WIDTH), last := Meets(WIDTH, WIDTH))
    last.alone = 7
    with pytest.raises(pipec.RunError, match="run a step first"), runner(net) as run:
        run.trace()
    with runner(net, 2, 8, "gpipe", backend="threads") as run:
        run.step(**data())
        timeline = run.trace()
    spans: dict[int, list[tuple[float, float]]] = {0: [], 1: []}
    for interval in timeline.intervals:
        if interval.lane == pipec.Lane.COMPUTE:
            spans[interval.device].append((interval.start, interval.end))
    for own in spans.values():
        own.sort()
        assert len(own) == 16
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(own))
    both = [(m, n) for m, a in enumerate(spans[0]) for n, b in enumerate(spans[1]) if max(a[0], b[0]) < min(a[1], b[1])]
    assert {(m + 1, m) for m in range(7)} <= set(both)


def test_a_worker_per_device() -> None:
    names: dict[str, set[str]] = {}

    def note(stage: str) -> Any:
        return lambda *_: names.setdefault(stage, set()).add(threading.current_thread().name)

    net = chain(4)
    for stage in net.spec.stages:
        stage.fn.register_forward_hook(note(stage.name))
    with runner(net, 2, backend="threads") as run:
        run.step(**data())
    assert names["s0"] == names["s1"] != names["s2"] == names["s3"]
    assert all(len(found) == 1 and "device" in next(iter(found)) for found in names.values())


VARIABLE: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="unset")


class Count(TorchFunctionMode):
    def __init__(self) -> None:
        self.linear: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.linear:
            self.linear.append(threading.current_thread().name)
        return func(*args, **(kwargs or {}))


class CountOps(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.tanh: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.tanh.default:
            self.tanh.append(threading.current_thread().name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("backend", ["threads", "replay"])
def test_the_callers_context_holds_in_the_stages(backend: str) -> None:
    seen: list[Any] = []

    def look(*_: Any) -> None:
        seen.append((VARIABLE.get(), torch.get_default_dtype(), torch.is_grad_enabled(), torch.get_num_threads(),
                     torch.is_autocast_enabled("cpu"), torch.empty(0).device.type,
                     torch.are_deterministic_algorithms_enabled()))

    net = chain(3)
    for stage in net.spec.stages:
        stage.fn.register_forward_hook(look)
    token = VARIABLE.set("set")
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        torch.use_deterministic_algorithms(True)
        with runner(net, 3, 2, backend=backend) as run:
            run.step(**data())
            assert set(seen) == {("set", torch.float32, True, 1, False, "cpu", True)}
            seen.clear()
            VARIABLE.set("again")
            torch.set_num_threads(2)
            torch.use_deterministic_algorithms(False)
            run.evaluate(**data())
            assert set(seen) == {("again", torch.float32, False, 2, False, "cpu", False)}
            seen.clear()
            given = data()
            with torch.device("meta"):
                run.evaluate(**given)
            assert set(seen) == {("again", torch.float32, False, 2, False, "meta", False)}
    finally:
        VARIABLE.reset(token)
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("backend", ["threads", "replay"])
def test_modes_and_saved_tensor_hooks_of_the_caller_hold_in_the_stages(backend: str) -> None:
    mine, theirs = chain(3), chain(3)
    packed: list[int] = []
    unpacked: list[int] = []

    def pack(tensor: Tensor) -> Tensor:
        packed.append(1)
        return tensor

    def unpack(tensor: Tensor) -> Tensor:
        unpacked.append(1)
        return tensor

    functions, ops = Count(), CountOps()
    with runner(mine, 3, 4, backend=backend) as run:
        with functions:
            run.step(**data())
        with ops:
            run.step(**data())
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            run.step(**data())
        count = len(packed)
        run.step(**data())
    assert len(functions.linear) == len(ops.tanh) == 3 * 4
    assert len(packed) == count > 0
    assert len(unpacked) >= 3 * 4
    loop = pipec.reference(theirs, 4)
    for _ in range(4):
        loop.step(**data())
    assert same(gradients(mine), gradients(theirs))


def test_two_runners_in_two_threads() -> None:
    nets = [chain(3), chain(3)]
    failures: list[BaseException] = []

    def train(net: pipec.Pipeline) -> None:
        try:
            with runner(net, 3) as run:
                for number in range(5):
                    run.step(**data(8, number))
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=train, args=(net,)) for net in nets]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    plain = chain(3)
    loop = pipec.reference(plain, 4)
    for number in range(5):
        loop.step(**data(8, number))
    for net in nets:
        assert same(gradients(net), gradients(plain))


def test_state_goes_to_other_placements_and_back() -> None:
    one, two = (models.of_modules(nn.Linear(8, 8), nn.BatchNorm1d(8)) for _ in range(2))
    with runner(one, 1) as first, runner(two, 2) as second:
        first.step(**data())
        state = first.state_dict()
        assert list(state)[:2] == ["a.weight", "a.bias"]
        second.load_state_dict(state)
        assert same(second.state_dict(), state)
        assert same([p.detach() for p in second.parameters()], [p.detach() for p in parameters(one)])
        with pytest.raises(pipec.RunError, match=r"(?s)missing: a.weight.*unknown: a.wait"):
            second.load_state_dict({("a.wait" if k == "a.weight" else k): v for k, v in state.items()})
        with pytest.raises(pipec.RunError, match=r"a\.weight.*\(1,\).*\(8, 8\)"):
            second.load_state_dict(state | {"a.weight": torch.zeros(1)})
        assert same(second.state_dict(), state)


def test_results_kept_by_the_caller_do_not_change() -> None:
    with runner(chain(2)) as run:
        results = [run.step(**data(8, number)) for number in range(3)]
        copies = [(r.loss.clone(), r.output.clone()) for r in results]
        run.step(**data(8, 9))
    assert same([(r.loss, r.output) for r in results], copies)
    results[0].output.add_(1)  # the caller may do as it likes with them


def test_a_result_prints_short() -> None:
    result = pipec.Result({"mse": torch.tensor(0.5)}, {"a": torch.ones(3, 2), "b": [torch.ones(1), None]}, 2)
    assert repr(result) == "Result(losses: mse 0.5; outputs: a (3, 2), b [(1,), None]; 2 microbatches)"
    assert repr(pipec.Result({}, {}, 1, True)) == "Result(losses: none; outputs: none; 1 microbatch; skipped)"


def test_a_result_of_several_outputs_has_no_single_one() -> None:
    net = pipec.Pipeline("several")
    x, y = net.input("x"), net.input("y")
    a = net.stage("a", nn.Linear(8, 8), x)
    b = net.stage("b", nn.Linear(8, 8), a)
    for value in (a, b):
        net.output(value)
    net.loss("mse", F.mse_loss, b, y)
    with runner(net) as run:
        result = run.step(**data())
    assert list(result.outputs) == ["a", "b"]
    with pytest.raises(pipec.RunError, match="2 outputs: a, b"):
        _ = result.output
