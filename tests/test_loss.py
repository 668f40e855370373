"""The loss of a minibatch is the one of the whole minibatch, however it is cut."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import models
import pytest
import torch
from models import WIDTH, data, gradients, kept_streams, parameters, same
from torch import Tensor, nn
from torch.nn import functional as F

import pipec

__all__ = ["kept_streams"]


class Weight(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(1, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.w


def weighted(loss: Any, **how: Any) -> pipec.Pipeline:
    """y = w x in two stages, in float64."""
    net = pipec.Pipeline("weighted")
    x, y = net.input("x"), net.input("y")
    h = net.stage("b", Weight(), net.stage("a", Weight(), x))
    net.output(h)
    net.loss("loss", loss, h, y, **how)
    return net


def test_a_mean_over_ten_rows_in_four_microbatches() -> None:
    """Losses 0..9: 4.5, where a mean of the microbatches' means would be 5."""
    losses = torch.arange(10.0, dtype=torch.float64)[:, None]
    with models.runner(weighted(lambda h, y: h.mean()), 2, 4) as run:
        result = run.step(x=losses, y=losses)
    assert result.microbatches == 4
    torch.testing.assert_close(result.loss, torch.tensor(4.5, dtype=torch.float64))


def test_a_mean_over_valid_tokens_by_count() -> None:
    """Losses 4 | 1, 1, 1: 1.75, where a mean of means would be 2.5."""
    losses = torch.tensor([[4.0, 0, 0], [1, 1, 1]], dtype=torch.float64)
    valid = torch.tensor([[1.0, 0, 0], [1, 1, 1]], dtype=torch.float64)
    net = weighted(lambda h, y: (h * y).sum(), count=lambda y: y.sum())
    with models.runner(net, 2, 2) as run:
        result = run.step(x=losses, y=valid)
        assert run.evaluate(x=losses, y=valid).loss == result.loss
    assert result.loss == 1.75
    assert [g.item() for g in gradients(net)] == [1.75, 1.75]


@pytest.mark.parametrize("reduction", ["mean", "sum", "count"])
@pytest.mark.parametrize("rows", [8, 7])
def test_loss_and_gradients_do_not_depend_on_the_number_of_microbatches(reduction: str, rows: int) -> None:
    make = torch.Generator().manual_seed(0)
    x, y = (torch.randn(rows, 5, dtype=torch.float64, generator=make) for _ in range(2))
    how: dict[str, Any] = {"count": lambda y: y.numel()} if reduction == "count" else {"reduction": reduction}

    def loss(h: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(h, y, reduction="mean" if reduction == "mean" else "sum")

    plain = weighted(loss)
    value = x
    for stage in plain.spec.stages:
        value = stage.fn(value)
    expected = loss(value, y) / (y.numel() if reduction == "count" else 1)
    expected.backward()
    for count in (1, 2, 3, 4, 8):
        net = weighted(loss, **how)
        with models.runner(net, 2, count) as run:
            result = run.step(x=x, y=y)
        torch.testing.assert_close(result.loss, expected.detach(), rtol=1e-10, atol=0)
        for mine, theirs in zip(gradients(net), gradients(plain), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=0)


def classifier(loss: Any, **how: Any) -> pipec.Pipeline:
    return models.of_modules(nn.Linear(WIDTH, 6), nn.Linear(6, 4), loss=loss, **how)


def targets() -> dict[str, Tensor]:
    """The third of four microbatches is ignored as a whole, the first in part."""
    return {"x": data()["x"], "y": torch.tensor([0, -100, 1, 2, -100, -100, 3, 1])}


@pytest.mark.parametrize("loss", [
    F.cross_entropy, nn.CrossEntropyLoss(), F.nll_loss, nn.NLLLoss(),
    nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2, 3, 4])),
    lambda h, y: F.cross_entropy(h, y), lambda h, y: nn.CrossEntropyLoss(ignore_index=-100)(h, y) * 1.0,
    lambda h, y: F.nll_loss(F.log_softmax(h, 1), y), lambda h, y: F.cross_entropy(h, y.clamp(min=1), ignore_index=1),
])
@pytest.mark.parametrize("backend", ["threads", "replay"])
def test_ignored_targets_without_a_count_fail_with_the_advice(loss: Any, backend: str) -> None:
    net = classifier(loss)
    with models.runner(net, 2, 4, backend=backend) as run:
        with pytest.raises(pipec.RunError, match=r"loss 'loss' of stage 'b'.*count=") as caught:
            run.step(**targets())
        assert "Traceback" not in str(caught.value)
        assert set(gradients(net)) == {None}
        if getattr(loss, "weight", None) is None:  # nothing is ignored: nothing to complain about
            run.step(x=data()["x"], y=torch.full((8,), 3))


