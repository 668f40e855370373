"""Every operation that draws random numbers draws from its task's stream, on any thread."""

from __future__ import annotations

import threading

import pytest
import torch
import torch.nn.functional as F
from draws import (
    DRAWS,
    SEED,
    STEP,
    Draw,
    _nothing_left,
    in_threads,
    plainly,
    ramp,
    same,
    streams,
    tensors,
    with_gradient,
)
from torch import Tensor, nn
from torch.nn.attention.flex_attention import flex_attention
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from pipec.runtime import rng_kernels
from pipec.runtime.randomness import Purpose, Streams, task_seed

__all__ = ["_nothing_left", "streams"]


@pytest.mark.parametrize("name", DRAWS)
def test_draws_equal_a_plain_generator_with_the_tasks_seed(name: str, streams: Streams) -> None:
    draw = DRAWS[name]
    before = torch.get_rng_state()
    with streams.task(SEED, STEP, 1, 2) as stream:
        got = tensors(draw())
    assert torch.equal(torch.get_rng_state(), before), "the process's generator was used"
    assert same(got, plainly(draw, stream.seed))
    if name not in ("reseeded", "dropout_limits", "dropout_inference"):
        with streams.task(SEED, STEP, 1, 3):
            assert not same(got, tensors(draw()))


def test_four_threads_draw_everything_at_once(streams: Streams) -> None:
    """Every operation on each of four threads, in different orders."""
    names = list(DRAWS)
    want = {
        (thread, name): plainly(DRAWS[name], task_seed(SEED, STEP, thread, index))
        for thread in range(4)
        for index, name in enumerate(names)
    }

    def work(thread: int) -> None:
        order = list(enumerate(names))
        turn = thread * len(order) // 4
        for index, name in order[turn:] + order[:turn]:
            with streams.task(SEED, STEP, thread, index):
                got = tensors(DRAWS[name]())
            assert same(got, want[thread, name]), name

    before = torch.get_rng_state()
    in_threads(4, work)
    assert torch.equal(torch.get_rng_state(), before)


def test_masks_are_repeated_under_load(streams: Streams) -> None:
    """Checkpointed dropout on four threads, forward and backward as separate tasks that interleave."""
    before = torch.get_rng_state()

    def work(thread: int) -> None:
        pending = []
        for item in range(60):
            x = torch.ones(50, requires_grad=True)
            with streams.task(SEED, STEP, thread, item):
                F.dropout(x, 0.1)
                y = checkpoint(lambda x: F.dropout(F.dropout(x, 0.3), 0.3), x, use_reentrant=False)
                after = torch.rand(1)
            pending.append((item, x, y, after))
            if len(pending) == 3:
                item, x, y, after = pending.pop(0)
                with streams.task(SEED, STEP, thread, item, Purpose.BACKWARD):
                    first = torch.rand(1)
                    y.sum().backward()
                    second = torch.rand(1)
                with streams.task(SEED, STEP, thread, item, Purpose.BACKWARD):
                    assert torch.equal(torch.rand(1), first)
                    assert torch.equal(torch.rand(1), second), "the checkpoint moved the backward's stream"
                assert torch.equal(x.grad, y)  # type: ignore[arg-type]
                with streams.task(SEED, STEP, thread, item):  # RECOMPUTE
                    F.dropout(x, 0.1)
                    assert torch.equal(F.dropout(F.dropout(x, 0.3), 0.3), y)
                    assert torch.equal(torch.rand(1), after)

    in_threads(4, work)
    assert torch.equal(torch.get_rng_state(), before)


def test_only_the_random_operations_are_touched() -> None:
    names = torch._C._dispatch_get_all_op_names()
    before = {name: torch._C._dispatch_dump_table(name) for name in names}
    with Streams() as streams:
        assert not streams.with_mode
        changed = {name for name in names if torch._C._dispatch_dump_table(name) != before[name]}
    assert changed == set(rng_kernels.random_operations())
    assert {"aten::uniform_", "aten::bernoulli_.float", "aten::randperm.generator_out"} < changed


def choose_a_backend() -> list[Tensor]:
    """Operations that take their backend from the arguments."""
    one = torch.tensor(1.0)
    i = torch.tensor([[0, 1], [1, 0]])
    quantized = torch.quantize_per_channel(ramp(2, 3), torch.ones(2), torch.zeros(2), 0, torch.qint8)
    affine = torch._empty_per_channel_affine_quantized(
        [2, 3], scales=torch.ones(2), zero_points=torch.zeros(2, dtype=torch.int64), axis=0, dtype=torch.qint8
    )
    return [
        ramp(4).to(torch.float64), ramp(4) * 2, ramp(4) / 3, torch.linspace(one, 2, 5),
        torch.logspace(one, one * 2, 5), torch.sparse_coo_tensor(i, ramp(2)).to_dense(),
        torch.sparse_csr_tensor(torch.tensor([0, 1, 2]), torch.tensor([0, 1]), ramp(2)).to_dense(),
        (torch.sparse_coo_tensor(i, ramp(2), (2, 2)) @ ramp(2, 2)), quantized.dequantize(),
        torch.tensor(affine.shape), torch.empty_like(ramp(4)).zero_(), ramp(4).new_ones(3), torch.tensor([1, 2]),
        ramp(4).half().float(), ramp(4).to_mkldnn().to_dense(),
    ]  # fmt: skip


