"""Deferred batch norm: running statistics of the whole minibatch, whatever the plan does with its microbatches."""

from __future__ import annotations

import copy
from typing import Any

import models
import pytest
import torch
from models import WIDTH, buffers, data, kept_streams, of_modules, runner, same  # noqa: F401
from torch import nn

import pipec

LAYERS: dict[str, tuple[Any, tuple[int, ...]]] = {
    "1d": (nn.BatchNorm1d, ()), "1d long": (nn.BatchNorm1d, (5,)), "2d": (nn.BatchNorm2d, (3, 2)),
    "3d": (nn.BatchNorm3d, (2, 1, 3)),
}


def first(layer: nn.Module) -> pipec.Pipeline:
    """The layer in the first stage, so that it sees the minibatch's own rows."""
    net = pipec.Pipeline("net")
    x = net.input("x")
    a = net.stage("a", layer, x)
    gain = {"gain": torch.ones(1, dtype=torch.float64, requires_grad=True)}
    b = net.stage("b", lambda params, h: torch.tanh(h) * params["gain"], a, params=gain)
    net.loss("loss", lambda h: (h**2).sum() / 50, b, reduction="sum")
    return net


def rows(count: int, shape: tuple[int, ...] = (), seed: int = 0, channels: int = 4) -> torch.Tensor:
    make = torch.Generator().manual_seed(seed)
    return torch.randn(count, channels, *shape, generator=make, dtype=torch.float64) * 3 + 5


def statistics(module: nn.Module) -> list[torch.Tensor]:
    return [value.clone() for key, value in module.state_dict().items() if "running" in key or "tracked" in key]


@pytest.mark.parametrize("count", [8, 10, 13])
@pytest.mark.parametrize("microbatches", [1, 2, 3, 4])
@pytest.mark.parametrize("kind", LAYERS)
def test_statistics_are_those_of_one_layer_over_all_rows(kind: str, microbatches: int, count: int) -> None:
    make, shape = LAYERS[kind]
    plain = make(4, momentum=0.3, dtype=torch.float64)
    layer = pipec.deferred_batch_norm(copy.deepcopy(plain))
    net = first(layer)
    with runner(net, 2, microbatches) as run:
        for step in range(3):
            run.step(x=rows(count, shape, step))
            plain(rows(count, shape, step))
    for mine, theirs in zip(statistics(layer), statistics(plain), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)
    assert int(layer.num_batches_tracked) == 3


@pytest.mark.parametrize("options", [
    {"momentum": None}, {"momentum": 0.0}, {"momentum": 1.0}, {"affine": False}, {"bias": False}, {"eps": 0.1},
], ids=str)
def test_every_option_of_the_layer_means_what_it_means_there(options: dict[str, Any]) -> None:
    plain = nn.BatchNorm1d(4, dtype=torch.float64, **options)
    layer = pipec.deferred_batch_norm(copy.deepcopy(plain))
    with runner(first(layer), 2, 3) as run:
        for step in range(4):
            run.step(x=rows(7 + step, seed=step))
            plain(rows(7 + step, seed=step))
    for mine, theirs in zip(statistics(layer), statistics(plain), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)


def test_without_running_statistics_a_layer_stays_what_it_is() -> None:
    layer = nn.BatchNorm1d(4, track_running_stats=False)
    assert type(pipec.deferred_batch_norm(layer)) is nn.BatchNorm1d
    assert layer.state_dict().keys() == {"weight", "bias"}


def test_normalisation_and_gradients_are_per_microbatch_as_without_deferring() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(WIDTH, 4), nn.BatchNorm1d(4), nn.Linear(4, WIDTH))
    mine, theirs = of_modules(pipec.deferred_batch_norm(copy.deepcopy(plain)), nn.Tanh()), of_modules(plain, nn.Tanh())
    with runner(mine) as one, runner(theirs) as two:
        for step in range(2):
            got, expected = one.step(**data(10, step)), two.step(**data(10, step))
            assert same([got.losses, got.outputs], [expected.losses, expected.outputs])
    assert same(models.gradients(mine), models.gradients(theirs))
    assert not same(statistics(mine.spec.stages[0].fn), statistics(plain))


