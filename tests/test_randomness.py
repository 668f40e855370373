"""Each task draws from a stream of its own, whatever thread runs it and whatever else is being drawn."""

from __future__ import annotations

import copy
import gc
import itertools
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, distributions, nn
from torch.nn.attention.flex_attention import flex_attention
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from pipec.errors import RunError
from pipec.runtime import randomness, rng_kernels
from pipec.runtime.randomness import Position, Purpose, Streams, task_seed

aten = torch.ops.aten
Draw = Callable[[], object]


def ramp(*shape: int) -> Tensor:
    count = torch.Size(shape).numel()
    return torch.linspace(0.1, 0.9, count).reshape(shape)


def leaf(*shape: int) -> Tensor:
    return ramp(*shape).requires_grad_()


def with_gradient(function: Callable[[Tensor], Tensor], *shape: int) -> list[Tensor]:
    """What comes out, and the gradient that shows the mask again."""
    x = leaf(*shape)
    y = function(x)
    (gradient,) = torch.autograd.grad(y.square().sum(), x)
    return [y.detach(), gradient]


def module(make: Callable[[], nn.Module], *shape: int) -> Draw:
    def draw() -> list[Tensor]:
        layer = make()  # its initial parameters are draws too
        out = with_gradient(lambda x: next(iter(y)) if isinstance(y := layer(x), tuple) else y, *shape)
        return [*out, *[each.detach() for each in layer.parameters()]]

    return draw


def attention(**options: object) -> Draw:
    return lambda: with_gradient(
        lambda x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.3, **options),  # type: ignore[arg-type]
        2, 4, 6, 8,
    )  # fmt: skip


def attention_module() -> list[Tensor]:
    layer = nn.MultiheadAttention(8, 2, dropout=0.3, batch_first=True)
    return with_gradient(lambda x: layer(x, x, x)[0], 2, 5, 8)


class NoisyGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient * torch.rand_like(gradient)


def checkpointed(*, reentrant: bool) -> Draw:
    def draw() -> list[Tensor]:
        x = leaf(64)
        torch.rand(3)
        y = checkpoint(lambda x: F.dropout(x, 0.5) * F.dropout(x, 0.5), x, use_reentrant=reentrant)
        z = y + torch.rand(64)
        (gradient,) = torch.autograd.grad(z.sum(), x) if not reentrant else (grad_by_backward(z, x),)
        assert torch.equal(gradient != 0, y != 0), "the mask was not repeated"
        return [z.detach(), gradient, torch.rand(2)]

    return draw


def grad_by_backward(y: Tensor, x: Tensor) -> Tensor:
    y.sum().backward()
    assert x.grad is not None
    return x.grad


def forked() -> list[Tensor]:
    first = torch.rand(2)
    state = torch.get_rng_state()
    with torch.random.fork_rng(devices=[]):
        inside = torch.rand(3)
    again = torch.rand(3)
    torch.set_rng_state(state)
    assert torch.equal(inside, again)
    assert torch.equal(torch.rand(3), again)
    return [first, inside, torch.rand(1)]


