"""Parameters as users treat them: frozen, adapted, reparametrised, hooked, compiled."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

import pipec

Wrap = Callable[[nn.Module], nn.Module]


def net(first: nn.Module, second: nn.Module) -> pipec.Pipeline:
    made = pipec.Pipeline("net")
    x, y = made.input("x"), made.input("y")
    made.loss("mse", F.mse_loss, made.stage("second", second, made.stage("first", first, x)), y)
    return made


def blocks() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 6), nn.Tanh()), nn.Sequential(nn.Linear(6, 6), nn.Sigmoid(), nn.Linear(6, 6))


def batch() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {name: torch.randn(8, 6, generator=generator) for name in ("x", "y")}


def gradients(made: pipec.Pipeline) -> list[torch.Tensor | None]:
    return [p.grad for stage in made.spec.stages for p in stage.fn.parameters()]  # type: ignore[union-attr]


def equal(mine: list[Any], theirs: list[Any]) -> bool:
    return len(mine) == len(theirs) and all(
        (a is None and b is None) or torch.equal(a, b) for a, b in zip(mine, theirs, strict=True)
    )


def reparametrised(module: nn.Module) -> nn.Module:
    parametrizations.weight_norm(module[0])  # type: ignore[index]
    return module


def spectral(module: nn.Module) -> nn.Module:
    parametrizations.spectral_norm(module[0])  # type: ignore[index]
    return module


def orthogonal(module: nn.Module) -> nn.Module:
    parametrizations.orthogonal(module[0])  # type: ignore[index]
    return module


def compiled(module: nn.Module) -> nn.Module:
    return torch.compile(module, backend="eager")  # type: ignore[return-value]


def inner_compiled(module: nn.Module) -> nn.Module:
    module[0] = torch.compile(module[0], backend="eager")  # type: ignore[index, operator]
    return module


@pytest.mark.parametrize("recompute", ["never", "always"])
@pytest.mark.parametrize("wrap", [reparametrised, spectral, orthogonal, compiled, inner_compiled])
def test_reparametrised_and_compiled_stages_are_bit_equal_to_the_reference(wrap: Wrap, recompute: str) -> None:
    first, second = blocks()
    mine = net(wrap(first), wrap(second))
    other_first, other_second = blocks()
    theirs = net(wrap(other_first), wrap(other_second))
    loop = pipec.reference(theirs, 4)
    with pipec.Runner(mine, pipec.compile(mine, 2, 4, recompute=recompute), backend="threads") as run:
        for rows in (8, 8, 6):  # a first call on two threads at once, and another shape
            data = {name: value[:rows] for name, value in batch().items()}
            assert torch.equal(run.step(**data).loss, loop.step(**data).loss)
    assert equal(gradients(mine), gradients(theirs))
    assert equal([b for s in mine.spec.stages for b in s.fn.buffers()],  # type: ignore[union-attr]
                 [b for s in theirs.spec.stages for b in s.fn.buffers()])  # type: ignore[union-attr]


class Adapted(nn.Module):
    """A frozen layer and a low-rank adapter beside it."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down, self.up = nn.Linear(6, 2, bias=False), nn.Linear(2, 6, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))


def test_adapters_train_and_what_is_frozen_gets_no_gradient() -> None:
    torch.manual_seed(0)
    mine = net(Adapted(nn.Linear(6, 6)), Adapted(nn.Linear(6, 6)))
    theirs = copy.deepcopy(mine)
    pipec.reference(theirs, 4).step(**batch())
    with pipec.Runner(mine, pipec.compile(mine, 2, 4)) as run:
        run.step(**batch())
    assert equal(gradients(mine), gradients(theirs))
    assert [g is None for g in gradients(mine)] == [True, True, False, False] * 2


def test_freezing_between_steps_is_followed() -> None:
    first, second = blocks()
    made = net(first, second)
    with pipec.Runner(made, pipec.compile(made, 2, 2)) as run:
        first.requires_grad_(False)
        run.step(**batch())
        assert [g is None for g in gradients(made)] == [True, True, False, False, False, False]
        first.requires_grad_(True)
        run.step(**batch())
        assert not any(g is None for g in gradients(made))


def test_a_hook_on_a_parameter_changes_its_gradient_in_every_microbatch() -> None:
    first, second = blocks()
    mine = net(first, second)
    theirs = copy.deepcopy(mine)
    for made in (mine, theirs):
        weight = made.spec.stages[0].fn[0].weight  # type: ignore[index]
        weight.register_hook(lambda gradient: gradient * 2)
    pipec.reference(theirs, 4).step(**batch())
    with pipec.Runner(mine, pipec.compile(mine, 2, 4)) as run:
        run.step(**batch())
    assert equal(gradients(mine), gradients(theirs))