def build() -> pipec.Pipeline:
    torch.manual_seed(4)
    stages = [
        nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU(inplace=True)),
        nn.Sequential(nn.BatchNorm1d(WIDTH, momentum=None), nn.Linear(WIDTH, WIDTH)),
        nn.Sequential(nn.Unflatten(1, (2, 4)), nn.BatchNorm1d(2), nn.Flatten(), nn.Tanh()),
    ]
    return of_modules(*(pipec.deferred_batch_norm(stage) for stage in stages))


@pytest.mark.parametrize(("count", "microbatches"), [(8, 4), (11, 4), (9, 3), (5, 2)])
def test_every_plan_gives_the_same_bits(count: int, microbatches: int) -> None:
    models.equal_everywhere(build, data(count), microbatches)


@pytest.mark.parametrize("recompute", ["always", "except_last", {"a": "always", "c": "except_last"}])
def test_recompute_counts_nothing_twice(recompute: Any) -> None:
    plain, again = build(), build()
    for net, mode in ((plain, "never"), (again, recompute)):
        with runner(net, 2, 4, recompute=mode) as run:
            for step in range(3):
                run.step(**data(10, step))
    assert same(buffers(again), buffers(plain))
    assert int(again.spec.stages[0].fn[1].num_batches_tracked) == 3


def test_fewer_rows_than_microbatches() -> None:
    """Seven rows for eight microbatches: each has one row, but every channel has six values in it."""
    plain = nn.BatchNorm2d(4, dtype=torch.float64)
    layer = pipec.deferred_batch_norm(copy.deepcopy(plain))
    with runner(first(layer), 2, 8) as run:
        assert run.step(x=rows(7, (3, 2))).microbatches == 7
    plain(rows(7, (3, 2)))
    for mine, theirs in zip(statistics(layer), statistics(plain), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)


def test_one_value_per_channel_is_torchs_error_at_its_stage_and_leaves_nothing() -> None:
    net = build()
    before = buffers(net)
    with runner(net, 2, 4) as run:
        with pytest.raises(ValueError, match="more than 1 value per channel") as error:
            run.step(**data(5))  # 2, 1, 1, 1 rows
        assert "stage 'a', microbatch 1, FORWARD" in error.value.__notes__[0]
        assert same(buffers(net), before)
        run.step(**data(8))
    other = build()
    with runner(other, 2, 4) as run:
        run.step(**data(8))
    assert same(buffers(net), buffers(other))


@pytest.mark.parametrize("backend", ["threads", "replay"])
def test_a_failed_step_leaves_no_sums(backend: str) -> None:
    fail = [False]

    def loss(h: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        if fail[0]:
            raise OSError("full")
        return nn.functional.mse_loss(h, y)

    def make() -> pipec.Pipeline:
        torch.manual_seed(1)
        layers = nn.Sequential(nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH))
        return of_modules(pipec.deferred_batch_norm(layers), nn.Tanh(), loss=loss)

    net, other = make(), make()
    with runner(net, 2, 4, backend=backend) as run:
        for step in range(3):
            before = buffers(net)
            fail[0] = True
            with pytest.raises(OSError, match="full"):
                run.step(**data(8, step + 50))
            assert same(buffers(net), before)
            fail[0] = False
            run.step(**data(8, step))
    with runner(other, 2, 4, backend=backend) as run:
        for step in range(3):
            run.step(**data(8, step))
    assert same(buffers(net), buffers(other))


def test_a_failed_update_counts_nothing() -> None:
    net = build()

    def broken(_: Any) -> None:
        raise OSError("no norm")

    made = lambda params: torch.optim.SGD(params, lr=0.1)  # noqa: E731
    with runner(net, 2, 4, update="stage", optimizer=made, before_update=broken) as run:
        before = buffers(net)
        with pytest.raises(OSError, match="no norm"):
            run.step(**data(8))
    assert same(buffers(net), before)