def functional_call() -> list[Tensor]:
    layer = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5))
    parameters = dict(layer.named_parameters())

    def loss(parameters: dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(layer, parameters, (ramp(3, 8),)).square().sum()

    return list(torch.func.grad(loss)(parameters).values())


def mapped(randomness: str) -> Draw:
    return lambda: torch.vmap(lambda x: F.dropout(x, 0.5) + torch.rand(6), randomness=randomness)(ramp(4, 6))


def out_variant() -> list[Tensor]:
    a, b, c = torch.empty(5), torch.empty(5, dtype=torch.int64), torch.empty(4, 3)
    torch.rand(5, out=a)
    torch.randperm(5, out=b)
    torch.randn(4, 3, out=c)
    d = torch.bernoulli(ramp(6), out=torch.empty(6))
    e = torch.normal(ramp(6), ramp(6), out=torch.empty(6))
    f = torch.multinomial(ramp(6), 2, out=torch.empty(2, dtype=torch.int64))
    return [a, b, c, d, e, f]


def initialised() -> list[Tensor]:
    w = torch.empty(8, 8)
    fill = (
        nn.init.kaiming_uniform_, nn.init.xavier_normal_, nn.init.trunc_normal_, nn.init.orthogonal_,
        lambda w: nn.init.sparse_(w, 0.5),
    )  # fmt: skip
    return [each(w.clone()) for each in fill]


def defaults_by_name() -> list[Tensor]:
    g = torch.default_generator
    return [torch.rand(3, generator=g), torch.poisson(ramp(4), g), ramp(3).uniform_(generator=g)]


def reseeded() -> list[Tensor]:
    torch.rand(5)
    torch.manual_seed(7)
    assert torch.initial_seed() == 7
    return [torch.rand(5)]


SAMPLED = {
    "normal": lambda: distributions.Normal(ramp(5), ramp(5)).rsample(),
    "gamma": lambda: with_gradient(lambda x: distributions.Gamma(x, x).rsample(), 9),
    "beta": lambda: with_gradient(lambda x: distributions.Beta(x, x).rsample(), 9),
    "dirichlet": lambda: with_gradient(lambda x: distributions.Dirichlet(x).rsample(), 3, 4),
    "categorical": lambda: distributions.Categorical(ramp(3, 4)).sample((5,)),
    "binomial": lambda: distributions.Binomial(9, ramp(5)).sample(),
    "poisson": lambda: distributions.Poisson(ramp(5) * 9).sample(),
    "geometric": lambda: distributions.Geometric(ramp(5)).sample(),
    "student": lambda: distributions.StudentT(ramp(5) * 9).rsample(),
    "von_mises": lambda: distributions.VonMises(ramp(5), ramp(5)).sample(),
    "cauchy": lambda: distributions.Cauchy(ramp(5), ramp(5)).rsample(),
    "relaxed": lambda: distributions.RelaxedBernoulli(torch.tensor(0.5), ramp(5)).rsample(),
    "multivariate": lambda: distributions.MultivariateNormal(ramp(3), torch.eye(3)).rsample(),
}

DRAWS: dict[str, Draw] = {
    "rand": lambda: torch.rand(3, 4),
    "rand_double": lambda: torch.rand(9, dtype=torch.float64),
    "randn": lambda: torch.randn(33),
    "randn_odd": lambda: [torch.randn(3), torch.randn(1), torch.randn(17)],  # keeps the spare normal number
    "randn_complex": lambda: torch.randn(5, dtype=torch.complex64),
    "randn_bfloat16": lambda: torch.randn(20, dtype=torch.bfloat16),
    "randint": lambda: [torch.randint(99, (5,)), torch.randint(-5, 99, (5,))],
    "rand_like": lambda: [torch.rand_like(ramp(4)), torch.randn_like(ramp(4))],
    "randint_like": lambda: [torch.randint_like(ramp(4), 9), torch.randint_like(ramp(4), 3, 9)],
    "randperm": lambda: [torch.randperm(11), torch.randperm(50000)],
    "normal": lambda: [
        torch.normal(ramp(5), ramp(5)), torch.normal(ramp(5), 2.0), torch.normal(1.0, ramp(5)),
        torch.normal(0.0, 1.0, (5,)),
    ],
    "bernoulli": lambda: [torch.bernoulli(ramp(9)), torch.bernoulli(ramp(9), 0.3)],
    "bernoulli_": lambda: [ramp(9).bernoulli_(0.3), ramp(9).bernoulli_(ramp(9))],
    "multinomial": lambda: [torch.multinomial(ramp(5), 3), torch.multinomial(ramp(5), 9, replacement=True)],
    "poisson": lambda: torch.poisson(ramp(9) * 5),
    "binomial": lambda: torch.binomial(ramp(9).mul(10).round(), ramp(9)),
    "gamma_": lambda: torch._standard_gamma(ramp(9)),
    "dirichlet_": lambda: torch._sample_dirichlet(ramp(3, 3)),
    "in_place": lambda: [
        ramp(9).uniform_(-1, 1), ramp(9).normal_(1, 2), ramp(9).exponential_(2), ramp(9).cauchy_(),
        ramp(9).log_normal_(), ramp(9).geometric_(0.3), ramp(9).random_(), ramp(9).random_(5),
        ramp(9).random_(2, 9),
    ],
    "functional_forms": lambda: [
        aten.uniform(ramp(9)), aten.exponential(ramp(9)), aten.normal_functional(ramp(9)),
        aten.cauchy(ramp(9)), aten.log_normal(ramp(9)), aten.geometric(ramp(9), 0.3), aten.random(ramp(9)),
        aten.bernoulli.Tensor(ramp(9), ramp(9)), aten.native_dropout(ramp(9), 0.5, True)[0],
    ],
    "out_variants": out_variant,
    "dropout": lambda: with_gradient(lambda x: F.dropout(x, 0.3), 33),
    "dropout_in_place": lambda: with_gradient(lambda x: F.dropout(x * 2, 0.3, inplace=True), 33),
    "dropout_no_gradient": lambda: F.dropout(ramp(33), 0.3),
    "dropout_inference": lambda: torch.inference_mode()(lambda: F.dropout(ramp(33), 0.3).clone())(),
    "dropout_limits": lambda: [F.dropout(ramp(9), 0.0), F.dropout(ramp(9), 1.0), F.dropout(ramp(0), 0.5)],
    "dropout_bfloat16": lambda: with_gradient(lambda x: F.dropout(x.bfloat16(), 0.3).float(), 33),
    "feature_dropout": lambda: [
        *with_gradient(lambda x: F.dropout1d(x, 0.5), 2, 3, 4),
        *with_gradient(lambda x: F.dropout2d(x, 0.5), 2, 3, 4, 4),
        *with_gradient(lambda x: F.dropout3d(x, 0.5), 2, 3, 2, 2, 2),
    ],
    "alpha_dropout": lambda: with_gradient(lambda x: F.alpha_dropout(x, 0.3, training=True), 33),
    "feature_alpha": lambda: with_gradient(lambda x: F.feature_alpha_dropout(x, 0.5, True), 3, 4, 5),
    "rrelu": lambda: with_gradient(lambda x: F.rrelu(x - 0.5, training=True), 33),
    "rrelu_in_place": lambda: with_gradient(lambda x: F.rrelu_(x - 0.5, training=True), 33),
    "gumbel_softmax": lambda: with_gradient(lambda x: F.gumbel_softmax(x, hard=True), 4, 5),
    "fractional_pool": lambda: [
        *with_gradient(lambda x: F.fractional_max_pool2d(x, 2, output_size=3), 1, 2, 7, 7),
        *with_gradient(lambda x: F.fractional_max_pool3d(x, 2, output_size=3), 1, 2, 7, 7, 7),
    ],
    "attention": attention(),
    "attention_causal": attention(is_causal=True),
    "attention_masked": attention(attn_mask=torch.ones(6, 6, dtype=torch.bool).tril()),
    "attention_grouped": lambda: F.scaled_dot_product_attention(
        ramp(1, 4, 5, 8), ramp(1, 2, 5, 8), ramp(1, 2, 5, 8), dropout_p=0.3, enable_gqa=True
    ),
    "multihead_attention": attention_module,
    "transformer_layer": module(lambda: nn.TransformerEncoderLayer(8, 2, 16, 0.3, batch_first=True), 2, 5, 8),
    "transformer_decoder": lambda: with_gradient(
        lambda x: nn.TransformerDecoderLayer(8, 2, 16, 0.3, batch_first=True)(x, x), 2, 5, 8
    ),
    "lstm": module(lambda: nn.LSTM(4, 5, 3, dropout=0.4), 6, 2, 4),
    "gru": module(lambda: nn.GRU(4, 5, 2, dropout=0.4, bidirectional=True), 6, 2, 4),
    "rnn": module(lambda: nn.RNN(4, 5, 2, dropout=0.4), 6, 2, 4),
    "spectral_norm": module(lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4)), 2, 4),
    "low_rank": lambda: torch.svd_lowrank(ramp(9, 5), 2)[1],
    "initialised": initialised,
    "noise_in_backward": lambda: with_gradient(NoisyGradient.apply, 9),
    "checkpoint": checkpointed(reentrant=False),
    "checkpoint_reentrant": checkpointed(reentrant=True),
    "forked": forked,
    "reseeded": reseeded,
    "default_generator_by_name": defaults_by_name,
    "functional_call": functional_call,
    "vmap_different": mapped("different"),
    "vmap_same": mapped("same"),
    "double_backward": lambda: torch.autograd.functional.hessian(lambda x: F.dropout(x**3).sum(), ramp(24)),
    "scripted": lambda: SCRIPTED(ramp(33)),
    "sampler": lambda: torch.tensor(list(torch.utils.data.RandomSampler(range(9)))),
    "random_split": lambda: torch.tensor(torch.utils.data.random_split(range(9), [4, 5])[0].indices),
} | {f"sample_{name}": draw for name, draw in SAMPLED.items()}  # fmt: skip