def wide() -> tuple[nn.Module, nn.Module]:
    """Stages large enough that autograd adds to ``.grad`` itself."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 300), nn.Linear(300, 300)), nn.Sequential(nn.Linear(300, 300), nn.Linear(300, 6))


@pytest.mark.parametrize("recompute", ["never", "always"])
@pytest.mark.parametrize("backend", ["threads", "replay"])
def test_large_stages_are_bit_equal_to_the_reference_over_steps(backend: str, recompute: str) -> None:
    mine = net(*wide())
    theirs = copy.deepcopy(mine)
    loop = pipec.reference(theirs, 4)
    with pipec.Runner(mine, pipec.compile(mine, 2, 4, recompute=recompute), backend=backend) as run:
        for _ in range(3):
            assert torch.equal(run.step(**batch()).loss, loop.step(**batch()).loss)
    assert equal(gradients(mine), gradients(theirs))


@pytest.mark.parametrize("blocks_of", [blocks, wide])
def test_a_post_accumulate_hook_runs_once_when_the_step_has_its_gradient(blocks_of: Any) -> None:
    mine = net(*blocks_of())
    theirs = copy.deepcopy(mine)
    calls: list[torch.Tensor] = []

    def hook(parameter: torch.Tensor) -> None:
        calls.append(parameter)
        assert parameter.grad is not None
        parameter.grad.mul_(0.5)

    for made in (mine, theirs):
        made.spec.stages[0].fn[0].weight.register_post_accumulate_grad_hook(hook)  # type: ignore[index]
    pipec.reference(theirs, 4).step(**batch())
    with pipec.Runner(mine, pipec.compile(mine, 2, 4)) as run:
        run.step(**batch())
    assert len(calls) == 2
    assert equal(gradients(mine), gradients(theirs))


@pytest.mark.parametrize("backend", ["threads", "replay"])
def test_an_optimizer_in_the_backward_trains_as_in_the_reference(backend: str) -> None:
    """One optimizer per parameter, stepped by its hook: once a step, on the whole gradient, in one order."""
    mine = net(*blocks())
    theirs = copy.deepcopy(mine)
    calls: dict[bool, list[int]] = {True: [], False: []}

    def equip(made: pipec.Pipeline, own: bool) -> None:
        for number, parameter in enumerate(made_parameters(made)):
            optimizer = torch.optim.Adam([parameter], lr=0.01)

            def hook(_: torch.Tensor, number: int = number, optimizer: Any = optimizer) -> None:
                calls[own].append(number)
                optimizer.step()
                optimizer.zero_grad()

            parameter.register_post_accumulate_grad_hook(hook)

    equip(mine, True)
    equip(theirs, False)
    loop = pipec.reference(theirs, 4)
    with pipec.Runner(mine, pipec.compile(mine, 2, 4), backend=backend) as run:
        for _ in range(3):
            run.step(**batch())
            loop.step(**batch())
    assert calls[True] == calls[False]
    assert len(calls[True]) == 3 * len(made_parameters(mine))
    assert equal([p.detach() for p in made_parameters(mine)], [p.detach() for p in made_parameters(theirs)])
    assert set(gradients(mine)) == {None}


def made_parameters(made: pipec.Pipeline) -> list[torch.Tensor]:
    return [p for stage in made.spec.stages for p in stage.fn.parameters()]  # type: ignore[union-attr]


def test_a_failing_post_accumulate_hook_says_what_it_is() -> None:
    made = net(*blocks())
    parameter = made_parameters(made)[0]

    def hook(_: torch.Tensor) -> None:
        raise LookupError("no optimizer")

    handle = parameter.register_post_accumulate_grad_hook(hook)
    with pipec.Runner(made, pipec.compile(made, 2, 4)) as run:
        with pytest.raises(LookupError) as caught:
            run.step(**batch())
        told = f"in a post-accumulate hook of a parameter of shape {tuple(parameter.shape)}, after the backwards"
        assert told in caught.value.__notes__[0]
        assert set(gradients(made)) == {None}
        handle.remove()
        run.step(**batch())


def test_module_hooks_run_for_every_microbatch() -> None:
    first, second = blocks()
    made = net(first, second)
    shapes: list[tuple[int, ...]] = []
    handle = second.register_forward_hook(lambda module, args, out: shapes.append(tuple(out.shape)))
    backward: list[int] = []
    second.register_full_backward_hook(lambda module, into, out: backward.append(len(out)))
    with pipec.Runner(made, pipec.compile(made, 2, 4)) as run:
        run.step(**batch())
    handle.remove()
    assert shapes == [(2, 6)] * 4
    assert backward == [1] * 4


def test_bfloat16_parameters_and_sparse_gradients() -> None:
    torch.manual_seed(0)

    def build() -> pipec.Pipeline:
        torch.manual_seed(0)
        made = pipec.Pipeline("tokens")
        ids, y = made.input("ids"), made.input("y")
        h = made.stage("embed", nn.Embedding(20, 8, sparse=True), ids)
        h = made.stage("body", nn.Linear(8, 4).bfloat16(), made.stage("cast", lambda v: v.bfloat16(), h))
        made.loss("ce", F.cross_entropy, h, y)
        return made

    mine, theirs = build(), build()
    data = {"ids": torch.randint(0, 20, (12,)), "y": torch.randint(0, 4, (12,))}
    loop = pipec.reference(theirs, 4)
    with pipec.Runner(mine, pipec.compile(mine, 3, 4)) as run:
        for _ in range(2):
            assert torch.equal(run.step(**data).loss, loop.step(**data).loss)
    embed = [made.spec.stages[0].fn.weight.grad for made in (mine, theirs)]  # type: ignore[union-attr]
    assert embed[0].is_sparse
    assert torch.equal(embed[0].to_dense(), embed[1].to_dense())
    body = [made.spec.stages[2].fn.weight.grad for made in (mine, theirs)]  # type: ignore[union-attr]
    assert torch.equal(body[0], body[1])