def test_evaluation_uses_the_statistics_and_changes_nothing() -> None:
    net = build()
    with runner(net, 2, 4) as run:
        run.step(**data(8))
        before = buffers(net)
        result = run.evaluate(**data(6, 3))
        assert same(buffers(net), before)
        value = data(6, 3)["x"]
        for stage in net.spec.stages:
            value = stage.fn.eval()(value)
            stage.fn.train()
        torch.testing.assert_close(result.output, value)


def test_layers_in_eval_mode_keep_their_statistics_in_training_steps() -> None:
    net = build()
    frozen, living = net.spec.stages[0].fn[1], net.spec.stages[1].fn[0]
    frozen.eval()
    before = statistics(frozen)
    with runner(net, 2, 4, recompute="always") as run:
        run.step(**data(8))
        assert same(statistics(frozen), before)
        assert int(living.num_batches_tracked) == 1
        frozen.train()
        run.step(**data(8))
    assert int(frozen.num_batches_tracked) == 1


@pytest.mark.parametrize("way", ["converted", "exchanged"])
def test_layers_deferred_between_steps_are_followed(way: str) -> None:
    module, plain = nn.Sequential(nn.BatchNorm1d(4, dtype=torch.float64)), nn.BatchNorm1d(4, dtype=torch.float64)
    net, other = first(module), first(copy.deepcopy(module))
    loop = pipec.reference(other, 3)
    with runner(net, 2, 3, recompute="always") as run:
        for step, steps in enumerate((run.step, loop.step)):
            steps(x=rows(8))
            own = (module, other.spec.stages[0].fn)[step]
            if way == "exchanged":
                own[0] = copy.deepcopy(own[0])
            pipec.deferred_batch_norm(own)
            assert int(own[0].num_batches_tracked) == 3
        plain.load_state_dict(module[0].state_dict())
        run.step(x=rows(7, seed=1))
        loop.step(x=rows(7, seed=1))
    plain(rows(7, seed=1))
    for mine, theirs in zip(statistics(module), statistics(plain), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)
    assert same(statistics(module), statistics(other.spec.stages[0].fn))


def test_called_outside_of_a_step_it_is_an_ordinary_layer() -> None:
    plain = nn.BatchNorm1d(4, dtype=torch.float64)
    layer = pipec.deferred_batch_norm(copy.deepcopy(plain))
    for step in range(3):
        assert torch.equal(layer(rows(6, seed=step)), plain(rows(6, seed=step)))
    for mine, theirs in zip(statistics(layer), statistics(plain), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)
    with runner(first(layer), 2, 3) as run:
        run.step(x=rows(6, seed=9))
    layer(rows(6, seed=10))
    plain(rows(6, seed=9))
    plain(rows(6, seed=10))
    for mine, theirs in zip(statistics(layer), statistics(plain), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)


def test_a_failed_step_of_the_reference_leaves_no_sums() -> None:
    net = build()
    loop = pipec.reference(net, 4)
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        loop.step(**data(7))  # 2, 2, 2, 1 rows: three microbatches were counted
    sums = [value for name, value in net.spec.stages[0].fn.named_buffers() if "deferred" in name]
    assert len(sums) == 3
    assert not any(bool(value.any()) for value in sums)