def _dropped(x: Tensor) -> Tensor:
    return F.dropout(x, 0.4, True, False) + torch.rand_like(x)


SCRIPTED = torch.jit.trace(_dropped, (torch.ones(33),), check_trace=False)

SEED, STEP = 1234, 7


def tensors(value: object) -> list[Tensor]:
    return [value] if isinstance(value, Tensor) else list(value)  # type: ignore[call-overload]


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def plainly(draw: Draw, seed: int) -> list[Tensor]:
    """What plain PyTorch draws, in one thread, from its own generator with this seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return tensors(draw())


@pytest.fixture(autouse=True)
def _nothing_left() -> Iterator[None]:
    """Every test leaves the process's generator, the threads and the installation as they were."""
    assert rng_kernels.THREAD.stream is None
    yield
    assert randomness._INSTALLED.users == 0
    assert torch.random.default_generator is torch.default_generator
    assert rng_kernels.THREAD.stream is None
    assert "library.py" not in torch._C._dispatch_dump("aten::uniform_"), "a kernel of ours is left"


@pytest.fixture(params=["kernels", "mode"])
def streams(request: pytest.FixtureRequest) -> Iterator[Streams]:
    with Streams(with_mode=request.param == "mode") as streams:
        assert streams.with_mode == (request.param == "mode"), "the kernels do not work with this torch"
        yield streams