def test_a_loss_that_averages_evenly_by_itself_or_is_declared_a_sum_may_ignore_targets() -> None:
    def even(h: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(h, y, reduction="none").mean()

    def scaled(h: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(h, y) * (y >= 0).sum() / 5

    given = {"x": data()["x"], "y": torch.tensor([0, -100, 1, 2, -100, 0, 3, -100])}
    for loss, how in ((even, {}), (scaled, {"reduction": "sum"})):
        torch.manual_seed(0)
        net = classifier(loss, **how)
        with models.runner(net, 2, 4) as run:
            result = run.step(**given)
        torch.testing.assert_close(result.loss, loss(result.output, given["y"]))


def test_a_compiled_loss_runs_under_the_watch_for_ignored_targets() -> None:
    def loss(h: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(h, y)

    targets = torch.tensor([0, 1, 2, 3, 0, 1, 2, 3])
    torch.manual_seed(0)
    net = classifier(torch.compile(loss, backend="eager", fullgraph=True))
    with models.runner(net, 2, 4) as run:
        result = run.step(x=data()["x"], y=targets)
    torch.testing.assert_close(result.loss, loss(result.output, targets))


def test_the_advice_when_followed_gives_the_loss_of_the_uncut_model() -> None:
    def summed(h: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(h, y, reduction="sum")

    torch.manual_seed(0)
    net = classifier(summed, count=lambda y: (y != -100).sum())
    with models.runner(net, 2, 4) as run:
        result = run.step(**targets())
    mine = [g.clone() for g in gradients(net)]
    for parameter in parameters(net):
        parameter.grad = None
    value = targets()["x"]
    for stage in net.spec.stages:
        value = stage.fn(value)
    plain = F.cross_entropy(value, targets()["y"])
    plain.backward()
    torch.testing.assert_close(result.loss, plain.detach())
    for a, b in zip(mine, gradients(net), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("total", [0.0, -1.0, float("nan")])
def test_a_count_of_nothing_is_refused_before_any_task(total: float) -> None:
    calls: list[int] = []
    net = classifier(lambda h, y: h.sum(), count=lambda y: total)
    net.spec.stages[0].fn.register_forward_hook(lambda *_: calls.append(1))
    with models.runner(net) as run, pytest.raises(pipec.RunError, match="'loss': count gave"):
        run.step(**targets())
    assert not calls


@pytest.mark.parametrize("made", [lambda h, y: (h - y).abs(), lambda h, y: 3.0, lambda h, y: (h.mean(), y)])
def test_a_loss_that_is_no_scalar_tensor_says_what_it_got(made: Any) -> None:
    with models.runner(models.chain(2, loss=made)) as run, \
            pytest.raises(pipec.RunError, match=r"loss 'loss' of stage 's1' must return a scalar tensor, got"):
        run.step(**data())


def test_several_losses_are_added_and_reported_by_name() -> None:
    def build() -> pipec.Pipeline:
        torch.manual_seed(0)
        net = pipec.Pipeline("several")
        x, y = net.input("x"), net.input("y")
        a = net.stage("a", nn.Linear(WIDTH, WIDTH), x)
        b = net.stage("b", nn.Linear(WIDTH, WIDTH), a)
        net.loss("early", F.mse_loss, a, y)
        net.loss("late", lambda b, a: (a * b).sum(), b, a, reduction="sum")
        return net

    result = models.equal_everywhere(build, data(7))
    assert set(result.losses) == {"early", "late"}
    assert result.loss == result.losses["early"] + result.losses["late"]


def test_what_is_reported_is_what_was_differentiated() -> None:
    """A numerical derivative of the reported loss is the gradient."""
    net = weighted(lambda h, y: ((h - y) ** 2).mean())
    given = {"x": torch.arange(6.0, dtype=torch.float64)[:, None], "y": torch.ones(6, 1, dtype=torch.float64)}
    with models.runner(net, 2, 4) as run:
        run.step(**given)
        own = parameters(net)[0]
        losses = []
        for nudge in (1e-6, -1e-6):
            with torch.no_grad():
                own += nudge
            losses.append(run.evaluate(**given).loss)
            with torch.no_grad():
                own -= nudge
    torch.testing.assert_close((losses[0] - losses[1]) / 2e-6, own.grad[0], rtol=1e-6, atol=1e-6)


def test_a_loss_of_the_users_own_batch_size() -> None:
    """A loss that divides by the whole batch size itself is a sum."""
    plain = models.chain(2)
    pipec.reference(plain, 1).step(**data())
    net = models.chain(2, loss=lambda h, y: F.mse_loss(h, y, reduction="sum") / (8 * WIDTH), reduction="sum")
    with models.runner(net, 2, 4) as run:
        run.step(**data())
    for mine, theirs in zip(gradients(net), gradients(plain), strict=True):
        torch.testing.assert_close(mine, theirs)


def test_a_loss_with_parameters_of_its_own_is_refused() -> None:
    class Learned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, h: Tensor, y: Tensor) -> Tensor:
            return ((h - y) * self.scale).pow(2).mean()

    net = models.chain(2, loss=Learned())
    with pytest.raises(pipec.RunError, match=r"loss 'loss'.*'scale'.*stage"):
        models.runner(net)
    net.spec.losses[0].fn.requires_grad_(False)
    models.runner(net).close()


@pytest.mark.parametrize("backend", ["threads", "replay"])
def test_a_loss_cut_from_its_graph_names_its_stage(backend: str) -> None:
    class Cut(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).detach()

    for recompute in ("never", "always"):
        net = models.of_modules(nn.Linear(8, 8), Cut(8, 8))
        with models.runner(net, 2, recompute=recompute, backend=backend) as run, \
                pytest.raises(pipec.RunError, match=r"loss 'loss' of stage 'b' does not require a gradient"):
            run.step(**data())
        assert set(gradients(net)) == {None}


def test_a_graph_cut_in_the_middle_trains_what_is_behind_it_as_the_uncut_model_does() -> None:
    class Cut(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).detach()

    def build() -> pipec.Pipeline:
        torch.manual_seed(0)
        return models.of_modules(nn.Linear(8, 8), Cut(8, 8), nn.Linear(8, 8))

    models.equal_everywhere(build, data())
    net = build()
    with models.runner(net) as run:
        run.step(**data())
    assert [g is None for g in gradients(net)] == [True] * 4 + [False] * 2


def test_losses_come_without_a_graph_and_say_so() -> None:
    with models.runner(models.chain(2)) as run:
        x = data()["x"].requires_grad_()
        result = run.step(x=x, y=data()["y"])
        for value in (result.loss, result.output):
            assert not value.requires_grad
            with pytest.raises(RuntimeError, match="does not require grad"):
                value.sum().backward()
        with pytest.raises(RuntimeError, match="does not require grad"):
            torch.autograd.grad(result.output.sum(), x, create_graph=True)


def test_result_of_the_reference_and_of_the_runner_are_alike() -> None:
    mine, theirs = models.chain(2), models.chain(2)
    with models.runner(mine) as run:
        got = run.step(**data())
    expected = pipec.reference(theirs, 4).step(**data())
    assert same([got.losses, got.outputs, got.microbatches, got.skipped],
                [expected.losses, expected.outputs, expected.microbatches, expected.skipped])


@pytest.mark.parametrize(
    ("count", "message"),
    [(lambda y: None, "got None"), (lambda y: "a", "the text 'a'"), (lambda y: y, "a tensor of shape"),
     (lambda y: float("inf"), "positive and finite"), (lambda y: b"3", "the text b'3'"),
     (lambda y: torch.ones((), requires_grad=True), "requires a gradient")],
)
def test_a_count_that_is_no_number_names_its_loss(count: Any, message: str) -> None:
    net = models.of_modules(nn.Linear(models.WIDTH, models.WIDTH), loss=summed, count=count)
    with models.runner(net, 1) as run, pytest.raises(pipec.RunError, match=f"loss 'loss'.*{message}"):
        run.step(**models.data())


def test_a_mean_of_no_rows_is_told_with_the_advice() -> None:
    rows = torch.arange(8.0, dtype=torch.float64)[:, None]
    net = weighted(lambda h, y: h[y > 2].mean())
    for run in (models.runner(net, 2, 4), pipec.reference(net, 4)):
        with pytest.warns(UserWarning, match=r"'loss' is NaN in microbatch 0 and a number .*count=") as told:
            run.step(x=rows, y=rows)
        assert told[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert pipec.reference(net, 4).step(x=rows * float("nan"), y=rows + 3).loss.isnan()  # in all of them


def summed(out: Tensor, y: Tensor) -> Tensor:
    return (out - y).square().sum()


def positional(y: Tensor, /) -> int:
    return len(y)


@pytest.mark.parametrize("count", [
    lambda y: len(y), lambda y, z=3: len(y) + z - 3, lambda y=None, *, factor=1: len(y) * factor,
    lambda **inputs: len(inputs["y"]), positional, lambda y, /, **rest: len(y) + len(rest) - 1,
    functools.partial(lambda y, factor: len(y) * factor, factor=1),
])
def test_a_count_may_have_parameters_of_its_own_with_defaults(count: Any) -> None:
    net = models.of_modules(nn.Linear(models.WIDTH, models.WIDTH), loss=summed, count=count)
    plain = models.of_modules(nn.Linear(models.WIDTH, models.WIDTH), loss=summed, count=lambda y: len(y))
    plain.spec.stages[0].fn.load_state_dict(net.spec.stages[0].fn.state_dict())
    with models.runner(net, 1) as run, models.runner(plain, 1) as other:
        assert torch.equal(run.step(**models.data()).loss, other.step(**models.data()).loss)
        x = models.data()["x"]
        assert run.evaluate(x=x).losses == {}  # the loss and its count lack their input


def test_a_count_that_asks_for_what_is_no_input() -> None:
    with pytest.raises(pipec.SpecError, match="count takes 'z', which is no input; the inputs are x, y"):
        models.of_modules(nn.Linear(8, 8), loss=summed, count=lambda y, z: 1).spec  # noqa: B018 - asking raises


@pytest.mark.parametrize("microbatches", [1, 2, 4])
@pytest.mark.parametrize(
    ("fn", "options"),
    [
        (nn.MSELoss(reduction="sum"), {}),
        (functools.partial(F.mse_loss, reduction="sum"), {}),
        (F.mse_loss, {"reduction": "sum"}),
        (lambda a, b: ((a - b) ** 2).sum(), {"reduction": "sum"}),
    ],
    ids=["module", "partial", "function", "own"],
)
def test_a_sum_is_a_sum_however_it_is_said(fn: Any, options: dict[str, Any], microbatches: int) -> None:
    torch.manual_seed(0)
    line = nn.Linear(4, 4).double()
    net = pipec.Pipeline("net")
    x, y = net.input("x"), net.input("y")
    net.loss("sum", fn, net.stage("line", line, x), y, **options)
    data = {name: torch.randn(8, 4, dtype=torch.float64) for name in ("x", "y")}
    with pipec.Runner(net, pipec.compile(net, 1, microbatches)) as run:
        got = run.step(**data).loss
    expected = F.mse_loss(line(data["x"]), data["y"], reduction="sum")
    torch.testing.assert_close(got, expected.detach(), rtol=1e-12, atol=0)


def test_torch_s_own_losses_sum_under_a_count() -> None:
    torch.manual_seed(0)
    line = nn.Linear(4, 3).double()
    net = pipec.Pipeline("net")
    x, y = net.input("x"), net.input("y")
    net.loss("ce", F.cross_entropy, net.stage("line", line, x), y, count=lambda y: (y != -100).sum())
    data = {"x": torch.randn(6, 4, dtype=torch.float64), "y": torch.tensor([0, 1, 2, -100, -100, 1])}
    with pipec.Runner(net, pipec.compile(net, 1, 3)) as run:
        got = run.step(**data).loss
    torch.testing.assert_close(got, F.cross_entropy(line(data["x"]), data["y"]).detach(), rtol=1e-12, atol=0)


def test_a_declaration_and_a_loss_that_disagree_are_told() -> None:
    net = pipec.Pipeline("net")
    x, y = net.input("x"), net.input("y")
    value = net.stage("line", nn.Linear(4, 4), x)
    net.loss("a", nn.MSELoss(), value, y, reduction="sum")
    net.loss("b", nn.MSELoss(), value, y, count=lambda y: y.numel())
    net.loss("c", nn.MSELoss(reduction="none"), value, y)
    with pytest.raises(pipec.SpecError) as caught:
        _ = net.spec
    told = str(caught.value)
    assert "loss 'a': the declaration says reduction='sum', but the loss itself has reduction='mean'" in told
    assert "loss 'b': count= divides a sum, but the loss itself has reduction='mean'" in told
    assert "loss 'c': reduction must be 'mean' or 'sum', got 'none'" in told
