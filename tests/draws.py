"""Everything that draws random numbers on the CPU, and what plain PyTorch draws for it."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, distributions, nn
from torch.utils.checkpoint import checkpoint

from pipec.runtime import randomness, rng_kernels
from pipec.runtime.randomness import Streams

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