def ordinary() -> list[Tensor]:
    """Operations with several kernels of which the CPU's must be the one that runs."""
    image = ramp(2, 4, 6, 6)
    nested = torch.nested.nested_tensor([ramp(2, 3), ramp(4, 3)])
    return [
        F.layer_norm(image, (6, 6)), F.group_norm(image, 2), F.batch_norm(image, None, None, training=True),
        F.conv2d(image, ramp(3, 4, 3, 3)), F.max_pool2d(image, 2), F.embedding(torch.tensor([1, 2]), ramp(4, 3)),
        F.scaled_dot_product_attention(image, image, image), F.interpolate(image, scale_factor=2.0),
        F.cross_entropy(ramp(4, 5), torch.tensor([1, 2, 3, 4])), torch.einsum("abcd,cd->ab", image, ramp(6, 6)),
        torch.fft.rfft(ramp(8)).abs(), nested.to_padded_tensor(0.0),
        F.gelu(ramp(9)), F.silu(ramp(9)), F.softmax(ramp(3, 9), 1), ramp(9).cumsum(0), ramp(9).var(),
    ]  # fmt: skip


@pytest.mark.parametrize("draw", [choose_a_backend, ordinary])
def test_operations_that_draw_nothing_give_the_same_bits(draw: Draw, streams: Streams) -> None:
    with streams.task(SEED, STEP, 0, 0) as stream:
        inside = tensors(draw())
        assert stream._generator is None
    assert same(inside, tensors(draw()))


def test_kernels_leave_alone_what_a_dispatch_mode_would_disturb() -> None:
    """PyTorch refuses higher-order operations under a mode of ours, and computes singular values another way."""

    def draw() -> list[Tensor]:
        x = ramp(1, 2, 4, 8)
        branch = torch.cond(x.sum() > 0, lambda x: x * 2, lambda x: x * 3, (x,))
        return [flex_attention(x, x, x), branch, torch.linalg.svdvals(ramp(4, 4))]

    with Streams() as streams, streams.task(SEED, STEP, 0, 0):
        inside = draw()
    assert same(inside, draw())
    torch._dynamo.reset()


def test_an_operation_with_a_composite_and_a_cpu_kernel_keeps_the_cpu_kernel() -> None:
    x, layer = torch.linspace(-3, 5, 40).reshape(5, 8), nn.LayerNorm(8)
    with torch.library._scoped_library("pipec_test", "FRAGMENT") as library, Streams() as streams:
        library.define("two(Tensor x) -> Tensor")
        library.impl("two", lambda x: x + 1, "CompositeExplicitAutograd")
        library.impl("two", lambda x: x + 2, "CPU")
        outside = [layer(x), torch.ops.pipec_test.two(x)]
        with streams.task(SEED, STEP, 0, 0):
            inside = [layer(x), torch.ops.pipec_test.two(x)]
    assert same(outside, inside)


def test_threads_without_a_task_draw_from_the_process_while_others_run_tasks(streams: Streams) -> None:
    want = [plainly(draw, 5) for draw in DRAWS.values()]
    stop = threading.Event()

    def work(thread: int) -> None:
        if thread:
            while not stop.is_set():
                with streams.task(SEED, STEP, thread, 0):
                    F.dropout(torch.ones(100), 0.5)
                    torch.get_rng_state()
        else:
            try:
                got = [plainly(draw, 5) for draw in DRAWS.values()]
            finally:
                stop.set()
            assert all(same(a, b) for a, b in zip(got, want, strict=True))

    in_threads(3, work)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_functions_draw_from_the_stream(backend: str) -> None:
    def function(x: Tensor) -> Tensor:
        return F.dropout(F.linear(x, ramp(8, 8)), 0.5) + torch.rand_like(x) + torch.randn(8)

    torch._dynamo.reset()
    compiled = torch.compile(function, backend=backend)
    with Streams() as streams:
        for microbatch in range(3):  # compiled in the first, run from the cache in the others
            before = torch.get_rng_state()
            with streams.task(SEED, STEP, 0, microbatch) as stream:
                got = with_gradient(compiled, 4, 8)
            assert torch.equal(torch.get_rng_state(), before)
            assert same(got, plainly(lambda: with_gradient(compiled, 4, 8), stream.seed))
            if backend == "eager":
                assert same(got, plainly(lambda: with_gradient(function, 4, 8), stream.seed))
    torch._dynamo.reset()


def test_a_mode_inside_the_stage_sees_the_calls_and_the_draws_stay_right(streams: Streams) -> None:
    class Listening(TorchDispatchMode):
        heard: list[tuple[str, bool]] = []  # noqa: RUF012

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            self.heard.append((str(func), "generator" in (kwargs or {})))
            return func(*args, **(kwargs or {}))

    draw = DRAWS["transformer_layer"]
    with streams.task(SEED, STEP, 0, 0) as stream, Listening() as mode:
        got = tensors(draw())
    assert ("aten.bernoulli_.float", False) in mode.heard
    assert ("aten.bernoulli_.float", True) not in mode.heard, "the mode should see what the user called"
    assert same(got, plainly(draw, stream.seed))
