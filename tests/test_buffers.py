"""Buffers change once per microbatch, in microbatch order, whatever is recomputed and whichever device runs first."""

from __future__ import annotations

import copy
from typing import Any

import models
import pytest
import torch
from models import WIDTH, buffers, data, gradients, kept_streams, runner, same
from torch import Tensor, nn

import pipec

__all__ = ["kept_streams"]


def norms(**how: Any) -> pipec.Pipeline:
    torch.manual_seed(0)
    return models.of_modules(
        nn.Linear(WIDTH, WIDTH), nn.Sequential(nn.BatchNorm1d(WIDTH, **how), nn.Linear(WIDTH, WIDTH)),
        nn.Sequential(nn.Tanh(), nn.BatchNorm1d(WIDTH, **how)),
    )


@pytest.mark.parametrize("how", [{}, {"momentum": None}, {"track_running_stats": False}])
def test_batch_norm_is_that_of_the_reference_with_and_without_recompute(how: Any) -> None:
    models.equal_everywhere(lambda: norms(**how), data())


@pytest.mark.parametrize("recompute", ["never", "always", "except_last"])
@pytest.mark.parametrize("backend", ["threads", "replay"])
def test_batches_are_counted_once_per_microbatch(recompute: str, backend: str) -> None:
    net = norms()
    with runner(net, 3, 4, recompute=recompute, backend=backend) as run:
        for number in (4, 8):
            run.step(**data())
            assert [int(b) for b in buffers(net) if b.dim() == 0] == [number, number]
        before = buffers(net)
        run.evaluate(**data())
        assert same(buffers(net), before)


def test_the_running_mean_by_hand() -> None:
    """x = 0..7 in 4 microbatches: running mean 1.294, where one batch gives 0.35."""
    for count, mean in ((1, 0.35), (4, 1.294)):
        net = models.of_modules(nn.BatchNorm1d(1), nn.Linear(1, 1))
        with runner(net, 2, count, recompute="always") as run:
            run.step(x=torch.arange(8.0)[:, None], y=torch.zeros(8, 1))
        torch.testing.assert_close(float(net.spec.stages[0].fn.running_mean), mean, rtol=1e-3, atol=0)


def test_a_microbatch_of_one_row_names_the_stage() -> None:
    with runner(norms(), 3, 4) as run, pytest.raises(ValueError, match="more than 1 value per channel") as caught:
        run.step(**data(5))
    assert "stage 'b', microbatch 1, FORWARD" in caught.value.__notes__[0]


def test_a_failed_step_puts_the_buffers_back_in_place() -> None:
    net = norms()
    own = [b for stage in net.spec.stages for b in stage.fn.buffers()]
    with runner(net, 3, 4, recompute="always") as run:
        run.step(**data())
        before = buffers(net)
        with pytest.raises(ValueError, match="more than 1 value"):
            run.step(**data(5))
        assert same(buffers(net), before)
        run.step(**data())
    assert all(a is b for a, b in zip(own, [b for s in net.spec.stages for b in s.fn.buffers()], strict=True))


@pytest.mark.parametrize("wrap", [
    nn.utils.spectral_norm, nn.utils.parametrizations.spectral_norm, nn.utils.parametrizations.weight_norm,
])
def test_spectral_and_weight_norm(wrap: Any) -> None:
    def build() -> pipec.Pipeline:
        torch.manual_seed(0)
        return models.of_modules(wrap(nn.Linear(WIDTH, WIDTH)), nn.Tanh(), wrap(nn.Linear(WIDTH, WIDTH)))

    models.equal_everywhere(build, data())


class Counting(nn.Module):
    """Its result depends on how often it ran before; the buffer is replaced, not written into."""

    def __init__(self, replace: bool) -> None:
        super().__init__()
        self.net, self.replace = nn.Linear(WIDTH, WIDTH), replace
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("fixed", torch.ones(WIDTH))
        self.register_buffer("absent", None)

    def forward(self, x: Tensor) -> Tensor:
        if self.replace:
            self.calls = self.calls + 1
        else:
            self.calls.add_(1)
        return self.net(x) * self.fixed * float(self.calls)


@pytest.mark.parametrize("replace", [False, True])
def test_recompute_starts_from_the_buffers_of_its_forward(replace: bool) -> None:
    def build() -> pipec.Pipeline:
        torch.manual_seed(0)
        return models.of_modules(Counting(replace), nn.Tanh(), Counting(replace))

    models.equal_everywhere(build, data())