def in_threads(count: int, work: Callable[[int], None]) -> None:
    """Run ``work(thread)`` at once on ``count`` threads; the first failure is raised here."""
    barrier, failures = threading.Barrier(count), []

    def body(thread: int) -> None:
        try:
            barrier.wait()
            work(thread)
        except BaseException as error:
            failures.append(error)

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)  # many more ways to interleave
    try:
        threads = [threading.Thread(target=body, args=(each,)) for each in range(count)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
    finally:
        sys.setswitchinterval(before)
    if failures:
        raise failures[0]


# --- seeds ------------------------------------------------------------------------------------------------


def test_task_seeds_are_what_they_have_always_been() -> None:
    assert [
        task_seed(0, 0, 0, 0),
        task_seed(1, 2, 3, 4),
        task_seed(1, 2, 3, 4, Purpose.BACKWARD),
        task_seed(2**64 - 1, 10**9, 70000, 5),
        task_seed(-1, 10**9, 70000, 5),
    ] == GOLDEN


GOLDEN = [
    15015783522758916010,
    13676479252090880729,
    10316060738070974283,
    8974109276604957016,
    8974109276604957016,
]


def test_no_two_tasks_of_a_step_share_the_bits_that_the_generator_uses() -> None:
    grid = list(itertools.product(range(64), range(512)))
    for step in (0, 1, 2**40):
        assert len({task_seed(SEED, step, s, m) & 0xFFFFFFFF for s, m in grid}) == len(grid)


def test_every_part_of_the_key_matters() -> None:
    seeds = {
        task_seed(*key, purpose)
        for key in itertools.product((0, 1, 2**32, 2**63), (0, 1, 2**32), (0, 1, 2**16), (0, 1, 2**16))
        for purpose in Purpose
    }
    assert len(seeds) == 4 * 3 * 3 * 3 * len(Purpose)


def test_neighbouring_tasks_draw_unrelated_numbers() -> None:
    """Correlations of 20,000 uniform numbers each are within five standard errors of nothing."""
    with Streams() as streams:
        rows = []
        for step, stage, microbatch in itertools.product(range(3), range(3), range(3)):
            with streams.task(SEED, step, stage, microbatch):
                rows.append(torch.rand(20000, dtype=torch.float64))
    correlations = torch.corrcoef(torch.stack(rows)) - torch.eye(len(rows), dtype=torch.float64)
    assert correlations.abs().max() < 5 / 20000**0.5


# --- every random operation -------------------------------------------------------------------------------


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


# --- what must stay as it is ------------------------------------------------------------------------------


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


def test_a_generator_of_the_users_own_is_left_alone(streams: Streams) -> None:
    def draw(own: torch.Generator) -> list[Tensor]:
        return [torch.rand(4, generator=own), torch.poisson(ramp(4) * 9, own), ramp(4).normal_(generator=own)]

    with streams.task(SEED, STEP, 0, 0) as stream:
        got = draw(torch.Generator().manual_seed(3))
        assert stream._generator is None, "the stream was used"
    assert same(got, draw(torch.Generator().manual_seed(3)))


def test_nothing_is_left_when_the_last_run_closes() -> None:
    names = torch._C._dispatch_get_all_op_names()
    tables = {name: torch._C._dispatch_dump_table(name) for name in names if name.startswith("aten::")}
    first = Streams()
    second = Streams()
    first.close()
    first.close()
    assert torch.random.default_generator is not torch.default_generator, "the second run still needs it"
    with second.task(SEED, STEP, 0, 0) as stream:
        assert torch.equal(torch.rand(3), plainly(lambda: torch.rand(3), stream.seed)[0])
    del second, stream
    gc.collect()  # a run that was dropped, not closed
    assert torch.random.default_generator is torch.default_generator
    assert {name: torch._C._dispatch_dump_table(name) for name in tables} == tables
    with pytest.raises(RunError, match="closed"):
        first.task(SEED, STEP, 0, 0)


def test_meta_tensors_draw_nothing(streams: Streams) -> None:
    with streams.task(SEED, STEP, 0, 0):
        assert torch.rand(3, device="meta").is_meta
        assert F.dropout(torch.ones(3, device="meta"), 0.5).is_meta


# --- nesting and failures ---------------------------------------------------------------------------------


@pytest.mark.parametrize("outer_mode", [False, True])
@pytest.mark.parametrize("inner_mode", [False, True])
def test_a_pipeline_inside_a_stage_leaves_the_stages_stream_where_it_was(
    outer_mode: bool, inner_mode: bool
) -> None:
    with Streams(with_mode=outer_mode) as outer, Streams(with_mode=inner_mode) as inner:
        with outer.task(SEED, STEP, 0, 0):
            first = torch.rand(3)
            seed = torch.initial_seed()
            with inner.task(seed, 0, 0, 0) as stream:
                inside = [torch.rand(3), F.dropout(torch.ones(30))]
            rest = torch.rand(3)
            want = plainly(lambda: [torch.rand(3), F.dropout(torch.ones(30))], stream.seed)
        assert same(inside, want)
        with outer.task(SEED, STEP, 0, 0):
            assert same([first, rest], [torch.rand(3), torch.rand(3)])


def test_an_exception_ends_the_stream_and_keeps_its_type(streams: Streams) -> None:
    class MineError(Exception):
        pass

    def outside() -> str:
        with pytest.raises(RuntimeError) as caught:
            ramp(3).bernoulli_(2.0)
        return str(caught.value)

    def failing() -> None:
        with streams.task(SEED, STEP, 0, 0):
            torch.rand(3)
            raise MineError

    with pytest.raises(MineError):
        failing()
    assert rng_kernels.THREAD.stream is None
    torch.manual_seed(4)
    got = torch.rand(3)
    torch.manual_seed(4)
    assert torch.equal(got, torch.rand(3))
    message = outside()
    with streams.task(SEED, STEP, 0, 0):
        assert outside() == message


def test_a_task_that_draws_nothing_makes_no_generator(streams: Streams) -> None:
    with streams.task(SEED, STEP, 0, 0) as stream:
        nn.Linear(4, 4, device="meta")
        ramp(3, 4) @ ramp(4, 3)
        assert stream._generator is None


def test_two_runs_in_two_threads_open_and_close_at_will() -> None:
    def work(thread: int) -> None:
        for item in range(8):
            with Streams() as streams, streams.task(SEED, item, thread, 0) as stream:
                got = F.dropout(torch.ones(50), 0.5)
                plain = torch.Generator().manual_seed(stream.seed)
                assert torch.equal(got, 2 * torch.empty(50).bernoulli_(0.5, generator=plain))

    in_threads(3, work)


def test_kernels_come_and_go_under_threads_that_draw() -> None:
    """Draws that are under way while the kernels are put in or taken out end right."""
    stop = threading.Event()
    want = plainly(lambda: torch.randn(20000), 3)[0]

    def work(thread: int) -> None:
        if thread == 0:
            for _ in range(40):
                Streams().close()
            stop.set()
        while not stop.is_set():
            assert torch.equal(torch.randn(20000, generator=torch.Generator().manual_seed(3)), want)

    in_threads(4, work)


def test_the_mode_serves_where_kernels_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(op: object, key: str) -> None:
        raise RuntimeError("no kernel")

    monkeypatch.setattr(rng_kernels, "get_kernel", refuse)
    with Streams() as streams:
        assert streams.with_mode
        with streams.task(SEED, STEP, 0, 0) as stream:
            got = torch.rand(3)
        assert same([got], plainly(lambda: torch.rand(3), stream.seed))


def test_the_mode_serves_where_kernels_are_installed_and_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def idle(op: object, own: Any) -> Callable[..., object]:
        return lambda keyset, *args, **kwargs: own.call_boxed(keyset, *args, **kwargs)

    monkeypatch.setattr(rng_kernels, "_kernel", idle)
    with Streams() as streams:
        assert streams.with_mode
        assert "library.py" not in torch._C._dispatch_dump("aten::uniform_"), "useless kernels are taken out again"


def test_the_mode_names_an_operation_that_it_cannot_serve() -> None:
    with torch.library._scoped_library("pipec_test", "FRAGMENT") as library, Streams(with_mode=True) as mode:
        library.define("noise(Tensor x) -> Tensor", tags=(torch.Tag.nondeterministic_seeded,))
        library.impl("noise", torch.rand_like, "CPU")
        with mode.task(SEED, STEP, 0, 0), pytest.raises(RunError, match=r"pipec_test\.noise.*no generator"):
            torch.ops.pipec_test.noise(ramp(3))


def test_no_way_that_works_is_an_error_that_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(randomness, "streams_work", lambda *, with_mode: False)
    with pytest.raises(RunError, match="apart"):
        Streams()


# --- compiled stages and the user's own modes -------------------------------------------------------------


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


# --- the position of a run --------------------------------------------------------------------------------


def test_the_position_follows_manual_seed_and_counts_steps() -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        before = torch.get_rng_state()
        position = Position().pinned()
        assert (position.seed, position.step) == (3, 0)
        assert torch.equal(torch.get_rng_state(), before)
        torch.rand(4)
        assert Position().pinned() == position, "draws do not change the seed"
        torch.manual_seed(4)
        assert Position(step=2).pinned() == Position(4, 2)
        assert position.pinned() is position
        assert Position().advanced().advanced() == Position(None, 2)
        assert copy.deepcopy(position) == position