def test_layers_stay_themselves_and_state_dicts_keep_their_keys() -> None:
    module = nn.Sequential(nn.Conv2d(1, 2, 1), nn.BatchNorm2d(2), nn.Sequential(nn.BatchNorm1d(3)))
    calls = []
    module[1].register_forward_hook(lambda *_: calls.append(1))
    layers, held, keys = list(module.modules()), list(module.parameters()), list(module.state_dict())
    assert pipec.deferred_batch_norm(pipec.deferred_batch_norm(module)) is module
    assert all(a is b for a, b in zip(module.modules(), layers, strict=True))
    assert all(a is b for a, b in zip(module.parameters(), held, strict=True))
    assert list(module.state_dict()) == keys
    assert isinstance(module[1], nn.BatchNorm2d)
    assert isinstance(module[2][0], nn.BatchNorm1d)
    module[:2](torch.randn(3, 1, 2, 2))
    assert calls == [1]
    plain = nn.Sequential(nn.Conv2d(1, 2, 1), nn.BatchNorm2d(2), nn.Sequential(nn.BatchNorm1d(3)))
    plain.load_state_dict(module.state_dict())
    module.load_state_dict(plain.state_dict())


def test_half_precision_statistics_count_every_row() -> None:
    """256 + 1 is 256 in bfloat16: a count in the statistics' own type would stand still."""
    layer = pipec.deferred_batch_norm(nn.BatchNorm1d(2, momentum=1.0)).bfloat16()
    plain = nn.BatchNorm1d(2, momentum=1.0)
    x = rows(1024, channels=2).bfloat16()
    with runner(first(layer), 1, 128) as run:
        run.step(x=x)
    plain(x.float())
    for mine, theirs in zip(statistics(layer), statistics(plain), strict=True):
        torch.testing.assert_close(mine.float(), theirs.float(), rtol=0.03, atol=0)


def test_layers_that_cannot_be_deferred_are_all_named() -> None:
    class Own(nn.BatchNorm1d):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * 2

    module = nn.ModuleDict({"a": Own(3), "b": nn.BatchNorm1d(3), "c": nn.LazyBatchNorm2d(), "d": nn.SyncBatchNorm(2)})
    with pytest.raises(pipec.SpecError) as error:
        pipec.deferred_batch_norm(module)
    assert "deferred_batch_norm(ModuleDict): 3 problems" in str(error.value)
    assert "layer a is a Own, not a plain nn.BatchNorm1d, 2d or 3d" in str(error.value)
    assert "layer c is a LazyBatchNorm2d" in str(error.value)
    assert "call it once with a batch first" in str(error.value)
    assert "layer d is a SyncBatchNorm" in str(error.value)
    assert type(module["b"]) is nn.BatchNorm1d  # nothing was changed


def test_compiled_stages_and_autocast() -> None:
    """Sizes change between the steps, so code is traced again."""
    plain, compiled = build(), build()
    stages = [torch.compile(stage.fn, backend="eager") for stage in compiled.spec.stages]
    net = of_modules(*stages)
    with runner(plain, 2, 3, recompute="always") as one, runner(net, 2, 3, recompute="always") as two:
        for step, count in enumerate((12, 10, 7)):
            with torch.autocast("cpu", torch.bfloat16):
                got, expected = two.step(**data(count, step)), one.step(**data(count, step))
            assert same([got.losses, got.output], [expected.losses, expected.output])
    assert same(buffers(compiled), buffers(plain))
    assert int(plain.spec.stages[0].fn[1].num_batches_tracked) == 3


@pytest.mark.parametrize("recompute", ["never", "always"])
def test_a_layer_called_twice_by_its_stage_counts_all_its_values(recompute: str) -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = pipec.deferred_batch_norm(nn.BatchNorm1d(4, dtype=torch.float64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.norm(x) + self.norm(x * 2)

    module, plain = Twice(), nn.BatchNorm1d(4, dtype=torch.float64)
    with runner(first(module), 2, 3, recompute=recompute) as run:
        run.step(x=rows(8))
    plain(torch.cat([rows(8), rows(8) * 2]))
    for mine, theirs in zip(statistics(module.norm), statistics(plain), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)


def test_check_and_profile_leave_the_layers_alone() -> None:
    net = build()
    before = buffers(net)
    report = pipec.check(net, data(10), devices=2, microbatches=4, recompute="always")
    assert report, str(report)
    pipec.profile(net, **data(4))
    assert same(buffers(net), before)