@pytest.mark.parametrize("replace", [False, True])
def test_a_failed_step_undoes_replaced_buffers_too(replace: bool) -> None:
    net = models.of_modules(Counting(replace), nn.BatchNorm1d(WIDTH))
    with runner(net, 2, 4) as run:
        run.step(**data())
        with pytest.raises(ValueError, match="more than 1 value"):
            run.step(**data(5))
    assert float(net.spec.stages[0].fn.calls) == 4.0


def test_forwards_of_a_stage_with_buffers_are_ordered_even_where_a_schedule_is_not() -> None:
    def shuffled(problem: Any) -> Any:
        order = (2, 0, 3, 1)
        return [[(0, c, m) for m in order for c in problem.on(d)] +
                [(2, c, m) for m in order for c in reversed(problem.on(d))] for d in range(problem.devices)]

    net = norms()
    with pytest.raises(pipec.PlanError, match=r"stage 'b'.*whose buffers change run their forwards in ascending"):
        runner(net, 3, 4, shuffled)


@pytest.mark.parametrize("devices", [1, 2])
def test_a_changing_buffer_in_two_stages_is_refused_and_a_fixed_one_is_not(devices: int) -> None:
    norm = nn.BatchNorm1d(WIDTH)
    net = models.of_modules(nn.Linear(WIDTH, WIDTH), norm, nn.Linear(WIDTH, WIDTH), norm)
    with runner(net, devices, 2) as run:
        before = buffers(net)
        with pytest.raises(pipec.RunError, match=r"stages 'b' \(as '\w+'\) and 'd'"):
            run.step(**data())
        assert same(buffers(net), before)
        assert set(gradients(net)) == {None}
        norm.eval()
        run.step(**data())


@pytest.mark.parametrize("backend", ["threads", "replay"])
def test_fixed_buffers_are_never_exchanged(backend: str) -> None:
    """Recompute leaves a buffer that no forward changes where it is: another stage may be reading it."""
    seen: set[int] = set()

    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(WIDTH, WIDTH)
            self.register_buffer("table", torch.arange(float(WIDTH)))

        def forward(self, x: Tensor) -> Tensor:
            seen.add(id(self.table))
            return self.net(x) * self.table

    net = models.of_modules(Table(), Table())
    net.spec.stages[1].fn.table = net.spec.stages[0].fn.table
    with runner(net, 2, recompute="always", backend=backend) as run:
        run.step(**data())
        run.step(**data())
    assert seen == {id(net.spec.stages[0].fn.table)}


class LateBuffer(nn.Module):
    """Counts its forwards in a buffer that its first forward makes."""

    def __init__(self, declared: bool) -> None:
        super().__init__()
        if declared:
            self.register_buffer("count", None)

    def forward(self, x: Tensor) -> Tensor:
        if getattr(self, "count", None) is None:
            self.register_buffer("count", torch.zeros(()))
        self.count = self.count + 1
        return x * self.count


def test_a_buffer_that_the_first_forward_fills_is_recomputed_from_none() -> None:
    for recompute in ("never", "always"):
        torch.manual_seed(0)
        late = LateBuffer(declared=True)
        net = models.of_modules(nn.Linear(WIDTH, WIDTH), late, nn.Linear(WIDTH, WIDTH))
        assert pipec.check(copy.deepcopy(net), data(), devices=2, microbatches=4, recompute=recompute)
        with runner(net, 2, recompute=recompute) as run:
            run.step(**data())
        assert late.count == 4


def test_a_buffer_that_a_forward_registers_cannot_be_recomputed() -> None:
    net = models.of_modules(nn.Linear(WIDTH, WIDTH), LateBuffer(declared=False))
    with runner(net, 2, recompute="always") as run, pytest.raises(pipec.RunError, match=r"'b'.*'count'"):
        run.step(**data())


def test_a_part_that_is_exchanged_between_steps_is_seen_by_recompute() -> None:
    first = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH))
    with runner(models.of_modules(first, nn.Identity()), 2, recompute="always") as run:
        run.step(**data())
        first[1] = nn.BatchNorm1d(WIDTH)
        run.step(**data())
    assert first[1].num_batches_tracked == 4
